"""Helpers of rules: placement rules from maps of dims, from named arguments, and for reductions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from localtensor.layout import is_unambiguous
from strategies.ops.semantics.rule_registry import Cut, PlacementRule, RuleQuery

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
