"""Random redistributions: source, destination, tensor and mesh as values, without tensors.

The result is the same for a seed and a number in any process, on any platform: Python guarantees this for its own
generator, seeded by a string. Rare cases are frequent: sizes that do not divide, are smaller than the mesh, 1 or 0;
several axes on one dim, in any order; strided shards; partial values of every kind that the dtype has.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from localtensor.layout import PARTIAL_KINDS, Mesh, Spec, StridedShard, is_unambiguous, shard_cut
from localtensor.layout.spec import ShardOrder
from strategies.planner.steps.alpha_beta import partials_commute
from strategies.planner.steps.legal_steps import why_not_made

DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip
_AXES = (1, 1, 2, 2, 2, 3, 3, 3)
"""The number of mesh axes; it is four in one of fifty cases."""
_DIMS = (0, 1, 1, 1, 2, 2, 2, 3)
_SIZES = (0, 1, 1, 2, 3, 3, 4, 5, 6, 7, 8, 9)
_ELEMENTS = 512
"""The largest number of elements of a tensor."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """One redistribution, and the world it runs in."""

    seed: int
    number: int
    src: Spec
    dst: Spec
    flattened: tuple[tuple[str, ...], ...] = ()
    """Sets of mesh axes for which there is one group of all their ranks."""
    outside: int = 0
    """The number of ranks of the world that are not in the mesh; they have the highest numbers."""

    @property
    def replay(self) -> str:
        """Seed and number, which reproduce this one."""
        return f"{self.seed}/{self.number}"

    @property
    def world(self) -> int:
        return self.src.mesh.ranks + self.outside

    def __str__(self) -> str:
        turns = "".join(f", {'+'.join(names)} flattened" for names in self.flattened)
        return f"{self.replay}: {self.src} -> {self.dst}{turns}"


def draw(seed: int, count: int, *, first: int = 0, ranks: int = 24, axes: int = 4) -> Iterator[Drawn]:
    """`count` redistributions, from number `first` on, on meshes of at most `ranks` ranks and `axes` axes.

    >>> [str(one) for one in draw(0, 1)] == [str(one) for one in draw(0, 1)]
    True
    """
    for number in range(first, first + count):
        yield drawn(seed, number, ranks=ranks, axes=axes)


def drawn(seed: int, number: int, *, ranks: int = 24, axes: int = 4) -> Drawn:
    """The redistribution with this number; it does not depend on the others."""
    rng = random.Random(f"redistribution {seed}/{number}")
    mesh = _mesh(rng, ranks, axes)
    dtype = rng.choice(DTYPES)
    shape = _shape(rng, mesh)
    kinds = _kinds(rng, dtype)
    src = _spec(rng, mesh, shape, dtype, kinds, None)
    dst = _spec(rng, mesh, shape, dtype, kinds if rng.random() < 0.5 else _kinds(rng, dtype), src)
    if dst == src:  # most of these are of one axis; those that stay so after this are few enough
        dst = _spec(rng, mesh, shape, dtype, kinds, src)
    flattened = [tuple(sorted(rng.sample(mesh.names, rng.randint(2, len(mesh.names))), key=mesh.names.index))
                 for _ in range(rng.choice((0, 0, 1, 2))) if len(mesh.names) > 1]  # fmt: skip
    return Drawn(seed, number, src, dst, tuple(dict.fromkeys(flattened)), rng.choice((0, 0, 0, 0, 0, 0, 1, 2)))


def _mesh(rng: random.Random, ranks: int, axes: int) -> Mesh:
    count = min(axes, 4 if rng.random() < 0.02 else rng.choice(_AXES))
    sizes: list[int] = []
    for _ in range(count):
        room = max(1, min(5, ranks // math.prod(sizes)))
        sizes.append(rng.choice([size for size in (1, 2, 2, 2, 3, 3, 4, 5) if size <= room]))
    rng.shuffle(sizes)
    return Mesh.of(*sizes)


def _shape(rng: random.Random, mesh: Mesh) -> tuple[int, ...]:
    """Sizes of all kinds, with frequent ones that divide evenly, or just miss it."""
    count, shape = 4 if rng.random() < 0.05 else rng.choice(_DIMS), list[int]()
    for _ in range(count):
        some = math.prod(rng.sample(mesh.sizes, rng.randint(1, len(mesh.sizes))))
        size = rng.choice((rng.choice(_SIZES), some, 2 * some, max(0, some - 1), some + 1))
        shape.append(min(size, max(1, _ELEMENTS // max(1, math.prod(shape)))))
    return tuple(shape)


def _kinds(rng: random.Random, dtype: torch.dtype) -> tuple[str, ...]:
    """The kinds of Partial of one layout: a single one, or sums and averages."""
    offered = [kind for kind in PARTIAL_KINDS if is_unambiguous(kind, dtype)]
    mixed = partials_commute(Partial("sum"), Partial("avg"), dtype) and rng.random() < 0.35
    return ("sum", "avg") if mixed else (rng.choice(offered),)


def _spec(
    rng: random.Random, mesh: Mesh, shape: tuple[int, ...], dtype: torch.dtype, kinds: Sequence[str], src: Spec | None
) -> Spec:
    """A layout. No axis changes its kind of Partial from `src`, or becomes partial where no step can do this."""
    nested = rng.randrange(len(shape)) if shape and rng.random() < 0.4 else None
    placements: list[Placement] = []
    for axis in range(len(mesh.sizes)):
        was = src.placements[axis] if src is not None else None
        found = _placement(rng, shape, kinds, nested)
        kind = found.reduce_op if isinstance(found, Partial) and src is not None and found != was else ""
        never = kind and (isinstance(was, Partial) or why_not_made(kind, dtype, cut=False))
        placements.append(Replicate() if never else found)
    spec = Spec(mesh, tuple(placements), shape, dtype)
    return Spec(mesh, spec.placements, shape, dtype, _order(rng, spec))


def _placement(rng: random.Random, shape: tuple[int, ...], kinds: Sequence[str], nested: int | None) -> Placement:
    what = rng.random()
    if what < 0.25:
        return Replicate()
    if what < 0.45 or not shape:
        return Partial(rng.choice(kinds))
    dim = nested if nested is not None and rng.random() < 0.8 else rng.randrange(len(shape))
    return StridedShard(dim, split_factor=rng.choice((2, 2, 3, 4, 5))) if what > 0.85 else Shard(dim)


def _order(rng: random.Random, spec: Spec) -> ShardOrder:
    """A shard order, in some cases other than from left to right, for a dim that several axes shard."""
    found = []
    for dim in sorted({cut[0] for cut in map(shard_cut, spec.placements) if cut is not None}):
        axes = list(spec.cut_by(dim))
        if len(axes) > 1 and rng.random() < 0.5:
            rng.shuffle(axes)
            found.append((dim, tuple(axes)))
    return tuple(found)
