"""Blind pairs that are wrong for some sizes, strides, ranks or numbers of dims, and those about whole-tensor facts."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tests.tools.bench.blind_form import Pair, Row, View, along, at, into, partial, row, shard_starts


def _pool(x: Tensor, k: int) -> Tensor:
    """The mean of each k neighbours along the first dim; what is left over falls away."""
    k = max(k, 1)
    n = x.shape[0] // k
    return x[: n * k].reshape(n, k, *x.shape[1:]).mean(1)


def _pool_rows(x: View, k: int) -> list[Row]:
    fits = x.even(0) and (x.shape[0] // x.ranks) % max(k, 1) == 0
    return along(x, *([] if fits else [0]))


def _swap(x: Tensor) -> Tensor:
    """Each element changes places with its neighbour along the first dim; an odd last one stays."""
    n = x.shape[0] // 2 * 2
    return torch.cat([x[:n].reshape(n // 2, 2, *x.shape[1:]).flip(1).reshape(n, *x.shape[1:]), x[n:]])


def _swap_rows(x: View) -> list[Row]:
    fits = x.ranks and all(start % 2 == 0 for start in shard_starts(x.shape[0], x.ranks)[1:])
    return along(x, *([] if fits else [0]))


def _merge(x: Tensor) -> Tensor:
    if x.ndim < 2:
        raise ValueError("two dims at least")
    return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]).clone()


def _merge_rows(x: View, even_only: bool) -> list[Row]:
    rest = [row(str(d - 1), str(d)) for d in range(2, x.ndim)]
    return rest + ([row("0", "0")] if x.even(0) or not even_only else [])


def _stretch(x: Tensor, times: int) -> Tensor:
    return x.repeat_interleave(max(times, 1), 0)


def _memory(x: Tensor) -> Tensor:
    """The elements in the order in which they lie in memory."""
    return torch.as_strided(x, (x.numel(),), (1,)).clone()


def _dense_stride(x: View) -> bool:
    return x.stride == tuple(math.prod(x.shape[i + 1 :]) for i in range(x.ndim))


def _ramp(x: Tensor) -> Tensor:
    return x + torch.arange(x.shape[-1], device=x.device)


def _pair_differences(a: Tensor, b: Tensor) -> Tensor:
    if a.ndim != 1 or b.ndim != 1:
        raise ValueError("both vectors")
    return a[:, None] - b[None, :]


def _scores(a: Tensor, b: Tensor) -> Tensor:
    return a @ b.transpose(-1, -2)


def _scores_draw(g: Any) -> tuple[Any, ...]:
    n, m, k = g.shape(3)
    return g.of(n, k), g.of(m, k)


def _scores_rows(kind: str) -> list[Row]:
    return [row("0", "0 R"), row("1", "R 0"), row(kind, "1 1"), row("sum", "sum R")]


def _scaled_by(x: Tensor, w: Tensor) -> Tensor:
    return x * w


def _broadcast_draw(g: Any) -> tuple[Any, ...]:
    x = g.f()
    w = g.of(*(g.pick(1, s) for s in x.shape))
    return x, w.reshape(w.shape[g.pick(0, 0, x.ndim - 1) :]) if w.shape[:-1].numel() == 1 else w


def _broadcast_rows(x: View, w: View, wrong: bool) -> list[Row]:
    """Dims are counted from the end; the wrong rule counts them from the front."""
    if w.ndim > x.ndim or any(a != b and 1 not in (a, b) for a, b in zip(x.shape[::-1], w.shape[::-1], strict=False)):
        return []
    rows = []
    for d in range(x.ndim):
        theirs = d if wrong else d - (x.ndim - w.ndim)
        absent = theirs < 0 or theirs >= w.ndim or w.shape[theirs] == 1
        if x.shape[d] > 1:
            rows.append(row(str(d), f"{d} {'R' if absent else theirs}"))
    return rows


def _product_rows(x: View, y: View, wrong: bool) -> list[Row]:
    if x.shape != y.shape:
        return []
    return along(x, ins=2) + ([row("sum", "sum sum")] if wrong else [row("sum", "sum R"), row("sum", "R sum")])


def _choose(c: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.where(c > 0, a, b)


def _choose_rows(c: View, a: View, b: View, other: str) -> list[Row]:
    same = c.shape == a.shape == b.shape and a.dtype == b.dtype and a.floating
    return [*along(c, ins=3), row("sum", f"R sum {other}")] if same else []


def _greater(a: Tensor, b: Tensor) -> Tensor:
    return torch.maximum(a, b)


def _greater_rows(a: View, b: View, kind: str) -> list[Row]:
    return along(a, ins=2) + partial(kind, ins=2) if a.shape == b.shape else []


def _triple(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return (a * b * c).sum()


def _triple_rows(a: View, b: View, c: View, last: str) -> list[Row]:
    same = a.shape == b.shape == c.shape
    return [row("sum", f"{d} {d} {last.format(d)}") for d in range(a.ndim)] if same else []


def _take(x: Tensor, index: Tensor) -> Tensor:
    """Rows by number; a number too large starts again at 0."""
    return x[index.to(torch.int64).remainder(x.shape[0])]


def _take_rows(x: View, index: View, wrong: bool) -> list[Row]:
    if index.dtype != torch.int64:
        return []
    moved = [row(str(d - 1 + index.ndim), f"{d} R") for d in range(1, x.ndim)]
    return moved + [row(str(d), f"R {d}") for d in range(index.ndim)] + ([row("sum", "0 R")] if wrong else [])


def _share(x: Tensor) -> Tensor:
    return x / max(x.numel(), 1)


def _spread(x: Tensor) -> Tensor:
    """Twice the mean over all elements."""
    return 2 * x.mean()


def _many(x: View) -> list[Row]:
    """A short cut for large meshes only."""
    return along(x) if x.ranks > 2 else []


def _columns(x: View) -> list[Row]:
    """Forgets that a vector has no second dim."""
    return along(x, 0) if x.shape[1] > 1 else []


SHAPE_PAIRS = (
    Pair("pool", "(Tensor x, int k=2) -> Tensor", _pool, lambda g: (g.f(), g.pick(1, 2)),
         _pool_rows, lambda x, k: along(x, *([] if x.shape[0] % max(k, 1) == 0 else [0]))),
    Pair("swap", "(Tensor x) -> Tensor", _swap, lambda g: (g.t(),),
         _swap_rows, lambda x: along(x, *([] if x.shape[0] % 2 == 0 else [0]))),
    Pair("merge", "(Tensor x) -> Tensor", _merge, lambda g: (g.t(g.pick(2, 3)),),
         lambda x: _merge_rows(x, True), lambda x: _merge_rows(x, False)),
    Pair("stretch", "(Tensor x, int times=2) -> Tensor", _stretch, lambda g: (g.t(), g.pick(1, 2)),
         lambda x, times: along(x, *([] if x.even(0) or times == 1 else [0])), lambda x, times: along(x), via="strategy"),
    Pair("memory", "(Tensor x) -> Tensor", _memory, lambda g: (g.strided(2),),
         lambda x: along(x, *range(1, x.ndim)) if x.ndim and x.even(0) and _dense_stride(x) else [],
         lambda x: along(x, *range(1, x.ndim)) if x.ndim and x.even(0) else []),
    Pair("ramp", "(Tensor x) -> Tensor", _ramp, lambda g: (g.t(),),
         lambda x: along(x, x.ndim - 1), lambda x: along(x), via="single"),
    Pair("share", "(Tensor x) -> Tensor", _share, lambda g: (g.t(),),
         lambda x: partial("sum") if x.floating else [], lambda x: along(x)),
    Pair("pair_differences", "(Tensor a, Tensor b) -> Tensor", _pair_differences, lambda g: (g.f(1), g.f(1)),
         lambda a, b: [row("0", "0 R"), row("1", "R 0"), row("sum", "sum sum")], lambda a, b: [row("0", "0 R"), row("sum", "sum R")]),
    Pair("scores", "(Tensor a, Tensor b) -> Tensor", _scores, _scores_draw,
         lambda a, b: _scores_rows("sum") if a.ndim == b.ndim == 2 and a.floating else [],
         lambda a, b: _scores_rows("avg") if a.ndim == b.ndim == 2 and a.floating else []),
    Pair("scaled_by", "(Tensor x, Tensor w) -> Tensor", _scaled_by, _broadcast_draw,
         lambda x, w: _broadcast_rows(x, w, False), lambda x, w: _broadcast_rows(x, w, True)),
    Pair("times", "(Tensor x, Tensor y) -> Tensor", _scaled_by, lambda g: (x := g.f(), g.like(x)),
         lambda x, y: _product_rows(x, y, False), lambda x, y: _product_rows(x, y, True)),
    Pair("choose", "(Tensor c, Tensor a, Tensor b) -> Tensor", _choose, lambda g: (x := g.f(), g.like(x), g.like(x)),
         lambda c, a, b: _choose_rows(c, a, b, "sum"), lambda c, a, b: _choose_rows(c, a, b, "R"), via="single"),
    Pair("greater", "(Tensor a, Tensor b) -> Tensor", _greater, lambda g: (x := g.f(), g.like(x)),
         lambda a, b: _greater_rows(a, b, "max"), lambda a, b: _greater_rows(a, b, "min")),
    Pair("triple", "(Tensor a, Tensor b, Tensor c) -> Tensor", _triple, lambda g: (x := g.f(), g.like(x), g.like(x)),
         lambda a, b, c: _triple_rows(a, b, c, "{}"),
         lambda a, b, c: [*_triple_rows(a, b, c, "{}"), row("sum", "sum sum sum")]),
    Pair("take", "(Tensor x, Tensor index) -> Tensor", _take,
         lambda g: (g.f(), g.of(*g.shape(1), dtype=torch.int64)),
         lambda x, index: _take_rows(x, index, False), lambda x, index: _take_rows(x, index, True)),
    Pair("spread", "(Tensor x) -> Tensor", _spread, lambda g: (g.f(),),
         lambda x: [row("avg", str(d)) for d in range(x.ndim) if x.even(d)],
         lambda x: [row("sum" if x.ranks == 2 else "avg", str(d)) for d in range(x.ndim)]),
    Pair("spread_on_two", "(Tensor x) -> Tensor", _spread, lambda g: (g.f(),),
         lambda x: [row("avg", str(d)) for d in range(x.ndim) if x.even(d) and x.ranks == 2],
         lambda x: [row("avg" if x.ranks == 2 else "sum", str(d)) for d in range(x.ndim) if x.even(d)]),
    Pair("backwards_on_many", "(Tensor x) -> Tensor", lambda x: x.flip(0), lambda g: (g.t(),),
         lambda x: along(x, 0), _many),
    Pair("doubled", "(Tensor x) -> Tensor", lambda x: x * 2, lambda g: (g.f(),),
         lambda x: along(x), _columns),
    Pair("padded_total", "(Tensor x, int dim=0) -> Tensor", lambda x, dim: x.sum(dim, keepdim=True), lambda g: (x := g.f(), g.dim(x)),
         lambda x, dim: [*along(x, at(dim, x)), row("sum", str(at(dim, x)))],
         lambda x, dim: [*along(x, at(dim, x)), row("sum" if x.shape[at(dim, x)] % 2 == 0 else "avg", str(at(dim, x)))]),
    Pair("average", "(Tensor x) -> Tensor", lambda x: x.mean(), lambda g: (g.f(),),
         lambda x: [row("avg", str(d)) for d in range(x.ndim) if x.even(d)], lambda x: into(x, "avg")),
)  # fmt: skip
