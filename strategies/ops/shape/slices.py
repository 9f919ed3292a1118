"""Rules of views of some elements, and of their gradients: a dim from which rows are taken is replicated."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from strategies.ops.lib.dim_maps import KINDS, LINEAR, mapped, other_dims, pending, shifted
from strategies.ops.lib.overload_variants import with_variants
from strategies.ops.semantics.rulebook import Ask, Entry, Line, rules

FAMILY = "views"
Lines = Callable[[Ask], Iterator[Line]]


def selected(query: Ask) -> Iterator[Line]:
    """One row of a dim, or each row as a separate result."""
    ndim = query.tensors[0].ndim
    yield from pending(query, [0])
    yield from mapped(query, shifted(ndim, query["dim"] % max(ndim, 1)))


def sliced(query: Ask) -> Iterator[Line]:
    """The sliced dim may be sharded only if the slice is the whole dim."""
    given, result = query.tensors[0], query.outputs[0]
    dim = query["dim"] % max(given.ndim, 1)
    yield from pending(query, [0])
    whole = result is not None and result.shape == given.shape
    yield from mapped(query, other_dims(given.ndim, *([] if whole else [dim])))


def parted(query: Ask) -> Iterator[Line]:
    """Splits of a dim.  It may be sharded only if the split size is at least the dim."""
    given = query.tensors[0]
    dim = query["dim"] % max(given.ndim, 1)
    yield from pending(query, [0])
    size = query.get("split_size")
    whole = isinstance(size, int) and len(query.outputs) == 1
    yield from mapped(query, other_dims(given.ndim, *([] if whole else [dim])))


def diagonals(query: Ask) -> tuple[int, int]:
    """The two dims of the diagonal."""
    ndim = query.tensors[0].ndim
    return query["dim1"] % ndim, query["dim2"] % ndim


def diagonal(query: Ask) -> Iterator[Line]:
    """The diagonal is the last dim of the result; both its dims are replicated."""
    yield from pending(query, [0])
    yield from mapped(query, shifted(query.tensors[0].ndim, *diagonals(query)))


def diagonal_put(query: Ask) -> Iterator[Line]:
    """The last dim becomes the diagonal of two; every reduction keeps the zeros beside it."""
    yield from pending(query, [0])
    result = query.outputs[0]
    if result is not None:
        gone = query["dim1"] % result.ndim, query["dim2"] % result.ndim
        yield from mapped(query, [(place, dim) for dim, place in shifted(result.ndim, *gone)])


def only_pending(query: Ask) -> Iterator[Line]:
    """The op affects every dim, so only partial values commute with it."""
    yield from pending(query, [0])


def windows(query: Ask) -> Iterator[Line]:
    """A dim of windows is replicated, unless the windows tile it: then equal pieces have windows of their own."""
    given, result = query.tensors[0], query.outputs[0]
    yield from pending(query, [0])
    if given.ndim == 0 or result is None:
        return
    named = query["dimension"] if "dimension" in query.arguments else query["dim"]
    dim, size, step = named % given.ndim, query["size"], query["step"]
    yield from mapped(query, other_dims(given.ndim, dim))
    if size == step and size > 0 and result.shape[dim] * size == given.shape[dim]:
        yield from mapped(query, [(dim, dim)], "filled" if size == 1 else "even")


def put_back(lines: Lines, kinds: tuple[str, ...] = KINDS) -> Lines:
    """The rule of a view's gradient, the placement rules of the view reversed; every reduction keeps the zeros around it."""

    def backwards(query: Ask) -> Iterator[Line]:
        yield from pending(query, [0], kinds)
        view = Ask(query.op, query.arguments, tuple(meta for meta in query.outputs if meta), query.tensors)
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
"""Overloads that return nothing, so that the shapes of the pieces and of the given tensors cannot be compared."""

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
