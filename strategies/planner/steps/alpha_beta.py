"""The latency-bandwidth (alpha-beta) cost model of collectives, and the axis-by-axis redistribution priced by it.

A message of m bytes takes `latency + m * per_byte`. A collective of p ranks takes, following Thakur, Rabenseifner and
Gropp ("Optimization of Collective Communication Operations in MPICH", IJHPCA 19(1), 2005; without the arithmetic of
reductions, and with lg p rounded up):

| collective       | m is what a rank                   | seconds                                                    |
|------------------|------------------------------------|------------------------------------------------------------|
| all_gather       | has afterwards                     | lg p * latency + (p-1)/p * m * per_byte (doubling)         |
| reduce_scatter   | has before                         | lg p * latency + (p-1)/p * m * per_byte (halving)          |
| all_reduce       | has before and afterwards          | twice that of reduce_scatter (Rabenseifner)                |
| all_to_all       | has before                         | (p-1) * latency + (p-1)/p * m * per_byte (pairwise)        |
| local            | slices or pads by itself           | 0                                                          |

The default constants are those of a 100 Gbit/s link: they rank the options and do not predict times on a cluster.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from localtensor.layout import NETWORK, Network, shard_cut, short

REPLICATE = Replicate()


@dataclass(frozen=True, slots=True)
class AxisStep:
    """One tensor goes from one placement to another along one axis, by one collective or by a local operation.

    It refers to neither tensor nor mesh; a `strategies.planner.steps.plan.RedistributionStep`, which belongs to a plan,
    refers to both.
    """

    axis: int
    was: Placement
    now: Placement
    kind: str
    nbytes: int
    seconds: float

    def __str__(self) -> str:
        how = "locally" if self.kind == "local" else f"by {self.kind} of {self.nbytes} bytes"
        return f"axis {self.axis}: {short(self.was)} -> {short(self.now)} {how}"


@dataclass(frozen=True, slots=True)
class MovedTensor:
    """The shape, dtype and placements of a tensor while it is moved, axis by axis from the left."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    placements: tuple[Placement, ...]


def partials_commute(one: Placement, other: Placement, dtype: torch.dtype) -> bool:
    """Whether two partial placements of one tensor on two axes may be reduced in either order.

    Equal ones do; so do sum and avg for dtypes that divide: an average of integers is rounded, or undefined.

    >>> partials_commute(Partial("sum"), Partial("max"), torch.float32), partials_commute(Partial("sum"), Partial("avg"), torch.float32)
    (False, True)
    """
    if not isinstance(one, Partial) or not isinstance(other, Partial) or one == other:
        return True
    if type(one) is not Partial or type(other) is not Partial:
        return False
    return {one.reduce_op, other.reduce_op} == {"sum", "avg"} and (dtype.is_floating_point or dtype.is_complex)


def redistribute_axis(
    held: MovedTensor, axis: int, want: Placement, sizes: Sequence[int], network: Network = NETWORK
) -> tuple[MovedTensor, tuple[AxisStep, ...]]:
    """The tensor with placement `want` on this axis, and the steps that this takes.

    The axes before it already have their final placements. Inner axes that block the step, since they shard the same
    dim or hold a reduction that must come first, are replicated before.
    """
    if held.placements[axis] == want:
        return held, ()
    steps: list[AxisStep] = []
    for inner in range(len(sizes) - 1, axis, -1):
        if _blocks(held, axis, want, inner):
            held, before = redistribute_axis(held, inner, REPLICATE, sizes, network)
            steps += before
    return _step_or_two(held, axis, want, sizes, network, steps), tuple(steps)


def _blocks(held: MovedTensor, axis: int, want: Placement, inner: int) -> bool:
    """Whether axis `inner` must be replicated before `axis` can take placement `want`."""
    other, was = held.placements[inner], held.placements[axis]
    cut = shard_cut(other)
    if cut is not None:
        return any(c is not None and c[0] == cut[0] for c in (shard_cut(was), shard_cut(want)))
    return not (partials_commute(other, was, held.dtype) and partials_commute(other, want, held.dtype))


def _step_or_two(
    held: MovedTensor, axis: int, want: Placement, sizes: Sequence[int], network: Network, steps: list[AxisStep]
) -> MovedTensor:
    """One step, or two by way of Replicate where no collective goes there directly."""
    was = held.placements[axis]
    kind = _collective(was, want)
    if not kind:
        whole = _step_or_two(held, axis, REPLICATE, sizes, network, steps)
        return _step_or_two(whole, axis, want, sizes, network, steps)
    nbytes = largest_piece_but(held, sizes, but=axis) if kind != "local" else 0
    if kind == "all_to_all":
        nbytes = -(-nbytes // sizes[axis])
    steps.append(AxisStep(axis, was, want, kind, nbytes, network.seconds(kind, sizes[axis], nbytes)))
    return MovedTensor(held.shape, held.dtype, (*held.placements[:axis], want, *held.placements[axis + 1 :]))


def _collective(was: Placement, want: Placement) -> str:
    """The collective of a single step; empty if there is none."""
    if isinstance(was, Replicate):
        return "local"
    if isinstance(want, Replicate):
        return "all_reduce" if isinstance(was, Partial) else "all_gather"
    if type(want) is not Shard:
        return ""
    if isinstance(was, Partial):
        return "reduce_scatter"
    return "all_to_all" if type(was) is Shard and was.dim != want.dim else ""


def largest_piece_but(held: MovedTensor, sizes: Sequence[int], but: int = -1) -> int:
    """The bytes of the largest piece, that of rank 0, as if axis `but` did not shard."""
    shape = list(held.shape)
    for axis, placement in enumerate(held.placements):
        cut = shard_cut(placement)
        if cut is not None and axis != but:
            shape[cut[0]] = -(-shape[cut[0]] // sizes[axis])
    return math.prod(shape) * held.dtype.itemsize
