"""What is tried at a time, and what came of it: dockets and hearings, as values and as lines of a journal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from strategies.model import codec
from strategies.model.rule import Sample
from strategies.model.verdict import Crash, Instance
from strategies.model.work_unit import ALONE, CLASSES, Unit, read_unit
from strategies.validation import candidate as suspects
from strategies.validation.candidate import Suspect


@dataclass(frozen=True, slots=True)
class Docket:
    """One overload's samples and the meshes that they are tried on.

    `skip` are steps (see `step`) that killed a worker.  `only` are the units wanted, all of them if it is None.
    `home` is the rules module to import first, and the folder where it is found.  `why` says why there is no sample.
    After `until`, in seconds since the epoch, it is not begun; 0 is no limit.
    """

    op: str
    samples: tuple[Sample, ...]
    meshes: tuple[tuple[int, ...], ...]
    seed: int
    trial: str = ALONE
    search: bool = False
    skip: frozenset[int] = frozenset()
    only: frozenset[Unit] | None = None
    home: tuple[str, str] = ("", "")
    why: str = ""
    until: float = 0.0

    def step(self, sample: int, mesh: int) -> int:
        """The number under which a worker notes that it is at this sample and mesh."""
        return sample * len(self.meshes) + mesh

    def truth_step(self, sample: int) -> int:
        """The number under which it notes that it runs this sample on whole tensors, for all meshes."""
        return len(self.samples) * len(self.meshes) + sample

    def at(self, step: int) -> tuple[int, tuple[int, ...]]:
        """The number of the sample of a step, and the mesh; the first mesh where it is for all of them."""
        sample, mesh = divmod(step, len(self.meshes))
        over = step - len(self.samples) * len(self.meshes)
        return (over, self.meshes[0]) if over >= 0 else (sample, self.meshes[mesh])

    def units(self) -> tuple[Unit, ...]:
        """The units wanted, in order."""
        every = sorted(Unit(self.op, self.trial, dtypes, mesh) for dtypes in CLASSES for mesh in self.meshes)
        return tuple(unit for unit in every if self.only is None or unit in self.only)


@dataclass(slots=True)
class Hearing:
    """What came of one unit.  Rules are known by their text."""

    unit: Unit
    samples: int = 0
    tried: int = 0
    combinations: int = 0
    sound: set[str] = field(default_factory=set)
    by_metadata: set[str] = field(default_factory=set)
    suspects: dict[str, list[Suspect]] = field(default_factory=dict)
    whole: dict[str, list[Suspect]] = field(default_factory=dict)
    missing: list[Instance] = field(default_factory=list)
    untestable: dict[str, str] = field(default_factory=dict)
    skipped: Counter[str] = field(default_factory=Counter)
    crashed: list[Crash] = field(default_factory=list)


def describe(sample: Sample) -> str:
    return f"{sample.op}({', '.join(sample.arguments())}) from {sample.origin}"


def line(hearing: Hearing, seconds: float) -> dict[str, Any]:
    """The line of a journal that says it all.  What has no form in JSON is left out, and counted under `skipped`."""
    skipped = Counter(hearing.skipped)
    told: dict[str, Any] = {
        "kind": "unit", "unit": str(hearing.unit), "samples": hearing.samples, "tried": hearing.tried,
        "combinations": hearing.combinations, "sound": sorted(hearing.sound),
        "by_metadata": sorted(hearing.by_metadata),
        "suspects": _charges(hearing.suspects, skipped), "whole": _charges(hearing.whole, skipped),
        "missing": [found for i in hearing.missing if (found := _data(Suspect(i), skipped))],
        "untestable": dict(sorted(hearing.untestable.items())),
        "crashed": [asdict(crash) for crash in hearing.crashed],
        "skipped": dict(sorted(skipped.items())),
    }  # fmt: skip
    return {name: value for name, value in told.items() if value not in ({}, [], 0)} | {"seconds": round(seconds, 3)}


def _charges(kept: dict[str, list[Suspect]], skipped: Counter[str]) -> dict[str, list[Any]]:
    told = {name: [data for s in found if (data := _data(s, skipped))] for name, found in sorted(kept.items())}
    return {name: found for name, found in told.items() if found}


def _data(suspect: Suspect, skipped: Counter[str]) -> dict[str, Any] | None:
    try:
        return suspects.as_data(suspect)
    except codec.NotData as error:
        skipped[f"a suspicion cannot be kept in a journal: {error}"] += 1
        return None


def read(told: dict[str, Any]) -> Hearing:
    """The hearing of which `line` made a line."""

    def charged(name: str) -> dict[str, list[Suspect]]:
        return {rule: [suspects.read(one) for one in found] for rule, found in told.get(name, {}).items()}

    return Hearing(
        read_unit(told["unit"]), told.get("samples", 0), told.get("tried", 0), told.get("combinations", 0),
        set(told.get("sound", ())), set(told.get("by_metadata", ())), charged("suspects"), charged("whole"),
        [suspects.read(one).instance for one in told.get("missing", ())], dict(told.get("untestable", {})),
        Counter(told.get("skipped", {})), [Crash(**crash) for crash in told.get("crashed", ())],
    )  # fmt: skip


def keep(kept: list[Suspect], suspect: Suspect, most: int) -> None:
    """Keep the smallest: ordinary values before NaN, then fewest ranks, then fewest elements; the earlier of equals."""
    if len(kept) == most and suspect.weight >= kept[-1].weight:
        return
    kept.append(suspect)
    kept.sort(key=lambda s: s.weight)
    del kept[most:]


def merged(heard: Iterable[Mapping[str, Sequence[Suspect]]], most: int) -> dict[str, list[Suspect]]:
    """The suspects of all hearings by rule, the smallest first; rules in the order of their names."""
    found: dict[str, list[Suspect]] = {}
    for charged in heard:
        for name, charges in charged.items():
            for suspect in charges:
                keep(found.setdefault(name, []), suspect, most)
    return dict(sorted(found.items()))
