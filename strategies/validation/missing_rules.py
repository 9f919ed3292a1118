"""The search for missing rules, valid shardings that are not registered, and the evidence for each.

A rule is reported as missing only if it holds on at least three calls with independent values and decompositions of
partial inputs, of at least two shapes, one of them uneven where the rule has a shard, on 2 and 3 ranks and on every
mesh size of the search; and if no such call refutes it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from localtensor.layout import MAX_JUMP_SHARE, is_reducible, shorts
from localtensor.layout import fold_partials as fold
from strategies.inputs.variants.adversarial import Adversary, adversaries, number_tensors
from strategies.inputs.variants.all_variants import oracle_with_values
from strategies.model.call_signature import CallKind, call_kind
from strategies.model.kernels import REJECTIONS, run_call
from strategies.model.oracle import OracleResult, equal_within, mutates, run_oracle
from strategies.model.rule import Claim, Rule, Sample, overload, written_leaves
from strategies.model.verdict import Evidence, Instance, Verdict
from strategies.torch_api import dtensor
from strategies.validation.probe import Probe
from strategies.validation.sources.dtensor import claims, input_tuples

SAMPLES, SHAPES = 3, 2
"""Independent calls, and different shapes among them, that a missing rule needs."""
BASES = 2
"""Calls of one kind from which adversaries are made."""
ALWAYS = (2, 3)
"""Mesh sizes that are always tested: a rule may hold on 2 ranks by a coincidence of halves."""


@dataclass(frozen=True, slots=True)
class RuleEvidence:
    """The evidence for a rule on one kind of call; `against` is the evidence against it, or ""."""

    samples: tuple[str, ...] = ()
    shapes: int = 0
    uneven: bool = False
    ranks: tuple[int, ...] = ()
    against: str = ""

    @property
    def enough(self) -> bool:
        """Whether the rule may be reported as missing."""
        many = len(self.samples) >= SAMPLES and self.shapes >= SHAPES
        return not self.against and many and self.uneven and len(self.ranks) >= len(ALWAYS)


@dataclass(slots=True)
class _SupportCount:
    rule: Rule
    samples: dict[str, None] = field(default_factory=dict)
    shapes: set[tuple[torch.Size, ...]] = field(default_factory=set)
    uneven: bool = False
    ranks: set[int] = field(default_factory=set)
    single: set[float] = field(default_factory=set)
    against: str = ""

    def backing(self) -> RuleEvidence:
        return RuleEvidence(tuple(self.samples), len(self.shapes), self.uneven, tuple(sorted(self.ranks)), self.against)


def gather_evidence(
    members: Sequence[Sample], rules: Iterable[Rule], ranks: Sequence[int], free: frozenset[tuple[int, int]], seed: int
) -> dict[str, RuleEvidence]:
    """The evidence for each rule, by its text; `members` are calls of one kind, on which the rules hold.

    A rule is dropped at the first call that refutes it.  For `free` see `adversarial.numbers`.
    """
    supports = {str(rule): _SupportCount(rule) for rule in rules}
    sizes = tuple(sorted({*ALWAYS, *ranks}))
    met: dict[tuple[torch.Size, ...], Sample] = {}
    for number, (one, repeated) in enumerate(_adversaries(members, free, seed) if supports else ()):
        alive = [t for t in supports.values() if not t.against and not (repeated and t.backing().enough)]
        if not alive:
            break
        with contextlib.suppress(*REJECTIONS):  # the op does not take these sizes or values
            oracle = run_oracle(one.sample, seed=seed + number)
            if oracle.unstable <= MAX_JUMP_SHARE:
                _probe_rules(one, oracle, alive, sizes, seed + number)
                met.setdefault(tuple(t.shape for t in one.sample.tensors), one.sample)
    known = {tuple(t.shape for t in sample.tensors) for sample in members}
    others = [sample for shapes, sample in met.items() if shapes not in known]
    _reject_registered([t for t in supports.values() if t.backing().enough], others, sizes[0])
    return {name: support.backing() for name, support in supports.items()}


def _adversaries(
    members: Sequence[Sample], free: frozenset[tuple[int, int]], seed: int
) -> Iterator[tuple[Adversary, bool]]:
    """All adversaries of the largest call, and those of other sizes of the next; then the rest, marked True, for rules
    without enough evidence by then.  Complex calls come last: they cannot refute rules that depend on order."""
    bases = sorted(members, key=lambda s: (any(t.dtype.is_complex for t in s.tensors), -s.size))[:BASES]
    made = [list(adversaries(base, free, seed + i)) for i, base in enumerate(bases)]
    for repeated in (False, True):
        for row in zip(*made, strict=True):
            for i, one in enumerate(row):
                if (i == 0 or one.resized) != repeated:
                    yield one, repeated


def _probe_rules(
    one: Adversary, oracle: OracleResult, supports: Sequence[_SupportCount], sizes: Sequence[int], seed: int
) -> None:
    whole = any(not any(isinstance(p, Partial) for p in support.rule.inputs) for support in supports)
    wild = oracle_with_values(one.sample, oracle, "specials", seed) if whole else None
    for ranks in sizes:
        probe = Probe(one.sample, oracle, ranks, seed=seed)
        beside = Probe(one.sample, wild, ranks, seed=seed, variant="specials") if wild is not None else None
        for support in supports:
            if not support.against and _fits(support.rule, one.sample, ranks):
                found = rule_problem(probe, support.rule)
                if not found and beside and not any(isinstance(p, Partial) for p in support.rule.inputs):
                    found = rule_problem(beside, support.rule)
                if found:
                    support.against = f"{one.name} on {ranks} ranks: {found}"
                elif one.counts:
                    _count(support, one.sample, oracle, ranks)


def rule_problem(probe: Probe, rule: Rule) -> str:
    """What is wrong with the rule on this sample and mesh size, in any of the decompositions, or ""."""
    for draw in probe.draws(rule.inputs):
        local = probe.local(rule.inputs, draw)
        found = probe.against(local, rule.outputs)
        if found or isinstance(local, str):
            return probe.reason(found, rule.outputs) if found else str(local)
        for i, placement in enumerate(rule.outputs):
            if not _exact(probe.oracle, i, [out[i] for out in local], placement):
                return f"output {i}: choosing among the parts gives another value"
    return ""


def _exact(oracle: OracleResult, i: int, held: Sequence[Tensor], placement: Placement | None) -> bool:
    """Whether a P(min) or P(max) result is exact: choosing one of the parts does not round, as adding does."""
    slack = oracle.slack[i]
    if slack is None or not isinstance(placement, Partial) or placement.reduce_op not in ("min", "max"):
        return True
    return equal_within(fold(torch.stack(list(held)), placement.reduce_op), oracle.outputs[i], slack)


def _fits(rule: Rule, sample: Sample, ranks: int) -> bool:
    """Whether each rank has a row of each shard, as DTensor requires, and each reduction is defined."""

    def fits(p: Placement | None, t: Tensor) -> bool:
        if isinstance(p, Partial):
            return t.dtype != torch.bool and is_reducible(p.reduce_op, t.dtype)
        return not isinstance(p, Shard) or (p.dim < t.ndim and t.shape[p.dim] >= ranks)

    return all(fits(p, t) for p, t in zip(rule.inputs, sample.tensors, strict=True))


def _count(support: _SupportCount, sample: Sample, oracle: OracleResult, ranks: int) -> None:
    """Add the sample to the evidence, unless its results prove nothing: those with equal elements, or a number seen
    before."""
    outputs = [o for o in oracle.outputs if isinstance(o, Tensor)]
    if any(o.numel() != 1 and not has_distinct_elements(o) for o in outputs):
        return
    for out in outputs:
        if out.numel() == 1:
            value = float(out.flatten()[0].abs().double())
            if ranks == ALWAYS[0] and value in support.single:
                return
            support.single.add(value)
    support.samples[sample.origin] = None
    support.shapes.add(tuple(t.shape for t in sample.tensors))
    support.ranks.add(ranks)
    placed = [
        *zip(support.rule.inputs, sample.tensors, strict=True),
        *zip(support.rule.outputs, oracle.outputs, strict=False),
    ]
    shards = [(p.dim, t) for p, t in placed if isinstance(p, Shard) and isinstance(t, Tensor)]
    support.uneven = support.uneven or not shards or any(t.shape[dim] % ranks for dim, t in shards)


def has_distinct_elements(out: Tensor) -> bool:
    """Whether not all elements are equal."""
    return out.numel() > 1 and bool((out != out.flatten()[0]).any())


def _reject_registered(supports: Sequence[_SupportCount], samples: Sequence[Sample], ranks: int) -> None:
    """Refute the rules that DTensor registers for the adversaries, though not for the calls that were searched."""
    for sample in samples if supports else ():
        with contextlib.suppress(*REJECTIONS, AttributeError):  # DTensor's refusal is no claim
            raw, _ = run_call(sample.call, sample.tensors, mutates=mutates(sample.op))
            registered = {str(claim.rule) for claim in claims(sample, ranks, raw)}
            for support in supports:
                if str(support.rule) in registered:
                    support.against = f"claimed for {', '.join(str(tuple(t.shape)) for t in sample.tensors)}"


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
    sample: Sample, oracle: OracleResult, ranks: int, claimed: Sequence[Claim], seed: int
) -> MissingRuleSearch:
    """Every tuple of input placements, and the output placements that hold for it."""
    seen = MissingRuleSearch(claimed={str(c.rule) for c in claimed})
    if oracle.metadata_only or dtensor.rewrites_arguments(overload(sample.op)) or not _is_conclusive(sample, oracle):
        return seen
    if written_leaves(sample.call):  # a mutated argument must keep its placement, which leaves nothing to search
        return seen
    probe = Probe(sample, oracle, ranks, seed=seed)
    writes = mutates(sample.op)
    todo, every = input_tuples(sample, ranks)
    if len(todo) < every:
        seen.untried = f"a search tries {len(todo)} of the {every} tuples of input placements"
    for inputs in todo:
        seen.tried.add(shorts(inputs))
        if all(isinstance(p, Replicate) for p in inputs):
            continue
        per_output = [probe.placements(inputs, i, probe.draws(inputs)) for i in range(len(oracle.outputs))]
        seen.combinations += sum(3 + out.ndim + 2 for out in oracle.outputs)
        for outputs in product(*per_output) if all(per_output) else ():
            if not writes or outputs[0] == inputs[0]:  # a mutated argument keeps its placement
                rule = Rule(sample.op, inputs, outputs)
                seen.holds[str(rule)] = rule
    return seen


def _is_conclusive(sample: Sample, oracle: OracleResult) -> bool:
    """Whether rules that hold on this sample prove anything: for equal elements, booleans or one integer nearly every
    placement holds."""
    if not oracle.outputs or not all(isinstance(o, Tensor) for o in oracle.outputs):
        return False
    if all(t.dtype == torch.bool for t in sample.tensors):
        return False
    return all(has_distinct_elements(o) or (o.numel() == 1 and o.dtype.is_floating_point) for o in oracle.outputs)


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
