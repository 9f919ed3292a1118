"""The ops of one rank: DTensor's with their placements, random draws, and what every op computes and allocates.

| part                                                                 | torch | tried on |
|----------------------------------------------------------------------|-------|----------|
| _C._get_dispatch_mode, _TorchDispatchModeKey.FAKE: fake tensors      | 2.13  | 2.13     |
| OpDispatcher._custom_op_handlers: ops that DTensor runs by code of their own | 2.13 | 2.13 |
| UntypedStorage._cdata: the identity of a storage                     | 2.13  | 2.13     |
| _C._autograd._get_sequence_nr, Node._sequence_nr, _C._current_autograd_node | 2.13 | 2.13 |
| utils.flop_counter.flop_registry: formulas by op, and their __wrapped__ of shapes | 2.13 | 2.13 |
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter_ns
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from localtensor._util.call_sites import place_of_frame
from localtensor._util.events import Place
from localtensor.collectives.trace.events import RANDOM, Event, OpLog
from localtensor.collectives.trace.lane import Lane
from localtensor.collectives.trace.memory import BUFFERS, PARAMETERS
from localtensor.layout.links import Rates
from localtensor.layout.spec import shape_text

_FAKE = torch._C._TorchDispatchModeKey.FAKE
_get_mode = torch._C._get_dispatch_mode
_node, _sequence_nr = torch._C._current_autograd_node, torch._C._autograd._get_sequence_nr
_PLAIN = frozenset({Tensor, nn.Parameter})
_STRIDED = torch.strided
DETACH = torch.ops.aten.detach.default
_C10D = torch.ops._c10d_functional
_HAND_ON = _C10D.wait_tensor.default, _C10D._wrap_tensor_autograd.default  # they give what a collective has given
_COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "symm_mem")
Op = torch._ops.OpOverload
MOST_SHAPES = 1 << 14  # of ops, whose operations are kept
MOST_ALIKE = 1 << 11  # ops on DTensors of certain specs, of each rank: where specs are always new they are of no use
MOST_LINES = 1 << 17  # lines of forward ops that are kept for the backward pass

_handlers = DTensor._op_dispatcher._custom_op_handlers


class _Traits(NamedTuple):
    """What is known of an op before its arguments."""

    name: str
    communicates: bool
    makes: bool  # its results are new tensors: neither views nor what it writes
    views: bool  # nothing is read or written
    draws: bool
    handled: bool  # DTensor runs it by code of its own
    flops: Callable[..., int] | None


_handlers_known = [len(_handlers)]
_known: dict[int, _Traits] = {}  # by the op's id, which stays: the hash of an op is computed in Python


def traits_of_op(func: Op) -> _Traits:
    found = _known.get(id(func))
    if found is None:
        found = _known[id(func)] = _newtraits_of_op(func)
    return found


def _newtraits_of_op(func: Op) -> _Traits:
    returns = func._schema.returns
    views = bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
    makes = any(r.alias_info is None for r in returns)
    draws = torch.Tag.nondeterministic_seeded in func.tags
    flops = flop_registry.get(func.overloadpacket)
    flops = getattr(flops, "__wrapped__", None)  # what takes shapes, without torch's walk through the arguments
    views = views or func in _HAND_ON
    return _Traits(str(func), func.namespace in _COLLECTIVES, makes, views, draws, func in _handlers, flops)


_flops_known: dict[tuple[Any, ...], int] = {}


def flops_of(traits: _Traits, shapes: tuple[Any, ...], kwargs: Any, out: Any) -> int:
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


class _Alike:
    """What ops of one key have in common.  The specs stay alive, and with them their ids."""

    __slots__ = ("forms", "gives", "like", "makes", "seconds")

    def __init__(self, like: Event, makes: bool, seconds: float) -> None:
        self.like, self.makes, self.seconds = like, makes, seconds
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
        if len(_handlers) != _handlers_known[0]:  # some were added since the last run
            _known.clear()
            _handlers_known[0] = len(_handlers)
        memory: Any = lane.memory
        self._memory, self._freed, self._log = memory, memory.freed, memory.log
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
        """Runs an op; one on DTensors that has run before on the same specs is a row of the log.

        What is done for each such op stands here: a function for each part would take a tenth of a small step.
        """
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
            return func(*args)
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
        alike = None if kwargs else self._alike.get(tuple(key))
        if alike is None:
            return self._new_op(func, args, kwargs or {}, None if kwargs else tuple(key))
        lane, node = self._lane, _node()
        if node is None:  # as `_line`
            frame = sys._getframe(1)
            if len(self._lines) > MOST_LINES:
                self._lines.clear()
            known = self._places.get((id(frame.f_code), frame.f_lasti))
            place = self._lines[_sequence_nr() - 1] = self._place(frame) if known is None else known[0]
        else:
            place = self._lines.get(node._sequence_nr()) or self._line(sys._getframe(1))
        form, number = alike.forms.get((id(place), lane.module)) or alike.form(lane.recording.ops, place, lane.module)
        lane.op = op = (form, perf_counter_ns(), lane.busy)
        try:
            done = func(*args)
        except BaseException:  # why: whatever ends the op, its span ends there; it is raised again
            self._ended(lane.opened(op))
            raise
        if lane.op is not op or type(done) is not DTensor or done._spec is not alike.gives:
            return self._unlike(lane.opened(op), func, args, done)
        if alike.makes:
            self.see(done._local_tensor)
        now, lane.op = perf_counter_ns(), None
        lane.busy += alike.seconds
        if self._freed:
            self._memory.note_freed()
        self._times.extend((number, op[1], now, len(self._log)))
        self._busy.append(op[2])
        return done

    def _plain_op(self, func: Op, args: Any, kwargs: Any) -> Any:
        """Runs an op on plain tensors."""
        done = func(*args, **kwargs) if kwargs else func(*args)
        traits = _known.get(id(func)) or traits_of_op(func)
        if not traits.views:
            given = _tensors(args)
            if kwargs:
                given += _tensors(tuple(kwargs.values()))
            self._ran(traits, args, kwargs or {}, done, given, [done] if type(done) is Tensor else _tensors(done))
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
        lane, traits = self._lane, _known.get(id(func)) or traits_of_op(func)
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
        self._alike[key] = _Alike(event, traits.makes, seconds)
        return done

    def _ran_on(self, event: Event, traits: _Traits, args: Any, kwargs: Any, done: Any, given: list[Any]) -> float:
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

    def _ran(self, traits: _Traits, args: Any, kwargs: Any, done: Any, given: list[Any], made: list[Any]) -> float:
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
        self._memory.hold(local.untyped_storage(), self._lane.makes, self._lane.module)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """A storage has another size now, as FSDP gives its unsharded parameters."""
        self._memory.resized(storage)

    def label(self, x: Tensor, kind: str) -> None:
        """The storage of this tensor is of this kind."""
        local = local_of(x)
        if local is not None:
            self.see(local)
            self._memory.relabel(local.untyped_storage(), kind)


def local_of(x: Tensor) -> Tensor | None:
    """The plain tensor that holds a tensor's elements; None for one without a storage of its own."""
    local = x if type(x) in _PLAIN else x._local_tensor if isinstance(x, DTensor) else x
    local = local if type(local) in _PLAIN else getattr(local, "elem", local)  # of a functional collective's result
    return local if type(local) in _PLAIN and local.layout == torch.strided else None


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
