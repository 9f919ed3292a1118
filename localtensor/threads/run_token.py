"""One thread a rank, and one baton: who holds it runs, everybody else stands still.

A rank hands the baton on where it must wait (`block`) and may hand it on at any yield point (`pause`); a
`Schedule` says to whom.  So nothing here is ever run by two threads at once, and a run is a function of the
schedule's answers.  If nobody can run, `judge` says why, and every rank is ended where it stands.
"""

import ctypes
import threading
import time
from bisect import bisect_left, insort
from collections.abc import Callable, Container

from localtensor.concurrency.schedule import Schedule

BRIEF = 0.01  # seconds that a rank has to end, once its peers have used up the time for it
SLICE = 1.0  # seconds of one wait
COURTESY = 0.1  # seconds in which the rank that runs may still come to a yield point by itself, which is safer


class Abort(BaseException):
    """Ends a rank whose program has been judged already.  Not an `Exception`: a program must not catch it."""


class Baton:
    """The threads of one run.

    `swap(old, new)` is called at each hand-over, before the new rank runs (None: nobody, at both ends);
    `judge()` when unfinished ranks remain and none of them can run; `turn(rank)` in that rank's thread, when it has
    got the baton.  All run in some rank's thread.
    """

    def __init__(
        self,
        ranks: int,
        schedule: Schedule,
        swap: Callable[[int | None, int | None], None],
        judge: Callable[[], None],
        turn: Callable[[int], None] = lambda rank: None,
    ) -> None:
        self.ranks = ranks
        self.holder: int | None = None
        self.aborting = False
        self.lost: set[int] = set()  # ranks that no longer obey: what they do is ignored
        self.refusal: Exception | None = None  # what the schedule raised, which ended the run
        self.idents: dict[int, int] = {}
        self._schedule = schedule
        self._swap = swap
        self._judge = judge
        self._turn = turn
        self._runnable = list(range(ranks))
        self._unfinished = set(range(ranks))
        self._polled: set[int] = set()  # since all that can run last had a turn
        self._locks = [threading.Lock() for _ in range(ranks)]
        for lock in self._locks:
            lock.acquire()
        self._done = threading.Lock()
        self._done.acquire()
        self._threads: list[threading.Thread] = []

    # -- called by the thread that wants the run

    def start(self, body: Callable[[int], None]) -> None:
        """Each rank has a thread; the first that the schedule names runs `body(rank)`."""
        self._schedule.begin(self.ranks)
        for rank in range(self.ranks):  # RuntimeError: the machine has no more threads
            thread = threading.Thread(target=self._live, args=(rank, body), name=f"rank {rank}", daemon=True)
            self._threads.append(thread)
            thread.start()
        self._pass_on(None, self._schedule.next(self._runnable, None))

    def wait(self, seconds: float | None) -> bool:
        """True once every rank has finished; False if `seconds` passed before."""
        end = None if seconds is None else time.monotonic() + seconds
        # In slices: a Ctrl-C that comes just before the wait is seen only when a wait ends.
        while not self._done.acquire(timeout=SLICE if end is None else max(0.0, min(SLICE, end - time.monotonic()))):
            if end is not None and time.monotonic() >= end:
                return False
        self._done.release()
        return True

    def join(self) -> None:
        for rank, thread in enumerate(self._threads):
            if rank not in self.lost and thread.ident is not None:
                thread.join()

    def interrupt(self, grace: float) -> tuple[int, ...]:
        """Every rank has ended, or is named in the answer: it did not obey.

        The rank that runs is sent an exception, and has `grace` seconds; one that is stuck in a call into C cannot be
        stopped.  The others are then ended without it, and have as long, but all together: there may be hundreds.
        If this is interrupted itself, a second call goes on from there.
        """
        self.aborting = True
        if self.holder is not None and self.wait(COURTESY):
            return ()
        holder = self.holder
        if holder is not None and holder in self.idents:
            _raise_in(self.idents[holder], Abort)
            if self.wait(grace / 2):
                return ()
            if self.holder == holder and holder in self.idents:  # Python drops what is raised in a collector's callback
                _raise_in(self.idents[holder], Abort)
        if holder is None and self._unfinished:  # nobody has begun: those that have a thread begin, to end
            self._unfinished = {rank for rank, thread in enumerate(self._threads) if thread.ident is not None}
            self._end_the_rest(None)
        last = None
        while not self.wait(grace if last is None else max(last - time.monotonic(), BRIEF)):
            stuck = self.holder
            if stuck is None:
                break
            last = last or time.monotonic() + grace
            self.lost.add(stuck)
            self._unfinished.discard(stuck)
            self._end_the_rest(stuck)
        return tuple(sorted(self.lost))

    # -- called by the rank that holds the baton

    def pause(self, rank: int) -> None:
        """A yield point: somebody else may have run when it returns."""
        self.check(rank)
        chosen = self._next(self._runnable, rank)
        if chosen != rank:
            self._pass_on(rank, chosen)
            self._stand(rank)

    def step_aside(self, rank: int) -> None:
        """A yield point of a rank that polls: whoever can run runs first, or two that poll could go on for ever."""
        self.check(rank)
        self._polled.add(rank)
        others = [other for other in self._runnable if other not in self._polled]
        if not others:  # everybody has had a turn
            self._polled = {rank}
            others = [other for other in self._runnable if other != rank]
        if others:
            self._pass_on(rank, self._next(others, rank))
            self._stand(rank)

    def block(self, rank: int) -> None:
        """Returns when somebody has called `wake(rank)`; raises `Abort` if that can no longer happen."""
        self.check(rank)
        del self._runnable[bisect_left(self._runnable, rank)]
        if not self._runnable:
            self._judge()
            self.aborting = True
            raise Abort
        self._pass_on(rank, self._next(self._runnable, rank))
        self._stand(rank)

    def only(self, ranks: Container[int]) -> bool:
        """No other ranks can run."""
        return all(rank in ranks for rank in self._runnable)

    def wake(self, rank: int) -> None:
        insort(self._runnable, rank)

    def number(self, below: int) -> int:
        """The schedule's choice among so many."""
        try:
            return self._schedule.number(below)
        except Exception as refusal:  # why: a schedule of the user's may raise anything
            raise self._refused(refusal) from refusal

    def check(self, rank: int) -> None:
        """Raises `Abort` if the run is over."""
        if self.aborting or rank in self.lost:
            raise Abort

    def _next(self, runnable: list[int], rank: int) -> int:
        """Whom the schedule names; if it refuses (a replay of another program), the run is over."""
        try:
            return self._schedule.next(runnable, rank)
        except Exception as refusal:  # why: a schedule of the user's may raise anything
            raise self._refused(refusal) from refusal

    def give_up(self, crash: Exception) -> None:
        """The run is over, and `refusal` says why.  Never returns."""
        raise self._refused(crash) from crash

    def _refused(self, refusal: Exception) -> Abort:
        self.refusal = self.refusal or refusal
        self.aborting = True
        return Abort()

    # -- the threads

    def _live(self, rank: int, body: Callable[[int], None]) -> None:
        self.idents[rank] = threading.get_ident()
        if self.aborting and rank not in self._unfinished:  # the run was interrupted while its threads were made
            return
        try:
            self._locks[rank].acquire()
            self._turn(rank)
            if not self.aborting:
                body(rank)
        except Abort:
            pass
        finally:
            while True:
                try:
                    self._leave(rank)
                    break
                except Abort:  # it was sent when the rank was on its way out; that happens twice at most
                    continue

    def _leave(self, rank: int) -> None:
        """The rank is gone, and another has the baton; a second call does what the first could not."""
        if rank in self.lost or (self.holder != rank and rank not in self._unfinished):
            return
        if self.holder != rank:  # it was sent away when it had handed over, and did not stand still yet
            self._locks[rank].acquire()
        self.idents.pop(rank, None)  # the system gives the number to the next thread, which may be one of the user's
        self._unfinished.discard(rank)
        if not self.aborting:
            del self._runnable[bisect_left(self._runnable, rank)]
            if self._runnable:
                self._pass_on(rank, self._next(self._runnable, rank))
                return
            if self._unfinished:
                self._judge()
                self.aborting = True
        self._end_the_rest(rank)

    def _end_the_rest(self, rank: int | None) -> None:
        """The next unfinished rank gets the baton, to unwind; after the last, the run is over."""
        if self._unfinished:
            self._pass_on(rank, min(self._unfinished))
        else:
            self._swap(rank, None)
            self.holder = None
            self._done.release()

    def _pass_on(self, old: int | None, new: int) -> None:
        self._swap(old, new)
        self.holder = new
        self._locks[new].release()

    def _stand(self, rank: int) -> None:
        self._locks[rank].acquire()
        self._turn(rank)
        self.check(rank)


def _raise_in(ident: int, kind: type[BaseException]) -> None:
    """The exception is raised in that thread as soon as it runs Python code again (CPython's own way to do it)."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(kind))
