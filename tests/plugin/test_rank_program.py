from types import SimpleNamespace

import pytest

from localtensor.errors import KindMismatch, RankRaised
from localtensor.events import Call, Place
from localtensor.rank_fixtures import Deferred
from localtensor.rank_marks import Plan
from localtensor.rank_program import Program
from localtensor.schedule import round_robin
from localtensor.threads import run_in_threads


def program(function, ranks=2):
    item = SimpleNamespace(instance=None, fixturenames=[], funcargs={})
    return Program(item, Plan(ranks, (ranks,)), function, (), {})


def test_a_rank_returns_what_the_body_returns_and_awaits_what_is_to_be_awaited():
    async def later():
        return "awaited"

    assert run_in_threads(program(lambda: 5).live, 2, round_robin(), 0, 60).values == (5, 5)
    assert run_in_threads(program(later).live, 2, round_robin(), 0, 60).values == ("awaited", "awaited")


def test_a_body_that_failed_before_its_fixtures_ended_the_run_is_the_cause():
    made = program(lambda: None, 3)
    calls = [Call(rank, kind, "0", (0, 1, 2), 0, place=Place("t.py", 7 + rank, "f")) for rank, kind in enumerate("abc")]
    fault = KindMismatch(calls, ())
    fault.log = tuple(calls)
    assert made.cause_of(fault) is fault
    made.failed[0] = AssertionError("words")
    made.done.add(2)
    cause = made.cause_of(fault)
    assert isinstance(cause, RankRaised) and cause.errors == {0: made.failed[0]} and cause.log == fault.log
    assert [(one.rank, one.where) for one in cause.busy] == [(1, "t.py:8 in f")]
    assert made.cause_of(cause) is cause


def test_what_a_teardown_raises_is_noted_on_the_failure_of_the_body():
    def fixture():
        yield 3
        raise KeyError("teardown")

    def body():
        raise ValueError("body")

    made = program(body, 1)
    definition = SimpleNamespace(func=fixture, argname="mine")
    made.item.fixturenames, made.item.funcargs = ["mine"], {"mine": Deferred(definition, {})}
    with pytest.raises(RankRaised) as caught:
        run_in_threads(made.live, 1, round_robin(), 0, 60)
    error = caught.value.errors[0]
    assert str(error) == "body"
    assert getattr(error, "__notes__", []) == ["and while the fixtures were torn down: KeyError: 'teardown'"]
