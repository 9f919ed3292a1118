"""What an assertion compared on the ranks on which it went through, beside the one on which it failed.

pytest tells of assertions that pass where the ini setting `enable_assertion_pass_hook` is on, since it costs the text
of each.  An assertion in a loop passes many times: the last one counts.
"""

import sys
from collections.abc import Mapping
from types import FrameType

import pytest

from localtensor._util.ambient import of_rank
from localtensor.errors.base import LocalTensorError
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
