"""The one failure of a rank test in pytest's report.

pytest's private parts (for: tried on 9.0, 9.2):
    _pytest._code.code: ExceptionChainRepr, ReprFileLocation    where a fault without a traceback happened
    _pytest._code.code: ReprEntryNative, ReprTraceback          the failure text of a real process
"""

from typing import Any

import pytest
from _pytest._code.code import ExceptionChainRepr, ReprEntryNative, ReprFileLocation, ReprTraceback

from localtensor.errors.base import first_line
from localtensor.errors.failure_report import failure_text
from localtensor.errors.programs import RankRaised
from localtensor.pytest_plugin.assertions import passed_texts
from localtensor.pytest_plugin.fixtures import shadowing_notes
from localtensor.pytest_plugin.item import RankTest, RankTestFailure


def add_rank_section(report: pytest.TestReport, error: BaseException, test: RankTest) -> None:
    """Adds to the report how each rank failed, and the command that repeats it.  `error` is what pytest reports."""
    failure = test.failure
    if failure is None or failure.error is not error or not report.failed:
        return
    text = failure_text(failure.fault, test.plan.ranks, failure.replay, passed_texts(test.item.stash, failure.fault))
    if failure.tried:
        text = f"{failure.tried}\n{text}"
    text += "".join(f"\n{line}" for line in shadowing_notes(test.item))
    longrepr: Any = report.longrepr
    rendered = _rendered_text(failure)
    if rendered is not None:
        longrepr = report.longrepr = _with_rendered_text(longrepr, rendered)
    elif not isinstance(failure.fault, RankRaised) and isinstance(longrepr, ExceptionChainRepr):
        longrepr = report.longrepr = _with_own_place(longrepr, failure)
    if hasattr(longrepr, "addsection"):
        longrepr.addsection("ranks", text)
    else:
        report.longrepr = f"{longrepr}\n---- ranks ----\n{text}"


def _rendered_text(failure: RankTestFailure) -> str | None:
    """The failure text of a real process; None if there is none."""
    if not isinstance(failure.fault, RankRaised):
        return None
    by_rank: dict[int, str] = getattr(failure.fault, "rendered", {})
    return by_rank.get(failure.fault.raised[0].rank)


def _with_rendered_text(longrepr: object, rendered: str) -> ExceptionChainRepr | str:
    """The report with the text of the process, which had the source of its lines."""
    if not isinstance(longrepr, ExceptionChainRepr):
        return rendered
    _, crash, _ = longrepr.chain[-1]
    text = ReprTraceback([ReprEntryNative(f"{rendered}\n".splitlines(keepends=True))], None, "native")
    return ExceptionChainRepr([(text, crash, None)])


def _with_own_place(longrepr: ExceptionChainRepr, failure: RankTestFailure) -> ExceptionChainRepr:
    """The report of a fault that no code of the user raised: its own text, and the line that it names first."""
    traceback, crash, _ = longrepr.chain[-1]
    traceback.extraline = None
    places = getattr(failure.fault, "places", ())
    if places:
        text = f"{type(failure.error).__name__}: {first_line(str(failure.error))}"
        crash = ReprFileLocation(places[0].file, places[0].line, text)
    return ExceptionChainRepr([(traceback, crash, None)])
