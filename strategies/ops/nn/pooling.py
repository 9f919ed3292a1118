"""Pooling: planes by themselves, whether or not there is a batch; positions are those in the plane.

Three backward ops (adaptive_max_pool3d, fractional_max_pool2d and 3d) have no rule: torch writes where their indices say
without a look (2.13), so that no trial of them is safe.  A channel of a call without batch is dim 0.  Which planes a rank has may be none of a batch, never none of the channels.
"""

from __future__ import annotations

from collections.abc import Iterator

from strategies.ops.lib.overload_variants import with_variants
from strategies.ops.lib.shared_dims import along, parts_of
from strategies.ops.semantics.rulebook import Ask, Cut, Entry, Line, rules

REASON = "each plane is pooled by itself"


def plane_dims(ask: Ask) -> int:
    """How many dims a plane has: the digit in the op's name."""
    return next(int(mark) for mark in ask.op if mark in "123")


def planes(ask: Ask, *names: str) -> Iterator[Line]:
    """Every dim before the plane's, of all the named arguments and of every result: batch, then channels."""
    before = ask.meta(names[0]).ndim - plane_dims(ask)
    for dim in range(before):
        cut: Cut = "filled" if dim == before - 1 else "any"
        yield along(ask, dict.fromkeys(names, dim), [dim] * len(ask.outputs), cut)


def forward(ask: Ask) -> Iterator[Line]:
    yield from planes(ask, "self")


def average(ask: Ask) -> Iterator[Line]:
    yield from planes(ask, "self")
    yield from parts_of(ask, ["self"])


def backward(ask: Ask) -> Iterator[Line]:
    """A gradient goes to the places that its plane's forward took it from: linear in the gradient."""
    yield from planes(ask, "grad_output", "self", "indices")
    yield from parts_of(ask, ["grad_output"])


def unpooled(ask: Ask) -> Iterator[Line]:
    yield from planes(ask, "self", "indices")


def fractional(ask: Ask) -> Iterator[Line]:
    """The samples are `(N, C, dims)` with or without a batch: the channels are dim 1 there always."""
    last = ask.meta("self").ndim - plane_dims(ask) - 1
    if last == 1:
        yield along(ask, {"self": 0, "random_samples": 0}, [0, 0])
    yield along(ask, {"self": last, "random_samples": 1}, [last, last], "filled")


RULES: tuple[Entry, ...] = with_variants((
    *rules("pooling", REASON, [
        "aten.max_pool1d_with_indices.default", "aten.max_pool2d_with_indices.default",
        "aten.max_pool3d_with_indices.default", "aten.adaptive_max_pool1d.default",
        "aten.adaptive_max_pool2d.default", "aten.adaptive_max_pool3d.default", "aten.max_pool1d.default",
        "aten.max_pool2d.default", "aten.max_pool3d.default",
    ], forward),
    *rules("pooling", f"{REASON}, and a mean is linear", [
        "aten.avg_pool1d.default", "aten.avg_pool2d.default", "aten.avg_pool3d.default",
        "aten.adaptive_avg_pool1d.default", "aten._adaptive_avg_pool2d.default", "aten._adaptive_avg_pool3d.default",
        "aten.adaptive_avg_pool2d.default", "aten.adaptive_avg_pool3d.default",
    ], average),
    *rules("pooling", f"{REASON}, and its gradient is linear", [
        "aten.avg_pool2d_backward.default", "aten.avg_pool3d_backward.default",
        "aten._adaptive_avg_pool2d_backward.default", "aten._adaptive_avg_pool3d_backward.default",
        "aten.max_pool2d_with_indices_backward.default", "aten.max_pool3d_with_indices_backward.default",
        "aten.adaptive_max_pool2d_backward.default",
    ], backward),
    *rules("pooling", REASON, ["aten.max_unpool2d.default", "aten.max_unpool3d.default"], unpooled),
    *rules("pooling", f"{REASON}, with samples of its own", [
        "aten.fractional_max_pool2d.default", "aten.fractional_max_pool3d.default",
    ], fractional),
))  # fmt: skip
