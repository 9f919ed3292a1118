"""The memory that a rank, or each of many, holds, by kind of tensor and by module: now, and at its peak."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

PARAMETERS, GRADIENTS, STATE = "parameters", "gradients", "optimizer state"
ACTIVATIONS, BUFFERS, OTHER = "activations", "buffers of collectives", "other"
INPUTS = OTHER
KINDS = (PARAMETERS, GRADIENTS, STATE, ACTIVATIONS, BUFFERS, OTHER)
_STRONG = {PARAMETERS: 3, STATE: 2, GRADIENTS: 1}
"""Kinds that a tensor keeps, whatever it is used for later; of two the higher number stays."""


@dataclass(slots=True)
class Peak:
    """A rank's memory where it holds most: bytes by kind of tensor, and the module that ran."""

    bytes: int = 0
    by_kind: dict[str, int] = field(default_factory=dict)
    module: str = ""
    by_module: dict[str, int] = field(default_factory=dict)


class _Held(NamedTuple):
    size: Any
    kind: str
    module: str


class Memory:
    """The storages that one rank holds, under keys of the caller's choice, in bytes.

    >>> memory = Memory()
    >>> memory.hold(1, 400, ACTIVATIONS, "up"); memory.hold(2, 100, ACTIVATIONS, "down"); memory.drop(1)
    >>> memory.relabel(2, PARAMETERS)
    >>> memory.now, memory.peak.bytes, memory.peak.module, memory.by_kind["activations"], memory.by_kind["parameters"]
    (100, 500, 'down', 0, 100)
    """

    def __init__(self) -> None:
        self.now = 0
        self.by_kind = dict.fromkeys(KINDS, 0)
        self.by_module: dict[str, int] = defaultdict(int)
        self.held: dict[int, tuple[int, str, str, Any]] = {}  # size, kind, module, and what tells its end
        self._peak = Peak()
        self._at_peak = False  # since then nothing was dropped: `_peak` has its bytes and module only

    def __contains__(self, key: int) -> bool:
        return key in self.held

    @property
    def peak(self) -> Peak:
        """The memory where it was most."""
        if self._at_peak:
            self._peak.by_kind, self._peak.by_module = dict(self.by_kind), dict(self.by_module)
        return self._peak

    def hold(self, key: int, size: int, kind: str, module: str, alive: Any = None) -> None:
        """The rank holds these bytes from now on; a key that it holds already gets this size, and keeps its kind.

        `alive` is kept as long: a weak reference, say, whose callback drops the key.
        """
        held = self.held
        if key in held:
            _, kind, module, alive = held[key]
            self.drop(key)
        held[key] = (size, kind, module, alive)
        now = self.now = self.now + size
        self.by_kind[kind] += size
        self.by_module[module] += size
        peak = self._peak
        if now > peak.bytes:
            peak.bytes, peak.module, self._at_peak = now, module, True

    def freed(self, alive: Any) -> None:
        """The rank holds the bytes of `alive.key` no longer: the callback of a weak reference that has the key."""
        held = self.held.pop(alive.key, None)
        if held is not None:
            size, kind, module, _ = held
            if self._at_peak and size:
                self._peak, self._at_peak = self.peak, False
            self.now -= size
            self.by_kind[kind] -= size
            self.by_module[module] -= size

    def drop(self, key: int) -> None:
        """The rank holds these bytes no longer."""
        self.freed(SimpleNamespace(key=key))

    def relabel(self, key: int, kind: str) -> None:
        """From now on the bytes are of this kind, unless they are of one that a tensor keeps."""
        held = self.held.get(key)
        if held is None or held[1] == kind or _STRONG.get(held[1], 0) > _STRONG.get(kind, 0):
            return
        size, before, module, alive = held
        self._add(-size, before, module)
        self.held[key] = (size, kind, module, alive)
        self._add(size, kind, module)

    def _add(self, size: int, kind: str, module: str) -> None:
        self.now += size
        self.by_kind[kind] += size
        self.by_module[module] += size


class MemoryOfRanks:
    """The same of many ranks at once: a size is an int for all of them, or an array with one for each.

    `now` and `by_kind` are those of the rank that holds most, `peak` that of the rank whose peak is highest.

    >>> memory = MemoryOfRanks(3)
    >>> memory.hold(1, 100, ACTIVATIONS, "up"); memory.hold(2, np.array([0, 0, 7]), STATE, "down"); memory.drop(1)
    >>> memory.now, memory.peak.bytes, [memory.peak_of(rank).bytes for rank in range(3)], memory.peak_of(2).module
    (7, 107, [100, 100, 107], 'down')
    """

    def __init__(self, ranks: int) -> None:
        self._now = np.zeros(ranks, np.int64)
        self._kinds = {kind: np.zeros(ranks, np.int64) for kind in KINDS}
        self._peaks = np.zeros(ranks, np.int64)
        self._kinds_at_peak = {kind: np.zeros(ranks, np.int64) for kind in KINDS}
        self._modules: list[str] = []
        self._module_at_peak = np.full(ranks, -1)
        self._held: dict[int, _Held] = {}

    def __contains__(self, key: int) -> bool:
        return key in self._held

    @property
    def now(self) -> int:
        return int(self._now.max())

    @property
    def by_kind(self) -> dict[str, int]:
        most = int(self._now.argmax())
        return {kind: int(sizes[most]) for kind, sizes in self._kinds.items()}

    @property
    def peak(self) -> Peak:
        return self.peak_of(int(self._peaks.argmax()))

    def peak_of(self, rank: int) -> Peak:
        """The memory of this rank at its own peak."""
        by_kind = {kind: int(sizes[rank]) for kind, sizes in self._kinds_at_peak.items() if sizes[rank]}
        at = int(self._module_at_peak[rank])
        return Peak(int(self._peaks[rank]), by_kind, self._modules[at] if at >= 0 else "")

    def hold(self, key: int, size: Any, kind: str, module: str) -> None:
        """The ranks hold these bytes from now on; a key that they hold already gets this size, and keeps its kind."""
        before = self._held.get(key)
        if before is not None:
            self.drop(key)
            kind, module = before.kind, before.module
        self._held[key] = _Held(size, kind, module)
        self._add(size, kind)
        higher = self._now > self._peaks
        if higher.any():
            if not self._modules or self._modules[-1] != module:
                self._modules.append(module)
            self._module_at_peak[higher] = len(self._modules) - 1
            self._keep_peaks(higher)

    def drop(self, key: int) -> None:
        """The ranks hold these bytes no longer."""
        held = self._held.pop(key, None)
        if held is not None:
            self._add(-held.size, held.kind)

    def relabel(self, key: int, kind: str) -> None:
        """As `Memory.relabel`."""
        held = self._held.get(key)
        if held is None or held.kind == kind or _STRONG.get(held.kind, 0) > _STRONG.get(kind, 0):
            return
        self._add(-held.size, held.kind)
        self._held[key] = held._replace(kind=kind)
        self._add(held.size, kind)
        self._keep_peaks(self._now == self._peaks)

    def _add(self, size: Any, kind: str) -> None:
        self._now += size
        self._kinds[kind] += size

    def _keep_peaks(self, which: Any) -> None:
        self._peaks[which] = self._now[which]
        for kind, sizes in self._kinds.items():
            self._kinds_at_peak[kind][which] = sizes[which]
