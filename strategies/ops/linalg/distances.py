"""Distances between rows: by batch, by row of either side, and summed over columns where the distance is a sum."""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch.distributed.tensor import Partial

from strategies.ops.lib.overload_variants import with_variants
from strategies.ops.lib.shared_dims import along, parts_of
from strategies.ops.semantics.rulebook import Ask, Entry, Line, rules

ADDED = {0.0: "sum", 1.0: "sum", math.inf: "max"}
"""How the distances over some columns make that over all, by the order of the norm; of others only their powers add."""


def between(ask: Ask) -> Iterator[Line]:
    """`(..., P, M)` and `(..., R, M)` to `(..., P, R)`; the dims before broadcast."""
    one, two = ask.meta("x1"), ask.meta("x2")
    ndim = max(one.ndim, two.ndim)
    for dim in range(ndim - 2):
        owned = {name: dim - ndim + ask.meta(name).ndim for name in ("x1", "x2")}
        size = max(_size(ask, name, own) for name, own in owned.items())
        yield along(ask, {n: own for n, own in owned.items() if _size(ask, n, own) == size}, [dim], "filled")
    yield along(ask, {"x1": one.ndim - 2}, [ndim - 2], "filled")
    yield along(ask, {"x2": two.ndim - 2}, [ndim - 1], "filled")
    kind = ADDED.get(float(ask["p"]))
    if kind:
        yield along(ask, {"x1": one.ndim - 1, "x2": two.ndim - 1}, [Partial(kind)], "filled")


def _size(ask: Ask, name: str, dim: int) -> int:
    return ask.meta(name).shape[dim] if dim >= 0 else -1


def between_backward(ask: Ask) -> Iterator[Line]:
    """The gradient of the rows of x1: a sum over the rows of x2.  Linear in the gradient of the distances."""
    ndim = ask.meta("x1").ndim
    grad = "grad_output" if ask.leaf("grad") is None else "grad"  # the name of before torch 2.14
    if {ask.meta(name).ndim for name in (grad, "x1", "x2", "cdist")} != {ndim}:
        return
    rows, columns = ndim - 2, ndim - 1
    for dim in range(ndim - 2):
        if len({ask.meta(name).shape[dim] for name in (grad, "x1", "x2", "cdist")}) == 1:
            yield along(ask, {grad: dim, "x1": dim, "x2": dim, "cdist": dim}, [dim], "filled")
    yield along(ask, {grad: rows, "x1": rows, "cdist": rows}, [rows], "filled")
    yield along(ask, {grad: columns, "x2": rows, "cdist": columns}, [Partial("sum")], "filled")
    yield along(ask, {"x1": columns, "x2": columns}, [columns], "filled")
    yield from parts_of(ask, [grad])


RULES: tuple[Entry, ...] = with_variants((
    *rules("distances", "a distance is of two rows", ["aten._cdist_forward.default"], between),
    *rules("distances", "a row's gradient is a sum over pairs", ["aten._cdist_backward.default"], between_backward),
))  # fmt: skip
