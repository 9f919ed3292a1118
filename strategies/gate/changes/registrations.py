"""Today's rule functions, as they are registered: in which file, on which line."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

from strategies.torch_api import dtensor


@dataclass(frozen=True, slots=True)
class Written:
    """Where a function starts, decorators included, by its code; `name` is its qualified name."""

    file: str
    line: int
    name: str


def written_now(ops: Collection[str] | None = None) -> dict[str, list[Written]]:
    """The functions behind the rules of each overload, or of each of these: first the one that its author wrote, then
    what wraps it."""
    found: dict[str, list[Written]] = defaultdict(list)
    for (_, op), registered in dtensor.strategies_now().items():
        if ops is not None and str(op) not in ops:
            continue
        found[str(op)] += [w for w in dict.fromkeys(_written(registered, set())) if w not in found[str(op)]]
    return dict(found)


def _written(registered: Any, seen: set[int]) -> Iterator[Written]:
    """`register_sharding` keeps the author's function in a partial, a single-dim strategy in `.func`; others wrap it."""
    if id(registered) in seen or isinstance(registered, type) or not callable(registered):
        return
    seen.add(id(registered))
    if isinstance(registered, functools.partial):
        inner = [*registered.args, *registered.keywords.values(), registered.func]
    elif isinstance(registered, MethodType):
        inner = [registered.__func__]
    elif isinstance(registered, FunctionType):
        inner = [getattr(registered, "__wrapped__", None), *_cells(registered)]
    else:
        inner = [getattr(registered, "func", None), type(registered).__call__]
    for value in inner:
        yield from _written(value, seen)
    if isinstance(registered, FunctionType):
        code = registered.__code__
        yield Written(code.co_filename, code.co_firstlineno, registered.__qualname__)


def _cells(function: FunctionType) -> list[Any]:
    """The functions that a function has closed over: a decorator's inner function has what it decorates."""
    values = []
    for cell in function.__closure__ or ():
        try:
            values.append(cell.cell_contents)
        except ValueError:  # an empty one: the name was never bound
            continue
    return [v for v in values if isinstance(v, FunctionType | MethodType | functools.partial)]
