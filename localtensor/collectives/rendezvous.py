"""Who meets whom in a collective, and whether they fit.

The n-th collective that one rank makes on a group meets the n-th of each other member.  What must be alike is
compared before anything moves; if it is not, the meeting is broken, and the error shows every part that arrived.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, TypeAlias

import torch

from localtensor._util.events import Call, Place
from localtensor.errors import (
    CollectiveMismatch,
    DeviceMismatch,
    DtypeMismatch,
    KindMismatch,
    LayoutMismatch,
    LengthMismatch,
    ReduceOpMismatch,
    RootMismatch,
    ShapeMismatch,
)
from localtensor.layout.spec import shape_text

Line: TypeAlias = tuple[str, int, str] | None
Signature: TypeAlias = tuple[tuple[torch.dtype, torch.Size], ...]


@dataclass(slots=True, eq=False)
class Contribution:
    """One rank's part in a collective, quick to make; `call()` is the same in words.

    `key` holds what must be alike on all ranks, in the order of `FIELDS`; `inputs` what the collective reads:
    tensors, or lists of them, until it is over.
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

    @property
    def bytes(self) -> int:
        return sum(dtype.itemsize * prod(shape) for dtype, shape in self.tensors)

    @property
    def place(self) -> Place | None:
        return Place(*self.line) if self.line else None

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
        )


# What must be alike, and what it is called when it is not; the first that differs names the error.
FIELDS: tuple[tuple[str, type[CollectiveMismatch]], ...] = (
    ("kind", KindMismatch),
    ("number of tensors", LengthMismatch),
    ("op", ReduceOpMismatch),
    ("root", RootMismatch),
    ("dtype", DtypeMismatch),
    ("device", DeviceMismatch),
    ("shape", ShapeMismatch),
    ("layout", LayoutMismatch),
)


def key_of(
    kind: str,
    tensors: Signature,
    device: torch.device | None,
    op: object,
    root: int | None,
    alike: str,
    layout: tuple[tuple[int, ...], ...] | None = None,
) -> tuple[Any, ...]:
    """What all ranks' parts must have in common; `alike` is "shapes", "dtypes" (of all tensors) or "dtype"."""
    dtypes = tuple([dtype for dtype, _ in tensors])
    return (
        kind,
        None if alike == "dtype" else len(tensors),
        op,
        root,
        dtypes[:1] if alike == "dtype" else dtypes,
        None if device is None else device.type,
        tuple([shape for _, shape in tensors]) if alike == "shapes" else None,
        layout,
    )


@dataclass(slots=True, eq=False)
class Ticket:
    """One rank's stake in a meeting or a message: done once `result` is there, delivered once it was waited for."""

    part: Contribution
    peers: Callable[[], tuple[int, ...]]  # for whom it still waits
    deliver: Callable[[Any], None] | None = None
    result: Any = None
    done: bool = False
    blocked: bool = False
    waited: bool = False


@dataclass(slots=True, eq=False)
class Meeting:
    """One collective of one group: the parts that have arrived, by rank, and each rank's stake in it."""

    group: "Group"
    number: int
    parts: dict[int, Contribution] = field(default_factory=dict)
    tickets: dict[int, Ticket] = field(default_factory=dict)
    broken: type[CollectiveMismatch] | None = None

    def missing(self) -> tuple[int, ...]:
        return tuple(rank for rank in self.group.ranks if rank not in self.parts)

    def complete(self) -> bool:
        return len(self.parts) == len(self.group.ranks)

    def join(self, part: Contribution) -> Ticket:
        if self.parts and self.broken is None:
            first = next(iter(self.parts.values()))
            if first.key != part.key:
                self.broken = next(kind for (_, kind), a, b in zip(FIELDS, first.key, part.key) if a != b)
        self.parts[part.rank] = part
        ticket = self.tickets[part.rank] = Ticket(part, self.missing)
        return ticket

    def mismatch(self) -> CollectiveMismatch:
        """The error of a broken meeting."""
        if self.broken is None:
            raise RuntimeError("this meeting is not broken: please report it")
        return self.broken([part.call() for part in self.parts.values()], self.group.last())


Compute: TypeAlias = Callable[[Sequence[Contribution]], Sequence[Any]]


@dataclass(slots=True, eq=False)
class Group:
    """A process group as all its members see it: global ranks in group order, and the meetings that are open."""

    name: str
    ranks: tuple[int, ...]
    counts: dict[int, int] = field(default_factory=dict)
    open: dict[int, Meeting] = field(default_factory=dict)
    closed: list[Contribution] = field(default_factory=list)

    def meet(self, rank: int) -> Meeting:
        """The meeting to which this rank's next collective belongs."""
        number = self.counts.get(rank, 0)
        self.counts[rank] = number + 1
        meeting = self.open.get(number)
        if meeting is None:
            meeting = self.open[number] = Meeting(self, number)
        return meeting

    def close(self, meeting: Meeting, compute: Compute) -> list[Ticket]:
        """Everybody is there: what each rank holds afterwards is computed.  Its tickets, in group order."""
        del self.open[meeting.number]
        parts = [meeting.parts[rank] for rank in self.ranks]
        tickets = [meeting.tickets[rank] for rank in self.ranks]
        for ticket, result in zip(tickets, compute(parts), strict=True):
            ticket.result = result
            ticket.done = True
        for part in parts:
            part.inputs = None
        self.closed.append(parts[0])
        del self.closed[:-3]
        return tickets

    def last(self) -> list[Call]:
        """The last collectives that this group brought to an end: the first member's part of each."""
        return [part.call() for part in self.closed]


# Who meets whom in send and recv: by sender, receiver and tag, in the order in which they were posted.
#
# A send is a rendezvous, as in gloo (its unbound buffers): it is over when its receive has been posted.

Key = tuple[int, int, int]  # sender, receiver, tag; global ranks


class Mailbox:
    """The sends and receives of one process group that have not met."""

    def __init__(self) -> None:
        self._sends: dict[Key, deque[Ticket]] = {}
        self._recvs: dict[Key, deque[Ticket]] = {}
        self._from_anyone: dict[tuple[int, int], deque[Ticket]] = {}
        self._count: dict[tuple[str, int, int | None, int], int] = {}

    def number(self, kind: str, rank: int, peer: int | None, tag: int) -> int:
        """How many such messages this rank has posted before."""
        key = (kind, rank, peer, tag)
        self._count[key] = self._count.get(key, -1) + 1
        return self._count[key]

    def send(self, ticket: Ticket) -> Ticket | None:
        """The receive that this send meets; None if it must wait for one."""
        part = ticket.part
        key = (part.rank, _peer(part), _tag(part))
        met = _first(self._recvs, key) or _first(self._from_anyone, key[1:])
        if met is None:
            self._sends.setdefault(key, deque()).append(ticket)
        return met

    def recv(self, ticket: Ticket) -> Ticket | None:
        """The send that this receive meets; None if it must wait for one."""
        key = (_peer(ticket.part), ticket.part.rank, _tag(ticket.part))
        met = _first(self._sends, key)
        if met is None:
            self._recvs.setdefault(key, deque()).append(ticket)
        return met

    def recv_from_anyone(self, ticket: Ticket, choose: Callable[[int], int]) -> Ticket | None:
        """The first send of a sender that `choose(how many)` picks; None if it must wait for one."""
        rank, tag = ticket.part.rank, _tag(ticket.part)
        senders = sorted(key for key, posted in self._sends.items() if posted and key[1:] == (rank, tag))
        if not senders:
            self._from_anyone.setdefault((rank, tag), deque()).append(ticket)
            return None
        return _first(self._sends, senders[choose(len(senders)) if len(senders) > 1 else 0])

    def left(self) -> list[Ticket]:
        """What has not met anything, by rank."""
        boxes: tuple[dict[Any, deque[Ticket]], ...] = (self._sends, self._recvs, self._from_anyone)
        return sorted((t for box in boxes for posted in box.values() for t in posted), key=lambda t: t.part.rank)


def _first(box: dict[Any, deque[Ticket]], key: Any) -> Ticket | None:
    posted = box.get(key)
    return posted.popleft() if posted else None


def _peer(part: Contribution) -> int:
    return -1 if part.peer is None else part.peer


def _tag(part: Contribution) -> int:
    return part.tag or 0
