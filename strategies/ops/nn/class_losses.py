"""Losses of rows of scores against classes: a row, or a pixel, may be cut off from the others, and no class.

Of `nll_loss` the average is weighted, and what `ignore_index` leaves out does not count: ranks with as many rows need
not have the same total weight, and no rule sees the targets.  Backward the total weight is given, and rows go by
themselves.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from localtensor.layout.spec import KINDS
from strategies.ops.lib.linear_parts import SUM, linear
from strategies.ops.nn.loss_reductions import MEAN, NONE, SUMMED, reduced
from strategies.ops.semantics.rulebook import Ask, Entry, Line, rules

CLASS = 1
"""The dim of the scores that the target does not have, where there is more than one row."""


def nll(ask: Ask) -> Iterator[Line]:
    """Results are the loss and the total weight, which is 0 if nothing is reduced."""
    for dim, of_target in _rows(ask):
        held = {ask.given("self"): Shard(dim), ask.given("target"): Shard(of_target)}
        if ask["reduction"] == NONE:
            yield ask.line(held, [Shard(of_target), Replicate()])
        elif ask["reduction"] != MEAN:
            yield ask.line(held, [SUM, SUM])
    yield from linear(ask, ask.leaf("self"), [True, False])


def nll_backward(ask: Ask) -> Iterator[Line]:
    """An average is divided by the total weight, of which each rank has the whole.  Else nobody looks at it: it may be
    what the forward left of it.
    """
    for dim, of_target in _rows(ask):
        held: dict[int, Placement] = {ask.given("self"): Shard(dim), ask.given("target"): Shard(of_target)}
        if ask["reduction"] == NONE:
            held[ask.given("grad_output")] = Shard(of_target)
        yield ask.line(held, [Shard(dim)])
        if ask["reduction"] != MEAN:
            yield ask.line({**held, ask.given("total_weight"): SUM}, [Shard(dim)])
    if ask["reduction"] != MEAN:
        yield from (ask.line({ask.given("total_weight"): Partial(kind)}, [Replicate()]) for kind in KINDS)
    yield from linear(ask, ask.leaf("grad_output"))


def margins(ask: Ask) -> Iterator[Line]:
    """multi_margin and multilabel_margin: every row counts as much as any other.

    Of no rows torch 2.13 makes a sum of whatever was in memory.
    """
    if ask.meta("self").ndim > 1:
        place, cut = reduced(ask["reduction"], 0)
        cut = "filled" if ask["reduction"] == SUMMED else cut
        yield ask.line(_by_row(ask), [place, *[Shard(0)] * (len(ask.outputs) - 1)], cut)


def margins_backward(ask: Ask) -> Iterator[Line]:
    """Of an average a rank would divide by the rows that it has itself."""
    if ask.meta("self").ndim > 1 and ask["reduction"] != MEAN:
        yield ask.line(_by_row(ask), [Shard(0)])
    yield from linear(ask, ask.leaf("grad_output"))


def _by_row(ask: Ask) -> dict[int, Placement]:
    """Everything with rows, cut by them: not the weight of each class, nor the gradient of a sum."""
    leaves = [leaf for name in ("self", "target", "is_target") for leaf in ask.leaves(name)]
    leaves += ask.leaves("grad_output") if ask["reduction"] == NONE else ()
    return {leaf: Shard(0) for leaf in leaves if ask.tensors[leaf].ndim}


def _rows(ask: Ask) -> Iterator[tuple[int, int]]:
    """The dims of the scores that are no classes, each with that of the target."""
    ndim = ask.meta("self").ndim
    if ndim > 1:
        yield from ((dim, dim if dim < CLASS else dim - 1) for dim in range(ndim) if dim != CLASS)


_WHY = "each row has its own loss"

CLASSES: tuple[Entry, ...] = (
    *rules("losses", _WHY, ["aten.nll_loss_forward.default", "aten.nll_loss2d_forward.default"], nll),
    *rules("losses", _WHY, ["aten.nll_loss_backward.default", "aten.nll_loss2d_backward.default"], nll_backward),
    *rules("losses", _WHY, ["aten.multi_margin_loss.default", "aten.multilabel_margin_loss_forward.default"], margins),
    *rules("losses", _WHY, ["aten.multi_margin_loss_backward.default", "aten.multilabel_margin_loss_backward.default"],
           margins_backward),
)  # fmt: skip
"""Losses against classes; `strategies.ops.nn.losses` has them among its rules."""
