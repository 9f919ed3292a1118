"""Layouts as a finding writes them, and on fewer axes, as the search for a smaller one asks for them.

What a layout means is said in `localtensor.layout.meaning`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from localtensor.layout.meaning import Layout, factors_of, in_order, order_of
from localtensor.layout.spec import cuts, parse

_BETWEEN = re.compile(r", (?![^()]*\))")
"""The commas between placements, and not those within one."""


def read_layout(text: str) -> Layout:
    """The layout that a text stands for: `S(0)` on one axis, `(S(0), R)` on two.  Raises `BadPlacement`.

    >>> read_layout("(S(0), SS(1,2), R)")
    (Shard(dim=0), _StridedShard(dim=1, sf=2), Replicate())
    """
    inner = text[1:-1] if text.startswith("(") else text
    return tuple(parse(part) for part in _BETWEEN.split(inner))


def on_axes(layout: Layout, mesh: Sequence[int], axes: Sequence[int], sizes: Sequence[int]) -> Layout:
    """The layout on some of the axes alone, which now have these sizes; a dim is cut in the order in which it was.

    >>> whole = read_layout("(SS(0,3), S(0))")
    >>> on_axes(whole, (2, 3), (0, 1), (2, 2)), on_axes(whole, (2, 3), (0,), (2,))
    ((_StridedShard(dim=0, sf=2), Shard(dim=0)), (Shard(dim=0),))
    """
    made = [layout[axis] for axis in axes]
    for dim in sorted({cut[0] for cut in map(cuts, layout) if cut is not None}):
        order = order_of(factors_of(layout, dim), mesh)
        left = [axes.index(axis) for axis in order or () if axis in axes]
        for axis, placement in in_order(dim, left, sizes).items():
            made[axis] = placement
    return tuple(made)
