"""All rules of our own on trial, in worker processes: a call that kills its process costs that call and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch.distributed.tensor import Partial

from localtensor.layout import agreed, short
from strategies.base.worker_pool import Done, Failed, Lost, Workers
from strategies.model.rule import Sample
from strategies.model.verdict import Instance
from strategies.ops.all_rules import OUR_RULES
from strategies.ops.semantics.rulebook import Ask, Entry, Line
from strategies.ops.validation.claims import judge

SECONDS = 60.0
"""Time limit of one call, its forms and values included."""
KILLERS = 12
"""Calls of one overload that may kill their process before the rest of them is given up."""
Note = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Terms:
    """How hard the trial is: mesh sizes, seed, and how many other values each call is tried with."""

    ranks: tuple[int, ...] = (2, 3, 4)
    seed: int = 0
    budget: int = 2


@dataclass(frozen=True, slots=True)
class Task:
    """One entry and its calls, but for those that killed a process.

    `planted` is the entry itself where it is none of our book's: those are found by name, for their functions may be
    made by other functions, which cannot be sent to another process.
    """

    op: str
    planted: Entry | None
    calls: tuple[Sample, ...]
    terms: Terms
    skip: frozenset[int] = frozenset()

    @property
    def entry(self) -> Entry:
        return self.planted or OUR_RULES.entries[self.op]


def sent(entry: Entry) -> Entry | None:
    """What a worker has to be sent of an entry: nothing, if it has it already."""
    return None if OUR_RULES.get(entry.op) is entry else entry


@dataclass(frozen=True, slots=True)
class RuleResult:
    """What came of one entry: what is wrong, how often it was right, on how many calls, and what could not be tried."""

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
        """Whether any line of it was held against any call: an entry that gives none is not tested."""
        return self.sound > 0 or bool(self.wrong)


def hear(task: Task, note: Note) -> RuleResult:
    """A worker's part: the trial of one entry."""
    noted = _noted([(i, call) for i, call in enumerate(task.calls) if i not in task.skip], note)
    terms = task.terms
    vague: dict[str, str] = {}
    found = judge(watched(task.entry, vague), ranks=terms.ranks, seed=terms.seed, budget=terms.budget, given=noted)
    heard = _of(task.entry)
    first = {str(one.rule): one for one in reversed(found.wrong)}
    wrong = (*vague.values(), *map(_told, reversed(first.values())))
    lines = len(found.sound.keys() | {str(one.rule) for one in found.wrong})
    untried = () if found.samples else ("none of its calls gives what could be compared",)
    sound = sum(found.sound.values())
    return replace(heard, wrong=wrong, lines=lines, sound=sound, calls=found.samples, untried=untried)


def watched(entry: Entry, vague: dict[str, str]) -> Entry:
    """The entry, which leaves there each line that makes parts of what has none, or none that everybody agrees on.

    The judge does not ask for those on most calls, so no call would ever speak against them: minima of complex numbers,
    averages of integers, which round somehow.
    """

    def lines(ask: Ask) -> Iterator[Line]:
        for line in entry.lines(ask):
            pairs = [*zip(line.inputs, ask.tensors, strict=True), *zip(line.outputs, ask.outputs, strict=True)]
            odd = [(p, meta) for p, meta in pairs if isinstance(p, Partial) and meta is not None]
            for placement, meta in odd:
                if not agreed(placement.reduce_op, meta.dtype):
                    vague.setdefault(str(line), f"{entry.op}: {line}: {short(placement)} of {meta} is not defined")
            yield line

    return replace(entry, lines=lines)


def _noted(calls: Iterable[tuple[int, Sample]], note: Note) -> Iterator[Sample]:
    for number, call in calls:
        note(number)
        yield call


def _of(entry: Entry) -> RuleResult:
    return RuleResult(entry.op, entry.family, entry.where)


def _told(one: Instance) -> str:
    values = f" with {one.evidence.variant}" if one.evidence.variant else ""
    call = f"{one.sample.op.split('.', 1)[1]}({', '.join(one.sample.arguments())})"
    return f"{one.rule} on {one.ranks} ranks, {call}{values}: {one.evidence.reason}"


def trials(
    crew: Workers,
    entries: Sequence[Entry],
    calls: Mapping[str, Sequence[Sample]],
    without: Mapping[str, str],
    terms: Terms,
    tick: Callable[[int], None] | None = None,
) -> list[RuleResult]:
    """Each entry's hearing, in their order.  `without` says why an overload has no calls."""
    heard = {e.op: replace(_of(e), untried=(without.get(e.op, "no call reaches it"),)) for e in entries}
    todo = [Task(e.op, sent(e), tuple(calls[e.op]), terms) for e in entries if calls.get(e.op)]
    reasons: dict[str, list[str]] = {}
    while todo:
        again: list[Task] = []
        for task, answer in zip(todo, crew.run(hear, todo, limit=SECONDS, tick=tick), strict=True):
            said = reasons.setdefault(task.op, [])
            if isinstance(answer, Done):
                heard[task.op] = replace(answer.value, untried=(*said, *answer.value.untried))
            elif isinstance(answer, Failed):
                heard[task.op] = replace(_of(task.entry), wrong=(f"the trial failed: {answer.error}",))
            else:
                said.append(_lost(task, answer))
                again += _without(task, answer)
                heard[task.op] = replace(_of(task.entry), untried=tuple(said))
        todo, tick = again, None
    return list(heard.values())


def _lost(task: Task, answer: Lost) -> str:
    call = ", ".join(task.calls[answer.noted].arguments()) if 0 <= answer.noted < len(task.calls) else "its first call"
    return f"{call}: {answer.why}"


def _without(task: Task, answer: Lost) -> list[Task]:
    """The task without the call that killed its process."""
    if answer.noted < 0 or len(task.skip) >= KILLERS or len(task.skip) + 1 >= len(task.calls):
        return []
    return [replace(task, skip=task.skip | {answer.noted})]
