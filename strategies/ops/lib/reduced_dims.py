"""What every reduction has in common: a cut dim that stays is cut in the result, and one that goes leaves parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch.distributed.tensor import Partial, Shard

from strategies.ops.semantics.rulebook import Ask, Cut, Line

Parts = Sequence[Partial]
"""Of what each result is a part, results in order."""


def kept(ask: Ask, name: str = "dim", *, none_is_none: bool = False) -> dict[int, int]:
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
