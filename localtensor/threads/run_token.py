"""One thread per rank, helper threads of ranks, and one run token: the thread that holds it runs, all others wait.

A rank passes the token on where it must wait (`block`) and may pass it on at any yield point (`pause`); a `Schedule`
chooses the next holder.  Threads are numbered: a rank's own thread by its rank, helper threads from `ranks` on, in the
order in which they are started.  So no two ranks run at once, and a run is a function of the schedule's choices.  If no rank
can run, `diagnose` is called, and every rank is ended where it is.

RecursionError and MemoryError may be raised at any call.  A step therefore either raises before it has changed anything
(`require_stack`), or ends the run with the exception; the token is passed on in both cases, so that no rank waits for ever.
"""

import ctypes
import functools
import sys
import threading
import time
from bisect import bisect_left, insort
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from typing import Concatenate, NoReturn, ParamSpec, TypeVar, cast

from localtensor._util.patching import replaced
from localtensor.concurrency.schedule import Schedule

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")

SHORT_GRACE = 0.01  # seconds that a rank has to end, once its peers have used up the common grace
WAIT_SLICE = 1.0  # seconds of one wait, so that Ctrl-C is seen
YIELD_GRACE = 0.1  # seconds in which the running rank may still reach a yield point by itself, which is safer


STACK_FRAMES = 80  # calls, Python's and C's, that a collective and a hand-over need below their caller
_allocate_lock = threading.Lock  # also while a run replaces it
_limit, _set_limit = sys.getrecursionlimit, sys.setrecursionlimit


@contextmanager
def stack_reserved() -> Iterator[None]:
    """Inside the block a thread's stack has `STACK_FRAMES` more than the program's recursion limit allows.

    So a collective works wherever it does in a process of its own, where only C++ runs below it.
    """
    before = _limit()
    _set_limit(before + STACK_FRAMES)
    try:
        with (
            replaced(sys, "getrecursionlimit", lambda: _limit() - STACK_FRAMES),
            replaced(sys, "setrecursionlimit", lambda limit: _set_limit(limit + STACK_FRAMES)),
        ):
            yield
    finally:
        _set_limit(before)


def require_stack() -> None:
    """Raise RecursionError, as the next deep call would, unless a collective and a hand-over fit on this thread's stack.

    Python refuses a recursion limit below the current depth; that takes 0.1 us, and counting the frames much longer.
    """
    limit = _limit()
    try:
        _set_limit(max(limit - STACK_FRAMES, 1))
    except RecursionError:
        raise RecursionError("maximum recursion depth exceeded while calling a collective") from None
    finally:
        _set_limit(limit)


def entirely(step: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """A step that is done entirely, or ends the run with what it raised: the ranks never go on after half of it."""

    @functools.wraps(step)
    def whole(self: S, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return step(self, *args, **kwargs)
        except Exception as crash:  # why: MemoryError may be raised at any call
            token: RunToken = self.run_token  # type: ignore[attr-defined]  # of a simulation
            token.abort_with(crash)

    return cast("Callable[Concatenate[S, P], T]", whole)


class Abort(BaseException):
    """Ends a rank whose run is over.  Not an `Exception`: a program must not catch it."""


class RunToken:
    """The threads of one run, of which one holds the token.

    `swap(old, new)` is called at each hand-over, before the new rank runs (None: no rank, at start and end);
    `expire()` when unfinished ranks remain and none of them can run, which wakes a rank whose time limit passes, and
    returns whether there is one; if not, `diagnose()`; `on_turn(rank)` in the rank's thread, when it
    has received the token.
    """

    def __init__(
        self,
        ranks: int,
        schedule: Schedule,
        swap: Callable[[int | None, int | None], None],
        diagnose: Callable[[], None],
        on_turn: Callable[[int], None] = lambda rank: None,
        expire: Callable[[], bool] = lambda: False,
    ) -> None:
        self.ranks = ranks
        self.holder: int | None = None
        self.aborting = False
        self.lost: set[int] = set()  # ranks that did not end when interrupted: what they do is ignored
        self.refusal: Exception | None = None  # what the schedule raised, which ended the run
        self.idents: dict[int, int] = {}  # of each thread
        self.numbers: dict[int, int] = {}  # the same, by ident
        self.rank_of = list(range(ranks))  # by the number of the thread
        self.ending: set[int] = set()  # helper threads that are to end at their next yield point
        self._schedule = schedule
        self._swap = swap
        self._diagnose = diagnose
        self._on_turn = on_turn
        self._expire = expire
        self._runnable = list(range(ranks))
        self._unfinished = set(range(ranks))
        self._polled: set[int] = set()  # ranks that polled since all runnable ones last had a turn
        self._locks = [_allocate_lock() for _ in range(ranks)]
        for lock in self._locks:
            lock.acquire()
        self._done = _allocate_lock()
        self._done.acquire()
        self._threads: list[threading.Thread] = []

    def start(self, body: Callable[[int], None]) -> None:
        """Start a thread per rank; the rank that the schedule chooses runs `body(rank)`."""
        self._schedule.begin(self.ranks)
        for rank in range(self.ranks):  # RuntimeError: the machine has no more threads
            thread = threading.Thread(target=self._run_rank, args=(rank, body), name=f"rank {rank}", daemon=True)
            self._threads.append(thread)
            thread.start()
        self._pass_on(None, self._schedule.next(self._runnable, None))

    def wait(self, seconds: float | None) -> bool:
        """True when every rank has finished; False if `seconds` passed before."""
        end = None if seconds is None else time.monotonic() + seconds
        # In slices: a Ctrl-C that arrives just before the wait is seen only when a wait ends.
        while not self._done.acquire(
            timeout=WAIT_SLICE if end is None else max(0.0, min(WAIT_SLICE, end - time.monotonic()))
        ):
            if end is not None and time.monotonic() >= end:
                return False
        self._done.release()
        return True

    def join(self) -> None:
        for number, thread in enumerate(self._threads):
            if number not in self.lost and thread.ident is not None:
                threading.Thread.join(thread)

    def interrupt(self, grace: float) -> tuple[int, ...]:
        """End every rank; returns the ranks that did not end.

        An exception is raised in the running rank, which has `grace` seconds; a rank stuck in a call into C cannot be
        stopped.  The others are then ended without it, within `grace` seconds for all of them together.  If this is
        itself interrupted, a second call continues it.
        """
        self.aborting = True
        if self.holder is not None and self.wait(YIELD_GRACE):
            return ()
        holder = self.holder
        if holder is not None and holder in self.idents:
            _raise_in(self.idents[holder], Abort)
            if self.wait(grace / 2):
                return ()
            if self.holder == holder and holder in self.idents:  # Python drops exceptions in callbacks of the collector
                _raise_in(self.idents[holder], Abort)
        if holder is None and self._unfinished:  # no rank has begun: those that have a thread begin, to end
            self._unfinished = {rank for rank, thread in enumerate(self._threads) if thread.ident is not None}
            self._end_next(None)
        last = None
        while not self.wait(grace if last is None else max(last - time.monotonic(), SHORT_GRACE)):
            stuck = self.holder
            if stuck is None:
                break
            last = last or time.monotonic() + grace
            self.lost.add(stuck)
            self._unfinished.discard(stuck)
            self._end_next(stuck)
        return tuple(sorted({self.rank_of[number] for number in self.lost}))

    def add(self, rank: int, thread: threading.Thread) -> int:
        """The number of a new helper thread of this rank; the thread is about to be started, and calls `run_helper`."""
        number = len(self.rank_of)
        self.rank_of.append(rank)
        lock = _allocate_lock()
        lock.acquire()
        self._locks.append(lock)
        self._threads.append(thread)
        self._unfinished.add(number)
        self._runnable.append(number)
        return number

    def withdraw(self, number: int) -> None:
        """Remove a helper thread that could not be started."""
        self._unfinished.discard(number)
        self._runnable.remove(number)

    def here(self) -> int:
        """The number of the calling thread.  Raises `Abort` in a thread of no rank."""
        number = self.numbers.get(threading.get_ident())
        if number is None:
            raise Abort
        return number

    def has_helpers(self) -> bool:
        """Whether a rank has started a thread in this run."""
        return len(self.rank_of) > self.ranks

    def helpers(self, rank: int) -> list[int]:
        """The helper threads of the rank that have not ended."""
        return [number for number in sorted(self._unfinished) if number >= self.ranks and self.rank_of[number] == rank]

    def pause(self, rank: int) -> None:
        """A yield point: other ranks may run before it returns."""
        self.check(rank)
        chosen = self._next(self._runnable, rank)
        if chosen != rank:
            self._pass_on(rank, chosen)
            self._await_turn(rank)

    def step_aside(self, rank: int) -> None:
        """A yield point of a rank that polls: all runnable ranks run first, else two polling ranks could loop for ever."""
        self.check(rank)
        self._polled.add(rank)
        others = [other for other in self._runnable if other not in self._polled]
        if not others:  # all have had a turn
            self._polled = {rank}
            others = [other for other in self._runnable if other != rank]
        if others:
            self._pass_on(rank, self._next(others, rank))
            self._await_turn(rank)

    def block(self, rank: int) -> None:
        """Wait until `wake(rank)` is called; raises `Abort` if that can no longer happen."""
        self.check(rank)
        del self._runnable[bisect_left(self._runnable, rank)]
        if not self._runnable and not self._expire():
            self._end_stuck()
            raise Abort
        chosen = self._next(self._runnable, rank)
        if chosen != rank:  # its own time limit has passed
            self._pass_on(rank, chosen)
            self._await_turn(rank)

    def only_runnable(self, ranks: Container[int]) -> bool:
        """Whether only these ranks can run."""
        return all(rank in ranks for rank in self._runnable)

    def others_can_run(self) -> bool:
        """Whether a thread can run beside the one that does."""
        return len(self._runnable) > 1

    def wake(self, rank: int) -> None:
        insort(self._runnable, rank)

    def number(self, below: int) -> int:
        """The schedule's choice of a number below `below`."""
        try:
            return self._schedule.number(below)
        except Exception as refusal:  # why: a schedule of the user's may raise anything
            raise self._aborted(refusal) from refusal

    def check(self, rank: int) -> None:
        """Raises `Abort` if the run is over."""
        if self.aborting or rank in self.lost or rank in self.ending:
            raise Abort

    def _next(self, runnable: list[int], rank: int) -> int:
        """The schedule's choice; if it raises (a replay of another program), the run is over."""
        try:
            return self._schedule.next(runnable, rank)
        except Exception as refusal:  # why: a schedule of the user's may raise anything
            raise self._aborted(refusal) from refusal

    def abort_with(self, crash: Exception) -> NoReturn:
        """End the run with this exception.  Never returns."""
        raise self._aborted(crash) from crash

    def _end_stuck(self) -> None:
        """End the run: some ranks wait, and none can run."""
        try:
            self._diagnose()
        except Exception as crash:  # why: the ranks must end also where the report itself fails (no memory)
            self._aborted(crash)
        self.aborting = True

    def _aborted(self, refusal: Exception) -> Abort:
        self.refusal = self.refusal or refusal
        self.aborting = True
        return Abort()

    def run_helper(self, number: int, body: Callable[[int], None]) -> None:
        """Run `body(number)` in this thread, which `add` has numbered, when it is its turn."""
        self._run_rank(number, body)

    def _run_rank(self, rank: int, body: Callable[[int], None]) -> None:
        try:
            self.idents[rank] = threading.get_ident()
            self.numbers[threading.get_ident()] = rank
            if self.aborting and rank not in self._unfinished:  # interrupted while the threads were being started
                return
            self._locks[rank].acquire()
            self._on_turn(rank)
            if not self.aborting:
                body(rank)
        except Abort:
            pass
        except Exception as crash:  # why: an error outside of the program; the run ends with it
            self._aborted(crash)
        finally:
            while True:
                try:
                    self._leave(rank)
                    break
                except Abort:  # raised while the rank was leaving; twice at most
                    continue
                except Exception as crash:  # why: the others wait for the token, which must be passed on
                    self._aborted(crash)

    def _leave(self, rank: int) -> None:
        """End the rank and pass the token on; a second call completes an interrupted first one."""
        if rank in self.lost or (self.holder != rank and rank not in self._unfinished):
            return
        if self.holder != rank:  # interrupted after a hand-over, before it waited
            self._locks[rank].acquire()
        self.numbers.pop(
            self.idents.pop(rank, 0), None
        )  # the system reuses the ident, perhaps for a thread of the user's
        self._unfinished.discard(rank)
        if not self.aborting:
            del self._runnable[bisect_left(self._runnable, rank)]
            if self._runnable or (self._unfinished and self._expire()):
                self._pass_on(rank, self._next(self._runnable, rank))
                return
            if self._unfinished:
                self._end_stuck()
        self._end_next(rank)

    def _end_next(self, rank: int | None) -> None:
        """Pass the token to the next unfinished rank, to unwind; after the last one the run is over."""
        if self._unfinished:
            self._pass_on(rank, min(self._unfinished))
        else:
            self._swap_state(rank, None)
            self.holder = None; self._done.release()  # fmt: skip  # noqa: E702

    def _pass_on(self, old: int | None, new: int) -> None:
        self._swap_state(old, new)
        lock = self._locks[new]
        self.holder = new; lock.release()  # fmt: skip  # noqa: E702  # one line: no exception comes between the two

    def _swap_state(self, old: int | None, new: int | None) -> None:
        before, after = None if old is None else self.rank_of[old], None if new is None else self.rank_of[new]
        if before == after:  # threads of one rank
            return
        try:
            self._swap(before, after)
        except Exception as crash:  # why: the state is then that of no rank; the run ends, and the token still moves
            self._aborted(crash)

    def _await_turn(self, rank: int) -> None:
        self._locks[rank].acquire()
        try:
            self._on_turn(rank)
        except Exception as crash:  # why: the caller of a finished wait cannot repeat it
            self._aborted(crash)
        self.check(rank)


def _raise_in(ident: int, kind: type[BaseException]) -> None:
    """Raise the exception in that thread when it next runs Python code (a CPython API)."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(kind))
