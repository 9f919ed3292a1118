"""Losses of numbers against numbers: element by element, then not reduced, summed, or averaged.

A sum of pieces' sums is the sum, and an average of averages of as many elements the average.  Backward of an average a
rank divides by what it has itself, and there is no placement for a gradient that is too large by the number of ranks:
that has no line by pieces.  All are linear in the gradient that comes in.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from strategies.ops.lib.linear_parts import AVG, SUM, linear, through
from strategies.ops.lib.overload_variants import with_variants
from strategies.ops.linalg.matmul import aligned
from strategies.ops.nn.class_losses import CLASSES
from strategies.ops.nn.loss_reductions import MEAN, reduced
from strategies.ops.semantics.rulebook import Ask, Entry, Line, Meta, RuleFunction, rules


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

RULES: tuple[Entry, ...] = with_variants((
    *rules("losses", "each element has its own loss; sums of sums, averages of as many",
           [f"aten.{name}.default" for name in ("mse_loss", *_NAMES)], forward),
    *rules("losses", "each element has its own loss, linear in its weight; the target must be between 0 and 1, which parts need not",
           ["aten.binary_cross_entropy.default"], weighted(forward)),
    *rules("losses", "each element has its own loss, linear in its weight and straight in its target",
           ["aten.binary_cross_entropy_with_logits.default"], weighted(forward, target=True)),
    *rules("losses", "each element has its own gradient; of an average it hangs on how many there are",
           [f"aten.{name}_backward.default" for name in _NAMES], backward),
    *rules("losses", "each element has its own gradient, linear in the difference", ["aten.mse_loss_backward.default"], squared),
    *rules("losses", "each element has its own gradient, linear in its weight and straight in its target",
           ["aten.binary_cross_entropy_backward.default"], weighted(backward, target=True)),
    *CLASSES,
), but=BROKEN)  # fmt: skip
