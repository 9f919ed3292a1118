"""A name for all that the verdict on an overload depends on in a project: the same only while nothing of it changed."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from strategies.gate.changes import project as changed_project
from strategies.gate.changes.changed_starts import starts_of
from strategies.gate.changes.registrations import written_now
from strategies.gate.changes.version_view import Seen, View, located, names_of, rules_of

PURE = frozenset({
    "__future__", "abc", "array", "ast", "bisect", "builtins", "cmath", "collections", "contextlib", "copy", "dataclasses",
    "decimal", "enum", "fractions", "functools", "heapq", "inspect", "itertools", "logging", "math", "numbers", "operator",
    "re", "statistics", "string", "struct", "textwrap", "torch", "types", "typing", "warnings",
})  # fmt: skip
"""Modules whose answers hang on what they are given and on their version, less what is named in `IMPURE`."""
IMPURE = ("builtins.input", "builtins.open", "builtins.hash", "builtins.id", "torch.cuda.", "torch.accelerator.", "torch.backends.",
          "torch.mps.", "torch.xpu.", "torch.hub.", "torch.distributed.get_", "torch.get_num_threads", "numpy.random.",
          "requests.")  # fmt: skip
"""Names by which code reads what is no text of the project: a terminal, files, the machine, the run."""
KNOWN = frozenset({"sys.version_info", "sys.maxsize", "sys.float_info"})
"""What other modules of Python's own say that follows from its version and the kind of machine."""
OUTSIDE = "outside of the project"


def digests(module: str | None) -> Callable[[str], str | None]:
    """For each overload a digest of its rule function, all that it calls and reads, its registration and its op.

    Of rules that are torch's own (`module` None, or a rule outside of the module's project) it says no more than
    `OUTSIDE`: they are known by the version of torch.  None if what the rule depends on cannot be known: it reads files
    or the environment, or a library without a version.  The project is read once, when the first overload is asked for.
    """
    made: list[_Digests] = []

    def ask(op: str) -> str | None:
        if not made:
            made.append(_Digests(module))
        return made[0].of(op)

    return ask


class _Digests:
    def __init__(self, module: str | None) -> None:
        project = changed_project.of_module(module) if module else changed_project.in_repository(torch.__file__)
        self.view: View | None = None
        if project is None:
            return
        written = located(project, written_now())
        start = starts_of(project, module, written)
        if start:
            self.view = View(project.today(project.roots([module] if module else []), {}), start, written)
            self.names = names_of(self.view)

    def of(self, op: str) -> str | None:
        if self.view is None:
            return OUTSIDE
        functions = self.view.functions(op)
        seen = self.view.seen(op, rules_of(self.names, op), functions)
        if not seen.slice.parts:
            return OUTSIDE
        return self._digest(seen)

    def _digest(self, seen: Seen) -> str | None:
        assert self.view is not None
        outside = seen.slice.outside
        versions = _versions({*outside, *(self.view.libraries() if seen.foreign else ())})
        if seen.reads or versions is None or not all(map(_follows, outside)):
            return None
        whole = sorted(self.view.whole().items()) if seen.doubts else []
        told = repr([seen.slice.text, versions, whole])
        return hashlib.sha256(told.encode("utf-8", "surrogatepass")).hexdigest()


def _follows(name: str) -> bool:
    """Whether the answer that code gets by this name follows from the code and from versions."""
    library = name.partition(".")[0]
    if name.startswith(".") or name in KNOWN:
        return True
    return not name.startswith(IMPURE) and (library in PURE or library not in sys.stdlib_module_names)


def _versions(outside: Iterable[str]) -> list[tuple[str, str]] | None:
    """The versions of the libraries that these names come from, but torch's; None if one has none that holds."""
    found: dict[str, str] = {}
    for library in {name.partition(".")[0] for name in outside if not name.startswith(".")}:
        if library in {"torch", "builtins"} or library in sys.stdlib_module_names:
            continue
        module: Any = sys.modules.get(library)
        version = getattr(module, "__version__", None)
        file = getattr(module, "__file__", None) or ""
        if not isinstance(version, str) or "site-packages" not in Path(file).parts:
            return None
        found[library] = version
    return [("python", ".".join(map(str, sys.version_info[:3]))), *sorted(found.items())]
