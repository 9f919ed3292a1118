"""What is shown of a rank test that failed: one failure, and under it what the other ranks did."""

import re
from xml.etree import ElementTree as ET

import pytest

pytest_plugins = ["pytester"]

FAILS = """
    @pytest.mark.ranks(4)
    def test_sum(rank):
        x = torch.tensor(float(rank))
        dist.all_reduce(x)
        total = x.item()
        assert total == (6 if rank != 1 else 7)
"""


def test_one_failure_is_shown_with_what_the_assertion_compared(tried):
    result = tried(FAILS)
    result.assert_outcomes(failed=1)
    assert result.text.count(">       assert total ==") == 1
    assert "E       assert 6.0 == 7" in result.text
    section = result.text.split("- ranks -")[1]
    assert "First cause: rank 1 of 4, at test_it.py:12 in test_sum" in section
    assert "ranks 0, 2, 3: passed" in section and "all_reduce #0" in section
    assert 'Replay: pytest "test_it.py::test_sum" --rank-schedule round_robin --rank-seed 0' in section
    assert "localtensor/" not in result.text


def test_what_the_assertion_compared_where_it_passed_is_reported_if_pytest_says_it(tried, pytester):
    pytester.makeini("[pytest]\nenable_assertion_pass_hook = true\n")
    section = tried(FAILS).text.split("- ranks -")[1]
    assert "rank 1: assert 6.0 == 7" in section and "6.0 == 6" in section


def test_a_fault_without_an_exception_speaks_for_itself(tried):
    result = tried(
        """
        @pytest.mark.ranks(3)
        def test_stuck(rank):
            if rank != 2:
                dist.barrier()
        """,
        "--rank-schedule=shuffled:5",
    )
    result.assert_outcomes(failed=1)
    assert "E   localtensor.errors.programs.EarlyReturn: rank 2 returned while ranks 0, 1 wait for it" in result.text
    assert "hidden" not in result.text and ".py:" not in result.text.split("E   localtensor")[0].split("FAILURES")[1]
    assert "schedule='" not in result.text and "--rank-schedule shuffled:5" in result.text
    assert "FAILED test_it.py::test_stuck - EarlyReturn: rank 2 ret" in result.text


WAITS = """
    def send_all(x):
        y = x + 1

        dist.all_reduce(y)

    @pytest.mark.ranks(3)
    def test_waits(rank):
        x = torch.ones(2)
        if rank:
            send_all(x)
        dist.barrier()
        return x
"""


def test_a_fault_shows_the_source_of_the_lines_that_it_names(tried):
    text = tried(WAITS).text
    shown = text.partition("FAILURES")[2].partition("- ranks -")[0]
    helper, _, body = shown.partition("_ _ _")
    assert "    def send_all(x):\n        y = x + 1\n\n>       dist.all_reduce(y)\n" in helper
    assert "test_it.py:9: \n" in helper.replace(":10: ", ":9: ") and "E  " not in helper
    assert "    @pytest.mark.ranks(3)\n    def test_waits(rank):\n" in body and ">       dist.barrier()\nE   " in body
    assert "return x" not in shown and "  rank 0: barrier #0" in body and body.rstrip("-\n").endswith(": KindMismatch")


INTERRUPTED = """
    import os
    import signal

    @pytest.fixture(autouse=True)
    def limit():
        def over(*_):
            pytest.fail("Timeout (>1.0s) from a plugin.")

        before = signal.signal(signal.SIGUSR1, over)
        yield
        signal.signal(signal.SIGUSR1, before)

    def spin():
        os.kill(os.getpid(), signal.SIGUSR1)
        while True:
            pass

    @pytest.mark.ranks(3)
    def test_spins(rank):
        if rank == 1:
            spin()
        dist.barrier()
"""


def test_a_test_that_a_plugin_interrupts_shows_where_its_ranks_are(tried):
    """pytest-timeout raises so in the main thread; `ways/test_plugins.py` has the plugin itself."""
    result = tried(INTERRUPTED)
    result.assert_outcomes(failed=1)
    section = result.text.split("- ranks -")[1]
    assert "When the test was interrupted:\n  rank 1 was running at test_it.py:" in section
    assert re.search(r" in spin, called at test_it\.py:\d+ in test_spins\n", section)
    assert re.search(r"  ranks? 0(, 2)? waits? for .* in barrier #0 .*at test_it\.py:\d+ in test_spins", section)


@pytest.mark.parametrize("option", ["--tb=short", "--tb=line", "--tb=native", "--tb=no"])
def test_other_styles_of_traceback_show_no_source(tried, option):
    result = tried(WAITS, option)
    result.assert_outcomes(failed=1)
    assert ">       dist.barrier()" not in result.text and "INTERNALERROR" not in result.text


def test_the_section_is_in_the_junit_file(tried, pytester):
    tried(FAILS, "--junitxml=out.xml")
    [failure] = ET.parse(pytester.path / "out.xml").iter("failure")
    assert failure.get("message").startswith("assert 6.0 == 7")
    assert "First cause: rank 1 of 4" in failure.text and "Replay: pytest" in failure.text


@pytest.mark.slow
def test_full_trace_and_short_styles_keep_the_section(tried):
    for option in ("--full-trace", "--tb=short", "--tb=native", "-q"):
        result = tried(FAILS, option)
        result.assert_outcomes(failed=1)
        assert "First cause: rank 1 of 4" in result.text, option


def test_a_test_that_passes_or_is_expected_to_fail_says_nothing(tried):
    result = tried(FAILS.replace("@pytest", "@pytest.mark.xfail(strict=True)\n    @pytest", 1))
    result.assert_outcomes(xfailed=1)
    assert "First cause" not in result.text


def test_a_failure_on_real_processes_is_reported_in_the_words_of_the_process(tried):
    result = tried(
        FAILS + """
    @pytest.mark.ranks(2)
    def test_log(comms):
        pass

    @pytest.mark.ranks(2)
    def test_skip(rank, tmp_path):
        assert tmp_path.exists() and dist.get_backend() == "gloo"
        if rank:
            pytest.skip("not here")
    """,
        "--ranks-on=gloo", "-rs",
    )  # fmt: skip
    result.assert_outcomes(failed=1, errors=1, skipped=1)
    assert result.text.count(">       assert total ==") == 1 and "E       assert 6.0 == 7" in result.text
    assert "First cause: rank 1 of 4" in result.text and "--ranks-on gloo --rank-seed 0" in result.text
    assert "comms: real processes keep no event log. Run this test with --ranks-on threads." in result.text
    assert "not here (on rank 1 of 2)" in result.text
