"""The choices of Hypothesis: few small numbers for each value, the simplest first, so that counterexamples shrink well.

Each function takes Hypothesis' `draw` and returns a value; the strategies in `draws` wrap them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import assume
from hypothesis import strategies as st
from torch.distributed.tensor import Partial

from localtensor.layout.mesh import Mesh
from localtensor.layout.shards import Layout, placements_in_order
from localtensor.layout.spec import ShardOrder, Spec, StridedShard
from localtensor.testing.hypothesis_strategies import layouts as options
from localtensor.testing.hypothesis_strategies.op_calls import OpCall, full_names, sample_count, supports_dtype

Draw = Callable[[st.SearchStrategy[Any]], Any]
Place = Callable[[Draw, Sequence[Any]], Any]
"""Draws the placement on an axis, given those on the axes before it."""
MOST_SEED = 999
"""Seeds are short; a thousand suffice for one shape and pattern."""
SEEDS = st.integers(0, MOST_SEED)


@functools.lru_cache(4096)
def one_of(values: tuple[Any, ...]) -> st.SearchStrategy[Any]:
    """One of the values; cached, since making a strategy costs more than drawing from it."""
    return st.sampled_from(values)


@functools.lru_cache(64)
def sizes(largest: int) -> st.SearchStrategy[int]:
    """The size of one dim; an empty dim comes last, so that only failures that need it shrink to it."""
    return one_of((*range(1, largest + 1), 0))


@dataclass(frozen=True, slots=True)
class MeshOptions:
    """Options of meshes: ranges of ranks and axes, and the names of the axes."""

    ranks: tuple[int, int]
    axes: tuple[int, int]
    names: tuple[str, ...]

    def mesh(self, draw: Draw) -> Mesh:
        return self.placed(draw, lambda draw, before: None)[0]

    def placed(self, draw: Draw, place: Place) -> tuple[Mesh, tuple[Any, ...]]:
        """A mesh, and the result of `place` for each axis; the draws of one axis are adjacent, so that any can be dropped."""
        ranks = draw(one_of(options.ranks_between(*self.ranks)))
        many = draw(one_of(tuple(range(self.axes[0], self.axes[1] + 1))))
        sizes: list[int] = []
        found: list[Any] = []
        for axis in range(many):
            left = (self.ranks[0], ranks, math.prod(sizes))
            size, placement = draw(_axis(left, axis == many - 1, place, tuple(found)))
            sizes.append(size)
            found.append(placement)
        return Mesh(tuple(sizes), self.names[:many]), tuple(found)


@st.composite
def _axis(draw: Draw, left: tuple[int, int, int], last: bool, place: Place, found: Sequence[Any]) -> tuple[int, Any]:
    size = left[1] // left[2] if last else draw(one_of(options.sizes_left(*left, draw(one_of(options.HALVES)))))
    return size, place(draw, found)


@dataclass(frozen=True, slots=True)
class ShapeOptions:
    """Options of shapes: a fixed one, or the range of dims and the largest size."""

    fixed: tuple[int, ...] | None
    dims: tuple[int, int]
    largest: int

    @property
    def most(self) -> int:
        """The largest number of dims."""
        return self.dims[1] if self.fixed is None else len(self.fixed)

    def ndim(self, draw: Draw, least: int = 0) -> int:
        if self.fixed is not None:
            return len(self.fixed)
        return int(draw(one_of(tuple(range(max(least, self.dims[0]), self.dims[1] + 1)))))

    def of(self, draw: Draw, ndim: int) -> tuple[int, ...]:
        if self.fixed is not None:
            return self.fixed
        return tuple(draw(sizes(self.largest)) for _ in range(ndim))


@dataclass(frozen=True, slots=True)
class SpecOptions:
    """Options of specs: meshes (or one), shapes, dtypes, kinds of placement, with shard orders or without."""

    meshes: MeshOptions | Mesh
    shapes: ShapeOptions
    dtypes: tuple[torch.dtype, ...]
    kinds: tuple[str, ...]
    orders: bool = False

    def spec(self, draw: Draw) -> Spec:
        dtype = draw(one_of(self.dtypes))
        ndim = self.shapes.ndim(draw, least=0 if options.placement_options(0, dtype, self.kinds) else 1)
        place = functools.partial(_place, ndim, dtype, self.kinds, self.shapes.most)
        if isinstance(self.meshes, Mesh):
            mesh, placed = self.meshes, layout(draw, self.meshes.sizes, place)
        else:
            mesh, placed = self.meshes.placed(draw, place)
        placed = with_cut_order(draw, placed, mesh.sizes, self.kinds)
        shape = self.shapes.of(draw, ndim)
        placed = options.unambiguous_layout(placed, shape, dtype, mesh.sizes)
        return Spec(mesh, placed, shape, dtype, shard_order(draw, placed) if self.orders else ())


def _place(
    ndim: int, dtype: torch.dtype | None, kinds: tuple[str, ...], most: int, draw: Draw, before: Sequence[Any]
) -> object:
    """A placement for the next axis; kinds of Partial that do not mix are not mixed."""
    pending = next((p.reduce_op for p in before if isinstance(p, Partial)), "")
    return draw(one_of(options.aligned_options(ndim, dtype, kinds, pending, most)))


def layout(draw: Draw, mesh: tuple[int, ...], place: Place) -> Layout:
    """The result of `place` for each axis."""
    found: list[Any] = []
    for _ in mesh:
        found.append(place(draw, found))
    return tuple(found)


def with_cut_order(draw: Draw, placed: Layout, mesh: tuple[int, ...], kinds: tuple[str, ...]) -> Layout:
    """The layout, or one with a shared dim that the axes cut in another order than from left to right."""
    others = options.other_cut_orders(placed) if "SS" in kinds else ()
    order = draw(one_of((None, *others))) if others else None
    cut = {} if order is None else placements_in_order(order[0], order[1], mesh)
    return tuple(cut.get(axis, placement) for axis, placement in enumerate(placed))


def shard_order(draw: Draw, placed: Layout) -> ShardOrder:
    """For each dim that plain shards of several axes cut, an order of these axes: left to right, or another."""
    others: dict[int, list[tuple[int, ...]]] = {}
    strided = {placement.dim for placement in placed if isinstance(placement, StridedShard)}
    for dim, order in options.other_cut_orders(placed):
        others.setdefault(dim, []).append(order)
    drawn = ((dim, draw(one_of((None, *of_dim)))) for dim, of_dim in others.items() if dim not in strided)
    return tuple((dim, order) for dim, order in drawn if order is not None)


def layouts(
    mesh: Mesh, shape: tuple[int, ...], dtype: torch.dtype, kinds: tuple[str, ...]
) -> st.SearchStrategy[Layout]:
    """The layouts of a tensor of that shape and dtype on that mesh."""
    place = functools.partial(_place, len(shape), dtype, kinds, len(shape))

    @st.composite
    def drawn(draw: Draw) -> Layout:
        placed = with_cut_order(draw, layout(draw, mesh.sizes, place), mesh.sizes, kinds)
        return options.unambiguous_layout(placed, shape, dtype, mesh.sizes)

    return drawn()


def representable_patterns(patterns: tuple[str, ...], spec: Spec) -> tuple[str, ...]:
    """The patterns that the spec can represent: the largest number is no average of numbers that can be added."""
    averages = any(isinstance(p, Partial) and p.reduce_op == "avg" for p in spec.placements)
    return tuple(p for p in patterns if p != "extremes" or not averages) or ("normal",)


def schedule(draw: Draw) -> str:
    """The text of a schedule."""
    policy = draw(one_of(("round_robin", "shuffled", "pct")))
    if policy == "round_robin":
        return "round_robin"
    seed = draw(SEEDS)
    return f"shuffled:{seed}" if policy == "shuffled" else f"pct:{seed}:{draw(one_of((1, 2, 3, 4, 5)))}"


def op_calls(names: tuple[str, ...] | None, dtypes: tuple[torch.dtype, ...]) -> st.SearchStrategy[OpCall]:
    """The strategy of `draws.op_calls`; opens torch's database."""
    found = full_names(names, dtypes)

    @st.composite
    def calls(draw: Draw) -> OpCall:
        name = draw(one_of(found))
        dtype = draw(one_of(tuple(dtype for dtype in dtypes if supports_dtype(name, dtype))))
        number, seed = draw(st.integers(0, 11)), draw(one_of((0, 1, 2, 3)))
        many = sample_count(name, dtype, seed)
        assume(many > 0)
        return OpCall(name, dtype, number % many, seed)

    return calls()
