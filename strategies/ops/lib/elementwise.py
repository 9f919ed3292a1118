"""Helpers of elementwise rules: shards of broadcast operands, casts of partial values, and linear ops.

A linear op, `f(a + b) = f(a) + f(b)`, takes sums and averages of parts to those of its results.  That holds for
integers that wrap, unless the result has a wider dtype than the parts, which had wrapped or were rounded before.
Averages of integers are rounded, and booleans add as "or": no op is linear in those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from localtensor.layout import is_float8, is_unambiguous
from strategies.ops.semantics.rule_registry import Meta, PlacementRule, RuleFunction, RuleQuery

RuleMaker = Callable[[RuleQuery], Iterable[PlacementRule]]


def shard_rules(query: RuleQuery) -> Iterator[PlacementRule]:
    """Each dim of the result sharded, with every operand that has the dim at its full size; the others are replicated.

    A dim of size 1 is sharded only if the result has size 1, too: then all operands that have it are empty on the same ranks.
    """
    result = next((meta for meta in query.outputs if meta is not None), None)
    if result is None or any(meta is not None and meta.shape != result.shape for meta in query.outputs):
        return
    for dim in range(result.ndim):
        inputs = sharded_operands(query, result, dim)
        if inputs:
            yield query.line(inputs, query.on_each(Shard(dim)))


def aligned(operand: Meta, result: Meta, dim: int) -> int | None:
    """The operand's dim that is broadcast to this dim of the result, if it has that size."""
    own = dim - result.ndim + operand.ndim
    return own if own >= 0 and operand.shape[own] == result.shape[dim] else None


def sharded_operands(query: RuleQuery, result: Meta, dim: int) -> dict[int, Placement]:
    """The operands that have this dim of the result at its full size, by leaf number, sharded on it."""
    owned = {leaf: aligned(meta, result, dim) for leaf, meta in enumerate(query.tensors)}
    return {leaf: Shard(own) for leaf, own in owned.items() if own is not None}


def elementwise(*makers: RuleMaker) -> RuleFunction:
    """The rule with a placement rule for each dim, and those of the makers, whose inputs or results are partial."""

    def lines(query: RuleQuery) -> Iterator[PlacementRule]:
        yield from shard_rules(query)
        for maker in makers:
            yield from maker(query)

    return lines


def partial_rule(query: RuleQuery, leaves: Iterable[int], kind: str, gives: str | None = None) -> PlacementRule:
    """The placement rule with these tensors partial, the others replicated, and each result partial of kind `gives`."""
    return query.line({leaf: Partial(kind) for leaf in leaves}, query.on_each(Partial(gives or kind)))


def tensor_operands(query: RuleQuery, names: Iterable[str]) -> tuple[list[int], bool]:
    """The tensors among these arguments by leaf number, and whether any other of them is a number.

    A call may pass a number for a tensor argument.
    """
    given = [(query.leaf(name), query.get(name)) for name in names]
    return [leaf for leaf, _ in given if leaf is not None], any(leaf is None and v is not None for leaf, v in given)


RANGES = {torch.uint8: (0, 8), torch.int8: (1, 8), torch.int16: (1, 16), torch.int32: (1, 32), torch.int64: (1, 64)}
"""Integer dtypes that may be cast while partial: whether they are signed, and their bits."""
NUMBERS = (torch.int32, torch.int64)
"""Integers whose sums are assumed not to wrap; narrower ones, as in `uint8` images, do in practice."""


def is_float_or_complex(dtype: torch.dtype) -> bool:
    """Whether the dtype is complex, or a float of at least two bytes."""
    return (dtype.is_floating_point and not is_float8(dtype)) or dtype.is_complex


def cast_commutes(kind: str, source: torch.dtype, target: torch.dtype) -> bool:
    """Whether the cast from one dtype to another commutes with the reduction; never for an average of integers.

    >>> cast_commutes("sum", torch.float32, torch.bfloat16), cast_commutes("sum", torch.int64, torch.uint8)
    (True, True)
    >>> cast_commutes("sum", torch.float32, torch.int64), cast_commutes("sum", torch.uint8, torch.int64)  # cut off; wrapped before
    (False, False)
    >>> cast_commutes("sum", torch.bool, torch.int64), cast_commutes("max", torch.bool, torch.int64)  # the sum of booleans is "or"
    (False, True)
    >>> cast_commutes("sum", torch.bfloat16, torch.float32), cast_commutes("max", torch.float32, torch.float64)
    (True, True)
    >>> cast_commutes("max", torch.int64, torch.uint8), cast_commutes("avg", torch.int64, torch.float32)  # 256 is 0; rounded before
    (False, False)
    """
    if not (is_unambiguous(kind, source) and is_unambiguous(kind, target)):
        return False
    if source == target:
        return True
    if source == torch.bool:
        return kind in ("min", "max", "product") and (target in RANGES or is_float_or_complex(target))
    if is_float_or_complex(source):
        turns = kind == "product" and source.is_complex and not target.is_complex  # a factor keeps its phase
        return is_float_or_complex(target) and not turns
    return source in RANGES and _integers(kind, source, target)


def _integers(kind: str, source: torch.dtype, target: torch.dtype) -> bool:
    (signed, bits), (wider, most) = RANGES[source], RANGES.get(target, (1, 0))
    if not (most or is_float_or_complex(target)):
        return False
    if kind in ("min", "max"):
        return is_float_or_complex(target) or (wider >= signed and most - wider >= bits - signed)
    return source in NUMBERS if is_float_or_complex(target) or most > bits else True


SUM, AVG = Partial("sum"), Partial("avg")


def linear_partials(before: torch.dtype, after: torch.dtype) -> tuple[Partial, ...]:
    """The partial placements that a linear op takes from one dtype to another.

    >>> linear_partials(torch.float32, torch.float32), linear_partials(torch.int64, torch.int64), linear_partials(torch.int32, torch.int64)
    ((Partial(sum), Partial(avg)), (Partial(sum),), ())
    """
    if before != after or before == torch.bool:
        return ()
    return (SUM, AVG) if before.is_floating_point or before.is_complex else (SUM,)


def linear_in(query: RuleQuery, leaf: int | None, outputs: Sequence[bool] | None = None) -> Iterator[PlacementRule]:
    """The placement rules of an op that is linear in one tensor, all others replicated.

    `outputs` selects the results that are linear in it, all by default; the others must be equal on every rank.
    """
    if leaf is None:
        return
    linearly = [True] * len(query.outputs) if outputs is None else outputs
    made = [meta for meta, holds in zip(query.outputs, linearly, strict=True) if holds and meta is not None]
    allowed = [linear_partials(query.tensors[leaf].dtype, meta.dtype) for meta in made]
    for part in (SUM, AVG):
        if allowed and all(part in parts for parts in allowed):
            yield query.line({leaf: part}, query.masked([part if holds else Replicate() for holds in linearly]))
