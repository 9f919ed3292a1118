"""One run of a program under a schedule: exactly one thread runs, and hands over at yield points only.

Threads are started once and used from run to run; a hand-over is one lock released and one taken, about 8 us.  The
outcome of a run is its `RunOutcome`.  Lighter than `threads.run_token`, whose ranks must be stoppable from outside.
"""

from __future__ import annotations

import threading
from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from localtensor.concurrency.schedule import Schedule

HANG_SECONDS = 10.0
"""Seconds that a thread may run without a yield point; then the run ends as hung."""


class RunEnded(BaseException):
    """Unwinds a thread whose run is over.  Not an `Exception`: a program must not catch it."""


class Blocker(Protocol):
    """A lock or gate that blocks a thread."""

    def why(self) -> str:
        """The object and its holder in words: `lock 0, which thread 1 has`."""

    def expire(self, thread: int) -> None:
        """The thread's wait has timed out: it goes on without the object."""


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """The outcome of a run; `kind` is "" where all threads ended and nothing was raised."""

    kind: str = ""
    detail: str = ""


class ThreadGroup:
    """Threads that wait for work, for one caller at a time.  `with ThreadGroup() as group: ...` ends them."""

    def __init__(self) -> None:
        self.turns: list[threading.Lock] = []
        self.home = _locked()
        self.job: Callable[[int], None] | None = None
        self.lost = False  # one of them hangs in the user's code: none of them is joined
        self._threads: list[threading.Thread] = []

    def ensure_threads(self, many: int) -> None:
        """Starts threads until there are `many`."""
        for number in range(len(self._threads), many):
            self.turns.append(_locked())
            thread = threading.Thread(target=self._serve, args=(number,), name=f"explored {number}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def __enter__(self) -> ThreadGroup:
        return self

    def __exit__(self, *_: object) -> None:
        if self.lost:
            return
        self.job = None
        for turn in self.turns:
            turn.release()
        for thread in self._threads:
            thread.join()

    def _serve(self, number: int) -> None:
        turn = self.turns[number]
        while True:
            turn.acquire()
            if self.job is None:
                return
            self.job(number)


class ControlledRun:
    """One run.  `current` is the thread that runs, None before and after; the other state serves locks and gates."""

    def __init__(self, group: ThreadGroup, schedule: Schedule, most: int) -> None:
        self.current: int | None = None
        self.over = False
        self.trace: list[tuple[int, str]] = []
        self.runnable: list[int] = []
        self.waits: dict[int, Blocker] = {}
        self.timed: dict[int, float] = {}  # deadline, by a clock that moves only when no thread can run
        self.clock = 0.0
        self.ending = RunOutcome()
        self._refusal: BaseException | None = None
        self._group, self._schedule, self._most = group, schedule, most
        self._unfinished: list[int] = []
        self._threads: Sequence[Callable[[], object]] = ()

    def run(self, threads: Sequence[Callable[[], object]]) -> RunOutcome:
        """Runs all threads to their end.  Raises what the schedule raised, such as `ReplayDiverged`."""
        group = self._group
        group.ensure_threads(len(threads))
        self._threads = threads
        self.runnable, self._unfinished = list(range(len(threads))), list(range(len(threads)))
        self._schedule.begin(len(threads))
        first = self._schedule.next(self.runnable, None)
        group.job = self._run_thread
        self.current = first
        try:
            group.turns[first].release()
            self._wait()
        except BaseException:  # why: Ctrl-C above all; the threads unwind, and it is raised again
            self.over = True
            if self.current is not None:  # else the last thread has ended, and `home` may be taken already
                group.lost = not group.home.acquire(timeout=HANG_SECONDS)
            raise
        if self._refusal is not None:
            raise self._refusal
        return self.ending

    def _wait(self) -> None:
        done = -1
        while not self._group.home.acquire(timeout=HANG_SECONDS):
            if len(self.trace) == done:
                self._group.lost = True
                last = next((what for thread, what in reversed(self.trace) if thread == self.current), "it began")
                self.end("hung", f"thread {self.current} came to no yield point for {HANG_SECONDS:.0f} s after: {last}")
                return
            done = len(self.trace)

    def pause(self, me: int, what: str) -> None:
        """A yield point: others may have run when it returns, and now `me` does `what`."""
        if self.over:
            raise RunEnded
        trace = self.trace
        if len(trace) >= self._most:
            unfinished = ", ".join(map(str, self._unfinished))
            raise self.end("livelock", f"{self._most} steps, and threads {unfinished} have not ended")
        chosen = self.choose(me)
        if chosen != me:
            self.current = chosen
            turns = self._group.turns
            turns[chosen].release()
            turns[me].acquire()
            if self.over:
                raise RunEnded
        trace.append((me, what))

    def block(self, me: int, what: str, before: Blocker) -> None:
        """`me` cannot run until another thread calls `wake(me)`; others run meanwhile."""
        if self.over:
            raise RunEnded
        self.runnable.remove(me)
        self.waits[me] = before
        if not self.runnable and not self._expire():
            raise self._deadlock()
        self.pause(me, what)

    def wake(self, thread: int) -> None:
        """The thread is no longer blocked: it can run."""
        self.waits.pop(thread, None)
        self.timed.pop(thread, None)
        insort(self.runnable, thread)

    def suspend(self, thread: int, before: Blocker) -> None:
        """Blocks another thread, which could run so far."""
        self.runnable.remove(thread)
        self.waits[thread] = before

    def number(self, below: int) -> int:
        """The schedule's choice of a number from 0 to `below` - 1."""
        return self._from_schedule(self._schedule.number, below)

    def end(self, kind: str, detail: str) -> RunEnded:
        """Ends the run with this outcome, unless it has ended already."""
        if not self.over:
            self.ending, self.over = RunOutcome(kind, detail), True
        return RunEnded()

    def choose(self, me: int) -> int:
        """The thread that runs next, by the schedule.  Raises `RunEnded` where the schedule raises."""
        return self._from_schedule(self._schedule.next, self.runnable, me)

    def _from_schedule(self, choose: Callable[..., int], *args: object) -> int:
        try:
            return choose(*args)
        except Exception as refusal:  # why: any error of a schedule ends the run, and is raised by `run`
            self._refusal = self._refusal or refusal
            self.over = True
            raise RunEnded from refusal

    def _deadlock(self) -> RunEnded:
        detail = "; ".join(f"thread {thread} waits for {self.waits[thread].why()}" for thread in sorted(self.waits))
        return self.end("deadlock", detail)

    def _expire(self) -> bool:
        """No thread can run: the timed wait with the earliest deadline times out; False if there is none."""
        if not self.timed:
            return False
        thread = min(self.timed, key=lambda one: (self.timed[one], one))
        self.clock = self.timed[thread]
        obstacle = self.waits[thread]
        self.wake(thread)
        obstacle.expire(thread)
        return True

    def _run_thread(self, me: int) -> None:
        try:
            if not self.over:
                self.trace.append((me, "begins"))
                self._threads[me]()
        except RunEnded:
            pass
        except BaseException as error:  # why: any error of a thread is the outcome of the run
            detail = str(error).partition("\n")[0]
            self.end("raised", f"thread {me} raised {type(error).__name__}: {detail}")
        try:
            self._end_thread(me)
        except RunEnded:
            self._end_the_rest()

    def _end_thread(self, me: int) -> None:
        self._unfinished.remove(me)
        if not self.over:
            self.runnable.remove(me)
            if self._unfinished and not self.runnable and not self._expire():
                self._deadlock()
            elif self.runnable:
                self._pass_turn_to(self.choose(me))
                return
        self._end_the_rest()

    def _end_the_rest(self) -> None:
        """Lets the next unfinished thread unwind; after the last, the caller goes on."""
        if self._unfinished:
            self._pass_turn_to(self._unfinished[0])
        else:
            self.current = None
            self._group.home.release()

    def _pass_turn_to(self, thread: int) -> None:
        self.current = thread
        self._group.turns[thread].release()


def _locked() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock
