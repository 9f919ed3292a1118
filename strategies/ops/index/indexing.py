"""Rows picked by number: which rows there are is the same on all ranks, so the dim they are picked from is whole.

Places may be cut instead: each rank looks up some of them in the whole tensor.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch.distributed.tensor import Shard

from strategies.ops.lib.dim_maps import KINDS, filled_with, kept, mapped, pending, sharded
from strategies.ops.lib.overload_variants import with_variants
from strategies.ops.semantics.rulebook import Ask, Entry, Line, rules
from strategies.ops.shape.slices import Lines, diagonal, selected, sliced

FAMILY = "indexing"


def index_select(ask: Ask) -> Iterator[Line]:
    given, index = ask.meta("self"), ask.meta("index")
    dim = ask["dim"] % max(given.ndim, 1)
    yield from pending(ask, [0])
    yield from mapped(ask, kept(given.ndim, dim))
    if given.ndim and index.ndim:
        yield sharded(ask, {1: 0}, dim)


def gather(ask: Ask) -> Iterator[Line]:
    """In the other dims a place of the index is that place of the tensor, so both are cut in the same places only if
    both have as many rows; a shorter index would be cut elsewhere."""
    given, index = ask.meta("self"), ask.meta("index")
    dim = ask["dim"] % max(given.ndim, 1)
    yield from pending(ask, [0])
    if given.ndim != index.ndim:
        return
    for other, _ in kept(given.ndim, dim):
        if given.shape[other] == index.shape[other]:
            yield sharded(ask, {0: other, 1: other}, other)
    if index.ndim:
        yield sharded(ask, {1: dim}, dim)


def take(ask: Ask) -> Iterator[Line]:
    yield from pending(ask, [0])
    yield from mapped(ask, kept(ask.meta("index").ndim), leaf=1)


def masked_select(ask: Ask) -> Iterator[Line]:
    """How many elements there are hangs on the mask, which is whole; only the elements may be parts.

    So it is where they are padded with zeros.
    """
    yield from pending(ask, [0])


def index_fill(ask: Ask) -> Iterator[Line]:
    """The same number in the same places on every rank, or a tensor that is partial like the first."""
    given = ask.meta("self")
    value = ask.leaf("value")
    yield from pending(ask, [0], filled_with(ask["value"]) if value is None else ("avg", "max", "min"))
    if value is not None:
        yield from pending(ask, [0, value])
    yield from mapped(ask, kept(given.ndim, ask["dim"] % max(given.ndim, 1)))


def written_into(view: Lines, name: str = "src") -> Lines:
    """The lines of writing a tensor where a view reads: both are cut where the view maps a dim to a dim."""

    def lines(ask: Ask) -> Iterator[Line]:
        source = ask.leaf(name)
        if source is None:
            return
        yield from pending(ask, [0, source], KINDS)
        read = Ask(ask.op, ask.arguments, ask.tensors[:1], (ask.tensors[source],))
        for line in view(read):
            (before,), (after,) = line.inputs, line.outputs
            if isinstance(before, Shard) and isinstance(after, Shard):
                yield sharded(ask, {0: before.dim, source: after.dim}, before.dim, line.cut)

    lines.__wrapped__ = view  # type: ignore[attr-defined]
    return lines


_PICKED = "the dim from which rows are picked is whole"
_WRITTEN = "both are cut where the view that is written to has a dim of the tensor"

RULES: tuple[Entry, ...] = with_variants(
    (
        *rules(FAMILY, _PICKED, ["aten.index_select.default"], index_select),
        *rules(FAMILY, _PICKED, ["aten.gather.default"], gather),
        *rules(FAMILY, "any place may be looked up in the whole tensor", ["aten.take.default"], take),
        *rules(FAMILY, "the mask is the same on all ranks", ["aten.masked_select.default"], masked_select),
        *rules(FAMILY, "the mask is the same on all ranks", ["aten.masked_scatter_backward.default"], masked_select),
        *rules(FAMILY, _PICKED, ["aten.index_fill.int_Scalar", "aten.index_fill.int_Tensor"], index_fill),
        *rules(FAMILY, _WRITTEN, ["aten.select_scatter.default"], written_into(selected)),
        *rules(FAMILY, _WRITTEN, ["aten.slice_scatter.default"], written_into(sliced)),
        *rules(FAMILY, _WRITTEN, ["aten.diagonal_scatter.default"], written_into(diagonal)),
    )
)
