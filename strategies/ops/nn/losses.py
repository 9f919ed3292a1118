"""Rules of losses: elementwise, then unreduced, summed, or averaged; and losses of rows of scores against classes.

The sum of a shard is a partial sum, and the average of an even shard a partial average.  In the backward of an average
a rank divides by its own number of elements, so the gradient is too large by the number of ranks, which no placement
expresses.  All are linear in the incoming gradient.

Rows or pixels of scores may be sharded, classes may not.  The average of `nll_loss` is weighted and omits
`ignore_index`, so equally many rows may have different total weights, which depend on the targets.  In the backward the
total weight is given, and rows are independent.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from localtensor.layout import PARTIAL_KINDS
from strategies.ops.lib.elementwise import AVG, SUM, linear_in, linear_partials, sharded_operands
from strategies.ops.lib.overload_variants import with_variants
from strategies.ops.semantics.rule_registry import Cut, Meta, OpRule, PlacementRule, RuleFunction, RuleQuery, rules

NONE, MEAN, SUMMED = 0, 1, 2
"""The values of `reduction` in torch's schemas."""
CLASS = 1
"""The dim of classes in scores of more than one row, which the target does not have."""


def placement_of_reduction(reduction: int, dim: int) -> tuple[Placement, Cut]:
    """The placement of a loss whose elements are sharded along a dim, and the required cut.

    >>> placement_of_reduction(NONE, 1), placement_of_reduction(SUMMED, 1), placement_of_reduction(MEAN, 1)
    ((Shard(dim=1), 'any'), (Partial(sum), 'any'), (Partial(avg), 'even'))
    """
    if reduction == NONE:
        return Shard(dim), "any"
    return (Partial("sum"), "any") if reduction == SUMMED else (Partial("avg"), "even")


def nll(query: RuleQuery) -> Iterator[PlacementRule]:
    """The results are the loss and the total weight, which is 0 without a reduction."""
    for dim, of_target in _rows(query):
        held = {query.given("self"): Shard(dim), query.given("target"): Shard(of_target)}
        if query["reduction"] == NONE:
            yield query.line(held, [Shard(of_target), Replicate()])
        elif query["reduction"] != MEAN:
            yield query.line(held, [SUM, SUM])
    yield from linear_in(query, query.leaf("self"), [True, False])


def nll_backward(query: RuleQuery) -> Iterator[PlacementRule]:
    """An average is divided by the total weight, which is replicated; otherwise it is unused, and may be partial."""
    for dim, of_target in _rows(query):
        held: dict[int, Placement] = {query.given("self"): Shard(dim), query.given("target"): Shard(of_target)}
        if query["reduction"] == NONE:
            held[query.given("grad_output")] = Shard(of_target)
        yield query.line(held, [Shard(dim)])
        if query["reduction"] != MEAN:
            yield query.line({**held, query.given("total_weight"): SUM}, [Shard(dim)])
    if query["reduction"] != MEAN:
        yield from (query.line({query.given("total_weight"): Partial(kind)}, [Replicate()]) for kind in PARTIAL_KINDS)
    yield from linear_in(query, query.leaf("grad_output"))


def margin_loss(query: RuleQuery) -> Iterator[PlacementRule]:
    """multi_margin and multilabel_margin: rows have equal weights.

    torch 2.13 returns uninitialised memory for the sum of no rows.
    """
    if query.meta("self").ndim > 1:
        place, cut = placement_of_reduction(query["reduction"], 0)
        cut = "filled" if query["reduction"] == SUMMED else cut
        yield query.line(_by_row(query), [place, *[Shard(0)] * (len(query.outputs) - 1)], cut)


def margin_loss_backward(query: RuleQuery) -> Iterator[PlacementRule]:
    """The gradient of an average would be divided by the number of rows of the rank."""
    if query.meta("self").ndim > 1 and query["reduction"] != MEAN:
        yield query.line(_by_row(query), [Shard(0)])
    yield from linear_in(query, query.leaf("grad_output"))


def _by_row(query: RuleQuery) -> dict[int, Placement]:
    """Every tensor with rows, sharded by them: not the weights of classes, nor the gradient of a sum."""
    leaves = [leaf for name in ("self", "target", "is_target") for leaf in query.leaves(name)]
    leaves += query.leaves("grad_output") if query["reduction"] == NONE else ()
    return {leaf: Shard(0) for leaf in leaves if query.tensors[leaf].ndim}


def _rows(query: RuleQuery) -> Iterator[tuple[int, int]]:
    """The dims of the scores other than the classes, each with the target's."""
    ndim = query.meta("self").ndim
    if ndim > 1:
        yield from ((dim, dim if dim < CLASS else dim - 1) for dim in range(ndim) if dim != CLASS)


_WHY = "each row has its own loss"


def forward(query: RuleQuery) -> Iterator[PlacementRule]:
    """The loss of tensors broadcast against each other."""
    whole = _together(query)
    for dim in range(whole.ndim):
        place, cut = placement_of_reduction(query["reduction"], dim)
        yield query.line(sharded_operands(query, whole, dim), [place], cut)


def backward(query: RuleQuery) -> Iterator[PlacementRule]:
    """The gradient of the first tensor, if that is not broadcast."""
    whole = _together(query)
    if query["reduction"] != MEAN and query.outputs == (whole,):
        yield from (query.line(sharded_operands(query, whole, dim), [Shard(dim)]) for dim in range(whole.ndim))
    yield from linear_in(query, query.leaf("grad_output"))


def with_weights(rule: RuleFunction, *, target: bool = False) -> RuleFunction:
    """The rule extended for a loss, or a gradient, that is linear in its weights.

    With `target`, it is affine in the target: then P(avg) targets give P(avg) results.
    """

    def lines(query: RuleQuery) -> Iterator[PlacementRule]:
        yield from rule(query)
        yield from linear_in(query, query.leaf("weight"))
        leaf = query.leaf("target")
        if target and leaf is not None and AVG in linear_partials(query.tensors[leaf].dtype, _together(query).dtype):
            yield query.line({leaf: AVG}, [AVG])

    return lines


def mse_backward(query: RuleQuery) -> Iterator[PlacementRule]:
    """The gradient of a square is linear in the difference, so in both tensors at once."""
    yield from backward(query)
    both, dtype = [query.leaves("self")[0], query.leaves("target")[0]], _together(query).dtype
    kinds = [linear_partials(query.tensors[leaf].dtype, dtype) for leaf in both]
    if all(SUM in able for able in kinds):
        yield query.line(dict.fromkeys(both, SUM), [SUM])
    for chosen in (both, both[:1], both[1:]):
        if all(AVG in able for leaf, able in zip(both, kinds, strict=True) if leaf in chosen):
            yield query.line(dict.fromkeys(chosen, AVG), [AVG])


def _together(query: RuleQuery) -> Meta:
    """The broadcast shape of all tensors, with the dtype of the result."""
    (meta,) = query.outputs
    assert meta is not None, f"{query.op} returns a tensor"
    return Meta(tuple(torch.broadcast_shapes(*(x.shape for x in query.tensors))), meta.dtype)


_NAMES = ("smooth_l1_loss", "huber_loss", "soft_margin_loss")

BROKEN = ("aten.binary_cross_entropy.out",)
"""torch 2.13 sums the previous values of an `out=` that has the shape of the sum."""

RULES: tuple[OpRule, ...] = with_variants(
    rules("losses", "each element has its own loss; sums of sums, averages of as many",
          [f"aten.{name}.default" for name in ("mse_loss", *_NAMES)], forward),
    rules("losses", "each element has its own loss, linear in its weight; the target must be between 0 and 1, which parts need not",
          ["aten.binary_cross_entropy.default"], with_weights(forward)),
    rules("losses", "each element has its own loss, linear in its weight and straight in its target",
          ["aten.binary_cross_entropy_with_logits.default"], with_weights(forward, target=True)),
    rules("losses", "each element has its own gradient; of an average it depends on how many there are",
          [f"aten.{name}_backward.default" for name in _NAMES], backward),
    rules("losses", "each element has its own gradient, linear in the difference",
          ["aten.mse_loss_backward.default"], mse_backward),
    rules("losses", "each element has its own gradient, linear in its weight and straight in its target",
          ["aten.binary_cross_entropy_backward.default"], with_weights(backward, target=True)),
    rules("losses", _WHY, ["aten.nll_loss_forward.default", "aten.nll_loss2d_forward.default"], nll),
    rules("losses", _WHY, ["aten.nll_loss_backward.default", "aten.nll_loss2d_backward.default"], nll_backward),
    rules("losses", _WHY,
          ["aten.multi_margin_loss.default", "aten.multilabel_margin_loss_forward.default"], margin_loss),
    rules("losses", _WHY, ["aten.multi_margin_loss_backward.default", "aten.multilabel_margin_loss_backward.default"],
          margin_loss_backward),
    but=BROKEN,
)  # fmt: skip
