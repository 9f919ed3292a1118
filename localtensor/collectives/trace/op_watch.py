"""The ops of one rank: DTensor's with their placements, random draws, and what every op computes and allocates.

| part                                                                 | torch | tried on |
|----------------------------------------------------------------------|-------|----------|
| _C._get_dispatch_mode, _TorchDispatchModeKey.FAKE: fake tensors      | 2.13  | 2.13     |
| UntypedStorage._cdata: the identity of a storage                     | 2.13  | 2.13     |
| _C._autograd._get_sequence_nr, Node._sequence_nr, _C._current_autograd_node | 2.13 | 2.13 |
| utils.flop_counter.flop_registry: formulas by op                     | 2.13  | 2.13     |
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from localtensor._util.call_sites import place_of_frame
from localtensor._util.events import Place
from localtensor.collectives.trace.events import BACKWARD, FORWARD, OP, PASS, RANDOM, STEP, Layout
from localtensor.collectives.trace.lane import Lane
from localtensor.collectives.trace.memory import ACTIVATIONS, BUFFERS, OTHER, PARAMETERS, STATE
from localtensor.layout.links import Rates
from localtensor.layout.spec import shape_text

_FAKE = torch._C._TorchDispatchModeKey.FAKE
_PLAIN = (Tensor, nn.Parameter)
_COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "symm_mem")
Op = torch._ops.OpOverload
MOST_LINES = 1 << 17  # lines of forward ops that are kept for the backward pass


class _Traits(NamedTuple):
    """What is known of an op before its arguments."""

    communicates: bool
    views: bool  # its results are views: nothing is read, and nothing is allocated
    draws: bool
    flops: Callable[..., int] | None


@functools.cache
def _traits(func: Op) -> _Traits:
    returns = func._schema.returns
    views = bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
    draws = torch.Tag.nondeterministic_seeded in func.tags
    return _Traits(func.namespace in _COLLECTIVES, views, draws, flop_registry.get(func.overloadpacket))


class OpWatch(TorchDispatchMode):
    """Sees the ops that its thread runs; DTensor's own code runs below it, so that local ops are seen, too."""

    def __init__(self, lane: Lane, rates: Rates) -> None:
        super().__init__()
        self._lane, self._rates = lane, rates
        self._storages: dict[int, weakref.ref[Any]] = {}  # those that are alive
        self._lines: dict[int, Place | None] = {}  # of forward ops, by the number of their autograd nodes
        self._passes_on = False  # the op of a DTensor that comes next is the one that was just seen

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: otherwise torch imports its compiler at the first op, which takes a second, to skip this mode."""
        return False

    def __torch_dispatch__(self, func: Op, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch._C._get_dispatch_mode(_FAKE) is not None:
            return func(*args, **kwargs)
        if any(kind not in _PLAIN for kind in types):
            if not any(issubclass(kind, DTensor) for kind in types):
                return NotImplemented
            if self._passes_on:
                self._passes_on = False
                return NotImplemented
            return self._op_of_dtensors(func, args, kwargs)
        done = func(*args, **kwargs)
        self._ran(func, args, kwargs, done)
        return done

    def _op_of_dtensors(self, func: Op, args: Any, kwargs: Any) -> Any:
        place = self._line(sys._getframe(2))
        event = self._lane.begin(OP, str(func), place=place)
        event.facts["takes"] = tuple(Layout.of(x) for x in _tensors((args, kwargs)) if isinstance(x, DTensor))
        self._passes_on = True
        try:
            with self:
                done = func(*args, **kwargs)
        finally:
            self._passes_on = False
            self._lane.end(event)
        event.facts["gives"] = tuple(Layout.of(x) for x in _tensors(done) if isinstance(x, DTensor))
        return done

    def _line(self, frame: FrameType | None) -> Place | None:
        """The user's line of an op; of one in a backward pass, that of the forward op that it belongs to."""
        node = torch._C._current_autograd_node()
        if node is None:  # the node of this op, if it has one, is the youngest
            place = place_of_frame(frame)
            if len(self._lines) > MOST_LINES:
                self._lines.clear()
            self._lines[torch._C._autograd._get_sequence_nr() - 1] = place
            return place
        return self._lines.get(node._sequence_nr()) or place_of_frame(frame)

    def _ran(self, func: Op, args: Any, kwargs: Any, done: Any) -> None:
        traits, given, made = _traits(func), list(_tensors((args, kwargs))), list(_tensors(done))
        for x in (*given, *made):
            self.see(x)
        if traits.communicates:
            for x in (*given, *made):
                self.label(x, BUFFERS)
        elif not traits.views:
            self._count(traits, (args, kwargs, done), (*given, *made))
        if traits.draws:
            first = next(iter((*made, *given)), None)
            of = "" if first is None else shape_text(first.shape, first.dtype)
            self._lane.moment(RANDOM, str(func), facts={"of": of})

    def _count(self, traits: _Traits, call: tuple[Any, Any, Any], tensors: Sequence[Tensor]) -> None:
        nbytes = sum(x.numel() * x.element_size() for x in tensors if x.layout == torch.strided)
        flops = 0 if traits.flops is None else traits.flops(*call[0], **call[1], out_val=call[2])
        self._lane.busy += self._rates.seconds(flops, nbytes)

    def see(self, x: Tensor) -> None:
        """Holds the storage of a tensor from now on, until it is freed."""
        local = local_of(x)
        if local is None:
            return
        storage = local.untyped_storage()
        key, memory = storage._cdata, self._lane.memory
        if key in memory:
            if type(local) is nn.Parameter:
                memory.relabel(key, PARAMETERS)
            return
        lane = self._lane
        kind = (
            PARAMETERS
            if type(local) is nn.Parameter
            else STATE
            if lane.inside(STEP)
            else ACTIVATIONS
            if lane.inside(FORWARD, BACKWARD, PASS)
            else OTHER
        )
        memory.hold(key, storage.nbytes(), kind, lane.module)
        self._storages[key] = weakref.ref(storage, functools.partial(self._freed, key))

    def _freed(self, key: int, _: object) -> None:
        self._storages.pop(key, None)
        self._lane.memory.drop(key)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """A storage has another size now, as FSDP gives its unsharded parameters."""
        if storage._cdata in self._storages:
            self._lane.memory.hold(storage._cdata, storage.nbytes(), OTHER, self._lane.module)

    def label(self, x: Tensor, kind: str) -> None:
        """The storage of this tensor is of this kind."""
        local = local_of(x)
        if local is not None:
            self.see(local)
            self._lane.memory.relabel(local.untyped_storage()._cdata, kind)


def local_of(x: Tensor) -> Tensor | None:
    """The plain tensor that holds a tensor's elements; None for one without a storage of its own."""
    local = x._local_tensor if isinstance(x, DTensor) else x
    local = getattr(local, "elem", local)  # of a functional collective's result, which waits when it is read
    return local if type(local) in _PLAIN and local.layout == torch.strided else None


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in arguments or results, which torch nests in lists, tuples and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)
    elif isinstance(value, dict):
        for one in value.values():
            yield from _tensors(one)
