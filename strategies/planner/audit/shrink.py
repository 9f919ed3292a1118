"""Shrinking of pairs: one axis less, a smaller size, Replicate in place of a shard.

The caller tests whether such a pair still fails; here it only has to be a pair that torch defines.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch.distributed.tensor import Partial, Shard
from torch.distributed.tensor.placement_types import Placement

from localtensor.errors import LocalTensorError
from localtensor.layout import Mesh, Spec, StridedShard, placements_in_order, shard_cut, shorts
from strategies.base.shrink import Shrunk, shrink
from strategies.planner.audit.pairs import NoDTensorPlan, Pair, as_dtensor_reads, dtensor_plan, is_defined_by_torch
from strategies.planner.audit.rank_run import is_public
from strategies.planner.steps.alpha_beta import REPLICATE

MOST_ROWS = 16
"""Every smaller size of a dim is tried up to this one: uneven pieces may fail for 7 rows, say, and for no fewer."""
_DTYPES = (torch.float64, torch.float32, torch.int64, torch.bool, torch.complex64)


def complexity(pair: Pair) -> tuple[object, ...]:
    """The complexity of a pair: the smaller, the simpler to read. Pairs that users can request come first."""
    both = (*pair.src.placements, *pair.dst.placements)
    moved = sum(was != now for was, now in zip(pair.src.placements, pair.dst.placements, strict=True))
    return (
        len(pair.mesh.sizes), not is_public(pair.src, pair.dst), sum(p != REPLICATE for p in both),
        sum(isinstance(p, StridedShard) for p in both) + sum(len(s.shard_order) for s in (pair.src, pair.dst)), moved,
        len(pair.flattened), len(pair.src.shape), _DTYPES.index(pair.src.dtype) if pair.src.dtype in _DTYPES else 9,
        pair.mesh.ranks, pair.mesh.sizes, torch.Size(pair.src.shape).numel() == 0, sum(pair.src.shape), pair.src.shape,
        sum(isinstance(p, Partial) and p.reduce_op != "sum" for p in both), shorts(both), repr(pair),
    )  # fmt: skip


def simpler_pairs(pair: Pair, mode: str) -> Iterator[Pair]:
    """Every simpler pair that one edit yields, the largest edits first."""
    seen = {(pair.mesh, repr(pair))}
    edits = (_without_an_axis, _plainer, _simpler_placements, _smaller_shapes, _smaller_meshes, _swapped_axes)
    for found in itertools.chain(_parts_of_plan(pair, mode), *(edit(pair) for edit in edits)):
        if found is not None and (found.mesh, repr(found)) not in seen and complexity(found) < complexity(pair):
            seen.add((found.mesh, repr(found)))
            yield found


def _pair_or_none(src: Spec, dst: Spec, flattened: Sequence[tuple[str, ...]]) -> Pair | None:
    both = zip(src.placements, dst.placements, strict=True)
    turned = any(isinstance(a, Partial) and isinstance(b, Partial) and a != b for a, b in both)
    if not (is_defined_by_torch(src) and is_defined_by_torch(dst)) or src == dst or turned:
        return None
    return Pair(src, dst, tuple(names for names in flattened if len(names) > 1))


_BOTH, _EACH = (True, True), ((True, False), (False, True))
"""Whether the source is edited, and whether the destination."""


def _edited(pair: Pair, change: Callable[[Spec], Spec], sides: tuple[bool, bool] = _BOTH) -> Pair | None:
    try:
        src, dst = (change(spec) if asked else spec for spec, asked in zip((pair.src, pair.dst), sides, strict=True))
        return _pair_or_none(src, dst, pair.flattened)
    except (LocalTensorError, IndexError, ValueError, KeyError):
        return None


def _parts_of_plan(pair: Pair, mode: str) -> Iterator[Pair | None]:
    """Single steps of DTensor's own plan, and the redistributions from or to an intermediate spec of it."""
    plan = dtensor_plan(pair.src, pair.dst, mode, flattened=pair.flattened)
    if isinstance(plan, NoDTensorPlan) or len(plan.steps) < 2:
        return
    for step in plan.steps:
        yield _pair_or_none(step.was, step.now, pair.flattened)
    for step in plan.steps:
        yield _pair_or_none(step.was, pair.dst, pair.flattened)
        yield _pair_or_none(pair.src, step.now, pair.flattened)


def _without_an_axis(pair: Pair) -> Iterator[Pair | None]:
    axes = range(len(pair.mesh.sizes))
    for axis in axes if len(axes) > 1 else ():
        yield _pair_on_axes(pair, [other for other in axes if other != axis])


def _pair_on_axes(pair: Pair, kept: Sequence[int]) -> Pair | None:
    """The pair on a mesh of these of its axes, in this order."""
    mesh = Mesh.of(*(pair.mesh.sizes[axis] for axis in kept))
    named = {pair.mesh.names[axis]: name for axis, name in zip(kept, mesh.names, strict=True)}
    flattened = [tuple(sorted(named[n] for n in names if n in named)) for names in pair.flattened]
    src, dst = (_spec_on_axes(spec, kept, mesh) for spec in (pair.src, pair.dst))
    return _pair_or_none(src, dst, flattened)


def _spec_on_axes(spec: Spec, kept: Sequence[int], mesh: Mesh) -> Spec:
    own = as_dtensor_reads(spec)
    cuts = [(dim, [axis for axis in own.cut_by(dim) if axis in kept]) for dim in range(len(spec.shape))]
    orders = tuple((dim, tuple(map(kept.index, axes))) for dim, axes in cuts if axes)
    made = Spec(mesh, tuple(own.placements[axis] for axis in kept), spec.shape, spec.dtype, orders)
    return made if own is spec else strided(made)


def strided(spec: Spec) -> Spec:
    """The spec with its shard orders written as strided shards, which the public API accepts."""
    placements = list(spec.placements)
    for dim, axes in spec.shard_order:
        for axis, placement in placements_in_order(dim, axes, spec.mesh.sizes).items():
            placements[axis] = placement
    return replace(spec, placements=tuple(placements), shard_order=())


def _plainer(pair: Pair) -> Iterator[Pair | None]:
    """No submesh, no shard order, the plainest dtype, or a shard order as strided shards."""
    if pair.flattened:
        yield replace(pair, flattened=())
    for dtype in _DTYPES:
        yield _edited(pair, partial(replace, dtype=dtype))
    yield _edited(pair, strided)
    for change in (strided, partial(replace, shard_order=())):
        for side in _EACH:
            yield _edited(pair, change, side)


def _simpler_placements(pair: Pair) -> Iterator[Pair | None]:
    """Another placement on one axis: Replicate, a plain shard, a sum; or the placement of the other side."""
    for axis in range(len(pair.mesh.sizes)):
        for now in (REPLICATE, *_simpler_than(pair.src, axis), *_simpler_than(pair.dst, axis)):
            for sides in (_BOTH, *_EACH):
                yield _edited(pair, partial(_with_placement, axis=axis, now=now), sides)


def _simpler_than(spec: Spec, axis: int) -> list[Placement]:
    held = spec.placements[axis]
    if isinstance(held, Partial):
        return [Partial("sum"), held]
    cut = shard_cut(held)
    return [Shard(0), Shard(cut[0]), StridedShard(cut[0], split_factor=2)] if cut is not None else []


def _with_placement(spec: Spec, axis: int, now: Placement) -> Spec:
    placements = tuple(now if i == axis else p for i, p in enumerate(spec.placements))
    orders = tuple((dim, axes) for dim, axes in spec.shard_order if axis not in axes)
    return Spec(spec.mesh, placements, spec.shape, spec.dtype, orders)


def _smaller_shapes(pair: Pair) -> Iterator[Pair | None]:
    """One dim less, or a smaller one, or two dims swapped."""
    shape = pair.src.shape
    for dim in range(len(shape)) if len(shape) > 1 else ():
        yield _edited(pair, partial(_remove_dim, dim=dim))
    for dim, size in enumerate(shape):
        for less in sorted({*range(min(size, MOST_ROWS)), size - 1} - {size, -1}):
            yield _edited(pair, partial(replace, shape=(*shape[:dim], less, *shape[dim + 1 :])))
    for one, other in itertools.combinations(range(len(shape)), 2):
        yield _edited(pair, partial(_swap_dims, one=one, other=other))


def _remove_dim(spec: Spec, dim: int) -> Spec:
    if spec.cut_by(dim):
        raise ValueError("it is cut")
    moved = {d: d - (d > dim) for d in range(len(spec.shape))}
    return _renumber_dims(spec, moved, tuple(s for d, s in enumerate(spec.shape) if d != dim))


def _swap_dims(spec: Spec, one: int, other: int) -> Spec:
    moved = {d: d for d in range(len(spec.shape))} | {one: other, other: one}
    return _renumber_dims(spec, moved, tuple(spec.shape[moved[d]] for d in range(len(spec.shape))))


def _renumber_dims(spec: Spec, moved: dict[int, int], shape: tuple[int, ...]) -> Spec:
    def of(p: Placement) -> Placement:
        if isinstance(p, StridedShard):
            return StridedShard(moved[p.dim], split_factor=p.split_factor)
        return Shard(moved[p.dim]) if isinstance(p, Shard) else p

    orders = tuple(sorted((moved[dim], axes) for dim, axes in spec.shard_order))
    return Spec(spec.mesh, tuple(map(of, spec.placements)), shape, spec.dtype, orders)


def _smaller_meshes(pair: Pair) -> Iterator[Pair | None]:
    """A smaller axis; strided shards that encode an order are encoded again for the new size."""
    for axis, size in enumerate(pair.mesh.sizes):
        for less in range(2, size):
            mesh = Mesh.of(*(less if i == axis else s for i, s in enumerate(pair.mesh.sizes)))
            yield _edited(pair, partial(_on_mesh, mesh=mesh))


def _on_mesh(spec: Spec, mesh: Mesh) -> Spec:
    own = as_dtensor_reads(spec)
    moved = replace(own, mesh=mesh)
    return moved if own is spec else strided(moved)


def _swapped_axes(pair: Pair) -> Iterator[Pair | None]:
    axes = range(len(pair.mesh.sizes))
    for one, other in itertools.combinations(axes, 2):
        place = {one: other, other: one}
        yield _pair_on_axes(pair, [place.get(axis, axis) for axis in axes])


def shrink_pair(pair: Pair, mode: str, shows: Callable[[Pair], bool], *, tries: int = 400) -> Shrunk[Pair]:
    """The simplest pair reachable by edits each of which still fails."""
    return shrink(pair, shows, budget=tries, stages=[("edits", partial(simpler_pairs, mode=mode))])
