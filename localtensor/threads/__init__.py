"""Ranks as threads: run token, simulation, process group, Work, store, diagnosis of deadlocks."""

import importlib as _importlib
import typing as _typing

if _typing.TYPE_CHECKING:  # for readers and type checkers; _ROOM below says the same to the interpreter
    from localtensor.threads.dist_patches import inside as inside
    from localtensor.threads.dist_patches import must_fit as must_fit
    from localtensor.threads.dist_patches import named as named
    from localtensor.threads.rank_world import innermost as innermost
    from localtensor.threads.run import DAY as DAY
    from localtensor.threads.run import limit_said as limit_said
    from localtensor.threads.run import run_in_threads as run_in_threads
    from localtensor.threads.run_token import Abort as Abort
    from localtensor.threads.state.sharding_rules import importing as importing
    from localtensor.threads.state.slots import FLAGS as FLAGS
    from localtensor.threads.state.special_slots import torchrun_environment as torchrun_environment
    from localtensor.threads.state.swap import SLOTS as SLOTS
    from localtensor.threads.state.swap import OutsideState as OutsideState
    from localtensor.threads.state.swap import RankState as RankState
    from localtensor.threads.state.swap import switch as switch

__all__ = [
    "DAY",
    "FLAGS",
    "SLOTS",
    "Abort",
    "OutsideState",
    "RankState",
    "importing",
    "innermost",
    "inside",
    "limit_said",
    "must_fit",
    "named",
    "run_in_threads",
    "switch",
    "torchrun_environment",
]

_ROOM = {
    "Abort": "localtensor.threads.run_token",
    "DAY": "localtensor.threads.run",
    "FLAGS": "localtensor.threads.state.slots",
    "OutsideState": "localtensor.threads.state.swap",
    "RankState": "localtensor.threads.state.swap",
    "SLOTS": "localtensor.threads.state.swap",
    "importing": "localtensor.threads.state.sharding_rules",
    "innermost": "localtensor.threads.rank_world",
    "inside": "localtensor.threads.dist_patches",
    "limit_said": "localtensor.threads.run",
    "must_fit": "localtensor.threads.dist_patches",
    "named": "localtensor.threads.dist_patches",
    "run_in_threads": "localtensor.threads.run",
    "switch": "localtensor.threads.state.swap",
    "torchrun_environment": "localtensor.threads.state.special_slots",
}


def __getattr__(name: str) -> _typing.Any:
    if name not in _ROOM:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(_importlib.import_module(_ROOM[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
