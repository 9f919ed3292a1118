"""Hypothesis within rank threads: `@given` draws an example in pytest's thread, and the test runs it on the ranks.

Private parts of Hypothesis (for: tried on 6.170), each of which may be missing, and then is done without:
    control._current_build_context       what note(), assume() and event() speak to; Hypothesis keeps it by thread
    reporting.reporter                   where note() writes; kept by thread, too
    strategies.DataObject                what data() gives a test: exported, and called semi-stable
    _hypothesis_internal_use_settings    where a test keeps its settings: a fixture that each rank makes anew for each
                                         example need not be refused for its scope, as Hypothesis would
"""

import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")
_SETTINGS = "_hypothesis_internal_use_settings"


def kept_by_thread() -> list[tuple[Any, Any]]:
    """Hypothesis' variables of this thread, with their values: none if it is not at work."""
    control, reporting = sys.modules.get("hypothesis.control"), sys.modules.get("hypothesis.reporting")
    variables: list[Any] = [getattr(control, "_current_build_context", None), getattr(reporting, "reporter", None)]
    return [(one, one.value) for one in variables if hasattr(one, "with_value")]


@contextmanager
def passed_on(values: list[tuple[Any, Any]]) -> Iterator[None]:
    """In this thread the variables have the values that they had in the other."""
    with ExitStack() as stack:
        for variable, value in values:
            stack.enter_context(variable.with_value(value))
        yield


class RankData:
    """What a rank has where the test has Hypothesis' `data()`: the nth value that it draws is the nth of every rank.

    The rank that comes first draws it; `drawn` is what was drawn so far in this example, for all ranks.
    """

    __slots__ = ("_count", "_data", "_drawn")

    def __init__(self, data: Any, drawn: list[tuple[str, Any]]) -> None:
        self._data, self._drawn, self._count = data, drawn, 0

    def draw(self, strategy: Any, label: Any = None) -> Any:
        """As Hypothesis' own.  Ranks that draw from different strategies fail."""
        if self._count == len(self._drawn):
            self._drawn.append((_told(strategy), self._data.draw(strategy, label)))
        first, value = self._drawn[self._count]
        self._count += 1
        if first != _told(strategy):
            problem = (
                f"another rank drew {first} as its value {self._count}, and all ranks draw the same values in one order"
            )
            remedy = "Draw on every rank, before the ranks part."
            pytest.fail(f"data.draw: strategy: {_told(strategy)}: {problem}. {remedy}", pytrace=False)
        return value

    def __repr__(self) -> str:
        return repr(self._data)


def of_ranks(value: Any, drawn: dict[int, list[tuple[str, Any]]]) -> Any:
    """A `RankData` for Hypothesis' `data()`, anything else as it is; `drawn`: what was drawn from each in this example."""
    kind = getattr(sys.modules.get("hypothesis.strategies"), "DataObject", None)
    return RankData(value, drawn.setdefault(id(value), [])) if kind is not None and isinstance(value, kind) else value


def _told(strategy: Any) -> str:
    """Two strategies that were made alike have one text."""
    return _ADDRESS.sub("...", repr(strategy))


@contextmanager
def at_ease(test: Any) -> Iterator[None]:
    """Hypothesis does not mind fixtures of function scope, for those of a rank are made for each example; and its
    default deadline, which is for one function and not for all ranks, does not count.
    """
    function = getattr(test, "__func__", test)
    before = getattr(function, _SETTINGS, None)
    if before is None:
        yield
        return
    from hypothesis import HealthCheck, settings

    allowed = {*before.suppress_health_check, HealthCheck.function_scoped_fixture}
    deadline = None if before.deadline == getattr(settings.default, "deadline", None) else before.deadline
    setattr(function, _SETTINGS, settings(parent=before, suppress_health_check=allowed, deadline=deadline))
    try:
        yield
    finally:
        setattr(function, _SETTINGS, before)
