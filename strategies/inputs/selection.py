"""Which op calls to try: from names and globs to OpInfos and overloads, and how many samples of each."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from strategies.inputs import opinfo_samples
from strategies.model.call_signature import choose
from strategies.model.rule import Sample, overload
from strategies.model.settings import Settings, UnknownOp
from strategies.torch_api import dtensor
from strategies.torch_api.user_modules import Registered

SAMPLES, TRACED, NAMED, SEARCHED = 24, 6, 64, 10
"""Samples tried of one overload: in a sweep, of a decomposition, of an op that the user named, and in a search."""


@dataclass(frozen=True, slots=True)
class Pick:
    """OpInfos to run, by their number, and which of the calls met there are wanted."""

    infos: tuple[int, ...]
    overloads: frozenset[str] = frozenset()
    whole: tuple[int, ...] = ()
    """OpInfos that were named themselves: all their own calls are wanted."""
    everything: bool = False

    def wants(self, number: int, sample: Sample) -> bool:
        if self.everything or sample.op in self.overloads:
            return True
        return number in self.whole and ("backward" not in sample.origin or "backward" in sample.op)


def pick(settings: Settings, rules: Registered | None) -> Pick:
    """The OpInfos and overloads that the settings ask for.  Raises `UnknownOp`."""
    if rules is not None:
        theirs = frozenset(name for name in rules.ops if name.startswith("aten."))
        return (
            pick_overloads(theirs, opinfo_samples.database()) if theirs else Pick(())
        )  # OpInfo takes seconds to import
    database = opinfo_samples.database()
    if settings.everything:
        return Pick(tuple(range(len(database))), everything=True)
    whole: list[int] = []
    overloads: set[str] = set()
    known = sorted({str(op) for op in dtensor.registered()})
    for pattern in settings.patterns:
        infos = [
            n
            for n, info in enumerate(database)
            if any(fnmatch.fnmatchcase(x, pattern) for x in opinfo_samples.names(info))
        ]
        named = [op for op in known if any(fnmatch.fnmatchcase(x, pattern) for x in spellings(op))]
        named = named or _decomposed(pattern)
        if not infos and not named:
            raise UnknownOp(pattern, {*(x for info in database for x in opinfo_samples.names(info)), *known})
        whole += infos
        overloads |= set(() if infos else named)
    others = pick_overloads(frozenset(overloads), database)
    return Pick(tuple(sorted({*whole, *others.infos})), frozenset(overloads), tuple(sorted(set(whole))))


def _decomposed(name: str) -> list[str]:
    """The overload of that full name, if it is in no registry but DTensor has a rule for it all the same."""
    try:
        op = overload(name)
    except (ValueError, AttributeError):  # not three names, or no such op
        return []
    return [name] if dtensor.source_of(op) else []


def spellings(op: str) -> tuple[str, ...]:
    """`aten.add.Tensor` answers to itself, `add.Tensor`, `aten.add` and `add`."""
    namespace, packet, which = op.split(".")
    return op, f"{packet}.{which}", f"{namespace}.{packet}", packet


def matching(patterns: Sequence[str], ops: Sequence[str]) -> tuple[str, ...]:
    """The overloads that the patterns name.  Raises `UnknownOp` for one that names none."""
    found: set[str] = set()
    for pattern in patterns:
        named = {op for op in ops if any(fnmatch.fnmatchcase(name, pattern) for name in spellings(op))}
        if not named:
            raise UnknownOp(pattern, {name for op in ops for name in spellings(op)})
        found |= named
    return tuple(sorted(found))


def pick_overloads(ops: frozenset[str], database: Sequence[Any]) -> Pick:
    """The OpInfos that bear the overloads' names, else a part of them (`select` for `select_backward`); all
    of them for an overload that has not even that."""
    if not ops:
        return Pick(())
    bearers: set[int] = set()
    for op in ops:
        packet = op.split(".")[1]
        found = {n for n, info in enumerate(database) if {packet, packet.strip("_")} & _plain_names(info)}
        found = found or {
            n for n, info in enumerate(database) if any(x in packet for x in _plain_names(info) if len(x) > 3)
        }
        bearers |= found or set(range(len(database)))
    return Pick(tuple(sorted(bearers)), ops)


def _plain_names(info: Any) -> set[str]:
    return {part for name in opinfo_samples.names(info) for part in (name, name.split(".")[-1], name.replace(".", "_"))}


def wider(picked: Pick, met: Collection[str]) -> Pick:
    """The OpInfos not yet run, for the overloads asked for that no sample has reached; none if all were."""
    lacking = frozenset(picked.overloads) - set(met)
    rest = set(range(len(opinfo_samples.database()))) - set(picked.infos) if lacking else set()
    return Pick(tuple(sorted(rest)), lacking)


def chosen(by_op: dict[str, list[Sample]], picked: Pick, settings: Settings) -> Iterable[tuple[str, list[Sample]]]:
    """The samples to try of each overload, overloads in the order of their names."""
    for op in sorted(by_op):
        many = SEARCHED if settings.search else SAMPLES if picked.everything else NAMED
        if dtensor.source_of(overload(op)) == "decomposition":
            many = TRACED if picked.everything else 2 * TRACED
        if by_op[op]:
            yield op, choose(by_op[op], many)
