"""What a step costs, as the search asks: by the clock of a topology, by the bytes that are sent, or as torch counts.

Prices are integers: `plans.PICO` says why.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from localtensor.placement import Spec, cuts
from localtensor.shards import local_shape
from strategies.cost import NETWORK, Network
from strategies.plans import PICO, Move, Step
from strategies.steps import letter

MEMORY = Network(latency=1e-6, per_byte=1e-12)
"""Launching a copy, and copying a byte: a step without communication is not for nothing."""


@dataclass(frozen=True, slots=True)
class Topology:
    """A link for each axis of a mesh, and what a rank's own memory takes.

    Along several axes at once the slowest of their links counts.

    >>> Topology().seconds(Move("local", (0,), 4, 1_000_000, 0))
    2e-06
    """

    links: tuple[Network, ...] = ()
    """One for each axis; axes without one have `NETWORK`."""
    memory: Network = MEMORY

    def link(self, axes: tuple[int, ...]) -> Network:
        links = [self.links[axis] if axis < len(self.links) else NETWORK for axis in axes]
        if len(links) == 1:
            return links[0]
        return Network(max(link.latency for link in links), max(link.per_byte for link in links))

    def seconds(self, move: Move) -> float:
        if move.kind == "local" or move.ranks == 1:
            return self.memory.latency + move.nbytes * self.memory.per_byte
        return self.link(move.axes).seconds(move.kind, move.ranks, move.nbytes)


TOPOLOGY = Topology()


@dataclass(frozen=True, slots=True)
class Time:
    """Picoseconds by the clock of a topology, rounded up."""

    topology: Topology = TOPOLOGY
    grows: bool = True

    @property
    def name(self) -> str:
        return f"time {self.topology}"

    def __call__(self, move: Move) -> int:
        return math.ceil(self.topology.seconds(move) * PICO)


@dataclass(frozen=True, slots=True)
class Sent:
    """Bytes that a rank sends."""

    name: str = "bytes"
    grows: bool = True

    def __call__(self, move: Move) -> int:
        return sent(move)


def sent(move: Move) -> int:
    """Bytes that the rank which sends most sends in a move, by the algorithms of `strategies.cost`, rounded up."""
    if move.kind == "local" or move.ranks == 1:
        return 0
    trips = 2 if move.kind == "all_reduce" else 1
    return trips * -(-move.nbytes * (move.ranks - 1) // move.ranks)


def move_of(kind: str, axes: tuple[int, ...], was: Spec, now: Spec) -> Move:
    """The move that takes one spec to the other: the slow and plain way to it.

    >>> import torch
    >>> from localtensor.mesh import Mesh
    >>> from localtensor.placement import parse
    >>> was, now = (Spec(Mesh.of(4), (parse(p),), (6,), torch.float32) for p in ("S(0)", "R"))
    >>> move_of("all_gather", (0,), was, now).nbytes  # four times two rows
    32
    """
    ranks = math.prod(was.mesh.sizes[axis] for axis in axes)
    before, after = largest(was), largest(now)
    nbytes = {
        "all_gather": ranks * before, "reduce_scatter": ranks * after, "all_reduce": before, "all_to_all": before,
        "local": after,
    }[kind]  # fmt: skip
    cut = math.prod(size for size, p in zip(was.mesh.sizes, was.placements, strict=True) if cuts(p) is not None)
    even = math.prod(was.shape) * was.dtype.itemsize / cut
    return Move(kind, axes, ranks, nbytes, even, letter(was.placements[axes[0]]), letter(now.placements[axes[0]]))


def step_of(kind: str, axes: tuple[int, ...], was: Spec, now: Spec, topology: Topology = TOPOLOGY) -> Step:
    """The step that takes one spec to the other, priced."""
    move = move_of(kind, axes, was, now)
    return Step(move, was, now, sent(move), topology.seconds(move), memory(move, largest(was), largest(now)))


def largest(spec: Spec) -> int:
    """The bytes of the largest piece of a spec: that of the rank which is first on every axis."""
    shape = spec.shape
    for axis in spec.sequence:
        shape = local_shape(shape, spec.placements[axis], spec.mesh.sizes[axis], 0)
    return math.prod(shape) * spec.dtype.itemsize


def memory(move: Move, before: int, after: int) -> int:
    """Bytes that a rank has in use at most while a move runs, if buffers are made wherever they may be needed.

    Before and after are the bytes of the largest pieces.
    """
    if move.kind == "all_gather":
        return 2 * before + move.nbytes + after
    if move.kind == "reduce_scatter":
        return before + move.nbytes + 2 * after
    return (2 if move.kind == "all_to_all" else 1) * (before + after)
