"""A door is a package's `__init__`: its stub (`__init__.pyi`) lists the names that the package offers, once.

Why not `lazy_loader`: it takes relative imports only, and no name of another package.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def door(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` of `package`, whose `__init__.py` is `file`.

    The stub beside `file` says where each name is: `from localtensor.layout.spec import parse as parse`.  A name is
    imported on first use and kept in the package.  Raises AttributeError for a name that the stub does not list.
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
        found = importlib.import_module(module)
        value = getattr(found, attribute, None)
        if value is None:
            value = importlib.import_module(f"{module}.{attribute}")  # a module that a door offers, such as testing
        setattr(sys.modules[package], name, value)
        return value

    def listing() -> list[str]:
        return sorted({*vars(sys.modules[package]), *where})

    return get, listing, sorted(where)
