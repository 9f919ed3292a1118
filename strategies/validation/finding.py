"""Suspects that have been settled: findings, the rules that a real run cleared, and both as lines of a journal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch.distributed.tensor import Replicate

from localtensor.layout import is_plain, parse, short
from strategies.inputs.variants.all_variants import kind_of, truth_of
from strategies.model import codec
from strategies.model.oracle import tell
from strategies.model.rule import Program, Rule, Sample
from strategies.model.verdict import ALONE, CLASSES, Crash, Evidence, Finding, Instance, Unit, Verdict, read_unit
from strategies.validation.probe import Case, Probe

# A claim that looks wrong, as little as is needed to show it again: the sample, the values' name, the draw.


@dataclass(frozen=True, slots=True)
class Candidate:
    """An instance to be run for real; `program` is set where it is more than one op on one axis."""

    instance: Instance
    program: Program | None = None

    @property
    def weight(self) -> tuple[bool, int, int]:
        """Smaller is better to look at: ordinary values first, then few ranks, then few elements."""
        return bool(self.instance.evidence.variant), self.instance.ranks, self.instance.sample.size

    @property
    def name(self) -> str:
        return str(self.program) if self.program else str(self.instance.rule)


def case_of(instance: Instance, seed: int) -> Case:
    """The case that shows it, to the last bit what the probe saw.  Placements of DTensor's own come in replicated."""
    sample, evidence = instance.sample, instance.evidence
    truth = tell(sample, seed=seed)
    if evidence.variant:
        truth = truth_of(sample, truth, evidence.variant, seed) or truth
    inputs = tuple(p if p is None or is_plain(p) else Replicate() for p in instance.rule.inputs)
    probe = Probe(sample, truth, instance.ranks, seed=seed, variant=evidence.variant)
    return probe.case(Rule(instance.rule.op, inputs, instance.rule.outputs), evidence.draw)


def as_data(suspect: Candidate) -> dict[str, Any]:
    """For a journal.  Raises `codec.NotData` where an argument has no form in JSON."""
    i = suspect.instance
    e = i.evidence
    told = {
        "rule": codec.rule(i.rule), "ranks": i.ranks, "sample": codec.sample(i.sample), "verdict": i.verdict.value,
        "source": i.source, "evidence": [e.reason, e.variant, e.draw, e.got, e.want],
    }  # fmt: skip
    return told if suspect.program is None else {**told, "program": _program_data(suspect.program)}


def read_candidate(told: dict[str, Any]) -> Candidate:
    """What `as_data` wrote."""
    sample = codec.read_sample(told["sample"])
    evidence = Evidence(*told["evidence"])
    rule = codec.read_rule(told["rule"])
    instance = Instance(rule, told["ranks"], sample, Verdict(told["verdict"]), told["source"], evidence)
    return Candidate(instance, _read_program(told["program"], instance) if "program" in told else None)


def _program_data(p: Program) -> dict[str, Any]:
    """All but the sample, which is the instance's own."""
    inputs = [[short(x) for x in placements] for placements in p.inputs]
    return {"mesh": list(p.mesh), "inputs": inputs, "then": p.then, "seed": p.seed, "draw": p.draw,
            "flattened": p.flattened}  # fmt: skip


def _read_program(told: dict[str, Any], instance: Instance) -> Program:
    inputs = tuple(tuple(parse(x) for x in placements) for placements in told["inputs"])
    return Program(
        instance.sample, tuple(told["mesh"]), inputs, told["then"], told["seed"], told["draw"], told["flattened"]
    )


CLEARED = "cleared"


@dataclass(frozen=True, slots=True)
class Settled:
    """What became of one suspected rule: a finding, or none if a real run cleared it; and our own crash, if any.

    `same_as` names another suspected rule, to which this one shrank.
    """

    name: str
    finding: Finding | None
    crash: Crash | None = None
    same_as: str = ""


def of_instance(instance: Instance, reason: str) -> Finding:
    sample = instance.sample
    variant = instance.evidence.variant
    special = f" ({variant}: {kind_of(variant).why})" if variant else ""
    return Finding(
        instance.rule, instance.ranks, instance.verdict, reason, tuple(sample.arguments()), sample.origin + special,
        elements=sample.size,
    )  # fmt: skip


def of_suspect(suspect: Candidate, verdict: Verdict, reason: str) -> Finding:
    evidence, program = suspect.instance.evidence, suspect.program
    found = replace(of_instance(suspect.instance, reason), verdict=verdict, got=evidence.got, want=evidence.want)
    return found if program is None else replace(found, title=str(program), mesh=program.mesh)


def settled_line(settled: Settled) -> dict[str, Any]:
    """The line of a journal."""
    told: dict[str, Any] = {"kind": "settled", "rule": settled.name}
    if settled.crash:
        c = settled.crash
        told["crash"] = [c.op, c.sample, c.error, c.trace]
    f = settled.finding
    if f is None:
        return {**told, "verdict": CLEARED} | ({"same_as": settled.same_as} if settled.same_as else {})
    return {
        **told, "verdict": f.verdict.value, "claim": codec.rule(f.rule), "ranks": f.ranks, "reason": f.reason,
        "sample": list(f.sample), "origin": f.origin, "confirmed_on": f.confirmed_on, "got": f.got, "want": f.want,
        "picture": f.picture, "script": f.script, "title": f.title, "mesh": list(f.mesh), "elements": f.elements,
    }  # fmt: skip


def read_settled(told: dict[str, Any]) -> Settled:
    """What `line` wrote."""
    crash = Crash(*told["crash"]) if "crash" in told else None
    if told["verdict"] == CLEARED:
        return Settled(told["rule"], None, crash, told.get("same_as", ""))
    finding = Finding(
        codec.read_rule(told["claim"]), told["ranks"], Verdict(told["verdict"]), told["reason"],
        tuple(told["sample"]), told["origin"], told["confirmed_on"], told["got"], told["want"], told["picture"],
        None, told["script"], told["title"], tuple(told["mesh"]), told["elements"],
    )  # fmt: skip
    return Settled(told["rule"], finding, crash)


# What is tried at a time, and what came of it: dockets and hearings, as values and as lines of a journal.


@dataclass(frozen=True, slots=True)
class Task:
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
class TaskResult:
    """What came of one unit.  Rules are known by their text."""

    unit: Unit
    samples: int = 0
    tried: int = 0
    combinations: int = 0
    sound: set[str] = field(default_factory=set)
    by_metadata: set[str] = field(default_factory=set)
    suspects: dict[str, list[Candidate]] = field(default_factory=dict)
    whole: dict[str, list[Candidate]] = field(default_factory=dict)
    missing: list[Instance] = field(default_factory=list)
    untestable: dict[str, str] = field(default_factory=dict)
    skipped: Counter[str] = field(default_factory=Counter)
    crashed: list[Crash] = field(default_factory=list)


def describe(sample: Sample) -> str:
    return f"{sample.op}({', '.join(sample.arguments())}) from {sample.origin}"


def task_line(hearing: TaskResult, seconds: float) -> dict[str, Any]:
    """The line of a journal that says it all.  What has no form in JSON is left out, and counted under `skipped`."""
    skipped = Counter(hearing.skipped)
    told: dict[str, Any] = {
        "kind": "unit", "unit": str(hearing.unit), "samples": hearing.samples, "tried": hearing.tried,
        "combinations": hearing.combinations, "sound": sorted(hearing.sound),
        "by_metadata": sorted(hearing.by_metadata),
        "suspects": _charges(hearing.suspects, skipped), "whole": _charges(hearing.whole, skipped),
        "missing": [found for i in hearing.missing if (found := _data(Candidate(i), skipped))],
        "untestable": dict(sorted(hearing.untestable.items())),
        "crashed": [asdict(crash) for crash in hearing.crashed],
        "skipped": dict(sorted(skipped.items())),
    }  # fmt: skip
    return {name: value for name, value in told.items() if value not in ({}, [], 0)} | {"seconds": round(seconds, 3)}


def _charges(kept: dict[str, list[Candidate]], skipped: Counter[str]) -> dict[str, list[Any]]:
    told = {name: [data for s in found if (data := _data(s, skipped))] for name, found in sorted(kept.items())}
    return {name: found for name, found in told.items() if found}


def _data(suspect: Candidate, skipped: Counter[str]) -> dict[str, Any] | None:
    try:
        return as_data(suspect)
    except codec.NotData as error:
        skipped[f"a suspicion cannot be kept in a journal: {error}"] += 1
        return None


def read_task(told: dict[str, Any]) -> TaskResult:
    """The hearing of which `line` made a line."""

    def charged(name: str) -> dict[str, list[Candidate]]:
        return {rule: [read_candidate(one) for one in found] for rule, found in told.get(name, {}).items()}

    return TaskResult(
        read_unit(told["unit"]), told.get("samples", 0), told.get("tried", 0), told.get("combinations", 0),
        set(told.get("sound", ())), set(told.get("by_metadata", ())), charged("suspects"), charged("whole"),
        [read_candidate(one).instance for one in told.get("missing", ())], dict(told.get("untestable", {})),
        Counter(told.get("skipped", {})), [Crash(**crash) for crash in told.get("crashed", ())],
    )  # fmt: skip


def keep(kept: list[Candidate], suspect: Candidate, most: int) -> None:
    """Keep the smallest: ordinary values before NaN, then fewest ranks, then fewest elements; the earlier of equals."""
    if len(kept) == most and suspect.weight >= kept[-1].weight:
        return
    kept.append(suspect)
    kept.sort(key=lambda s: s.weight)
    del kept[most:]


def merged(heard: Iterable[Mapping[str, Sequence[Candidate]]], most: int) -> dict[str, list[Candidate]]:
    """The suspects of all hearings by rule, the smallest first; rules in the order of their names."""
    found: dict[str, list[Candidate]] = {}
    for charged in heard:
        for name, charges in charged.items():
            for suspect in charges:
                keep(found.setdefault(name, []), suspect, most)
    return dict(sorted(found.items()))
