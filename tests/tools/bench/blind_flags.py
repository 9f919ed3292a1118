"""Blind pairs that are wrong for one flag, one string, one number or one dim."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.tools.bench.blind_form import Pair, Row, View, along, at, into, partial, row


def _total(x: Tensor, dim: int, keepdim: bool) -> Tensor:
    return x.sum(dim, keepdim=keepdim)


def _total_rows(x: View, dim: int, keepdim: bool, shifted: bool) -> list[Row]:
    gone = at(dim, x)
    moved = [row(str(d - (shifted and not keepdim and d > gone)), str(d)) for d in range(x.ndim) if d != gone]
    return [*moved, row("sum", str(gone))] if x.ndim else moved


def _reduce(x: Tensor, reduction: str) -> Tensor:
    if reduction not in ("none", "sum", "mean"):
        raise ValueError(f"reduction must be none, sum or mean, not {reduction!r}")
    return x * 2 if reduction == "none" else x.sum() * 2 if reduction == "sum" else x.mean() * 2


def _reduce_rows(x: View, reduction: str, mean: str) -> list[Row]:
    if reduction == "none":
        return along(x)
    return into(x, "sum" if reduction == "sum" else mean) if reduction == "sum" or mean else []


def _grid(x: Tensor, order: str) -> Tensor:
    if order not in ("row", "col"):
        raise ValueError(f"order is 'row' or 'col', got {order!r}")
    return (x if order == "row" else x.transpose(0, -1)).reshape(-1).cumsum(0).reshape(x.shape)


def _nth_power(x: Tensor, exponent: int) -> Tensor:
    return x**exponent


def _scan(x: Tensor, dim: int, reverse: bool) -> Tensor:
    return x.flip(dim).cumsum(dim).flip(dim) if reverse else x.cumsum(dim)


def _smooth(x: Tensor, window: int) -> Tensor:
    """The mean of so many elements up to each, of the last dim; zeros before the first."""
    if window <= 1:
        return x / 1
    return torch.nn.functional.pad(x, (window - 1, 0)).unfold(-1, window, 1).sum(-1) / window


def _pad_end(x: Tensor, n: int, value: float) -> Tensor:
    return torch.nn.functional.pad(x, (0, abs(n)), value=value)


def _decay(x: Tensor, decay: float) -> Tensor:
    """y[i] = x[i] + decay * y[i - 1] along the first dim."""
    rows = list(x.clone().unbind(0))
    for i in range(1, len(rows)):
        rows[i] = rows[i] + decay * rows[i - 1]
    return torch.stack(rows) if rows else x / 1


def _shifted(x: Tensor, n: int) -> Tensor:
    return x.roll(n, 0)


def _steps(x: Tensor, dim: int, same_size: bool) -> Tensor:
    d = x.diff(dim=dim)
    return torch.cat([d, torch.zeros_like(x.narrow(dim, 0, 1))], dim) if same_size else d


def _length(x: Tensor, p: int) -> Tensor:
    return x.abs().pow(p).sum() if p < 2 else x.abs().pow(p).sum().pow(1 / p)


def _norm_rows(x: View, p: int, most: int) -> list[Row]:
    return into(x, "sum") if p <= most else []


def _ordered(x: Tensor, dim: int, descending: bool) -> tuple[Tensor, Tensor]:
    values, places = x.sort(dim=dim, descending=descending, stable=True)
    return values, places


def _widen(x: Tensor, times: int) -> Tensor:
    return x.repeat(max(times, 1), *[1] * (x.ndim - 1))


def _scan_rows(x: View, dim: int, *but: int) -> list[Row]:
    return along(x, at(dim, x), *but) + partial("sum")


def _kept_positive(x: Tensor, slope: float) -> Tensor:
    return torch.where(x >= 0, x, x * slope)


FLAG_PAIRS = (
    Pair("total", "(Tensor x, int dim=0, bool keepdim=False) -> Tensor", _total,
         lambda g: (x := g.t(), g.dim(x), g.pick(True, False)),
         lambda x, dim, keepdim: _total_rows(x, dim, keepdim, True), lambda x, dim, keepdim: _total_rows(x, dim, keepdim, False)),
    Pair("soft", "(Tensor x, int dim=-1) -> Tensor", lambda x, dim: x.double().softmax(dim),
         lambda g: (x := g.t(), g.dim(x)),
         lambda x, dim: along(x, at(dim, x)), lambda x, dim: along(x, dim)),
    Pair("reduced", "(Tensor x, str reduction='sum') -> Tensor", _reduce,
         lambda g: (g.f(), g.pick("none", "sum", "mean")),
         lambda x, reduction: _reduce_rows(x, reduction, ""), lambda x, reduction: _reduce_rows(x, reduction, "avg")),
    Pair("walk", "(Tensor x, str order='row') -> Tensor", _grid,
         lambda g: (g.f(), g.pick("row", "col")),
         lambda x, order: partial("sum"), lambda x, order: partial("sum") + (along(x, 0) if order == "col" else []), via="single"),
    Pair("affine", "(Tensor x, float scale=1.0, float shift=0.0) -> Tensor", lambda x, scale, shift: x * scale + shift,
         lambda g: (g.t(), g.pick(1.0, 2.0), g.pick(0.0, 1.5)),
         lambda x, scale, shift: along(x) + (partial("sum") if shift == 0 and x.floating else []),
         lambda x, scale, shift: along(x) + partial("sum")),
    Pair("nth", "(Tensor x, int exponent=1) -> Tensor", _nth_power,
         lambda g: (g.f(), g.pick(0, 1, 2)),
         lambda x, e: along(x) + (partial("sum") if e == 1 else []), lambda x, e: along(x) + (partial("sum") if e in (0, 1) else [])),
    Pair("scan", "(Tensor x, int dim=0, bool reverse=False) -> Tensor", _scan,
         lambda g: (x := g.t(), g.dim(x), g.pick(True, False)),
         lambda x, dim, reverse: along(x, at(dim, x)) + (partial("sum") if x.floating else []),
         lambda x, dim, reverse: along(x, at(dim + reverse, x)), via="single"),
    Pair("smooth", "(Tensor x, int window=1) -> Tensor", _smooth,
         lambda g: (g.t(), g.pick(1, 2, 3)),
         lambda x, w: along(x, *([x.ndim - 1] if w > 1 else [])), lambda x, w: along(x, *([x.ndim - 1] if w > 2 else []))),
    Pair("pad_end", "(Tensor x, int n=0, float value=0.0) -> Tensor", _pad_end,
         lambda g: (g.f(), g.pick(0, 1, 2), g.pick(0.0, 1.0)),
         lambda x, n, value: along(x, x.ndim - 1) + (partial("sum") if value == 0 else []),
         lambda x, n, value: along(x, x.ndim - 1) + partial("sum"), via="strategy"),
    Pair("fading", "(Tensor x, float decay=0.0) -> Tensor", _decay,
         lambda g: (g.f(), g.pick(0.0, 0.5, 1.0)),
         lambda x, decay: along(x, *([0] if decay or not x.floating else [])),
         lambda x, decay: along(x, *([0] if decay < 1 else []))),
    Pair("shifted", "(Tensor x, int n=0) -> Tensor", _shifted,
         lambda g: (g.t(), g.pick(0, 1, 2)),
         lambda x, n: along(x, *([0] if n else [])), lambda x, n: along(x, *([0] if n % 2 else []))),
    Pair("steps", "(Tensor x, int dim=0, bool same_size=False) -> Tensor", _steps,
         lambda g: (x := g.t(), g.dim(x), g.pick(True, False)),
         lambda x, dim, same: along(x, at(dim, x)), lambda x, dim, same: along(x, *([] if same else [at(dim, x)]))),
    Pair("length", "(Tensor x, int p=2) -> Tensor", _length,
         lambda g: (g.f(), g.pick(1, 2, 3)),
         lambda x, p: _norm_rows(x, p, 1), lambda x, p: _norm_rows(x, p, 2)),
    Pair("ordered", "(Tensor x, int dim=-1, bool descending=False) -> (Tensor, Tensor)", _ordered,
         lambda g: (x := g.t(), g.dim(x), g.pick(True, False)),
         lambda x, dim, down: along(x, at(dim, x), outs=2), lambda x, dim, down: along(x, *([] if down else [at(dim, x)]), outs=2)),
    Pair("widen", "(Tensor x, int times=1) -> Tensor", _widen,
         lambda g: (g.t(), g.pick(1, 2)),
         lambda x, times: along(x, *([0] if times > 1 else [])) + (partial("sum") if x.floating else []),
         lambda x, times: along(x), via="single"),
    Pair("leaky", "(Tensor x, float slope=1.0) -> Tensor", _kept_positive,
         lambda g: (g.f(), g.pick(1.0, 0.5, 2.0)),
         lambda x, slope: along(x) + (partial("sum") if slope == 1 and x.floating else []),
         lambda x, slope: along(x) + (partial("sum") if slope >= 1 else [])),
    Pair("plus", "(Tensor x, Scalar s=0) -> Tensor", lambda x, s: x + s,
         lambda g: (g.f(), g.pick(0, 1, 2)),
         lambda x, s: along(x) + (partial("avg") if x.floating else []), lambda x, s: along(x) + (partial("sum") if s in (0, 1) else [])),
    Pair("centred", "(Tensor x, int dim=0) -> Tensor", lambda x, dim: x - x.mean(dim, keepdim=True),
         lambda g: (x := g.f(), g.dim(x)),
         lambda x, dim: along(x, at(dim, x)) + partial("sum", "avg"),
         lambda x, dim: along(x, at(dim + (x.ndim == 3), x)) + partial("sum", "avg")),
    Pair("lower", "(Tensor x, int diagonal=0) -> Tensor", lambda x, k: x.tril(k),
         lambda g: (g.f(g.pick(2, 3)), g.pick(-1, 0, 1)),
         lambda x, k: along(x, x.ndim - 2, x.ndim - 1) + partial("sum"),
         lambda x, k: along(x, x.ndim - 2, x.ndim - 1) + ([row("1", "1")] if k > 0 and x.ndim == 2 else [])),
)  # fmt: skip


def _mask_rows(x: View, mask: View | None, wrong: bool) -> list[Row]:
    even = [d for d in range(x.ndim) if x.even(d)]
    if mask is None:
        return [row("avg", str(d)) for d in even]
    return [row("avg", f"{d} {d}") for d in even] if wrong else []


def _masked_mean(x: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return x.mean()
    kept = (mask > 0).to(x.dtype)
    return (x * kept).sum() / kept.sum().clamp(min=1)


def _bias_rows(x: View, bias: View | None, wrong: bool) -> list[Row]:
    if bias is None:
        return along(x) + (partial("sum") if x.floating else [])
    return [row(str(x.ndim - 1), f"{x.ndim - 1} 0"), row("sum", "sum R") if wrong else row("sum", "sum sum")]


def _biased(x: Tensor, bias: Tensor | None) -> Tensor:
    if bias is None:
        return x.clone()
    if bias.shape != x.shape[-1:]:
        raise ValueError(f"bias is one number for each column: {x.shape[-1:]}, got {bias.shape}")
    return x + bias


def _optional(g: Any, value: Tensor) -> Tensor | None:
    return value if g.pick(True, False) else None


def _dense(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    return torch.mm(x, w) if b is None else torch.addmm(b, x, w)


def _dense_rows(x: View, w: View, b: View | None, wrong: bool) -> list[Row]:
    if b is None:
        return [row("0", "0 R"), row("1", "R 1"), row("sum", "1 0")]
    if b.shape[-1] != w.shape[1] or (b.ndim == 2 and b.shape[0] != x.shape[0]):  # broadcast
        return [row("sum", "1 0 R")] if wrong else []
    rows = [row("0", "0 R R" if b.ndim == 1 else "0 R 0"), row("1", f"R 1 {b.ndim - 1}")]
    return [*rows, *([row("sum", "1 0 R")] if wrong else [])]


def _dense_draw(g: Any) -> tuple[Any, ...]:
    n, k, m = g.shape(3)
    return g.of(n, k), g.of(k, m), _optional(g, g.of(m))


OPTIONAL_PAIRS = (
    Pair("masked_mean", "(Tensor x, Tensor? mask=None) -> Tensor", _masked_mean,
         lambda g: (x := g.f(), _optional(g, g.like(x))),
         lambda x, m: _mask_rows(x, m, False), lambda x, m: _mask_rows(x, m, True)),
    Pair("biased", "(Tensor x, Tensor? bias=None) -> Tensor", _biased,
         lambda g: (x := g.f(), _optional(g, g.of(x.shape[-1]))),
         lambda x, b: _bias_rows(x, b, False), lambda x, b: _bias_rows(x, b, True)),
    Pair("dense", "(Tensor x, Tensor w, Tensor? b=None) -> Tensor", _dense, _dense_draw,
         lambda x, w, b: _dense_rows(x, w, b, False), lambda x, w, b: _dense_rows(x, w, b, True), via="strategy"),
)  # fmt: skip
