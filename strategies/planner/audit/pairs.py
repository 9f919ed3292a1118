"""Pairs of specs on a given mesh, drawn at random, for DTensor's own redistribution: only such as it can be held to.

A strided shard means what `distribute_tensor` deals, be the pieces even or not.  Several on one dim are drawn only where
they encode an order, and kinds of Partial are mixed only where they commute: torch refuses the others on purpose.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import Partial, Shard
from torch.distributed.tensor.placement_types import Placement

from localtensor.layout.meaning import factors_of, has_meaning, in_order, order_of
from localtensor.layout.mesh import Mesh
from localtensor.layout.partials import agreed
from localtensor.layout.spec import KINDS, Spec, StridedShard, cuts
from strategies.planner.steps.alpha_beta import REPLICATE, commute

SHAPES: tuple[tuple[int, ...], ...] = (
    (8, 8), (8, 8), (12, 12), (7, 6), (5, 3), (9,), (3,), (1, 4), (2, 5), (4, 2, 6), (6, 0), (16,), (13, 2),
)  # fmt: skip
"""Even on most meshes, uneven, shorter than the mesh, of one row, of none."""
DTYPES = (torch.float64, torch.float64, torch.float32, torch.int64, torch.bool, torch.complex64)


@dataclass(frozen=True, slots=True)
class Pair:
    """From where to where, and the sets of axes of which there is a flattened submesh."""

    src: Spec
    dst: Spec
    flattened: tuple[tuple[str, ...], ...] = ()

    @property
    def mesh(self) -> Mesh:
        return self.src.mesh

    def __str__(self) -> str:
        also = "".join(f", {'+'.join(names)} flattened" for names in self.flattened)
        return f"{self.src} -> {str(self.dst).partition(' @ ')[2]} on {self.mesh.sizes}{also}"


def draw_pairs(sizes: Sequence[int], *, seed: int, budget: int) -> Iterator[Pair]:
    """At most `budget` pairs on a mesh of these sizes, no two alike; the same for a seed in any process.

    >>> [str(pair) for pair in draw_pairs((2,), seed=0, budget=1)] == [str(p) for p in draw_pairs((2,), seed=0, budget=1)]
    True
    """
    rng = random.Random(f"plans {seed} {tuple(sizes)}")
    mesh, found = Mesh.of(*sizes), set[str]()
    for _ in range(20 * budget):  # on a mesh of one axis there are not so many
        if len(found) == budget:
            return
        pair = _pair(rng, mesh)
        if pair is not None and repr(pair) not in found:
            found.add(repr(pair))
            yield pair


def _pair(rng: random.Random, mesh: Mesh) -> Pair | None:
    shape, dtype = rng.choice(SHAPES), rng.choice(DTYPES)
    src = _spec(rng, mesh, shape, dtype, None)
    dst = _spec(rng, mesh, shape, dtype, src)
    flattened: tuple[tuple[str, ...], ...] = ()
    if len(mesh.sizes) > 1 and rng.random() < 0.3:
        sets = [names for n in range(2, len(mesh.sizes) + 1) for names in itertools.combinations(mesh.names, n)]
        flattened = (rng.choice(sets),)
    return Pair(src, dst, flattened) if told(src) and told(dst) and src != dst else None


def told(spec: Spec) -> bool:
    """Whether torch says what it means: kinds of Partial that may be mixed, and cuts of a dim of which it knows an order.

    Where strided shards encode an order and the pieces are uneven, torch has two readings of them.  That is no excuse:
    what `distribute_tensor` deals is what a redistribution is given, and has to end at.
    """
    sizes = spec.mesh.sizes
    plain = tuple(Shard(cut[0]) if (cut := cuts(p)) is not None else p for p in spec.placements)
    if not has_meaning(plain, spec.shape, spec.dtype, sizes):
        return False
    factors = [factors_of(spec.placements, dim) for dim in range(len(spec.shape))]
    return all(max(each) <= 1 or sum(map(bool, each)) == 1 or order_of(each, sizes) is not None for each in factors)


def _spec(rng: random.Random, mesh: Mesh, shape: tuple[int, ...], dtype: torch.dtype, src: Spec | None) -> Spec:
    kinds = _kinds(rng, dtype)
    form = rng.choice(("any", "any", "nested", "nested", "strided"))
    beside = [REPLICATE, REPLICATE, *map(Shard, range(len(shape))), *[Partial(kind) for kind in kinds]]
    placements: list[Placement] = [rng.choice(beside) for _ in mesh.sizes]
    dim = rng.randrange(len(shape))
    axes = rng.sample(range(len(mesh.sizes)), rng.randint(min(2, len(mesh.sizes)), len(mesh.sizes)))
    order: tuple[tuple[int, tuple[int, ...]], ...] = ()
    if form == "strided":
        placements = [p if p != Shard(dim) else REPLICATE for p in placements]
        for axis, placement in _cut(rng, dim, axes, mesh).items():
            placements[axis] = placement
    elif form == "nested":
        for axis in axes:
            placements[axis] = Shard(dim)
    for axis, was in enumerate(src.placements if src is not None else ()):
        if isinstance(was, Partial) and isinstance(placements[axis], Partial) and placements[axis] != was:
            placements[axis] = REPLICATE  # no kind of Partial turns into another
    spec = Spec(mesh, tuple(placements), shape, dtype)
    if form == "nested" and rng.random() < 0.4:
        stack = list(spec.cut_by(dim))
        rng.shuffle(stack)
        order = ((dim, tuple(stack)),)
    return Spec(mesh, spec.placements, shape, dtype, order)


def _cut(rng: random.Random, dim: int, axes: Sequence[int], mesh: Mesh) -> dict[int, Placement]:
    """Strided shards that encode an order; or one alone, as views make it."""
    if rng.random() < 0.3:
        return {axes[0]: StridedShard(dim, split_factor=rng.choice((2, 3)))}
    return in_order(dim, axes, mesh.sizes)


def _kinds(rng: random.Random, dtype: torch.dtype) -> tuple[str, ...]:
    offered = [kind for kind in KINDS if agreed(kind, dtype)]
    mixed = commute(Partial("sum"), Partial("avg"), dtype) and rng.random() < 0.2
    return ("sum", "avg") if mixed else (rng.choice(offered),)
