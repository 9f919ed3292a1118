"""The shared cache under many interleavings: nothing is found in it, and what is broken in it on purpose is found."""

import _thread
import contextlib
import signal
import threading

import pytest

from localtensor.concurrency.explorer import explore, replay
from localtensor.concurrency.single_flight import SingleFlightCache
from localtensor.concurrency.single_flight_cells import COMPUTING, FAILED, BucketTable, Circular
from strategies.propagation.races import cache_programs, linearizability
from strategies.propagation.races import explore as races
from strategies.propagation.races.cache_programs import CacheUnderTest
from tests.localtensor.single_flight_threads import LONG, Held, Running, Watched

CI = 2_600
WITHIN = 1000


@contextlib.contextmanager
def interrupted(watched, handle):
    """A signal reaches the main thread as soon as somebody waits for a key; a test that hangs is interrupted, and fails."""

    def send():
        watched.until("waits")
        signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)

    def ring():
        rung.append(None)
        _thread.interrupt_main()

    rung, before = [], signal.signal(signal.SIGUSR1, lambda number, frame: handle())
    alarm = threading.Timer(LONG, ring)
    alarm.start()
    try:
        sender = Running(send)
        yield
        assert sender.ends() == [None]
    except KeyboardInterrupt:
        assert not rung, "it hangs"
        raise
    finally:
        alarm.cancel()
        signal.signal(signal.SIGUSR1, before)


def test_a_signal_handler_may_ask_in_the_midst_of_a_wait():
    """For another key, for the one that is waited for, and for that which its own thread computes: this is refused."""
    watched, told, held = Watched(), [], Held("value")
    cache = SingleFlightCache(name="handled", sync=watched)

    def handle():
        told.append(cache.get("other", lambda: "computed in the handler"))
        with pytest.raises(Circular, match="this thread is computing it now"):
            cache.get("mine", lambda: "computed twice")
        held.go.set()
        told.append(cache.get("key", lambda: "computed twice"))

    first = Running(lambda: cache.get("key", held))
    assert held.begun.wait(LONG)
    with interrupted(watched, handle):
        assert cache.get("mine", lambda: cache.get("key", lambda: "computed twice")) == "value"
    assert told == ["computed in the handler", "value"] and first.ends() == ["value"]
    assert cache._wait_graph._waits == {} and cache.stats().misses == 3


def test_what_a_thread_waits_for_is_known_again_once_its_signal_handler_has_waited_for_something_else():
    watched, told, held, quick = Watched(), [], Held(), Held("quick")
    cache = SingleFlightCache(name="handled", sync=watched)

    def slow():
        held()
        with pytest.raises(Circular, match="it waits for 'key', which this thread is computing"):
            cache.get("mine", lambda: "computed twice")
        return "value"

    def handle():
        other = Running(lambda: cache.get("quick", quick))
        assert quick.begun.wait(LONG)
        release = Running(lambda: watched.until("waits", 2) or quick.go.set())
        told.append(cache.get("quick", lambda: "computed twice"))
        told.extend(other.ends() + release.ends())
        held.go.set()

    first = Running(lambda: cache.get("key", slow))
    assert held.begun.wait(LONG)
    with interrupted(watched, handle):
        assert cache.get("mine", lambda: cache.get("key", lambda: "computed twice")) == "value"
    assert told == ["quick", "quick", None] and first.ends() == ["value"]


@pytest.mark.slow
def test_nothing_is_found_in_thousands_of_schedules():
    tried = races.explore_all(races.ONCE, CI)
    assert [(one.name, one.failure) for one in tried if one.failure] == []
    assert sum(one.schedules for one in tried) == CI
    assert len(tried) == 13


class Resurrects(SingleFlightCache):
    """What is computed is kept in the room of now, though it was asked for before the clear."""

    def _keep(self, room, cell):
        self._sync.step("keeps")
        others = self._table.get(cell.number, ())
        self._table[cell.number] = (*(one for one in others if one is not cell), cell)
        super()._keep(self._table, cell)


class ClearsDoneOnly(SingleFlightCache):
    """What is being computed stays where it is."""

    def clear(self):
        kept = BucketTable()
        for number, cells in self._table.items():
            busy = tuple(cell for cell in cells if cell.state is COMPUTING)
            if busy:
                kept[number] = busy
        self._sync.step("clear")
        self._table = kept


class KeepsFailures(SingleFlightCache):
    def _forget(self, room, cell):
        self._sync.step("forgets nothing")


class NeverSettles(SingleFlightCache):
    """Whoever waits for a computation that was ended is not told."""

    def _settle(self, room, cell):
        self._sync.step("settles nothing")


class TellsTooEarly(SingleFlightCache):
    """The state is written before the value."""

    def _work(self, room, cell, compute, args):
        cell.gate.open()
        return super()._work(room, cell, compute, args)

    def _answered(self, cell, me):
        self._sync.step("does not look at the state")
        return cell.state is not FAILED


class ClaimsWithoutLooking(SingleFlightCache):
    """Takes the key without a second look behind the lock."""

    def _claim(self, room, mine):
        for cell in room.get(mine.number, ()):
            if cell.key == mine.key:
                return cell
        self._sync.step("looked")
        mine.claimed = True
        room[mine.number] = (*room.get(mine.number, ()), mine)
        return mine


class DropsWhatIsComputed(SingleFlightCache):
    """Makes space by forgetting whatever is there."""

    def _claim(self, room, mine):
        if sum(map(len, room.values())) >= self._limit:
            room.clear()
        return super()._claim(room, mine)


def of(program, broken):
    """The program, over a broken cache."""

    class Broken(CacheUnderTest):
        def make(self, sync, limit):
            return broken(name="broken", limit=limit, sync=sync)

    return lambda sync: program(sync, Broken)


BROKEN = [
    (cache_programs.cleared_twice, Resurrects),
    (cache_programs.cleared, ClearsDoneOnly),
    (cache_programs.failing, KeepsFailures),
    (cache_programs.interrupted_owner, NeverSettles),
    (cache_programs.asks, TellsTooEarly),
    (cache_programs.asks, ClaimsWithoutLooking),
    (cache_programs.colliding, ClaimsWithoutLooking),
    (cache_programs.crowded, DropsWhatIsComputed),
]
CASES = [(program, broken, policy) for program, broken in BROKEN for policy in ("pct", "bounded")]
CASES += [(linearizability.calls, broken, "pct") for broken in (Resurrects, ClearsDoneOnly, ClaimsWithoutLooking)]
# The 729 ways to draw the six calls come first in a bounded search, which is not through with them in so few schedules.


@pytest.mark.parametrize(("program", "broken", "policy"), CASES, ids=lambda one: getattr(one, "__name__", one))
def test_a_cache_broken_on_purpose_is_found_out(program, broken, policy):
    made = of(program, broken)
    found = explore(made, policy=policy, schedules=WITHIN, steps=1000)
    assert found.failure is not None and found.failure.repeats
    assert replay(made, found.failure.text, steps=1000) == found.failure
