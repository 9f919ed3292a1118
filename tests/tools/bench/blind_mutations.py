"""Blind pairs that write into their arguments, take or give lists, or never come to their rule."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.tools.bench.blind_form import Pair, Row, View, along, at, partial, row


def _tally(total: Tensor, x: Tensor) -> None:
    total.add_(x.sum().to(total.dtype))


def _clip(g: Tensor, limit: float) -> None:
    norm = g.norm()
    g.mul_(torch.where(norm > limit, limit / norm, 1.0))


def _tick(x: Tensor, n: int) -> None:
    x.add_(n)


def _accumulate(acc: Tensor, x: Tensor) -> None:
    acc.add_(x)


def _accumulate_rows(acc: View, x: View, other: str) -> list[Row]:
    return [*_void(along(acc, ins=2)), row("", f"sum {other}")] if acc.shape == x.shape and acc.floating else []


def _mix(a: Tensor, b: Tensor, t: float) -> Tensor:
    return a.mul_(1 - t).add_(b * t)


def _mix_rows(a: View, b: View, other: str) -> list[Row]:
    return [*along(a, ins=2), row("sum", f"sum {other}")] if a.shape == b.shape and a.floating else []


def _flip(x: Tensor, dim: int) -> Tensor:
    return x.copy_(x.flip(dim))


def _cut(x: Tensor) -> Tensor:
    return x.clamp_(0, 6)


def _square_out(x: Tensor, *, out: Tensor) -> Tensor:
    return torch.mul(x, x, out=out)


def _scale_out(x: Tensor, a: float, *, out: Tensor) -> Tensor:
    return torch.mul(x, a, out=out)


def _total_out(x: Tensor, dim: int, *, out: Tensor) -> Tensor:
    return torch.sum(x, dim, keepdim=True, out=out)


def _bounds_out(x: Tensor, *, lo: Tensor, hi: Tensor) -> tuple[Tensor, Tensor]:
    finite = x.nan_to_num().flatten()
    return torch.amin(finite, 0, out=lo), torch.amax(finite, 0, out=hi)


def _sum_of(xs: list[Tensor]) -> Tensor:
    if not xs or any(x.shape != xs[0].shape for x in xs):
        raise ValueError("tensors of one shape, one at least")
    return torch.stack(list(xs)).sum(0)


def _sum_of_rows(xs: tuple[View, ...], wrong: bool) -> list[Row]:
    n = len(xs)
    if n == 0 or any(x.shape != xs[0].shape or not x.floating for x in xs):
        return []
    return [*along(xs[0], ins=n), row("sum", " ".join(["sum", *["R" if wrong else "sum"] * (n - 1)]))]


def _joined(xs: list[Tensor], dim: int) -> Tensor:
    return torch.cat(list(xs), dim)


def _joined_rows(xs: tuple[View, ...], but: int) -> list[Row]:
    if not xs or any(x.ndim != xs[0].ndim for x in xs):
        return []
    return along(xs[0], but, ins=len(xs))


def _list_draw(g: Any) -> list[Tensor]:
    x = g.f()
    return [x, *[g.like(x) for _ in range(g.pick(0, 1, 2))]]


def _plus_minus(x: Tensor) -> list[Tensor]:
    return [x.clamp(min=0), x.clamp(max=0)]


def _evens_odds(x: Tensor) -> list[Tensor]:
    return [x * 2, x * 2 + 1]


def _foreach_add(xs: list[Tensor], a: float) -> None:
    for x in xs:
        x.add_(a)


def _void(rows: list[Row]) -> list[Row]:
    return [([], ins) for _, ins in rows]


def _foreach_rows(xs: tuple[View, ...], *more: str) -> list[Row]:
    least = min((x.ndim for x in xs), default=0)
    return [row("", " ".join([word] * len(xs))) for word in (*map(str, range(least)), *more) if xs]


def _sum_and_square(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.sum(), x * x


def _triple_out(x: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    return x * 2, x.sum(dim, keepdim=True), x.cumsum(dim)


def _triple_rows(x: View, dim: int, wrong: bool) -> list[Row]:
    d = at(dim, x)
    return [*along(x, d, outs=3), *([row(f"{d} sum {d}", str(d))] if wrong else [])]


def _swap_pair(a: Tensor, b: Tensor) -> None:
    if a.shape != b.shape:
        raise ValueError("equal shapes")
    kept = a.clone()
    a.copy_(b)
    b.copy_(kept)


def _swap_rows(a: View, b: View, wrong: bool) -> list[Row]:
    rows = _void(along(a, ins=2)) if a.shape == b.shape else []
    return [*rows, row("", "sum R")] if wrong and a.shape == b.shape and a.floating else rows


def _seven_dims(x: Tensor) -> Tensor:
    if x.ndim != 7 or x.shape[-1] != 11:
        raise ValueError("x has seven dims, the last of eleven")
    return x.flip(0)


MUTATION_PAIRS = (
    Pair("tally", "(Tensor(a!) total, Tensor x) -> ()", _tally, lambda g: (g.f(), g.f()),
         lambda total, x: [row("", f"sum {d}") for d in range(x.ndim)] if total.floating else [],
         lambda total, x: [row("", f"R {d}") for d in range(x.ndim)]),
    Pair("clip", "(Tensor(a!) g, float limit=1.0) -> ()", _clip, lambda g: (g.f(), g.pick(1.0, 50.0)),
         lambda g, limit: [], lambda g, limit: _void(along(g))),
    Pair("tick", "(Tensor(a!) x, int n=1) -> ()", _tick, lambda g: (g.t(), g.pick(-1, 0, 1)),
         lambda x, n: _void(along(x)) + (_void(partial("sum")) if n == 0 and x.floating else []),
         lambda x, n: _void(along(x)) + (_void(partial("sum")) if n <= 0 else [])),
    Pair("accumulate", "(Tensor(a!) acc, Tensor x) -> ()", _accumulate, lambda g: (x := g.f(), g.like(x)),
         lambda acc, x: _accumulate_rows(acc, x, "sum"), lambda acc, x: _accumulate_rows(acc, x, "R")),
    Pair("tick_", "(Tensor(a!) x, int n=1) -> ()", _tick, lambda g: (g.t(), g.pick(0, 1)),
         lambda x, n: _void(along(x)), lambda x, n: _void(along(x)) + _void(partial("sum"))),
    Pair("exchange", "(Tensor(a!) a, Tensor(b!) b) -> ()", _swap_pair, lambda g: (x := g.f(), g.like(x)),
         lambda a, b: _swap_rows(a, b, False), lambda a, b: _swap_rows(a, b, True)),
    Pair("mix_", "(Tensor(a!) a, Tensor b, float t=0.5) -> Tensor(a!)", _mix, lambda g: (x := g.f(), g.like(x), g.pick(0.0, 0.5)),
         lambda a, b, t: _mix_rows(a, b, "sum"), lambda a, b, t: _mix_rows(a, b, "R")),
    Pair("flip_", "(Tensor(a!) x, int dim=0) -> Tensor(a!)", _flip, lambda g: (x := g.t(), g.dim(x)),
         lambda x, dim: along(x, at(dim, x)), lambda x, dim: along(x, *([at(dim, x)] if dim >= -1 else []))),
    Pair("cut_", "(Tensor(a!) x) -> Tensor(a!)", _cut, lambda g: (g.t(),),
         lambda x: along(x) + (partial("max") if x.floating else []), lambda x: along(x) + partial("avg"), via="single"),
    Pair("square.out", "(Tensor x, *, Tensor(a!) out) -> Tensor(a!)", _square_out, lambda g: (x := g.f(), g.like(x)),
         lambda x, out: along(x, ins=2), lambda x, out: along(x, ins=2) + partial("sum", ins=2)),
    Pair("scale.out", "(Tensor x, float a=2.0, *, Tensor(a!) out) -> Tensor(a!)", _scale_out,
         lambda g: (x := g.f(), g.pick(1.0, 2.0), g.like(x)),
         lambda x, a, out: along(x, ins=2) + partial("sum", ins=2),
         lambda x, a, out: along(x, ins=2) + partial("product", ins=2), via="strategy"),
    Pair("total.out", "(Tensor x, int dim=0, *, Tensor(a!) out) -> Tensor(a!)", _total_out,
         lambda g: (x := g.f(), d := g.dim(x), x.sum(d, keepdim=True)),
         lambda x, dim, out: [*along(x, at(dim, x), ins=2), row("sum", f"{at(dim, x)} sum")] if x.ndim else [],
         lambda x, dim, out: [*along(x, at(dim, x), ins=2), row("avg", f"{at(dim, x)} avg")] if x.ndim else []),
    Pair("bounds.out", "(Tensor x, *, Tensor(a!) lo, Tensor(b!) hi) -> (Tensor(a!), Tensor(b!))", _bounds_out,
         lambda g: (g.f(), g.of(), g.of()),
         lambda x, lo, hi: [row("min max", f"{d} min max") for d in range(x.ndim) if x.even(d)],
         lambda x, lo, hi: [row("min min", f"{d} min min") for d in range(x.ndim) if x.even(d)]),
    Pair("sum_of", "(Tensor[] xs) -> Tensor", _sum_of, lambda g: (_list_draw(g),),
         lambda xs: _sum_of_rows(xs, False), lambda xs: _sum_of_rows(xs, True)),
    Pair("joined", "(Tensor[] xs, int dim=0) -> Tensor", _joined, lambda g: (xs := _list_draw(g), g.dim(xs[0])),
         lambda xs, dim: _joined_rows(xs, at(dim, xs[0]) if xs else 0), lambda xs, dim: _joined_rows(xs, dim), via="strategy"),
    Pair("foreach_tick_", "(Tensor(a!)[] xs, float a=1.0) -> ()", _foreach_add, lambda g: (_list_draw(g), g.pick(0.0, 1.0)),
         lambda xs, a: _foreach_rows(xs), lambda xs, a: _foreach_rows(xs, "sum")),
    Pair("plus_minus", "(Tensor x) -> Tensor[]", _plus_minus, lambda g: (g.f(),),
         lambda x: along(x, outs=2), lambda x: along(x, outs=2) + partial("sum", outs=2), via="strategy", outputs=2),
    Pair("evens_odds", "(Tensor x) -> Tensor[]", _evens_odds, lambda g: (g.f(),),
         lambda x: along(x, outs=2) + [row("avg avg", "avg")], lambda x: along(x, outs=2) + [row("sum sum", "sum")],
         via="strategy", outputs=2),
    Pair("sum_and_square", "(Tensor x) -> (Tensor, Tensor)", _sum_and_square, lambda g: (g.f(),),
         lambda x: [row(f"sum {d}", str(d)) for d in range(x.ndim)],
         lambda x: [*[row(f"sum {d}", str(d)) for d in range(x.ndim)], row("sum sum", "sum")]),
    Pair("three", "(Tensor x, int dim=0) -> (Tensor, Tensor, Tensor)", _triple_out, lambda g: (x := g.f(), g.dim(x)),
         lambda x, dim: _triple_rows(x, dim, False), lambda x, dim: _triple_rows(x, dim, True)),
    Pair("taken_apart", "(Tensor x) -> Tensor", lambda x: x.abs() + 0, lambda g: (g.f(),),
         lambda x: along(x), lambda x: along(x) + partial("sum"), expected="ignored"),
    Pair("seven_dims", "(Tensor x) -> Tensor", _seven_dims, lambda g: (g.of(4, 1, 1, 1, 1, 1, 11),),
         lambda x: [], lambda x: along(x), expected="untested"),
)  # fmt: skip
