"""Which line of a test an exception came from."""

import traceback

from localtensor._util.call_sites import user_lines
from localtensor._util.events import Place


def raised_at(error: BaseException) -> Place | None:
    """The innermost line of the user's own code on the way of the exception, None if there is no such.

    A function that hides itself from pytest's tracebacks, as pytest.fail does, is nobody's own.
    """
    walk = traceback.walk_tb(error.__traceback__)
    lines = user_lines((frame, line) for frame, line in walk if not frame.f_locals.get("__tracebackhide__"))
    return lines[-1] if lines else None
