"""Records a run on rank threads: what the simulation reports, and what hooks see in torch while it runs.

Parts of torch that are replaced while a recording goes on; tests/localtensor/collectives/trace/test_recorder.py guards them:

| part                                                                            | torch | tried on |
|---------------------------------------------------------------------------------|-------|----------|
| tensor._dispatch.redistribute_local_tensor: an op's own tensors, so implicit    | 2.13  | 2.13     |
| tensor._redistribute.redistribute_local_tensor: written ones and their backward | 2.13  | 2.13     |
| tensor._api.redistribute_local_tensor: the gradient of from_local, so implicit  | 2.13  | 2.13     |
| torch.autograd._engine_run_backward: a backward pass                            | 2.13  | 2.13     |
| checkpoint.state_dict_saver._save_state_dict, torch.save: checkpoints           | 2.13  | 2.13     |
| UntypedStorage.resize_: FSDP frees unsharded parameters by it                   | 2.13  | 2.13     |
"""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import lru_cache
from typing import Any

import torch
import torch.distributed.checkpoint.state_dict_saver as checkpoint_saver
from torch import Tensor
from torch.distributed.tensor import _api, _dispatch, _redistribute
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from localtensor._util.call_sites import Fn, place_of_error, place_of_frame
from localtensor._util.events import Place
from localtensor._util.patching import wrapped
from localtensor.collectives.argument_checks import flat_tensors
from localtensor.collectives.rendezvous import Contribution, RunObserver, Ticket
from localtensor.collectives.trace import events
from localtensor.collectives.trace.events import Event, Recording, placements_text
from localtensor.collectives.trace.lane import Lane, Span
from localtensor.collectives.trace.memory import BUFFERS
from localtensor.collectives.trace.module_spans import ModuleSpans
from localtensor.collectives.trace.op_watch import OpWatch
from localtensor.collectives.trace.output import problem_text
from localtensor.errors.base import rank_names
from localtensor.layout.links import Rates
from localtensor.layout.spec import shape_text


class _Watched(threading.local):
    """What the calling thread's rank is recorded by; None in threads that are no rank's."""

    lane: Lane | None = None
    ops: OpWatch | None = None
    modules: ModuleSpans | None = None


class _Waiting:
    """A span around a wait, which is one of many: a class takes less time than a generator."""

    __slots__ = ("_calls", "_lane", "_part", "_ready", "_ticket", "_wait")

    def __init__(self, lane: Lane, ticket: Ticket, calls: dict[Contribution, Event]) -> None:
        self._lane, self._ticket, self._calls = lane, ticket, calls
        self._part, self._ready = ticket.part, ticket.done

    def __enter__(self) -> None:
        part = self._part
        self._wait = self._lane.begin(events.WAIT, f"wait for {part.kind}", part.place, part)

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        wait, call = self._wait, self._calls.get(self._part)
        self._lane.end(wait)
        if kind is not None:
            wait.note("unfinished", True)
            if not self._ticket.done:
                wait.note("for", rank_names(self._ticket.peers()))
            return
        if call is not None:
            wait.exchange, wait.late = call.exchange, call.late
        if self._ready:
            wait.note("ready", True)


class Recorder(RunObserver):
    """The recording of a run on rank threads, as `recording`.  `hooked()` is entered around the run.

    What the threads that a rank starts do is seen of calls and waits only.
    """

    def __init__(self, ranks: int, rates: Rates | None = None) -> None:
        self.recording = Recording(ranks, [f"rank {rank}" for rank in range(ranks)], busy=[0.0] * ranks)
        self._rates = rates or Rates()
        self._lanes = [Lane(self.recording, rank) for rank in range(ranks)]
        self._calls: dict[Contribution, Event] = {}  # whose last part has not come
        self._by_part: dict[Contribution, Event] = {}
        self._exchanges = 0
        self._watched = _Watched()

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Replaces the parts of torch inside the block, for all ranks; an error that leaves it ends the recording."""
        self.recording.began = time.perf_counter_ns()
        try:
            with ExitStack() as stack:
                for owner, around in (
                    (_dispatch, self._implicit), (_redistribute, self._written), (_api, self._of_gradient),
                ):  # fmt: skip
                    stack.enter_context(wrapped(owner, "redistribute_local_tensor", around))
                stack.enter_context(wrapped(torch.autograd, "_engine_run_backward", self._backward))
                stack.enter_context(wrapped(checkpoint_saver, "_save_state_dict", self._save))
                stack.enter_context(wrapped(torch, "save", self._save))
                stack.enter_context(wrapped(torch.UntypedStorage, "resize_", self._resize))
                stack.enter_context(self._collections())
                yield
        except BaseException as error:  # why: whatever ends the run is part of the recording; it is raised again
            self.recording.problem = problem_text(error)
            raise
        finally:
            self.recording.ended = time.perf_counter_ns()

    # -- what the simulation reports

    @contextmanager
    def around(self, rank: int) -> Iterator[None]:
        lane, watched = self._lanes[rank], self._watched
        watched.lane, watched.ops = lane, OpWatch(lane, self._rates)
        watched.modules = ModuleSpans(lane, watched.ops.label)
        try:
            with watched.modules.hooks(), watched.ops:
                yield
        finally:
            watched.lane = watched.ops = watched.modules = None
            lane.close()

    def posted(self, part: Contribution) -> None:
        lane = self._lanes[part.rank]
        event = lane.moment(events.CALL, part.kind, part.place, part)
        event.bytes = part.bytes
        self._calls[part] = self._by_part[part] = event
        if lane.stack:
            moved = lane.inside(*events.REDISTRIBUTIONS)
            if moved is not None:
                moved.bytes += event.bytes
        if part.inputs is not None and self._watched.ops is not None:
            for x in flat_tensors(part.inputs):
                self._watched.ops.label(x, BUFFERS)

    def met(self, parts: Sequence[Contribution]) -> None:
        found = [self._calls.pop(part) for part in parts if part in self._calls]
        last = max(found, key=lambda event: event.start, default=None)
        if last is None:
            return
        self._exchanges += 1
        for event in found:
            event.exchange, event.late = self._exchanges, last
        last.end, last.busy_end = time.perf_counter_ns(), last.busy_start

    def waiting(self, ticket: Ticket) -> _Waiting:
        return _Waiting(self._lanes[ticket.part.rank], ticket, self._by_part)

    def ended(self, rank: int, error: BaseException | None) -> None:
        if error is not None:
            event = self._lanes[rank].moment(events.ERROR, type(error).__name__, place_of_error(error))
            event.note("message", _message(error))

    # -- what torch does

    def _implicit(self, original: Fn, local: Tensor, source: DTensorSpec, target: DTensorSpec, **named: Any) -> Any:
        lane, ops = self._watched.lane, self._watched.ops
        if lane is None or (change := _change(source, target)) is None:
            return original(local, source, target, **named)
        op = lane.inside(events.OP)
        reason = "DTensor's own code" if op is None else f"{op.name} takes {change[1]}"
        place = place_of_frame(sys._getframe(2)) if op is None else op.place
        with _redistribution(lane, events.IMPLICIT, reason, place, local, source, change), ops or nullcontext():
            done = original(local, source, target, **named)
        if ops is not None:
            ops.moved[id(local)] = done
        return done

    def _of_gradient(self, original: Fn, local: Tensor, source: DTensorSpec, target: DTensorSpec, **named: Any) -> Any:
        lane, ops = self._watched.lane, self._watched.ops
        if lane is None or (change := _change(source, target)) is None:
            return original(local, source, target, **named)
        reason = f"DTensor.from_local takes its gradient as {change[1]}"
        place = place_of_frame(sys._getframe(2))
        with _redistribution(lane, events.IMPLICIT, reason, place, local, source, change), ops or nullcontext():
            return original(local, source, target, **named)

    def _written(self, original: Fn, local: Tensor, source: DTensorSpec, target: DTensorSpec, **named: Any) -> Any:
        lane = self._watched.lane
        if lane is None or (change := _change(source, target)) is None:
            return original(local, source, target, **named)
        reason = "written" if named.get("is_explicit", True) else "the backward of a written one"
        place = place_of_frame(sys._getframe(2))
        with _redistribution(lane, events.WRITTEN, reason, place, local, source, change):
            return original(local, source, target, **named)

    def _backward(self, original: Fn, *args: Any, **named: Any) -> Any:
        lane, modules = self._watched.lane, self._watched.modules
        if lane is None or modules is None:
            return original(*args, **named)
        with lane.span(events.PASS, "backward pass", place_of_frame(sys._getframe(2))):
            outer = modules.begin_backward()
            try:
                return original(*args, **named)
            finally:
                modules.end_backward(outer)

    def _save(self, original: Fn, *args: Any, **named: Any) -> Any:
        lane = self._watched.lane
        if lane is None or lane.inside(events.SAVE) is not None:  # a distributed checkpoint is saved by torch.save
            return original(*args, **named)
        name = "torch.save" if original.__name__ == "save" else "torch.distributed.checkpoint.save"
        with lane.span(events.SAVE, name, place_of_frame(sys._getframe(2))):
            return original(*args, **named)

    def _resize(self, original: Fn, storage: torch.UntypedStorage, *args: Any) -> Any:
        done = original(storage, *args)
        if self._watched.ops is not None:
            self._watched.ops.resized(storage)
        return done

    @contextmanager
    def _collections(self) -> Iterator[None]:
        """Spans of the garbage collections, in the lane of the rank in whose thread they run."""
        spans: list[Event] = []

        def collecting(phase: str, info: dict[str, int]) -> None:
            lane = self._watched.lane
            if lane is not None and phase == "start":
                spans.append(lane.begin(events.GC, f"generation {info['generation']}"))
            elif lane is not None and spans:
                spans[-1].note("collected", info["collected"])
                lane.end(spans.pop())

        gc.callbacks.append(collecting)
        try:
            yield
        finally:
            gc.callbacks.remove(collecting)


def _change(source: DTensorSpec, target: DTensorSpec) -> tuple[str, str] | None:
    """The placements before and after a redistribution; None if it does not change them.

    Most that do not have the same text, and torch's == of two kinds is slow.
    """
    if source.placements is target.placements:
        return None
    before, after = placements_text(source.placements), placements_text(target.placements)
    return (before, after) if before != after or source.placements != target.placements else None


def _redistribution(
    lane: Lane, kind: str, reason: str, place: Place | None, local: Tensor, source: DTensorSpec, change: tuple[str, str]
) -> Span:
    """The span of a redistribution of a spec by this change."""
    moved, spec = _moved_texts(change, source.mesh.mesh_dim_names, tuple(source.mesh.shape), source.shape, local.dtype)
    return lane.span(kind, moved, place, reason=reason, spec=spec)


@lru_cache(1 << 10)
def _moved_texts(
    change: tuple[str, str],
    names: tuple[str, ...] | None,
    sizes: tuple[int, ...],
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> tuple[str, str]:
    """A change of placements, by itself and of a tensor on a mesh: `S(0) -> R` and `f32[8] @ dp=2,tp=4: S(0) -> R`."""
    axes = ",".join(f"{name}={size}" for name, size in zip(names or [f"dim{i}" for i in range(len(sizes))], sizes))
    moved = f"{change[0]} -> {change[1]}"
    return moved, f"{shape_text(shape, dtype)} @ {axes}: {moved}"


def _message(error: BaseException) -> str:
    """The first lines of an exception's text."""
    try:
        return str(error)[:400]
    except Exception:  # why: an exception's own __str__ may raise anything
        return ""
