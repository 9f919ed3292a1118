"""The symmetric memory of one simulation: buffers of the ranks, what they have exchanged, and each access to them."""

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias
from weakref import ReferenceType, ref

import numpy as np
import torch
from torch.distributed import distributed_c10d as c10d

from localtensor._util.call_sites import origin
from localtensor._util.events import Wait
from localtensor.collectives.rendezvous import Contribution, Group, Rendezvous, Ticket, match_key
from localtensor.errors import LocalTensorError, NotSymmetric, ReadUnwritten, SymmetricRace
from localtensor.errors.symmetric import MemoryAccess
from localtensor.threads import rank_world
from localtensor.threads.simulation import Simulation
from localtensor.threads.symmetric.accesses import Access, Footprint, Line, Shadow, ranges_text
from localtensor.threads.symmetric.order import Clock, Lane, Order, join
from localtensor.threads.symmetric.signals import WORD, Meeting, Pad, stuck_error, unconsumed_error

UNWRITTEN = 0xFF  # each byte of new memory: NaN in every floating dtype, -1 in signed integers
MOST_READS, READS_IN_A_TURN = (
    1000,
    64,
)  # reads that a rank's loop may repeat: so many are kept, and other ranks run then
MOST_STREAMS = 7  # of a rank, beside its default one, whose times an access keeps
FROM_ROOT, TO_ROOT = frozenset({"broadcast", "scatter"}), frozenset({"reduce", "gather"})


class Buffer:
    """One rank's symmetric memory: its bytes, its accesses, its signal pad, and the handles made of it, by group name."""

    def __init__(self, number: int, rank: int, memory: torch.Tensor, pad: Pad, order: Order, line: Line) -> None:
        self.number, self.rank, self.memory, self.pad, self.line = number, rank, memory, pad, line
        self.size = memory.numel()
        self.shadow = Shadow(self.size, order, rank)
        self.group_name: str | None = None
        self.meetings: dict[str, Meeting] = {}

    def tensor(
        self,
        size: Sequence[int],
        stride: Sequence[int],
        dtype: torch.dtype,
        storage: torch.UntypedStorage | None = None,
    ) -> torch.Tensor:
        """A tensor from the first byte on, in this storage of the same memory."""
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            empty = torch.empty(0, dtype=dtype, device=self.memory.device)
            return empty.set_(storage or self.memory.untyped_storage(), 0, tuple(size), tuple(stride))

    def fits(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> bool:
        """Whether such a tensor takes all of it."""
        return span_of(size, stride) * dtype.itemsize == self.size

    def forget(self) -> None:
        """No byte has been written."""
        self.memory.fill_(UNWRITTEN)
        self.shadow.forget_written()

    def __str__(self) -> str:
        at = f", allocated at {self.line[0].rpartition('/')[2]}:{self.line[1]}" if self.line else ""
        return f"buffer {self.number} of rank {self.rank} ({self.size} bytes{at})"


def span_of(size: Sequence[int], stride: Sequence[int]) -> int:
    """From the first element of a tensor to its last, in elements.

    >>> span_of((2, 3), (4, 1)), span_of((0, 3), (3, 1))
    (7, 0)
    """
    return 1 + sum((count - 1) * step for count, step in zip(size, stride)) if all(size) else 0


Area: TypeAlias = Buffer | Pad


class Use(NamedTuple):
    """How an op uses one tensor: the bytes, whether it reads and writes them, and whether it only moves what it reads."""

    area: Area
    bytes: Footprint
    reads: bool
    writes: bool
    moves: bool = False


class SymmetricMemory:
    """The state of all ranks; only the rank that holds the run token may use it."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.order = Order(simulation.ranks)
        self.areas: dict[int, Area] = {}  # by storage
        self.blocked: dict[int, Any] = {}  # by rank: the signal for which it waits
        self.backends: dict[int, str] = {}  # by rank: what `set_backend` has set
        self.watches: dict[int, Any] = {}  # by thread: of the rank itself, whose number it has, and of its helpers
        self.pools: dict[int, Any] = {}  # by rank
        self.sharing: set[int] = set()  # the ranks that have used symmetric memory
        self.meetings: list[Meeting] = []
        self.group_clocks: dict[int, dict[int, Clock]] = {}  # by group: see `Meeting.group_clocks`
        self._in_flight: dict[int, set[Lane]] = {}  # by rank: where the call that it is about to make reads and writes
        self._counts: dict[int, int] = {}
        self._unwritten: list[tuple[Access, Buffer, int, int]] = []
        self._persistent: dict[tuple[int, int], tuple[Buffer, ReferenceType[torch.Tensor]]] = {}  # by rank and number
        self._reads: dict[int, dict[Any, int]] = {}  # by rank: its reads since it wrote last, and how often
        self._polls: dict[int, Ticket] = {}

    def lane(self, rank: int) -> Lane:
        """The current stream of the rank, which includes what the rank has waited for."""
        lane = self.order.hosts[rank].current
        lane.follow_host()
        return lane

    # Memory

    def allocate(
        self,
        rank: int,
        size: Sequence[int],
        stride: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        pad_size: int,
        alloc_id: int | None = None,
    ) -> torch.Tensor:
        """A new tensor of the rank in symmetric memory; with `alloc_id`, in the same memory as the one before.

        Raises RuntimeError, as torch does, if the tensor before is still in use or has another size.
        """
        size_in_bytes = span_of(size, stride) * dtype.itemsize
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            buffer = None if alloc_id is None else self._kept(rank, alloc_id, size_in_bytes)
            if buffer is None:
                on_gpu = device.type == "cuda" and torch.cuda.is_available()
                # From an array: such memory cannot be resized, as torch's cannot.
                raw = torch.from_numpy(np.full(size_in_bytes, UNWRITTEN, np.uint8))
                raw = raw.to(device) if on_gpu else raw
                number = self._counts[rank] = self._counts.get(rank, -1) + 1
                line = origin(sys._getframe(2)).line
                buffer = Buffer(number, rank, raw, Pad(rank, pad_size), self.order, line)
                for area in (buffer, buffer.pad):
                    self.areas[int(area.memory.untyped_storage()._cdata)] = area
            made = buffer.tensor(size, stride, dtype)
        if alloc_id is not None:
            self._persistent[(rank, alloc_id)] = buffer, ref(made)
        return made

    def _kept(self, rank: int, alloc_id: int, wanted: int) -> Buffer | None:
        """The memory that the rank has allocated with this number before, free again; None if it has not."""
        buffer, last = self._persistent.get((rank, alloc_id), (None, None))
        if buffer is not None and last is not None:
            call = f"empty_strided_p2p: alloc_id: {alloc_id} on rank {rank}"
            if last() is not None:
                raise RuntimeError(f"{call}: the tensor before is still active. Delete it, or use another number.")
            if buffer.size != wanted:
                raise RuntimeError(f"{call}: {wanted} bytes, and {buffer.size} bytes before. Use another number.")
        return buffer

    def buffer_of(self, tensor: torch.Tensor) -> Buffer | None:
        """The symmetric buffer in which the tensor lies, or None."""
        area = None
        if tensor.layout == torch.strided and not tensor.is_meta:
            area = self.areas.get(int(tensor.untyped_storage()._cdata))
        return area if isinstance(area, Buffer) else None

    def pad_of(self, tensor: torch.Tensor) -> Pad | None:
        """The signal pad in which the tensor lies, or None."""
        area = self.areas.get(int(tensor.untyped_storage()._cdata))
        return area if isinstance(area, Pad) else None

    def rendezvous(self, rank: int, tensor: torch.Tensor, group_name: str | None, line: Line) -> Meeting | None:
        """What the group exchanges for this tensor: a collective at the first call.  None for other memory."""
        buffer = self.buffer_of(tensor)
        if buffer is None:
            return None
        name = group_name or buffer.group_name
        if name is None:
            raise NotSymmetric("rendezvous", "group", "group=None", "no group was named when it was allocated")
        if name in buffer.meetings:
            return buffer.meetings[name]
        group = group_named(name)
        signature = ((torch.uint8, torch.Size((buffer.size,))),)
        kind = "symm_mem.rendezvous"
        key = match_key(kind, signature, None, None, None, "shapes")
        part = Contribution(rank, kind, group, buffer, signature, None, key, line=line)
        met: list[Meeting] = []
        ticket = self.simulation.contribute(part, self._meet, met.append, returns_work=False)
        self.simulation.wait(ticket)
        buffer.meetings[name] = met[0]
        return met[0]

    def _meet(self, parts: Sequence[Contribution]) -> Sequence[Any]:
        meeting = Meeting(self, parts[0].group, [part.inputs for part in parts])
        self.meetings.append(meeting)
        for buffer in meeting.buffers:
            buffer.shadow.ranks.update(meeting.group.ranks)
        return [meeting] * len(parts)

    # Accesses

    def touch(self, rank: int, op: str, uses: Sequence[Use], line: Line, *, in_flight: bool = False) -> None:
        """The rank is about to run an op on symmetric memory: a yield point, and the check for races.

        With `in_flight` it is a collective or message, which reads and writes until the rank has waited for it.
        """
        self.simulation.pause()
        lane = self.lane(rank)
        self._note_spin(rank, uses, line)
        for use in uses:
            if in_flight:
                lane = self.order.in_flight(rank, writes=use.writes)
                self._in_flight.setdefault(rank, set()).add(lane)
            if isinstance(use.area, Pad):
                first, last = use.bytes.lo // WORD, (use.bytes.hi - 1) // WORD
                if use.reads:
                    use.area.read(lane, first, last)
                if use.writes:
                    use.area.write(lane, first, last, self.simulation.wake)
            elif self.simulation.detects_races:
                self._check(lane, op, use, use.area, line)

    def _check(self, lane: Lane, op: str, use: Use, buffer: Buffer, line: Line) -> None:
        access = Access(lane, lane.time, use.writes, use.bytes, op, line, len(self.simulation.log))
        if lane is not lane.host.default or len(lane.host.lanes) > 1:
            some = (lane.host.default, *lane.host.lanes[-MOST_STREAMS:])
            access.others = tuple((one, one.time) for one in some if one is not lane)
        shadow = buffer.shadow
        if use.reads:
            missing, total = shadow.unwritten(use.bytes)
            if missing and (missing == total or not use.moves):
                self._unwritten.append((access, buffer, missing, total))
        earlier = shadow.add(access)
        if earlier is not None:
            common = earlier.bytes.common_range(access.bytes)
            past = _stream_past(earlier, access)
            self.simulation.fail(SymmetricRace(_shown(earlier), _shown(access), str(buffer), common, past))
        if use.writes:
            shadow.mark_written(use.bytes)

    def _note_spin(self, rank: int, uses: Sequence[Use], line: Line) -> None:
        """A rank that reads the same again and again polls: other ranks run first, so that the loop can end."""
        seen = self._reads.setdefault(rank, {})
        use = uses[0]
        key = (id(use.area), use.bytes.lo, use.bytes.hi, line)
        if use.writes or len(uses) > 1 or key not in seen:
            poll = self._polls.pop(rank, None)
            if poll is not None:
                poll.done = True
            if use.writes or len(uses) > 1 or len(seen) > MOST_READS:
                seen.clear()
            if not use.writes:
                seen[key] = 0
            self.simulation.note_progress()
        elif isinstance(use.area, Pad):
            self.simulation.poll(self._poll_of(rank, line))
        else:
            seen[key] += 1
            if not seen[key] % READS_IN_A_TURN:
                self.simulation.run_token.step_aside(self.simulation.run_token.here())

    def _poll_of(self, rank: int, line: Line) -> Ticket:
        """What a rank that polls a signal pad waits for."""
        if rank not in self._polls:
            others = tuple(other for other in range(self.simulation.ranks) if other != rank)
            part = Contribution(rank, "a loop that reads a signal pad", Group("all", others), None, (), None, line=line)
            part.number = 0
            self._polls[rank] = Ticket(part, lambda: others)
        return self._polls[rank]

    # Order

    def issued(self, ticket: Ticket) -> Clock:
        """What happens before the end of a call that its rank has just made, on all ranks that take part.

        They have what it reads, so it has been read.  What it writes is known to its own rank only, by the wait.
        """
        rank = ticket.part.rank
        clock = self.released(rank)
        for lane in self._in_flight.pop(rank, ()):
            own = lane.publish()
            ticket.in_flight = ticket.in_flight or {}
            join(ticket.in_flight, own)
            if lane is self.order.hosts[rank].in_flight.get(False):
                join(clock, own)
        return clock

    def released(self, rank: int) -> Clock:
        return self.order.release(rank)

    def acquired(self, rank: int, clock: Clock) -> None:
        self.order.acquire(rank, clock)

    def synchronize(self, rank: int) -> None:
        """The rank waits for its current stream, as for the value of `item()`."""
        self.order.acquire(rank, self.order.release(rank))

    def order_collective(self, rendezvous: Rendezvous, tickets: Sequence[Ticket]) -> None:
        """Let what happened before a collective happen before its end: on all ranks, or from or to its root only."""
        everything: Clock = {}
        for clock in rendezvous.clocks.values():
            join(everything, clock)
        for ticket in tickets:
            part = ticket.part
            if part.kind in FROM_ROOT and part.root in rendezvous.clocks:
                ticket.clock = rendezvous.clocks[part.root]
            elif part.kind in TO_ROOT and part.rank != part.root:
                ticket.clock = None
            else:
                ticket.clock = everything

    def wrote_store(self, store: Any) -> None:
        """The calling rank has written to a store."""
        join(vars(store).setdefault("clock", {}), self.released(self.simulation.rank()))

    def read_store(self, store: Any) -> None:
        """The calling rank has read from a store."""
        self.acquired(self.simulation.rank(), vars(store).get("clock", {}))

    # Ends

    def leave(self, rank: int, number: int) -> None:
        """The calling thread of the rank, which has this number, ends."""
        self.order.hosts[rank].end_thread()
        watch = self.watches.pop(number, None)
        if watch is not None:
            watch.end()

    def stuck_error(self, waits: Sequence[Wait]) -> LocalTensorError | None:
        """The error when some rank waits and none can run, if it is one of signals; else None."""
        return self._unwritten_error() or stuck_error(self.blocked, waits)

    def leftover_error(self, *, ended_well: bool) -> LocalTensorError | None:
        """The error when all ranks have ended: reads of what no rank has written, signals that no rank has consumed."""
        found = self._unwritten_error()
        return found or (unconsumed_error(self.meetings) if ended_well else None)

    def _unwritten_error(self) -> LocalTensorError | None:
        if not self._unwritten:
            return None
        access, buffer, missing, total = self._unwritten[0]
        return ReadUnwritten(_shown(access), str(buffer), missing, total)


def _stream_past(first: Access, second: Access) -> tuple[int, str] | None:
    """The stream by which two ranks are in order, where the streams of their accesses are not: its rank, its name."""
    if first.rank != second.rank:
        for lane, time in first.others:
            if second.lane.knows(lane.number, time):
                return first.rank, lane.name
        for lane in second.lane.host.lanes:
            if lane.knows(first.lane.number, first.time):
                return second.rank, lane.name
    return None


def _shown(access: Access) -> MemoryAccess:
    where = ranges_text(access.bytes)
    return MemoryAccess(access.rank, access.lane.name, access.writes, access.op, where, access.place, access.after)


def group_named(name: str) -> Group:
    """The simulated group of this name in the running rank's world."""
    world = rank_world.world_now()
    found = c10d._resolve_process_group(c10d.GroupName(name))
    if world is None or found not in world.groups:
        raise NotSymmetric("rendezvous", "group", f"group={name!r}", "the group is not one of this run")
    return world.groups[found]


def memory_of(simulation: Simulation) -> SymmetricMemory:
    """The symmetric memory of the simulation, made at the first call."""
    if simulation.memory is None:
        simulation.memory = SymmetricMemory(simulation)
    memory: SymmetricMemory = simulation.memory
    return memory
