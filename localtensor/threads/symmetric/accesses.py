"""The accesses to one buffer, exact to the byte, and which two of them race.

Two accesses race if they touch a common byte, one of them writes, and neither happens before the other.  An access is
kept until the same stream does the same to the same bytes again: whatever races with the earlier one then races with the
later one too.  And it is kept until all streams of the ranks that have the buffer know of it: then nothing races with it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

from localtensor._util.events import Place
from localtensor.threads.symmetric.order import Lane, Order

Line: TypeAlias = tuple[str, int, str] | None


class Footprint:
    """The bytes of a buffer that an access touches: runs of `run` bytes; `lo` is the first byte, `hi` the byte after the last.

    `starts` are the first bytes of the runs in ascending order, computed when they are needed.
    """

    __slots__ = ("_dims", "_listed", "_starts", "hi", "lo", "run")

    def __init__(self, lo: int, run: int, dims: Sequence[tuple[int, int]] = (), starts: Any = None) -> None:
        self.lo, self.run, self._dims, self._starts = lo, run, tuple(dims), starts
        self._listed = starts is not None
        self.hi = lo + sum((count - 1) * stride for count, stride in dims) + run
        if starts is not None:
            self.hi = int(starts[-1]) + run

    @property
    def dense(self) -> bool:
        return not self._dims and not self._listed

    @property
    def starts(self) -> Any:
        if self._starts is None:
            starts = np.array([self.lo], np.int64)
            for count, stride in self._dims:
                starts = (starts[:, None] + np.arange(count, dtype=np.int64) * stride).reshape(-1)
            self._starts = np.unique(starts)
        return self._starts

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for equal bytes; of single elements, only for the same object."""
        if self._listed:
            return (id(self), self)
        return (self.lo, self.run, self._dims)

    def overlaps(self, other: "Footprint") -> bool:
        """Whether the two have a byte in common."""
        if self.lo >= other.hi or other.lo >= self.hi:
            return False
        if self.dense and other.dense:
            return True
        mine, theirs = self.starts, other.starts
        at = np.searchsorted(theirs, mine - other.run, side="right")
        inside = at < len(theirs)
        return bool(np.any(theirs[at[inside]] < mine[inside] + self.run))

    def common_range(self, other: "Footprint") -> tuple[int, int]:
        """The range of bytes that both span."""
        return max(self.lo, other.lo), min(self.hi, other.hi)

    def index(self) -> Any:
        """What selects these bytes in an array of bytes."""
        if self.dense:
            return slice(self.lo, self.hi)
        return np.unique(self.starts[:, None] + np.arange(self.run))


def footprint_of(x: torch.Tensor) -> Footprint | None:
    """The bytes of its storage that a strided tensor's elements occupy; None if it has no elements.

    >>> part = torch.zeros(4, 6)[:, 2:4]
    >>> found = footprint_of(part)
    >>> found.lo, found.hi, found.run, found.starts.tolist()
    (8, 88, 8, [8, 32, 56, 80])
    """
    size = x.element_size()
    if x.is_contiguous():
        count = x.numel()
        return Footprint(int(x.storage_offset()) * size, count * size) if count else None
    if not x.numel():
        return None
    dims = sorted(
        ((count, stride * size) for count, stride in zip(x.shape, x.stride()) if count > 1 and stride),
        key=lambda dim: dim[1],
    )
    run = size
    while dims and dims[0][1] == run:
        run *= dims.pop(0)[0]
    return Footprint(int(x.storage_offset()) * size, run, dims[::-1])


def footprint_of_elements(x: torch.Tensor, chosen: torch.Tensor) -> Footprint | None:
    """The bytes of some elements: `chosen` has the shape of `x` and is True for them."""
    positions = chosen.nonzero().to(torch.int64)
    if not len(positions):
        return None
    size = x.element_size()
    strides = torch.tensor(x.stride(), dtype=torch.int64, device="cpu")
    starts = np.unique(((positions * strides).sum(1).numpy() + int(x.storage_offset())) * size)
    return Footprint(int(starts[0]), size, starts=starts)


@dataclass(slots=True, eq=False)
class Access:
    """One access: by which stream of which rank, at which of its times, to which bytes, by which op in which line.

    `after` is the number of calls in the log of the run before it, `others` the times of the rank's other streams.
    """

    lane: Lane
    time: int
    writes: bool
    bytes: Footprint
    op: str
    line: Line
    after: int = 0
    others: tuple[tuple[Lane, int], ...] = ()

    @property
    def rank(self) -> int:
        return self.lane.rank

    @property
    def place(self) -> Place | None:
        return Place(*self.line) if self.line else None


FIRST_SWEEP = 256  # accesses that a buffer keeps before those known to all streams are removed


class Shadow:
    """What is known of one buffer: the accesses that a later one may race with, and which bytes have been written.

    `ranks` are those that have the buffer: its own, and those that have met it.
    """

    def __init__(self, size: int, order: Order, rank: int) -> None:
        self.ranks, self._size = {rank}, size
        self._order = order
        self._accesses: dict[int, dict[Any, Access]] = {}  # by stream, and by bytes and kind
        self._newest: dict[int, int] = {}  # by stream: the time of its latest access
        self._count, self._sweep_at = 0, FIRST_SWEEP
        self.forget_written()

    def forget_written(self) -> None:
        """No rank has written any byte."""
        self._written: Any = np.zeros(self._size, bool)  # None: all of it is written
        self._left = self._size  # bytes that no rank has written

    def add(self, access: Access) -> Access | None:
        """Keep the access; returns an earlier one that races with it, or None."""
        lane, mine, knows = access.lane, access.bytes, access.lane.clock.get
        own = self._accesses.setdefault(lane.number, {})
        key = (*mine.key, access.writes)
        latest = own.get(key)
        if latest is not None and latest.time == access.time:  # whatever could race has been compared with that one
            return None
        for number, others in self._accesses.items():
            known = knows(number, 0)
            if number == lane.number or self._newest[number] <= known:
                continue
            for earlier in others.values():
                if earlier.time > known and (access.writes or earlier.writes) and earlier.bytes.overlaps(mine):
                    return earlier
        self._count += latest is None
        own[key] = access
        self._newest[lane.number] = access.time
        if self._count > self._sweep_at:
            self._sweep()
        return None

    def _sweep(self) -> None:
        """Remove the accesses that happen before whatever follows."""
        known = self._order.known_to_all(self.ranks)
        for number, accesses in self._accesses.items():
            self._accesses[number] = {key: one for key, one in accesses.items() if known.get(number, 0) < one.time}
        self._count = sum(map(len, self._accesses.values()))
        self._sweep_at = max(FIRST_SWEEP, 2 * self._count)

    def mark_written(self, where: Footprint) -> None:
        if self._written is not None:
            self._left -= self.unwritten(where)[0]
            self._written[where.index()] = True
            if not self._left:
                self._written = None

    def unwritten(self, where: Footprint) -> tuple[int, int]:
        """How many of these bytes no rank has written, and how many there are."""
        if self._written is None:
            return 0, where.hi - where.lo
        part = self._written[where.index()]
        return int(part.size - part.sum()), int(part.size)


def ranges_text(where: Footprint) -> str:
    """The bytes in words, for a message.

    >>> ranges_text(Footprint(8, 16)), ranges_text(Footprint(8, 8, [(3, 24)]))
    ('bytes 8 to 23', 'bytes 8 to 63, 8 of every 24')
    """
    text = f"bytes {where.lo} to {where.hi - 1}"
    if where.dense:
        return text
    dims = where._dims
    if len(dims) == 1:
        return f"{text}, {where.run} of every {dims[0][1]}"
    return f"{text}, {len(where.starts) * where.run} of them"
