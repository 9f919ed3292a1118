"""One overload before the court: all its samples, all mesh sizes, claims judged and missing rules sought.

This runs in a worker process (see `workers`), so that an op that crashes natively on a local shard
costs one sample and not the sweep.
"""

from __future__ import annotations

import contextlib
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from torch.distributed.tensor import Replicate

from localtensor.placement import is_plain
from strategies import torch_dtensor as dtensor
from strategies.forms import respelled, shortened
from strategies.probe import Case, Probe, try_claims, wild_truth
from strategies.rules import Claim, Rule, Sample, overload
from strategies.search import Seen, missing, search
from strategies.sources import TooMany, claims
from strategies.stage import at_home
from strategies.truth import REFUSALS, Truth, same_results, tell
from strategies.verdicts import Crash, Instance, Verdict

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
    found: list[tuple[Sample, dict[int, Seen]]] = []
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
        hearing.missing = missing(found)
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
                told = tell(other, seed=seed)
                if told.unstable <= UNSTABLE:
                    yield other, told
    for other in respelled(sample) if number < RESPELLED else ():
        try:
            again = tell(other, seed=seed)
        except REFUSALS:
            continue
        if same_results(truth, again):
            yield other, again
            return


def _try(sample: Sample, truth: Truth, number: int, docket: Docket, hearing: Hearing) -> dict[int, Seen]:
    hearing.samples += 1
    seen: dict[int, Seen] = {}
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
            seen[ranks] = search(sample, truth, ranks, claimed, docket.seed)
            hearing.combinations += seen[ranks].combinations
            hearing.skipped.update([seen[ranks].untried] if seen[ranks].untried else [])
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
