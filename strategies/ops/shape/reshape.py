"""Views by shape: which dims of the old shape make which dims of the new one.

Both shapes are factored, from the left, into groups of dims with one product; dims of size one belong to none.  The
first dim of a group is the slowest to change, so a piece of it is a piece of the first dim of the other side, if both
are cut into equal pieces.  Where the group is one dim on either side it is the same dim, and any cut will do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from strategies.ops.lib.dim_maps import mapped, pending
from strategies.ops.lib.overload_variants import with_variants
from strategies.ops.semantics.rulebook import Ask, Entry, Line, rules

FAMILY = "views"


@dataclass(frozen=True, slots=True)
class Group:
    """Dims of the old shape and of the new one that hold the same elements."""

    before: tuple[int, ...]
    after: tuple[int, ...]

    @property
    def same(self) -> bool:
        return len(self.before) == len(self.after) == 1


def groups(before: Sequence[int], after: Sequence[int]) -> Iterator[Group]:
    """The smallest groups of two shapes with equally many elements, not none; dims of size one are in no group.

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
        yield Group(tuple(left), tuple(right))


def reshaped(ask: Ask) -> Iterator[Line]:
    """The lines of a view of another shape.

    The one row of a dim of size one is whole on one rank, and may be the one row of any other such dim; and nothing
    may be cut anywhere.
    """
    yield from pending(ask, [0])
    before, result = ask.tensors[0].shape, ask.outputs[0]
    after = result.shape if result is not None else ()
    if 0 in before:
        yield from mapped(ask, [(old, new) for old in range(len(before)) for new in range(len(after))])
        return
    for group in groups(before, after):
        yield from mapped(ask, [(group.before[0], group.after[0])], "any" if group.same else "even")
    ones = [[dim for dim, size in enumerate(shape) if size == 1] for shape in (before, after)]
    yield from mapped(ask, [(old, new) for old in ones[0] for new in ones[1]])


def retyped(ask: Ask) -> Iterator[Line]:
    """The lines of a view of another dtype.  Its bits are no sum of anybody's; only the last dim changes its size."""
    given, result = ask.tensors[0], ask.outputs[0]
    if result is None:
        return
    yield from pending(ask, [0])
    same = given.dtype.itemsize == result.dtype.itemsize
    last = given.ndim - 1
    yield from mapped(ask, [(dim, dim) for dim in range(last)])
    yield from mapped(ask, [(last, last)] if last >= 0 else [], "any" if same else "even")


_GROUPS = "both shapes factor into groups, and the first dim of a group is the first dim of the other side"
_VIEWS = ("aten.view.default", "aten._unsafe_view.default", "aten._reshape_copy.default", "aten.reshape.default")

RULES: tuple[Entry, ...] = with_variants(
    (
        *rules(FAMILY, _GROUPS, _VIEWS[:3], reshaped, shapes=["size"]),
        *rules(FAMILY, _GROUPS, _VIEWS[3:], reshaped, shapes=["shape"]),
        *rules(FAMILY, "bits change their meaning within an element of the larger dtype", ["aten.view.dtype"], retyped),
    )
)
