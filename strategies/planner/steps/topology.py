"""The links of a cluster, from a JSON file or from two numbers, and which of them the ranks along a mesh axis use.

`docs/topology.json` is an example of a file:

| key              | meaning                                                                                          |
|------------------|--------------------------------------------------------------------------------------------------|
| `ranks_per_node` | how many ranks share a node: consecutive blocks of so many ranks of the mesh                     |
| `inner`          | the link between ranks of one node: `latency_us` of a message, and `gigabytes_per_second`        |
| `outer`          | the link between ranks of several nodes                                                          |
| `axes`           | optional: links by the name of a mesh axis, which replace these two                              |
| `memory`         | optional: a rank's own memory, as used by copies                                                 |

A gigabyte is 10**9 bytes; the bandwidth is what one rank sends.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeGuard

from localtensor.errors import Refusal
from localtensor.layout import MEMORY, NETWORK, Links, Mesh, Network
from strategies.base.atomic_files import read_bytes
from strategies.base.foreign_text import BadJson, read_json
from strategies.planner.steps.prices import Topology

RANKS_PER_NODE = 8
"""The default number of ranks per node."""
MOST_FILE_BYTES = 1_000_000
"""The largest file in bytes."""
SLOWEST, FASTEST, LATEST = 1e-6, 1e6, 1e9
"""The accepted range: gigabytes per second, and microseconds."""
REQUIRED, OPTIONAL = ("ranks_per_node", "inner", "outer"), ("axes", "memory")
LINK = ("latency_us", "gigabytes_per_second")


class BadTopology(Refusal, call="topology"):
    """A description of a cluster that cannot be used."""


class Cluster(Links):
    """Nodes of so many ranks each, and the links within and between them.

    >>> cluster = Cluster(4, inner=Network(2e-6, 1 / 300e9), outer=Network(5e-6, 1 / 25e9))
    >>> [link.latency for link in cluster.on(Mesh.of(dp=2, tp=4)).links]  # dp reaches over nodes, tp does not
    [5e-06, 2e-06]
    """

    __slots__ = ()

    def on(self, mesh: Mesh) -> Topology:
        """A link for each axis. Raises `BadTopology` if `axes` names an axis that the mesh does not have."""
        own = dict(self.axes)
        for name in own:
            _check_name("axes", name, mesh.names)
        return Topology(tuple(own.get(name) or self._link(mesh, name) for name in mesh.names), self.memory)

    def _link(self, mesh: Mesh, name: str) -> Network:
        """The link of an axis. Its groups fill blocks of ranks; the inner link applies if no block spans two nodes."""
        axis = mesh.axis(name)
        block = math.prod(mesh.sizes[axis:])
        within = mesh.sizes[axis] == 1 or mesh.ranks <= self.ranks_per_node or self.ranks_per_node % block == 0
        return self.inner if within else self.outer


def parse_topology(text: str) -> Cluster:
    """The cluster of `--topology`: a file, or the gigabytes per second within and between nodes of eight ranks.

    Raises `BadTopology`.

    >>> parse_topology("300,25").on(Mesh.of(dp=2, tp=8)).links[0]
    Network(latency=5e-06, per_byte=4e-11)
    """
    try:
        within, between = map(float, text.split(","))
    except ValueError:  # not two numbers
        return read_topology(Path(text))
    inner = Network(NETWORK.latency, _per_byte("inner GB/s", within))
    outer = Network(NETWORK.latency, _per_byte("outer GB/s", between))
    return Cluster(RANKS_PER_NODE, inner, outer)


def read_topology(path: Path) -> Cluster:
    """The cluster that a file describes. Raises `BadTopology` with the position of the fault."""

    def bad_file(problem: str, remedy: str = "Name the file of a topology.") -> BadTopology:
        return BadTopology(_shown(str(path), 1000), "file", problem, remedy)

    try:
        raw = read_bytes(path, MOST_FILE_BYTES + 1)
    except (OSError, ValueError) as error:  # a path with a NUL byte is a ValueError
        reason = getattr(error, "strerror", None) or str(error)
        raise bad_file(f"it cannot be read ({reason})", "Name a file of JSON, or write 300,25.") from None
    if len(raw) > MOST_FILE_BYTES:
        raise bad_file(f"it is longer than {MOST_FILE_BYTES} bytes")
    try:
        data = read_json(raw)
    except BadJson as error:
        raise bad_file(str(error), "Correct it; docs/topology.json is an example.") from None
    return cluster_from_json(data)


def cluster_from_json(data: object) -> Cluster:
    """The cluster that decoded JSON describes. Raises `BadTopology`.

    >>> link = {"latency_us": 5, "gigabytes_per_second": 25}
    >>> cluster_from_json({"ranks_per_node": 8, "inner": link, "outer": link}).outer
    Network(latency=5e-06, per_byte=4e-11)
    """
    data = _check_object("the whole", data, REQUIRED, (*REQUIRED, *OPTIONAL))
    per_node = data["ranks_per_node"]
    if type(per_node) is not int or per_node < 1:
        problem = "it is no whole number of ranks"
        raise BadTopology("ranks_per_node", reprlib.repr(per_node), problem, "Write 8, or what a node has.")
    axes = data.get("axes", {})
    if not isinstance(axes, dict):
        raise BadTopology("axes", reprlib.repr(axes), "it is no object", 'Write a link by name: "axes": {"dp": {...}}.')
    links = tuple((name, _link(f"axes.{_shown(name)}", link)) for name, link in axes.items())
    memory = _link("memory", data["memory"]) if "memory" in data else MEMORY
    return Cluster(per_node, _link("inner", data["inner"]), _link("outer", data["outer"]), links, memory)


def _link(where: str, data: object) -> Network:
    data = _check_object(where, data, LINK, LINK)
    latency = data["latency_us"]
    if not _in_range(latency, 0, LATEST):
        problem = f"a latency is a number of microseconds from 0 to {LATEST:g}"
        raise BadTopology(f"{where}.latency_us", reprlib.repr(latency), problem, "Write 5.")
    return Network(latency / 1e6, _per_byte(f"{where}.gigabytes_per_second", data["gigabytes_per_second"]))


def _per_byte(where: str, speed: object) -> float:
    if not _in_range(speed, SLOWEST, FASTEST):
        problem = f"a bandwidth is a number of gigabytes per second from {SLOWEST:g} to {FASTEST:g}"
        raise BadTopology(where, reprlib.repr(speed), problem, "Write 25, which is a link of 200 Gbit/s.")
    return 1 / (float(speed) * 1e9)


def _in_range(value: object, least: float, most: float) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most


def _check_object(where: str, data: object, required: Sequence[str], known: Sequence[str]) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise BadTopology(where, reprlib.repr(data), "it is no object", f"Write one with {', '.join(required)}.")
    for key in data:
        _check_name(where, key, known)
    for key in required:
        if key not in data:
            remedy = "Add it; docs/topology.json is a complete example."
            raise BadTopology(where, reprlib.repr(data), f"{key} is missing", remedy)
    return data


def _check_name(where: str, name: str, known: Sequence[str]) -> None:
    if name not in known:
        near = get_close_matches(name, known, n=1)
        remedy = f"Did you mean {near[0]}?" if near else f"Use {', '.join(known)}."
        raise BadTopology(where, _shown(name), "there is no such name", remedy)


def _shown(text: str, most: int = 60) -> str:
    """A printable form of a name in a file, which may hold any characters, lone surrogates too, and have any length."""
    return text if text.isprintable() and len(text) <= most else reprlib.repr(text)
