"""Lines from a map of dims, and what a reduction keeps: the words in which views, joins and indexing are written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch.distributed.tensor import Partial, Shard

from localtensor.layout.partials import agreed
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


def kept(ndim: int, *gone: int) -> list[tuple[int, int]]:
    """The dims other than these, each in its own place.

    >>> kept(3, 0)
    [(1, 1), (2, 2)]
    """
    return [(dim, dim) for dim in without(ndim, *gone)]
