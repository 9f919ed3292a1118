"""DTensor's tracer of decompositions: one object for each propagator since torch 2.12, a class of static functions in 2.11.

And decompositions that are called without torch._dynamo, whose import takes a second; fake modes without the stacks of their makers;
checks of classes that look for no stand-ins.

| torch part (under torch.distributed.tensor)                               | read on     | run on     |
|-----------------------------------------------------------------------------|-------------|------------|
| ShardingPropagator.decomp_strategy: has_decomp, propagate_strategy,       | by feature  | 2.13       |
| _get_candidate_placements (set on a copy)                                 |             |            |
| without it, _decompositions.DecompShardingStrategy with the same names    | 2.11        | 2.11       |
| torch._C._dispatch_has_kernel_for_dispatch_key: composite, Autograd ...   | 2.11 - 2.15 | 2.13       |
| torch._compile._disable_dynamo asks getattr(function, "__dynamo_disable") | 2.11 - 2.15 | 2.13       |
| torch._subclasses.fake_tensor.traceback: extract_stack for each fake mode | by feature  | 2.13       |
| the metaclass of DeviceMesh and placements: `__instancecheck__`, and the  |             |            |
| base class of them all (none in 2.11)                                     | 2.11 - 2.15 | 2.13, 2.15 |

`tests/strategies/torch_api/test_decompositions.py` checks each part by name.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import _compile
from torch._subclasses import fake_tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor._decompositions import DecompShardingStrategy
from torch.distributed.tensor._op_schema import OpSchema

from localtensor._util.patching import replaced


class _StaticDecompositions:
    """The tracer of decompositions where its class has static functions, which take the propagator: torch 2.11.

    Its functions call one another by the name of the class, so that candidates of ours are set on the class.
    """

    def __init__(self, prop: Any) -> None:
        self.prop = prop
        self._get_candidate_placements = DecompShardingStrategy._get_candidate_placements

    def has_decomp(self, op: torch._ops.OpOverload) -> bool:
        """Whether DTensor traces the op; one with a composite kernel runs op by op there."""
        composite = torch._C.DispatchKey.CompositeImplicitAutograd
        whole = torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), composite)
        return not whole and DecompShardingStrategy.has_decomp(op)

    def propagate_strategy(self, schema: OpSchema) -> Any:
        with candidates_set(self.prop, self):
            return DecompShardingStrategy.propagate_strategy(schema, self.prop)  # type: ignore[arg-type]


_DIFFERENTIABLE = ("Autograd", "CompositeImplicitAutograd", "AutogradCPU", "AutogradCUDA")
"""Dispatch keys of kernels that define a gradient."""


def has_autograd_kernel(op: torch._ops.OpOverload) -> bool:
    """Whether the gradient of the op is defined.  Of an op that is registered for devices alone, autograd differentiates what its kernel
    calls, where that is Python, with a warning; DTensor's kernel calls nothing that it sees."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return any(has_kernel(op.name(), key) for key in _DIFFERENTIABLE)


def decompositions(prop: Any) -> Any:
    """What traces decompositions for this propagator: `has_decomp(op)`, `propagate_strategy(schema)`."""
    found = getattr(prop, "decomp_strategy", None)
    return _StaticDecompositions(prop) if found is None else found


def candidates_set(prop: Any, tracer: Any = None) -> AbstractContextManager[None]:
    """While active, the candidates of a copied tracer, by default that of `prop`, are those of the class, where it is static."""
    own = tracer or getattr(prop, "decomp_strategy", None)
    if not isinstance(own, _StaticDecompositions):
        return nullcontext()
    return replaced(DecompShardingStrategy, "_get_candidate_placements", staticmethod(own._get_candidate_placements))


def without_dynamo(*, many: bool = False) -> AbstractContextManager[None]:
    """While active, functions that torch keeps from being compiled are called without an import of torch._dynamo.

    Without it the first call of a decomposition, of a dispatch mode or of DTensor imports torch._dynamo, in order to switch
    it off.  Once anything else has imported it, torch switches it off as always: the first mode of fake tensors does, so for
    `many` calls in many forked workers it is imported here.
    """
    if many:
        importlib.import_module("torch._dynamo")
    return replaced(_compile, "getattr", _getattr)  # in front of the builtin, for the functions of that module alone


class _NoStack:
    """The module `traceback`, for fake modes: they only show in an error where each was made."""

    format_list = staticmethod(traceback.format_list)

    @staticmethod
    def extract_stack() -> list[traceback.FrameSummary]:
        return []


def without_stacks() -> AbstractContextManager[None]:
    """While active, fake modes do not note the stack on which they are made: DTensor makes one for each answer of a rule."""
    return replaced(fake_tensor, "traceback", _NoStack) if hasattr(fake_tensor, "traceback") else nullcontext()


@contextmanager
def plain_instance_checks() -> Iterator[None]:
    """While active, `isinstance` of placements and meshes is Python's own, except of their common base class.

    torch looks in each of these checks for a stand-in of graph capture, of which there is none here: in a sweep that took a
    tenth of the time.
    """
    meta: Any = type(DeviceMesh)
    check = None if meta is type else vars(meta).get("__instancecheck__")
    if check is None:
        yield
        return
    base: Any = [one for one in DeviceMesh.__mro__ if type(one) is meta][-1]
    base.__class__ = type(meta.__name__, (meta,), {"__instancecheck__": check})
    del meta.__instancecheck__
    try:
        yield
    finally:
        meta.__instancecheck__ = check
        base.__class__ = meta


def _getattr(owner: Any, name: str, *default: Any) -> Any:
    found = getattr(owner, name, *default)
    if name == "__dynamo_disable" and found is None and "torch._dynamo" not in sys.modules:
        return owner  # called as it is; the next call asks again
    return found
