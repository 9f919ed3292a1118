"""Lazy exports of a package: the stub beside its `__init__.py` lists each public name once, for type checkers and at run time.

`lazy_loader` does not serve: it takes relative imports only, and no name of another package.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


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
        found = vars(importlib.import_module(module))
        value = found[attribute] if attribute in found else importlib.import_module(f"{module}.{attribute}")
        setattr(sys.modules[package], name, value)
        return value

    def listing() -> list[str]:
        return sorted({*vars(sys.modules[package]), *where})

    return get, listing, sorted(where)
