"""A claim that looks wrong, as little as is needed to show it again: the sample, the values' name, the draw."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.distributed.tensor import Replicate

from localtensor.layout.spec import is_plain, parse, short
from strategies.inputs.variants.value_variants import truth_of
from strategies.model import codec
from strategies.model.oracle import tell
from strategies.model.program import Program
from strategies.model.rule import Rule
from strategies.model.verdict import Evidence, Instance, Verdict
from strategies.validation.probe import Case, Probe


@dataclass(frozen=True, slots=True)
class Suspect:
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


def as_data(suspect: Suspect) -> dict[str, Any]:
    """For a journal.  Raises `codec.NotData` where an argument has no form in JSON."""
    i = suspect.instance
    e = i.evidence
    told = {
        "rule": codec.rule(i.rule), "ranks": i.ranks, "sample": codec.sample(i.sample), "verdict": i.verdict.value,
        "source": i.source, "evidence": [e.reason, e.variant, e.draw, e.got, e.want],
    }  # fmt: skip
    return told if suspect.program is None else {**told, "program": _program_data(suspect.program)}


def read(told: dict[str, Any]) -> Suspect:
    """What `as_data` wrote."""
    sample = codec.read_sample(told["sample"])
    evidence = Evidence(*told["evidence"])
    rule = codec.read_rule(told["rule"])
    instance = Instance(rule, told["ranks"], sample, Verdict(told["verdict"]), told["source"], evidence)
    return Suspect(instance, _read_program(told["program"], instance) if "program" in told else None)


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
