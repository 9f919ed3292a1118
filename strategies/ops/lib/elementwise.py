"""Helpers of rules: placement rules from maps of dims and named arguments, of reductions, and of elementwise ops.

A linear op, `f(a + b) = f(a) + f(b)`, takes sums and averages of parts to those of its results.  That holds for
integers that wrap, unless the result has a wider dtype than the parts, which had wrapped or were rounded before.
Averages of integers are rounded, and booleans add as "or": no op is linear in those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from localtensor.layout import is_float8, is_unambiguous
from strategies.ops.semantics.rule_registry import Cut, Meta, PlacementRule, RuleFunction, RuleQuery

KINDS = ("sum", "avg", "max", "min", "product")
"""All reductions: they commute with ops that move, drop or repeat elements."""
LINEAR = ("sum", "avg")
"""The reductions that commute with linear ops."""


def shard_rule(query: RuleQuery, inputs: Mapping[int, int], result: int, cut: Cut = "any") -> PlacementRule:
    """The placement rule that shards these inputs, each on its dim, and every result on dim `result`."""
    return query.line({leaf: Shard(dim) for leaf, dim in inputs.items()}, query.on_each(Shard(result)), cut)


def dim_map_rules(
    query: RuleQuery, dims: Iterable[tuple[int, int]], cut: Cut = "any", leaf: int = 0
) -> Iterator[PlacementRule]:
    """A placement rule for each pair of a dim of tensor `leaf` and the dim of every result that it becomes."""
    yield from (shard_rule(query, {leaf: before}, after, cut) for before, after in dims)


def partial_rules(query: RuleQuery, leaves: Sequence[int], kinds: Iterable[str] = KINDS) -> Iterator[PlacementRule]:
    """A placement rule for each kind: these inputs and every result are partial, of that kind.

    There are none if dtypes differ, since a cast does not commute with every reduction, and none of a kind without a
    well-defined result for the dtype, such as the average of integers.
    """
    dtypes = {query.tensors[leaf].dtype for leaf in leaves} | {meta.dtype for meta in query.outputs if meta is not None}
    if leaves and len(dtypes) == 1:
        for kind in (kind for kind in kinds if is_unambiguous(kind, query.tensors[leaves[0]].dtype)):
            yield query.line({leaf: Partial(kind) for leaf in leaves}, query.on_each(Partial(kind)))


def reductions_keeping(value: object) -> tuple[str, ...]:
    """The reductions of equal copies of this number that return the number.

    >>> reductions_keeping(0), reductions_keeping(1), reductions_keeping(2.5)
    (('sum', 'avg', 'max', 'min', 'product'), ('avg', 'max', 'min', 'product'), ('avg', 'max', 'min'))
    """
    fixed = {"sum": (0,), "product": (0, 1)}
    return tuple(kind for kind in KINDS if value in fixed.get(kind, (value,)) or kind in ("avg", "max", "min"))


def remaining_dims(ndim: int, *gone: int) -> list[int]:
    """The dims without these, which are not negative.

    >>> remaining_dims(4, 1)
    [0, 2, 3]
    """
    return [dim for dim in range(ndim) if dim not in gone]


def dims_after_removal(ndim: int, *gone: int) -> list[tuple[int, int]]:
    """The dims without these, each with its position among the remaining ones.

    >>> dims_after_removal(4, 1)
    [(0, 0), (2, 1), (3, 2)]
    """
    return [(dim, place) for place, dim in enumerate(remaining_dims(ndim, *gone))]


def unchanged_dims(ndim: int, *gone: int) -> list[tuple[int, int]]:
    """The dims without these, each paired with itself.

    >>> unchanged_dims(3, 0)
    [(1, 1), (2, 2)]
    """
    return [(dim, dim) for dim in remaining_dims(ndim, *gone)]


def named_shard_rule(
    query: RuleQuery, inputs: Mapping[str, int | None], outputs: Sequence[int | Placement | None], cut: Cut = "any"
) -> PlacementRule:
    """The placement rule that shards each named argument on its dim, and each result on its own; None is replicated.

    Arguments that the call does not have, and masked results, are left out.
    """
    shards = {query.leaf(name): Shard(dim) for name, dim in inputs.items() if dim is not None}
    made: dict[int, Placement] = {leaf: placement for leaf, placement in shards.items() if leaf is not None}
    placed = [Replicate() if dim is None else Shard(dim) if isinstance(dim, int) else dim for dim in outputs]
    return query.line(made, query.masked(placed), cut)


def linear_partial_rules(
    query: RuleQuery, names: Sequence[str], outputs: Sequence[bool] = (), kinds: Sequence[str] = LINEAR
) -> Iterator[PlacementRule]:
    """For each kind, the placement rule from partial arguments of these names to partial results.

    The op must be linear in all of them at once.  `outputs` selects the partial results, all if it is empty; the others
    must not depend on these arguments.
    """
    leaves = [leaf for name in names for leaf in query.leaves(name)]
    dtypes = [query.tensors[leaf].dtype for leaf in leaves]
    if not leaves or not all(dtype.is_floating_point or dtype.is_complex for dtype in dtypes):
        return  # division rounds integers, which is not linear
    which = outputs or [True] * len(query.outputs)
    for kind in (kind for kind in kinds if all(is_unambiguous(kind, dtype) for dtype in dtypes)):
        whole = [Partial(kind) if partial else Replicate() for partial in which]
        yield query.line({leaf: Partial(kind) for leaf in leaves}, query.masked(whole))


Parts = Sequence[Partial]
"""The partial placement of each result, in order."""


def dims_after_reduction(query: RuleQuery, name: str = "dim", *, none_is_none: bool = False) -> dict[int, int]:
    """The dims of the first tensor that are not reduced, each with its dim in the result.

    With `none_is_none`, an empty list of dims reduces none; for most ops it reduces all.
    """
    gone = () if none_is_none and query.get(name) == [] else query.dims(name)
    left = remaining_dims(query.tensors[0].ndim, *gone)
    return {d: d if query.get("keepdim") else place for place, d in enumerate(left)}


def kept_dim_rules(query: RuleQuery, places: Mapping[int, int]) -> Iterator[PlacementRule]:
    """The placement rules that shard a remaining dim, and all results on it."""
    for dim, place in places.items():
        yield query.line({0: Shard(dim)}, [Shard(place)] * len(query.outputs))


def reduced_dim_rules(
    query: RuleQuery, places: Mapping[int, int], *kinds: Parts, cut: Cut = "any"
) -> Iterator[PlacementRule]:
    """The placement rules that shard a reduced dim, one for each choice of partial results."""
    for dim in range(query.tensors[0].ndim):
        if dim not in places:
            yield from (query.line({0: Shard(dim)}, list(parts), cut) for parts in kinds)


def passthrough_rules(query: RuleQuery, parts: Parts) -> Iterator[PlacementRule]:
    """The placement rules from a partial input to equally partial results."""
    return (query.line({0: part}, [part] * len(query.outputs)) for part in parts)


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
