"""Trials of more than one op or mesh axis."""

import importlib as _importlib
import typing as _typing

if _typing.TYPE_CHECKING:  # for readers and type checkers; _ROOM below says the same to the interpreter
    from strategies.programs.chained_validation import on_meshes as on_meshes
    from strategies.programs.chained_validation import with_followers as with_followers
    from strategies.programs.repro.program_script import program_script as program_script
    from strategies.programs.repro.program_script import writable as writable
    from strategies.programs.repro.script import literal as literal
    from strategies.programs.repro.script import script as script
    from strategies.programs.repro.script import usable as usable
    from strategies.programs.run.follow_ups import placement_code as placement_code
    from strategies.programs.run.local_inputs import held_of as held_of
    from strategies.programs.run.program_oracle import truth_of as truth_of
    from strategies.programs.run.rank_diagram import picture as picture
    from strategies.programs.run.rank_diagram import program_picture as program_picture
    from strategies.programs.run.rank_run import at_home as at_home
    from strategies.programs.run.real_run import Court as Court
    from strategies.programs.run.verdict import Confirmation as Confirmation
    from strategies.programs.shrink.worker import Doubt as Doubt
    from strategies.programs.shrink.worker import regrouped as regrouped
    from strategies.programs.shrink.worker import shrunk as shrunk

__all__ = [
    "Confirmation",
    "Court",
    "Doubt",
    "at_home",
    "held_of",
    "literal",
    "on_meshes",
    "picture",
    "placement_code",
    "program_picture",
    "program_script",
    "regrouped",
    "script",
    "shrunk",
    "truth_of",
    "usable",
    "with_followers",
    "writable",
]

_ROOM = {
    "Confirmation": "strategies.programs.run.verdict",
    "Court": "strategies.programs.run.real_run",
    "Doubt": "strategies.programs.shrink.worker",
    "at_home": "strategies.programs.run.rank_run",
    "held_of": "strategies.programs.run.local_inputs",
    "literal": "strategies.programs.repro.script",
    "on_meshes": "strategies.programs.chained_validation",
    "picture": "strategies.programs.run.rank_diagram",
    "placement_code": "strategies.programs.run.follow_ups",
    "program_picture": "strategies.programs.run.rank_diagram",
    "program_script": "strategies.programs.repro.program_script",
    "regrouped": "strategies.programs.shrink.worker",
    "script": "strategies.programs.repro.script",
    "shrunk": "strategies.programs.shrink.worker",
    "truth_of": "strategies.programs.run.program_oracle",
    "usable": "strategies.programs.repro.script",
    "with_followers": "strategies.programs.chained_validation",
    "writable": "strategies.programs.repro.program_script",
}


def __getattr__(name: str) -> _typing.Any:
    if name not in _ROOM:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(_importlib.import_module(_ROOM[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
