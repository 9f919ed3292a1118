"""Views of some of the elements: a dim from which some rows are taken is whole on every rank.

A rank has its own rows of the other dims, and takes the same of each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from strategies.ops.lib.dim_maps import KINDS, LINEAR, mapped, other_dims, pending, shifted
from strategies.ops.lib.overload_variants import with_variants
from strategies.ops.semantics.rulebook import Ask, Entry, Line, rules

FAMILY = "views"
Lines = Callable[[Ask], Iterator[Line]]


def selected(ask: Ask) -> Iterator[Line]:
    """One row of a dim, or each row as a result of its own."""
    ndim = ask.tensors[0].ndim
    yield from pending(ask, [0])
    yield from mapped(ask, shifted(ndim, ask["dim"] % max(ndim, 1)))


def sliced(ask: Ask) -> Iterator[Line]:
    """A slice that is the whole dim is the whole of each piece of it, too."""
    given, result = ask.tensors[0], ask.outputs[0]
    dim = ask["dim"] % max(given.ndim, 1)
    yield from pending(ask, [0])
    whole = result is not None and result.shape == given.shape
    yield from mapped(ask, other_dims(given.ndim, *([] if whole else [dim])))


def parted(ask: Ask) -> Iterator[Line]:
    """Pieces of a dim, one a result.  A piece as large as the dim or larger is the whole of any part of it."""
    given = ask.tensors[0]
    dim = ask["dim"] % max(given.ndim, 1)
    yield from pending(ask, [0])
    size = ask.get("split_size")
    whole = isinstance(size, int) and len(ask.outputs) == 1
    yield from mapped(ask, other_dims(given.ndim, *([] if whole else [dim])))


def diagonals(ask: Ask) -> tuple[int, int]:
    """The two dims of which a diagonal is taken."""
    ndim = ask.tensors[0].ndim
    return ask["dim1"] % ndim, ask["dim2"] % ndim


def diagonal(ask: Ask) -> Iterator[Line]:
    """The diagonal is the last dim of the result; it takes both its dims whole."""
    yield from pending(ask, [0])
    yield from mapped(ask, shifted(ask.tensors[0].ndim, *diagonals(ask)))


def diagonal_put(ask: Ask) -> Iterator[Line]:
    """The last dim becomes the diagonal of two; zeros beside it fold to zero in every reduction."""
    yield from pending(ask, [0])
    result = ask.outputs[0]
    if result is not None:
        gone = ask["dim1"] % result.ndim, ask["dim2"] % result.ndim
        yield from mapped(ask, [(place, dim) for dim, place in shifted(result.ndim, *gone)])


def only_pending(ask: Ask) -> Iterator[Line]:
    """Places in two dims at once, or in all of them: no dim is without them."""
    yield from pending(ask, [0])


def windows(ask: Ask) -> Iterator[Line]:
    """A dim of windows is whole; where they neither overlap nor leave a gap, equal pieces have windows of their own; of a piece
    without rows there is none."""
    given, result = ask.tensors[0], ask.outputs[0]
    yield from pending(ask, [0])
    if given.ndim == 0 or result is None:
        return
    named = ask["dimension"] if "dimension" in ask.arguments else ask["dim"]
    dim, size, step = named % given.ndim, ask["size"], ask["step"]
    yield from mapped(ask, other_dims(given.ndim, dim))
    if size == step and size > 0 and result.shape[dim] * size == given.shape[dim]:
        yield from mapped(ask, [(dim, dim)], "filled" if size == 1 else "even")


def put_back(lines: Lines, kinds: tuple[str, ...] = KINDS) -> Lines:
    """The lines of a view's gradient: zeros, and what is given where the view reads.  The view's lines, read from the
    result to the argument; zeros fold to zero in every reduction."""

    def backwards(ask: Ask) -> Iterator[Line]:
        yield from pending(ask, [0], kinds)
        view = Ask(ask.op, ask.arguments, tuple(meta for meta in ask.outputs if meta), ask.tensors)
        for line in lines(view):
            if not any(p.is_partial() for p in line.inputs if p is not None):
                yield Line(line.outputs, line.inputs, line.cut)

    backwards.__wrapped__ = lines  # type: ignore[attr-defined]
    return backwards


_WHOLE = "the dim from which rows are taken is whole"
_SPLITS = ("split.Tensor", "unsafe_split.Tensor", "split_with_sizes.default", "unsafe_split_with_sizes.default",
           "narrow_copy.default")  # fmt: skip
_BACK = "zeros, and the gradient where the view reads"

_LISTS = [f"aten.{name}" for name in (
    "unbind_copy.int_out", "split_copy.Tensor_out", "split_with_sizes_copy.out", "unsafe_split.Tensor_out",
    "unsafe_split_with_sizes.out")]  # fmt: skip
"""They return nothing, so whether what they are given to write to has the shape of the pieces cannot be seen."""

RULES: tuple[Entry, ...] = with_variants(
    rules(FAMILY, _WHOLE, ["aten.select.int", "aten.unbind.int"], selected),
    rules(FAMILY, _WHOLE, ["aten.slice.Tensor"], sliced),
    rules(FAMILY, _WHOLE, [f"aten.{name}" for name in _SPLITS], parted),
    rules(FAMILY, "a diagonal runs through two dims", ["aten.diagonal.default"], diagonal),
    rules(FAMILY, "a diagonal runs through two dims", ["aten.diag_embed.default"], diagonal_put),
    rules(FAMILY, "a diagonal runs through all dims", ["aten.diag.default"], only_pending),
    rules(FAMILY, "a window is a view of rows of one dim", ["aten.unfold.default"], windows),
    rules(FAMILY, _BACK, ["aten.select_backward.default"], put_back(selected), shapes=["input_sizes"]),
    rules(FAMILY, _BACK, ["aten.slice_backward.default"], put_back(sliced), shapes=["input_sizes"]),
    rules(FAMILY, _BACK, ["aten.diagonal_backward.default"], put_back(diagonal), shapes=["input_sizes"]),
    rules(FAMILY, "windows that overlap add up", ["aten.unfold_backward.default"], put_back(windows, LINEAR),
          shapes=["input_sizes"]),
    but=_LISTS,
)  # fmt: skip
