"""The commands and their options."""

import importlib as _importlib
import typing as _typing

if _typing.TYPE_CHECKING:  # for readers and type checkers; _ROOM below says the same to the interpreter
    from strategies.cli.app import main as main
    from strategies.cli.commands.ops_coverage_command import coverage_command as coverage_command
    from strategies.cli.commands.ops_validation import own_command as own_command
    from strategies.cli.commands.validate import meshes as meshes

__all__ = [
    "coverage_command",
    "main",
    "meshes",
    "own_command",
]

_ROOM = {
    "coverage_command": "strategies.cli.commands.ops_coverage_command",
    "main": "strategies.cli.app",
    "meshes": "strategies.cli.commands.validate",
    "own_command": "strategies.cli.commands.ops_validation",
}


def __getattr__(name: str) -> _typing.Any:
    if name not in _ROOM:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(_importlib.import_module(_ROOM[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
