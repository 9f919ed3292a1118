"""One run of a program under a schedule: exactly one thread runs, and hands over at yield points only.

Threads are hired once and used from run to run; a hand-over is one lock released and one taken, about 8 us.  What a
run came to is its `Ending`.  Lighter than `baton`, which owns ranks whose programs must be stopped from outside.
"""

from __future__ import annotations

import threading
from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from localtensor.concurrency.schedule import Schedule

PATIENCE = 10.0
"""Seconds that a thread may run without a yield point; after them the run is given up as hung."""


class Ended(BaseException):
    """Unwinds a thread whose run is over.  Not an `Exception`: a program must not catch it."""


class Obstacle(Protocol):
    """What a thread can stand before."""

    def why(self) -> str:
        """`lock 0, which thread 1 has`"""

    def expire(self, thread: int) -> None:
        """The thread's time is over: it goes on with empty hands."""


@dataclass(frozen=True, slots=True)
class Ending:
    """What a run came to; `kind` is "" where all threads ended and nothing was raised."""

    kind: str = ""
    said: str = ""


class ThreadGroup:
    """Threads that wait for work, for one caller at a time.  `with ThreadGroup() as group: ...` ends them."""

    def __init__(self) -> None:
        self.batons: list[threading.Lock] = []
        self.home = _shut()
        self.job: Callable[[int], None] | None = None
        self.lost = False  # one of them hangs in the user's code: none of them is waited for
        self._threads: list[threading.Thread] = []

    def hire(self, many: int) -> None:
        """There are so many threads."""
        for number in range(len(self._threads), many):
            self.batons.append(_shut())
            thread = threading.Thread(target=self._serve, args=(number,), name=f"explored {number}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def __enter__(self) -> ThreadGroup:
        return self

    def __exit__(self, *_: object) -> None:
        if self.lost:
            return
        self.job = None
        for baton in self.batons:
            baton.release()
        for thread in self._threads:
            thread.join()

    def _serve(self, number: int) -> None:
        baton = self.batons[number]
        while True:
            baton.acquire()
            if self.job is None:
                return
            self.job(number)


class Stage:
    """One run.  `current` is the thread that runs, None before and after; all else is for the locks and gates."""

    def __init__(self, crew: ThreadGroup, schedule: Schedule, most: int) -> None:
        self.current: int | None = None
        self.over = False
        self.trace: list[tuple[int, str]] = []
        self.runnable: list[int] = []
        self.waits: dict[int, Obstacle] = {}
        self.timed: dict[int, float] = {}  # until when, by a clock that moves only when nobody can run
        self.clock = 0.0
        self.ending = Ending()
        self._refusal: BaseException | None = None
        self._crew, self._schedule, self._most = crew, schedule, most
        self._left: list[int] = []
        self._threads: Sequence[Callable[[], object]] = ()

    def perform(self, threads: Sequence[Callable[[], object]]) -> Ending:
        """All threads have ended.  Raises what the schedule raised, such as `ReplayDiverged`."""
        crew = self._crew
        crew.hire(len(threads))
        self._threads = threads
        self.runnable, self._left = list(range(len(threads))), list(range(len(threads)))
        self._schedule.begin(len(threads))
        first = self._schedule.next(self.runnable, None)
        crew.job = self._live
        self.current = first
        try:
            crew.batons[first].release()
            self._wait()
        except BaseException:  # why: Ctrl-C, above all; the threads unwind, and it goes on
            self.over = True
            if self.current is not None:  # else the last thread has ended, and what it let go may be taken already
                crew.lost = not crew.home.acquire(timeout=PATIENCE)
            raise
        if self._refusal is not None:
            raise self._refusal
        return self.ending

    def _wait(self) -> None:
        done = -1
        while not self._crew.home.acquire(timeout=PATIENCE):
            if len(self.trace) == done:
                self._crew.lost = True
                last = next((what for who, what in reversed(self.trace) if who == self.current), "it began")
                self.end("hung", f"thread {self.current} came to no yield point for {PATIENCE:.0f} s after: {last}")
                return
            done = len(self.trace)

    # -- for the thread that runs

    def pause(self, me: int, what: str) -> None:
        """A yield point: others may have run when it returns, and now `me` does `what`."""
        if self.over:
            raise Ended
        trace = self.trace
        if len(trace) >= self._most:
            raise self.end("livelock", f"{self._most} steps, and threads {_listed(self._left)} have not ended")
        chosen = self.choose(me)
        if chosen != me:
            self.current = chosen
            batons = self._crew.batons
            batons[chosen].release()
            batons[me].acquire()
            if self.over:
                raise Ended
        trace.append((me, what))

    def stand(self, me: int, what: str, before: Obstacle) -> None:
        """`me` cannot run before somebody calls `wake(me)`; others run meanwhile."""
        if self.over:
            raise Ended
        self.runnable.remove(me)
        self.waits[me] = before
        if not self.runnable and not self._expire():
            raise self._deadlock()
        self.pause(me, what)

    def wake(self, thread: int) -> None:
        """What the thread stood before is gone: it can run."""
        self.waits.pop(thread, None)
        self.timed.pop(thread, None)
        insort(self.runnable, thread)

    def bar(self, thread: int, before: Obstacle) -> None:
        """Another thread, which could run, cannot any longer."""
        self.runnable.remove(thread)
        self.waits[thread] = before

    def number(self, below: int) -> int:
        """The schedule's choice among so many."""
        try:
            return self._schedule.number(below)
        except Exception as refusal:  # why: a schedule may raise anything, and it ends the run
            raise self._refused(refusal) from refusal

    def end(self, kind: str, said: str) -> Ended:
        """The run is over, and this is what it came to, if nothing else was before it."""
        if not self.over:
            self.ending, self.over = Ending(kind, said), True
        return Ended()

    def choose(self, me: int) -> int:
        """Who runs next, by the schedule.  Raises `Ended` where the schedule raises."""
        try:
            return self._schedule.next(self.runnable, me)
        except Exception as refusal:  # why: a schedule may raise anything, and it ends the run
            raise self._refused(refusal) from refusal

    def _refused(self, refusal: Exception) -> Ended:
        self._refusal = self._refusal or refusal
        self.over = True
        return Ended()

    def _deadlock(self) -> Ended:
        told = "; ".join(f"thread {thread} waits for {self.waits[thread].why()}" for thread in sorted(self.waits))
        return self.end("deadlock", told)

    def _expire(self) -> bool:
        """Nobody can run: the time of the one who waits the shortest is over."""
        if not self.timed:
            return False
        thread = min(self.timed, key=lambda one: (self.timed[one], one))
        self.clock = self.timed[thread]
        obstacle = self.waits[thread]
        self.wake(thread)
        obstacle.expire(thread)
        return True

    # -- the life of a thread in one run

    def _live(self, me: int) -> None:
        try:
            if not self.over:
                self.trace.append((me, "begins"))
                self._threads[me]()
        except Ended:
            pass
        except BaseException as error:  # why: whatever a thread raises is what the run came to
            said = str(error).partition("\n")[0]
            self.end("raised", f"thread {me} raised {type(error).__name__}: {said}")
        try:
            self._leave(me)
        except Ended:
            self._end_the_rest()

    def _leave(self, me: int) -> None:
        self._left.remove(me)
        if not self.over:
            self.runnable.remove(me)
            if self._left and not self.runnable and not self._expire():
                self._deadlock()
            elif self.runnable:
                self._hand(self.choose(me))
                return
        self._end_the_rest()

    def _end_the_rest(self) -> None:
        """The next thread that has not ended unwinds; after the last, the caller goes on."""
        if self._left:
            self._hand(self._left[0])
        else:
            self.current = None
            self._crew.home.release()

    def _hand(self, thread: int) -> None:
        self.current = thread
        self._crew.batons[thread].release()


def _shut() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock


def _listed(threads: Sequence[int]) -> str:
    return ", ".join(map(str, threads))
