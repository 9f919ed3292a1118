"""One call along one mesh axis: which pieces its ranks get, and the call that each piece is left with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.distributed.tensor import Partial
from torch.distributed.tensor.placement_types import Placement
from torch.utils import _pytree as pytree

from localtensor.layout.partials import reducible
from localtensor.layout.spec import cuts
from strategies.model.rule import Call, Leaf, frozen, overload
from strategies.ops.semantics.rulebook import Ask, Line, Meta, OwnArguments

Key = tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...] | None, ...]]


@dataclass(frozen=True, slots=True)
class Piece:
    """A call as it is left at some place of the mesh: the question about it, and the call itself."""

    ask: Ask
    call: Call

    @property
    def key(self) -> Key:
        """Its shapes, which tell it from the other pieces of the same call."""
        return tuple(m.shape for m in self.ask.tensors), tuple(m.shape if m else None for m in self.ask.outputs)


def length(size: int, factor: int, ranks: int, rank: int) -> int:
    """The rows that a rank has of a dim which is cut into `factor` blocks first, as `localtensor.layout.shards` cuts it.

    >>> [length(5, 1, 4, rank) for rank in range(4)], [length(5, 2, 2, rank) for rank in range(2)]
    ([2, 2, 1, 0], [3, 2])
    """
    if factor > 1:
        blocks = [length(size, 1, factor, block) for block in range(factor)]
        return sum(length(block, 1, ranks, rank) for block in blocks)
    step = -(-size // ranks)
    return max(0, min(step, size - step * rank))


def local_meta(meta: Meta, placement: Placement | None, ranks: int, rank: int) -> Meta:
    """What a rank has of a tensor along one axis."""
    cut = cuts(placement)
    if cut is None:
        return meta
    dim, factor = cut
    shape = (*meta.shape[:dim], length(meta.shape[dim], factor, ranks, rank), *meta.shape[dim + 1 :])
    return Meta(shape, meta.dtype)


def pairs(line: Line, ask: Ask) -> list[tuple[Placement, Meta]]:
    """Each tensor and result with its placement, masked results left out."""
    both = [*zip(line.inputs, ask.tensors, strict=True), *zip(line.outputs, ask.outputs, strict=True)]
    return [(p, meta) for p, meta in both if p is not None and meta is not None]


def unfit(line: Line, ask: Ask, ranks: int) -> str:
    """Why the line cannot be had on that many ranks: its `cut` does not hold, or a reduction means nothing; or empty."""
    for placement, meta in pairs(line, ask):
        if isinstance(placement, Partial) and not reducible(placement.reduce_op, meta.dtype):
            return f"P({placement.reduce_op}) of {meta} means nothing"
        cut = cuts(placement)
        if cut is None or line.cut == "any":
            continue
        size = meta.shape[cut[0]]
        if line.cut == "even" and (size % (ranks * cut[1]) or not size):
            return f"{size} rows on {ranks} ranks are not even"
        if line.cut == "filled" and not length(size, cut[1], ranks, ranks - 1):
            return f"{size} rows on {ranks} ranks leave one without any"
    return ""


def places(line: Line, ask: Ask, ranks: int) -> Sequence[int]:
    """Coordinates that stand for all: each piece that there is lies at one of them.

    A dim of n rows has full pieces, then at most one short one, then empty ones.
    """
    found = {0}
    for placement, meta in pairs(line, ask):
        cut = cuts(placement)
        if cut is not None and cut[1] > 1:
            return range(ranks)
        if cut is not None:
            size = meta.shape[cut[0]]
            full = size // max(-(-size // ranks), 1)
            found |= {full, full + 1}
    return sorted(place for place in found if place < ranks)


def piece_at(piece: Piece, line: Line, ranks: int, rank: int, own: OwnArguments) -> Piece:
    """The call that one coordinate of the axis is left with; `own` gives the arguments that it has of its own."""
    ask = piece.ask
    tensors = tuple(local_meta(m, p, ranks, rank) for m, p in zip(ask.tensors, line.inputs, strict=True))
    outputs = tuple(m and local_meta(m, p, ranks, rank) for m, p in zip(ask.outputs, line.outputs, strict=True))
    local = Ask(ask.op, ask.arguments, tensors, outputs)
    given = own(local, ask)
    if not given:
        return Piece(local, piece.call)
    return Piece(replace(local, arguments={**ask.arguments, **given}), with_arguments(piece.call, given))


def pieces(whole: Iterable[Piece], line: Line, ranks: int, own: OwnArguments) -> tuple[Piece, ...]:
    """The different calls that the coordinates of an axis are left with, where each of `whole` is one before."""
    found: dict[Key, Piece] = {}
    for piece in whole:
        for rank in places(line, piece.ask, ranks):
            made = piece_at(piece, line, ranks, rank, own)
            found.setdefault(made.key, made)
    return tuple(found.values())


def pieces_by_rank(
    whole: Piece, lines: Sequence[Line], sizes: Sequence[int], own: OwnArguments
) -> tuple[tuple[Piece, ...], tuple[int, ...]]:
    """The different calls on the whole mesh, and by rank number which of them that rank makes."""
    known: list[Piece] = [whole]
    whose = [0]
    for line, ranks in zip(lines, sizes, strict=True):
        found: dict[Key, int] = {}
        made: list[Piece] = []
        table = []
        for piece in known:
            row = []
            for rank in range(ranks):
                one = piece_at(piece, line, ranks, rank, own)
                if found.setdefault(one.key, len(made)) == len(made):
                    made.append(one)
                row.append(found[one.key])
            table.append(row)
        known, whose = made, [place for which in whose for place in table[which]]
    return tuple(known), tuple(whose)


def nothing_own(piece: Ask, whole: Ask) -> Mapping[str, Any]:
    """For ops whose calls on pieces have the arguments of the whole call."""
    return {}


def with_arguments(call: Call, given: Mapping[str, Any]) -> Call:
    """The same call with these as the arguments of these names, each where it stands; one that is not there is added."""
    spots = {a.name: i for i, a in enumerate(overload(call.op)._schema.arguments)}
    args, kwargs = list(call.args), dict(call.kwargs)
    for name, value in given.items():
        if spots[name] < len(args):
            args[spots[name]] = frozen(value)
        else:
            kwargs[name] = frozen(value)
    return replace(call, args=tuple(args), kwargs=tuple(kwargs.items()))


def written_leaves(call: Call) -> dict[int, int | None]:
    """The tensors that the call writes to, by leaf number, each with the result that it becomes, or None."""
    schema = overload(call.op)._schema
    given = dict(call.kwargs) | {schema.arguments[i].name: value for i, value in enumerate(call.args)}
    returned = {
        name: number
        for number, result in enumerate(schema.returns)
        if result.alias_info
        for name in result.alias_info.before_set
    }
    found: dict[int, int | None] = {}
    for argument in schema.arguments:
        alias = argument.alias_info
        if alias is None or not alias.is_write:
            continue
        result = next((returned[name] for name in alias.before_set if name in returned), None)
        leaves = [leaf.index for leaf in pytree.tree_leaves(given.get(argument.name)) if isinstance(leaf, Leaf)]
        # A written list stands for as many results: nothing that is known returns one beside others.
        found.update(dict.fromkeys(leaves, result if len(leaves) == 1 else None))
    return found
