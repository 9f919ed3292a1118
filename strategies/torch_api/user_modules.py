"""A user's own rules: import the module that he named, and see what it registered with DTensor."""

from __future__ import annotations

import functools
import hashlib
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from localtensor._util import lazy
from localtensor.errors import LocalTensorError, Refusal
from strategies.torch_api import dtensor

Key = tuple[str, torch._ops.OpOverload]
"""A registry and the overload that it answers for."""
LONGEST = 300
"""Characters of what an exception says that are shown."""
SINGLE_DIM = "single-dim strategy"


class BadRules(Refusal, call="localtensor validate", argument="--rules"):
    """A rules module that cannot be imported or that registers nothing."""


@dataclass(frozen=True, slots=True)
class Registered:
    """What importing a module registered, in the order of the overloads' names."""

    module: str
    ops: tuple[str, ...]
    ignored: tuple[str, ...]
    """Overloads whose registration torch never asks (see torch_dtensor.ignored)."""

    def only(self, ops: Collection[str]) -> Registered:
        """The same, less the overloads that are not among these."""
        kept, ignored = ([op for op in own if op in ops] for own in (self.ops, self.ignored))
        return Registered(self.module, tuple(kept), tuple(ignored))


def load(module: str, folder: str) -> Registered:
    """Import the module, and see what that registers.

    Raises `BadRules` if it is not there, raises on import, or registers nothing.
    """
    before = dtensor.strategies_now()
    already = module in sys.modules
    loaded = imported(module, folder, BadRules)
    changed = getattr(loaded, _SEEN, None) or _changed(before, already, loaded)
    if not changed:
        raise BadRules(module, "importing it registered no sharding rule", "Call torch's register_sharding in it.")
    setattr(loaded, _SEEN, frozenset(changed))
    asked = {op for table, op in changed if table == SINGLE_DIM}
    ignored = {op for _, op in changed if dtensor.ignored(op) and op not in asked}
    names = tuple(sorted({str(op) for _, op in changed if op not in ignored}))
    return Registered(module, names, tuple(sorted(map(str, ignored))))


def imported(module: str, folder: str, bad: Callable[[str, str, str], LocalTensorError]) -> ModuleType:
    """A user's module, with `folder` on the path as `python -m` would have it.

    `bad` makes the error that is raised if it is not there or raises on import: of its name, a problem and a remedy.
    """
    if not all(module.split(".")) or set(module) & set("/\\: "):
        raise bad(module or "''", "this is no name of a module", "Write it as after `import`: my_package.my_rules.")
    if folder not in sys.path:
        sys.path.insert(0, folder)
        lazy.find_strategies()
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and module.split(".")[: len(error.name.split("."))] == error.name.split("."):
            raise bad(module, "there is no such module", f"Run from the folder that holds it (now {folder}).") from None
        raise bad(module, f"importing it raises {words_of(error)}", "Install what it needs.") from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # why: a user's module may raise anything, pytest's Skipped too; told with its place
        raise bad(
            module,
            f"importing it raises {type(error).__name__}: {words_of(error)} ({_place(error)})",
            "Mend that first.",
        ) from error


def words_of(error: BaseException) -> str:
    """What it says, as a part of a sentence: in one line, and not without end."""
    try:
        text = " ".join(str(error).split())
    except Exception:  # why: it is the user's own exception, whose text may raise anything
        return "(its own text failed)"
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def text_of(module: str) -> str:
    """A digest of the text of a module that is imported, by which another version of it is known; empty without text."""
    path = getattr(sys.modules[module], "__file__", None)
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16] if path else ""


_SEEN = "__localtensor_registered__"
"""A note on the module itself of what importing it registered: who asks a second time hears the same."""


def _changed(before: dict[Key, Any], already: bool, loaded: Any) -> set[Key]:
    now = dtensor.strategies_now()
    if already:  # imported before this call: its functions are known by where they were written
        return {key for key, func in now.items() if _home(func) == loaded.__name__}
    return {key for key, func in now.items() if before.get(key) is not func}


def _home(func: Any) -> str:
    inner = getattr(func, "func", func)
    if getattr(func, "args", None):  # register_sharding keeps the user's function in a partial
        inner = func.args[0]
    return str(getattr(inner, "__module__", ""))


def _place(error: BaseException) -> str:
    """The file and line that the user can mend: not those of the library that it called."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}, line {error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not f.filename.startswith(_LIBRARIES)]
    last = (own[1:] or frames)[-1]  # the first of our own is `imported`
    return f"{last.filename}, line {last.lineno}"


_LIBRARIES = ("<frozen importlib", os.path.dirname(torch.__file__), os.path.dirname(importlib.__file__))


@functools.cache
def at_home(module: str, folder: str) -> None:
    """The user's rules module is imported in this process, too."""
    if module:
        sys.path.insert(0, folder)
        lazy.find_strategies()
        importlib.import_module(module)
