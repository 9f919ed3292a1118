"""Rules of views: by named dims (permute, squeeze, expand ...), by shape, by dtype, and of some elements, with their gradients.

No element changes, so the view of a rank's piece is the piece of the view, and every reduction commutes with it.

A view by shape factors both shapes, from the left, into groups of dims with equal products, without dims of size one.
The first dim of a group is the slowest to change, so a piece of it is a piece of the first dim of the other side if
both are cut into equal pieces.  A group of one dim on either side is the same dim, and may be sharded at any size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from torch.distributed.tensor import Shard

from strategies.model.rule import Call
from strategies.ops.lib.elementwise import (
    KINDS,
    LINEAR,
    dim_map_rules,
    dims_after_removal,
    partial_rules,
    unchanged_dims,
)
from strategies.ops.lib.overload_variants import with_variants
from strategies.ops.semantics.rule_registry import OpRule, PlacementRule, RuleQuery, overload_exists, rules

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

_SLICE_RULES = with_variants(
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


Dims = Iterable[tuple[int, int]]


def view_rule(dims: Callable[[RuleQuery], Dims]) -> Callable[[RuleQuery], Iterator[PlacementRule]]:
    """The rule of a view, from its pairs of a dim and the dim of the result that it becomes."""

    def lines(query: RuleQuery) -> Iterator[PlacementRule]:
        yield from partial_rules(query, [0])
        yield from dim_map_rules(query, dims(query))

    lines.__wrapped__ = dims  # type: ignore[attr-defined]
    return lines


def same(query: RuleQuery) -> Dims:
    return unchanged_dims(query.tensors[0].ndim)


def permuted(query: RuleQuery) -> Dims:
    return [(dim, place) for place, dim in enumerate(query.dims("dims"))] if query["dims"] else []


def transposed(query: RuleQuery) -> Dims:
    """`t` has no arguments: it swaps the dims of a matrix, and leaves vectors as they are."""
    ndim = query.tensors[0].ndim
    named = [name for name in ("dim0", "axis0") if name in query.arguments]
    one, other = (query[named[0]], query[named[0].replace("0", "1")]) if named else (0, ndim - 1)
    swap = {one % max(ndim, 1): other % max(ndim, 1), other % max(ndim, 1): one % max(ndim, 1)}
    return [(dim, swap.get(dim, dim)) for dim in range(ndim)]


def unsqueezed(query: RuleQuery) -> Dims:
    ndim = query.tensors[0].ndim
    new = query["dim"] % (ndim + 1)
    return [(dim, dim + (dim >= new)) for dim in range(ndim)]


def squeezed(query: RuleQuery) -> Dims:
    return dims_after_removal(query.tensors[0].ndim, *_gone(query))


def squeeze_by_dims(query: RuleQuery) -> Call:
    """The call with the squeezed dims of the whole tensor: a rank's piece may have one row where the whole has more."""
    packet, out = query.op.split(".")[1], query.get("out")
    args = (query["self"], _gone(query))
    return Call(f"aten.{packet}.dims_out", args, (("out", out),)) if out else Call(f"aten.{packet}.dims", args)


def _gone(query: RuleQuery) -> list[int]:
    """The squeezed dims: those of size one among the named ones, among all without an argument, none for an empty list."""
    if query.get("dim") in ([], ()) or not query.tensors[0].ndim:
        return []
    return [dim for dim in query.dims("dim") if query.tensors[0].shape[dim] == 1]


def squeeze_rules() -> Iterator[OpRule]:
    """The rules of each squeezing op for lists of dims, one dim, and all dims."""
    given = rules(FAMILY, "dims of size one go", ["aten.squeeze.dims"], view_rule(squeezed), instead=squeeze_by_dims)
    for entry in with_variants(given):
        packet, _, which = entry.op.rpartition(".")
        siblings = which, which.replace("dims", "dim"), which.replace("dims_", "").replace("dims", "default")
        yield from (replace(entry, op=op) for op in (f"{packet}.{name}" for name in siblings) if overload_exists(op))


def expanded(query: RuleQuery) -> Iterator[PlacementRule]:
    """An expanded dim may be sharded while the argument is replicated."""
    yield from partial_rules(query, [0])
    given, result = query.tensors[0], query.outputs[0]
    if result is None:
        return
    new = result.ndim - given.ndim
    grown = [dim for dim, size in enumerate(result.shape) if dim < new or size != given.shape[dim - new]]
    yield from dim_map_rules(query, [(dim - new, dim) for dim in range(new, result.ndim) if dim not in grown])
    yield from (query.line({}, [Shard(dim)]) for dim in grown)


def view_as_real_or_complex(query: RuleQuery) -> Iterator[PlacementRule]:
    """Complex numbers as pairs of real ones: linear, but not multiplicative."""
    fewer = min(query.tensors[0].ndim, *(meta.ndim for meta in query.outputs if meta is not None))
    yield from dim_map_rules(query, [(dim, dim) for dim in range(fewer)])
    of_one_dtype = RuleQuery(query.op, query.arguments, query.tensors, (query.tensors[0],))
    for line in partial_rules(of_one_dtype, [0], LINEAR):
        yield query.line({0: line.outputs[0]}, line.outputs) if line.outputs[0] is not None else line


def negated(query: RuleQuery) -> Iterator[PlacementRule]:
    yield from partial_rules(query, [0], LINEAR)
    yield from dim_map_rules(query, same(query))


_SAME = ("aten.alias", "aten.detach", "aten.lift", "aten.lift_fresh", "prims.view_of")
_MOVED = "the dims change their order"


@dataclass(frozen=True, slots=True)
class DimGroup:
    """Dims of the old shape and of the new one with the same elements."""

    before: tuple[int, ...]
    after: tuple[int, ...]

    @property
    def same(self) -> bool:
        return len(self.before) == len(self.after) == 1


def groups(before: Sequence[int], after: Sequence[int]) -> Iterator[DimGroup]:
    """The smallest groups of two shapes of equally many elements, not zero; dims of size one are in no group.

    >>> [(group.before, group.after) for group in groups((4, 6, 1, 5), (2, 2, 6, 5))]
    [((0,), (0, 1)), ((1,), (2,)), ((3,), (3,))]
    """
    old = [dim for dim, size in enumerate(before) if size != 1]
    new = [dim for dim, size in enumerate(after) if size != 1]
    while old and new:
        left, right = [old.pop(0)], [new.pop(0)]
        while (have := math.prod(before[d] for d in left)) != (want := math.prod(after[d] for d in right)):
            if have < want:
                left.append(old.pop(0))
            else:
                right.append(new.pop(0))
        yield DimGroup(tuple(left), tuple(right))


def reshaped(query: RuleQuery) -> Iterator[PlacementRule]:
    """The rule of a view of another shape.

    The row of a dim of size one may become the row of any other such dim, and empty tensors may be sharded on any dim.
    """
    yield from partial_rules(query, [0])
    before, result = query.tensors[0].shape, query.outputs[0]
    after = result.shape if result is not None else ()
    if 0 in before:
        yield from dim_map_rules(query, [(old, new) for old in range(len(before)) for new in range(len(after))])
        return
    for group in groups(before, after):
        yield from dim_map_rules(query, [(group.before[0], group.after[0])], "any" if group.same else "even")
    ones = [[dim for dim, size in enumerate(shape) if size == 1] for shape in (before, after)]
    yield from dim_map_rules(query, [(old, new) for old in ones[0] for new in ones[1]])


def view_as_dtype(query: RuleQuery) -> Iterator[PlacementRule]:
    """The rule of a view of another dtype, which changes the size of the last dim only.  Bits of partial values do not add."""
    given, result = query.tensors[0], query.outputs[0]
    if result is None:
        return
    yield from partial_rules(query, [0])
    same = given.dtype.itemsize == result.dtype.itemsize
    last = given.ndim - 1
    yield from dim_map_rules(query, [(dim, dim) for dim in range(last)])
    yield from dim_map_rules(query, [(last, last)] if last >= 0 else [], "any" if same else "even")


_GROUPS = "both shapes factor into groups, and the first dim of a group is the first dim of the other side"
_VIEWS = ("aten.view.default", "aten._unsafe_view.default", "aten._reshape_copy.default", "aten.reshape.default")

_VIEW_RULES = with_variants(
    rules(FAMILY, "the same elements", [f"{name}.default" for name in _SAME], view_rule(same)),
    rules(FAMILY, _MOVED, ["aten.permute.default"], view_rule(permuted)),
    rules(FAMILY, _MOVED, ["aten.transpose.int", "aten.t.default", "aten.swapdims.default", "aten.swapaxes.default"],
          view_rule(transposed)),
    rules(FAMILY, "a dim of size one is put in", ["aten.unsqueeze.default"], view_rule(unsqueezed)),
    squeeze_rules(),
    rules(FAMILY, "rows are read again and again", ["aten.expand.default"], expanded, shapes=["size"]),
    rules(FAMILY, "a complex number is two real ones", ["aten.view_as_real.default", "aten.view_as_complex.default"],
          view_as_real_or_complex),
    rules(FAMILY, "each element goes by itself", ["aten._neg_view.default"], negated),
    rules(FAMILY, _GROUPS, _VIEWS[:3], reshaped, shapes=["size"]),
    rules(FAMILY, _GROUPS, _VIEWS[3:], reshaped, shapes=["shape"]),
    rules(FAMILY, "bits change their meaning within an element of the larger dtype",
          ["aten.view.dtype"], view_as_dtype),
)  # fmt: skip
RULES: tuple[OpRule, ...] = (*_VIEW_RULES, *_SLICE_RULES)
