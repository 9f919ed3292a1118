"""Plumbing of the process that knows no domain: context, call sites, patching, pickling."""

import importlib as _importlib
import typing as _typing

if _typing.TYPE_CHECKING:  # for readers and type checkers; _ROOM below says the same to the interpreter
    from localtensor._util.ambient import entered as entered
    from localtensor._util.ambient import of_rank as of_rank
    from localtensor._util.ambient import put_guard as put_guard
    from localtensor._util.ambient import put_rules as put_rules
    from localtensor._util.ambient import refuse_inside_mode as refuse_inside_mode
    from localtensor._util.ambient import running as running
    from localtensor._util.call_sites import handled as handled
    from localtensor._util.call_sites import in_debugger as in_debugger
    from localtensor._util.call_sites import is_user_file as is_user_file
    from localtensor._util.call_sites import origin as origin
    from localtensor._util.call_sites import place_of as place_of
    from localtensor._util.call_sites import stack_of as stack_of
    from localtensor._util.events import Call as Call
    from localtensor._util.events import Died as Died
    from localtensor._util.events import Outcome as Outcome
    from localtensor._util.events import Place as Place
    from localtensor._util.events import Raised as Raised
    from localtensor._util.events import Returned as Returned
    from localtensor._util.events import Wait as Wait
    from localtensor._util.events import Waiting as Waiting
    from localtensor._util.opinfo import drawn as drawn
    from localtensor._util.own_world import OwnWorld as OwnWorld
    from localtensor._util.patching import replaced as replaced
    from localtensor._util.patching import wrapped as wrapped
    from localtensor._util.rank_output import RankLines as RankLines
    from localtensor._util.rank_output import Tagged as Tagged
    from localtensor._util.rank_places import raised_at as raised_at

__all__ = [
    "Call",
    "Died",
    "Outcome",
    "OwnWorld",
    "Place",
    "Raised",
    "RankLines",
    "Returned",
    "Tagged",
    "Wait",
    "Waiting",
    "drawn",
    "entered",
    "handled",
    "in_debugger",
    "is_user_file",
    "of_rank",
    "origin",
    "place_of",
    "put_guard",
    "put_rules",
    "raised_at",
    "refuse_inside_mode",
    "replaced",
    "running",
    "stack_of",
    "wrapped",
]

_ROOM = {
    "Call": "localtensor._util.events",
    "Died": "localtensor._util.events",
    "Outcome": "localtensor._util.events",
    "OwnWorld": "localtensor._util.own_world",
    "Place": "localtensor._util.events",
    "Raised": "localtensor._util.events",
    "RankLines": "localtensor._util.rank_output",
    "Returned": "localtensor._util.events",
    "Tagged": "localtensor._util.rank_output",
    "Wait": "localtensor._util.events",
    "Waiting": "localtensor._util.events",
    "drawn": "localtensor._util.opinfo",
    "entered": "localtensor._util.ambient",
    "handled": "localtensor._util.call_sites",
    "in_debugger": "localtensor._util.call_sites",
    "is_user_file": "localtensor._util.call_sites",
    "of_rank": "localtensor._util.ambient",
    "origin": "localtensor._util.call_sites",
    "place_of": "localtensor._util.call_sites",
    "put_guard": "localtensor._util.ambient",
    "put_rules": "localtensor._util.ambient",
    "raised_at": "localtensor._util.rank_places",
    "refuse_inside_mode": "localtensor._util.ambient",
    "replaced": "localtensor._util.patching",
    "running": "localtensor._util.ambient",
    "stack_of": "localtensor._util.call_sites",
    "wrapped": "localtensor._util.patching",
}


def __getattr__(name: str) -> _typing.Any:
    if name not in _ROOM:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(_importlib.import_module(_ROOM[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
