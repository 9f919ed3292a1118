"""What is known of an op before its arguments, and the operations that it computes.

| part                                                                         | torch | tried on |
|------------------------------------------------------------------------------|-------|----------|
| OpDispatcher._custom_op_handlers: ops that DTensor runs by code of their own | 2.13  | 2.13     |
| OpOverload._op: what a call of an op calls                                   | 2.13  | 2.13     |
| utils.flop_counter.flop_registry: formulas by op, and their __wrapped__ of shapes | 2.13 | 2.13  |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import flop_registry

from localtensor.collectives.c10d_table import WAITS

DETACH = torch.ops.aten.detach.default
_HAND_ON = (*WAITS, "_wrap_tensor_autograd")  # functional ops that give what a collective has given
_COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "symm_mem")
Op = torch._ops.OpOverload
MOST_SHAPES = 1 << 14  # of ops, whose operations are kept

_handlers = DTensor._op_dispatcher._custom_op_handlers


class Traits(NamedTuple):
    """What is known of an op before its arguments."""

    name: str
    communicates: bool
    makes: bool  # its results are new tensors: neither views nor what it writes
    views: bool  # nothing is read or written
    draws: bool
    handled: bool  # DTensor runs it by code of its own
    flops: Callable[..., int] | None
    simple: bool  # nothing but the bytes of its tensors counts
    # The op; for one of aten what OpOverload calls, since one more Python function takes longer.
    run: Callable[..., Any]


_handlers_known = [len(_handlers)]
known_traits: dict[int, Traits] = {}  # by the op's id, which stays: the hash of an op is computed in Python


def forget_handlers() -> None:
    """Forgets the traits of ops if DTensor has other handlers than when they were read."""
    if len(_handlers) != _handlers_known[0]:
        known_traits.clear()
        _handlers_known[0] = len(_handlers)


def traits_of_op(func: Op) -> Traits:
    """The traits of an op, cached."""
    found = known_traits.get(id(func))
    if found is None:
        found = known_traits[id(func)] = _read_traits(func)
    return found


def _read_traits(func: Op) -> Traits:
    returns = func._schema.returns
    views = bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
    makes = any(r.alias_info is None for r in returns)
    draws = torch.Tag.nondeterministic_seeded in func.tags
    flops = flop_registry.get(func.overloadpacket)
    flops = getattr(flops, "__wrapped__", None)  # what takes shapes, without torch's walk through the arguments
    views = views or (func.namespace == "_c10d_functional" and func.overloadpacket.__name__ in _HAND_ON)
    communicates = func.namespace in _COLLECTIVES
    run = func._op if type(func) is Op and func.namespace == "aten" else func
    simple = not (views or communicates or draws or flops is not None)
    return Traits(str(func), communicates, makes, views, draws, func in _handlers, flops, simple, run)


_flops_known: dict[tuple[Any, ...], int] = {}


def flops_of(traits: Traits, shapes: tuple[Any, ...], kwargs: Mapping[str, Any], out: object) -> int:
    """The operations of an op that has a formula, by the shapes of its arguments and results.

    Those of equal shapes are computed once: some formulas of torch call one that walks through trees.
    """
    if traits.flops is None:
        return 0
    if kwargs:
        return traits.flops(*shapes, **kwargs, out_shape=out)
    key = (traits.name, shapes, out)
    known = _flops_known.get(key)
    if known is None:
        if len(_flops_known) >= MOST_SHAPES:
            _flops_known.clear()
        known = _flops_known[key] = traits.flops(*shapes, out_shape=out)
    return known
