"""Lazy exports of a package: the stub beside its `__init__.py` lists each public name once, for type checkers and at run time.

The exports of `localtensor` are in part those of the package `strategies`, which is installed beside it.  That package
is found also where a user has a folder of the same name.

Why not `lazy_loader`: it takes relative imports only, and no name of another package.
"""

from __future__ import annotations

import ast
import importlib
import os
import sys
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

_BESIDE = "strategies"
_ROOT = Path(__file__).parents[2]
_FILE = str(_ROOT / _BESIDE / "__init__.py")


def exports(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` of `package`, whose `__init__.py` is `file`.

    The stub says where each name is defined: `from localtensor.layout.spec import parse as parse`.  A name is imported
    on first use and kept in the package.  `__getattr__` raises AttributeError for a name that the stub does not list.
    """
    where = {
        alias.asname or alias.name: (node.module, alias.name)
        for node in ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8")).body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }

    def get(name: str) -> Any:
        if name not in where:
            raise AttributeError(f"module {package!r} has no attribute {name!r}; it has {', '.join(sorted(where))}")
        module, attribute = where[name]
        if module.partition(".")[0] == _BESIDE != package.partition(".")[0]:
            find_strategies()
        found = vars(importlib.import_module(module))
        value = found[attribute] if attribute in found else importlib.import_module(f"{module}.{attribute}")
        setattr(sys.modules[package], name, value)
        return value

    def listing() -> list[str]:
        return sorted({*vars(sys.modules[package]), *where})

    return get, listing, sorted(where)


def find_strategies() -> None:
    """Put the folder of our packages first on `sys.path` where another `strategies` would be imported instead of ours.

    Child processes inherit the path, so they import the same package.  Raises ImportError if this process has imported
    another package of that name already: one process cannot have both.
    """
    loaded = sys.modules.get(_BESIDE)
    file = getattr(loaded, "__file__", None)  # a folder without an `__init__.py` has none
    if loaded is not None and not _is_ours(file):
        place = file or ", ".join(loaded.__path__)
        raise ImportError(
            f"localtensor needs its own package {_BESIDE!r} ({_FILE}), but this process has imported another package of that "
            f"name: {place}. Rename that package, or use localtensor in a process that does not import it."
        )
    found = PathFinder.find_spec(_BESIDE)
    if found is not None and not _is_ours(found.origin):
        sys.path.insert(0, str(_ROOT))


def _is_ours(file: str | None) -> bool:
    """Whether this is the file of our package."""
    return file is not None and os.path.realpath(file) == os.path.realpath(_FILE)
