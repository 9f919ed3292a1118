"""The memory that a rank holds, by kind of tensor and by module: now, and at its peak."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from localtensor.collectives.trace.events import Peak

PARAMETERS, GRADIENTS, STATE = "parameters", "gradients", "optimizer state"
ACTIVATIONS, BUFFERS, OTHER = "activations", "buffers of collectives", "other"
INPUTS = OTHER
KINDS = (PARAMETERS, GRADIENTS, STATE, ACTIVATIONS, BUFFERS, OTHER)
_STRONG = {PARAMETERS: 3, STATE: 2, GRADIENTS: 1}
"""Kinds that a tensor keeps, whatever it is used for later; of two the higher number stays."""


class _Held(NamedTuple):
    size: int
    kind: str
    module: str


class Memory:
    """The storages that one rank holds, under keys of the caller's choice, in bytes.

    >>> memory = Memory()
    >>> memory.hold(1, 400, ACTIVATIONS, "up"); memory.hold(2, 100, ACTIVATIONS, "down"); memory.drop(1)
    >>> memory.relabel(2, PARAMETERS)
    >>> memory.now, memory.peak.bytes, memory.peak.module, dict(memory.by_kind)
    (100, 500, 'down', {'activations': 0, 'parameters': 100})
    """

    def __init__(self) -> None:
        self.now = 0
        self.by_kind: Counter[str] = Counter()
        self.by_module: Counter[str] = Counter()
        self.peak = Peak()
        self._held: dict[int, _Held] = {}

    def __contains__(self, key: int) -> bool:
        return key in self._held

    def hold(self, key: int, size: int, kind: str, module: str) -> None:
        """The rank holds these bytes from now on; a key that it holds already gets this size, and keeps its kind."""
        before = self._held.get(key)
        if before is not None:
            self.drop(key)
            kind, module = before.kind, before.module
        self._held[key] = _Held(size, kind, module)
        self._add(size, kind, module)
        if self.now > self.peak.bytes:
            self.peak = Peak(self.now, dict(self.by_kind), module, dict(self.by_module))

    def drop(self, key: int) -> None:
        """The rank holds these bytes no longer."""
        held = self._held.pop(key, None)
        if held is not None:
            self._add(-held.size, held.kind, held.module)

    def relabel(self, key: int, kind: str) -> None:
        """From now on the bytes are of this kind, unless they are of one that a tensor keeps."""
        held = self._held.get(key)
        if held is None or held.kind == kind or _STRONG.get(held.kind, 0) > _STRONG.get(kind, 0):
            return
        self._add(-held.size, held.kind, held.module)
        self._held[key] = held._replace(kind=kind)
        self._add(held.size, kind, held.module)
        if self.now == self.peak.bytes:  # still at the peak, of which more is known now
            self.peak.by_kind = dict(self.by_kind)

    def _add(self, size: int, kind: str, module: str) -> None:
        self.now += size
        self.by_kind[kind] += size
        self.by_module[module] += size
