"""The selection of op calls to test: from names and globs to OpInfos and overloads, and the number of samples of each."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from strategies.inputs import opinfo_samples
from strategies.model.call_signature import diverse_subset
from strategies.model.rule import Sample, overload
from strategies.model.settings import Settings, UnknownOp
from strategies.torch_api import dtensor
from strategies.torch_api.user_modules import RegisteredRules

SAMPLES, TRACED, NAMED, SEARCHED = 24, 6, 64, 10
"""Samples tested per overload: in a sweep, of a decomposition, of an op that the user named, and in a search."""


@dataclass(frozen=True, slots=True)
class SampleSelection:
    """OpInfos to run, by number, and the overloads whose calls are recorded."""

    infos: tuple[int, ...]
    overloads: frozenset[str] = frozenset()
    whole: tuple[int, ...] = ()
    """OpInfos that the user named: all their own calls are recorded."""
    everything: bool = False

    def wants(self, number: int, sample: Sample) -> bool:
        """Whether a sample that OpInfo `number` reaches is recorded."""
        if self.everything or sample.op in self.overloads:
            return True
        return number in self.whole and ("backward" not in sample.origin or "backward" in sample.op)


def pick(settings: Settings, rules: RegisteredRules | None) -> SampleSelection:
    """The OpInfos and overloads that the settings select.  Raises `UnknownOp`."""
    if rules is not None:
        theirs = frozenset(name for name in rules.ops if name.startswith("aten."))
        # Importing OpInfo takes seconds.
        return select_overloads(theirs, opinfo_samples.database()) if theirs else SampleSelection(())
    database = opinfo_samples.database()
    if settings.everything:
        return SampleSelection(tuple(range(len(database))), everything=True)
    whole: list[int] = []
    overloads: set[str] = set()
    known = sorted({str(op) for op in dtensor.registered_overloads()})
    for pattern in settings.patterns:
        infos = [n for n, info in enumerate(database) if fnmatch.filter(opinfo_samples.names(info), pattern)]
        named = [op for op in known if fnmatch.filter(overload_names(op), pattern)] or _decomposed(pattern)
        if not infos and not named:
            raise UnknownOp(pattern, {*(x for info in database for x in opinfo_samples.names(info)), *known})
        whole += infos
        overloads |= set(() if infos else named)
    others = select_overloads(frozenset(overloads), database)
    return SampleSelection(tuple(sorted({*whole, *others.infos})), frozenset(overloads), tuple(sorted(set(whole))))


def _decomposed(name: str) -> list[str]:
    """The overload of that full name, if DTensor has a rule for it in none of its registries."""
    try:
        op = overload(name)
    except (ValueError, AttributeError):  # not three names, or no such op
        return []
    return [name] if dtensor.registry_of(op) else []


def overload_names(op: str) -> tuple[str, ...]:
    """The names by which a user may select an overload: `aten.add.Tensor`, `add.Tensor`, `aten.add` and `add`."""
    namespace, packet, which = op.split(".")
    return op, f"{packet}.{which}", f"{namespace}.{packet}", packet


def matching_overloads(patterns: Sequence[str], ops: Sequence[str]) -> tuple[str, ...]:
    """The overloads that match the patterns.  Raises `UnknownOp` for a pattern without a match."""
    found: set[str] = set()
    for pattern in patterns:
        named = {op for op in ops if fnmatch.filter(overload_names(op), pattern)}
        if not named:
            raise UnknownOp(pattern, {name for op in ops for name in overload_names(op)})
        found |= named
    return tuple(sorted(found))


def select_overloads(ops: frozenset[str], database: Sequence[Any]) -> SampleSelection:
    """The OpInfos with the overloads' names, else with a part of them (`select` for `select_backward`), else all."""
    if not ops:
        return SampleSelection(())
    bearers: set[int] = set()
    names = list(map(opinfo_samples.plain_names, database))
    for op in ops:
        packet = op.split(".")[1]
        found = {n for n, known in enumerate(names) if {packet, packet.strip("_")} & known}
        found = found or {n for n, known in enumerate(names) if any(x in packet for x in known if len(x) > 3)}
        bearers |= found or set(range(len(database)))
    return SampleSelection(tuple(sorted(bearers)), ops)


def wider(picked: SampleSelection, met: Collection[str]) -> SampleSelection:
    """The OpInfos not yet run, for the selected overloads without samples; none if all have some."""
    lacking = frozenset(picked.overloads) - set(met)
    rest = set(range(len(opinfo_samples.database()))) - set(picked.infos) if lacking else set()
    return SampleSelection(tuple(sorted(rest)), lacking)


def chosen_samples(
    by_op: dict[str, list[Sample]], picked: SampleSelection, settings: Settings
) -> Iterable[tuple[str, list[Sample]]]:
    """The samples to test of each overload, sorted by overload."""
    for op in sorted(by_op):
        many = SEARCHED if settings.search else SAMPLES if picked.everything else NAMED
        if dtensor.registry_of(overload(op)) == "decomposition":
            many = TRACED if picked.everything else 2 * TRACED
        if by_op[op]:
            yield op, diverse_subset(by_op[op], many)
