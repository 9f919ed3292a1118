"""One run of a program: its ranks, whom each waits for, and the verdict if it cannot end well.

Nothing here knows torch.distributed: `threads/process_group.py` says what a collective reads and writes.
"""

import ctypes
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from localtensor._util import ambient
from localtensor._util.events import Call, Wait
from localtensor.collectives.rendezvous import Compute, Contribution, Group, Line, Mailbox, Meeting, Ticket
from localtensor.concurrency.schedule import Schedule
from localtensor.errors import (
    ForeignThread,
    LocalTensorError,
    MessageMismatch,
    ProgramFault,
)
from localtensor.threads import diagnosis
from localtensor.threads.diagnosis import Ended
from localtensor.threads.run_token import Abort, Baton

# Rank threads on one core: only one of them runs at a time, and its caches are where the last one left them.
#
# Left to itself, the system wakes each thread on the core that is idle, which is always another than the one that
# hands over; a step of 16 ranks then takes twice as long (`python -m tests.tools.bench --only ranks`, with and without
# LOCALTENSOR_CORES=all).  So the threads of a run keep to one core, and move together when others keep it busy.

LOOK = 0.05  # seconds between two looks at whether the core is ours
STARVED = 0.6  # of the time: below it, we move


class Cores:
    """Where the threads of one run run.  Nothing is done where the system has no affinity, or one core only."""

    def __init__(self, ranks: int) -> None:
        self._allowed = sorted(_allowed())
        omp = os.environ.get("OMP_NUM_THREADS") or "1"  # or a list of numbers, one for each level of nesting
        wanted = os.environ.get("LOCALTENSOR_CORES", "one") != "all" and omp.partition(",")[0].strip() == "1"
        self._core = _current(self._allowed) if wanted and len(self._allowed) > 1 else None
        self._core_of: list[int | None] = [None] * ranks
        self._looked = time.perf_counter()
        self._used = time.process_time()

    def turn(self, rank: int) -> None:
        """The rank's thread, which has just got the baton, runs where the last one ran."""
        if self._core is None:
            return
        now = time.perf_counter()
        if now - self._looked > LOOK:
            self._look(now)
        if self._core_of[rank] != self._core:
            os.sched_setaffinity(0, {self._core})
            self._core_of[rank] = self._core

    def _look(self, now: float) -> None:
        used = time.process_time()
        if self._core is not None and used - self._used < STARVED * (now - self._looked):
            self._core = self._allowed[(self._allowed.index(self._core) + 1) % len(self._allowed)]
        self._looked, self._used = now, used


def _allowed() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()


def _current(allowed: list[int]) -> int:
    """The core that this thread is on."""
    try:
        core = int(ctypes.CDLL(None).sched_getcpu())
    except (AttributeError, OSError):
        core = -1
    return core if core in allowed else allowed[0]


FRUITLESS = 10_000  # questions in a row whether a work is done, by ranks of which none can do anything else
LOG = 1_000_000  # calls that the event log keeps: the last ones of a very long run


class Simulation:
    """The state that all ranks of one run share.  Whoever holds the baton may touch it."""

    def __init__(self, ranks: int, schedule: Schedule, swap: Callable[[int | None, int | None], None]) -> None:
        self.ranks = ranks
        self.serial = ambient.next_serial()
        self.rules, self.guard = ambient.rules(), ambient.guard()  # of the caller's thread, which its ranks have too
        self.baton = Baton(ranks, schedule, swap, self._judge, Cores(ranks).turn)
        self.groups: dict[str, Group] = {}
        self.declared: dict[str, dict[int, tuple[tuple[int, ...], Line]]] = {}  # group name -> rank -> members, where
        self.store: Any = None
        self.kernels: Any = None
        self.mail: dict[Group, Mailbox] = {}
        self.log: deque[Contribution] = deque(maxlen=LOG)
        self.ended: dict[int, Ended] = {}
        self.verdict: LocalTensorError | None = None
        self.last_part: dict[int, Contribution] = {}
        self._waits: dict[int, Ticket] = {}
        self._polls: dict[int, Ticket] = {}  # what each rank has asked for since anything happened
        self._fruitless = 0
        self._handed_out: dict[Ticket, None] = {}  # to the user, who must wait for them
        self._broken: Meeting | None = None
        self._broke_first = False

    # -- who is asking

    def rank(self) -> int:
        """The rank in whose thread this is called.  Raises `ForeignThread` in any other thread."""
        rank = self.baton.holder
        if rank is None or self.baton.idents.get(rank) != threading.get_ident():
            if threading.get_ident() in self.baton.idents.values():
                raise Abort  # a rank that was given up for lost, and has come back
            raise ForeignThread("a collective", threading.current_thread().name)
        return rank

    def is_rank(self) -> bool:
        return threading.get_ident() in self.baton.idents.values()

    # -- collectives

    def meet(self, part: Contribution, compute: Compute, deliver: Callable[[Any], None], *, hands_out: bool) -> Ticket:
        """The rank's part is in; if it was the last, everybody's result is there."""
        self.baton.check(part.rank)
        meeting = part.group.meet(part.rank)
        part.number = meeting.number
        self._note(part)
        ticket = meeting.join(part)
        ticket.deliver = deliver
        if hands_out:
            self._handed_out[ticket] = None
        if meeting.broken and self._broken is None:
            self._broken = meeting
            self._broke_first = not any(end.error for end in self.ended.values())
        if meeting.complete():
            self._complete(meeting, compute)
        return ticket

    def _complete(self, meeting: Meeting, compute: Compute) -> None:
        if meeting.broken:
            self.fail(meeting.mismatch())
        try:
            tickets = meeting.group.close(meeting, compute)
        except ProgramFault as fault:
            self.fail(fault)
        except (LocalTensorError, RuntimeError, MemoryError) as refusal:  # torch's own words are RuntimeErrors
            self.fail(diagnosis.refused(meeting, refusal))
        except Exception as crash:  # why: it is ours, and no verdict about the program: `run` raises it as it is
            self.baton.give_up(crash)
        for ticket in tickets:
            self._wake(ticket)

    # -- send and recv

    def send(self, part: Contribution) -> Ticket:
        ticket = self._post(part)
        met = self._mail(part).send(ticket)
        if met is not None:
            self._deliver_message(ticket, met)
        return ticket

    def recv(self, part: Contribution, deliver: Callable[[Any], None]) -> Ticket:
        ticket = self._post(part)
        ticket.deliver = deliver
        mail = self._mail(part)
        met = mail.recv_from_anyone(ticket, self.baton.number) if part.peer is None else mail.recv(ticket)
        if met is not None:
            self._deliver_message(met, ticket)
        return ticket

    def _post(self, part: Contribution) -> Ticket:
        self.baton.check(part.rank)
        part.number = self._mail(part).number(part.kind, part.rank, part.peer, part.tag or 0)
        self._note(part)
        others = tuple(rank for rank in part.group.ranks if rank != part.rank)
        ticket = Ticket(part, lambda: others if part.peer is None else (part.peer,))
        self._handed_out[ticket] = None
        return ticket

    def _mail(self, part: Contribution) -> Mailbox:
        return self.mail.setdefault(part.group, Mailbox())

    def _deliver_message(self, send: Ticket, recv: Ticket) -> None:
        if send.part.tensors != recv.part.tensors:
            self.fail(MessageMismatch(send.part.call(), recv.part.call()))
        if recv.part.peer is None:
            recv.part.peer = send.part.rank
        recv.result, send.part.inputs = send.part.inputs, None
        for ticket in (send, recv):
            ticket.done = True
            self._wake(ticket)

    # -- waiting

    def wait(self, ticket: Ticket) -> None:
        """What the ticket is for has happened, and its result has been delivered, once."""
        rank = ticket.part.rank
        self._handed_out.pop(ticket, None)
        ticket.waited = True
        if ticket.done:
            self.baton.pause(rank)
        else:
            self.block(ticket)
        deliver, ticket.deliver = ticket.deliver, None
        if deliver is not None:
            deliver(ticket.result)
            ticket.result = None

    def block(self, ticket: Ticket) -> None:
        """Returns when somebody has set `done` and woken the rank."""
        rank = ticket.part.rank
        ticket.blocked = True
        self._waits[rank] = ticket
        self.baton.block(rank)

    def wake(self, ticket: Ticket) -> None:
        """What this ticket waited for has come about."""
        self._something_happened()
        ticket.done = True
        self._wake(ticket)

    def _wake(self, ticket: Ticket) -> None:
        if ticket.blocked:
            ticket.blocked = False
            rank = ticket.part.rank
            del self._waits[rank]
            self.baton.wake(rank)

    def peek(self, ticket: Ticket) -> bool:
        """Whether it is done; the others have had a turn, so that a loop around this can end.

        Once all that can run do nothing but ask, ten thousand times, no loop ends any more: that is a deadlock.
        """
        if not ticket.done:
            self._polls[ticket.part.rank] = ticket
            self._fruitless += 1
            if self._fruitless > FRUITLESS and self.baton.only(self._polls):
                self.fail(self._why_stuck())
            self.baton.step_aside(ticket.part.rank)
        return ticket.done

    def _something_happened(self) -> None:
        self._polls.clear()
        self._fruitless = 0

    def _note(self, part: Contribution) -> None:
        self._something_happened()
        self.log.append(part)
        self.last_part[part.rank] = part

    # -- the end

    def fail(self, error: LocalTensorError) -> None:
        """The run is over: this is why.  Never returns."""
        if self.verdict is None:
            self.verdict = error
        self.baton.aborting = True
        raise Abort

    def end(self, rank: int, ended: Ended) -> None:
        self._something_happened()
        self.ended[rank] = ended

    def _judge(self) -> None:
        """Somebody waits, and nobody can run: says why."""
        if self.verdict is None:
            self.verdict = self._why_stuck()

    def waits(self) -> list[Wait]:
        """Who waits for whom, by rank."""
        asked = {rank: ticket for rank, ticket in self._polls.items() if not ticket.done}
        waits = sorted({**asked, **self._waits}.items())
        return [Wait(rank, ticket.peers(), ticket.part.call()) for rank, ticket in waits]

    def _why_stuck(self) -> LocalTensorError:
        lines = {rank: part.place for rank, part in self.last_part.items()}
        return diagnosis.why_stuck(self.ended, self._broken, self.waits(), lines, broke_first=self._broke_first)

    def close(self) -> None:
        """Sets the verdict of a run whose ranks have all ended by themselves."""
        if self.verdict is None:
            unmet = [ticket for box in self.mail.values() for ticket in box.left()]
            self.verdict = diagnosis.at_the_end(self.ended, self._broken, unmet, list(self._handed_out))
        if self.verdict is None:
            self.verdict = diagnosis.half_made(self.declared)

    def parts_like(self, part: Contribution, rank: int) -> list[Call]:
        """The part that another rank takes in the same collective, if the log still has it."""
        same = (one for one in reversed(self.log) if one.rank == rank and one.group is part.group)
        return [one.call() for one in same if one.number == part.number and one.kind == part.kind][:1]

    def calls(self) -> list[Call]:
        """What every rank called, in the order in which it happened."""
        return [part.call() for part in self.log]
