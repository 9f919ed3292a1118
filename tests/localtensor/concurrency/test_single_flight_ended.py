"""A thread that uses `SingleFlightCache` may be ended anywhere: nobody else is held up, and no value is lost or made up.

The rank engine ends a rank with an exception that lands between any two lines.  Here it lands after each line of the
cache's own code in turn, in the thread that computes and in one that waits.
"""

import os
import sys
import threading

import pytest

from localtensor.concurrency import single_flight, single_flight_cells
from localtensor.concurrency.single_flight import SingleFlightCache
from tests.localtensor.single_flight_threads import LONG, Ended, Held, Running, Watched

pytestmark = pytest.mark.skipif(
    "LOCALTENSOR_BRANCHES" in os.environ, reason="under `make branches` the mark of a branch is a line to be ended at"
)
OURS = {single_flight.__file__, single_flight_cells.__file__}


def lines_of(file):
    with open(file) as source:
        return source.read().splitlines()


LINES = {file: lines_of(file) for file in OURS}


def lands(frame):
    """Python raises what another thread sends where a call returns or a loop turns: not between taking a lock and
    holding it, nor on a line that does nothing.
    """
    return not LINES[frame.f_code.co_filename][frame.f_lineno - 1].strip().startswith(("with ", "try:"))


class EndsAt:
    """Runs a function, and raises `Ended` before line number `at` of ours that it comes to, if it gets there."""

    def __init__(self, function, at):
        self.function, self.at = function, at
        self.lines = 0
        self.where = None

    def __call__(self):
        before = sys.gettrace()
        sys.settrace(self._call)
        try:
            return self.function()
        finally:
            sys.settrace(before)

    def _call(self, frame, event, arg):
        return self._line if frame.f_code.co_filename in OURS else None

    def _line(self, frame, event, arg):
        if event == "line" and lands(frame):
            self.lines += 1
            if self.lines == self.at:
                self.where = f"{frame.f_code.co_name}:{frame.f_lineno}"
                raise Ended
        return self._line


def free(lock):
    with lock:
        return True


def check_all_is_well(cache, where):
    """The locks are free, the key can be had, and what is kept is right."""
    assert Running(lambda: free(cache._own.lock), lambda: free(cache._wait_graph.own.lock)).ends() == [True, True], (
        where
    )
    assert Running(lambda: cache.get("key", lambda: "value")).ends() == ["value"], where
    assert cache._wait_graph._waits == {}, where
    assert cache._own.by is cache._wait_graph.own.by is None, where


def refuse():
    raise LookupError("no rule")


def end():
    raise Ended


@pytest.mark.parametrize("compute", [lambda: "value", refuse, end], ids=["a value", "a failure", "ended already"])
def test_the_thread_that_computes_may_be_ended_at_any_line(compute):
    at, ended = 0, set()
    while True:
        at += 1
        cache = SingleFlightCache(name="ended", limit=1)
        cache.get("old", lambda: "to go")
        ends = EndsAt(lambda cache=cache: cache.get("key", compute), at)
        [outcome] = Running(ends).ends()
        if ends.where is None:
            break
        assert isinstance(outcome, Ended)
        ended.add(ends.where)
        check_all_is_well(cache, ends.where)
        assert cache.stats().size == 1, ends.where
    assert len(ended) > 40
    assert {where.partition(":")[0] for where in ended} > {"_missed", "_claim", "_work", "_settle"}


@pytest.mark.parametrize("made", ["value", Ended()], ids=["a value", "ended already"])
def test_those_who_wait_for_a_thread_that_is_ended_at_any_line_get_a_value(made):
    at = 0
    while True:
        at += 1
        watched = Watched()
        cache, held = SingleFlightCache(name="ended", sync=watched), Held(made)
        ends = EndsAt(lambda cache=cache, held=held: cache.get("key", held), at)
        first = Running(ends)
        while first.threads[0].is_alive() and not held.begun.wait(0.01):
            pass
        rest = Running(lambda cache=cache: cache.get("key", lambda: "value"))
        if held.begun.is_set():
            watched.until("waits")
        held.go.set()
        first.ends()
        assert rest.ends() == ["value"], ends.where
        check_all_is_well(cache, ends.where)
        if ends.where is None:
            break
    assert at > 40


def test_a_thread_that_waits_may_be_ended_at_any_line():
    at = 0
    while True:
        at += 1
        watched = Watched()
        cache, held = SingleFlightCache(name="ended", sync=watched), Held("value")
        first = Running(lambda cache=cache, held=held: cache.get("key", held))
        assert held.begun.wait(LONG)
        ends = EndsAt(lambda cache=cache: cache.get("key", lambda: "computed twice"), at)
        let_go = threading.Thread(target=lambda w=watched, h=held: (w.until("waits"), h.go.set()), daemon=True)
        rest = Running(ends)
        let_go.start()
        while rest.threads[0].is_alive() and not watched.taken["waits"]:
            rest.threads[0].join(0.01)
        watched.step("waits")
        [outcome] = rest.ends()
        assert first.ends() == ["value"], ends.where
        check_all_is_well(cache, ends.where)
        if not isinstance(outcome, Ended):
            break
    assert outcome == "value" and at > 25
