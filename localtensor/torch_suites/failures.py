"""How a test that failed on ranks fails where its author looks: by the first exception, as if no rank were a thread."""

import os
import unittest
from types import TracebackType
from typing import NoReturn

from localtensor.errors import ProgramFault, RankRaised
from localtensor.errors.failure_report import told

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_BETWEEN = (f"torch{os.sep}testing{os.sep}_internal{os.sep}", f"{os.sep}unittest{os.sep}")


def fail(fault: ProgramFault, ranks: int) -> NoReturn:
    """Raises the exception of the rank that was the first cause, and else the fault itself; how the other ranks
    fared is its note.

    An error of the simulator's own is raised as the failure that it is: one that no program may catch.
    """
    __tracebackhide__ = True
    cause = fault.errors.get(fault.raised[0].rank) if isinstance(fault, RankRaised) else None
    text = told(fault, ranks, fault.replay or "") if isinstance(fault, RankRaised) else told(fault, ranks, "")
    if isinstance(cause, Exception):
        shown: Exception = cause.with_traceback(users_part(cause.__traceback__))
        note(shown, text)
        raise shown
    note(fault, text)
    raise fault.with_traceback(None)


def note(error: BaseException, text: str) -> None:
    """The text stands under the error; Python 3.10 has no such notes, and shows the error alone."""
    if text and hasattr(error, "add_note") and text not in getattr(error, "__notes__", ()):
        error.add_note(text)


def users_part(trace: TracebackType | None) -> TracebackType | None:
    """A traceback from its first frame on that is neither ours nor of torch's test bases; all of it if none is."""
    here = trace
    while here is not None and _between(here.tb_frame.f_code.co_filename):
        here = here.tb_next
    return here or trace


def _between(file: str) -> bool:
    return file.startswith(_OURS) or any(part in file for part in _BETWEEN)


def skip(why: object) -> NoReturn:
    __tracebackhide__ = True
    raise unittest.SkipTest(str(why))
