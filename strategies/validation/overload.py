"""Validation of one overload, on its own and along one axis: its rules are tested, and missing rules searched.

It runs in a worker process, so that a native crash of an op on a local shard costs one sample on one mesh and not the
sweep.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from torch.distributed.tensor import Replicate

from localtensor.errors import error_in_one_line
from localtensor.layout import MAX_JUMP_SHARE
from strategies.base.time_limit import DoesNotReturn
from strategies.inputs.variants.adversarial import VALUES
from strategies.inputs.variants.all_variants import FORMS, adverse, variations, wild_values
from strategies.inputs.variants.undrawn import Undrawn, choice_text
from strategies.model.kernels import REJECTIONS
from strategies.model.oracle import OracleResult, run_oracle
from strategies.model.rule import DTYPE_CLASSES, Program, Sample, dtype_class, overload
from strategies.model.verdict import ALONE, Crash, Instance, Verdict, WorkUnit
from strategies.torch_api import dtensor
from strategies.torch_api.code_places import no_return_error, rule_limit
from strategies.torch_api.rank_runs import CALL_SECONDS
from strategies.validation.finding import (
    Candidate,
    OverloadTask,
    TaskResult,
    describe,
    keep_smallest,
    refusal_key,
    refused_program,
)
from strategies.validation.missing_rules import MissingRuleSearch, missing_instances, search_placements
from strategies.validation.probe import check_claims
from strategies.validation.sources.registry import source_of_rules

KEPT_CANDIDATES = 3
"""Cases kept of one suspected rule: confirmation tries them in turn."""
END_TO_END_SAMPLES = 6
"""Samples of one overload that are run end to end where only DTensor's own dispatch can judge."""
ON_ALL_MESHES, ON_MOST_MESHES, FORMS_ON_ALL_MESHES = 3, 6, 1
"""The first samples of an overload, and the first calls of each form, that a sweep of torch's rules tries on all meshes; the
samples after them that it tries on all but one.  What comes later is tried on one mesh."""
VALUES_PER_SAMPLE, VALUES_PER_FORM = 3, 1
"""Other values that a sample is tried with, and those for another form of it.  Where there are few samples, each is
tried with more, so that every kind of values is tried."""
SOURCE_SECONDS = 3.0
"""Processor time in seconds after which a source of functions, whose claims are cheap, does not answer about a sample."""
REFUSED, NO_TURN = "that do not apply", "without a turn"
"""Why a form, values, a dtype, an argument or a step was left out: no sample takes it, or others came before."""
Note = Callable[[int], None]
"""Notes the number of the step that begins."""
Variation = tuple[Sample, OracleResult, str]
"""A call, its oracle, and the name of its form; "" for the sample itself."""


@dataclass(slots=True)
class VariantCounts:
    """The number of times that each form and each kind of values was tried, or refused, on samples of one class of dtypes."""

    forms: Counter[str] = field(default_factory=Counter)
    values: Counter[str] = field(default_factory=Counter)
    refused_forms: Counter[str] = field(default_factory=Counter)
    refused_values: Counter[str] = field(default_factory=Counter)


def validate_overload(task: OverloadTask, note: Note) -> list[TaskResult]:
    """Validate one overload on its own: a result for each unit.  An error of ours on one sample is a `Crash`."""
    recorder = Recorder(task)
    found: list[tuple[Sample, dict[int, MissingRuleSearch]]] = []
    for number in range(len(task.samples)):
        if not recorder.meshes(number):
            continue
        try:
            every = _noted(_variations(number, recorder), task.oracle_step(number), note)
            found.extend(
                (one[0], _try(one, number, recorder, note)) for one in every
            )  # an error keeps what came before
        except Exception as error:  # why: it is reported as Crashed with its traceback, and the next sample is tried
            recorder.crash(number, error)
    for instance in missing_instances(found, task.seed) if task.search else ():
        recorder.result_of(instance.sample, (instance.ranks,)).missing.append(instance)
    return recorder.all()


class Recorder:
    """Records the results of a task, one for each unit that is wanted."""

    def __init__(self, task: OverloadTask) -> None:
        self.task = task
        self.source = source_of_rules(task.source, *task.home)
        self._results = {unit: TaskResult(unit) for unit in task.units()}
        self._sample_counts = Counter(map(dtype_class, task.samples))
        self._turns = {dtypes: VariantCounts() for dtypes in DTYPE_CLASSES}
        self._undrawn: dict[str, Undrawn] = {}
        self.limit = rule_limit(CALL_SECONDS if self.source.varied else SOURCE_SECONDS)
        if task.why:
            next(iter(self._results.values())).skipped[task.why] += 1

    def result_of(self, sample: Sample, mesh: tuple[int, ...]) -> TaskResult:
        unit = WorkUnit(self.task.op, self.task.kind, dtype_class(sample), mesh)
        return self._results.setdefault(unit, TaskResult(unit))

    def meshes(self, number: int) -> list[int]:
        """The meshes on which this sample is wanted and has not killed a worker, by number."""
        task, dtypes = self.task, dtype_class(self.task.samples[number])
        if task.oracle_step(number) in task.skip:
            return []
        units = [WorkUnit(task.op, task.kind, dtypes, mesh) for mesh in task.meshes]
        free = [i for i in range(len(units)) if task.step(number, i) not in task.skip]
        return [i for i in free if units[i] in self._results]

    def meshes_in_turn(self, number: int, form: str) -> list[int]:
        """The meshes on which a call made from this sample is tried.  Of three or more, later calls leave out some in turn:
        a wrong rule is seldom wrong on one sample and one number of ranks alone."""
        meshes, every = self.meshes(number), len(self.task.meshes)
        turns = self.turns(self.task.samples[number]).forms[form] if form else 0
        first = turns <= FORMS_ON_ALL_MESHES if form else number < ON_ALL_MESHES
        if first or every < 3 or self.task.search or any(self.task.home):
            return meshes
        turn = (turns or number) % every
        if not form and number < ON_MOST_MESHES:
            return [i for i in meshes if i != turn]
        return [i for i in meshes if i == (turn + 1) % every]

    def turns(self, sample: Sample) -> VariantCounts:
        """The counts of the sample's class of dtypes: a run of some classes alone tries the same variants."""
        return self._turns[dtype_class(sample)]

    def undrawn(self, sample: Sample) -> Undrawn:
        """What no sample of this one's class of dtypes draws; it runs the op, so a step must have been noted."""
        dtypes = dtype_class(sample)
        if dtypes not in self._undrawn:
            alike = [one for one in self.task.samples if dtype_class(one) == dtypes]
            self._undrawn[dtypes] = Undrawn.of(alike, dtypes=self.task.further)
        return self._undrawn[dtypes]

    def values(self, sample: Sample) -> int:
        """The number of other values that each sample of this class of dtypes is tried with."""
        return max(VALUES_PER_SAMPLE, -(-len(VALUES) // self._sample_counts[dtype_class(sample)]))

    def on_mesh(
        self, variants: dict[str, OracleResult], sample: Sample, i: int, meshes: Sequence[int]
    ) -> dict[str, OracleResult]:
        """Those of a sample's other values that are tried on its task's mesh i, one of `meshes`.

        The first ones of a kind are tried on all meshes, those of later samples on the meshes in turn: what is wrong of ties or of
        NaN seldom depends on the number of ranks.
        """
        turns = self.turns(sample).values
        return {
            name: oracle
            for name, oracle in variants.items()
            if turns[name] == 1 or meshes[turns[name] % len(meshes)] == i
        }

    def skipped(self, number: int, why: str) -> None:
        """Record that the sample is tried on none of its meshes."""
        for i in self.meshes(number):
            self.result_of(self.task.samples[number], self.task.meshes[i]).skipped[why] += 1

    def crash(self, number: int, error: Exception) -> None:
        """Record an error of ours on this sample; to be called in its `except` clause."""
        sample = self.task.samples[number]
        crash = Crash(self.task.op, describe(sample), f"{type(error).__name__}: {error}", traceback.format_exc())
        self.result_of(sample, self.task.meshes[self.meshes(number)[0]]).crashed.append(crash)

    def leave_out(self, sample: Sample, what: str, names: Sequence[str]) -> None:
        """Record names that were not tried on samples of this one's class of dtypes, once for all meshes."""
        first = self._first_result(dtype_class(sample))
        if names and first is not None:
            first.left_out[what] = list(names)

    def _first_result(self, dtypes: str) -> TaskResult | None:
        """The result of the class on the first mesh; None where that unit is not wanted, being in the journal already."""
        return self._results.get(WorkUnit(self.task.op, self.task.kind, dtypes, min(self.task.meshes)))

    def all(self) -> list[TaskResult]:
        """The results, with what was left out of the inputs of each class of dtypes."""
        for dtypes in sorted({unit.dtypes for unit, result in self._results.items() if result.samples}):
            if self.task.kind == ALONE and (first := self._first_result(dtypes)) is not None:
                first.left_out |= _left_out(self._turns[dtypes], self._undrawn.get(dtypes))
        return [self._results[unit] for unit in sorted(self._results)]


def _left_out(turns: VariantCounts, undrawn: Undrawn | None) -> dict[str, list[str]]:
    """Names of what was not tried, by what they are and why: the op took no such call, or others came before."""
    found: dict[str, list[str]] = {}

    def add(what: str, name: str, refused: int) -> None:
        found.setdefault(f"{what} {REFUSED if refused else NO_TURN}", []).append(name)

    for form in FORMS:
        if not turns.forms[form.name]:
            add("forms", form.name, turns.refused_forms[form.name])
    for kind in VALUES:
        if not turns.values[kind.name]:
            add("values", kind.name, turns.refused_values[kind.name])
    for choice in undrawn.left if undrawn else ():
        if undrawn and choice not in undrawn.taken:
            add("arguments" if choice[0] else "dtypes", choice_text(choice), undrawn.refused.get(choice, 0))
    return found


def _noted(every: Iterable[Variation], step: int, note: Note) -> Iterator[Variation]:
    """The same, with a note before each, since its oracle runs then."""
    note(step)
    for one in every:
        yield one
        note(step)


def _variations(number: int, recorder: Recorder) -> Iterable[Variation]:
    """The sample and other calls made from it, each with its oracle and the name of its form."""
    sample, seed = recorder.task.samples[number], recorder.task.seed
    try:
        oracle = run_oracle(sample, seed=seed)
    except REJECTIONS as error:
        recorder.skipped(number, f"the op refuses this sample: {type(error).__name__}")
        return
    if oracle.unstable > MAX_JUMP_SHARE:
        recorder.skipped(number, "ill-conditioned: one-ulp noise moves most of the result")
        return
    if not recorder.source.varied:
        yield sample, oracle, ""
        return
    traced = dtensor.registry_of(overload(sample.op)) == "decomposition"
    turns = recorder.turns(sample)
    first = sum(dtype_class(one) == dtype_class(sample) for one in recorder.task.samples[:number])
    yield from variations(
        sample, oracle, first, seed=seed, traced=traced, turns=turns.forms, refused=turns.refused_forms
    )
    yield from recorder.undrawn(sample).calls(sample, seed)


def _try(variation: Variation, number: int, recorder: Recorder, note: Note) -> dict[int, MissingRuleSearch]:
    """Test its claims on each mesh and record the results.  Returns the result of the search by number of ranks."""
    task, (sample, oracle, name) = recorder.task, variation
    own = task.samples[number]
    seen: dict[int, MissingRuleSearch] = {}
    refused = False
    about = recorder.source.about(sample, oracle, number)
    budget = VALUES_PER_FORM if name else recorder.values(own)
    turns = recorder.turns(own)
    variants = adverse(
        sample, oracle, number, seed=task.seed, budget=budget, turns=turns.values, refused=turns.refused_values
    )
    variants |= wild_values(sample, oracle, task.seed)
    meshes = recorder.meshes_in_turn(number, name)
    for i in meshes:
        note(task.step(number, i))
        (ranks,) = task.meshes[i]
        result = recorder.result_of(own, task.meshes[i])
        result.samples += 1
        try:
            with recorder.limit.applied():
                claimed = about.claims(ranks)
        except (*REJECTIONS, AttributeError, ArithmeticError, DoesNotReturn) as error:
            if not (refused or isinstance(error, NotImplementedError)):  # a rule that says so claims nothing
                refused = True  # on other meshes it is the same error
                whole = Program(sample, (ranks,), ((Replicate(),),) * len(sample.tensors), seed=task.seed)
                refusal = refused_program(whole, _rule_error(error))
                keep_smallest(result.suspects.setdefault(refusal_key(refusal), []), refusal, KEPT_CANDIDATES)
            raises = ": " if isinstance(error, DoesNotReturn) else " raises "
            result.skipped[f"{recorder.source.title}'s own rule{raises}{_rule_error(error, 90)}"] += 1
            continue
        result.skipped.update(f"{recorder.source.title} raises {error}" for error in about.failures)
        if about.drawn:
            drawn, every = about.drawn
            recorder.leave_out(own, "placement tuples", [f"{every - drawn:,} of {every:,} not drawn"])
            why = "through this decomposition" if recorder.source.varied else "of this call"
            result.skipped[f"{recorder.source.title} has {every} placement tuples {why}; {drawn} are drawn"] += 1
        if not (claimed or about.failures):
            result.skipped[f"{recorder.source.title} claims nothing about this call"] += 1
        here = recorder.on_mesh(variants, own, i, meshes)
        by_dtensor = recorder.source.varied
        for instance in check_claims(
            sample, oracle, ranks, claimed, seed=task.seed, variants=here, by_dtensor=by_dtensor
        ):
            record_instance(result, instance, number)
        if task.search:
            seen[ranks] = found = search_placements(sample, oracle, ranks, claimed, task.seed)
            result.combinations += found.combinations
            result.skipped.update([found.untried] if found.untried else [])
    return seen


def _rule_error(error: BaseException, most: int = 200) -> str:
    """The error of a rule in one line, or the function of torch from which it does not return."""
    return no_return_error(error) if isinstance(error, DoesNotReturn) else error_in_one_line(error, most)


def record_instance(result: TaskResult, instance: Instance, number: int) -> None:
    """Record the verdict on one instance, of sample `number`, in its unit's result."""
    name = str(instance.rule)
    result.tried += 1
    if instance.verdict is Verdict.SOUND:
        result.sound.add(name)
        if instance.evidence.reason:
            result.by_metadata.add(name)
    elif instance.verdict is Verdict.UNTESTABLE:
        result.untestable[name] = instance.evidence.reason
    elif instance.verdict is Verdict.UNSOUND:
        keep_smallest(result.suspects.setdefault(name, []), Candidate(instance), KEPT_CANDIDATES)
    elif number < END_TO_END_SAMPLES:
        keep_smallest(result.whole.setdefault(name, []), Candidate(instance), END_TO_END_SAMPLES)
