"""Records a program in lockstep: one lane for all ranks, and the memory of each.

The lane has modules, ops of DTensor, redistributions, calls and draws.  What a rank holds is counted by the memory of each LocalTensor: a rank's
own bytes, whatever is stored once for many.  On the modelled clock a call is waited for where it is made.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils import _python_dispatch
from torch.utils._pytree import tree_leaves

from localtensor._util.call_sites import Args, Kwargs, place_of_frame
from localtensor._util.events import Place
from localtensor.collectives.rendezvous import Contribution, Group
from localtensor.collectives.trace import events
from localtensor.collectives.trace.chrome import write_chrome
from localtensor.collectives.trace.clock import modelled_events, set_clock
from localtensor.collectives.trace.events import Recording
from localtensor.collectives.trace.memory import BUFFERS, OTHER, PARAMETERS, MemoryOfRanks
from localtensor.collectives.trace.module_spans import ModuleSpans
from localtensor.collectives.trace.op_traits import DETACH, flops_of, traits_of_op
from localtensor.collectives.trace.op_watch import shape_of
from localtensor.collectives.trace.output import check_file, problem_text, trace_path, write_file
from localtensor.collectives.trace.recorder import Recorder
from localtensor.errors.base import rank_names
from localtensor.layout.links import Links, Rates
from localtensor.layout.spec import shape_text
from localtensor.lockstep.values.local_tensor import LocalTensor
from localtensor.lockstep.values.storage import Memory, memory_of

_FAKE = torch._C._TorchDispatchModeKey.FAKE


class LockstepRecorder(Recorder):
    """The recording of one mode, as `recording`; the file is written when the mode ends, also by an error."""

    def __init__(self, ranks: Sequence[int], trace: object) -> None:
        super().__init__(1)
        path = trace_path("LocalTensorMode", trace)
        if path is not None:
            check_file("LocalTensorMode", "trace", path)
        self._path, self._ranks, self._rates_of_rank = path, ranks, Rates()
        self.recording = Recording(1, [rank_names(ranks)], world=len(ranks), busy=[0.0])
        self._lane = self._lanes[0]
        self._lane.recording = self.recording
        self._memory = self._lane.memory = self.recording.held[0] = MemoryOfRanks(ranks[-1] + 1)
        self._alive: dict[int, weakref.ref[Memory]] = {}
        self.axes: dict[tuple[int, ...], str] = {}  # names of mesh axes by the ranks along them
        self._passes_on = False  # the op of a DTensor that comes next is the one that was just seen
        self._ops = 0  # how many have run: an op that runs others is not counted itself
        self._entered = ExitStack()

    def begin(self) -> None:
        """The mode begins."""
        modules = ModuleSpans(self._lane, self.label)
        self._watched.lane, self._watched.modules = self._lane, modules
        self._entered.enter_context(self.hooked())
        self._entered.enter_context(modules.hooks())

    def end(self, error: BaseException | None) -> None:
        """The mode ends, perhaps by an error.  Raises `CannotWrite`."""
        self._watched.lane = self._watched.modules = None
        self._lane.close()
        self.recording.peaks_of_world = [self._memory.peak_of(rank) for rank in self._ranks]
        if error is not None:
            self.ended(0, error)
            self.recording.problem = problem_text(error)
        self._entered.close()
        recording = self.recording
        set_clock(recording, Links())
        if self._path is not None:
            write_file(
                "LocalTensorMode", "trace", self._path,
                lambda file: write_chrome(recording, file, modelled_events(recording)),
            )  # fmt: skip

    @property
    def ops(self) -> int:
        """How many ops have run so far."""
        return self._ops

    def ran(self, func: torch._ops.OpOverload, args: Args, kwargs: Kwargs, done: Any, before: int) -> None:
        """An op has run on all ranks; `before` is `ops` as it was before it."""
        nested, self._ops = self._ops != before, self._ops + 1
        traits = traits_of_op(func)
        if traits.views:
            return
        made = [x for x in tree_leaves(done) if isinstance(x, LocalTensor)]
        if traits.makes:
            for x in made:
                self.see(x)
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if traits.communicates:
            for one in (*given, *made):
                self.label(one, BUFFERS)
        elif not nested:
            plain = all(type(size) is int for x in (*given, *made) for size in x.shape)
            flops = flops_of(traits, tuple(map(shape_of, args)), kwargs, shape_of(done)) if plain else 0
            nbytes = sum(int(np.max(_bytes_of_ranks(x, self._memory))) for x in (*given, *made))
            self._lane.busy += self._rates_of_rank.seconds(flops, nbytes)
        if traits.draws:
            first = next(iter((*made, *given)), None)
            of = "" if first is None else shape_text(_row_shape(first), first.dtype)
            self._lane.moment(events.RANDOM, traits.name).note("of", of)

    def mesh_made(self, mesh: DeviceMesh, ranks: np.ndarray[Any, Any]) -> None:
        """Notes which ranks lie along each axis of a mesh; `ranks` has shape [meshes, *mesh.shape].  The first name stays."""
        for axis, size in enumerate(ranks.shape[1:]):
            name = mesh.mesh_dim_names[axis] if mesh.mesh_dim_names else f"dim {axis}"
            for along in np.moveaxis(ranks, axis + 1, -1).reshape(-1, size) if size > 1 or ranks.ndim == 2 else ():
                self.axes.setdefault(tuple(along.tolist()), name)

    def takes_op(self, kind: type) -> bool:
        """Whether an op with an argument of this type is seen here: that of a DTensor, once, and not of shapes alone."""
        if self._passes_on:
            self._passes_on = False
            return False
        return issubclass(kind, DTensor) and torch._C._get_dispatch_mode(_FAKE) is None

    def op_of_dtensors(self, mode: Any, func: torch._ops.OpOverload, args: Args, kwargs: Kwargs) -> Any:
        """Runs an op on DTensors under the mode; its span has their placements.  `detach` has none, as on rank threads."""
        event = None
        if func is not DETACH:
            event = self._lane.begin_op(traits_of_op(func).name, place_of_frame(sys._getframe(2)))
            event.takes = self._lane.shared([x._spec for x in tree_leaves((args, kwargs)) if isinstance(x, DTensor)])
        self._passes_on = True
        _python_dispatch._push_mode(mode)
        try:
            done = func(*args, **kwargs)
        finally:
            _python_dispatch._pop_mode()
            self._passes_on = False
            if event is not None:
                self._lane.end_op(event)
        if event is not None:
            event.gives = self._lane.shared([x._spec for x in tree_leaves(done) if isinstance(x, DTensor)])
        return done

    def called(self, kind: str, reads: Sequence[Tensor], groups: Sequence[Sequence[int]], place: Place | None) -> None:
        """All ranks have made a collective, each in its group."""
        signature = tuple((x.dtype, torch.Size(map(int, _row_shape(x)))) for x in reads)
        group = Group("lockstep", tuple(map(int, groups[0])), axes=self.axes)
        part = Contribution(
            self._ranks[0],
            kind,
            group,
            None,
            signature,
            None,
            line=None if place is None else (place.file, place.line, place.function),
        )
        call = self._lane.moment(events.CALL, kind, place, part)
        moved = self._lane.inside(*events.REDISTRIBUTIONS)
        call.bytes = part.bytes
        if moved is not None:
            moved.bytes += part.bytes
            part.implicit = moved.kind == events.IMPLICIT
        self._exchanges += 1
        wait = self._lane.moment(events.WAIT, f"wait for {kind}", place, part)
        wait.note("ready", True)
        for event in (call, wait):
            event.exchange = self._exchanges
            event.rank = 0
        call.late = call

    def see(self, x: LocalTensor) -> None:
        """Holds the memory of a tensor from now on, until it and all its views are gone."""
        with torch._C._DisableTorchDispatch():
            memory = memory_of(x)
        key = id(memory)
        if key in self._alive or memory.outside:
            return
        kind = PARAMETERS if isinstance(x, nn.Parameter) else self._lane.makes
        self._memory.hold(key, _bytes_of_ranks(x, self._memory), kind, self._lane.module)
        self._alive[key] = weakref.ref(memory, functools.partial(self._freed, key))

    def label(self, x: Tensor, kind: str) -> None:
        """The memory of this tensor is of this kind."""
        local = getattr(x, "_local_tensor", x)
        local = getattr(local, "elem", local)
        if isinstance(local, LocalTensor):
            self.see(local)
            if local._memory is not None:
                self._memory.relabel(id(local._memory), kind)

    def resized(self, x: LocalTensor, *, freed: bool) -> None:
        """FSDP frees the memory of an unsharded parameter, or takes it again."""
        self.see(x)
        self._memory.hold(id(x._memory), 0 if freed else _bytes_of_ranks(x, self._memory), OTHER, self._lane.module)

    def _freed(self, key: int, _: object) -> None:
        self._alive.pop(key, None)
        self._memory.drop(key)


def _row_shape(x: Tensor) -> tuple[int, ...]:
    """The shape of a tensor on its first rank."""
    if not isinstance(x, LocalTensor):
        return tuple(x.shape)
    cell = x._cells[0]
    return tuple(cell.shape[1:] if x._partition.sizes[0] > 1 else cell.shape)


def _bytes_of_ranks(x: Tensor, memory: MemoryOfRanks) -> Any:
    """The bytes that each rank holds of a tensor: an int if all hold as many."""
    if not isinstance(x, LocalTensor):
        return x.numel() * x.element_size() if x.layout == torch.strided else 0
    held = x._partition
    rows = [cell.numel() * cell.element_size() // size for cell, size in zip(x._cells, held.sizes, strict=True)]
    if len(set(rows)) == 1 and held.complete:
        return rows[0]
    by_row = np.repeat(np.array(rows, np.int64), held.sizes)
    return np.where(held.row_of >= 0, by_row[held.row_of], 0)
