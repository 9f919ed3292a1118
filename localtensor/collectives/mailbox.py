"""Who meets whom in send and recv: by sender, receiver and tag, in the order in which they were posted.

A send is a rendezvous, as in gloo (its unbound buffers): it is over when its receive has been posted.
"""

from collections import deque
from collections.abc import Callable
from typing import Any

from localtensor.collectives.rendezvous import Part, Ticket

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


def _peer(part: Part) -> int:
    return -1 if part.peer is None else part.peer


def _tag(part: Part) -> int:
    return part.tag or 0
