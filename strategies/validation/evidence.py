"""The evidence for a missing rule, a valid sharding that is not registered: calls, shapes, uneven shards, mesh sizes.

A rule is reported as missing only if it holds on at least three calls with independent values and decompositions of
partial inputs, of at least two shapes, one of them uneven where the rule has a shard, on 2 and 3 ranks and on every
mesh size of the search; and if no such call refutes it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Shard
from torch.distributed.tensor.placement_types import Placement

from localtensor.layout import MAX_JUMP_SHARE, is_reducible
from localtensor.layout import fold_partials as fold
from strategies.inputs.variants.adversarial import Adversary, adversaries
from strategies.inputs.variants.all_variants import oracle_with_values
from strategies.model.oracle import REJECTIONS, OracleResult, equal_within, mutates, run_call, run_oracle
from strategies.model.rule import Rule, Sample
from strategies.validation.claim_sources import claims
from strategies.validation.probe import Probe

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
            truth = run_oracle(one.sample, seed=seed + number)
            if truth.unstable <= MAX_JUMP_SHARE:
                _probe_rules(one, truth, alive, sizes, seed + number)
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
    one: Adversary, truth: OracleResult, supports: Sequence[_SupportCount], sizes: Sequence[int], seed: int
) -> None:
    whole = any(not any(isinstance(p, Partial) for p in support.rule.inputs) for support in supports)
    wild = oracle_with_values(one.sample, truth, "specials", seed) if whole else None
    for ranks in sizes:
        probe = Probe(one.sample, truth, ranks, seed=seed)
        beside = Probe(one.sample, wild, ranks, seed=seed, variant="specials") if wild is not None else None
        for support in supports:
            if not support.against and _fits(support.rule, one.sample, ranks):
                found = rule_problem(probe, support.rule)
                if not found and beside and not any(isinstance(p, Partial) for p in support.rule.inputs):
                    found = rule_problem(beside, support.rule)
                if found:
                    support.against = f"{one.name} on {ranks} ranks: {found}"
                elif one.counts:
                    _count(support, one.sample, truth, ranks)


def rule_problem(probe: Probe, rule: Rule) -> str:
    """What is wrong with the rule on this sample and mesh size, in any of the decompositions, or ""."""
    for draw in probe.draws(rule.inputs):
        local = probe.local(rule.inputs, draw)
        found = probe.against(local, rule.outputs)
        if found or isinstance(local, str):
            return probe.reason(found, rule.outputs) if found else str(local)
        for i, placement in enumerate(rule.outputs):
            if not _exact(probe.truth, i, [out[i] for out in local], placement):
                return f"output {i}: choosing among the parts gives another value"
    return ""


def _exact(truth: OracleResult, i: int, held: Sequence[Tensor], placement: Placement | None) -> bool:
    """Whether a P(min) or P(max) result is exact: choosing one of the parts does not round, as adding does."""
    slack = truth.slack[i]
    if slack is None or not isinstance(placement, Partial) or placement.reduce_op not in ("min", "max"):
        return True
    return equal_within(fold(torch.stack(list(held)), placement.reduce_op), truth.outputs[i], slack)


def _fits(rule: Rule, sample: Sample, ranks: int) -> bool:
    """Whether each rank has a row of each shard, as DTensor requires, and each reduction is defined."""

    def fits(p: Placement | None, t: Tensor) -> bool:
        if isinstance(p, Partial):
            return t.dtype != torch.bool and is_reducible(p.reduce_op, t.dtype)
        return not isinstance(p, Shard) or (p.dim < t.ndim and t.shape[p.dim] >= ranks)

    return all(fits(p, t) for p, t in zip(rule.inputs, sample.tensors, strict=True))


def _count(support: _SupportCount, sample: Sample, truth: OracleResult, ranks: int) -> None:
    """Add the sample to the evidence, unless its results prove nothing: those with equal elements, or a number seen
    before."""
    outputs = [o for o in truth.outputs if isinstance(o, Tensor)]
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
        *zip(support.rule.outputs, truth.outputs, strict=False),
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
