"""Judges claims about sharding: takes rules from torch or from you, and puts each on trial.

The command line is `localtensor validate`.  May import `localtensor`, never the other way round.

`strategies.overlay_dtensor()` gives the running DTensor rules of our own, for a while; `strategies.plan(src, dst)` is the
cheapest redistribution; `strategies.no_implicit_communication()` refuses one that nobody wrote.  Each is imported when it
is first asked for: most who come by this door want none of them.
"""

import importlib as _importlib
import typing as _typing

if _typing.TYPE_CHECKING:
    from strategies.planner.search.api import plan as plan
    from strategies.propagation.explicit.context import allow_implicit_communication as allow_implicit_communication
    from strategies.propagation.explicit.context import no_implicit_communication as no_implicit_communication
    from strategies.propagation.overlay.context import overlay_dtensor as overlay_dtensor

__all__ = ["allow_implicit_communication", "no_implicit_communication", "overlay_dtensor", "plan"]

_ROOM = {
    "allow_implicit_communication": "strategies.propagation.explicit.context",
    "no_implicit_communication": "strategies.propagation.explicit.context",
    "overlay_dtensor": "strategies.propagation.overlay.context",
    "plan": "strategies.planner.search.api",
}


def __getattr__(name: str) -> _typing.Any:
    if name not in _ROOM:
        raise AttributeError(f"module 'strategies' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(_importlib.import_module(_ROOM[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
