"""Rules of views of some elements, and of their gradients: a dim from which rows are taken is replicated."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from strategies.ops.lib.elementwise import (
    KINDS,
    LINEAR,
    dim_map_rules,
    dims_after_removal,
    partial_rules,
    unchanged_dims,
)
from strategies.ops.lib.overload_variants import with_variants
from strategies.ops.semantics.rule_registry import OpRule, PlacementRule, RuleQuery, rules

FAMILY = "views"
Lines = Callable[[RuleQuery], Iterator[PlacementRule]]


def select(query: RuleQuery) -> Iterator[PlacementRule]:
    """One row of a dim, or each row as a separate result."""
    ndim = query.tensors[0].ndim
    yield from partial_rules(query, [0])
    yield from dim_map_rules(query, dims_after_removal(ndim, query["dim"] % max(ndim, 1)))


def slice_dim(query: RuleQuery) -> Iterator[PlacementRule]:
    """The sliced dim may be sharded only if the slice is the whole dim."""
    given, result = query.tensors[0], query.outputs[0]
    dim = query["dim"] % max(given.ndim, 1)
    yield from partial_rules(query, [0])
    whole = result is not None and result.shape == given.shape
    yield from dim_map_rules(query, unchanged_dims(given.ndim, *([] if whole else [dim])))


def split(query: RuleQuery) -> Iterator[PlacementRule]:
    """Splits of a dim.  It may be sharded only if the split size is at least the dim."""
    given = query.tensors[0]
    dim = query["dim"] % max(given.ndim, 1)
    yield from partial_rules(query, [0])
    size = query.get("split_size")
    whole = isinstance(size, int) and len(query.outputs) == 1
    yield from dim_map_rules(query, unchanged_dims(given.ndim, *([] if whole else [dim])))


def diagonals(query: RuleQuery) -> tuple[int, int]:
    """The two dims of the diagonal."""
    ndim = query.tensors[0].ndim
    return query["dim1"] % ndim, query["dim2"] % ndim


def diagonal(query: RuleQuery) -> Iterator[PlacementRule]:
    """The diagonal is the last dim of the result; both its dims are replicated."""
    yield from partial_rules(query, [0])
    yield from dim_map_rules(query, dims_after_removal(query.tensors[0].ndim, *diagonals(query)))


def diag_embed(query: RuleQuery) -> Iterator[PlacementRule]:
    """The last dim becomes the diagonal of two; every reduction keeps the zeros beside it."""
    yield from partial_rules(query, [0])
    result = query.outputs[0]
    if result is not None:
        gone = query["dim1"] % result.ndim, query["dim2"] % result.ndim
        yield from dim_map_rules(query, [(place, dim) for dim, place in dims_after_removal(result.ndim, *gone)])


def only_partial_rules(query: RuleQuery) -> Iterator[PlacementRule]:
    """The op affects every dim, so only partial values commute with it."""
    yield from partial_rules(query, [0])


def unfold(query: RuleQuery) -> Iterator[PlacementRule]:
    """A dim of windows is replicated, unless the windows tile it: then equal pieces have windows of their own."""
    given, result = query.tensors[0], query.outputs[0]
    yield from partial_rules(query, [0])
    if given.ndim == 0 or result is None:
        return
    named = query["dimension"] if "dimension" in query.arguments else query["dim"]
    dim, size, step = named % given.ndim, query["size"], query["step"]
    yield from dim_map_rules(query, unchanged_dims(given.ndim, dim))
    if size == step and size > 0 and result.shape[dim] * size == given.shape[dim]:
        yield from dim_map_rules(query, [(dim, dim)], "filled" if size == 1 else "even")


def gradient_of_view(lines: Lines, kinds: tuple[str, ...] = KINDS) -> Lines:
    """The rule of a view's gradient, the placement rules of the view reversed; every reduction keeps the zeros around it."""

    def backwards(query: RuleQuery) -> Iterator[PlacementRule]:
        yield from partial_rules(query, [0], kinds)
        view = RuleQuery(query.op, query.arguments, tuple(meta for meta in query.outputs if meta), query.tensors)
        for line in lines(view):
            if not any(p.is_partial() for p in line.inputs if p is not None):
                yield PlacementRule(line.outputs, line.inputs, line.cut)

    backwards.__wrapped__ = lines  # type: ignore[attr-defined]
    return backwards


_WHOLE = "the dim from which rows are taken is whole"
_SPLITS = (
    "split.Tensor", "unsafe_split.Tensor", "split_with_sizes.default", "unsafe_split_with_sizes.default",
    "narrow_copy.default",
)  # fmt: skip
_BACK = "zeros, and the gradient where the view reads"

_LISTS = [f"aten.{name}" for name in (
    "unbind_copy.int_out", "split_copy.Tensor_out", "split_with_sizes_copy.out", "unsafe_split.Tensor_out",
    "unsafe_split_with_sizes.out")]  # fmt: skip
"""Overloads that return nothing, so that the shapes of the pieces and of the given tensors cannot be compared."""

RULES: tuple[OpRule, ...] = with_variants(
    rules(FAMILY, _WHOLE, ["aten.select.int", "aten.unbind.int"], select),
    rules(FAMILY, _WHOLE, ["aten.slice.Tensor"], slice_dim),
    rules(FAMILY, _WHOLE, [f"aten.{name}" for name in _SPLITS], split),
    rules(FAMILY, "a diagonal runs through two dims", ["aten.diagonal.default"], diagonal),
    rules(FAMILY, "a diagonal runs through two dims", ["aten.diag_embed.default"], diag_embed),
    rules(FAMILY, "a diagonal runs through all dims", ["aten.diag.default"], only_partial_rules),
    rules(FAMILY, "a window is a view of rows of one dim", ["aten.unfold.default"], unfold),
    rules(FAMILY, _BACK, ["aten.select_backward.default"], gradient_of_view(select), shapes=["input_sizes"]),
    rules(FAMILY, _BACK, ["aten.slice_backward.default"], gradient_of_view(slice_dim), shapes=["input_sizes"]),
    rules(FAMILY, _BACK, ["aten.diagonal_backward.default"], gradient_of_view(diagonal), shapes=["input_sizes"]),
    rules(FAMILY, "windows that overlap add up", ["aten.unfold_backward.default"], gradient_of_view(unfold, LINEAR),
          shapes=["input_sizes"]),
    but=_LISTS,
)  # fmt: skip
