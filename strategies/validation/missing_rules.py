"""The search for missing rules: every tuple of input placements of a sample, and the valid ones not registered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate
from torch.distributed.tensor.placement_types import Placement

from localtensor.layout import shorts
from strategies.inputs.variants.adversarial import number_tensors
from strategies.model.call_signature import CallKind, call_kind
from strategies.model.oracle import OracleResult, mutates
from strategies.model.rule import Claim, Rule, Sample, overload, written_leaves
from strategies.model.verdict import Evidence, Instance, Verdict
from strategies.torch_api import dtensor
from strategies.validation.claim_sources import input_tuples
from strategies.validation.evidence import RuleEvidence, gather_evidence, has_distinct_elements
from strategies.validation.probe import Probe


@dataclass(slots=True)
class MissingRuleSearch:
    """The result of a search on one mesh size: the input tuples tried, the rules that hold, and the registered ones."""

    tried: set[str] = field(default_factory=set)
    holds: dict[str, Rule] = field(default_factory=dict)
    claimed: set[str] = field(default_factory=set)
    combinations: int = 0
    untried: str = ""


SearchedSamples = Sequence[tuple[Sample, dict[int, MissingRuleSearch]]]
"""Each sample of one overload, and the result of the search on each mesh size."""


@dataclass(frozen=True, slots=True)
class Survey:
    """The knowledge on one kind of call: the input placements tried, the rules that hold on all of its samples, those
    of them that DTensor claims, and the evidence for the others."""

    kind: CallKind
    samples: tuple[Sample, ...]
    ranks: tuple[int, ...]
    tried: frozenset[str]
    holds: dict[str, Rule]
    claimed: frozenset[str]
    backing: dict[str, RuleEvidence]

    def missing(self) -> list[Rule]:
        """The rules with enough evidence to be reported as missing."""
        return [self.holds[name] for name, backing in self.backing.items() if backing.enough]

    def says(self, rule: Rule) -> bool | None:
        """Whether the rule holds for this kind of call; None where that is unknown."""
        name = str(rule)
        if name in self.backing:
            return True if self.backing[name].enough else False if self.backing[name].against else None
        if name in self.holds or str(with_replicated_extremes(rule)) in self.holds:
            return True
        return False if shorts(rule.inputs) in self.tried else None


def search_placements(
    sample: Sample, truth: OracleResult, ranks: int, claimed: Sequence[Claim], seed: int
) -> MissingRuleSearch:
    """Every tuple of input placements, and the output placements that hold for it."""
    seen = MissingRuleSearch(claimed={str(c.rule) for c in claimed})
    if truth.metadata_only or dtensor.rewrites_arguments(overload(sample.op)) or not _is_conclusive(sample, truth):
        return seen
    if written_leaves(sample.call):  # a mutated argument must keep its placement, which leaves nothing to search
        return seen
    probe = Probe(sample, truth, ranks, seed=seed)
    writes = mutates(sample.op)
    todo, every = input_tuples(sample, ranks)
    if len(todo) < every:
        seen.untried = f"a search tries {len(todo)} of the {every} tuples of input placements"
    for inputs in todo:
        seen.tried.add(shorts(inputs))
        if all(isinstance(p, Replicate) for p in inputs):
            continue
        per_output = [probe.placements(inputs, i, probe.draws(inputs)) for i in range(len(truth.outputs))]
        seen.combinations += sum(3 + out.ndim + 2 for out in truth.outputs)
        for outputs in product(*per_output) if all(per_output) else ():
            if not writes or outputs[0] == inputs[0]:  # a mutated argument keeps its placement
                rule = Rule(sample.op, inputs, outputs)
                seen.holds[str(rule)] = rule
    return seen


def _is_conclusive(sample: Sample, truth: OracleResult) -> bool:
    """Whether rules that hold on this sample prove anything: for equal elements, booleans or one integer nearly every
    placement holds."""
    if not truth.outputs or not all(isinstance(o, Tensor) for o in truth.outputs):
        return False
    if all(t.dtype == torch.bool for t in sample.tensors):
        return False
    return all(has_distinct_elements(o) or (o.numel() == 1 and o.dtype.is_floating_point) for o in truth.outputs)


def with_replicated_extremes(rule: Rule) -> Rule:
    """The same with R for each result that is P(avg), P(min) or P(max): if it holds, the rule holds, too."""

    def put(p: Placement | None) -> Placement | None:
        return Replicate() if isinstance(p, Partial) and p.reduce_op in ("avg", "min", "max") else p

    return Rule(rule.op, rule.inputs, tuple(map(put, rule.outputs)))


def survey_kinds(found: SearchedSamples, seed: int = 0) -> list[Survey]:
    """A survey of each kind of call, in the order in which the kinds were met."""
    groups: dict[CallKind, list[tuple[Sample, dict[int, MissingRuleSearch]]]] = {}
    for sample, by_ranks in found:
        if any(seen.tried for seen in by_ranks.values()):
            groups.setdefault(call_kind(sample), []).append((sample, by_ranks))
    free = number_tensors(sample for sample, _ in found)
    return [_survey(kind, members, free, seed) for kind, members in groups.items()]


def _survey(kind: CallKind, members: SearchedSamples, free: frozenset[tuple[int, int]], seed: int) -> Survey:
    every = [seen for _, by_ranks in members for seen in by_ranks.values() if seen.tried]
    refuted: set[str] = set()
    known = {name: rule for seen in every for name, rule in seen.holds.items()}
    for seen in every:
        absent = [(name, rule) for name, rule in known.items() if name not in seen.holds]
        tried_here = [(name, rule) for name, rule in absent if shorts(rule.inputs) in seen.tried]
        refuted |= {name for name, rule in tried_here if str(with_replicated_extremes(rule)) not in seen.holds}
    holds = {name: rule for name, rule in known.items() if name not in refuted}
    claimed = frozenset(name for seen in every for name in seen.claimed)
    served = {shorts(holds[name].inputs) for name in claimed & set(holds)}
    rest = [rule for name, rule in holds.items() if name not in claimed and shorts(rule.inputs) not in served]
    samples = tuple(sample for sample, _ in members)
    ranks = tuple(sorted({n for _, by_ranks in members for n in by_ranks}))
    tried = frozenset(inputs for seen in every for inputs in seen.tried)
    return Survey(kind, samples, ranks, tried, holds, claimed, gather_evidence(samples, rest, ranks, free, seed))


def missing_instances(found: SearchedSamples, seed: int = 0) -> list[Instance]:
    """The smallest instance of each missing rule: it holds on every call of one kind and is not registered for it."""
    lacking: dict[str, Instance] = {}
    for one in survey_kinds(found, seed):
        for rule in one.missing():
            sample = min(one.samples, key=lambda s: s.size)
            why = Evidence(missing_reason(one.backing[str(rule)], one.kind))
            lacking.setdefault(str(rule), Instance(rule, min(one.ranks), sample, Verdict.MISSING, "search", why))
    return list(lacking.values())


def missing_reason(backing: RuleEvidence, kind: CallKind) -> str:
    """Why the rule is reported as missing, in one sentence."""
    sizes = " and ".join(map(str, backing.ranks))
    seen = f"holds on {len(backing.samples)} independent samples of {backing.shapes} shapes on {sizes} ranks"
    where = ", ".join(str(fact) for fact in kind.facts)
    return f"{seen}{f', where {where}' if where else ''}, and is not registered"
