"""Losses of numbers against numbers: element by element, then not reduced, summed, or averaged.

A sum of pieces' sums is the sum, and an average of averages of as many elements the average.  Backward of an average a
rank divides by what it has itself, and there is no placement for a gradient that is too large by the number of ranks:
that has no line by pieces.  All are linear in the gradient that comes in.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from localtensor.layout import KINDS
from strategies.ops.lib.elementwise import AVG, SUM, linear, through
from strategies.ops.lib.overload_variants import with_variants
from strategies.ops.linalg.matmul import aligned
from strategies.ops.semantics.rulebook import Ask, Cut, Entry, Line, Meta, RuleFunction, rules

# What a loss does with the losses of its elements, and what that makes of pieces.

NONE, MEAN, SUMMED = 0, 1, 2
"""How torch writes `reduction` in its schemas."""


def reduced(reduction: int, dim: int) -> tuple[Placement, Cut]:
    """Where the loss lies if its elements are cut along a dim, and the cut that it takes.

    >>> reduced(NONE, 1), reduced(SUMMED, 1), reduced(MEAN, 1)
    ((Shard(dim=1), 'any'), (Partial(sum), 'any'), (Partial(avg), 'even'))
    """
    if reduction == NONE:
        return Shard(dim), "any"
    return (Partial("sum"), "any") if reduction == SUMMED else (Partial("avg"), "even")


# Losses of rows of scores against classes: a row, or a pixel, may be cut off from the others, and no class.
#
# Of `nll_loss` the average is weighted, and what `ignore_index` leaves out does not count: ranks with as many rows need
# not have the same total weight, and no rule sees the targets.  Backward the total weight is given, and rows go by
# themselves.

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


def forward(ask: Ask) -> Iterator[Line]:
    """The loss of tensors that are broadcast against each other."""
    whole = _together(ask)
    for dim in range(whole.ndim):
        place, cut = reduced(ask["reduction"], dim)
        yield ask.line(_cut(ask, whole, dim), [place], cut)


def backward(ask: Ask) -> Iterator[Line]:
    """The gradient of the first tensor, before it is summed to that one's own shape."""
    whole = _together(ask)
    if ask["reduction"] != MEAN and ask.outputs == (whole,):
        yield from (ask.line(_cut(ask, whole, dim), [Shard(dim)]) for dim in range(whole.ndim))
    yield from linear(ask, ask.leaf("grad_output"))


def weighted(rule: RuleFunction, *, target: bool = False) -> RuleFunction:
    """The same lines, and those of a loss, or a gradient, that is linear in its weights, all else replicated.

    `target` says that it is a straight line in the target, not through zero: an average of targets goes through.
    """

    def lines(ask: Ask) -> Iterator[Line]:
        yield from rule(ask)
        yield from linear(ask, ask.leaf("weight"))
        leaf = ask.leaf("target")
        if target and leaf is not None and AVG in through(ask.tensors[leaf].dtype, _together(ask).dtype):
            yield ask.line({leaf: AVG}, [AVG])

    return lines


def squared(ask: Ask) -> Iterator[Line]:
    """The gradient of a square is linear in the difference, so in both tensors at once."""
    yield from backward(ask)
    both, dtype = [ask.leaves("self")[0], ask.leaves("target")[0]], _together(ask).dtype
    kinds = [through(ask.tensors[leaf].dtype, dtype) for leaf in both]
    if all(SUM in able for able in kinds):
        yield ask.line(dict.fromkeys(both, SUM), [SUM])
    for chosen in (both, both[:1], both[1:]):
        if all(AVG in able for leaf, able in zip(both, kinds, strict=True) if leaf in chosen):
            yield ask.line(dict.fromkeys(chosen, AVG), [AVG])


def _together(ask: Ask) -> Meta:
    """The shape that all tensors are broadcast to, with the dtype of the first result."""
    (meta,) = ask.outputs
    assert meta is not None
    return Meta(tuple(torch.broadcast_shapes(*(x.shape for x in ask.tensors))), meta.dtype)


def _cut(ask: Ask, whole: Meta, dim: int) -> dict[int, Placement]:
    spots = {leaf: aligned(meta, whole, dim) for leaf, meta in enumerate(ask.tensors)}
    return {leaf: Shard(spot) for leaf, spot in spots.items() if spot is not None}


_NAMES = ("smooth_l1_loss", "huber_loss", "soft_margin_loss")

BROKEN = ("aten.binary_cross_entropy.out",)
"""In torch 2.13 this one sums what was in `out=` before, if that has the shape of the sum."""

RULES: tuple[Entry, ...] = with_variants(
    rules("losses", "each element has its own loss; sums of sums, averages of as many",
          [f"aten.{name}.default" for name in ("mse_loss", *_NAMES)], forward),
    rules("losses", "each element has its own loss, linear in its weight; the target must be between 0 and 1, which parts need not",
          ["aten.binary_cross_entropy.default"], weighted(forward)),
    rules("losses", "each element has its own loss, linear in its weight and straight in its target",
          ["aten.binary_cross_entropy_with_logits.default"], weighted(forward, target=True)),
    rules("losses", "each element has its own gradient; of an average it hangs on how many there are",
          [f"aten.{name}_backward.default" for name in _NAMES], backward),
    rules("losses", "each element has its own gradient, linear in the difference", ["aten.mse_loss_backward.default"], squared),
    rules("losses", "each element has its own gradient, linear in its weight and straight in its target",
          ["aten.binary_cross_entropy_backward.default"], weighted(backward, target=True)),
    rules("losses", _WHY, ["aten.nll_loss_forward.default", "aten.nll_loss2d_forward.default"], nll),
    rules("losses", _WHY, ["aten.nll_loss_backward.default", "aten.nll_loss2d_backward.default"], nll_backward),
    rules("losses", _WHY, ["aten.multi_margin_loss.default", "aten.multilabel_margin_loss_forward.default"], margins),
    rules("losses", _WHY, ["aten.multi_margin_loss_backward.default", "aten.multilabel_margin_loss_backward.default"],
          margins_backward),
    but=BROKEN,
)  # fmt: skip
