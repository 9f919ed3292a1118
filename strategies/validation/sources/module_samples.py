"""Calls of the functions of a user's module: those that it lists, and drawn ones."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import torch

from strategies.model.settings import BadRules

SIZES = (6, 4, 8)
"""Sizes of the dims of drawn tensors."""
MOST = 2
"""Drawn calls of one function."""


def home_of(value: Any, *modules: str) -> tuple[str, str] | None:
    """A module that has the value under some name, and that name: one of these, or the one that it tells; else None."""
    homes = {name: vars(sys.modules[name]) for name in (*modules, value.__module__) if name in sys.modules}
    return next(((home, key) for home, values in homes.items() for key, one in values.items() if one is value), None)


def samples_of_module(
    module: ModuleType, known: Callable[[Any], bool], what: str
) -> Iterator[tuple[Any, Sequence[Any]]]:
    """The pairs of a function and its arguments that the module's `samples()` yields; none if it has no such function.

    `known` tells the functions, and `what` says what they are.  Raises `BadRules`.
    """
    name, own = module.__name__.rpartition(".")[2], getattr(module, "samples", None)
    if own is None:
        return
    try:
        made = list(own())
    except Exception as error:  # why: it is the user's own function, and may raise anything
        raise BadRules(name, f"its samples() raises {type(error).__name__}: {error}", "Fix that first.") from error
    for one in made:
        if not (isinstance(one, tuple) and len(one) == 2 and known(one[0]) and isinstance(one[1], (tuple, list))):
            problem = f"its samples() yields {str(one)[:60]}, which is no pair of {what} and its arguments"
            raise BadRules(name, problem, "Yield (my_function, (x, weight)), say.")
        yield one


def drawn_calls(function: Callable[..., Any], count: int) -> list[tuple[torch.Tensor, ...]]:
    """At most `MOST` calls with so many tensors that the function takes."""
    found = []
    for shapes in tensor_shapes(count):
        rng = torch.Generator().manual_seed(len(shapes))
        args = tuple(torch.randn(shape, generator=rng) for shape in shapes)
        with contextlib.suppress(Exception):  # why: a user's function raises anything for tensors that it does not take
            function(*args)
            found.append(args)
        if len(found) == MOST:
            break
    return found


def tensor_shapes(count: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Shapes to draw for so many tensors, the likely ones first."""
    m, k, n = SIZES
    yield ((m, k),) * count
    if count == 2:
        yield from (((m, k), (k, n)), ((m, k), (n, k)), ((m, k), (k,)), ((m,), (m,)), ((2, m, k), (k, n)))
    if count == 3:
        yield from (((m, k), (k, n), (n,)), ((m, k), (n, k), (n,)), ((m, k), (k,), (k,)))
    yield ((2, m, k),) * count
    yield ((m,),) * count
