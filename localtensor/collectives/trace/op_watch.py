"""The ops of one rank: DTensor's with their placements, random draws, and what every op computes and allocates.

| part                                                                 | torch | tried on |
|----------------------------------------------------------------------|-------|----------|
| _C._get_dispatch_mode, _TorchDispatchModeKey.FAKE: fake tensors      | 2.13  | 2.13     |
| UntypedStorage._cdata: the identity of a storage                     | 2.13  | 2.13     |
| _C._autograd._get_sequence_nr, Node._sequence_nr, _C._current_autograd_node | 2.13 | 2.13 |
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter_ns
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from localtensor._util.call_sites import place_of_frame
from localtensor._util.events import Place
from localtensor.collectives.trace.events import RANDOM, Event, OpLog
from localtensor.collectives.trace.lane import Lane
from localtensor.collectives.trace.memory import BUFFERS, PARAMETERS
from localtensor.collectives.trace.op_traits import (
    DETACH,
    Op,
    Traits,
    flops_of,
    forget_handlers,
    known_traits,
    traits_of_op,
)
from localtensor.layout.links import Rates
from localtensor.layout.spec import shape_text

_FAKE = torch._C._TorchDispatchModeKey.FAKE
_get_mode = torch._C._get_dispatch_mode
_node, _sequence_nr = torch._C._current_autograd_node, torch._C._autograd._get_sequence_nr
_PLAIN = frozenset({Tensor, nn.Parameter})
_STRIDED = torch.strided
_DETACH = DETACH._op
MOST_ALIKE = 1 << 11  # ops on DTensors of certain specs, of each rank: where specs are always new they are of no use
MOST_LINES = 1 << 17  # lines of forward ops that are kept for the backward pass


class _Alike:
    """What ops of one key have in common.  The specs stay alive, and with them their ids."""

    __slots__ = ("forms", "gives", "like", "makes", "run", "seconds")

    def __init__(self, like: Event, traits: Traits, seconds: float) -> None:
        self.like, self.makes, self.run, self.seconds = like, traits.makes, traits.run, seconds
        self.gives = like.gives[0]
        self.forms: dict[tuple[int, str], tuple[Event, int]] = {}  # by the line's id and the module

    def form(self, ops: OpLog, place: Place | None, module: str) -> tuple[Event, int]:
        """The form in the log of such ops at this line in this module, and its number; it keeps the line alive, and with it its id."""
        like = replace(self.like, place=place, module=module)
        number = ops.form(like, self.seconds)
        found = self.forms[id(place), module] = ops.forms[number], number
        return found


_CONSTANTS = frozenset({bool, int, float, type(None)})
_INTS = frozenset({int})


class OpWatch(TorchDispatchMode):
    """Sees the ops that its thread runs.

    Of an op on DTensors it sees no local op, since that would take as long as the op: the local op is the same, on what
    `moved` has of local tensors.  It sees those of DTensor's own handlers, which run several, and what redistributions run:
    for these it is entered again.  `detach` is no event: autograd calls it for each tensor that it saves or hands on, a fifth of
    a training step's ops, and it computes, moves and allocates nothing.
    """

    def __init__(self, lane: Lane, rates: Rates) -> None:
        super().__init__()
        self._lane = lane
        self._launch, self._flops, self._bytes = rates.launch, rates.flops, rates.bytes
        forget_handlers()
        memory: Any = lane.memory
        self._memory, self._hold, self._freed, self._log = memory, memory.hold, memory.freed, memory.log
        self._times, self._busy = lane.recording.ops.times, lane.recording.ops.busy
        self._passes_on = False  # the op of a DTensor that comes next is the one that was just seen
        self.moved: dict[int, Tensor] = {}  # by id, local tensors that the op has redistributed, and the results
        self._alike: dict[tuple[Any, ...], _Alike] = {}  # ops on DTensors that have run, by op, specs and constants
        self._places: dict[tuple[int, int], tuple[Place, CodeType]] = {}  # of the user's own frames
        self._same: dict[Place, Place] = {}
        self._lines: dict[int, Place | None] = {}  # of forward ops, by the number of their autograd nodes

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: otherwise torch imports its compiler at the first op, which takes a second, to skip this mode."""
        return False

    def __torch_dispatch__(self, func: Op, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        if _get_mode(_FAKE) is not None:
            return func(*args, **(kwargs or {}))
        for kind in types:
            if kind not in _PLAIN:
                break
        else:
            return self._plain_op(func, args, kwargs)
        if kind is not DTensor and not issubclass(kind, DTensor):
            return NotImplemented
        if self._passes_on:
            self._passes_on = False
            return NotImplemented
        if func is DETACH:
            return _DETACH(*args)
        key: list[Any] = [id(func)]
        for x in args:
            kind = type(x)
            if kind is DTensor:
                key.append(id(x._spec))
            elif kind in _CONSTANTS:
                key += (kind, x)  # 2 == 2.0
            elif kind is list and _INTS.issuperset(map(type, x)):
                key.append(tuple(x))
            else:
                return self._new_op(func, args, kwargs or {}, None)
        if kwargs:
            return self._new_op(func, args, kwargs, None)
        alike = self._alike.get(tuple(key))
        return self._new_op(func, args, {}, tuple(key)) if alike is None else self._known_op(func, args, alike)

    def _known_op(self, func: Op, args: Any, alike: _Alike) -> Any:
        """Runs an op on DTensors that has run before on the same specs: it becomes a row of the log.

        What is done for each such op stands here: a function for each part would take a tenth of a small step.
        """
        lane, node = self._lane, _node()
        if node is None:  # as `_line`
            frame = sys._getframe(2)
            if len(self._lines) > MOST_LINES:
                self._lines.clear()
            known = self._places.get((id(frame.f_code), frame.f_lasti))
            place = self._lines[_sequence_nr() - 1] = self._place(frame) if known is None else known[0]
        else:
            place = self._lines.get(node._sequence_nr()) or self._line(sys._getframe(2))
        form, number = alike.forms.get((id(place), lane.module)) or alike.form(lane.recording.ops, place, lane.module)
        lane.op = op = (form, perf_counter_ns(), lane.busy)
        try:
            done = alike.run(*args)
        except BaseException:  # why: whatever ends the op, its span ends there; it is raised again
            self._ended(lane.opened(op))
            raise
        if lane.op is not op or type(done) is not DTensor or done._spec is not alike.gives:
            return self._unlike(lane.opened(op), func, args, done)
        if alike.makes:
            local = done._local_tensor
            if type(local) is Tensor and local.layout is _STRIDED:
                self._hold(local.untyped_storage(), lane.makes, lane.module)
            else:
                self.see(local)
        now, lane.op = perf_counter_ns(), None
        lane.busy += alike.seconds
        if self._freed:
            self._memory.note_freed()
        self._times.extend((number, op[1], now, len(self._log)))
        self._busy.append(op[2])
        return done

    def _plain_op(self, func: Op, args: Any, kwargs: Any) -> Any:
        """Runs an op on plain tensors."""
        traits = known_traits.get(id(func)) or traits_of_op(func)
        done = traits.run(*args, **kwargs) if kwargs else traits.run(*args)
        if traits.views:
            return done
        if not traits.simple or type(done) is not Tensor:
            given = _tensors(args)
            if kwargs:
                given += _tensors(tuple(kwargs.values()))
            self._ran(traits, args, kwargs or {}, done, given, [done] if type(done) is Tensor else _tensors(done))
            return done
        nbytes, lane = done.nbytes, self._lane  # as `_ran`
        for x in (*args, *kwargs.values()) if kwargs else args:
            kind = type(x)
            if kind in _PLAIN:
                nbytes += x.nbytes
            elif kind is list or kind is tuple:
                for one in _tensors(x):
                    nbytes += one.nbytes
        lane.busy += self._launch + nbytes / self._bytes
        if traits.makes and done.layout is _STRIDED:
            self._hold(done.untyped_storage(), lane.makes, lane.module)
        return done

    def _unlike(self, event: Event, func: Op, args: Any, done: Any) -> Any:
        """An op of a known form has run that was asked for inside, or that gives what it did not give before."""
        try:
            self._ran_on(event, traits_of_op(func), args, {}, done, _tensors(args))
        finally:
            self._ended(event)
        return done

    def _new_op(self, func: Op, args: Any, kwargs: Any, key: tuple[Any, ...] | None) -> Any:
        """An op of which nothing is known, or that `key` does not tell from others if it is None."""
        lane, traits = self._lane, known_traits.get(id(func)) or traits_of_op(func)
        event = lane.begin_op(traits.name, self._line(sys._getframe(2)))
        try:
            given = _tensors(args)
            if kwargs:
                given += _tensors(tuple(kwargs.values()))
            event.takes = lane.shared([x._spec for x in given if type(x) is DTensor])
            if traits.handled:
                self._passes_on = True
                with self:
                    done = func(*args, **kwargs)
            else:
                done = func(*args, **kwargs)
            seconds, moved = self._ran_on(event, traits, args, kwargs, done, given), bool(self.moved)
        finally:
            self._ended(event)
        if key is None or moved or traits.handled or traits.draws or traits.communicates or type(done) is not DTensor:
            return done
        if len(self._alike) >= MOST_ALIKE:
            self._alike.clear()
        self._alike[key] = _Alike(event, traits, seconds)
        return done

    def _ran_on(self, event: Event, traits: Traits, args: Any, kwargs: Any, done: Any, given: list[Any]) -> float:
        """An op on DTensors has run with these tensors.  Returns its modelled seconds."""
        made, seconds = [done] if type(done) is DTensor else _tensors(done), 0.0
        if not (traits.handled or traits.views):
            seconds = self._ran(traits, args, kwargs, done, self._locals(given), self._locals(made))
        event.gives = self._lane.shared([x._spec for x in made if type(x) is DTensor])
        return seconds

    def _ended(self, event: Event) -> None:
        self._passes_on = False
        if self.moved:
            self.moved.clear()
        self._lane.end_op(event)

    def _locals(self, tensors: list[Any]) -> list[Any]:
        if self.moved:
            return [self._local(x) for x in tensors]
        return [x._local_tensor if type(x) is DTensor else x for x in tensors]

    def _local(self, x: Any) -> Any:
        """The tensor that the local op has had, or has given, for this one."""
        if type(x) is not DTensor:
            return x
        local = x._local_tensor
        return self.moved.get(id(local), local) if self.moved else local

    def _shape(self, value: Any) -> Any:
        """The shapes that the local op has had, or has given."""
        if type(value) in _PLAIN:
            return value.shape
        if isinstance(value, Tensor):
            return self._local(value).shape
        return tuple([self._shape(x) for x in value]) if type(value) in (tuple, list) else value

    def _line(self, frame: FrameType | None) -> Place | None:
        """The user's line of an op; of one in a backward pass, that of the forward op that it belongs to."""
        node = _node()
        if node is None:  # the node of this op, if it has one, is the youngest
            if len(self._lines) > MOST_LINES:
                self._lines.clear()
            place = self._lines[_sequence_nr() - 1] = self._place(frame)
            return place
        place = self._lines.get(node._sequence_nr())
        if place is None:
            place = place_of_frame(frame)
            place = place and self._same.setdefault(place, place)
        return place

    def _place(self, frame: FrameType | None) -> Place | None:
        """As `place_of_frame`, which is asked once for each place in a user's code."""
        if frame is None:
            return None
        code = frame.f_code
        known = self._places.get((id(code), frame.f_lasti))
        if known is None:
            place = place_of_frame(frame)
            if place is not None and place.file == code.co_filename and place.function == code.co_name:
                self._places[id(code), frame.f_lasti] = place, code  # the code stays alive, and with it its id
            return place
        return known[0]

    def _ran(self, traits: Traits, args: Any, kwargs: Any, done: Any, given: list[Any], made: list[Any]) -> float:
        """An op has run, no view, with these tensors among its arguments and results.  Returns its modelled seconds."""
        seconds = 0.0
        if traits.makes:
            for x in made:
                self.see(x)
        if traits.communicates:
            for x in (*given, *made):
                self.label(x, BUFFERS)
        else:
            nbytes = flops = 0
            for x in given:
                nbytes += x.nbytes
            for x in made:
                nbytes += x.nbytes
            if traits.flops is not None:
                if len(given) == len(args) and len(made) == 1:  # nothing but tensors
                    flops = flops_of(traits, tuple([x.shape for x in given]), kwargs, made[0].shape)
                else:
                    flops = flops_of(traits, tuple(map(self._shape, args)), kwargs, self._shape(done))
            seconds = self._launch + max(flops / self._flops, nbytes / self._bytes)  # as Rates.seconds
            self._lane.busy += seconds
        if traits.draws:
            first = next(iter((*made, *given)), None)
            of = "" if first is None else shape_text(first.shape, first.dtype)
            self._lane.moment(RANDOM, traits.name).note("of", of)
            for x in given:
                if type(x) is nn.Parameter:
                    self.label(x, PARAMETERS)
        return seconds

    def see(self, x: Tensor) -> None:
        """Holds the storage of a tensor from now on, until it is freed."""
        local = x if type(x) is Tensor else local_of(x)
        if local is None or local.layout is not _STRIDED:
            return
        self._hold(local.untyped_storage(), self._lane.makes, self._lane.module)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """A storage has another size now, as FSDP gives its unsharded parameters."""
        self._memory.resized(storage)

    def label(self, x: Tensor, kind: str) -> None:
        """The storage of this tensor is of this kind."""
        local = local_of(x)
        if local is not None:
            storage = local.untyped_storage()
            self._hold(storage, self._lane.makes, self._lane.module)
            self._memory.relabel(storage, kind)


def local_of(x: Tensor) -> Tensor | None:
    """The plain tensor that holds a tensor's elements; None for one without a storage of its own."""
    if type(x) in _PLAIN:
        return x if x.layout is _STRIDED else None
    local = x._local_tensor if isinstance(x, DTensor) else x
    local = local if type(local) in _PLAIN else getattr(local, "elem", local)  # of a functional collective's result
    return local if type(local) in _PLAIN and local.layout is _STRIDED else None


def shape_of(value: Any) -> Any:
    """The shape of a tensor, and of each in a list; any other value itself."""
    if isinstance(value, Tensor):
        return value.shape
    return tuple(map(shape_of, value)) if type(value) in (tuple, list) else value


def _tensors(value: Any) -> list[Tensor]:
    """The tensors in arguments or results, which torch nests in lists and tuples."""
    kind = type(value)
    if kind is tuple or kind is list:
        found = []
        for one in value:
            kind = type(one)
            if kind in _PLAIN or kind is DTensor:
                found.append(one)
            elif kind is tuple or kind is list:
                found += _tensors(one)
        return found
    return [value] if isinstance(value, Tensor) else []
