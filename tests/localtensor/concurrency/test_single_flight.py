"""`SingleFlightCache` in one thread: a dictionary that computes, forgets failures, stays small and can explain itself."""

import _thread
import copy
import dataclasses
import gc
import operator
import signal
import threading
import weakref
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from localtensor._util import ambient
from localtensor.concurrency.single_flight import BadCache, SingleFlightCache, Stats, _own_copy, clear_all
from localtensor.concurrency.single_flight_cells import BucketTable, CacheCell, Circular, short_repr
from localtensor.concurrency.sync import ThreadSync


def test_a_key_is_computed_once():
    computed = []
    cache = SingleFlightCache(lambda key: computed.append(key) or f"value of {key}", name="values")
    assert [cache.get(key) for key in (1, 2, 1, 2, 1)] == [f"value of {key}" for key in (1, 2, 1, 2, 1)]
    assert computed == [1, 2]
    assert cache.stats() == Stats(hits=3, misses=2, waits=0, failures=0, evictions=0, size=2)


class Poisoned:
    def __enter__(self):
        raise AssertionError("the lock was taken")

    def __exit__(self, *_):
        """Never entered."""


def test_a_hit_takes_no_lock_and_a_miss_does():
    lengths = SingleFlightCache(
        len, name="lengths", sync=ThreadSync()
    )  # of its own: who waits for whom is told by services
    assert lengths.get("abc") == 3
    lengths._own.lock = lengths._wait_graph.own.lock = Poisoned()
    assert [lengths.get("abc") for _ in range(3)] == [3, 3, 3]
    with pytest.raises(AssertionError, match="the lock was taken"):
        lengths.get("abcd")


def test_a_call_may_bring_its_own_computation_and_its_arguments():
    cache = SingleFlightCache(name="sums")
    assert cache.get("a", lambda *numbers: sum(numbers), 1, 2, 3) == 6
    assert cache.get("a", lambda: 0) == 6


def test_None_and_false_values_are_kept_as_well():
    cache = SingleFlightCache(name="empty")
    assert [cache.get(i, lambda value=value: value) for i, value in enumerate((None, 0, "", False))] == [None, 0, "", 0]
    assert cache.get(0, lambda: 1) is None and cache.stats().size == 4


def test_statistics_are_a_value():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SingleFlightCache(name="any").stats().hits = 1


def test_a_failure_is_raised_and_not_kept():
    cache = SingleFlightCache(name="halves")
    with pytest.raises(ZeroDivisionError):
        cache.get(1, lambda: 1 / 0)
    assert cache.get(1, lambda: "now it works") == "now it works"
    assert cache.stats() == Stats(hits=0, misses=2, waits=0, failures=1, evictions=0, size=1)


@pytest.mark.parametrize("ending", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_what_ends_a_thread_passes_through_and_keeps_nothing(ending):
    cache = SingleFlightCache(name="ended")

    def end():
        raise ending

    with pytest.raises(ending):
        cache.get(1, end)
    assert cache.get(1, lambda: 2) == 2
    assert cache.stats().failures == 0


def test_a_failure_leaves_no_garbage():
    cache, seen = SingleFlightCache(name="clean"), []

    class Odd(Exception):
        def __init__(self):
            seen.append(weakref.ref(self))

    def fail():
        raise Odd

    gc.collect()
    gc.disable()
    try:
        with suppress(Odd):
            cache.get(1, fail)
        assert seen[0]() is None
    finally:
        gc.enable()


def test_asking_for_what_one_computes_is_refused_at_once_and_names_the_key():
    cache = SingleFlightCache(name="recursive")
    with pytest.raises(
        Circular, match=r"recursive\.get: key: 'the key': this thread is computing it now, and asks for it again\. Let"
    ):
        cache.get("the key", lambda: cache.get("the key", lambda: 1))
    assert cache.get("the key", lambda: 2) == 2


@pytest.mark.parametrize(("long", "shown"), [(198, "x" * 198 + "'"), (199, "x" * 196 + "...")])
def test_a_key_is_shown_in_two_hundred_characters(long, shown):
    assert short_repr("x" * long) == f"'{shown}" and len(short_repr("x" * long)) == 200


def test_a_circle_by_way_of_another_cache_is_refused():
    first, second = SingleFlightCache(name="first"), SingleFlightCache(name="second")

    def from_second():
        return second.get("b", lambda: first.get("a", from_second))

    with pytest.raises(Circular, match=r"first\.get: key: 'a'"):
        first.get("a", from_second)


def test_a_computation_may_ask_for_other_keys():
    cache = SingleFlightCache(lambda n: n if n < 2 else cache.get(n - 1) + cache.get(n - 2), name="fibonacci")
    assert cache.get(60) == 1548008755920
    assert cache.stats().misses == 61


def test_errors_can_be_copied():
    error = Circular("cache", ["a", "b", "c"])
    assert str(copy.copy(error)) == str(error) and "'b', which waits for 'c'" in str(error)


@pytest.mark.parametrize("limit", [0, -1, 1.5, True, None, "many"])
def test_a_limit_below_one_value_is_refused(limit):
    with pytest.raises(
        BadCache, match=r"SingleFlightCache: limit: .*: a cache keeps one value or more\. Pass a whole number"
    ):
        SingleFlightCache(name="none", limit=limit)


def test_a_miss_without_a_computation_is_refused():
    cache = SingleFlightCache(name="mute")
    with pytest.raises(BadCache, match=r"mute\.get: compute: None: nothing says how to compute\. Pass a function"):
        cache.get(1)
    cache.get(1, lambda: 2)
    assert cache.get(1) == 2


def test_the_oldest_goes_first_unless_it_was_hit():
    cache = SingleFlightCache(str, name="small", limit=3)
    for key in (1, 2, 3, 1, 4):  # 1 is hit, so 2 goes for 4
        cache.get(key)
    assert [cache.explain(key) == "kept" for key in (1, 2, 3, 4)] == [True, False, True, True]
    assert cache.stats().evictions == 1 and cache.stats().size == 3


def test_it_stays_small_when_everything_is_hit_all_the_time():
    cache = SingleFlightCache(str, name="small", limit=4)
    for key in range(100):
        for known in range(key):
            cache.get(known)
        cache.get(key)
        assert cache.stats().size <= 4


def test_colliding_hashes_are_distinguished():
    class Colliding(int):
        def __hash__(self):
            return 7

    cache = SingleFlightCache(int, name="colliding", limit=50)
    assert [cache.get(Colliding(i)) for _ in range(2) for i in range(100)] == [i for _ in range(2) for i in range(100)]
    assert cache.stats().size == 50


def test_who_saw_a_key_that_is_gone_by_now_looks_again():
    table, (first, second) = BucketTable(), (CacheCell(key, 1, 0, ThreadSync().gate()) for key in "ab")
    assert table.try_add(first, ())
    seen = table[1]
    table.remove(first)
    assert not table.try_add(second, seen) and 1 not in table
    assert table.try_add(second, ()) and table[1] == (second,)


def test_a_key_that_equals_nothing_is_known_by_identity():
    nan = float("nan")
    cache = SingleFlightCache(str, name="nan")
    assert [cache.get(nan), cache.get(nan)] == ["nan", "nan"] and cache.stats().hits == 1


@pytest.mark.parametrize("where", ["__eq__", "__hash__"])
def test_a_key_that_raises_leaves_the_cache_as_it_was(where):
    def refuse(*_):
        raise OSError(where)

    bad = type("Bad", (), {"__eq__": lambda *_: True, "__hash__": lambda _: 3, where: refuse})
    cache = SingleFlightCache(str, name="bad keys")
    cache.get(3)
    before = cache.stats()
    with pytest.raises(OSError, match=where):
        cache.get(bad())
    with pytest.raises(OSError, match=where):
        cache.explain(bad())
    assert cache.stats() == before and cache.get(3) == "3" and cache.get(4) == "4"


def test_an_unhashable_key_is_a_type_error():
    with pytest.raises(TypeError, match="unhashable"):
        SingleFlightCache(str, name="lists").get([])


def test_clearing_forgets_all():
    cache = SingleFlightCache(str, name="cleared")
    cache.get(1)
    cache.clear()
    assert cache.stats().size == 0 and cache.get(1) == "1" and cache.stats().misses == 2


def test_clearing_all_clears_every_cache_that_lives():
    caches = [SingleFlightCache(str, name=f"cache {i}") for i in range(3)]
    for cache in caches:
        cache.get(1)
    clear_all()
    assert [cache.stats().size for cache in caches] == [0, 0, 0]


def test_the_process_does_not_keep_a_cache_alive():
    cache = SingleFlightCache(str, name="short life")
    known, before = weakref.ref(cache), len(ambient.caches())
    del cache
    gc.collect()
    assert known() is None and len(ambient.caches()) < before


@pytest.mark.skipif(threading.current_thread() is not threading.main_thread(), reason="Ctrl-C is the main thread's")
def test_a_ctrl_c_that_comes_while_a_cache_dies_is_not_lost():
    """Python prints what a callback of a weak reference raises, and goes on: no line of Python may run in it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    holder = [SingleFlightCache(str, name="short life")]
    known = len(ambient.caches())
    try:
        with pytest.raises(KeyboardInterrupt):
            list(map(operator.methodcaller("__call__"), (_thread.interrupt_main, holder.clear)))
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(ambient.caches()) == known - 1


def test_a_value_computed_over_a_clearing_is_not_kept():
    cache = SingleFlightCache(name="cleared within")
    assert cache.get(1, lambda: cache.clear() or "old") == "old"
    assert cache.get(1, lambda: "new") == "new"


@dataclass(frozen=True)
class Question:
    op: str
    placements: str
    dim: object = None


def test_a_miss_is_explained_by_the_nearest_key():
    cache = SingleFlightCache(str, name="questions")
    assert cache.explain(Question("sum", "S(0)", -1)) == "nothing is kept"
    for key in (Question("sum", "S(0)", 1), Question("sum", "R", 1), Question("mul", "R")):
        cache.get(key)
    assert cache.explain(Question("sum", "S(0)", 1)) == "kept"
    assert cache.explain(Question("sum", "S(0)", -1)) == "same op and placements; differs in: dim=-1 vs 1"
    assert cache.explain(Question("mul", "S(1)")) == "same op and dim; differs in: placements='S(1)' vs 'R'"


def test_values_of_other_types_are_no_same_parts():
    cache = SingleFlightCache(str, name="types")
    cache.get((1, "a"))
    assert cache.explain((True, "b")) == "differs in: [0]=True vs 1, [1]='b' vs 'a'"


def test_what_is_being_computed_is_said_to_be():
    cache = SingleFlightCache(name="now")
    assert cache.get(1, lambda: cache.explain(1)) == "being computed"


@pytest.mark.parametrize("key", [0, "", (), None])
def test_any_key_can_be_explained(key):
    cache = SingleFlightCache(str, name="any")
    cache.get(5)
    assert cache.explain(key).startswith("differs in: ")


class Machine(RuleBasedStateMachine):
    """`SingleFlightCache` beside an ordered dictionary from key to [value, whether it was hit]."""

    LIMIT = 3

    def __init__(self):
        super().__init__()
        self.cache = SingleFlightCache(name="machine", limit=self.LIMIT)
        self.model = OrderedDict()
        self.computed = 0

    @rule(key=st.integers(0, 6))
    def get(self, key):
        self.computed += 1
        fresh = f"{key}: {self.computed}"
        if key in self.model:
            self.model[key][1] = True
            assert self.cache.get(key, lambda: fresh) == self.model[key][0]
        else:
            assert self.cache.get(key, lambda: fresh) == fresh
            self.make_space()
            self.model[key] = [fresh, False]

    @rule(key=st.integers(0, 6))
    def fail(self, key):
        def refuse():
            raise LookupError(key)

        if key in self.model:
            self.model[key][1] = True
            assert self.cache.get(key, refuse) == self.model[key][0]
        else:
            with pytest.raises(LookupError):
                self.cache.get(key, refuse)

    @rule()
    def clear(self):
        self.cache.clear()
        self.model.clear()

    def make_space(self):
        while len(self.model) >= self.LIMIT:
            key, (value, hit) = next(iter(self.model.items()))
            del self.model[key]
            if hit:
                self.model[key] = [value, False]

    @invariant()
    def keeps_what_the_model_keeps(self):
        assert [self.cache.explain(key) == "kept" for key in range(7)] == [key in self.model for key in range(7)]
        assert self.cache.stats().size == len(self.model)


Machine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestMachine = Machine.TestCase


@pytest.mark.parametrize("hidden", [True, False])
def test_a_failure_that_another_thread_hears_of_reads_as_the_first_does(hidden):
    error = ValueError("no rule")
    error.__context__, error.__suppress_context__ = KeyError("within"), hidden
    twin = _own_copy(error)
    assert twin is not error and str(twin) == "no rule"
    assert twin.__context__ is error.__context__ and twin.__suppress_context__ is hidden


def test_a_failure_whose_copy_is_of_another_class_is_shared():
    class Odd(Exception):
        def __copy__(self):
            return ValueError("something else")

    error = Odd()
    assert _own_copy(error) is error
