"""How much speaks for a rule that holds and that nobody claims: independent calls, shapes, uneven shards, mesh sizes.

A rule is called missing only if at least three calls with values of their own and partial inputs cut in
ways of their own bear it out, of at least two shapes, one of them uneven where it names a shard, on two
and on three ranks and on every mesh size of the search; and if no call like these speaks against it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Shard
from torch.distributed.tensor.placement_types import Placement

from localtensor.layout import UNSTABLE, reducible
from localtensor.layout import fold_partials as fold
from strategies.inputs.variants.adversarial import Adversary, adversaries
from strategies.model.oracle import REFUSALS, Truth, agrees, mutates, run, tell
from strategies.model.rule import Rule, Sample
from strategies.validation.claim_sources import TooMany, claims
from strategies.validation.probe import Probe, wild_truth

SAMPLES, SHAPES = 3, 2
"""Independent calls, and different shapes among them, that a missing rule needs."""
BASES = 2
"""Calls of one kind from which adversaries are made."""
ALWAYS = (2, 3)
"""Mesh sizes that are always asked: what holds for two ranks may be a coincidence of halves."""


@dataclass(frozen=True, slots=True)
class Backing:
    """What speaks for a rule on one kind of call; `against` is what speaks against it, or empty."""

    samples: tuple[str, ...] = ()
    shapes: int = 0
    uneven: bool = False
    ranks: tuple[int, ...] = ()
    against: str = ""

    @property
    def enough(self) -> bool:
        """Whether the rule may be called missing."""
        many = len(self.samples) >= SAMPLES and self.shapes >= SHAPES
        return not self.against and many and self.uneven and len(self.ranks) >= len(ALWAYS)


@dataclass(slots=True)
class _Tally:
    rule: Rule
    samples: dict[str, None] = field(default_factory=dict)
    shapes: set[tuple[torch.Size, ...]] = field(default_factory=set)
    uneven: bool = False
    ranks: set[int] = field(default_factory=set)
    single: set[float] = field(default_factory=set)
    against: str = ""

    def backing(self) -> Backing:
        return Backing(tuple(self.samples), len(self.shapes), self.uneven, tuple(sorted(self.ranks)), self.against)


def weigh(
    members: Sequence[Sample], rules: Iterable[Rule], ranks: Sequence[int], free: frozenset[tuple[int, int]], seed: int
) -> dict[str, Backing]:
    """The backing of each rule, by its text; `members` are calls of one kind, on which the rules hold.

    A rule is given up at the first call that speaks against it.  `free`: see `adversaries.numbers`.
    """
    tallies = {str(rule): _Tally(rule) for rule in rules}
    sizes = tuple(sorted({*ALWAYS, *ranks}))
    met: dict[tuple[torch.Size, ...], Sample] = {}
    for number, (one, again) in enumerate(_every(members, free, seed) if tallies else ()):
        alive = [t for t in tallies.values() if not t.against and not (again and t.backing().enough)]
        if not alive:
            break
        with contextlib.suppress(*REFUSALS):  # the op does not take these sizes or values
            truth = tell(one.sample, seed=seed + number)
            if truth.unstable <= UNSTABLE:
                _ask(one, truth, alive, sizes, seed + number)
                met.setdefault(tuple(t.shape for t in one.sample.tensors), one.sample)
    known = {tuple(t.shape for t in sample.tensors) for sample in members}
    others = [sample for shapes, sample in met.items() if shapes not in known]
    _claimed([t for t in tallies.values() if t.backing().enough], others, sizes[0])
    return {name: tally.backing() for name, tally in tallies.items()}


def _every(members: Sequence[Sample], free: frozenset[tuple[int, int]], seed: int) -> Iterator[tuple[Adversary, bool]]:
    """All adversaries of the largest call, and those of other sizes of the next; then the rest, marked True, for the
    rules that have not enough behind them by then.  Complex numbers come last: they have no order to prove wrong."""
    bases = sorted(members, key=lambda s: (any(t.dtype.is_complex for t in s.tensors), -s.size))[:BASES]
    made = [list(adversaries(base, free, seed + i)) for i, base in enumerate(bases)]
    for again in (False, True):
        for row in zip(*made, strict=True):
            for i, one in enumerate(row):
                if (i == 0 or one.resized) != again:
                    yield one, again


def _ask(one: Adversary, truth: Truth, tallies: Sequence[_Tally], sizes: Sequence[int], seed: int) -> None:
    whole = any(not any(isinstance(p, Partial) for p in tally.rule.inputs) for tally in tallies)
    wild = wild_truth(one.sample, truth, seed) if whole else None
    for ranks in sizes:
        probe = Probe(one.sample, truth, ranks, seed=seed)
        beside = Probe(one.sample, wild, ranks, seed=seed, variant="specials") if wild is not None else None
        for tally in tallies:
            if not tally.against and _fits(tally.rule, one.sample, ranks):
                found = wrong(probe, tally.rule)
                if not found and beside and not any(isinstance(p, Partial) for p in tally.rule.inputs):
                    found = wrong(beside, tally.rule)
                if found:
                    tally.against = f"{one.name} on {ranks} ranks: {found}"
                elif one.counts:
                    _count(tally, one.sample, truth, ranks)


def wrong(probe: Probe, rule: Rule) -> str:
    """What is wrong with the rule on this sample and mesh size, in any of the decompositions; or empty."""
    for draw in probe.draws(rule.inputs):
        local = probe.local(rule.inputs, draw)
        found = probe.against(local, rule.outputs)
        if found or isinstance(local, str):
            return probe.reason(found, rule.outputs) if found else str(local)
        for i, placement in enumerate(rule.outputs):
            if not _exact(probe.truth, i, [out[i] for out in local], placement):
                return f"output {i}: choosing among the parts gives another value"
    return ""


def _exact(truth: Truth, i: int, held: Sequence[Tensor], placement: Placement | None) -> bool:
    """Whether the least or greatest of the parts is the result: choosing one of them loses nothing, as adding does."""
    slack = truth.slack[i]
    if slack is None or not isinstance(placement, Partial) or placement.reduce_op not in ("min", "max"):
        return True
    return agrees(fold(torch.stack(list(held)), placement.reduce_op), truth.outputs[i], slack)


def _fits(rule: Rule, sample: Sample, ranks: int) -> bool:
    """Whether each rank has a row to start from, which DTensor asks for, and each reduction a meaning."""

    def fits(p: Placement | None, t: Tensor) -> bool:
        if isinstance(p, Partial):
            return t.dtype != torch.bool and reducible(p.reduce_op, t.dtype)
        return not isinstance(p, Shard) or (p.dim < t.ndim and t.shape[p.dim] >= ranks)

    return all(fits(p, t) for p, t in zip(rule.inputs, sample.tensors, strict=True))


def _count(tally: _Tally, sample: Sample, truth: Truth, ranks: int) -> None:
    """Results that are all alike would bear nearly anything out; one of one element counts by its value."""
    outputs = [o for o in truth.outputs if isinstance(o, Tensor)]
    if any(o.numel() != 1 and not varied(o) for o in outputs):
        return
    for out in outputs:
        if out.numel() == 1:
            value = float(out.flatten()[0].abs().double())
            if ranks == ALWAYS[0] and value in tally.single:
                return
            tally.single.add(value)
    tally.samples[sample.origin] = None
    tally.shapes.add(tuple(t.shape for t in sample.tensors))
    tally.ranks.add(ranks)
    placed = [
        *zip(tally.rule.inputs, sample.tensors, strict=True),
        *zip(tally.rule.outputs, truth.outputs, strict=False),
    ]
    shards = [(p.dim, t) for p, t in placed if isinstance(p, Shard) and isinstance(t, Tensor)]
    tally.uneven = tally.uneven or not shards or any(t.shape[dim] % ranks for dim, t in shards)


def varied(out: Tensor) -> bool:
    """Whether not all elements are alike."""
    return out.numel() > 1 and bool((out != out.flatten()[0]).any())


def _claimed(tallies: Sequence[_Tally], samples: Sequence[Sample], ranks: int) -> None:
    """Strikes out what DTensor claims on calls that were made here, though not on those that were searched."""
    for sample in samples if tallies else ():
        with contextlib.suppress(*REFUSALS, TooMany, AttributeError):  # its refusal is no claim
            raw, _ = run(sample.call, sample.tensors, mutates=mutates(sample.op))
            theirs = {str(claim.rule) for claim in claims(sample, ranks, raw)}
            for tally in tallies:
                if str(tally.rule) in theirs:
                    tally.against = f"claimed for {shapes_text(sample)}"


def shapes_text(sample: Sample) -> str:
    return ", ".join(str(tuple(t.shape)) for t in sample.tensors)
