"""The propagator: how a call runs on a mesh; key, cache, expansion."""

import importlib as _importlib
import typing as _typing

if _typing.TYPE_CHECKING:  # for readers and type checkers; _ROOM below says the same to the interpreter
    from strategies.propagation.answer_cache import Once as Once
    from strategies.propagation.answer_cache import Stats as Stats
    from strategies.propagation.answer_cache import answers as answers
    from strategies.propagation.cache_key import Same as Same
    from strategies.propagation.cache_key import key_of as key_of
    from strategies.propagation.cache_key import spec_token as spec_token
    from strategies.propagation.explicit.context import allow_implicit_communication as allow_implicit_communication
    from strategies.propagation.explicit.context import communicates as communicates
    from strategies.propagation.explicit.context import no_implicit_communication as no_implicit_communication
    from strategies.propagation.overlay.context import overlay_dtensor as overlay_dtensor
    from strategies.propagation.propagator import Propagator as Propagator
    from strategies.propagation.races.model import Finding as Finding
    from strategies.propagation.races.model import Part as Part
    from strategies.propagation.races.model import Tried as Tried
    from strategies.propagation.races.races_scripts import SCRIPTS as SCRIPTS
    from strategies.propagation.races.races_scripts import script as script
    from strategies.propagation.races.subprocesses import GRACE as GRACE
    from strategies.propagation.races.subprocesses import run_script as run_script

__all__ = [
    "GRACE",
    "SCRIPTS",
    "Finding",
    "Once",
    "Part",
    "Propagator",
    "Same",
    "Stats",
    "Tried",
    "allow_implicit_communication",
    "answers",
    "communicates",
    "key_of",
    "no_implicit_communication",
    "overlay_dtensor",
    "run_script",
    "script",
    "spec_token",
]

_ROOM = {
    "Finding": "strategies.propagation.races.model",
    "GRACE": "strategies.propagation.races.subprocesses",
    "Once": "strategies.propagation.answer_cache",
    "Part": "strategies.propagation.races.model",
    "Propagator": "strategies.propagation.propagator",
    "SCRIPTS": "strategies.propagation.races.races_scripts",
    "Same": "strategies.propagation.cache_key",
    "Stats": "strategies.propagation.answer_cache",
    "Tried": "strategies.propagation.races.model",
    "allow_implicit_communication": "strategies.propagation.explicit.context",
    "answers": "strategies.propagation.answer_cache",
    "communicates": "strategies.propagation.explicit.context",
    "key_of": "strategies.propagation.cache_key",
    "no_implicit_communication": "strategies.propagation.explicit.context",
    "overlay_dtensor": "strategies.propagation.overlay.context",
    "run_script": "strategies.propagation.races.subprocesses",
    "script": "strategies.propagation.races.races_scripts",
    "spec_token": "strategies.propagation.cache_key",
}


def __getattr__(name: str) -> _typing.Any:
    if name not in _ROOM:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(_importlib.import_module(_ROOM[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
