"""`SingleFlightCache` is linearizable: whatever threads did with it at a time, a plain dict could have answered in some order."""

import random
import sys

import pytest

from localtensor.concurrency.single_flight import SingleFlightCache
from tests.localtensor.single_flight_histories import Call, Recorder, explained


def test_calls_in_a_row_are_explained():
    calls = [Call("a", 0, 1, 1), Call("a", 2, 3, 1), Call(None, 4, 5), Call("a", 6, 7, 2)]
    assert explained(calls) == calls


@pytest.mark.parametrize("calls", [
    [Call("a", 0, 1, 1), Call("a", 2, 3, 2)],  # computed twice
    [Call("a", 0, 3, 1), Call("a", 1, 2, 2)],  # computed twice at a time
    [Call("a", 0, 1, 1), Call(None, 2, 3), Call("a", 4, 5, 1)],  # came back after the clearing
    [Call("a", 0, 1, 1), Call("b", 2, 3, 1)],  # another key's value
    [Call("a", 0, 1, 1), Call("a", 2, 3, ("raised", 1))],  # raised, though it was kept
    [Call("a", 0, 9, 1), Call(None, 1, 2), Call("a", 3, 4, 2), Call("a", 5, 6, 1), Call("a", 7, 8, 2)],
])  # fmt: skip
def test_a_history_that_no_dict_has_is_not_explained(calls):
    assert explained(calls) is None


@pytest.mark.parametrize("calls", [
    [Call("a", 0, 3, 1), Call(None, 1, 4), Call("a", 2, 5, 2)],
    [Call("a", 0, 5, 1), Call(None, 1, 2), Call("a", 3, 4, 2)],  # who computed before the clearing is told late
    [Call("a", 0, 3, ("raised", 1)), Call("a", 1, 2, 2)],
])  # fmt: skip
def test_calls_at_a_time_may_have_gone_in_any_order(calls):
    assert sorted(explained(calls), key=lambda call: call.begun) == calls


@pytest.fixture
def often():
    """Threads change places after a microsecond."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def program(random, length):
    return [None if random.random() < 0.2 else (random.choice("abc"), random.random() < 0.15) for _ in range(length)]


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("threads", [2, 3, 4])
def test_what_threads_see_is_what_a_dict_could_have_answered(threads):
    draw = random.Random(threads)
    for _ in range(150):
        programs = [program(draw, 12 // threads) for _ in range(threads)]
        calls = Recorder(SingleFlightCache(name="recorded")).run(programs)
        assert explained(calls) is not None, (programs, sorted(calls, key=lambda call: call.begun))
