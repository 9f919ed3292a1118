"""Hypothesis within rank threads: `@given` draws an example in pytest's thread, and the test runs it on the ranks.

Private parts of Hypothesis (for: tried on 6.170), each of which may be missing, and then is done without:
    control._current_build_context       what note(), assume() and event() speak to; Hypothesis keeps it by thread
    reporting.reporter                   where note() writes; kept by thread, too
    _hypothesis_internal_use_settings    where a test keeps its settings: a fixture that each rank makes anew for each
                                         example need not be refused for its scope, as Hypothesis would
"""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

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
