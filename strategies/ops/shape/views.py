"""Rules of views: by named dims (permute, squeeze, expand ...), by shape and by dtype.

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
from strategies.ops.lib.elementwise import LINEAR, dim_map_rules, dims_after_removal, partial_rules, unchanged_dims
from strategies.ops.lib.overload_variants import with_variants
from strategies.ops.semantics.rule_registry import OpRule, PlacementRule, RuleQuery, overload_exists, rules

FAMILY = "views"
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

RULES: tuple[OpRule, ...] = with_variants(
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
