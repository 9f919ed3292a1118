"""A user's own rules: importing the named module, and finding what it registered with DTensor.

Also every overload that DTensor registers itself, in order: each has to be validated by a sweep, or has a reason why it cannot be.

| torch part (torch._C)                                                     | read on     | run on |
|---------------------------------------------------------------------------|-------------|--------|
| _dispatch_has_computed_kernel_for_dispatch_key(name, key): composite      |             |        |
| kernels count                                                             | 2.11 - 2.15 | 2.13   |
| _dispatch_dump_table(name): a line with the kernel of each key            | 2.11 - 2.15 | 2.13   |

`tests/strategies/torch_api/test_user_modules_population.py` checks it by name.
"""

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
from localtensor.errors import LocalTensorError
from strategies.model.rule import overload
from strategies.model.settings import NO_MODULE, BadRules, rules_module
from strategies.torch_api import dtensor

RegistryKey = tuple[str, torch._ops.OpOverload]
"""A registry and an overload in it."""
MAX_MESSAGE = 300
"""The largest number of characters shown of an exception's message."""
SINGLE_DIM = "single-dim strategy"
SINGLE_DIM_FIRST = "torch asks this op's single-dim strategy first, so the registration is never used. Use register_single_dim_strategy."
DECOMPOSED = (
    "torch runs this op as the ops that it is made of, so the registration is never used. Register rules for those, or "
    "give the op a kernel of its own (torch.library.custom_op)."
)


@dataclass(frozen=True, slots=True)
class RegisteredRules:
    """The overloads that importing a module registered, in the order of their names."""

    module: str
    ops: tuple[str, ...]
    ignored: tuple[tuple[str, str], ...]
    """Overloads whose registration torch never uses, each with the reason."""

    def only(self, ops: Collection[str]) -> RegisteredRules:
        """The same, restricted to these overloads."""
        kept, ignored = [op for op in self.ops if op in ops], [one for one in self.ignored if one[0] in ops]
        return RegisteredRules(self.module, tuple(kept), tuple(ignored))

    @property
    def every(self) -> tuple[str, ...]:
        """All overloads, those that are ignored included, in the order of their names."""
        return tuple(sorted({*self.ops, *(op for op, _ in self.ignored)}))


def load_rules(rules: str, folder: str) -> RegisteredRules:
    """Import the module, `my_package.my_rules` or a file, and return what it registered.

    Raises `BadRules` if it does not exist, raises on import, or registers nothing.
    """
    module, home = rules_module(rules, folder)
    before = dtensor.registered_functions()
    already = module in sys.modules
    loaded = import_user_module(module, home, lambda _, problem, remedy: BadRules(rules, problem, remedy))
    changed = getattr(loaded, _SEEN, None) or _changed(before, already, loaded)
    if not changed:
        raise BadRules(rules, "importing it registered no sharding rule", "Call torch's register_sharding in it.")
    setattr(loaded, _SEEN, frozenset(changed))
    used = {op for table, op in changed if table == SINGLE_DIM}
    ignored = {op: DECOMPOSED for _, op in changed if decomposes_first(op) and not dtensor.is_overlaid(op)}
    ignored |= {op: SINGLE_DIM_FIRST for _, op in changed if dtensor.has_unused_strategy(op) and op not in used}
    names = tuple(sorted({str(op) for _, op in changed if op not in ignored}))
    return RegisteredRules(module, names, tuple(sorted((str(op), why) for op, why in ignored.items())))


def import_user_module(module: str, folder: str, bad: Callable[[str, str, str], LocalTensorError]) -> ModuleType:
    """A user's module, imported with `folder` on the path as with `python -m`.

    `bad` makes the error for a module that does not exist or raises on import, from its name, a problem and a remedy.
    """
    if not all(module.split(".")) or set(module) & set("/\\: "):
        raise bad(module or "''", "this is no name of a module", "Write it as after `import`: my_package.my_rules.")
    if folder not in sys.path:
        sys.path.insert(0, folder)
        lazy.find_strategies()
    try:
        found: object = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and module.split(".")[: len(error.name.split("."))] == error.name.split("."):
            raise bad(module, NO_MODULE, f"Run from the folder that holds it (now {folder}).") from None
        raise bad(module, f"importing it raises {exception_message(error)}", "Install what it needs.") from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # why: a user's module may raise anything, even pytest's Skipped; its line is named
        problem = f"importing it raises {type(error).__name__}: {exception_message(error)} ({_user_line(error)})"
        raise bad(module, problem, "Fix that first.") from error
    if not isinstance(found, ModuleType):
        raise bad(
            module, f"importing it gives {type(found).__name__}, no module", "Leave its entry of sys.modules alone."
        )
    return found


def exception_message(error: BaseException) -> str:
    """The exception's message in one line of at most `MAX_MESSAGE` characters and an ellipsis."""
    try:
        text = " ".join(str(error).split())
    except Exception:  # why: it is the user's own exception, whose text may raise anything
        return "(its own text failed)"
    return text if len(text) <= MAX_MESSAGE else f"{text[:MAX_MESSAGE]}..."


def module_digest(module: str) -> str:
    """A digest of an imported module's source, by which versions of it are distinguished; empty without a source."""
    path = getattr(sys.modules[module], "__file__", None)
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16] if path else ""
    except OSError:  # a module can name any file
        return ""


_SEEN = "__localtensor_registered__"
"""The module's attribute that keeps what importing it registered, for further calls of `load`."""


def _changed(before: dict[RegistryKey, Any], already: bool, loaded: ModuleType) -> set[RegistryKey]:
    now = dtensor.registered_functions()
    if already:  # imported before this call: its functions are recognised by their module
        return {key for key, func in now.items() if _module_of(func) == loaded.__name__}
    return {key for key, func in now.items() if before.get(key) is not func}


def _module_of(func: object) -> str:
    inner = getattr(func, "func", func)
    if args := getattr(func, "args", None):  # register_sharding keeps the user's function in a partial
        inner = args[0]
    return str(getattr(inner, "__module__", ""))


def _user_line(error: BaseException) -> str:
    """The file and line in the user's own code, not in a library that it called."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}, line {error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not f.filename.startswith(_LIBRARIES)]
    last = (own[1:] or frames)[-1]  # the first of our own is `import_user_module`
    return f"{last.filename}, line {last.lineno}"


_LIBRARIES = ("<frozen importlib", os.path.dirname(torch.__file__), os.path.dirname(importlib.__file__))


@functools.cache
def import_rules(rules: str, folder: str) -> None:
    """Import the user's rules module in this process, too."""
    module, home = rules_module(rules, folder)
    sys.path.insert(0, home)
    lazy.find_strategies()
    importlib.import_module(module)


_KEYS = {"cpu": "CPU", "cuda": "CUDA"}


def missing_kernel_reason(op: str, device: str = "cpu") -> str:
    """Why this device has no kernel for the overload of that name, or empty.  Raises as `overload` for an unknown name."""
    known = getattr(torch._C, "_dispatch_has_computed_kernel_for_dispatch_key", None)
    if known is None or known(overload(op).name(), _KEYS[device]):
        return ""
    others = [name for name, key in _KEYS.items() if name != device and known(overload(op).name(), key)]
    elsewhere = f"; it has one for {others[0].upper()}" if others else ""
    return f"no kernel for {device.upper()} in this build of torch{elsewhere}"


def decomposes_first(op: torch._ops.OpOverload) -> bool:
    """Whether autograd runs the op as the ops that it is made of, so that a tensor subclass never sees it.

    It does where its autograd kernel is the implicit composite one: in inference mode DTensor sees the op all the same.
    """
    table = torch._C._dispatch_dump_table(op.name()).splitlines()
    return any(line.startswith("AutogradCPU:") and "[math kernel]" in line for line in table)


FAMILIES = ("foreach", "fused", "prims", "out=", "backward", "in place", "views", "forward")
"""Kinds of overloads; an overload belongs to the first that fits."""


@dataclass(frozen=True, slots=True)
class RegisteredOverload:
    """One overload, the registry that has its rule, and why this device cannot run it (empty if it can)."""

    op: str
    source: str
    cannot: str = ""

    @property
    def family(self) -> str:
        return family(self.op)


def all_registered_overloads(device: str = "cpu") -> list[RegisteredOverload]:
    """Every registered overload in the order of the names.  Nothing is run."""
    named = sorted((str(op), dtensor.registry_of(op)) for op in dtensor.registered_overloads())
    return [RegisteredOverload(name, registry, missing_kernel_reason(name, device)) for name, registry in named]


def family(op: str) -> str:
    """The kind of overload, by its namespace, its name and its schema."""
    namespace, packet, _ = op.split(".")
    if "foreach_" in packet:
        return "foreach"
    if packet.startswith("_fused_"):
        return "fused"
    if namespace != "aten":
        return namespace
    schema = overload(op)._schema
    if any(a.is_out for a in schema.arguments):
        return "out="
    if "backward" in packet:
        return "backward"
    if schema.is_mutable:
        return "in place"
    views = any(r.alias_info is not None for r in schema.returns)
    return "views" if views else "forward"
