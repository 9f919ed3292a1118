"""One overload before the court: all its samples, all mesh sizes, claims judged and missing rules sought.

This runs in a worker process (see `workers`), so that an op that crashes natively on a local shard
costs one sample and not the sweep.
"""

from __future__ import annotations

import contextlib
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Replicate

from localtensor.placement import is_plain, shorts
from strategies import torch_dtensor as dtensor
from strategies.probe import Case, Probe, try_claims, wild_truth
from strategies.rules import Claim, Rule, Sample, overload
from strategies.samples import respelled, shortened
from strategies.sources import TooMany, claims, tuples
from strategies.stage import at_home
from strategies.truth import REFUSALS, Truth, mutates, same_results, tell
from strategies.verdicts import Crash, Evidence, Instance, Verdict

CHARGES = 3
"""Cases kept of one suspected rule: confirmation tries them in turn."""
WILD = 6
"""Samples of one overload that are also tried with NaN and infinities."""
WHOLE = 6
"""Samples of one overload that are run end to end where only DTensor's own dispatch can judge."""
SHORTENED, RESPELLED = 3, 8
"""Samples of one overload that are also tried with one operand shortened, and with dims respelled."""
PARTIALS = 4
"""Samples of one decomposition that are also traced with partial inputs, each kind a trace of its own."""
UNSTABLE = 0.5
"""A sample of whose result more than this share jumps under one-ulp noise says nothing."""


@dataclass(frozen=True, slots=True)
class Docket:
    """What is to be tried: one overload's samples.  `skip` are sample numbers that killed a worker."""

    op: str
    samples: tuple[Sample, ...]
    ranks: tuple[int, ...]
    seed: int
    search: bool = False
    skip: frozenset[int] = frozenset()
    home: tuple[str, str] = ("", "")
    """The rules module to import first, and the folder that it is found from (for spawned workers)."""


@dataclass(frozen=True, slots=True)
class Charge:
    """A claim that needs the real DTensor: the probe's instance and the case to run."""

    instance: Instance
    case: Case


@dataclass(slots=True)
class Hearing:
    """What came out of one overload's trial."""

    op: str
    samples: int = 0
    tried: int = 0
    combinations: int = 0
    sound: dict[str, Rule] = field(default_factory=dict)
    by_metadata: set[str] = field(default_factory=set)
    suspects: dict[str, list[Charge]] = field(default_factory=dict)
    whole: dict[str, list[Charge]] = field(default_factory=dict)
    missing: list[Instance] = field(default_factory=list)
    untestable: dict[str, str] = field(default_factory=dict)
    skipped: Counter[str] = field(default_factory=Counter)
    crashed: list[Crash] = field(default_factory=list)


def hear(docket: Docket, note: Callable[[int], None]) -> Hearing:
    """The trial of one overload.  An error of ours on one sample is a `Crash`, and the rest goes on."""
    at_home(*docket.home)
    hearing = Hearing(docket.op)
    found: list[tuple[Sample, dict[int, _Seen]]] = []
    for number, sample in enumerate(docket.samples):
        if number in docket.skip:
            continue
        note(number)
        try:
            for one, truth in _forms(sample, number, hearing, docket.seed):
                found.append((one, _try(one, truth, number, docket, hearing)))
        except Exception as error:  # why: one sample's failure is reported as Crashed, and the trial goes on
            trace = traceback.format_exc()
            hearing.crashed.append(Crash(docket.op, _describe(sample), f"{type(error).__name__}: {error}", trace))
    if docket.search:
        hearing.missing = _missing(found)
    return hearing


def _describe(sample: Sample) -> str:
    return f"{sample.op}({', '.join(sample.arguments())}) from {sample.origin}"


def _forms(sample: Sample, number: int, hearing: Hearing, seed: int) -> Iterable[tuple[Sample, Truth]]:
    """The sample; the same with an operand shortened, where the op takes that; and the same call with its
    dims spelled the other way, where that is the same call."""
    try:
        truth = tell(sample, seed=seed)
    except REFUSALS as error:
        hearing.skipped[f"the op refuses this sample: {type(error).__name__}"] += 1
        return
    if truth.unstable > UNSTABLE:
        hearing.skipped["ill-conditioned: one-ulp noise moves most of the result"] += 1
        return
    yield sample, truth
    traced = dtensor.source_of(overload(sample.op)) == "decomposition"
    own = sample.origin.startswith("samples()")  # the user's word on what his op takes
    if number < (0 if own else 1 if traced else SHORTENED):
        for other in shortened(sample):
            with contextlib.suppress(*REFUSALS):
                yield other, tell(other, seed=seed)
    for other in respelled(sample) if number < RESPELLED else ():
        try:
            again = tell(other, seed=seed)
        except REFUSALS:
            continue
        if same_results(truth, again):
            yield other, again
            return


@dataclass(slots=True)
class _Seen:
    """What a search saw on one mesh size: the tuples tried, what holds, and what is claimed."""

    tried: set[str] = field(default_factory=set)
    holds: dict[str, Rule] = field(default_factory=dict)
    claimed: set[str] = field(default_factory=set)


def _try(sample: Sample, truth: Truth, number: int, docket: Docket, hearing: Hearing) -> dict[int, _Seen]:
    hearing.samples += 1
    seen: dict[int, _Seen] = {}
    alone = dtensor.Question(sample, 1, truth.raw)
    alone.partials = number < PARTIALS
    wild = wild_truth(sample, truth, docket.seed) if number < WILD else None
    for ranks in docket.ranks:
        try:
            claimed = claims(sample, ranks, truth.raw, alone)
        except TooMany as error:
            hearing.skipped[str(error)] += 1
            continue
        except (*REFUSALS, AttributeError) as error:
            hearing.skipped[
                f"DTensor's own rule raises {type(error).__name__}: {(str(error) or '-').splitlines()[0][:90]}"
            ] += 1
            continue
        instances = try_claims(sample, truth, ranks, claimed, seed=docket.seed, wild=wild)
        for instance, claim in zip(instances, claimed, strict=True):
            _record(instance, claim, truth, number, docket, hearing)
        if docket.search:
            seen[ranks] = _search(sample, truth, ranks, claimed, docket, hearing)
    return seen


def _record(instance: Instance, claim: Claim, truth: Truth, number: int, docket: Docket, hearing: Hearing) -> None:
    name = str(instance.rule)
    hearing.tried += 1
    if instance.verdict is Verdict.SOUND:
        hearing.sound[name] = instance.rule
        if instance.evidence.reason:
            hearing.by_metadata.add(name)
    elif instance.verdict is Verdict.UNTESTABLE:
        hearing.untestable[name] = instance.evidence.reason
    elif instance.verdict is Verdict.UNSOUND:
        _charge(hearing.suspects.setdefault(name, []), instance, truth, docket.seed)
    elif number < WHOLE:
        _charge(hearing.whole.setdefault(name, []), instance, truth, docket.seed, most=WHOLE)


def _charge(kept: list[Charge], instance: Instance, truth: Truth, seed: int, most: int = CHARGES) -> None:
    """Keep the smallest cases: fewest ranks first, then fewest elements, an ordinary value before NaN."""
    evidence = instance.evidence

    def weight(i: Instance) -> tuple[bool, int, int]:
        return bool(i.evidence.variant), i.ranks, i.sample.size

    if len(kept) == most and weight(instance) >= weight(kept[-1].instance):
        return
    if evidence.variant:
        truth = wild_truth(instance.sample, truth, seed) or truth
    inputs = tuple(p if p is None or is_plain(p) else Replicate() for p in instance.rule.inputs)
    probe = Probe(instance.sample, truth, instance.ranks, seed=seed, variant=evidence.variant)
    case = probe.case(Rule(instance.rule.op, inputs, instance.rule.outputs), evidence.draw)
    kept.append(Charge(instance, case))
    kept.sort(key=lambda c: weight(c.instance))
    del kept[most:]


def _search(
    sample: Sample, truth: Truth, ranks: int, claimed: Sequence[Claim], docket: Docket, hearing: Hearing
) -> _Seen:
    """Every tuple of input placements, and the output placements that hold for it."""
    seen = _Seen(claimed={str(c.rule) for c in claimed})
    if truth.metadata_only or dtensor.rewrites(overload(sample.op)) or not _tells(sample, truth):
        return seen
    probe = Probe(sample, truth, ranks, seed=docket.seed)
    writes = mutates(sample.op)
    todo, every = tuples(sample, ranks)
    if len(todo) < every:
        hearing.skipped[f"a search tries {len(todo)} of the {every} tuples of input placements"] += 1
    for inputs in todo:
        seen.tried.add(shorts(inputs))
        if all(isinstance(p, Replicate) for p in inputs):
            continue
        per_output = [probe.placements(inputs, i, probe.draws(inputs)) for i in range(len(truth.outputs))]
        hearing.combinations += sum(3 + out.ndim + 2 for out in truth.outputs)
        for outputs in product(*per_output) if all(per_output) else ():
            if not writes or outputs[0] == inputs[0]:  # what an op writes to keeps its placement
                rule = Rule(sample.op, inputs, outputs)
                seen.holds[str(rule)] = rule
    return seen


def _tells(sample: Sample, truth: Truth) -> bool:
    """Whether what holds on this sample says anything: results of one element, all alike, or of
    booleans make nearly every placement hold."""
    if not truth.outputs or not all(isinstance(o, Tensor) for o in truth.outputs):
        return False
    real = any(t.dtype != torch.bool for t in sample.tensors)
    return real and all(o.numel() > 1 and bool((o != o.flatten()[0]).any()) for o in truth.outputs)


def _missing(found: Sequence[tuple[Sample, dict[int, _Seen]]]) -> list[Instance]:
    """Rules that hold on every sample of one kind of arguments, on all mesh sizes, claimed on none of them."""
    groups: dict[str, list[tuple[Sample, int, _Seen]]] = defaultdict(list)
    for sample, by_ranks in found:
        for ranks, seen in by_ranks.items():
            groups[_family(sample)].append((sample, ranks, seen))
    missing: dict[str, Instance] = {}
    for members in groups.values():
        claimed = set().union(*(seen.claimed for _, _, seen in members))
        candidates = {name: rule for _, _, seen in members for name, rule in seen.holds.items() if name not in claimed}
        for name, rule in candidates.items():
            inputs = shorts(rule.inputs)
            where = [(s, r, name in seen.holds) for s, r, seen in members if inputs in seen.tried]
            if len(where) >= 2 and all(holds for _, _, holds in where) and name not in missing:
                sample, ranks, _ = min(where, key=lambda w: (w[1], w[0].size))
                why = Evidence(f"holds on all {len(where)} trials of such arguments, and nobody claims it")
                missing[name] = Instance(rule, ranks, sample, Verdict.MISSING, "search", why)
    return list(missing.values())


def _family(sample: Sample) -> str:
    """Arguments alike in all but sizes and values."""
    dims = [t.ndim for t in sample.tensors]
    values = (*sample.call.args, *(value for _, value in sample.call.kwargs))
    scalars: Any = [v for v in values if isinstance(v, (bool, int, str, type(None)))]
    return f"{dims} {scalars} {[str(t.dtype) for t in sample.tensors]}"
