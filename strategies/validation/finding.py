"""Tasks of a validation, their results, candidate findings and their confirmations, as values and as journal lines."""

from __future__ import annotations

import base64
import json
import math
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch.distributed.tensor import Replicate

from localtensor.errors import BadPlacement, error_in_one_line
from localtensor.layout import is_standard, parse, short
from strategies.base.foreign_text import misfit, read_json
from strategies.base.journal import FOREIGN_LINE_ERRORS
from strategies.inputs.variants.all_variants import oracle_with_values, values_named
from strategies.model import codec
from strategies.model.call_signature import parse_prior_call, prior_call_text
from strategies.model.oracle import run_oracle
from strategies.model.rule import DTYPE_CLASSES, Program, Rule, Sample
from strategies.model.settings import BadSetting
from strategies.model.verdict import ALONE, Crash, Evidence, Finding, Instance, Verdict, WorkUnit, read_unit
from strategies.torch_api.code_places import no_return_place, refusal_text, without_numbers
from strategies.validation.probe import Case, Probe

MOST_RANKS = 64
"""Ranks of a mesh, as many as `--mesh` takes."""
MOST_CASE_BYTES = 1 << 20
"""The size of a case that is read from a command line."""
CLEARED = "cleared"
"""The verdict in a journal on a rule that a real run found right."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A suspected wrong instance, to be confirmed on real processes.

    `program` is set where it is more than one op on one axis.
    """

    instance: Instance
    program: Program | None = None

    @property
    def weight(self) -> tuple[bool, bool, bool, int, int]:
        """The order of preference: results that are wrong in silence, ordinary values, no empty tensors, few ranks, few elements."""
        sample, evidence = self.instance.sample, self.instance.evidence
        empty = any(not t.numel() for t in sample.tensors)
        return evidence.undefined, bool(evidence.variant), empty, self.instance.ranks, sample.size

    @property
    def name(self) -> str:
        return str(self.program) if self.program else str(self.instance.rule)

    @property
    def key(self) -> str:
        """The name, and the error of a call that is refused: the same call may be refused in several ways."""
        return f"{self.name}; {refusal_key(self)}" if self.instance.verdict is Verdict.REFUSED else self.name


def refused_program(program: Program, error: str) -> Candidate:
    """A call that plain torch takes and for which every rank of DTensor raises `error`, as a candidate finding."""
    rule = Rule(program.sample.op, tuple(placements[-1] for placements in program.inputs), ())
    evidence = Evidence(refusal_text(error), "", program.draw)
    return Candidate(Instance(rule, program.ranks, program.sample, Verdict.REFUSED, "simulated", evidence), program)


def repeated(candidate: Candidate) -> Candidate | None:
    """The op's call after an equal one, as a program; None if the call or a placement has no text."""
    instance, program = candidate.instance, candidate.program
    inputs = program.inputs if program else tuple((p or Replicate(),) for p in instance.rule.inputs)
    then = prior_call_text(instance.sample.call)
    try:
        parse_prior_call(instance.sample.op, then)
    except ValueError:
        return None
    one = program or Program(instance.sample, (instance.ranks,), inputs)
    drawn = all(is_standard(p) for layout in inputs for p in layout)
    return refused_program(replace(one, then=then), "the second time") if drawn else None


def refusal_key(candidate: Candidate) -> str:
    """The name under which equal refusals are one: of an op, its gradient or a step, by their error without its numbers."""
    then = candidate.program.then if candidate.program else ""
    what = "gradient" if re.search("grad|sgd|adam", then) else f"then {then}" if then else "call"
    return f"{candidate.instance.rule.op}, {what}: {without_numbers(candidate.instance.evidence.reason)}"


def case_of(instance: Instance, seed: int) -> Case:
    """The case of the instance, bit for bit as the probe ran it.  Inputs with DTensor's own placements are replicated."""
    sample, evidence = instance.sample, instance.evidence
    oracle = run_oracle(sample, seed=seed)
    if evidence.variant:
        oracle = oracle_with_values(sample, oracle, evidence.variant, seed) or oracle
    inputs = tuple(p if p is None or is_standard(p) else Replicate() for p in instance.rule.inputs)
    probe = Probe(sample, oracle, instance.ranks, seed=seed, variant=evidence.variant)
    return probe.case(Rule(instance.rule.op, inputs, instance.rule.outputs), evidence.draw)


def candidate_data(candidate: Candidate) -> dict[str, Any]:
    """The candidate for a journal.  Raises `codec.NotData` where an argument has no form in JSON."""
    i = candidate.instance
    e = i.evidence
    body: dict[str, Any] = {
        "rule": codec.rule(i.rule), "ranks": i.ranks, "sample": codec.sample(i.sample), "verdict": i.verdict.value,
        "source": i.source, "evidence": [e.reason, e.variant, e.draw, e.got, e.want],
    }  # fmt: skip
    if (p := candidate.program) is not None:  # its sample is the instance's own
        inputs = [[short(x) for x in placements] for placements in p.inputs]
        body["program"] = {
            "mesh": list(p.mesh), "inputs": inputs, "then": p.then, "seed": p.seed, "draw": p.draw,
            "flattened": p.flattened,
        }  # fmt: skip
    return body


def read_candidate(body: dict[str, Any]) -> Candidate:
    """The candidate that `candidate_data` wrote.  Raises one of `journal.FOREIGN_LINE_ERRORS` for any other JSON."""
    if problem := misfit(body, _CANDIDATE, "a candidate"):
        raise ValueError(problem)
    sample = codec.read_sample(body["sample"])
    evidence = Evidence(*body["evidence"])
    rule = codec.read_rule(body["rule"])
    instance = Instance(rule, body["ranks"], sample, Verdict(body["verdict"]), body["source"], evidence)
    p = body.get("program")
    mesh = p["mesh"] if p else [body["ranks"]]
    if min(mesh) < 1 or max(body["ranks"], math.prod(mesh)) > MOST_RANKS:
        raise ValueError(f"a candidate is of a mesh that does not have 1 to {MOST_RANKS} ranks")
    if p is None:
        return Candidate(instance)
    try:
        inputs = tuple(tuple(parse(x) for x in placements) for placements in p["inputs"])
    except BadPlacement as error:
        raise ValueError(str(error)) from None
    program = Program(sample, tuple(p["mesh"]), inputs, p["then"], p["seed"], p["draw"], p["flattened"])
    return Candidate(instance, program)


_CANDIDATE = {
    "ranks": int, "source": str, "evidence": (str, str, int, str, str),
    "program": {"mesh": [int], "inputs": [[str]], "then": str, "seed": int, "draw": int, "flattened": bool},
}  # fmt: skip


def case_text(candidate: Candidate, seed: int) -> str:
    """The candidate, with the seed of its probe, in the letters of a command line; `read_case` reads it.

    Raises `codec.NotEncodable`.
    """
    data = json.dumps([seed, candidate_data(candidate)], separators=(",", ":"))
    return base64.urlsafe_b64encode(zlib.compress(data.encode(), 9)).decode()


def read_case(text: str) -> tuple[int, Candidate]:
    """The seed and the candidate of `case_text`, which is data.  Raises `BadSetting` for any other text."""
    try:
        packed = zlib.decompressobj()
        seed, data = read_json(packed.decompress(base64.urlsafe_b64decode(text), MOST_CASE_BYTES))
        if problem := misfit(seed, int, "its seed"):
            raise ValueError(problem)
        return seed, read_candidate(data)
    except (*FOREIGN_LINE_ERRORS, zlib.error) as error:
        remedy = "Copy the whole command that stands beside the finding, under the same version."
        raise BadSetting(
            "--case", text[:24], f"this is no case of a finding ({error_in_one_line(error, 60)})", remedy
        ) from None


@dataclass(frozen=True, slots=True)
class RuleOutcome:
    """The outcome of one suspected rule: a finding, or None if a real run cleared it; and a crash, if there was one.

    `same_as` names another suspected rule, to which this one shrank.
    """

    name: str
    finding: Finding | None
    crash: Crash | None = None
    same_as: str = ""


def finding_of_instance(instance: Instance, reason: str) -> Finding:
    """The finding for an instance, with this reason."""
    sample = instance.sample
    variant = instance.evidence.variant
    special = f" ({variant}: {values_named(variant).why})" if variant else ""
    return Finding(
        instance.rule,
        instance.ranks,
        instance.verdict,
        reason,
        tuple(sample.arguments()),
        sample.origin + special,
        elements=sample.size,
    )


def finding_of_candidate(candidate: Candidate, verdict: Verdict, reason: str) -> Finding:
    evidence, program = candidate.instance.evidence, candidate.program
    found = finding_of_instance(candidate.instance, reason)
    found = replace(found, verdict=verdict, got=evidence.got, want=evidence.want)
    place = no_return_place(reason)
    stays = f", no return from {place.name}" if place else ""  # beside errors of the same call
    return replace(found, title=f"{program}{stays}", mesh=program.mesh) if program else found


def outcome_line(settled: RuleOutcome) -> dict[str, Any]:
    """The line of a journal."""
    body: dict[str, Any] = {"kind": "settled", "rule": settled.name}
    if settled.crash:
        c = settled.crash
        body["crash"] = [c.op, c.sample, c.error, c.trace]
    f = settled.finding
    if f is None:
        return {**body, "verdict": CLEARED} | ({"same_as": settled.same_as} if settled.same_as else {})
    return {
        **body, "verdict": f.verdict.value, "claim": codec.rule(f.rule), "ranks": f.ranks, "reason": f.reason,
        "sample": list(f.sample), "origin": f.origin, "confirmed_on": f.confirmed_on, "got": f.got, "want": f.want,
        "picture": f.picture, "script": f.script, "title": f.title, "mesh": list(f.mesh), "elements": f.elements,
        "command": f.command,
    }  # fmt: skip


def read_outcome(body: dict[str, Any]) -> RuleOutcome:
    """The outcome that `outcome_line` wrote."""
    crash = Crash(*body["crash"]) if "crash" in body else None
    if body["verdict"] == CLEARED:
        return RuleOutcome(body["rule"], None, crash, body.get("same_as", ""))
    finding = Finding(
        codec.read_rule(body["claim"]),
        body["ranks"],
        Verdict(body["verdict"]),
        body["reason"],
        tuple(body["sample"]),
        body["origin"],
        body["confirmed_on"],
        body["got"],
        body["want"],
        body["picture"],
        None,
        body["script"],
        body["title"],
        tuple(body["mesh"]),
        body["elements"],
        command=body.get("command", ""),
    )
    return RuleOutcome(body["rule"], finding, crash)


@dataclass(frozen=True, slots=True)
class OverloadTask:
    """One overload's samples and the meshes that they are tried on.

    `skip` are steps (see `step`) that killed a worker.  `only` are the units wanted, None for all of them.
    `home` is the rules module to import first, and its folder.  `why` is the reason for having no samples.  `source` is the
    name of the source whose claims are tested. A task does not begin after `until`, in seconds since the epoch; 0 is no limit.
    """

    op: str
    samples: tuple[Sample, ...]
    meshes: tuple[tuple[int, ...], ...]
    seed: int
    kind: str = ALONE
    search: bool = False
    skip: frozenset[int] = frozenset()
    only: frozenset[WorkUnit] | None = None
    home: tuple[str, str] = ("", "")
    why: str = ""
    until: float = 0.0
    further: bool = True  # whether the samples are also cast to dtypes that none of them has
    source: str = "dtensor"
    device: str = "cpu"  # where the op runs

    def step(self, sample: int, mesh: int) -> int:
        """The number that a worker notes when it begins this sample on this mesh."""
        return sample * len(self.meshes) + mesh

    def oracle_step(self, sample: int) -> int:
        """The number that it notes when it runs this sample on whole tensors, for all meshes."""
        return len(self.samples) * len(self.meshes) + sample

    def at(self, step: int) -> tuple[int, tuple[int, ...]]:
        """The sample's number and the mesh of a step; the first mesh for a step of all meshes."""
        sample, mesh = divmod(step, len(self.meshes))
        over = step - len(self.samples) * len(self.meshes)
        return (over, self.meshes[0]) if over >= 0 else (sample, self.meshes[mesh])

    def units(self) -> tuple[WorkUnit, ...]:
        """The units wanted, in order."""
        every = sorted(WorkUnit(self.op, self.kind, dtypes, mesh) for dtypes in DTYPE_CLASSES for mesh in self.meshes)
        return tuple(unit for unit in every if self.only is None or unit in self.only)


@dataclass(slots=True)
class TaskResult:
    """The result of one unit.  Rules are keyed by their text."""

    unit: WorkUnit
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
    left_out: dict[str, list[str]] = field(default_factory=dict)
    """Names of what was not tried on this class of dtypes, by what they are and why; in the first unit of the class."""


def describe(sample: Sample) -> str:
    """The call and its origin, for messages."""
    return f"{sample.op}({', '.join(sample.arguments())}) from {sample.origin}"


def task_line(result: TaskResult, seconds: float) -> dict[str, Any]:
    """The line of a journal.  A candidate without a form in JSON is left out, and counted under `skipped`."""
    skipped = Counter(result.skipped)
    body: dict[str, Any] = {
        "kind": "unit",
        "unit": str(result.unit),
        "samples": result.samples,
        "tried": result.tried,
        "combinations": result.combinations,
        "sound": sorted(result.sound),
        "by_metadata": sorted(result.by_metadata),
        "suspects": _candidate_lists(result.suspects, skipped),
        "whole": _candidate_lists(result.whole, skipped),
        "missing": [found for i in result.missing if (found := _candidate_data(Candidate(i), skipped))],
        "untestable": dict(sorted(result.untestable.items())),
        "crashed": [asdict(crash) for crash in result.crashed],
        "skipped": dict(sorted(skipped.items())),
        "left_out": result.left_out,
    }
    return {name: value for name, value in body.items() if value not in ({}, [], 0)} | {"seconds": round(seconds, 3)}


def _candidate_lists(kept: dict[str, list[Candidate]], skipped: Counter[str]) -> dict[str, list[Any]]:
    body = {
        name: [data for s in found if (data := _candidate_data(s, skipped))] for name, found in sorted(kept.items())
    }
    return {name: found for name, found in body.items() if found}


def _candidate_data(candidate: Candidate, skipped: Counter[str]) -> dict[str, Any] | None:
    try:
        return candidate_data(candidate)
    except codec.NotEncodable as error:
        skipped[f"a candidate cannot be kept in a journal: {error}"] += 1
        return None


def read_task(body: dict[str, Any]) -> TaskResult:
    """The result that `task_line` wrote."""

    def by_rule(name: str) -> dict[str, list[Candidate]]:
        return {rule: [read_candidate(one) for one in found] for rule, found in body.get(name, {}).items()}

    return TaskResult(
        read_unit(body["unit"]),
        body.get("samples", 0),
        body.get("tried", 0),
        body.get("combinations", 0),
        set(body.get("sound", ())),
        set(body.get("by_metadata", ())),
        by_rule("suspects"),
        by_rule("whole"),
        [read_candidate(one).instance for one in body.get("missing", ())],
        dict(body.get("untestable", {})),
        Counter(body.get("skipped", {})),
        [Crash(**crash) for crash in body.get("crashed", ())],
        dict(body.get("left_out", {})),
    )


def keep_smallest(kept: list[Candidate], candidate: Candidate, most: int) -> None:
    """Add the candidate if it is among the `most` smallest by weight; of equals the earlier one stays."""
    if len(kept) == most and candidate.weight >= kept[-1].weight:
        return
    kept.append(candidate)
    kept.sort(key=lambda s: s.weight)
    del kept[most:]


def merge_candidates(groups: Iterable[Mapping[str, Sequence[Candidate]]], most: int) -> dict[str, list[Candidate]]:
    """The candidates of all groups by rule, the smallest first; rules in the order of their names."""
    found: dict[str, list[Candidate]] = {}
    for by_rule in groups:
        for name, candidates in by_rule.items():
            for candidate in candidates:
                keep_smallest(found.setdefault(name, []), candidate, most)
    return dict(sorted(found.items()))
