"""The matching of the ranks' calls: collectives by their number on a group, messages by sender, receiver and tag.

The n-th collective that one rank calls on a group matches the n-th of each other member.  What must match is compared
before anything moves; if it does not, the rendezvous is broken, and the error shows every call that arrived.

A send is a rendezvous, as in gloo (its unbound buffers): it completes when its receive has been posted.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from math import prod
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch.distributed.constants import default_pg_timeout

from localtensor import errors
from localtensor._util.events import Call, Place, place_at
from localtensor.layout.spec import shape_text

K = TypeVar("K")
Line: TypeAlias = tuple[str, int, str] | None
Signature: TypeAlias = tuple[tuple[torch.dtype, torch.Size], ...]


NO_LIMIT = default_pg_timeout  # torch passes it where the program has given no time limit


class TimeLimit(NamedTuple):
    """The time limit of one wait.  With `closes`, gloo closes the rank's connections when it passes."""

    seconds: float
    closes: bool = False
    everyone: bool = False  # of a monitored barrier: names all ranks that are missing


@dataclass(slots=True, eq=False)
class Contribution:
    """One rank's part in a collective or message, cheap to construct; `call()` is its text form.

    `key` holds what must match on all ranks, in the order of `MATCHED_FIELDS`; `inputs` holds what the collective
    reads (tensors, or lists of them) until it is complete.
    """

    rank: int
    kind: str
    group: "Group"
    inputs: Any
    tensors: Signature
    device: torch.device | None
    key: tuple[Any, ...] = ()
    number: int = -1
    op: Any = None
    root: int | None = None
    peer: int | None = None
    tag: int | None = None
    input_splits: list[int] | None = None
    output_splits: list[int] | None = None
    line: Line = None
    handling: str | None = None
    layout: tuple[tuple[int, ...], ...] | None = None  # strides, of buffers that are not contiguous
    implicit: bool = False  # an op of DTensor makes the call, for its own tensors

    @property
    def bytes(self) -> int:
        total = 0
        for dtype, shape in self.tensors:  # a generator would take longer than the rest
            total += dtype.itemsize * prod(shape)
        return total

    @property
    def place(self) -> Place | None:
        return place_at(*self.line) if self.line else None

    def elements(self) -> list[tuple[torch.dtype, int]]:
        """What the two ends of a message have in common: dtypes and numbers of elements; the shape is not sent."""
        return [(dtype, prod(shape)) for dtype, shape in self.tensors]

    def time_limit(self, timeout: timedelta | None, *, everyone: bool = False) -> TimeLimit | None:
        """The time limit of a wait: the caller's own, else the group's.  None is the default, and torch's unset timeouts."""
        least = timedelta(0) if self.kind == "monitored_barrier" else timedelta(microseconds=1)
        if timeout is not None and least <= timeout != NO_LIMIT:
            return TimeLimit(timeout.total_seconds(), everyone=everyone)
        seconds = self.group.timeouts.get(self.rank)
        return None if seconds is None else TimeLimit(seconds, closes=True, everyone=everyone)

    def _texts(self) -> Iterator[str]:
        for i, (dtype, shape) in enumerate(self.tensors):
            yield shape_text(shape, dtype) + (f" strides {self.layout[i]}" if self.layout else "")

    def call(self) -> Call:
        return Call(
            rank=self.rank,
            kind=self.kind,
            group_name=self.group.name,
            group=self.group.ranks,
            number=self.number,
            tensors=tuple(self._texts()),
            bytes=self.bytes,
            device=None if self.device is None else str(self.device),
            op=None if self.op is None else str(self.op),
            root=self.root,
            peer=self.peer,
            tag=self.tag,
            input_splits=tuple(self.input_splits) if self.input_splits else None,
            output_splits=tuple(self.output_splits) if self.output_splits else None,
            place=self.place,
            handling=self.handling,
            axis=self.group.axis(),
            implicit=self.implicit,
        )


# What must match, and the error for a mismatch; the first field that differs decides.
MATCHED_FIELDS: tuple[tuple[str, type[errors.CollectiveMismatch]], ...] = (
    ("kind", errors.KindMismatch),
    ("number of tensors", errors.LengthMismatch),
    ("op", errors.ReduceOpMismatch),
    ("root", errors.RootMismatch),
    ("dtype", errors.DtypeMismatch),
    ("device", errors.DeviceMismatch),
    ("shape", errors.ShapeMismatch),
    ("layout", errors.LayoutMismatch),
)


def match_key(
    kind: str,
    tensors: Signature,
    device: torch.device | None,
    op: object,
    root: int | None,
    must_match: str,
    layout: tuple[tuple[int, ...], ...] | None = None,
) -> tuple[Any, ...]:
    """What all ranks' parts must have in common; `must_match` is "shapes", "dtypes" (of all tensors) or "dtype"."""
    dtypes = tuple([dtype for dtype, _ in tensors])
    return (
        kind,
        None if must_match == "dtype" else len(tensors),
        op,
        root,
        dtypes[:1] if must_match == "dtype" else dtypes,
        None if device is None else device.type,
        tuple([shape for _, shape in tensors]) if must_match == "shapes" else None,
        layout,
    )


@dataclass(slots=True, eq=False)
class Ticket:
    """One rank's claim on the result of a rendezvous or message: done once `result` is set, delivered when waited for."""

    part: Contribution
    peers: Callable[[], tuple[int, ...]]  # the ranks for which it still waits
    deliver: Callable[[Any], None] | None = None
    result: Any = None
    done: bool = False
    blocked: bool = False
    waited: bool = False
    thread: int = -1  # the number of the thread that is blocked
    ready: Callable[[], bool] | None = None  # of a lock or a sleep: whether it is over
    deadline: float | None = None  # of a blocked rank, in seconds of the simulated clock
    diagnosis: errors.LocalTensorError | None = None  # what it waited for when the deadline passed
    clock: dict[int, int] | None = None  # what happens before its end, where ranks share memory; of a send, before it
    in_flight: dict[int, int] | None = None  # the call's own reads and writes of shared memory, which end with its wait
    left: bool = False  # the rank has ended, and its result is delivered when it is there

    def hand_out(self) -> None:
        """Deliver the result, once."""
        deliver, self.deliver = self.deliver, None
        if deliver is not None:
            deliver(self.result)
            self.result = None


def _differ_in_dims_of_one(one: Contribution, other: Contribution) -> bool:
    """Whether tensors that differ in shape have one element each: `[]` and `[1]` are the same numbers in the same order."""
    pairs = zip(one.tensors, other.tensors, strict=True)
    return all(a == b or prod(a) == prod(b) == 1 for (_, a), (_, b) in pairs)


def _without_dims_of_one(reads: Any) -> Any:
    """Tensors, or lists of them, in which each tensor of one element has the shape `[1]`."""
    if isinstance(reads, torch.Tensor):
        return reads.reshape(1) if reads.numel() == 1 else reads
    return [_without_dims_of_one(each) for each in reads]


@dataclass(slots=True, eq=False)
class Rendezvous:
    """One collective of one group: the parts that have arrived and the tickets, by rank."""

    group: "Group"
    number: int
    parts: dict[int, Contribution] = field(default_factory=dict)
    tickets: dict[int, Ticket] = field(default_factory=dict)
    clocks: dict[int, dict[int, int]] = field(default_factory=dict)  # by rank: what has happened before its part
    broken: type[errors.CollectiveMismatch] | None = None
    reshaped: bool = False  # tensors of one element have different dims, which no backend sends

    def missing(self) -> tuple[int, ...]:
        return tuple(rank for rank in self.group.ranks if rank not in self.parts)

    def complete(self) -> bool:
        return len(self.parts) == len(self.group.ranks)

    def join(self, part: Contribution) -> Ticket:
        if self.parts and self.broken is None:
            first = next(iter(self.parts.values()))
            if first.key != part.key:
                differ = [kind for (_, kind), a, b in zip(MATCHED_FIELDS, first.key, part.key) if a != b]
                self.reshaped = differ == [errors.ShapeMismatch] and _differ_in_dims_of_one(first, part)
                self.broken = None if self.reshaped else differ[0]
        self.parts[part.rank] = part
        ticket = self.tickets[part.rank] = Ticket(part, self.missing)
        return ticket

    def mismatch(self) -> errors.CollectiveMismatch:
        """The error of a broken rendezvous."""
        if self.broken is None:
            raise RuntimeError("this rendezvous is not broken: please report it")
        return self.broken([part.call() for part in self.parts.values()], self.group.recent_calls())


Compute: TypeAlias = Callable[[Sequence[Contribution]], Sequence[Any]]


@dataclass(slots=True, eq=False)
class Group:
    """A process group of the simulation: global ranks in group order, and the open rendezvous."""

    name: str
    ranks: tuple[int, ...]
    counts: dict[int, int] = field(default_factory=dict)
    calls_made: dict[int, int] = field(default_factory=dict)  # by rank, messages included, as gloo counts them
    open: dict[int, Rendezvous] = field(default_factory=dict)
    closed: list[Contribution] = field(default_factory=list)
    timeouts: dict[int, float] = field(default_factory=dict)  # seconds, of ranks that gave the group a time limit
    cut_off: set[int] = field(default_factory=set)  # ranks whose connections a timeout has closed, as gloo does
    axes: dict[tuple[int, ...], str] = field(default_factory=dict)  # of the run: mesh axes by the ranks along them
    direct: bool = False  # made by the program without torch's `new_group`

    def axis(self) -> str | None:
        """The name of the mesh axis along which these ranks lie; None if no mesh has such an axis."""
        return self.axes.get(self.ranks)

    def check_connected(self, part: Contribution) -> None:
        """Raise `CollectiveTimeout` if an earlier timeout has closed the connections that this call needs."""
        needed = self.ranks if part.peer is None else (part.rank, part.peer)
        if self.cut_off.intersection(needed):
            words = "Application timeout caused pair closure"
            raise errors.CollectiveTimeout(part.call(), self.timeouts.get(part.rank, 0.0), words)

    def next_rendezvous(self, rank: int) -> Rendezvous:
        """The rendezvous to which this rank's next collective belongs."""
        number = self.counts.get(rank, 0)
        self.counts[rank] = number + 1
        rendezvous = self.open.get(number)
        if rendezvous is None:
            rendezvous = self.open[number] = Rendezvous(self, number)
        return rendezvous

    def close(self, rendezvous: Rendezvous, compute: Compute) -> list[Ticket]:
        """Compute the results of a complete rendezvous.  Returns its tickets, in group order."""
        del self.open[rendezvous.number]
        parts = [rendezvous.parts[rank] for rank in self.ranks]
        tickets = [rendezvous.tickets[rank] for rank in self.ranks]
        if rendezvous.reshaped:
            for part in parts:
                part.inputs = _without_dims_of_one(part.inputs)
        for ticket, result in zip(tickets, compute(parts), strict=True):
            ticket.result = result
            ticket.done = True
        for part in parts:
            part.inputs = None
        self.closed.append(parts[0])
        del self.closed[:-3]
        return tickets

    def recent_calls(self) -> list[Call]:
        """The last three collectives that this group completed: the first member's part of each."""
        return [part.call() for part in self.closed]


Key = tuple[int, int, int]  # sender, receiver, tag; global ranks


class Mailbox:
    """The unmatched sends and receives of one process group, in the order in which they were posted."""

    def __init__(self) -> None:
        self._sends: dict[Key, deque[Ticket]] = {}
        self._recvs: dict[Key, deque[Ticket]] = {}
        self._from_any: dict[tuple[int, int], deque[Ticket]] = {}
        self._count: dict[tuple[str, int, int | None, int], int] = {}

    def number(self, kind: str, rank: int, peer: int | None, tag: int) -> int:
        """How many such messages this rank has posted before."""
        key = (kind, rank, peer, tag)
        self._count[key] = self._count.get(key, -1) + 1
        return self._count[key]

    def send(self, ticket: Ticket) -> Ticket | None:
        """The receive that matches this send; None if it must wait for one."""
        part = ticket.part
        key = (part.rank, _peer(part), part.tag or 0)
        met = _pop_first(self._recvs, key) or _pop_first(self._from_any, key[1:])
        if met is None:
            self._sends.setdefault(key, deque()).append(ticket)
        return met

    def recv(self, ticket: Ticket) -> Ticket | None:
        """The send that matches this receive; None if it must wait for one."""
        key = (_peer(ticket.part), ticket.part.rank, ticket.part.tag or 0)
        met = _pop_first(self._sends, key)
        if met is None:
            self._recvs.setdefault(key, deque()).append(ticket)
        return met

    def recv_from_any(self, ticket: Ticket, choose: Callable[[int], int]) -> Ticket | None:
        """The first send of the sender that `choose(number of senders)` picks; None if it must wait for one."""
        rank, tag = ticket.part.rank, ticket.part.tag or 0
        senders = sorted(key for key, posted in self._sends.items() if posted and key[1:] == (rank, tag))
        if not senders:
            self._from_any.setdefault((rank, tag), deque()).append(ticket)
            return None
        return _pop_first(self._sends, senders[choose(len(senders)) if len(senders) > 1 else 0])

    def remove(self, ticket: Ticket) -> None:
        """Withdraw an unmatched ticket."""
        for box in (self._sends, self._recvs, self._from_any):
            for posted in box.values():
                if ticket in posted:
                    posted.remove(ticket)

    def left(self) -> list[Ticket]:
        """The unmatched tickets, by rank."""
        boxes: tuple[dict[Any, deque[Ticket]], ...] = (self._sends, self._recvs, self._from_any)
        return sorted((t for box in boxes for posted in box.values() for t in posted), key=lambda t: t.part.rank)


def _pop_first(box: dict[K, deque[Ticket]], key: K) -> Ticket | None:
    posted = box.get(key)
    return posted.popleft() if posted else None


def _peer(part: Contribution) -> int:
    return -1 if part.peer is None else part.peer


class RunObserver:
    """What a run reports while it goes on, each by the rank itself; this one ignores it."""

    def around(self, rank: int) -> AbstractContextManager[object]:
        """Entered while this rank runs the program."""
        return nullcontext()

    def posted(self, part: Contribution) -> None:
        """The rank makes a call."""

    def met(self, parts: Sequence[Contribution]) -> None:
        """All parts of a collective or a message are there: the calling rank has brought the last one."""

    def waiting(self, ticket: Ticket) -> AbstractContextManager[object]:
        """Entered while the rank waits; it is not blocked if the ticket is done already."""
        return nullcontext()

    def ended(self, rank: int, error: BaseException | None) -> None:
        """The rank's program has returned, or raised."""
