"""`SingleFlightCache` among threads: who computes, who waits, who is told what, and that nobody waits for ever."""

import _thread
import gc
import os
import select
import signal
import threading
import traceback
import warnings
import weakref

import pytest

from localtensor.concurrency import single_flight
from localtensor.concurrency.single_flight import SingleFlightCache, Stats, clear_all
from localtensor.concurrency.single_flight_cells import Circular, WaitGraph
from localtensor.concurrency.sync import ThreadSync
from tests.localtensor.single_flight_threads import LONG, Ended, Held, Running, Watched, send


@pytest.fixture
def watched():
    return Watched()


@pytest.fixture
def cache(watched):
    return SingleFlightCache(name="shared", sync=watched)


def one_computes_and_others_wait(cache, watched, held, others=4):
    """The threads, once all of them are where they should be."""
    first = Running(lambda: cache.get("key", held))
    assert held.begun.wait(LONG)
    rest = Running(*[lambda: cache.get("key", Held("computed twice"))] * others)
    watched.until("waits", others)
    return first, rest


def test_one_thread_computes_and_the_others_wait_for_it(cache, watched):
    held = Held("value")
    first, rest = one_computes_and_others_wait(cache, watched, held)
    held.go.set()
    assert first.ends() + rest.ends() == ["value"] * 5
    assert held.times == 1
    assert cache.stats() == Stats(hits=0, misses=1, waits=4, failures=0, evictions=0, size=1)


def test_those_who_wait_are_woken_and_need_not_look(cache, watched, monkeypatch):
    monkeypatch.setattr(single_flight, "SLICE", 10 * LONG)
    held = Held("value")
    first, rest = one_computes_and_others_wait(cache, watched, held)
    held.go.set()
    assert first.ends() + rest.ends() == ["value"] * 5


def test_other_keys_do_not_wait(cache):
    held = Held("slow")
    first = Running(lambda: cache.get("key", held))
    assert held.begun.wait(LONG)
    assert cache.get("other", lambda: "quick") == "quick"
    held.go.set()
    assert first.ends() == ["slow"]


class Refused(Exception):
    def __init__(self, what, *, hint="none"):
        super().__init__(what)
        self.hint = hint


def test_a_failure_is_raised_to_all_who_wait_each_its_own(cache, watched):
    refusal = Refused("no rule", hint="write one")
    refusal.__cause__ = KeyError("rule")
    held = Held(refusal)
    first, rest = one_computes_and_others_wait(cache, watched, held)
    held.go.set()
    errors = first.ends() + rest.ends()
    assert [(type(e), e.args, e.hint, e.__cause__) for e in errors] == [
        (Refused, ("no rule",), "write one", refusal.__cause__)
    ] * 5
    assert errors[0] is refusal and len(set(map(id, errors))) == 5
    assert cache.get("key", lambda: "anew") == "anew"


def test_the_traceback_of_a_failure_does_not_grow_with_those_who_hear_of_it(cache, watched):
    held = Held(Refused("no rule"))
    first, rest = one_computes_and_others_wait(cache, watched, held, others=6)
    held.go.set()
    lengths = [len(traceback.extract_tb(error.__traceback__)) for error in first.ends() + rest.ends()]
    assert max(lengths) - min(lengths) <= 2
    shown = traceback.extract_tb(rest.ends()[0].__traceback__)
    assert shown[-1].name == "__call__"  # where it was raised


class NotToBeCopied(Exception):
    def __init__(self, first, second):
        super().__init__("only one")


def test_an_exception_that_cannot_be_copied_is_shared(cache, watched):
    refusal = NotToBeCopied(1, 2)
    held = Held(refusal)
    first, rest = one_computes_and_others_wait(cache, watched, held)
    held.go.set()
    assert all(error is refusal for error in first.ends() + rest.ends())


@pytest.mark.parametrize("ending", [KeyboardInterrupt, SystemExit, Ended])
def test_if_the_thread_that_computes_is_ended_another_computes(cache, watched, ending):
    held = Held(ending())
    again = []
    first = Running(lambda: cache.get("key", held))
    assert held.begun.wait(LONG)
    rest = Running(*[lambda: cache.get("key", lambda: again.append(1) or "anew")] * 4)
    watched.until("waits", 4)
    held.go.set()
    assert [type(outcome) for outcome in first.ends()] == [ending]
    assert rest.ends() == ["anew"] * 4 and again == [1]
    assert cache.stats().failures == 0


def test_a_wait_is_ended_by_an_exception_from_another_thread(cache, watched):
    held = Held("value")
    first, rest = one_computes_and_others_wait(cache, watched, held, others=2)
    send(rest.threads[0], Ended)
    rest.threads[0].join(LONG)
    held.go.set()
    assert [type(outcome) for outcome in rest.ends()] == [Ended, str]
    assert first.ends() == ["value"] and cache.stats().waits == 1


def test_a_wait_is_ended_by_control_c(cache, watched):
    held = Held("value")
    first = Running(lambda: cache.get("key", held))
    assert held.begun.wait(LONG)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def press():
        watched.until("waits")
        _thread.interrupt_main()

    pressed = Running(press)
    try:
        with pytest.raises(KeyboardInterrupt):
            cache.get("key", lambda: "computed twice")
    finally:
        signal.signal(signal.SIGINT, before)
    held.go.set()
    assert first.ends() == ["value"] and pressed.ends() == [None]
    assert cache.get("key") == "value"


@pytest.mark.parametrize("threads", [2, 3, 5])
@pytest.mark.parametrize("caches", [1, 2])
def test_a_circle_of_threads_is_refused_to_the_one_that_closes_it(watched, threads, caches):
    some = [SingleFlightCache(name=f"cache {i}", sync=watched) for i in range(caches)]
    ready = threading.Barrier(threads)

    def compute(i):
        ready.wait(LONG)
        return some[(i + 1) % threads % caches].get((i + 1) % threads, lambda: "not in a circle")

    running = Running(*[lambda i=i: some[i % caches].get(i, compute, i) for i in range(threads)])
    outcomes = running.ends()
    assert {type(outcome) for outcome in outcomes} == {Circular}
    assert len({str(outcome) for outcome in outcomes}) == 1  # one closed it; the others hear why it failed
    assert str(outcomes[0]).count("which waits for") == threads - 2
    assert [cache.stats().size for cache in some] == [0] * caches


def test_a_circle_that_its_closer_survives_leaves_the_others_their_values(cache):
    ready = threading.Barrier(2)

    def strict():
        ready.wait(LONG)
        return cache.get("tolerant", lambda: "?")

    def tolerant():
        ready.wait(LONG)
        try:
            return cache.get("strict", lambda: "?")
        except Circular:
            return "on its own"

    outcomes = Running(lambda: cache.get("strict", strict), lambda: cache.get("tolerant", tolerant)).ends()
    assert outcomes[1] == "on its own"
    assert outcomes[0] == "on its own" or isinstance(outcomes[0], Circular)


def test_a_value_computed_while_cleared_goes_to_those_who_asked_before(cache, watched):
    old = Held("old")
    first, rest = one_computes_and_others_wait(cache, watched, old)
    cache.clear()
    assert cache.get("key", lambda: "new") == "new"
    old.go.set()
    assert first.ends() + rest.ends() == ["old"] * 5
    assert cache.get("key", lambda: "newer") == "new" and cache.stats().size == 1


def test_clearing_does_not_wait_for_who_computes(cache, watched):
    held = Held("old")
    first, rest = one_computes_and_others_wait(cache, watched, held)
    assert Running(cache.clear, clear_all).ends() == [None, None]
    held.go.set()
    assert first.ends() + rest.ends() == ["old"] * 5 and cache.stats().size == 0


def test_a_failure_from_before_a_clearing_does_not_touch_what_came_after(cache, watched):
    held = Held(Refused("old"))
    first, rest = one_computes_and_others_wait(cache, watched, held)
    cache.clear()
    cache.get("key", lambda: "new")
    held.go.set()
    assert {type(outcome) for outcome in first.ends() + rest.ends()} == {Refused}
    assert cache.get("key") == "new"


def test_an_equality_that_waits_for_another_thread_keeps_no_one_else_from_the_cache(cache):
    asked, go = threading.Event(), threading.Event()

    class Slow:
        def __hash__(self):
            return 5

        def __eq__(self, other):
            asked.set()
            assert go.wait(LONG)
            return False

    cache.get(5, lambda: "five")
    slow = Running(lambda: cache.get(Slow(), lambda: "slow"))
    assert asked.wait(LONG)
    assert cache.get(6, lambda: "six") == "six"
    with pytest.raises(Refused):
        cache.get(7, _refuse)
    cache.clear()
    go.set()
    assert slow.ends() == ["slow"]


def _refuse():
    raise Refused("seven")


def test_an_equality_that_asks_the_cache_itself_does_not_hang(cache):
    class Curious:
        def __init__(self, number):
            self.number = number

        def __hash__(self):
            return 5

        def __eq__(self, other):
            cache.get("from within", lambda: "seen")
            return self.number == other.number

    assert [cache.get(Curious(i % 3), lambda i=i: i) for i in range(6)] == [0, 1, 2, 0, 1, 2]
    assert cache.get("from within") == "seen"


class Impatient(ThreadSync):
    """A lock that is not to be had fails the test instead of hanging it."""

    def lock(self):
        return _ImpatientLock()


class _ImpatientLock:
    def __init__(self):
        self._lock = threading.Lock()

    def __enter__(self):
        assert self._lock.acquire(timeout=1.0)

    def __exit__(self, *_):
        self._lock.release()


def test_finalisers_that_ask_in_the_midst_of_the_caches_own_lines_get_an_answer_that_is_not_kept(monkeypatch):
    """One collection may run several of them."""
    cache, told = SingleFlightCache(name="handled", limit=1, sync=Impatient()), []
    whole = type(cache._table).make_space

    def make_space(table, limit):
        while len(told) < 3:
            told.append(None)
            told[-1] = cache.get("inner", lambda: "computed")
        return whole(table, limit)

    monkeypatch.setattr(type(cache._table), "make_space", make_space)
    assert cache.get("outer", lambda: "kept") == "kept"
    assert told == ["computed"] * 3 and cache.explain("inner") != "kept" and cache.explain("outer") == "kept"


def test_a_finaliser_that_waits_in_the_midst_of_the_circles_lines_computes_by_itself(monkeypatch):
    cache, held, told = SingleFlightCache(name="handled", sync=Impatient()), Held("value"), []
    first = Running(lambda: cache.get("key", held))
    assert held.begun.wait(LONG)
    circle = cache._wait_graph

    class Waits(dict):
        def get(self, owner, default=None):
            if not told and circle.own.by is not None:
                told.append(None)
                told.extend(cache.get("key", lambda: "by itself") for _ in range(2))  # two finalisers
                held.go.set()
            return super().get(owner, default)

    circle._waits = Waits()
    assert cache.get("key", lambda: "computed twice") == "value"
    assert told == [None, "by itself", "by itself"] and first.ends() == ["value"]


def test_counts_are_exact_with_many_threads(cache):
    def ask():
        for i in range(2000):
            cache.get(i % 50, lambda i=i: i % 50)

    Running(*[ask] * 8).ends()
    stats = cache.stats()
    assert stats.hits + stats.misses + stats.waits == 8 * 2000
    assert stats.misses == stats.size == 50


def test_a_limit_holds_at_every_moment(watched):
    cache = SingleFlightCache(name="small", limit=5, sync=watched)
    sizes = []

    def ask():
        for i in range(400):
            assert cache.get(i % 17, lambda i=i: i % 17) == i % 17
            sizes.append(cache.stats().size)

    assert Running(*[ask] * 4).ends() == [None] * 4
    assert 0 < max(sizes) <= 5


def forked(child):
    """What a forked child wrote; it has `LONG` seconds."""
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # that a process with threads forks is the point
        pid = os.fork()
    if pid == 0:
        try:
            os.write(write, repr(child()).encode())
        finally:
            os._exit(0)
    os.close(write)
    ready, _, _ = select.select([read], [], [], LONG)
    if not ready:
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    answer = os.read(read, 1000).decode()
    os.close(read)
    return answer or "no answer"


needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")


@needs_fork
def test_a_child_forked_while_others_compute_computes_for_itself(cache, watched):
    held = Held("of the parent")
    cache.get("kept", lambda: "before")
    first, rest = one_computes_and_others_wait(cache, watched, held)
    assert forked(lambda: (cache.get("key", lambda: "of the child"), cache.get("kept"))) == "('of the child', 'before')"
    held.go.set()
    assert first.ends() + rest.ends() == ["of the parent"] * 5


@needs_fork
def test_a_child_forked_while_another_thread_has_the_locks_has_its_own():
    cache = SingleFlightCache(name="forked")

    def child():
        with pytest.raises(Circular):
            cache.get("key", lambda: cache.get("key", str))
        return cache.get("key", lambda: "child")

    with cache._own.lock, cache._wait_graph.own.lock:
        answers = Running(lambda: forked(child)).ends()
    assert answers == ["'child'"]


@needs_fork
def test_a_computation_that_forks_goes_on_in_both(cache):
    def compute():
        return (os.getpid(), forked(lambda: cache.explain("key")))

    assert cache.get("key", compute) == (os.getpid(), "'being computed'")
    assert cache.explain("key") == "kept"


def test_threads_with_the_same_services_share_one_circle(watched):
    one, other = SingleFlightCache(name="one", sync=watched), SingleFlightCache(name="other", sync=watched)
    assert one._wait_graph is other._wait_graph is not SingleFlightCache(name="real threads")._wait_graph
    assert isinstance(one._wait_graph, WaitGraph)


def test_services_live_no_longer_than_their_caches():
    sync = Watched()
    cache = SingleFlightCache(str, name="short", sync=sync)
    cache.get(1)
    known = weakref.ref(sync)
    del cache, sync
    gc.collect()
    assert known() is None
