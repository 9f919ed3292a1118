"""The links between ranks, by the latency-bandwidth (alpha-beta) model, and how fast a rank computes.

A message of m bytes takes `latency + m * per_byte`.  `strategies.planner.steps.alpha_beta` has the table of collectives, and
`strategies.planner.steps.topology` reads links from a file.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType

from localtensor.errors import Refusal


class BadNetwork(Refusal, call="Network", values="{value!r}"):
    """A latency or a time per byte out of range."""

    PROBLEM = "this is no number of seconds from 0 to 1000"
    REMEDY = "Give seconds: 5e-6 for a message, 8e-11 for a byte of it at 12.5 GB/s."


TRIPS = MappingProxyType({"local": 0, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1, "all_reduce": 2})
"""The number of times that the data travels around the ring."""


@dataclass(frozen=True, slots=True)
class Network:
    """A link: seconds for a message, and for each byte of it. Raises `BadNetwork`.

    >>> f"{Network().seconds('all_reduce', 4, 1_000_000):.6f}"
    '0.000140'
    """

    latency: float = 5e-6
    per_byte: float = 8e-11

    def __post_init__(self) -> None:
        for name, value in (("latency", self.latency), ("per_byte", self.per_byte)):
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not 0 <= value <= 1000:
                raise BadNetwork(name, value)

    def seconds(self, kind: str, ranks: int, nbytes: float) -> float:
        """The time of a collective of `ranks` ranks; `nbytes` is the m of the table. KeyError for another kind."""
        trips = TRIPS[kind]
        messages = ranks - 1 if kind == "all_to_all" else math.ceil(math.log2(ranks))
        return trips * (messages * self.latency + (ranks - 1) / ranks * nbytes * self.per_byte)


NETWORK = Network()
MEMORY = Network(latency=1e-6, per_byte=1e-12)
"""Launching a copy, and copying a byte: a step without communication is not free."""


@dataclass(frozen=True, slots=True)
class Links:
    """Nodes of so many ranks each, the links within and between them, those of single mesh axes, and a rank's memory.

    >>> links = Links(4, inner=Network(2e-6, 1 / 300e9), outer=Network(5e-6, 1 / 25e9))
    >>> links.between((0, 3), None).latency, links.between((0, 4), "dp").latency
    (2e-06, 5e-06)
    """

    ranks_per_node: int = 8
    inner: Network = NETWORK
    outer: Network = NETWORK
    axes: tuple[tuple[str, Network], ...] = ()
    memory: Network = MEMORY

    def between(self, ranks: Sequence[int], axis: str | None) -> Network:
        """The link that a call of these ranks uses: that of their mesh axis if it has its own, else by their nodes."""
        own = dict(self.axes).get(axis or "")
        if own is not None:
            return own
        return self.inner if len({rank // self.ranks_per_node for rank in ranks}) == 1 else self.outer


@dataclass(frozen=True, slots=True)
class Rates:
    """Floating-point operations and bytes of memory per second, and the seconds to start an op.

    >>> Rates(flops=1e12, bytes=1e12, launch=0.0).seconds(2_000_000, 1_000_000)  # the slower of both counts
    2e-06
    """

    flops: float = 100e12
    bytes: float = 1e12
    launch: float = 1e-6

    def seconds(self, flops: float, nbytes: float) -> float:
        """The modelled time of one op that computes so many operations and reads and writes so many bytes."""
        return self.launch + max(flops / self.flops, nbytes / self.bytes)
