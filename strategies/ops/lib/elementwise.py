"""Ops whose every element is made of the elements at the same place, after broadcasting: how they may be cut."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from torch.distributed.tensor import Partial, Shard
from torch.distributed.tensor.placement_types import Placement

from strategies.ops.semantics.rulebook import Ask, Line, Meta, RuleFunction

Maker = Callable[[Ask], Iterable[Line]]


def shards(ask: Ask) -> Iterator[Line]:
    """Each dim of the result cut: so is every operand that has the dim at its full size, and the others stay whole.

    A dim of size 1 is cut where the result has size 1, too: then all operands that have it are empty on the same ranks.
    """
    result = next((meta for meta in ask.outputs if meta is not None), None)
    if result is None or any(meta is not None and meta.shape != result.shape for meta in ask.outputs):
        return
    for dim in range(result.ndim):
        inputs: dict[int, Placement] = {
            leaf: Shard(own) for leaf, meta in enumerate(ask.tensors) for own in _own_dim(meta, result, dim)
        }
        if inputs:
            yield ask.line(inputs, [None if meta is None else Shard(dim) for meta in ask.outputs])


def _own_dim(meta: Meta, result: Meta, dim: int) -> Iterator[int]:
    """The operand's dim that runs along this dim of the result, if it has one of that size."""
    own = dim - result.ndim + meta.ndim
    if own >= 0 and meta.shape[own] == result.shape[dim]:
        yield own


def elementwise(*makers: Maker) -> RuleFunction:
    """The rule with a line for each dim, and the lines that these make, whose inputs or results are partial."""

    def lines(ask: Ask) -> Iterator[Line]:
        yield from shards(ask)
        for maker in makers:
            yield from maker(ask)

    return lines


def partial(ask: Ask, leaves: Iterable[int], kind: str, gives: str | None = None) -> Line:
    """These tensors partial, the others replicated, and each result partial of this kind or of the one it `gives`."""
    inputs: dict[int, Placement] = {leaf: Partial(kind) for leaf in leaves}
    return ask.line(inputs, [None if meta is None else Partial(gives or kind) for meta in ask.outputs])


def operands(ask: Ask, names: Iterable[str]) -> tuple[list[int], bool]:
    """The tensors among these arguments by leaf number, and whether another of them is a number.

    What a schema calls a tensor may be given as a number.
    """
    given = [(ask.leaf(name), ask.get(name)) for name in names]
    return [leaf for leaf, _ in given if leaf is not None], any(leaf is None and v is not None for leaf, v in given)
