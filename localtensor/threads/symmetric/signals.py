"""Signal pads: words that one rank sets and another clears, and the signals and barriers made of them.

As in torch's CUDA kernels, a word of the receiver's pad belongs to each channel and sender.  `put_signal` waits until the
word is 0 and sets it; `wait_signal` waits until it is set and clears it.  A barrier puts to each peer, and waits for each.
So a signal that was put for one purpose can be taken for another: that is `PadReused`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from localtensor._util.events import Place, Wait
from localtensor.collectives.rendezvous import Contribution, Group, Ticket, TimeLimit
from localtensor.errors import ChannelsDiffer, LocalTensorError, NoSuchPeer, PadReused, SignalNotConsumed
from localtensor.threads.symmetric.accesses import Line
from localtensor.threads.symmetric.order import Clock, Lane

if TYPE_CHECKING:
    from localtensor.threads.symmetric.memory import Buffer, SymmetricMemory

WORD = 4  # bytes
BARRIER, PUT, WAIT = "barrier", "put_signal", "wait_signal"
# Since 2.15 torch's kernels that use a pad wait for the one before of the same rank and group, whatever its stream.
STREAMS_ORDERED = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 15)


@dataclass(slots=True, eq=False)
class Signal:
    """A word that a rank has set: for what, what happened before, and where."""

    rank: int
    call: str
    clock: Clock
    line: Line

    @property
    def place(self) -> Place | None:
        return Place(*self.line) if self.line else None


class Pad:
    """The signal pad of one buffer.

    A program may also read and write the words as a tensor.  Such an access is one of synchronization: a write publishes
    what the rank has done, and a read learns of what was published to its words.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.memory = torch.zeros(size, dtype=torch.uint8)
        self.words: Any = self.memory.numpy().view(np.uint32)
        self.signals: dict[int, Signal] = {}
        self.published: dict[int, Clock] = {}  # by word: what writes as a tensor, and takers, have published
        self.waiting: dict[int, list[Ticket]] = {}

    def write(self, lane: Lane, first: int, last: int, wake: Callable[[Ticket], None]) -> None:
        """The words from `first` to `last` are about to be written as a tensor."""
        clock = lane.publish()
        for word in range(first, last + 1):
            self.signals.pop(word, None)
            self.published[word] = clock
        for word in [word for word in self.waiting if first <= word <= last]:
            for ticket in self.waiting.pop(word):
                wake(ticket)

    def read(self, lane: Lane, first: int, last: int) -> None:
        """The words from `first` to `last` are about to be read as a tensor."""
        for word, clock in self.published.items():
            if first <= word <= last:
                lane.learn(clock)
        for word, signal in self.signals.items():
            if first <= word <= last:
                lane.learn(signal.clock)


@dataclass(slots=True, eq=False)
class _Blocked:
    """A rank that waits in a call on a channel."""

    meeting: "Meeting"
    call: str
    channel: int
    pad: Pad
    word: int
    place: Place | None


@dataclass(slots=True, eq=False)
class Meeting:
    """Buffers that the ranks of a group have exchanged by one rendezvous, in group order."""

    memory: "SymmetricMemory"
    group: Group
    buffers: "list[Buffer]"
    counts: dict[tuple[int, str], int] = field(default_factory=dict)  # calls so far, by rank and kind

    @property
    def group_clocks(self) -> dict[int, Clock]:
        """By rank: what its last call on a pad of this group has published, of whatever buffer."""
        return self.memory.group_clocks.setdefault(id(self.group), {})

    def check_channel(self, call: str, channel: int) -> None:
        """Raises `NoSuchPeer`."""
        most = len(self.buffers[0].pad.words) // len(self.buffers)
        if not 0 <= channel < most:
            problem = f"the maximum supported channel of this signal pad is {most - 1} for {len(self.buffers)} ranks"
            remedy = "Use one of them, or call symm_mem.set_signal_pad_size before the memory is allocated."
            raise NoSuchPeer(call, "channel", channel, problem, remedy)

    def check_peer(self, call: str, argument: str, peer: int) -> None:
        """Raises `NoSuchPeer`."""
        if not 0 <= peer < len(self.buffers):
            problem = f"it must be in [0, {len(self.buffers)}), the ranks of the group"
            raise NoSuchPeer(call, argument, peer, problem, "Name a rank by its number in the group.")

    def part(self, rank: int, call: str, channel: int, line: Line, peer: int | None = None) -> Contribution:
        """The call as it appears in the log and in the wait-for graph; `rank` and `peer` are global."""
        kind = f"symm_mem.{call}(channel={channel})"
        part = Contribution(rank, kind, self.group, None, (), None, line=line, peer=peer)
        part.number = self.counts.get((rank, kind), 0)
        self.counts[(rank, kind)] = part.number + 1
        self.memory.simulation.note(part)
        return part

    def put_signal(self, me: int, peer: int, channel: int, limit: TimeLimit | None, line: Line) -> None:
        """Set the word of this rank in the pad of `peer`, as soon as it is clear.  `me` and `peer` are group ranks."""
        part = self.part(self.group.ranks[me], PUT, channel, line, self.group.ranks[peer])
        with self._after_the_one_before(part.rank, PUT):
            self._put(part, me, peer, channel, PUT, limit)

    def wait_signal(self, me: int, peer: int, channel: int, limit: TimeLimit | None, line: Line) -> None:
        """Clear the word of `peer` in the pad of this rank, as soon as it is set."""
        part = self.part(self.group.ranks[me], WAIT, channel, line, self.group.ranks[peer])
        with self._after_the_one_before(part.rank, WAIT):
            self._take(part, me, peer, channel, WAIT, limit)

    def barrier(self, me: int, channel: int, limit: TimeLimit | None, line: Line) -> None:
        """Put a signal to each peer, then wait for one of each."""
        part = self.part(self.group.ranks[me], BARRIER, channel, line)
        peers = [peer for peer in range(len(self.buffers)) if peer != me]
        with self._after_the_one_before(part.rank, BARRIER):
            for peer in peers:
                self._put(part, me, peer, channel, BARRIER, limit)
            for peer in peers:
                self._take(part, me, peer, channel, BARRIER, limit)

    @contextmanager
    def _after_the_one_before(self, rank: int, call: str) -> Iterator[None]:
        """Inside the block of a call, where kernels order the streams of a group: what the last call published is known.

        All calls of the backend CUDA do, of NCCL only barriers, of NVSHMEM none.
        """
        backend = self.memory.backends.get(rank, "CUDA")
        ordered = STREAMS_ORDERED and (backend == "CUDA" or (backend == "NCCL" and call == BARRIER))
        if ordered and rank in self.group_clocks:
            self.memory.lane(rank).learn(self.group_clocks[rank])
        yield
        if ordered:
            self.group_clocks[rank] = self.memory.lane(rank).publish()

    def _put(self, part: Contribution, me: int, peer: int, channel: int, call: str, limit: TimeLimit | None) -> None:
        pad, word = self.buffers[peer].pad, channel * len(self.buffers) + me
        while pad.words[word]:
            self._block(part, call, channel, pad, word, lambda: (self.group.ranks[peer],), limit)
        lane = self.memory.lane(part.rank)
        if word in pad.published:
            lane.learn(pad.published[word])
        pad.words[word] = 1
        pad.signals[word] = Signal(part.rank, call, lane.publish(), part.line)
        self._wake(pad, word)

    def _take(self, part: Contribution, me: int, peer: int, channel: int, call: str, limit: TimeLimit | None) -> None:
        pad, first = self.buffers[me].pad, channel * len(self.buffers)
        word = first + peer

        def awaited() -> tuple[int, ...]:
            missing = [at for at in range(len(self.buffers)) if at != me and not pad.words[first + at]]
            return tuple(self.group.ranks[at] for at in (missing if call == BARRIER else [peer]))

        while not pad.words[word]:
            self._block(part, call, channel, pad, word, awaited, limit)
        lane, signal = self.memory.lane(part.rank), pad.signals.pop(word, None)
        if signal is not None and self._is_for_another(signal, call, peer):
            put, taken = (signal.rank, signal.call, signal.place), (part.rank, call, part.place)
            problem = f"it takes the signal that rank {signal.rank} has put by {signal.call}() for its own"
            if signal.rank != self.group.ranks[peer]:
                other = self.group.ranks[peer]
                problem = (
                    f"it waits for rank {other}, and takes the signal that rank {signal.rank} has put by {signal.call}()"
                    " in another group of the same memory, where that word is the other rank's"
                )
            self.memory.simulation.fail(PadReused(put, taken, channel, problem))
        if signal is not None:
            lane.learn(signal.clock)
        if word in pad.published:
            lane.learn(pad.published[word])
        pad.words[word] = 0
        if call != BARRIER:
            pad.published[word] = lane.publish()
        self._wake(pad, word)

    def _is_for_another(self, signal: Signal, call: str, peer: int) -> bool:
        """Whether a call of this meeting that waits for `peer` would take a signal that was not put for it."""
        mixed = BARRIER in (signal.call, call) and signal.call != call
        return mixed or signal.rank != self.group.ranks[peer]

    def _block(
        self,
        part: Contribution,
        call: str,
        channel: int,
        pad: Pad,
        word: int,
        peers: Callable[[], tuple[int, ...]],
        limit: TimeLimit | None,
    ) -> None:
        """Wait until the word may have changed."""
        ticket, blocked = Ticket(part, peers), self.memory.blocked
        pad.waiting.setdefault(word, []).append(ticket)
        blocked[part.rank] = _Blocked(self, call, channel, pad, word, part.place)
        self.memory.simulation.wait(ticket, limit)
        blocked.pop(part.rank, None)

    def _wake(self, pad: Pad, word: int) -> None:
        for ticket in pad.waiting.pop(word, ()):
            self.memory.simulation.wake(ticket)


def stuck_error(blocked: dict[int, _Blocked], waits: Sequence[Wait]) -> LocalTensorError | None:
    """The error of ranks that wait for signals that cannot come, where it is more than a deadlock; else None."""
    barriers: dict[int, dict[int, int]] = {}
    for rank, one in sorted(blocked.items()):
        if one.call == BARRIER:
            barriers.setdefault(id(one.meeting), {})[rank] = one.channel
    for channels in barriers.values():
        if len(set(channels.values())) > 1:
            places = {rank: blocked[rank].place for rank in channels}
            return ChannelsDiffer(BARRIER, [wait for wait in waits if wait.rank in channels], channels, places)
    for rank, one in sorted(blocked.items()):
        signal = one.pad.signals.get(one.word)
        if one.call != WAIT and signal is not None:
            put, taken = (signal.rank, signal.call, signal.place), (rank, one.call, one.place)
            problem = f"the signal of {signal.call}() before it has not been consumed, and rank {one.pad.rank} does not"
            return PadReused(put, taken, one.channel, f"{problem} wait for it", waits)
        if one.call == WAIT:
            size = len(one.meeting.buffers)
            for word, other in sorted(one.pad.signals.items()):
                if word % size == one.word % size and other.call == PUT:  # of the sender for which the rank waits
                    channels, places = {other.rank: word // size, rank: one.channel}, {other.rank: other.place}
                    mine = [wait for wait in waits if wait.rank == rank]
                    return ChannelsDiffer(WAIT, mine, channels, {**places, rank: one.place})
    return None


def unconsumed_error(meetings: Sequence[Meeting]) -> LocalTensorError | None:
    """The error of signals that no rank has waited for when all have ended, or None."""
    left = []
    for meeting in meetings:
        for peer, buffer in enumerate(meeting.buffers):
            for word, signal in sorted(buffer.pad.signals.items()):
                if signal.call == PUT and buffer.pad.words[word]:
                    receiver = meeting.group.ranks[peer]
                    left.append((signal.rank, receiver, word // len(meeting.buffers), signal.place))
    return SignalNotConsumed(list(dict.fromkeys(left))) if left else None
