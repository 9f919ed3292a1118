"""The difference between the ranks' results and the op's, as a value for the messages of the validator and `assert_rule`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Shard
from torch.distributed.tensor.placement_types import Placement

from localtensor.layout import (
    assemble_axis,
    fold_partials,
    is_arithmetic,
    is_inexact,
    is_reducible,
    max_abs,
    noise_factor,
    shard_cut,
    short,
    within_slack,
)
from strategies.inputs.variants.adversarial import Values
from strategies.model.oracle import equal_within
from strategies.model.rule import Rule

Shapes = list[tuple[int, ...]]
NARROW = (torch.uint8, torch.int8, torch.int16, torch.int32)
"""Integers of a range that parts of a value may leave."""
ADDED_KINDS = ("sum", "avg")
"""Reductions whose parts are split with rounding; factors are powers of two, and an extreme is one of the parts."""
SPLIT_ULPS = 32.0
"""Units in the last place that splitting and adding up may lose: some for each rank.  `GENEROUS` would be too much: a
thousand units of bfloat16 are eight times the number."""


def tensor_text(x: object, most: int = 24) -> str:
    """A tensor in one line: `[1, 2, ...] of shape (2, 4)`."""
    if not isinstance(x, Tensor):
        return repr(x)
    try:
        values = x.detach().flatten()[:most].tolist()
    except RuntimeError:  # its memory was freed, or it never had any
        return f"no values, of shape {tuple(x.shape)}"
    return f"[{', '.join(map(_number_text, values))}{', ...' if x.numel() > most else ''}] of shape {tuple(x.shape)}"


def _number_text(value: complex) -> str:
    return str(value) if isinstance(value, bool) else f"{value:.6g}"


def excerpt(text: str, other: str, most: int = 80) -> str:
    """The text, or of a long one the part around the first place where it differs from another one.

    >>> excerpt("shared: none", "shared: a"), excerpt("a" * 99 + "bc", "a" * 101, most=9)
    ('shared: none', '...aaabc')
    """
    if len(text) <= most:
        return text
    apart = next((i for i, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), min(len(text), len(other)))
    first = max(0, apart - most // 3)
    return f"{'...' if first else ''}{text[first : first + most]}{'...' if first + most < len(text) else ''}"


@dataclass(frozen=True, slots=True)
class ElementDifference:
    """The first element that differs, as text: its value, the expected value, its place, and how many elements differ."""

    got: str
    want: str
    place: list[int]
    share: str

    @classmethod
    def of(cls, got: Tensor, want: Tensor, slack: Tensor) -> ElementDifference:
        """For two tensors that differ by more than the slack."""
        wrong = ~within_slack(got, want, slack)
        place = tuple(wrong.nonzero()[0].tolist())
        share = f"{int(wrong.sum())} of {wrong.numel()} elements differ"
        return cls(_number_text(got[place].item()), _number_text(want[place].item()), list(place), share)


@dataclass(frozen=True, slots=True)
class ResultDifference:
    """What is wrong with result `output` on `rank`, or of all ranks together if that is None; `problem` is the message."""

    problem: str
    output: int = -1
    rank: int | None = None
    got: Any = ""
    want: Any = ""
    apart: ElementDifference | None = None
    bare: bool = False
    """Whether the message already names the result."""

    @property
    def shown(self) -> bool:
        """Whether there are values to show beside the message."""
        return not isinstance(self.want, str)


def assembled(held: Sequence[Tensor], placement: Placement) -> list[tuple[int | None, Tensor]]:
    """The global tensor that all ranks hold together (rank None), or the different tensors of single ranks."""
    if isinstance(placement, Partial):
        return [(None, fold_partials(torch.stack(list(held)), placement.reduce_op))]
    if shard_cut(placement) is not None:
        return [(None, assemble_axis(held, placement))]
    return [(rank, piece) for rank, piece in enumerate(held) if rank == 0 or piece is not held[0]]


def shape_difference(
    held: Sequence[Any], want: Tensor, shapes: Sequence[tuple[int, ...] | None], output: int
) -> ResultDifference | None:
    """The first rank whose piece has another shape than `shapes` has for it, or another dtype than the whole."""
    for rank, (piece, shape) in enumerate(zip(held, shapes, strict=True)):
        if not isinstance(piece, Tensor) or tuple(piece.shape) != shape:
            got = tuple(piece.shape) if isinstance(piece, Tensor) else piece
            problem = f"rank {rank} has shape {got}, the placement asks for {shape}"
            return ResultDifference(problem, output, rank, got, shape)
        if piece.dtype != want.dtype:
            problem = f"rank {rank} has {piece.dtype}, not {want.dtype}"
            return ResultDifference(problem, output, rank, piece.dtype, want.dtype)
    return None


def number_difference(held: Sequence[object], want: Any, i: int) -> ResultDifference | None:
    """The first rank with another number, for a result that is no tensor; NaN equals NaN."""
    for rank, got in enumerate(held):
        if got != want and not (isinstance(got, float) and math.isnan(got) and math.isnan(want)):
            problem = f"output {i} is {got} on rank {rank}, the op gives {want}"
            return ResultDifference(problem, i, rank, got, want, bare=True)
    return None


def coarsest_eps(tensors: Sequence[Tensor], placements: Sequence[Sequence[Placement | None]]) -> float:
    """The largest epsilon among the dtypes of these tensors that are split into addends; 0 if none is.

    `placements` are those of each tensor, one for each mesh axis.
    """
    kinds = ({p.reduce_op for p in row if isinstance(p, Partial)} for row in placements)
    added = (x for x, split in zip(tensors, kinds, strict=False) if split.intersection(ADDED_KINDS) and is_inexact(x))
    return max((torch.finfo(x.dtype).eps for x in added), default=0.0)


def folding_error(held: Sequence[Tensor], coarse: float = 0.0) -> float:
    """The rounding error of folding these parts, which can be far larger than their total.

    `coarse` is the epsilon of the inputs that were split before, which may have a coarser dtype than the parts.
    """
    if not (held[0].dtype.is_floating_point or held[0].dtype.is_complex):
        return 0.0
    largest = max(float(h.detach().abs().nan_to_num(0.0, 0.0, 0.0).amax()) if h.numel() else 0.0 for h in held)
    eps = torch.finfo(held[0].dtype).eps
    return max(noise_factor(eps) * eps, SPLIT_ULPS * coarse) * largest


def nudged(x: Tensor, seed: int) -> Tensor:
    """A copy with each element moved by one ulp, up or down."""
    signs = torch.randint(0, 2, x.shape, generator=torch.Generator().manual_seed(seed)) * 2 - 1
    return x * (1 + torch.finfo(x.dtype).eps * signs.to(x.dtype))


def moves_as_much(found: ResultDifference, local: Sequence[Sequence[Any]], again: Sequence[Sequence[Any]]) -> bool:
    """Whether a difference of values is no larger than what noise in the inputs makes of the results, `SPLIT_ULPS` ulps of it."""
    got, want = found.got, found.want
    if not isinstance(got, Tensor) or not isinstance(want, Tensor) or got.shape != want.shape:
        return False
    moved = max(float(max_abs(a[found.output] - b[found.output])) for a, b in zip(local, again, strict=True))
    return float(max_abs(got - want)) <= SPLIT_ULPS * moved


def non_arithmetic_partial(rule: Rule, inputs: Sequence[Any], outputs: Sequence[Any]) -> str:
    """The first partial value of a rule that is not to be computed with, such as `P(sum) of torch.bool`; empty if there is none.

    A sum of booleans among the inputs is their "or": the op that makes it is tested with what follows it.  Among the outputs
    it is a product of complex numbers, which no backend multiplies.
    """
    taken = [(p, x) for p, x in zip(rule.inputs, inputs, strict=False) if x.dtype == torch.bool]
    given = [
        (p, x) for p, x in zip(rule.outputs, outputs, strict=False) if isinstance(x, Tensor) and x.dtype.is_complex
    ]
    given = [(p, x) for p, x in given if p == Partial("product")]
    every = ((p, x) for p, x in [*taken, *given] if isinstance(p, Partial) and not is_arithmetic(p.reduce_op, x.dtype))
    return next((f"{short(p)} of {x.dtype}" for p, x in every), "")


def not_gathered(rule: Rule, inputs: Sequence[Tensor], *, by_dtensor: bool = True) -> str:
    """The first partial input that cannot be gathered, such as `P(avg)` of integers by DTensor; empty if there is none.

    A sum of booleans is made by ops, and is gathered as their "or".
    """
    partial = ((p, x) for p, x in zip(rule.inputs, inputs, strict=True) if isinstance(p, Partial))
    can_be = ((p, x, is_arithmetic if by_dtensor and x.dtype != torch.bool else is_reducible) for p, x in partial)
    return next((short(p) for p, x, known in can_be if not known(p.reduce_op, x.dtype)), "")


def widened(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies of the tensors, small integers as int64."""
    return [x.to(torch.int64, copy=True) if x.dtype in NARROW else x.clone() for x in tensors]


def wraps(local: Sequence[Sequence[Any]], wide: Sequence[Sequence[Any]]) -> bool:
    """Whether a result of small integers is another number than that which int64 gives; both by rank."""
    pairs = ((a, b) for one, two in zip(local, wide, strict=True) for a, b in zip(one, two, strict=True))
    small = ((a, b) for a, b in pairs if isinstance(a, Tensor) and a.dtype in NARROW)
    return any(a.shape == b.shape and bool((a != b).any()) for a, b in small)


def concatenated_shapes(held: Sequence[Any], want: Tensor, placement: Placement) -> Shapes | None:
    """The shapes of the pieces themselves if they are shards that make a whole of the right shape by concatenation."""
    if not isinstance(placement, Shard) or not has_dim(placement, want) or any(not isinstance(x, Tensor) for x in held):
        return None
    dim, shapes = placement.dim, [tuple(x.shape) for x in held]
    if any(len(shape) != want.ndim for shape in shapes) or sum(shape[dim] for shape in shapes) != want.shape[dim]:
        return None
    rest = tuple(want.shape[:dim]) + tuple(want.shape[dim + 1 :])
    return shapes if all(shape[:dim] + shape[dim + 1 :] == rest for shape in shapes) else None


def has_dim(placement: Placement, want: Tensor) -> bool:
    """Whether the tensor has the dim that the placement shards."""
    cut = shard_cut(placement)
    return cut is None or 0 <= cut[0] < want.ndim


def singular_slack(got: Tensor, want: Tensor, slack: Tensor, kind: Values) -> Tensor:
    """Infinite slack where parts met a singularity, although the rule is right.

    P(sum) / R -> P(sum) is right, yet x / 0 is infinite where the parts, of both signs, make NaN.  So only finite
    elements are compared; for values other than the sample's own, not where the folded parts are infinite, too; and NaN
    where NaN was put in.  NaN in place of a number is a fault: `special.xlog1py(0, -1)` is 0, and its parts are inf - inf.
    But not of parts that were made a thousand times larger than their total: exp of P(sum) is P(product), and exp(1000) overflows.
    """
    if not is_inexact(want):
        return slack
    compared = want.isfinite()
    if kind.wild:
        compared = ~want.isinf() & ~got.isinf()
    elif kind.name:
        compared &= got.isfinite() if kind.split == "far" else ~got.isinf()
    return torch.where(compared, slack, torch.inf)


def raised_text(who: str, error: Exception) -> str:
    """`rank 0 raises ValueError: ` and the first line of its message."""
    return f"{who} {type(error).__name__}: {(str(error) or '-').splitlines()[0]}"


def near(a: Tensor, b: Tensor) -> bool:
    """Whether two results differ by no more than one kernel of torch from another: 1e-4 of the largest number."""
    return equal_within(b, a, 1e-4 * max_abs(a)) if is_inexact(a) else torch.equal(a, b)
