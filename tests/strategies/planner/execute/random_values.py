"""Tensors for a drawn redistribution, and whether what came of them is right: to the bit, or to the value.

Numbers are small integers, also in floats, so that sums are exact in any order.  Pending reductions are adversaries
(`localtensor.layout.partial_splits`): parts of a sum cancel, another rank holds the maximum of each element.  Where it means
something there are NaN, infinities and -0.0 among the floats.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate
from torch.distributed.tensor.placement_types import Placement

from localtensor.layout import shards
from localtensor.layout.partial_splits import partial_values
from localtensor.layout.spec import Spec
from tests.strategies.planner.execute.random_specs import Drawn

_SPECIAL = (math.nan, math.inf, -math.inf, -0.0)


def held_of(one: Drawn) -> list[Tensor]:
    """What every rank of the mesh holds before, by rank number; the same for a seed and a number.

    Together they are a tensor of integers from -3 to 3 (0 to 3, False or True), with NaN, infinities and -0.0 among
    floats where no product or average is pending.
    """
    rng = torch.Generator().manual_seed(one.seed * 1_000_003 + one.number)
    x = _numbers(one.src, rng)
    means = [size for size, p in zip(one.src.mesh.sizes, one.src.placements, strict=True) if _kind(p) == "avg"]
    kinds = {_kind(p) for p in (*one.src.placements, *one.dst.placements)}
    if not kinds & {"avg", "product"}:
        x = _with_specials(x, rng)
    scale = math.prod(means)
    x = x * scale if means and x.dtype.itemsize > 2 else x

    def cut(x: Tensor, placement: Placement, ranks: int) -> Sequence[Tensor]:
        if not isinstance(placement, Partial):
            return shards.split_axis(x, placement, ranks)
        return list(_parts(x, placement.reduce_op, ranks, rng, scale).unbind())

    return shards.in_rank_order(shards.split_by_axes(x, *shards.in_axis_order(one.src), cut), one.src)


def _kind(placement: Placement) -> str:
    return placement.reduce_op if isinstance(placement, Partial) else ""


def _numbers(spec: Spec, rng: torch.Generator) -> Tensor:
    def some(low: int) -> Tensor:
        return torch.randint(low, 4, spec.shape, generator=rng)

    if spec.dtype == torch.bool:
        return some(0) > 1
    if spec.dtype.is_complex:
        return torch.complex(some(-3).double(), some(-3).double()).to(spec.dtype)
    return some(-3 if spec.dtype.is_signed else 0).to(spec.dtype)


def _with_specials(x: Tensor, rng: torch.Generator) -> Tensor:
    if not x.dtype.is_floating_point:
        return x  # complex infinities do not even survive that torch adds zero to them
    which = torch.randint(0, 16, x.shape, generator=rng)
    for number, special in enumerate(_SPECIAL):
        x = x.masked_fill(which == number, special)
    return x


def _parts(x: Tensor, kind: str, ranks: int, rng: torch.Generator, scale: int) -> Tensor:
    """Parts of x, in x's dtype, that fold into x exactly, in any order of the axes and ranks."""
    divides = x.dtype.is_floating_point or x.dtype.is_complex
    narrow = divides and x.dtype.itemsize == 2
    if not divides or kind not in ("sum", "avg"):
        return partial_values(x, kind, ranks, rng, sparse=narrow)
    noise = _noise(x, ranks, rng, narrow) * (0 if narrow and scale > 1 else 1 if narrow else scale)
    if kind == "avg":  # each average of some of the axes is to be a whole number, too; two bytes have no room for that
        return x.expand(ranks, *x.shape).clone() if narrow else noise + x
    owner = torch.randint(0, ranks if scale == 1 or not narrow else 1, x.shape, generator=rng)
    here = owner == torch.arange(ranks).view(-1, *[1] * x.dim())
    return torch.where(here, noise + x, noise)


def _noise(x: Tensor, ranks: int, rng: torch.Generator, narrow: bool) -> Tensor:
    """Whole numbers of which those of all ranks add up to zero."""

    def real() -> Tensor:
        if narrow:  # 256 is the largest that bfloat16 counts to
            some = torch.randint(-1, 2, (ranks - 1, *x.shape), generator=rng)
            return torch.cat([some, -some.sum(0, keepdim=True)]).to(x.dtype)
        return partial_values(torch.zeros(x.shape, dtype=torch.int64), "sum", ranks, rng).double()

    return torch.complex(real().double(), real().double()).to(x.dtype) if x.dtype.is_complex else real().to(x.dtype)


# -- judged


def wrong(one: Drawn, held: Sequence[Tensor], got: Sequence[Tensor]) -> str:
    """What is wrong with `got`, which all ranks hold after; empty if nothing is.

    Right is what `split(assemble(held, src), dst)` says: every rank's piece, to the bit where nothing was reduced; and
    where a reduction is pending afterwards, that replicas are equal, and that all together is the same tensor.
    """
    if len(got) != one.dst.mesh.ranks:
        return f"{len(got)} tensors for {one.dst.mesh.ranks} ranks"
    for rank, (x, shape) in enumerate(zip(got, shards.local_shapes(one.dst), strict=True)):
        if tuple(x.shape) != shape or x.dtype != one.dst.dtype:
            return f"rank {rank} holds {x.dtype} of shape {tuple(x.shape)}, and {one.dst} gives it {shape}"
    whole = shards.assemble(held, one.src)
    reduced = any(map(_kind, one.src.placements))
    if any(map(_kind, one.dst.placements)):
        for rank, twin in _replicas(one.dst):
            if not same(got[rank], got[twin], bits=True):
                return f"ranks {rank} and {twin}, which are replicas, differ: {got[rank]}, {got[twin]}"
        total = shards.assemble(got, one.dst)
        return "" if same(total, whole, bits=False) else f"all together hold {total}, and before {whole}"
    for rank, (x, want) in enumerate(zip(got, shards.split(whole, one.dst), strict=True)):
        if not same(x, want, bits=not reduced):
            return f"rank {rank} holds {x}, and is to hold {want}"
    return ""


def same(one: Tensor, other: Tensor, *, bits: bool) -> bool:
    """Whether they hold the same; NaN is NaN, and -0.0 is 0.0 unless the bits count."""
    if one.is_complex():
        one, other = torch.view_as_real(one.resolve_conj()), torch.view_as_real(other.resolve_conj())
    if not one.dtype.is_floating_point:
        return torch.equal(one, other)
    numbers = (one == other) & (one.signbit() == other.signbit()) if bits else one == other
    return bool((numbers | (one.isnan() & other.isnan())).all())


def _replicas(spec: Spec) -> list[tuple[int, int]]:
    """For each rank another one that holds the same: the first along all axes that replicate."""
    alike = [isinstance(p, Replicate) for p in spec.placements]
    found = []
    for at in itertools.product(*map(range, spec.mesh.sizes)):
        first = tuple(0 if same else place for same, place in zip(alike, at, strict=True))
        if first != at:
            found.append((spec.mesh.rank(at), spec.mesh.rank(first)))
    return found
