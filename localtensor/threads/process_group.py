"""The c10d kernels of one simulation: a rank's call becomes its part in a rendezvous.

The ranks' tensors are read in the thread of the last rank to arrive; each rank writes its own results when it resumes.
Inputs of a call that returns its Work to the user are copied first, and watched until the Work is waited for.
"""

import functools
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from localtensor._util.call_sites import handled_exception, origin
from localtensor.collectives.argument_checks import Reads, check_message, check_rank_arguments, flat_tensors
from localtensor.collectives.c10d_table import SEND, CallArguments, CollectiveOp, completed_work
from localtensor.collectives.gloo_checks import check_like_gloo
from localtensor.collectives.rendezvous import Compute, Contribution, Group, Ticket, match_key
from localtensor.errors import CollectiveFailed
from localtensor.threads.buffer_watch import BufferWatch, storage_of
from localtensor.threads.replicas import REDUCING, ReplicaWatch
from localtensor.threads.simulation import Simulation
from localtensor.threads.works import RankWork


class Kernels:
    """The kernels of one simulation, which collectives/c10d_table.py puts in place."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.watches = [BufferWatch(simulation) for _ in range(simulation.ranks)]
        # By rank: C++ does not keep the Python side of a Work alive.
        self.held_works: list[dict[RankWork, None]] = [{} for _ in range(simulation.ranks)]
        self.completed_work = completed_work()
        self.replicas: ReplicaWatch | None = None
        self.profiling: set[int] = set()  # the ranks whose profiles have events of their calls
        self._in_flight: set[Ticket] = set()  # those whose buffers are watched
        self._written: dict[int, int] = {}  # meanwhile: the storages that got results, each with its last rank

    def _contribution(
        self, op: CollectiveOp, call: CallArguments, rank: int, group: Group
    ) -> tuple[Contribution, bool]:
        """The rank's part in a collective, and whether its Work is returned to the user."""
        line, returns_work, implicit = origin(sys._getframe(2))
        compared = call.writes if op.compares_outputs else flat_tensors(call.reads)
        tensors = tuple([(x.dtype, x.shape) for x in compared])
        device = compared[0].device if compared else None
        root = None if call.root is None else group.ranks[call.root]
        has_gaps = op.in_place and not all(x.is_contiguous() for x in compared)
        layout = tuple(x.stride() for x in compared) if has_gaps else None
        key = match_key(op.kind.removesuffix("_coalesced"), tensors, device, call.op, root, op.must_match, layout)
        part = Contribution(
            rank,
            op.kind,
            group,
            call.reads,
            tensors,
            device,
            key,
            op=call.op,
            root=root,
            input_splits=call.input_splits,
            output_splits=call.output_splits,
            line=line,
            layout=layout,
            handling=handled_exception(),
            implicit=implicit,
        )
        _synchronize(device)
        return part, returns_work

    def collective(self, op: CollectiveOp, group: Group, arguments: Sequence[Any], *, asynchronous: bool) -> object:
        """Serve one collective op; returns its result and Work."""
        simulation = self.simulation
        rank = simulation.enter()
        _count(group, rank, op.kind)
        if op.kind != "all_reduce" or not _is_one_dense(arguments[0]):  # of which gloo refuses none
            check_like_gloo(op.kind, arguments, group.ranks.index(rank), len(group.ranks))
        wire_op, call = op.read_call(arguments)
        check_rank_arguments(wire_op.kind, call, rank, group.ranks)
        if rank in self.profiling and op.kind != "monitored_barrier":
            _record_event(op.kind, call.reads)
        part, returns_work = self._contribution(wire_op, call, rank, group)
        if group.cut_off:
            group.check_connected(part)
        if simulation.faults is not None:
            simulation.faults.begin(part)
        returns_work = returns_work and asynchronous
        read = flat_tensors(call.reads) if returns_work else ()
        if returns_work:  # the user may write them before the others arrive
            part.inputs = _copied(call.reads)

        def deliver(results: Sequence[Tensor]) -> None:
            self._write(part, call.writes, _for_each_list(call.writes, results))

        ticket = simulation.contribute(part, _without_autocast(wire_op.compute), deliver, returns_work=returns_work)
        if not asynchronous:
            simulation.wait(ticket, part.time_limit(call.timeout, everyone=call.everyone))
            self.complete_before(ticket)
            return self._returned(op, arguments, self.completed_work)
        sends = part.kind == "broadcast" and rank == part.root
        work = self._new_work(rank, ticket, call.writes, read if returns_work else None, sends=sends)
        work.lists = call.lists
        simulation.pause()
        return self._returned(op, arguments, work.boxed())

    def complete_before(self, barrier: Ticket) -> None:
        """Complete the rank's earlier calls in the group of a barrier, for which gloo's barrier waits."""
        part = barrier.part
        if part.kind == "barrier":
            for work in list(self.held_works[part.rank]):
                if work.is_before(part):
                    work.complete()

    def _new_work(
        self, rank: int, ticket: Ticket, writes: Sequence[Tensor], read: Sequence[Tensor] | None, *, sends: bool = False
    ) -> RankWork:
        """A new Work; if `read` is not None, the buffers are watched until it is waited for.

        With `sends` the outputs are only sent, as by the root of a broadcast, and may be read meanwhile.
        """
        work = RankWork(self.simulation, ticket, writes)
        self.held_works[rank][work] = None
        watch = self.watches[rank]
        if read is not None and self.simulation.run_token.here() == rank:  # a watch belongs to one thread
            read = [x for x in read if x.layout == torch.strided]  # a sparse tensor has no memory of its own
            outputs = [] if sends else [x for x in writes if x.layout == torch.strided]
            written = {id(x) for x in outputs}
            self._in_flight.add(ticket)
            watch.begin(ticket, [x for x in read if id(x) not in written], outputs)

        # C++ hangs when the Python side is gone, and a functional collective waits once for each output.
        functional = read is None or sys._getframe(3).f_code.co_filename == torch._ops.__file__
        work.waits_left = max(len(writes), 1) if functional else 1
        work.release = functools.partial(self.held_works[rank].pop, work, None)
        work.on_wait = functools.partial(self._end_watch, rank, ticket)
        return work

    def _end_watch(self, rank: int, ticket: Ticket) -> None:
        self.watches[rank].end(ticket, written_by_peer=lambda x: self._written.get(storage_of(x), rank) != rank)
        self._in_flight.discard(ticket)
        if not self._in_flight:
            self._written.clear()

    def leave(self, rank: int) -> None:
        """Remove an ended rank's Works from torch's registry of functional collectives; what it returns may be their outputs."""
        self.watches[rank].close()
        self._in_flight = {ticket for ticket in self._in_flight if ticket.part.rank != rank}
        for work in list(self.held_works[rank]):
            work.abandon()
            for output in work.outputs:
                torch.ops._c10d_functional.wait_tensor(output)
        self.held_works[rank].clear()

    def _write(self, part: Contribution, buffers: Sequence[Tensor], results: Sequence[Tensor]) -> None:
        """Write results to buffers unseen by autograd and modes, as a real backend does."""
        if not buffers:
            return
        if self._in_flight:
            self._written.update((storage_of(x), part.rank) for x in buffers if x.layout == torch.strided)
        with (
            torch._C._AutoDispatchBelowADInplaceOrView(),
            torch._C._DisableTorchDispatch(),
            torch._C.DisableTorchFunction(),
        ):
            for index, (buffer, result) in enumerate(zip(buffers, results)):
                if buffer.numel() != result.numel() or buffer.dtype != result.dtype:
                    got, want = f"{tuple(buffer.shape)} of {buffer.dtype}", f"{tuple(result.shape)} of {result.dtype}"
                    detail = f"rank {part.rank} offers a buffer of shape {got} for a result of shape {want}"
                    calls = [part.call()]
                    if part.kind == "all_to_all":  # the result comes from one other rank
                        sender = part.group.ranks[index]
                        detail += f", which rank {sender} sends"
                        calls += [] if sender == part.rank else self.simulation.matching_calls(part, sender)
                    self.simulation.fail(CollectiveFailed(calls, detail))
                buffer.copy_(result if buffer.shape == result.shape else result.view(buffer.shape))
            _synchronize(buffers[0].device)
        if self.replicas is not None and self.replicas.stepping and part.kind in REDUCING:
            self.replicas.note(part, buffers)

    def _returned(self, op: CollectiveOp, arguments: Sequence[Any], work: object) -> object:
        if op.kind == "monitored_barrier":
            return None
        return work if op.returns is None else (arguments[op.returns], work)

    def message(self, name: str, group: Group, tensors: list[Tensor], peer: int | None, tag: int) -> object:
        """Post a send or receive; returns its Work."""
        simulation = self.simulation
        rank = simulation.enter()
        _count(group, rank, name)
        line, returns_work, _ = origin(sys._getframe(2))
        sends = name == SEND
        check_message("send" if sends else "recv", tensors, peer, tag, len(group.ranks))
        if rank in self.profiling:
            _record_event(name, tensors)
        inputs = [x.detach().clone() for x in tensors] if sends else None
        signature = tuple([(x.dtype, x.shape) for x in tensors])
        part = Contribution(
            rank, "send" if sends else "recv", group, inputs, signature, tensors[0].device, line=line, tag=tag
        )
        part.handling = handled_exception()
        _synchronize(part.device)
        part.peer = None if peer is None else group.ranks[peer]
        if group.cut_off:
            group.check_connected(part)
        if simulation.faults is not None:
            simulation.faults.begin(part)
        if sends:
            ticket = simulation.send(part)
        else:
            ticket = simulation.recv(part, lambda results: self._write(part, tensors, results))
        work = self._new_work(
            rank, ticket, [] if sends else tensors, (tensors if sends else []) if returns_work else None
        )
        simulation.pause()
        return work.boxed()


# The names of gloo's events, where they are not those of the calls.
_EVENTS = {
    "all_gather_into_tensor": "all_gather",
    "all_reduce_coalesced": "all_reduce",
    "all_to_all_single": "all_to_all",
    "reduce_scatter": "all_reduce",
    "reduce_scatter_tensor": "all_reduce",
    "recv_": "recv",
    "recv_any_source_": "recvAnySource",
}


def _record_event(kind: str, reads: Reads) -> None:
    """Put a call into the profile of its rank, under gloo's name; a list that is scattered makes an event of each item."""
    name, tensors = f"gloo:{_EVENTS.get(kind, kind)}", flat_tensors(reads)
    for inputs in [[x] for x in tensors] if kind == "reduce_scatter" else [tensors]:
        with torch._C._profiler._RecordFunctionFast(name, inputs):
            pass


_COUNTED_TWICE = frozenset({"monitored_barrier", "reduce_scatter"})  # gloo makes other calls of them


def _is_one_dense(tensors: Sequence[Tensor]) -> bool:
    return len(tensors) == 1 and tensors[0].layout == torch.strided


def _count(group: Group, rank: int, kind: str) -> None:
    group.calls_made[rank] = group.calls_made.get(rank, 0) + (2 if kind in _COUNTED_TWICE else 1)


def _for_each_list(buffers: Sequence[Tensor], results: Sequence[Tensor]) -> Sequence[Tensor]:
    """The results again for each list of outputs, of which a call with several tensors has several."""
    return [*results] * (len(buffers) // len(results)) if len(buffers) > len(results) > 0 else results


@functools.cache
def _without_autocast(compute: Compute) -> Compute:
    """`compute` in the tensors' own dtype and unseen by autograd, whichever rank arrives last."""

    def wrapped(parts: Sequence[Contribution]) -> Sequence[Any]:
        with torch._C._DisableAutocast(), torch.no_grad():
            results = compute(_to_one_device(parts))
        _synchronize(parts[0].device)
        return results

    return wrapped


def _synchronize(device: torch.device | None) -> None:
    """Wait for this rank's GPU stream: another rank reads the tensors next, on another stream."""
    if device is not None and device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _to_one_device(parts: Sequence[Contribution]) -> Sequence[Contribution]:
    """Move the inputs of ranks with a GPU each to the first rank's GPU; each rank copies its own result back."""
    devices = {part.device for part in parts if part.device is not None}
    if len(devices) > 1:
        for part in parts:
            part.inputs = _to_device(part.inputs, parts[0].device)
    return parts


def _to_device(reads: Reads, device: torch.device | None) -> Reads:
    return reads.to(device) if isinstance(reads, Tensor) else [_to_device(each, device) for each in reads]


def _copied(reads: Reads) -> Reads:
    return reads.detach().clone() if isinstance(reads, Tensor) else [_copied(each) for each in reads]
