"""Validation of all rules of our own in worker processes: a call that kills its worker is left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch.distributed.tensor import Partial

from localtensor.layout import is_unambiguous, short
from strategies.base.worker_pool import TaskDone, TaskFailed, TaskLost, Workers
from strategies.model.rule import Sample
from strategies.model.verdict import Instance
from strategies.ops.all_rules import OUR_RULES
from strategies.ops.semantics.rule_registry import OpRule, PlacementRule, RuleQuery
from strategies.ops.validation.claims import validate_rule

SECONDS = 60.0
"""Time limit of one call, its forms and values included."""
MOST_CRASHES = 12
"""Calls of one overload that may kill their worker before the rest is given up."""
Note = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class ValidationEffort:
    """The extent of the validation: mesh sizes, seed, and the number of other values for each call."""

    ranks: tuple[int, ...] = (2, 3, 4)
    seed: int = 0
    budget: int = 2


@dataclass(frozen=True, slots=True)
class RuleTask:
    """A worker's task: one rule and its calls, without those (`skip`) that killed a worker.

    `planted` is the rule itself if it is not in `OUR_RULES`.  Those are found by name, since their functions may be
    closures, which cannot be pickled.
    """

    op: str
    planted: OpRule | None
    calls: tuple[Sample, ...]
    terms: ValidationEffort
    skip: frozenset[int] = frozenset()

    @property
    def entry(self) -> OpRule:
        return self.planted or OUR_RULES.entries[self.op]


@dataclass(frozen=True, slots=True)
class RuleResult:
    """The result of one rule: the failures, the number of passes and of calls, and what could not be tested."""

    op: str
    family: str
    where: str
    wrong: tuple[str, ...] = ()
    lines: int = 0
    sound: int = 0
    calls: int = 0
    untried: tuple[str, ...] = ()

    @property
    def tested(self) -> bool:
        """Whether any placement rule was tested on any call."""
        return self.sound > 0 or bool(self.wrong)


def validate_task(task: RuleTask, note: Note) -> RuleResult:
    """Run by a worker: the validation of one rule."""

    def noted() -> Iterator[Sample]:
        for number, call in enumerate(task.calls):
            if number not in task.skip:
                note(number)
                yield call

    terms = task.terms
    undefined: dict[str, str] = {}
    entry = with_undefined_reductions(task.entry, undefined)
    found = validate_rule(entry, ranks=terms.ranks, seed=terms.seed, budget=terms.budget, given=noted())
    first = {str(one.rule): one for one in reversed(found.wrong)}
    wrong = (*undefined.values(), *map(_describe, reversed(first.values())))
    lines = len(found.sound.keys() | {str(one.rule) for one in found.wrong})
    untried = () if found.samples else ("none of its calls gives what could be compared",)
    sound, empty = sum(found.sound.values()), _empty_result(task.entry)
    return replace(empty, wrong=wrong, lines=lines, sound=sound, calls=found.samples, untried=untried)


def with_undefined_reductions(entry: OpRule, undefined: dict[str, str]) -> OpRule:
    """The rule, which adds to `undefined` each placement rule with a reduction that is not well defined for the dtype.

    The validation skips those on most calls, so no call would disprove them: minima of complex numbers, averages of integers.
    """

    def lines(query: RuleQuery) -> Iterator[PlacementRule]:
        for line in entry.lines(query):
            pairs = [*zip(line.inputs, query.tensors, strict=True), *zip(line.outputs, query.outputs, strict=True)]
            odd = [(p, meta) for p, meta in pairs if isinstance(p, Partial) and meta is not None]
            for placement, meta in odd:
                if not is_unambiguous(placement.reduce_op, meta.dtype):
                    undefined.setdefault(str(line), f"{entry.op}: {line}: {short(placement)} of {meta} is not defined")
            yield line

    return replace(entry, lines=lines)


def _empty_result(entry: OpRule) -> RuleResult:
    return RuleResult(entry.op, entry.family, entry.where)


def _describe(one: Instance) -> str:
    values = f" with {one.evidence.variant}" if one.evidence.variant else ""
    call = f"{one.sample.op.split('.', 1)[1]}({', '.join(one.sample.arguments())})"
    return f"{one.rule} on {one.ranks} ranks, {call}{values}: {one.evidence.reason}"


def validate_rules(
    workers: Workers,
    entries: Sequence[OpRule],
    calls: Mapping[str, Sequence[Sample]],
    without: Mapping[str, str],
    terms: ValidationEffort,
    tick: Callable[[int], None] | None = None,
) -> list[RuleResult]:
    """The result of each rule, in their order.  `without` has the reasons for overloads without calls."""
    found = {e.op: replace(_empty_result(e), untried=(without.get(e.op, "no call reaches it"),)) for e in entries}
    todo = [
        RuleTask(e.op, None if OUR_RULES.get(e.op) is e else e, tuple(calls[e.op]), terms)
        for e in entries
        if calls.get(e.op)
    ]
    lost: dict[str, list[str]] = {}
    while todo:
        again: list[RuleTask] = []
        for task, answer in zip(todo, workers.run(validate_task, todo, limit=SECONDS, tick=tick), strict=True):
            reasons = lost.setdefault(task.op, [])
            if isinstance(answer, TaskDone):
                found[task.op] = replace(answer.value, untried=(*reasons, *answer.value.untried))
            elif isinstance(answer, TaskFailed):
                found[task.op] = replace(_empty_result(task.entry), wrong=(f"the validation failed: {answer.error}",))
            else:
                known = 0 <= answer.noted < len(task.calls)
                call = ", ".join(task.calls[answer.noted].arguments()) if known else "its first call"
                reasons.append(f"{call}: {answer.why}")
                again += _without(task, answer)
                found[task.op] = replace(_empty_result(task.entry), untried=tuple(reasons))
        todo, tick = again, None
    return list(found.values())


def _without(task: RuleTask, answer: TaskLost) -> list[RuleTask]:
    """The task without the call that killed its worker; none if there is nothing left to test."""
    if answer.noted < 0 or len(task.skip) >= MOST_CRASHES or len(task.skip) + 1 >= len(task.calls):
        return []
    return [replace(task, skip=task.skip | {answer.noted})]
