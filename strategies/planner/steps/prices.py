"""The prices of steps: time on a topology, bytes sent, or torch's own cost.

Prices are integers; `plan.PICO` says why. `TorchPrice` is torch's cost of a redistribution, so that a plan can be the
cheapest by torch's own count. Its constants are those of `torch.distributed.tensor._collective_utils` (read on 2.13):
rings, 87.7 GiB/s and 0.6 us a hop along axes whose groups stay within a host, 0.22 of that bandwidth and 2.7 us a hop
along others, 6.6 us of base latency. The only size that it uses is `Move.even`. It is computed here bit for bit as in
torch, but needs neither mesh nor group; `tests/strategies/planner/steps/test_prices.py` compares it with
torch and names the parts.

| step                        | microseconds by torch; b is the bytes of a rank's piece before, p the ranks                 |
|-----------------------------|---------------------------------------------------------------------------------------------|
| S -> R                      | 6.6 + (p-1) * hop + (p-1)/p * (b * p) / bandwidth                                           |
| P -> S                      | 6.6 + (p-1) * hop + (p-1)/p * b / bandwidth                                                 |
| P -> R                      | 6.6 + 2(p-1) * hop + 2(p-1)/p * b / bandwidth                                               |
| S -> another S              | that of P -> S and 1 more, since torch has no formula for it                                |
| R -> S, R -> P              | 0                                                                                           |
| SS -> R                     | 0 where `is_shard` of a strided shard is False (2.13), else that of S -> R                  |

torch does not take the following steps; their prices are ours:

| step                        | price                                                                                       |
|-----------------------------|---------------------------------------------------------------------------------------------|
| S -> P, SS -> P             | 1 more than S -> R -> P: torch forbids it, so no cheapest plan may contain it (see below)   |
| S -> SS, SS -> S, SS -> SS  | that of S -> another S                                                                      |
| P -> SS                     | that of P -> S                                                                              |
| R -> SS                     | 0 (torch's planner takes it, too)                                                           |
| several axes, flattened     | that of one axis with so many ranks and with the slowest link among them                    |

A price must be an integer, so it cannot be infinite. That of S -> P is finite and higher than that of the detour, so a
cheapest plan never contains it, and torch can price each step of a plan without strided shards and flattened axes.

Where torch gathers strided shards for free, the price of the cheapest plan is no metric over them: a plan may use the
strided shards of its destination only, and a detour by another one costs less than the cheapest plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch.distributed.tensor import Partial

from localtensor.layout import MEMORY, NETWORK, TRIPS, Mesh, Network, Spec, StridedShard, local_shape, shard_cut
from strategies.planner.steps.legal_steps import collectives_reduce, placement_letter
from strategies.planner.steps.plan import PICO, Move, RedistributionStep

REDUCING = ("all_reduce", "reduce_scatter")


@dataclass(frozen=True, slots=True)
class Topology:
    """A link for each axis of a mesh, and the speed of a rank's own memory.

    Along several axes at once the slowest of their links counts.

    >>> Topology().seconds(Move("local", (0,), 4, 1_000_000, 0))
    2e-06
    """

    links: tuple[Network, ...] = ()
    """One for each axis; axes without one have `NETWORK`."""
    memory: Network = MEMORY

    def link(self, axes: tuple[int, ...]) -> Network:
        if len(axes) == 1:
            return self.links[axes[0]] if axes[0] < len(self.links) else NETWORK
        links = [self.links[axis] if axis < len(self.links) else NETWORK for axis in axes]
        return Network(max(link.latency for link in links), max(link.per_byte for link in links))

    def seconds(self, move: Move) -> float:
        if move.kind == "local" or move.ranks == 1:
            return self.memory.latency + move.nbytes * self.memory.per_byte
        link = self.link(move.axes)
        if not move.exchanged:
            return link.seconds(move.kind, move.ranks, move.nbytes)
        again = link.seconds("all_gather", move.ranks, move.nbytes) if move.kind == "all_reduce" else 0.0
        return link.seconds("all_to_all", move.ranks, move.nbytes) + again


TOPOLOGY = Topology()


@dataclass(frozen=True, slots=True)
class Time:
    """Picoseconds on a topology, rounded up."""

    topology: Topology = TOPOLOGY
    grows: bool = True

    @property
    def name(self) -> str:
        return f"time {self.topology}"

    def __call__(self, move: Move) -> int:
        return math.ceil(self.topology.seconds(move) * PICO)

    def along(self, kind: str, axes: tuple[int, ...], ranks: int, exchanged: bool) -> Callable[[int], int]:
        """The price of all such moves as a function of their bytes: equal to `__call__`, but faster.

        >>> Time().along("all_gather", (0,), 4, False)(1000) == Time()(Move("all_gather", (0,), 4, 1000, 250.0))
        True
        """
        if kind == "local" or ranks == 1:
            latency, per_byte = self.topology.memory.latency, self.topology.memory.per_byte
            return lambda nbytes: math.ceil((latency + nbytes * per_byte) * PICO)
        if exchanged:
            return lambda nbytes: self(Move(kind, axes, ranks, nbytes, 0.0, exchanged=True))
        seconds = self.topology.link(axes).seconds
        return lambda nbytes: math.ceil(seconds(kind, ranks, nbytes) * PICO)


@dataclass(frozen=True, slots=True)
class Sent:
    """Bytes that the busiest sender sends."""

    name: str = "bytes"
    grows: bool = True

    def __call__(self, move: Move) -> int:
        return bytes_sent(move)

    def along(self, kind: str, axes: tuple[int, ...], ranks: int, exchanged: bool) -> Callable[[int], int]:
        """As `Time.along`."""
        return lambda nbytes: bytes_sent(Move(kind, axes, ranks, nbytes, 0.0, exchanged=exchanged))


def bytes_sent(move: Move) -> int:
    """Bytes that the busiest sender sends in a move, by the algorithms of `alpha_beta`, rounded up."""
    if move.kind == "local" or move.ranks == 1:
        return 0
    return TRIPS[move.kind] * -(-move.nbytes * (move.ranks - 1) // move.ranks)


def move_of(kind: str, axes: tuple[int, ...], was: Spec, now: Spec) -> Move:
    """The move from one spec to the other: the reference for the moves that `search.state_table` builds.

    >>> import torch
    >>> from localtensor.layout import parse
    >>> was, now = (Spec(Mesh.of(4), (parse(p),), (6,), torch.float32) for p in ("S(0)", "R"))
    >>> move_of("all_gather", (0,), was, now).nbytes  # four times two rows
    32
    """
    ranks, held = math.prod(was.mesh.sizes[axis] for axis in axes), was.placements[axes[0]]
    before, after = largest_piece(was), largest_piece(now)
    nbytes = {
        "all_gather": ranks * before, "reduce_scatter": ranks * after, "all_reduce": before, "all_to_all": before,
        "local": after,
    }[kind]  # fmt: skip
    exchanged = kind in REDUCING and isinstance(held, Partial) and not collectives_reduce(held.reduce_op, was.dtype)
    if exchanged and kind == "all_reduce":
        nbytes = round_up(before, ranks * was.dtype.itemsize)
    cut = math.prod(size for size, p in zip(was.mesh.sizes, was.placements, strict=True) if shard_cut(p) is not None)
    even = math.prod(was.shape) * was.dtype.itemsize / cut
    letters = placement_letter(held), placement_letter(now.placements[axes[0]])
    return Move(kind, axes, ranks, nbytes, even, *letters, exchanged)


def round_up(nbytes: int, unit: int) -> int:
    """A number of bytes rounded up to a multiple of `unit`.

    >>> round_up(20, 4 * 3), round_up(24, 4 * 3)
    (24, 24)
    """
    return -(-nbytes // unit) * unit


def priced_step(
    kind: str, axes: tuple[int, ...], was: Spec, now: Spec, topology: Topology = TOPOLOGY
) -> RedistributionStep:
    """The priced step from one spec to the other."""
    return step_of_move(move_of(kind, axes, was, now), was, now, largest_piece(was), largest_piece(now), topology)


def step_of_move(move: Move, was: Spec, now: Spec, before: int, after: int, topology: Topology) -> RedistributionStep:
    """The priced step of a move; `before` and `after` are the bytes of the largest pieces."""
    memory = peak_memory(move, before, after)
    return RedistributionStep(move, was, now, bytes_sent(move), topology.seconds(move), memory)


def largest_piece(spec: Spec) -> int:
    """The bytes of the largest piece of a spec: that of the rank with coordinate 0 on every axis."""
    shape = spec.shape
    for axis in spec.sequence:
        shape = local_shape(shape, spec.placements[axis], spec.mesh.sizes[axis], 0)
    return math.prod(shape) * spec.dtype.itemsize


def peak_memory(move: Move, before: int, after: int) -> int:
    """The peak memory of a rank during a move in bytes, counting a buffer wherever one may be needed.

    `before` and `after` are the bytes of the largest pieces. Exchanged parts are all held until they are reduced.
    """
    if move.exchanged:
        return 2 * before + move.nbytes + move.nbytes // move.ranks
    if move.kind == "all_gather":
        return 2 * before + move.nbytes + after
    if move.kind == "reduce_scatter":
        return before + move.nbytes + 2 * after
    return (2 if move.kind == "all_to_all" else 1) * (before + after)


BASE_LATENCY, HOP_LATENCY, BANDWIDTH = 6.6, 0.6, 87.7
"""Base latency and latency of a hop in microseconds, bandwidth in GiB/s: within a host."""
HOP_LATENCY_OUTSIDE, OUTSIDE_BANDWIDTH_FACTOR = 2.7, 0.22
PENALTY = 1.0
"""Microseconds that torch adds where it has no formula."""
PER_HOST = 8
KIBI = 1024
"""Divided by three times: torch divides step by step, and the rounding must be the same."""


@dataclass(frozen=True, slots=True)
class TorchPrice:
    """Picoseconds by torch's own cost, on a mesh of these sizes with so many devices in each host.

    >>> gather = Move("all_gather", (0,), 4, 4 * 2**20, 2**20, "S", "R")
    >>> TorchPrice((4,))(gather)  # 6.6 us, three hops, and 3 MiB at 87.7 GiB/s
    41805787
    """

    sizes: tuple[int, ...]
    per_host: int = PER_HOST
    strided: bool = StridedShard(0, split_factor=1).is_shard()
    """Whether torch treats a strided shard as a shard: where it does not, gathering one is free."""
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
        """torch's cost, extended by the steps that torch does not take."""
        was, now = move.was[:1], move.now[:1]
        piece = move.even / KIBI / KIBI / KIBI
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
        latency = BASE_LATENCY + hops * (HOP_LATENCY_OUTSIDE if outside else HOP_LATENCY)
        bandwidth = BANDWIDTH * OUTSIDE_BANDWIDTH_FACTOR if outside else BANDWIDTH
        return latency + (gib * hops / move.ranks) / bandwidth * 1e6

    def outside(self, axis: int) -> bool:
        """Whether groups along this axis span several hosts; hosts are filled along the last axis first."""
        return math.prod(self.sizes[axis:]) > self.per_host
