import traceback
from unittest import SkipTest

import pytest
import torch.distributed as dist

import localtensor as lt
from localtensor import run
from localtensor._util.events import Call, Raised, Wait
from localtensor.errors import Deadlock, RankOutside, RankRaised
from localtensor.errors.base import LocalTensorError
from localtensor.errors.failure_report import failure_text
from localtensor.pytest_plugin.assertions import clear_passed, first_cause, passed_texts, record_passed, trim_traceback


def fails_on(stash, bad):
    """Each rank notes what pytest would tell of an assertion that went through, at the line where it stands."""

    def body():
        rank = dist.get_rank()
        line = body.__code__.co_firstlineno + 4
        rank == bad or record_passed(stash, line, f"{rank} != {bad}")
        assert rank != bad

    with pytest.raises(RankRaised) as caught:
        run(body, ranks=3)
    return caught.value


def test_ranks_that_passed_the_assertion_are_shown_with_what_they_compared():
    stash = pytest.Stash()
    fault = fails_on(stash, bad=1)
    assert passed_texts(stash, fault) == {0: "0 != 1", 2: "2 != 1"}
    lines = failure_text(fault, 3, "", passed_texts(stash, fault)).splitlines()
    assert lines[2:] == ["  rank 0: passed: 0 != 1", "  rank 2: passed: 2 != 1"]


def test_another_line_another_file_and_another_run_do_not_count():
    stash = pytest.Stash()
    fault = fails_on(stash, bad=1)
    run(lambda: record_passed(stash, 1, "elsewhere"), ranks=3)
    elsewhere = {"__name__": "elsewhere", "note": record_passed, "stash": stash, "line": fault.where[1].line}
    run(lambda: exec(compile("note(stash, line, 'other file')", "elsewhere.py", "exec"), elsewhere), ranks=3)
    assert passed_texts(stash, fault) == {0: "0 != 1", 2: "2 != 1"}
    clear_passed(stash)
    assert passed_texts(stash, fault) == {}


def test_who_is_no_rank_has_nothing_to_tell_and_other_faults_have_no_line():
    stash = pytest.Stash()
    record_passed(stash, 1, "no rank")
    assert (
        passed_texts(stash, fails_on(pytest.Stash(), bad=0)) == passed_texts(stash, LocalTensorError("another")) == {}
    )


def fault(**errors):
    """Ranks that raised, in this order: r2=error."""
    by_rank = {int(name[1:]): error for name, error in errors.items()}
    raised = RankRaised([Raised(rank, type(error).__name__, str(error), "") for rank, error in by_rank.items()])
    raised.errors = by_rank
    return raised


SKIP, FAILED, EXPECTED = pytest.skip.Exception, AssertionError, pytest.xfail.Exception


def test_the_first_failure_is_the_cause():
    first = FAILED("first")
    error, told = first_cause(fault(r2=first, r0=FAILED("second")), 4)
    assert error is first and [one.rank for one in told.raised] == [2, 0]


def test_a_failure_beats_what_was_expected_and_that_beats_a_skip():
    failed = FAILED("words")
    error, told = first_cause(fault(r0=SKIP("no"), r1=EXPECTED("known"), r2=failed), 3)
    assert error is failed and [one.rank for one in told.raised] == [2, 0, 1]
    error, _ = first_cause(fault(r0=SKIP("no"), r1=EXPECTED("known")), 3)
    assert isinstance(error, EXPECTED)


@pytest.mark.parametrize("last", [KeyboardInterrupt(), pytest.exit.Exception("enough")])
def test_what_ends_the_session_beats_everything(last):
    assert first_cause(fault(r0=FAILED("words"), r1=last), 2)[0] is last


def test_a_skip_says_on_which_ranks():
    assert first_cause(fault(r1=SKIP("no gpu")), 3)[0].msg == "no gpu (on rank 1 of 3)"
    assert first_cause(fault(r1=SKIP("no gpu"), r0=SKIP("other")), 2)[0].msg == "no gpu (on all 2 ranks)"
    assert str(first_cause(fault(r0=SkipTest("no"), r2=SkipTest("no")), 3)[0]) == "no (on ranks 0, 2 of 3)"


def test_a_fault_that_no_one_raised_is_its_own_cause():
    call = Call(0, "barrier", "0", (0, 1), 0)
    stuck = Deadlock([Wait(0, (1,), call)])
    assert first_cause(stuck, 2) == (stuck, stuck)


def body(rank):
    raise error_of[0]


error_of = [None]


def functions(error):
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


def raised_in_ranks(error):
    error_of[0] = error
    with pytest.raises(RankRaised) as caught:
        lt.run(body, 0, ranks=1)
    return caught.value.errors[0]


def test_frames_of_the_engine_are_left_out():
    error = raised_in_ranks(ValueError("words"))
    assert functions(error)[0] != "body"
    assert functions(trim_traceback(error)) == ["body"]


def test_of_a_refusal_only_lines_of_the_user_stay_and_of_a_crash_all_inner_ones():
    assert functions(trim_traceback(raised_in_ranks(RankOutside("broadcast", "root", 7, 2, 1)))) == ["body"]
    with pytest.raises(RankRaised) as caught:
        lt.run(lambda: [].pop(0).x or int("x"), ranks=1)
    assert functions(trim_traceback(caught.value.errors[0])) == ["<lambda>"]
