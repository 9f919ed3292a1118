"""What an assertion compared on the ranks on which it went through, beside the one on which it failed.

pytest tells of assertions that pass where the ini setting `enable_assertion_pass_hook` is on, since it costs the text
of each.  An assertion in a loop passes many times: the last one counts.
"""

import copy
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType, TracebackType
from typing import TypeVar
from unittest import SkipTest

import pytest

from localtensor._util.ambient import of_rank
from localtensor._util.call_sites import is_user_file
from localtensor.errors.base import LocalTensorError, rank_names
from localtensor.errors.programs import RankRaised

PASSED = pytest.StashKey[dict[tuple[int, str, int], str]]()
_MESSENGERS = ("_pytest", "pluggy", "localtensor")


def note(stash: pytest.Stash, line: int, text: str) -> None:
    """The rank that runs has passed an assertion at this line; to be called from within."""
    simulation = of_rank()
    if simulation is not None:
        stash.setdefault(PASSED, {})[simulation.rank(), _file(sys._getframe(1)), line] = text


def forget(stash: pytest.Stash) -> None:
    """Another run begins."""
    stash.setdefault(PASSED, {}).clear()


def compared(stash: pytest.Stash, fault: LocalTensorError) -> Mapping[int, str]:
    """By rank, what it compared where the first cause of this fault is an assertion that failed.

    >>> compared(pytest.Stash(), LocalTensorError("another"))
    {}
    """
    if not isinstance(fault, RankRaised):
        return {}
    place = fault.where.get(fault.raised[0].rank)
    seen = stash.get(PASSED, {})
    return {rank: text for (rank, *at), text in seen.items() if place is not None and at == [place.file, place.line]}


def _file(frame: FrameType | None) -> str:
    """The file of the innermost frame that does not belong to those who carry the news."""
    while frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in _MESSENGERS:
        frame = frame.f_back
    return frame.f_code.co_filename if frame is not None else ""


# Which one exception a test on ranks ends with, when each rank may have ended with its own.

Caught = TypeVar("Caught", bound=BaseException)
_ENDS_ALL = (pytest.exit.Exception, KeyboardInterrupt)
_SKIPS = (pytest.skip.Exception, SkipTest)


def first_cause(fault: LocalTensorError, ranks: int) -> tuple[BaseException, LocalTensorError]:
    """What the test raises, and the fault as it is to be told: the failure that the test shows comes first in it.

    What ends the session beats a failure, a failure beats an xfail, and an xfail beats a skip; of equals, the one
    that came first.  The text of a skip says on which ranks.
    """
    if not isinstance(fault, RankRaised) or not fault.errors:
        return trimmed(fault), fault
    order = sorted(
        (one.rank for one in fault.raised if one.rank in fault.errors), key=lambda rank: _weight(fault.errors[rank])
    )
    first = order[0]
    error = trimmed(fault.errors[first])
    if isinstance(error, _SKIPS):
        _say_where(error, [rank for rank in order if isinstance(fault.errors[rank], _SKIPS)], ranks)
    told = copy.copy(fault)
    told.raised = tuple(sorted(fault.raised, key=lambda one: one.rank != first))
    return error, told


def _weight(error: BaseException) -> int:
    """A lower one is heard first."""
    if isinstance(error, _ENDS_ALL):
        return 0
    if isinstance(error, _SKIPS):
        return 4
    if _steers_hypothesis(error):
        return 3
    return 2 if isinstance(error, pytest.xfail.Exception) else 1


def _steers_hypothesis(error: BaseException) -> bool:
    """`assume(False)` and its like, by which Hypothesis drops an example."""
    errors = sys.modules.get("hypothesis.errors")
    return errors is not None and isinstance(error, (errors.UnsatisfiedAssumption, errors.StopTest))


def _say_where(skip: BaseException, skipped: Sequence[int], ranks: int) -> None:
    where = f"all {ranks} ranks" if len(skipped) == ranks > 1 else f"{rank_names(skipped)} of {ranks}"
    words = f"{skip} (on {where})"
    skip.args = (words,)
    if isinstance(skip, pytest.skip.Exception):
        skip.msg = words


def trimmed(error: Caught) -> Caught:
    """The same exception, without those frames of its traceback by which the engine came to the user's code.

    A refusal or a verdict of ours speaks of the user's lines: no other frame stays.  Of what is no refusal, the frames
    that it was made in may be the only trace.
    """
    frames = list(_frames(error.__traceback__))
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


def _frames(traceback: TracebackType | None) -> Iterator[TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next
