"""Blind pairs that are wrong for some values only: ties, NaN, negative numbers, a dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.tools.bench.blind_form import Pair, Row, View, along, at, into, partial, row


def _unique_sum(x: Tensor) -> Tensor:
    """The sum of the different values."""
    ordered = x.flatten().sort().values
    first = torch.ones_like(ordered, dtype=torch.bool)
    first[1:] = ordered[1:] != ordered[:-1]
    return (ordered * first).sum()


def _ties_at_max(x: Tensor) -> Tensor:
    """The greatest absolute value, as often as it is there."""
    a = x.nan_to_num().abs()
    return torch.where(a == a.amax(), a, torch.zeros_like(a)).sum()


def _fill_mean(x: Tensor) -> Tensor:
    """NaN replaced by the mean of the rest."""
    seen = ~x.isnan()
    mean = x.nan_to_num(0.0, float("inf"), -float("inf")).mul(seen).sum() / seen.sum()
    return torch.where(seen, x, mean)


def _top(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    values, places = x.max(dim)
    return values, places


def _extremes(x: Tensor) -> tuple[Tensor, Tensor]:
    finite = x.nan_to_num()
    return finite.amin(), finite.amax()


def _signs(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.clamp(min=0), (-x).clamp(min=0)


def _half(x: Tensor) -> Tensor:
    return x / 2 if x.is_floating_point() or x.is_complex() else x.div(2, rounding_mode="trunc")


def _floored(x: Tensor, n: int) -> Tensor:
    return x.div(n, rounding_mode="floor")


def _limit(x: Tensor) -> Tensor:
    return x.clamp(-100.0, 100.0)


def _cosine(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum() / (a.norm() * b.norm())


def _moments(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    return x.mean(dim, keepdim=True), x.var(dim, keepdim=True, correction=0)


def _moments_rows(x: View, dim: int) -> list[Row]:
    d = at(dim, x)
    return [*along(x, d, outs=2)] + ([row("avg avg", str(d))] if x.even(d) else [])


def _moments_right(x: View, dim: int) -> list[Row]:
    return [*along(x, at(dim, x), outs=2)]


def _counts(x: Tensor, bins: int) -> Tensor:
    """How many of x lie in each of so many equal parts of [-4, 4]."""
    edges = torch.linspace(-4, 4, max(bins, 1) + 1, dtype=torch.float64, device=x.device)
    inside = (x.double().flatten()[:, None] >= edges[:-1]) & (x.double().flatten()[:, None] < edges[1:])
    return inside.sum(0)


def _first_of_ties(a: Tensor, b: Tensor) -> Tensor:
    """Where a is greater 2, where they tie 1."""
    return torch.where(a > b, 2.0, torch.where(a == b, 1.0, 0.0))


def _dominant(x: Tensor, dim: int) -> Tensor:
    """A mask of the one greatest element of each row: of equal ones the first."""
    one = torch.zeros_like(x, dtype=torch.float64)
    return one.scatter_(dim, x.argmax(dim, keepdim=True), 1.0)


def _middle(x: Tensor) -> Tensor:
    ordered = x.flatten().sort().values
    return ordered[(ordered.numel() - 1) // 2].clone()


VALUE_PAIRS = (
    Pair("unique_sum", "(Tensor x) -> Tensor", _unique_sum, lambda g: (g.f(),), lambda x: [], lambda x: into(x, "sum")),
    Pair("ties_at_max", "(Tensor x) -> Tensor", _ties_at_max, lambda g: (g.f(),), lambda x: [], lambda x: into(x, "max")),
    Pair("zero_nan", "(Tensor x) -> Tensor", lambda x: torch.where(x.isnan(), torch.zeros_like(x), x),
         lambda g: (g.nans(),), lambda x: along(x), lambda x: along(x) + partial("sum")),
    Pair("fill_mean", "(Tensor x) -> Tensor", _fill_mean, lambda g: (g.nans(),), lambda x: [], lambda x: along(x), via="single"),
    Pair("has_nan", "(Tensor x) -> Tensor", lambda x: x.isnan().any().double(), lambda g: (g.nans(),),
         lambda x: into(x, "max"), lambda x: into(x, "sum")),
    Pair("greatest_size", "(Tensor x) -> Tensor", lambda x: x.nan_to_num().abs(), lambda g: (g.f(),),
         lambda x: along(x), lambda x: along(x) + partial("max")),
    Pair("low_cut", "(Tensor x, float low=0.0) -> Tensor", lambda x, low: x.clamp(min=low), lambda g: (g.f(), g.pick(0.0, 1.0)),
         lambda x, low: along(x) + partial("max", "min"), lambda x, low: along(x) + partial("avg")),
    Pair("whereabouts", "(Tensor x, int dim=0) -> Tensor", lambda x, dim: x.argmax(dim, keepdim=True), lambda g: (x := g.t(), g.dim(x)),
         lambda x, dim: along(x, at(dim, x)), lambda x, dim: along(x, at(dim, x)) + [row("max", str(at(dim, x)))]),
    Pair("nonzeros", "(Tensor x) -> Tensor", lambda x: (x != 0).sum(), lambda g: (g.t(),),
         lambda x: into(x, "sum"), lambda x: into(x, "sum") + partial("sum")),
    Pair("top", "(Tensor x, int dim=-1) -> (Tensor values, Tensor places)", _top, lambda g: (x := g.f(), g.dim(x)),
         lambda x, dim: [row(" ".join([str(d - (d > at(dim, x)))] * 2), str(d)) for d in range(x.ndim) if d != at(dim, x)],
         lambda x, dim: [row("max max", str(at(dim, x)))]),
    Pair("extremes", "(Tensor x) -> (Tensor, Tensor)", _extremes, lambda g: (g.t(),),
         lambda x: [row("min max", str(d)) for d in range(x.ndim) if x.even(d)],
         lambda x: [row("min min", str(d)) for d in range(x.ndim) if x.even(d)]),
    Pair("signs", "(Tensor x) -> (Tensor, Tensor)", _signs, lambda g: (g.t(),),
         lambda x: along(x, outs=2), lambda x: along(x, outs=2) + partial("sum", outs=2)),
    Pair("half", "(Tensor x) -> Tensor", _half, lambda g: (g.t(),),
         lambda x: along(x) + (partial("sum") if x.floating else []), lambda x: along(x) + partial("sum")),
    Pair("floored", "(Tensor x, int n=1) -> Tensor", _floored, lambda g: (g.t(), g.pick(1, 2)),
         lambda x, n: along(x) + (partial("sum") if n == 1 and x.dtype == torch.int64 else []),
         lambda x, n: along(x) + (partial("sum") if n == 1 else [])),
    Pair("limited", "(Tensor x) -> Tensor", _limit, lambda g: (g.f() * g.pick(1, 80),),
         lambda x: along(x) + partial("max"), lambda x: along(x) + partial("sum")),
    Pair("half_only", "(Tensor x) -> Tensor", lambda x: x.clamp(min=0), lambda g: (g.f().to(g.pick(torch.float64, torch.float16)),),
         lambda x: along(x), lambda x: along(x) + (partial("sum") if x.dtype == torch.float16 else [])),
    Pair("integer_only", "(Tensor x) -> Tensor", lambda x: x * x, lambda g: (g.t(),),
         lambda x: along(x), lambda x: along(x) + (partial("sum") if x.dtype == torch.int64 else []), via="single"),
    Pair("cosine", "(Tensor a, Tensor b) -> Tensor", _cosine, lambda g: (x := g.f(), g.like(x)),
         lambda a, b: [], lambda a, b: into(a, "sum", ins=2) if a.shape == b.shape else []),
    Pair("moments", "(Tensor x, int dim=0) -> (Tensor, Tensor)", _moments, lambda g: (x := g.f(), g.dim(x)),
         _moments_right, _moments_rows),
    Pair("counts", "(Tensor x, int bins=4) -> Tensor", _counts, lambda g: (g.f(), g.pick(1, 4)),
         lambda x, bins: into(x, "sum"), lambda x, bins: [row("avg", str(d)) for d in range(x.ndim)]),
    Pair("contest", "(Tensor a, Tensor b) -> Tensor", _first_of_ties, lambda g: (x := g.f(), g.like(x)),
         lambda a, b: along(a, ins=2) if a.shape == b.shape else [],
         lambda a, b: [*along(a, ins=2), row("max", "R max")] if a.shape == b.shape else []),
    Pair("dominant", "(Tensor x, int dim=0) -> Tensor", _dominant, lambda g: (x := g.f(), g.dim(x)),
         lambda x, dim: along(x, at(dim, x)), lambda x, dim: along(x, at(dim, x)) + partial("max")),
    Pair("middle", "(Tensor x) -> Tensor", _middle, lambda g: (g.t(),), lambda x: [], lambda x: [row("avg", str(d)) for d in range(x.ndim)]),
    Pair("log_total", "(Tensor x, int dim=0) -> Tensor", lambda x, dim: x.double().logsumexp(dim, keepdim=True),
         lambda g: (x := g.t(), g.dim(x)), lambda x, dim: along(x, at(dim, x)),
         lambda x, dim: along(x, at(dim, x)) + [row("max", str(at(dim, x)))]),
    Pair("product", "(Tensor x) -> Tensor", lambda x: x.prod(), lambda g: (g.t(),),
         lambda x: into(x, "product"), lambda x: into(x, "sum")),
    Pair("is_positive", "(Tensor x) -> Tensor", lambda x: (x > 0).any().double(), lambda g: (g.t(),),
         lambda x: into(x, "max"), lambda x: into(x, "sum"), via="strategy"),
)  # fmt: skip
