"""Suspects that have been settled: findings, the rules that a real run cleared, and both as lines of a journal."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from strategies.inputs.variants.value_variants import kind_of
from strategies.model import codec
from strategies.model.verdict import Crash, Finding, Instance, Verdict
from strategies.validation.candidate import Suspect

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


def of_suspect(suspect: Suspect, verdict: Verdict, reason: str) -> Finding:
    evidence, program = suspect.instance.evidence, suspect.program
    found = replace(of_instance(suspect.instance, reason), verdict=verdict, got=evidence.got, want=evidence.want)
    return found if program is None else replace(found, title=str(program), mesh=program.mesh)


def line(settled: Settled) -> dict[str, Any]:
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


def read(told: dict[str, Any]) -> Settled:
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
