"""A whole run: tasks over workers, journal, confirmation, coverage."""

import importlib as _importlib
import typing as _typing

if _typing.TYPE_CHECKING:  # for readers and type checkers; _ROOM below says the same to the interpreter
    from strategies.sweep.coverage import Tried as Tried
    from strategies.sweep.executors import Hands as Hands
    from strategies.sweep.report.html_page import page as page
    from strategies.sweep.report.text_and_json import call_text as call_text
    from strategies.sweep.report.text_and_json import silent as silent
    from strategies.sweep.session import put_on_trial as put_on_trial
    from strategies.sweep.session import validate as validate

__all__ = [
    "Hands",
    "Tried",
    "call_text",
    "page",
    "put_on_trial",
    "silent",
    "validate",
]

_ROOM = {
    "Hands": "strategies.sweep.executors",
    "Tried": "strategies.sweep.coverage",
    "call_text": "strategies.sweep.report.text_and_json",
    "page": "strategies.sweep.report.html_page",
    "put_on_trial": "strategies.sweep.session",
    "silent": "strategies.sweep.report.text_and_json",
    "validate": "strategies.sweep.session",
}


def __getattr__(name: str) -> _typing.Any:
    if name not in _ROOM:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(_importlib.import_module(_ROOM[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
