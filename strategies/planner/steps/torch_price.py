"""torch's own cost of a redistribution, as a price: a plan can be the cheapest by torch's own count.

The facts are those of `torch.distributed.tensor._collective_utils` (read on 2.13): rings, 87.7 GiB/s and 0.6 us a hop
along axes whose groups stay within a host, 0.22 of that and 2.7 us along others, 6.6 us to begin with.  Of sizes it
knows one alone, `Move.even`.  This is a copy of what it computes, digit for digit, and needs neither mesh nor group;
`tests/plans/test_price_torch.py` holds it against torch itself, and names the parts.

| step                        | microseconds by torch; b is the bytes of a rank's piece before, p the ranks               |
|-----------------------------|---------------------------------------------------------------------------------------------|
| S -> R                      | 6.6 + (p-1) * hop + (p-1)/p * (b * p) / bandwidth                                           |
| P -> S                      | 6.6 + (p-1) * hop + (p-1)/p * b / bandwidth                                                 |
| P -> R                      | 6.6 + 2(p-1) * hop + 2(p-1)/p * b / bandwidth                                               |
| S -> another S              | that of P -> S and 1 more, since torch has no formula for it                                |
| R -> S, R -> P              | 0                                                                                           |
| SS -> R                     | 0 where `is_shard` of a strided shard is False (2.13), else that of S -> R                  |

These steps torch does not take, and what is said of them here is ours:

| step                        | price                                                                                       |
|-----------------------------|---------------------------------------------------------------------------------------------|
| S -> P, SS -> P             | 1 more than S -> R -> P: torch forbids it, so no plan shall lead there (see below)          |
| S -> SS, SS -> S, SS -> SS  | that of S -> another S                                                                      |
| P -> SS                     | that of P -> S                                                                              |
| R -> SS                     | 0 (torch's planner takes it, too)                                                           |
| several axes, flattened     | that of one axis with so many ranks and with the slowest link among them                    |

An infinite price would be no integer and no price.  That of S -> P is finite and dearer than the way around it, so a
cheapest plan never takes it, and torch can price each step of a plan that has no strided shards and nothing flattened.

Where torch gathers strided shards for nothing, the price of the cheapest plan is no distance over them: a plan is
offered the strided shards of its destination alone, and a detour by another one costs less than the cheapest way.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from localtensor.layout.mesh import Mesh
from localtensor.layout.spec import StridedShard
from strategies.planner.steps.plan import Move

BEGIN, HOP, BANDWIDTH = 6.6, 0.6, 87.7
"""Microseconds to begin and for a hop, GiB/s: within a host."""
HOP_OUTSIDE, SLOWER = 2.7, 0.22
PENALTY = 1.0
"""Microseconds that torch adds where it has no formula."""
PER_HOST = 8
GIB = 1024
"""Three times: torch divides step by step, and so it must be here."""


@dataclass(frozen=True, slots=True)
class TorchPrice:
    """Picoseconds by torch's own count, on a mesh of these sizes with so many devices in each host.

    >>> gather = Move("all_gather", (0,), 4, 4 * 2**20, 2**20, "S", "R")
    >>> TorchPrice((4,))(gather)  # 6.6 us, three hops, and 3 MiB at 87.7 GiB/s
    41805787
    """

    sizes: tuple[int, ...]
    per_host: int = PER_HOST
    strided: bool = StridedShard(0, split_factor=1).is_shard()
    """Whether torch takes a strided shard for a shard: where it does not, gathering one is free."""
    grows: bool = True

    @classmethod
    def of(cls, mesh: Mesh, per_host: int = PER_HOST) -> TorchPrice:
        return cls(mesh.sizes, per_host)

    @property
    def name(self) -> str:
        return f"torch {self.sizes} {self.per_host} {self.strided}"

    def __call__(self, move: Move) -> int:
        return round(self.microseconds(move) * 1e6)

    def microseconds(self, move: Move) -> float:
        """What torch would return, but for the steps that it does not take."""
        was, now = move.was[:1], move.now[:1]
        piece = move.even / GIB / GIB / GIB
        if was == "R" or (move.was == "SS" and now == "R" and not self.strided):
            return 0.0
        if now == "P":
            return self._ring(move, piece * move.ranks) + PENALTY
        if was == "P":
            return self._ring(move, piece, trips=2 if now == "R" else 1)
        return self._ring(move, piece * move.ranks) if now == "R" else self._ring(move, piece) + PENALTY

    def _ring(self, move: Move, gib: float, trips: int = 1) -> float:
        outside = any(self.outside(axis) for axis in move.axes)
        hops = trips * (move.ranks - 1)
        latency = BEGIN + hops * (HOP_OUTSIDE if outside else HOP)
        return latency + (gib * hops / move.ranks) / (BANDWIDTH * SLOWER if outside else BANDWIDTH) * 1e6

    def outside(self, axis: int) -> bool:
        """Whether groups along this axis reach over several hosts, as torch has it: hosts fill up from the last axis."""
        return math.prod(self.sizes[axis:]) > self.per_host
