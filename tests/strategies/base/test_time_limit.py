"""Interrupts a call that does not return, and names the function in which it stays."""

import json
import signal
import threading
import time

import pytest
import torch
from torch.distributed.tensor._ops import _view_ops

from strategies.base.time_limit import DoesNotReturn, TimeLimit
from strategies.torch_api.code_places import no_return_error, no_return_place, refusal_text, stuck_place

pytestmark = pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="the system has no timer of processor time")


def leaf():
    for _ in range(100):
        pass


def stays():
    while True:
        leaf()


def swallows():
    try:
        stays()
    except Exception:
        return "swallowed"


@pytest.mark.parametrize("function", [stays, swallows])
def test_the_innermost_function_that_stays_is_named_and_not_one_that_it_calls(function):
    begun = time.process_time()
    with pytest.raises(DoesNotReturn) as found, TimeLimit(0.2).applied():
        function()
    assert 0.15 < time.process_time() - begun < 1.0
    assert str(found.value) == "stays does not return within 0.2 s of processor time"
    assert found.value.codes[-1] is stays.__code__


def test_a_call_that_returns_in_time_is_not_interrupted_and_the_handler_is_as_before():
    before = signal.getsignal(signal.SIGPROF)
    with TimeLimit(30.0).applied():
        leaf()
        assert signal.getitimer(signal.ITIMER_PROF)[0] > 0
    assert signal.getsignal(signal.SIGPROF) == before
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)


@pytest.mark.slow
def test_only_the_function_that_is_known_to_stay_is_interrupted_sooner():
    limit = TimeLimit(1.5)
    with pytest.raises(DoesNotReturn), limit.applied():
        stays()
    with pytest.raises(DoesNotReturn) as sooner, limit.applied():
        stays()
    assert (sooner.value.seconds, sooner.value.codes[-1]) == (1.0, stays.__code__)
    begun = time.process_time()
    with limit.applied():
        while time.process_time() < begun + 1.2:
            leaf()


def test_another_thread_has_no_limit():
    done = []

    def body():
        with TimeLimit(0.01).applied():
            begun = time.thread_time()
            while time.thread_time() < begun + 0.1:
                leaf()
        done.append(True)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert done == [True]


def codes(*functions):
    return [function.__code__ for function in functions]


@pytest.mark.parametrize("functions", [(stays, TimeLimit.__init__), (stays, torch.compile), (json.loads,)])
def test_slow_code_of_ours_of_a_compiler_or_of_a_library_says_nothing_about_a_rule(functions):
    assert stuck_place(codes(*functions)) is None


@pytest.mark.parametrize("inner", [(), (json.loads,)], ids=["itself", "in a library"])
def test_a_rule_of_a_user_that_stays_is_named(inner):
    place = stuck_place(codes(TimeLimit.__init__, stays, *inner))
    assert str(place) == f"stays (test_time_limit.py:{stays.__code__.co_firstlineno})"


def test_a_call_that_does_not_count_may_take_longer():
    limit = TimeLimit(0.1, lambda codes: codes[-1] is stays.__code__)
    begun = time.process_time()
    with limit.applied():
        while time.process_time() < begun + 0.4:
            leaf()
    with pytest.raises(DoesNotReturn), limit.applied():
        stays()


def test_the_reason_of_a_finding_holds_the_place():
    code = _view_ops.view_groups.__code__
    reason = refusal_text(no_return_error(DoesNotReturn([code], 12.0)))
    assert reason.startswith(
        "no rank returns within 12 s of processor time from view_groups (torch/distributed/tensor/"
    )
    place = no_return_place(reason)
    assert place is not None
    assert (place.name, place.line) == ("view_groups", code.co_firstlineno)
    assert no_return_place("every rank raises ValueError: no; the op takes the whole tensors") is None
    assert refusal_text("ValueError: no") == "every rank raises ValueError: no; the op takes the whole tensors"
