"""One run of a program on rank threads: its ranks, what each waits for, and the error if it cannot end well.

Nothing here depends on torch.distributed: `threads/process_group.py` defines what a collective reads and writes.
"""

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, cast

from localtensor import errors
from localtensor._util import ambient
from localtensor._util.events import Call, Wait
from localtensor.collectives.rendezvous import (
    Compute,
    Contribution,
    Group,
    Line,
    Mailbox,
    Rendezvous,
    RunObserver,
    Ticket,
    TimeLimit,
)
from localtensor.concurrency.schedule import Schedule
from localtensor.errors import LocalTensorError, ProgramFault
from localtensor.threads import diagnosis
from localtensor.threads.cores import CoreAffinity
from localtensor.threads.diagnosis import RankEnd
from localtensor.threads.run_token import Abort, RunToken, entirely, require_stack

MAX_POLLS = 10_000  # fruitless polls in a row, with only polling ranks runnable, that count as a deadlock
LOG_LENGTH = 1_000_000  # calls that the event log keeps: the last ones of a very long run


class Simulation:
    """The state that all ranks of one run share; only the rank that holds the run token may touch it."""

    def __init__(self, ranks: int, schedule: Schedule, swap: Callable[[int | None, int | None], None]) -> None:
        self.ranks = ranks
        self.serial = ambient.next_serial()
        self.rules, self.guard = ambient.rules(), ambient.guard()  # of the caller's thread, for its ranks
        self.run_token = RunToken(ranks, schedule, swap, self._diagnose, self._take_turn, self._expire)
        self.groups: dict[str, Group] = {}
        self.axes: dict[tuple[int, ...], str] = {}  # names of mesh axes by the ranks along them
        self.observer: RunObserver | None = None  # what records the run, if anything does
        self.declared: dict[str, dict[int, tuple[tuple[int, ...], Line]]] = {}  # group name -> rank -> members, line
        self.store: Any = None
        self.stores: dict[tuple[object, ...], Any] = {}  # that the program has made, by address or path
        self.kernels: Any = None
        self.mail: dict[Group, Mailbox] = {}
        self.log: deque[Contribution] = deque(maxlen=LOG_LENGTH)
        self._cores = CoreAffinity()
        self.helpers: Any = None  # the helper threads of the ranks
        self.faults: Any = None  # those on purpose
        self.memory: Any = None  # symmetric memory, once a rank has some, and the order of what the ranks do
        self.detects_races = True  # in symmetric memory
        self.forked = False  # this is a child process that a rank has forked
        self.ended: dict[int, RankEnd] = {}
        self.verdict: LocalTensorError | None = None
        self.last_part: dict[int, Contribution] = {}
        self.clock = 0.0  # simulated seconds: it moves when no rank can run, to the nearest deadline
        self.skipped = 0.0  # those of them that no real clock has
        self._waits: dict[int, Ticket] = {}
        self._polls: dict[int, Ticket] = {}  # what each rank has polled since the last progress
        self._poll_count = 0
        self._handed_out: dict[Ticket, None] = {}  # those of Works that the user must wait for
        self._broken: Rendezvous | None = None
        self._broke_first = False

    def rank(self) -> int:
        """The rank to which the calling thread belongs.

        Raises `ForeignThread` in a thread that no rank has started, `ForkedRank` in a child process.
        """
        token = self.run_token
        number = token.numbers.get(threading.get_ident())
        if self.forked:
            raise errors.ForkedRank("a collective", token.rank_of[token.holder or 0])
        if number is None:
            raise errors.ForeignThread("a collective", threading.current_thread().name)
        if number != token.holder:
            raise Abort  # a rank that did not end in time, and has resumed
        return token.rank_of[number]

    def is_rank(self) -> bool:
        return threading.get_ident() in self.run_token.numbers

    def _take_turn(self, number: int) -> None:
        """In the thread that has just received the run token."""
        self._cores.follow(number)
        if self.run_token.has_helpers():
            self.helpers.take_turn(number)

    def pause(self) -> None:
        """A yield point: other threads may run before it returns."""
        self.run_token.pause(self.run_token.here())

    def enter(self) -> int:
        """The rank of the calling thread, which is about to change what all ranks share.

        Raises RecursionError where that might stop half way: the program may catch it and go on.
        """
        require_stack()
        return self.rank()

    @entirely
    def contribute(
        self, part: Contribution, compute: Compute, deliver: Callable[[Any], None], *, returns_work: bool
    ) -> Ticket:
        """Add the rank's part to its rendezvous; the last part computes all results."""
        self.run_token.check(self.run_token.here())
        rendezvous = part.group.next_rendezvous(part.rank)
        part.number = rendezvous.number
        self.note(part)
        if self._is_cut_off(part):
            return Ticket(part, lambda: part.group.ranks)
        ticket = rendezvous.join(part)
        if self.memory is not None:
            rendezvous.clocks[part.rank] = self.memory.issued(ticket)
        ticket.deliver = deliver
        if returns_work:
            self._handed_out[ticket] = None
        if rendezvous.broken and self._broken is None:
            self._broken = rendezvous
            self._broke_first = not any(end.error for end in self.ended.values())
        if rendezvous.complete():
            self._complete(rendezvous, compute)
        return ticket

    def _complete(self, rendezvous: Rendezvous, compute: Compute) -> None:
        if rendezvous.broken:
            self.fail(rendezvous.mismatch())
        try:
            tickets = rendezvous.group.close(rendezvous, compute)
        except ProgramFault as fault:
            self.fail(fault)
        except (LocalTensorError, RuntimeError, MemoryError) as refusal:  # torch refuses with RuntimeError
            self.fail(diagnosis.collective_error(rendezvous, refusal))
        except Exception as crash:  # why: a bug of ours, no statement about the program; `run` raises it unchanged
            self.run_token.abort_with(crash)
        if self.memory is not None:
            self.memory.order_collective(rendezvous, tickets)
        if self.observer is not None:
            self.observer.met([ticket.part for ticket in tickets])
        for ticket in tickets:
            self._wake(ticket)
            if ticket.left:
                ticket.hand_out()

    @entirely
    def send(self, part: Contribution) -> Ticket:
        ticket = self._post(part)
        if self._is_cut_off(part):
            return ticket
        if self.faults is not None and self.faults.loses(part):
            ticket.done = True
            return ticket
        met = self._mail(part).send(ticket)
        if met is not None:
            self._deliver_message(ticket, met)
        return ticket

    @entirely
    def recv(self, part: Contribution, deliver: Callable[[Any], None]) -> Ticket:
        ticket = self._post(part)
        ticket.deliver = deliver
        if self._is_cut_off(part):
            return ticket
        mail = self._mail(part)
        met = mail.recv_from_any(ticket, self.run_token.number) if part.peer is None else mail.recv(ticket)
        if met is not None:
            self._deliver_message(met, ticket)
        return ticket

    def _is_cut_off(self, part: Contribution) -> bool:
        """Whether a fault on purpose lets this call reach no rank: then the wait for it raises."""
        return self.faults is not None and self.faults.cuts_off(part)

    def _post(self, part: Contribution) -> Ticket:
        self.run_token.check(self.run_token.here())
        part.number = self._mail(part).number(part.kind, part.rank, part.peer, part.tag or 0)
        self.note(part)
        others = tuple(rank for rank in part.group.ranks if rank != part.rank)
        ticket = Ticket(part, lambda: others if part.peer is None else (part.peer,))
        if self.memory is not None:
            clock = self.memory.issued(ticket)
            ticket.clock = clock if part.kind == "send" else None
        self._handed_out[ticket] = None
        return ticket

    def _mail(self, part: Contribution) -> Mailbox:
        return self.mail.setdefault(part.group, Mailbox())

    def _deliver_message(self, send: Ticket, recv: Ticket) -> None:
        if send.part.elements() != recv.part.elements():
            self.fail(errors.MessageMismatch(send.part.call(), recv.part.call()))
        if recv.part.peer is None:
            recv.part.peer = send.part.rank
        if self.observer is not None:
            self.observer.met([send.part, recv.part])
        recv.result, send.part.inputs = send.part.inputs, None
        recv.clock, send.clock = send.clock, None
        for ticket in (send, recv):
            ticket.done = True
            self._wake(ticket)

    def wait(self, ticket: Ticket, limit: TimeLimit | None = None) -> None:
        """Wait until the ticket is done, then deliver its result once.

        Raises `CollectiveTimeout` if `limit` passes before on the simulated clock.
        """
        self._handed_out.pop(ticket, None)
        ticket.waited = True
        if self.observer is None:
            self._wait(ticket, limit)
        else:
            with self.observer.waiting(ticket):
                self._wait(ticket, limit)
        clock, ticket.clock = ticket.clock, None
        if clock is not None:
            self.memory.acquired(ticket.part.rank, clock)
        if ticket.in_flight is not None:
            self.memory.acquired(ticket.part.rank, ticket.in_flight)
        ticket.hand_out()

    def _wait(self, ticket: Ticket, limit: TimeLimit | None) -> None:
        if ticket.done:
            self.pause()
        else:
            if self.faults is not None:
                self.faults.check(ticket)
            self.block(ticket, None if limit is None else limit.seconds)
            if self.faults is not None:
                self.faults.check(ticket)
            if not ticket.done and limit is not None:
                raise self._timed_out(ticket, limit)

    @entirely
    def block(self, ticket: Ticket, seconds: float | None = None) -> None:
        """Wait until another rank has set `done` and woken this one, or until `seconds` have passed while none can run."""
        number = self.run_token.here()
        while ticket.blocked and not ticket.done:  # another thread of the rank waits for the same
            self.run_token.step_aside(number)
        if ticket.done:
            return
        ticket.deadline = None if seconds is None else self.clock + seconds
        ticket.blocked, ticket.thread = True, number
        self._waits[number] = ticket
        self.run_token.block(number)

    @entirely
    def wake(self, ticket: Ticket) -> None:
        """Complete the ticket and wake its rank."""
        self.note_progress()
        ticket.done = True
        self._wake(ticket)

    def _wake(self, ticket: Ticket) -> None:
        if ticket.blocked:
            ticket.blocked = False
            del self._waits[ticket.thread]
            self.run_token.wake(ticket.thread)

    def poll(self, ticket: Ticket) -> bool:
        """Whether the ticket is done; other ranks run first, so that a polling loop can end.

        When all runnable ranks have only polled, `MAX_POLLS` times, that is a deadlock.
        """
        if not ticket.done:
            self.enter()
            if self.faults is not None:
                self.faults.check(ticket)
            number = self.run_token.here()
            self._polls[number] = ticket
            self._poll_count += 1
            if self._poll_count > MAX_POLLS and self.run_token.only_runnable(self._polls) and not self._expire():
                self.fail(self._stuck_error())
            self.run_token.step_aside(number)
        return ticket.done

    def note_progress(self) -> None:
        """Something has happened that a polling rank may wait for."""
        self._polls.clear()
        self._poll_count = 0

    def note(self, part: Contribution) -> None:
        """Add the call to the log."""
        self.note_progress()
        self.log.append(part)
        if self.observer is not None:
            self.observer.posted(part)
        self.last_part[part.rank] = part

    def fail(self, error: LocalTensorError) -> None:
        """End the run with this error.  Never returns."""
        if self.verdict is None:
            self.verdict = error
        self.run_token.aborting = True
        raise Abort

    def end(self, rank: int, ended: RankEnd) -> None:
        self.note_progress()
        error = None if self.helpers is None else self.helpers.errors.get(rank)
        self.ended[rank] = ended if ended.error is not None or error is None else error
        if self.observer is not None:
            self.observer.ended(rank, self.ended[rank].error)

    def _expire(self) -> bool:
        """Let the nearest deadline pass, and wake its rank.  False if there is none.

        Not where calls do not match or a rank has raised: that error comes first.
        """
        if self.helpers is not None and self.helpers.released_outside(self._waits.values(), self._wake):
            return True
        due = [ticket for ticket in self._waits.values() if ticket.deadline is not None]
        if not due or self._broken is not None or any(end.error is not None for end in self._ends().values()):
            return False
        first = min(due, key=lambda ticket: (ticket.deadline or 0.0, ticket.part.rank))
        if first.ready is None:
            # A rank that sleeps, or waits for a lock with a limit, goes on later: nothing is stuck.
            sleeping = any(ticket.ready is not None for ticket in due)
            first.diagnosis = None if sleeping else self._stuck_error()
            self.note_progress()
        else:  # a lock, or a sleep: a helper thread may wake up again and again, and change nothing
            self._poll_count += 1
            if self._poll_count > MAX_POLLS:
                return False
        now, self.clock = self.clock, first.deadline or self.clock
        self.skipped += self.clock - now if first.ready is None else 0.0
        self._wake(first)
        return True

    def _timed_out(self, ticket: Ticket, limit: TimeLimit) -> errors.CollectiveTimeout:
        """The error of a wait whose limit has passed; on gloo it closes the connections, except of a Work in the air."""
        part = ticket.part
        if limit.closes or part.peer is not None or part.kind == "recv":
            part.group.cut_off.add(part.rank)
        if part.kind in ("send", "recv"):
            self._mail(part).remove(ticket)
        words = diagnosis.timeout_words(part, ticket.peers(), limit.seconds, everyone=limit.everyone)
        return errors.CollectiveTimeout(part.call(), limit.seconds, words, ticket.diagnosis)

    def _diagnose(self) -> None:
        """Set the verdict of a run in which some rank waits and none can run."""
        self.verdict = self.verdict or self._stuck_error()

    def waits(self) -> list[Wait]:
        """What each blocked or polling rank waits for, by rank."""
        polling = {rank: ticket for rank, ticket in self._polls.items() if not ticket.done}
        waits = sorted({**polling, **self._waits}.items())
        return [Wait(ticket.part.rank, ticket.peers(), ticket.part.call()) for _, ticket in waits]

    def _ends(self) -> dict[int, RankEnd]:
        """How ranks ended, and those whose helper thread has raised."""
        return self.ended if self.helpers is None else {**self.helpers.errors, **self.ended}

    def interrupt_waits(self, which: Callable[[Ticket], object]) -> None:
        """Wake the threads that wait for such tickets, though these are not done."""
        for ticket in [ticket for ticket in self._waits.values() if which(ticket)]:
            self._wake(ticket)

    def end_thread(self, number: int) -> None:
        """Let a helper thread end where it is."""
        self.run_token.ending.add(number)
        ticket = self._waits.get(number)
        if ticket is not None:
            self._wake(ticket)

    def _stuck_error(self) -> LocalTensorError:
        if self.memory is not None and self._broken is None and not any(end.error for end in self._ends().values()):
            signals = self.memory.stuck_error(self.waits())
            if signals is not None:
                return cast("LocalTensorError", signals)
        lines = {rank: part.place for rank, part in self.last_part.items()}
        return diagnosis.stuck_error(self._ends(), self._broken, self.waits(), lines, broke_first=self._broke_first)

    def close(self) -> None:
        """Set the verdict of a run whose ranks have all ended by themselves."""
        if self.faults is not None and self.faults.happened:  # what is left undone is not the program's fault
            self.mail.clear()
            self._handed_out.clear()
            self.declared.clear()
        if self.verdict is None and self.memory is not None:
            errors = [end.error for end in self.ended.values() if end.error is not None]
            if not any(isinstance(error, LocalTensorError) for error in errors):
                self.verdict = self.memory.leftover_error(ended_well=not errors)
        if self.verdict is None:
            unmet = [ticket for box in self.mail.values() for ticket in box.left()]
            self.verdict = diagnosis.leftover_error(self.ended, self._broken, unmet, list(self._handed_out))
        self.verdict = self.verdict or diagnosis.partial_group_error(self.declared)

    def matching_calls(self, part: Contribution, rank: int) -> list[Call]:
        """The call of another rank in the same collective, if the log still has it."""
        same = (one for one in reversed(self.log) if one.rank == rank and one.group is part.group)
        return [one.call() for one in same if one.number == part.number and one.kind == part.kind][:1]

    def calls(self) -> list[Call]:
        """The calls of all ranks, in order."""
        return [part.call() for part in self.log]
