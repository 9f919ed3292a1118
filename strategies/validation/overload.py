"""One overload before the court, on its own and along one axis: claims judged, and missing rules sought.

This runs in a worker process (see `workers`), so that an op that crashes natively on a local shard
costs one sample on one mesh and not the sweep.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from localtensor.errors import in_a_line
from localtensor.layout import UNSTABLE
from strategies.inputs.variants.adversarial import VALUES
from strategies.inputs.variants.all_variants import adverse, variations
from strategies.model.oracle import REFUSALS, Truth, tell
from strategies.model.rule import Claim, Sample, overload
from strategies.model.verdict import CLASSES, Crash, Instance, Unit, Verdict, class_of
from strategies.torch_api import dtensor
from strategies.validation.claim_sources import TooMany, claims
from strategies.validation.finding import Candidate, Task, TaskResult, describe, keep
from strategies.validation.missing_rules import Seen, missing, search
from strategies.validation.probe import try_claims

CHARGES = 3
"""Cases kept of one suspected rule: confirmation tries them in turn."""
WHOLE = 6
"""Samples of one overload that are run end to end where only DTensor's own dispatch can judge."""
VALUES_OF_A_SAMPLE, VALUES_OF_A_FORM = 3, 1
"""Other values that a sample is tried with, and another form of it; where there are few samples, a sample has more,
so that each kind of values gets its turn."""
PARTIALS = 4
"""Samples of one decomposition that are also traced with partial inputs, each kind a trace of its own."""
Note = Callable[[int], None]
Variation = tuple[Sample, Truth, str]
"""A call, the truth about it, and the name of its form; the sample itself has none."""


@dataclass(slots=True)
class Turns:
    """How often each form and each kind of values was tried on the samples of one class of dtypes."""

    forms: Counter[str] = field(default_factory=Counter)
    values: Counter[str] = field(default_factory=Counter)


def alone(docket: Task, note: Note) -> list[TaskResult]:
    """The trial of one overload on its own, a hearing for each unit.  An error of ours on one sample is a `Crash`."""
    bench = Recorder(docket)
    found: list[tuple[Sample, dict[int, Seen]]] = []
    for number in range(len(docket.samples)):
        if not bench.meshes(number):
            continue
        try:
            every = _noted(_variations(number, bench), docket.truth_step(number), note)
            found.extend((one[0], _try(one, number, bench, note)) for one in every)  # keeps what came before an error
        except Exception as error:  # why: one sample's failure is reported as Crashed, and the trial goes on
            bench.crash(number, error)
    for instance in missing(found, docket.seed) if docket.search else ():
        bench.hearing(instance.sample, (instance.ranks,)).missing.append(instance)
    return bench.all()


class Recorder:
    """The hearings of a docket, one for each unit that is wanted."""

    def __init__(self, docket: Task) -> None:
        self.docket = docket
        self._of = {unit: TaskResult(unit) for unit in docket.units()}
        self._many = Counter(map(class_of, docket.samples))
        self._turns = {dtypes: Turns() for dtypes in CLASSES}
        if docket.why:
            next(iter(self._of.values())).skipped[docket.why] += 1

    def hearing(self, sample: Sample, mesh: tuple[int, ...]) -> TaskResult:
        unit = Unit(self.docket.op, self.docket.trial, class_of(sample), mesh)
        return self._of.setdefault(unit, TaskResult(unit))

    def meshes(self, number: int) -> list[int]:
        """The meshes on which this sample is wanted and has killed nobody, by number."""
        docket, dtypes = self.docket, class_of(self.docket.samples[number])
        if docket.truth_step(number) in docket.skip:
            return []
        units = [Unit(docket.op, docket.trial, dtypes, mesh) for mesh in docket.meshes]
        free = [i for i in range(len(units)) if docket.step(number, i) not in docket.skip]
        return [i for i in free if units[i] in self._of]

    def turns(self, sample: Sample) -> Turns:
        """Each class of dtypes has its own, so that a run of some classes alone tries the same."""
        return self._turns[class_of(sample)]

    def values(self, sample: Sample) -> int:
        """How many other values each sample of this class of dtypes is tried with."""
        return max(VALUES_OF_A_SAMPLE, -(-len(VALUES) // self._many[class_of(sample)]))

    def skipped(self, number: int, why: str) -> None:
        """The sample is not tried, on none of its meshes."""
        for i in self.meshes(number):
            self.hearing(self.docket.samples[number], self.docket.meshes[i]).skipped[why] += 1

    def crash(self, number: int, error: Exception) -> None:
        """An error of ours while this sample was tried; to be called where it is caught."""
        sample = self.docket.samples[number]
        told = Crash(self.docket.op, describe(sample), f"{type(error).__name__}: {error}", traceback.format_exc())
        self.hearing(sample, self.docket.meshes[self.meshes(number)[0]]).crashed.append(told)

    def all(self) -> list[TaskResult]:
        return [self._of[unit] for unit in sorted(self._of)]


def _noted(every: Iterable[Variation], step: int, note: Note) -> Iterator[Variation]:
    """The same, with a note before each that its truth is being told."""
    left = iter(every)
    while True:
        note(step)
        one = next(left, None)
        if one is None:
            return
        yield one


def _variations(number: int, bench: Recorder) -> Iterable[Variation]:
    """The sample and other calls made from it, each with its truth and the name of its form."""
    sample, seed = bench.docket.samples[number], bench.docket.seed
    try:
        truth = tell(sample, seed=seed)
    except REFUSALS as error:
        bench.skipped(number, f"the op refuses this sample: {type(error).__name__}")
        return
    if truth.unstable > UNSTABLE:
        bench.skipped(number, "ill-conditioned: one-ulp noise moves most of the result")
        return
    traced = dtensor.source_of(overload(sample.op)) == "decomposition"
    yield from variations(sample, truth, number, seed=seed, traced=traced, turns=bench.turns(sample).forms)


def _try(variation: Variation, number: int, bench: Recorder, note: Note) -> dict[int, Seen]:
    """Its claims on each mesh, judged into the hearings; what a search saw, by the number of ranks."""
    docket, (sample, truth, name) = bench.docket, variation
    own = docket.samples[number]
    seen: dict[int, Seen] = {}
    question = dtensor.Question(sample, 1, truth.raw)
    question.partials = number < PARTIALS
    budget = VALUES_OF_A_FORM if name else bench.values(own)
    others = adverse(sample, truth, number, seed=docket.seed, budget=budget, turns=bench.turns(own).values)
    for i in bench.meshes(number):
        note(docket.step(number, i))
        (ranks,) = docket.meshes[i]
        hearing = bench.hearing(own, docket.meshes[i])
        hearing.samples += 1
        try:
            claimed = claims(sample, ranks, truth.raw, question)
        except TooMany as error:
            hearing.skipped[str(error)] += 1
            continue
        except (*REFUSALS, AttributeError, ArithmeticError) as error:
            hearing.skipped[f"DTensor's own rule raises {in_a_line(error, 90)}"] += 1
            continue
        if not claimed:
            hearing.skipped["DTensor claims nothing about this call"] += 1
        for instance in try_claims(sample, truth, ranks, claimed, seed=docket.seed, variants=others):
            record(hearing, instance, number)
        if docket.search:
            seen[ranks] = _searched(sample, truth, ranks, claimed, hearing, docket.seed)
    return seen


def _searched(
    sample: Sample, truth: Truth, ranks: int, claimed: list[Claim], hearing: TaskResult, seed: int
) -> Seen:  # fmt: skip
    seen = search(sample, truth, ranks, claimed, seed)
    hearing.combinations += seen.combinations
    hearing.skipped.update([seen.untried] if seen.untried else [])
    return seen


def record(hearing: TaskResult, instance: Instance, number: int) -> None:
    """The verdict on one instance, of sample `number`, goes into its unit's hearing."""
    name = str(instance.rule)
    hearing.tried += 1
    if instance.verdict is Verdict.SOUND:
        hearing.sound.add(name)
        if instance.evidence.reason:
            hearing.by_metadata.add(name)
    elif instance.verdict is Verdict.UNTESTABLE:
        hearing.untestable[name] = instance.evidence.reason
    elif instance.verdict is Verdict.UNSOUND:
        keep(hearing.suspects.setdefault(name, []), Candidate(instance), CHARGES)
    elif number < WHOLE:
        keep(hearing.whole.setdefault(name, []), Candidate(instance), WHOLE)
