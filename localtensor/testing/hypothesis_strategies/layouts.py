"""Where a drawn tensor may lie: placements for one axis, the simplest first, and other orders of cuts.

What a layout means is said in `localtensor.layout.meaning`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from localtensor.layout.meaning import COMMUTING, Layout, has_meaning
from localtensor.layout.partials import agreed
from localtensor.layout.spec import KINDS as REDUCTIONS
from localtensor.layout.spec import StridedShard

FACTORS = (2, 3)
"""The split factors of a strided shard that stands alone."""


@functools.lru_cache(1024)
def options(ndim: int, dtype: torch.dtype | None, kinds: tuple[str, ...], pending: str = "") -> Layout:
    """All that a tensor of `ndim` dims can be on one axis, the simplest first; `pending` is what it already waits for.

    Of the kinds of Partial those are left out on whose meaning for the dtype nobody agrees.
    """
    found: list[Placement] = [Replicate()] if "R" in kinds else []
    if "S" in kinds:
        found += map(Shard, range(ndim))
    wanted = [kind for kind in REDUCTIONS if "P" in kinds or f"P({kind})" in kinds]
    beside = COMMUTING if pending in COMMUTING else frozenset({pending})
    found += [
        Partial(kind) for kind in wanted if (dtype is None or agreed(kind, dtype)) and (not pending or kind in beside)
    ]
    if "SS" in kinds:
        found += [StridedShard(dim, split_factor=factor) for dim in range(ndim) for factor in FACTORS]
    return tuple(found)


@functools.lru_cache(1024)
def steady(ndim: int, dtype: torch.dtype | None, kinds: tuple[str, ...], pending: str, most: int) -> Layout:
    """The options, each in the place that it has among those of a tensor of `most` dims that can be anything.

    Where another would stand stands the one before it.  So a place means the same if the tensor loses a dim, or gets
    another dtype: counterexamples shrink by one number after the other.

    >>> steady(1, torch.float32, ("R", "S", "P(max)"), "", 3)
    (Replicate(), Shard(dim=0), Shard(dim=0), Shard(dim=0), Partial(max))
    """
    here, found = options(ndim, dtype, kinds, pending), list[Placement]()
    for option in options(most, None, kinds):
        found += [option] if option in here else found[-1:]
    return tuple(found)


def orders(layout: Sequence[Placement]) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Each other order in which several axes may cut the dim that they share: (dim, axes), but for left to right.

    >>> orders((Shard(0), Replicate(), Shard(0)))
    ((0, (2, 0)),)
    """
    shared: dict[int, list[int]] = {}
    for axis, placement in enumerate(layout):
        if isinstance(placement, Shard) and not isinstance(placement, StridedShard):
            shared.setdefault(placement.dim, []).append(axis)
    return tuple((dim, order) for dim, axes in shared.items() for order in list(itertools.permutations(axes))[1:])


def mended(layout: Layout, shape: Sequence[int], dtype: torch.dtype, mesh: Sequence[int]) -> Layout:
    """The layout itself, or with plain shards instead of strided ones that would have two meanings."""
    if has_meaning(layout, shape, dtype, mesh):
        return layout
    return tuple(Shard(p.dim) if isinstance(p, StridedShard) else p for p in layout)
