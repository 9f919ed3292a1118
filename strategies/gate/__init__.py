"""The gate before a merge: baseline, decision, budget."""

import importlib as _importlib
import typing as _typing

if _typing.TYPE_CHECKING:  # for readers and type checkers; _ROOM below says the same to the interpreter
    from strategies.gate.baseline import BadBaseline as BadBaseline
    from strategies.gate.baseline import Baseline as Baseline
    from strategies.gate.formats.github import annotations as annotations
    from strategies.gate.formats.json_output import as_json as as_json
    from strategies.gate.formats.junit import junit as junit
    from strategies.gate.formats.markdown import summary as summary
    from strategies.gate.formats.sarif import sarif as sarif
    from strategies.gate.formats.wording import printable as printable
    from strategies.gate.model import GateResult as GateResult
    from strategies.gate.options import Asked as Asked
    from strategies.gate.options import BadGate as BadGate
    from strategies.gate.options import Files as Files
    from strategies.gate.plan import Work as Work
    from strategies.gate.source_lines import within as within

__all__ = [
    "Asked",
    "BadBaseline",
    "BadGate",
    "Baseline",
    "Files",
    "GateResult",
    "Work",
    "annotations",
    "as_json",
    "junit",
    "printable",
    "sarif",
    "summary",
    "within",
]

_ROOM = {
    "Asked": "strategies.gate.options",
    "BadBaseline": "strategies.gate.baseline",
    "BadGate": "strategies.gate.options",
    "Baseline": "strategies.gate.baseline",
    "Files": "strategies.gate.options",
    "GateResult": "strategies.gate.model",
    "Work": "strategies.gate.plan",
    "annotations": "strategies.gate.formats.github",
    "as_json": "strategies.gate.formats.json_output",
    "junit": "strategies.gate.formats.junit",
    "printable": "strategies.gate.formats.wording",
    "sarif": "strategies.gate.formats.sarif",
    "summary": "strategies.gate.formats.markdown",
    "within": "strategies.gate.source_lines",
}


def __getattr__(name: str) -> _typing.Any:
    if name not in _ROOM:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(_importlib.import_module(_ROOM[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
