import pytest
import torch.distributed as dist

from localtensor import run
from localtensor.errors import RankRaised
from localtensor.errors.base import LocalTensorError
from localtensor.errors.failure_report import failure_text
from localtensor.pytest_plugin.assertions import clear_passed, passed_texts, record_passed


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
