"""The compared values of assertions that passed on some ranks, and the one exception with which a rank test ends.

pytest reports passed assertions where the ini setting `enable_assertion_pass_hook` is on, since it renders the text of
each.  An assertion in a loop passes many times: the last one counts.
"""

import copy
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, TypeVar
from unittest import SkipTest

import pytest

from localtensor._util.ambient import simulation_of_this_rank
from localtensor._util.call_sites import is_user_file
from localtensor.errors.base import LocalTensorError, rank_names
from localtensor.errors.programs import RankRaised

PASSED = pytest.StashKey[dict[tuple[int, str, int], str]]()
_PASSED_BY = ("_pytest", "pluggy", "localtensor")


def record_passed(stash: pytest.Stash, line: int, text: str) -> None:
    """Records that the calling rank has passed an assertion at this line."""
    simulation = simulation_of_this_rank()
    if simulation is not None:
        stash.setdefault(PASSED, {})[simulation.rank(), _file(sys._getframe(1)), line] = text


def clear_passed(stash: pytest.Stash) -> None:
    """Drops the records of the previous run."""
    stash.setdefault(PASSED, {}).clear()


def passed_texts(stash: pytest.Stash, fault: LocalTensorError) -> Mapping[int, str]:
    """By rank, the compared values at the failed assertion that is the first cause of this fault.

    >>> passed_texts(pytest.Stash(), LocalTensorError("another"))
    {}
    """
    if not isinstance(fault, RankRaised):
        return {}
    place = fault.where.get(fault.raised[0].rank)
    seen = stash.get(PASSED, {})
    return {rank: text for (rank, *at), text in seen.items() if place is not None and at == [place.file, place.line]}


def _file(frame: FrameType | None) -> str:
    """The file of the innermost frame outside of pytest, pluggy and this project."""
    while frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in _PASSED_BY:
        frame = frame.f_back
    return frame.f_code.co_filename if frame is not None else ""


Caught = TypeVar("Caught", bound=BaseException)
_ENDS_ALL = (pytest.exit.Exception, KeyboardInterrupt)
_SKIPS = (pytest.skip.Exception, SkipTest)


def expected_by_xfail(item: pytest.Item) -> Callable[[BaseException], bool]:
    """Whether the `raises` of the test's xfail mark, if it has one, is an exception."""
    marks = (mark.kwargs.get("raises") for mark in item.iter_markers("xfail"))
    raises: Any = next((one for one in marks if one is not None), None)

    def expected(error: BaseException) -> bool:
        if raises is None:
            return False
        matches = getattr(raises, "matches", None)  # of pytest.RaisesExc and RaisesGroup
        return isinstance(error, raises) if matches is None else bool(matches(error))

    return expected


def first_cause(
    fault: LocalTensorError, ranks: int, expected: Callable[[BaseException], bool] = lambda _: False
) -> tuple[BaseException, LocalTensorError]:
    """The exception that the test raises, and the fault with that exception first.

    An end of the session takes precedence over a failure, a failure over one that is `expected`, that over an xfail, an
    xfail over a skip; of equals, the first.  The text of a skip names its ranks.  A skip for which other ranks wait in a call is a failure.
    """
    if not isinstance(fault, RankRaised) or not fault.errors:
        return trim_traceback(fault), fault
    ranks_known = [one.rank for one in fault.raised if one.rank in fault.errors]
    order = sorted(ranks_known, key=lambda rank: _priority(fault.errors[rank], expected))
    first = order[0]
    error = trim_traceback(fault.errors[first])
    if isinstance(error, _SKIPS) and fault.waits:
        return trim_traceback(fault), fault
    if isinstance(error, _SKIPS):
        skipped = [rank for rank in order if isinstance(fault.errors[rank], _SKIPS)]
        where = f"all {ranks} ranks" if len(skipped) == ranks > 1 else f"{rank_names(skipped)} of {ranks}"
        error.args = (f"{error} (on {where})",)
        if isinstance(error, pytest.skip.Exception):
            error.msg = error.args[0]
    reordered = copy.copy(fault)
    reordered.raised = tuple(sorted(fault.raised, key=lambda one: one.rank != first))
    return error, reordered


def _priority(error: BaseException, expected: Callable[[BaseException], bool]) -> int:
    """The lowest is raised by the test."""
    if isinstance(error, _ENDS_ALL):
        return 0
    if isinstance(error, _SKIPS):
        return 5
    hypothesis = sys.modules.get("hypothesis.errors")
    if hypothesis is not None and isinstance(error, (hypothesis.UnsatisfiedAssumption, hypothesis.StopTest)):
        return 4  # Hypothesis drops an example by it, as by `assume(False)`
    if isinstance(error, pytest.xfail.Exception):
        return 3
    return 2 if expected(error) else 1


class _Failed:
    """A plugin that keeps the texts of failures that are reported and not raised, as those of subtests."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.texts.append(report.longreprtext)


@contextmanager
def subtests_counted(config: pytest.Config) -> Iterator[Callable[[], None]]:
    """Gives what raises if a subtest has failed inside: what a forked process reports, pytest's own process does not see."""
    failed = _Failed()

    def raise_failed() -> None:
        if failed.texts:
            count = f"{len(failed.texts)} failed subtest{'s' if len(failed.texts) > 1 else ''}"
            pytest.fail("\n".join([f"contains {count}", *failed.texts]), pytrace=False)

    config.pluginmanager.register(failed)
    try:
        yield raise_failed
    finally:
        config.pluginmanager.unregister(failed)


def trim_traceback(error: Caught) -> Caught:
    """The same exception, without the frames of its traceback that led from this package to the user's code.

    An error of this project is about the user's lines: no other frame stays.  Any other exception that passed no user
    code keeps all its frames.
    """
    frames: list[TracebackType] = []
    frame = error.__traceback__
    while frame is not None:
        frames.append(frame)
        frame = frame.tb_next
    theirs = [is_user_file(one.tb_frame.f_code.co_filename) for one in frames]
    if isinstance(error, LocalTensorError):
        kept = [one for one, user in zip(frames, theirs) if user]
    elif any(theirs):
        kept = frames[theirs.index(True) :]
    else:
        kept = frames
    chain: TracebackType | None = None
    for one in reversed(kept):
        chain = TracebackType(chain, one.tb_frame, one.tb_lasti, one.tb_lineno)
    error.__traceback__ = chain
    return error
