"""Lines from a map of dims, and what a reduction keeps: the words in which views, joins and indexing are written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from localtensor.layout import agreed
from strategies.ops.semantics.rulebook import Ask, Cut, Line

KINDS = ("sum", "avg", "max", "min", "product")
"""All reductions: they go with whatever moves elements, leaves some out or repeats them."""
LINEAR = ("sum", "avg")
"""The reductions that go with sums of elements."""


def sharded(ask: Ask, inputs: Mapping[int, int], result: int, cut: Cut = "any") -> Line:
    """The line that shards these inputs, each on its dim, and every result on one dim."""
    given = {leaf: Shard(dim) for leaf, dim in inputs.items()}
    return ask.line(given, [None if meta is None else Shard(result) for meta in ask.outputs], cut)


def mapped(ask: Ask, dims: Iterable[tuple[int, int]], cut: Cut = "any", leaf: int = 0) -> Iterator[Line]:
    """A line for each pair: that dim of the first tensor, or of tensor `leaf`, becomes that dim of every result."""
    yield from (sharded(ask, {leaf: before}, after, cut) for before, after in dims)


def pending(ask: Ask, leaves: Sequence[int], kinds: Iterable[str] = KINDS) -> Iterator[Line]:
    """A line for each kind: these inputs are partial and so is every result, of the same kind.

    None where dtypes differ: a cast does not go with every reduction; nor of a kind that means nothing for the dtype, or
    not the same to everybody, as an average of integers, which rounds somehow.
    """
    dtypes = {ask.tensors[leaf].dtype for leaf in leaves} | {meta.dtype for meta in ask.outputs if meta is not None}
    if leaves and len(dtypes) == 1:
        for kind in (kind for kind in kinds if agreed(kind, ask.tensors[leaves[0]].dtype)):
            whole = [None if meta is None else Partial(kind) for meta in ask.outputs]
            yield ask.line({leaf: Partial(kind) for leaf in leaves}, whole)


def filled_with(value: Any) -> tuple[str, ...]:
    """The kinds that go with putting this number in the same places on every rank: what ranks fold it to is itself.

    >>> filled_with(0), filled_with(1), filled_with(2.5)
    (('sum', 'avg', 'max', 'min', 'product'), ('avg', 'max', 'min', 'product'), ('avg', 'max', 'min'))
    """
    fixed = {"sum": (0,), "product": (0, 1)}
    return tuple(kind for kind in KINDS if value in fixed.get(kind, (value,)) or kind in ("avg", "max", "min"))


def without(ndim: int, *gone: int) -> list[int]:
    """The dims that are left where these, none of them negative, are not.

    >>> without(4, 1)
    [0, 2, 3]
    """
    return [dim for dim in range(ndim) if dim not in gone]


def shifted(ndim: int, *gone: int) -> list[tuple[int, int]]:
    """The dims that are left where these are dropped, each with its place among those that are left.

    >>> shifted(4, 1)
    [(0, 0), (2, 1), (3, 2)]
    """
    return [(dim, place) for place, dim in enumerate(without(ndim, *gone))]


def other_dims(ndim: int, *gone: int) -> list[tuple[int, int]]:
    """The dims other than these, each in its own place.

    >>> other_dims(3, 0)
    [(1, 1), (2, 2)]
    """
    return [(dim, dim) for dim in without(ndim, *gone)]


# Lines for ops that treat some dims of their arguments alike: the words in which rules of whole rooms are written.


def along(
    ask: Ask, inputs: Mapping[str, int | None], outputs: Sequence[int | Placement | None], cut: Cut = "any"
) -> Line:
    """The line that shards each named argument on its dim, and each result on its own.

    None is a replica, and what the call was not given is left out; so is a result that is masked off.
    """
    shards = {ask.leaf(name): Shard(dim) for name, dim in inputs.items() if dim is not None}
    made: dict[int, Placement] = {leaf: placement for leaf, placement in shards.items() if leaf is not None}
    return ask.line(made, ask.masked([_placed(dim) for dim in outputs]), cut)


def _placed(dim: int | Placement | None) -> Placement:
    return Replicate() if dim is None else Shard(dim) if isinstance(dim, int) else dim


def parts_of(
    ask: Ask, names: Sequence[str], outputs: Sequence[bool] = (), kinds: Sequence[str] = LINEAR
) -> Iterator[Line]:
    """For each kind the line from partial arguments of these names to partial results: the op is linear in all of them
    at once.  `outputs` says which results are: the others do not look at these arguments' values.  All, if it is empty.
    """
    leaves = [leaf for name in names for leaf in ask.leaves(name)]
    if not leaves or not all(_real(ask, leaf) for leaf in leaves):
        return
    which = outputs or [True] * len(ask.outputs)
    for kind in (kind for kind in kinds if all(agreed(kind, ask.tensors[leaf].dtype) for leaf in leaves)):
        whole = [Partial(kind) if partial else Replicate() for partial in which]
        yield ask.line({leaf: Partial(kind) for leaf in leaves}, ask.masked(whole))


def _real(ask: Ask, leaf: int) -> bool:
    """Integers round where they are divided: what is linear for numbers is not for them."""
    dtype = ask.tensors[leaf].dtype
    return dtype.is_floating_point or dtype.is_complex


# What every reduction has in common: a cut dim that stays is cut in the result, and one that goes leaves parts.

Parts = Sequence[Partial]
"""Of what each result is a part, results in order."""


def dims_after_reduction(ask: Ask, name: str = "dim", *, none_is_none: bool = False) -> dict[int, int]:
    """Where each dim of the first tensor that is not reduced over is in the result.

    `none_is_none` says that an empty list of dims is no dim, where for most ops it is all of them.
    """
    every = range(ask.tensors[0].ndim)
    gone = () if none_is_none and ask.get(name) == [] else ask.dims(name)
    left = [d for d in every if d not in gone]
    return {d: d if ask.get("keepdim") else place for place, d in enumerate(left)}


def cuts(ask: Ask, places: Mapping[int, int]) -> Iterator[Line]:
    """The lines in which a dim that stays is cut: all results are cut where it went."""
    for dim, place in places.items():
        yield ask.line({0: Shard(dim)}, [Shard(place)] * len(ask.outputs))


def folds(ask: Ask, places: Mapping[int, int], *kinds: Parts, cut: Cut = "any") -> Iterator[Line]:
    """The lines in which a dim that goes is cut, one for each kind of parts that the results may be."""
    for dim in range(ask.tensors[0].ndim):
        if dim not in places:
            yield from (ask.line({0: Shard(dim)}, list(parts), cut) for parts in kinds)


def passes(ask: Ask, parts: Parts) -> Iterator[Line]:
    """The lines in which parts of the input make the same parts of every result."""
    return (ask.line({0: part}, [part] * len(ask.outputs)) for part in parts)
