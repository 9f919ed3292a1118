"""The memory that a rank, or each of many, holds, by kind of tensor and by module: now, and at its peak."""

from __future__ import annotations

import weakref
from array import array
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

PARAMETERS, GRADIENTS, STATE = "parameters", "gradients", "optimizer state"
ACTIVATIONS, BUFFERS, OTHER = "activations", "buffers of collectives", "other"
KINDS = (PARAMETERS, GRADIENTS, STATE, ACTIVATIONS, BUFFERS, OTHER)
_STRONG = {PARAMETERS: 3, STATE: 2, GRADIENTS: 1}
"""Kinds that a tensor keeps, whatever it is used for later; of two the higher number stays."""
_Ints: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(slots=True)
class Peak:
    """A rank's memory where it holds most: bytes by kind of tensor, and the module that ran."""

    bytes: int = 0
    by_kind: dict[str, int] = field(default_factory=dict)
    module: str = ""
    by_module: dict[str, int] = field(default_factory=dict)


class _Held(NamedTuple):
    size: int | _Ints
    kind: str
    module: str


class _Alive(weakref.ref[torch.UntypedStorage]):
    """A storage that is held, under its identity, in the form of this number."""

    __slots__ = ("form", "key")
    form: int
    key: int


class Memory:
    """The storages that one rank holds, each until it is freed.

    While the program runs, only numbers are logged: that of a form, which is a size, a kind and a module, where a storage is held, and
    minus that where it is freed; and how long the log is where the memory is looked at.  Sums are made of them when they are asked for.
    A freed storage waits in a list for the next entry: to call a function of Python for each would take longer than the rest.

    >>> memory = Memory()
    >>> up, down = torch.empty(100), torch.empty(25)
    >>> memory.hold(up.untyped_storage(), ACTIVATIONS, "up"); memory.hold(down.untyped_storage(), ACTIVATIONS, "down"); del up
    >>> memory.relabel(down.untyped_storage(), PARAMETERS)
    >>> memory.now, memory.peak.bytes, memory.peak.module, memory.by_kind["activations"], memory.by_kind["parameters"]
    (100, 500, 'down', 0, 100)
    """

    def __init__(self) -> None:
        self.freed: list[_Alive] = []
        self.log: array[int] = array("q")
        self.looks: array[int] = array("q")  # time and length of the log, in a row
        self._looked = 0
        self._held: dict[int, _Alive] = {}
        self._end = self.freed.append
        # Size, kind, module, and the kind that it was before.
        self._forms: list[tuple[int, str, str, str]] = [(0, OTHER, "", "")]
        self._numbers: dict[tuple[int, str, str, str], int] = {}
        self._peak: Peak | None = None  # once it is closed

    def hold(self, storage: torch.UntypedStorage, kind: str, module: str) -> None:
        """The rank holds a storage from now on, until it is freed; one that it holds already stays as it is."""
        if self.freed:
            self.note_freed()
        key = storage._cdata
        if key not in self._held:
            alive = self._held[key] = _Alive(storage, self._end)
            alive.key = key
            form = alive.form = self._numbers.get((storage.nbytes(), kind, module, "")) or self._form(
                storage.nbytes(), kind, module
            )
            self.log.append(form)

    def note_freed(self) -> None:
        """Logs the storages that were freed since the last entry."""
        freed, log = self.freed, self.log
        while freed:
            alive = freed.pop()
            if self._held.pop(alive.key, None) is not None:
                log.append(-alive.form)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """A storage that the rank holds has another size now."""
        if self.freed:
            self.note_freed()
        alive = self._held.get(storage._cdata)
        if alive is not None:
            _, kind, module, _ = self._forms[alive.form]
            self.log.append(-alive.form)
            alive.form = self._form(storage.nbytes(), kind, module)
            self.log.append(alive.form)

    def relabel(self, storage: torch.UntypedStorage, kind: str) -> None:
        """From now on the bytes are of this kind, unless they are of one that a tensor keeps."""
        alive = self._held.get(storage._cdata)
        if alive is None:
            return
        size, before, module, _ = self._forms[alive.form]
        if before == kind or _STRONG.get(before, 0) > _STRONG.get(kind, 0):
            return
        if self.freed:
            self.note_freed()
        self.log.append(self._form(size, kind, module, before))
        alive.form = self._form(size, kind, module)

    def look(self, at: int) -> None:
        """Notes what is held at this time."""
        if self.freed:
            self.note_freed()
        if len(self.log) != self._looked:
            self._looked = len(self.log)
            self.looks.extend((at, self._looked))

    def close(self) -> None:
        """What is freed from now on is not logged."""
        self.note_freed()
        self._held.clear()
        self._peak = None

    def _form(self, size: int, kind: str, module: str, before: str = "") -> int:
        form = (size, kind, module, before)
        number = self._numbers.get(form)
        if number is None:
            number = self._numbers[form] = len(self._forms)
            self._forms.append(form)
        return number

    def _changes(self) -> tuple[_Ints, _Ints]:
        """By entry of the log, the number of its form, and the bytes of each kind that come or go: int64 [entries] and [entries, kinds]."""
        sizes = np.zeros((len(self._forms), len(KINDS)), np.int64)
        for row, (size, kind, _, before) in zip(sizes, self._forms):
            row[KINDS.index(kind)] = size
            if before:
                row[KINDS.index(before)] = -size
        log = np.array(self.log, np.int64)
        return np.abs(log), sizes[np.abs(log)] * np.sign(log)[:, None]

    @property
    def now(self) -> int:
        """The bytes that are held."""
        return sum(self.by_kind.values())

    @property
    def by_kind(self) -> dict[str, int]:
        """The bytes that are held, by kind."""
        self.note_freed()
        return dict(zip(KINDS, self._changes()[1].sum(0).tolist()))

    @property
    def peak(self) -> Peak:
        """The memory where it was most.  Kinds are those that its bytes have until the first of them are freed."""
        if self._peak is None or self._held:
            self.note_freed()
            self._peak = self._peak_of_log()
        return self._peak

    def _peak_of_log(self) -> Peak:
        forms, changes = self._changes()
        by_entry = changes.sum(1)
        held = by_entry.cumsum()
        at = int(held.argmax()) if len(held) else 0
        if not len(held) or held[at] <= 0:
            return Peak()
        drops = (by_entry[at:] < 0).nonzero()[0]
        end = at + int(drops[0]) if len(drops) else len(held)
        by_module: dict[str, int] = {}
        for form, size in zip(forms[:end].tolist(), by_entry[:end].tolist()):
            module = self._forms[form][2]
            by_module[module] = by_module.get(module, 0) + size
        by_kind = dict(zip(KINDS, changes[:end].sum(0).tolist()))
        return Peak(int(held[at]), by_kind, self._forms[int(forms[at])][2], by_module)

    def add_looks(self, looks: _Ints) -> None:
        """Adds times and lengths of the log then: int64 [looks, 2]."""
        self.looks.extend(looks.ravel().tolist())

    def samples(self, more: _Ints) -> _Ints:
        """Where it was looked at, and was another than before, the time and the bytes by kind: int64 [samples, 1 + kinds].

        `more` are looks as `add_looks` takes them.
        """
        looks = np.concatenate([np.array(self.looks, np.int64).reshape(-1, 2), more])
        looks = looks[np.lexsort((looks[:, 1], looks[:, 0]))]
        held = np.concatenate([np.zeros((1, len(KINDS)), np.int64), self._changes()[1].cumsum(0)])[looks[:, 1]]
        changed = np.diff(held.sum(1), prepend=0) != 0
        return np.column_stack([looks[changed, 0], held[changed]])


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
        self._samples: list[tuple[int, ...]] = [(0,) * (1 + len(KINDS))]  # the first is none

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

    def hold(self, key: int, size: int | _Ints, kind: str, module: str) -> None:
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

    def look(self, at: int) -> None:
        """As `Memory.look`."""
        if self.now != sum(self._samples[-1][1:]):
            self._samples.append((at, *self.by_kind.values()))

    def close(self) -> None:
        """As `Memory.close`: here what is freed later is not looked at."""

    def add_looks(self, looks: _Ints) -> None:
        """As `Memory.add_looks`: here there are none."""

    def samples(self, more: _Ints) -> _Ints:
        """As `Memory.samples`."""
        return np.array(self._samples, np.int64)[1:]

    def _add(self, size: int | _Ints, kind: str) -> None:
        self._now += size
        self._kinds[kind] += size

    def _keep_peaks(self, which: np.ndarray[Any, np.dtype[np.bool_]]) -> None:
        self._peaks[which] = self._now[which]
        for kind, sizes in self._kinds.items():
            self._kinds_at_peak[kind][which] = sizes[which]
