"""Findings grouped by cause, and for each cause the most ordinary case that shows it.

Two findings have one cause if one function of torch makes both and both are wrong in one way (see `cause_key`).  What one
function does for many ops is one cause, unless each op chose it for itself: which partial values may pass through an op is a
property of the op, and so is a registration by a factory.  Such causes are one for each family of ops.
"""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from localtensor.errors import LocalTensorError
from strategies.base.journal import Line, lines_of_kind
from strategies.base.progress import Progress
from strategies.base.worker_pool import TaskDone, WorkerPool
from strategies.model.cause import PUBLIC_CALL, CauseRecord
from strategies.model.kernels import REJECTIONS
from strategies.model.rule import Program, out_leaves, overload, split_prior_call
from strategies.model.verdict import Finding, Report, Verdict, digest
from strategies.programs.public_api.table import use_in_words
from strategies.programs.run.verdict import raises
from strategies.programs.shrink.search import same_kind
from strategies.sweep import aggregate
from strategies.sweep.causes.attribution import (
    DISPATCHER,
    INSTEAD,
    NOT_SIMULATED,
    RAISES,
    REDISTRIBUTION,
    REFUSED,
    RULE,
    SHAPE,
    UNKNOWN,
    VALUES,
    Attribution,
    AttributionTask,
    Attributor,
    attribution,
    fault_class,
    program_work,
)
from strategies.sweep.causes.reach import Severity, forward_programs, most_ordinary, severity
from strategies.sweep.report.html_pictures import family_of
from strategies.torch_api.code_places import CodePlace, no_return_place, tracer_place
from strategies.torch_api.counterfactuals import DECOMPOSITION, HANDLER
from strategies.torch_api.dtensor import BY_NAME, special_dispatch_reason
from strategies.validation import finding as finding_lines

KEPT = 4
"""Candidates of a finding that are tried, and cases of a cause that are made ordinary."""
SECONDS = 120.0
"""The time after which a worker that makes no progress is ended."""
Key = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Case:
    """A program that shows a cause, and what is wrong with it in a run on rank threads."""

    program: Program
    reason: str
    severity: Severity


@dataclass(frozen=True, slots=True)
class Cause:
    """One fault of torch, as its record without a run of its script, and the case that shows it best."""

    record: CauseRecord
    case: Case | None


def attribution_tasks(begin: Line, lines: Sequence[Line]) -> tuple[Report, list[AttributionTask]]:
    """The report on a journal's lines, and a task for each finding in it that is a fault of torch."""
    report = aggregate.report(begin, lines)
    results = sorted(map(finding_lines.read_task, lines_of_kind(lines, "unit")), key=lambda one: one.unit)
    suspects = finding_lines.merge_candidates([r.suspects for r in results], KEPT)
    whole = finding_lines.merge_candidates([r.whole for r in results], KEPT)
    settled = (finding_lines.read_outcome(line) for line in lines_of_kind(lines, "settled"))
    names: dict[str, list[str]] = defaultdict(list)
    for one in settled:
        if one.finding is not None:
            names[one.finding.name].append(one.name)
    home = ("" if begin["rules"] == "dtensor" else begin["rules"], os.getcwd())
    tasks = []
    for finding in filter(is_fault, report.findings):
        judged = [c for name in names[finding.name] for c in suspects.get(name, ())]
        found = judged or [c for name in names[finding.name] for c in whole.get(name, ())]
        tasks.append(
            AttributionTask(finding.name, finding.reason, tuple(found[:KEPT]), bool(judged), begin["seed"], home)
        )
    return report, tasks


def is_fault(finding: Finding) -> bool:
    """Whether the finding is a fault of torch: every verdict but a missing rule and an unconfirmed one."""
    return finding.verdict not in (Verdict.MISSING, Verdict.SUSPECT)


def causes_of(begin: Line, lines: Sequence[Line], *, workers: int, progress: Progress) -> tuple[Report, list[Cause]]:
    """The report on a journal's lines, and the causes of its findings, in their order."""
    report, tasks = attribution_tasks(begin, lines)
    found = attributions(tasks, workers, progress)
    with WorkerPool(workers) as pool:
        groups = grouped(zip((task.name for task in tasks), found, strict=True))
        todo = [CaseTask(key, tuple(starts(members)), tasks[0].home) for key, members in groups.items()]
        progress.phase("looking for ordinary cases", len(todo))
        cases = [
            answer.value if isinstance(answer, TaskDone) else None
            for answer in pool.run(ordinary_case, todo, limit=SECONDS, tick=progress.tick)
        ]
    made = [
        _cause(key, members, case, report.torch) for (key, members), case in zip(groups.items(), cases, strict=True)
    ]
    return report, sorted(made, key=lambda cause: cause.record.order)


def attributions(tasks: Sequence[AttributionTask], workers: int, progress: Progress) -> list[Attribution]:
    """The attribution of each finding.

    What ran before in a process may have left something there, by which a run is right: a finding that no simulated run shows is
    looked at once more, in a process of its own.
    """
    with WorkerPool(workers) as pool:
        progress.phase("looking for causes", len(tasks))
        found = _attributed(pool, tasks, progress)
    again = [i for i, one in enumerate(found) if one.why == NOT_SIMULATED and tasks[i].candidates]
    if again:
        progress.phase("looking once more", len(again))
    for i in again:
        with WorkerPool(1) as pool:
            (found[i],) = _attributed(pool, [tasks[i]], progress)
    return found


def _attributed(pool: WorkerPool, tasks: Sequence[AttributionTask], progress: Progress) -> list[Attribution]:
    answers = pool.run(attribution, tasks, limit=SECONDS, tick=progress.tick)
    return [
        answer.value if isinstance(answer, TaskDone) else Attribution(UNKNOWN, reason=task.reason)
        for task, answer in zip(tasks, answers, strict=True)
    ]


Members = list[tuple[str, Attribution]]


def grouped(found: Iterable[tuple[str, Attribution]]) -> dict[Key, Members]:
    """Findings' names and attributions by the key of their cause."""
    groups: dict[Key, Members] = {}
    for name, one in found:
        groups.setdefault(cause_key(one, name), []).append((name, one))
    return groups


def cause_key(found: Attribution, name: str = "") -> Key:
    """What findings of one cause have in common; `name` is the finding's, for one without a function."""
    wrong, place = fault_class(found.reason), str(found.place)
    if found.kind == UNKNOWN:
        return (UNKNOWN, _subject(re.split(r": | on ", name)[0]), wrong)
    if found.kind == PUBLIC_CALL:
        return (PUBLIC_CALL, found.detail, wrong)
    if found.kind == REDISTRIBUTION:
        flattened = "with a flattened submesh" if found.program is not None and found.program.flattened else ""
        return (REDISTRIBUTION, place, _classes(found.detail), wrong, flattened)
    if found.kind == DISPATCHER:
        return (DISPATCHER, place, dispatch_trait(found), wrong)
    form = _form(found.op)
    if (found.kind == DECOMPOSITION and form == IN_PLACE) or (wrong == REFUSED and form == OUT):
        return (found.kind, "", form, wrong if form == OUT else "", "")
    if found.kind == HANDLER:
        return (found.kind, place, "", "" if wrong in (VALUES, SHAPE) else wrong, "")
    gives = "" if wrong in (RAISES, REFUSED) else result_class(found.detail)
    family = (
        family_of(found.op).removeprefix("prims.") if found.kind == RULE and _is_own_choice(found, gives, wrong) else ""
    )
    if found.why.startswith(INSTEAD):
        family = "refused op by op"
    return (found.kind, place, gives, wrong, family)


def _subject(text: str) -> str:
    """What a finding's name begins with: the family of an op, or a public call without its arguments."""
    is_op = re.fullmatch(r"\w+\.\w+\.\w+", text)
    return family_of(text) if is_op else text if text.startswith("[") else text.partition("(")[0]


IN_PLACE, OUT = "ops in place", "ops with out="


def _form(op: str) -> str:
    """The form of the overload, if it writes to its arguments."""
    schema = overload(op)._schema
    if any(a.is_out for a in schema.arguments):
        return OUT
    return IN_PLACE if schema.is_mutable else ""


def _is_own_choice(found: Attribution, gives: str, wrong: str) -> bool:
    made_by_factory = found.place is not None and "." in found.place.name
    return made_by_factory or (gives == "P" and wrong == VALUES)


def _classes(detail: str) -> str:
    """The classes of placements of a redistribution, each once: `S -> R`."""
    sides = [
        sorted({re.sub(r"\(\d.*?\)", "", p) for p in re.split(r", ?(?![^()]*\))", side)})
        for side in detail.split(" -> ")
    ]
    return " -> ".join(", ".join(side) for side in sides)


def result_class(detail: str) -> str:
    """P, S or R: the first of these among the results of the op at fault, or its inputs if it has none; else ""."""
    takes, _, gives = detail.partition(" -> ")
    gives = takes if gives == "()" else gives  # an op in place that returns nothing
    return next((letter for letter in ("P", "S", "R") if re.search(rf"\b{letter}+\b", gives)), "")


AFTER_ANOTHER, BY_KEYWORD = "a call after one with another argument", "arguments given by keyword"
BEHIND = {
    AFTER_ANOTHER: "the result is that of the call before, from DTensor's cache: the registration of the op (`RuntimeSchemaInfo`) "
    "does not name the argument for the key",
    BY_KEYWORD: "`OpDispatcher.redistribute_local_args` leaves tensors given by keyword as they are",
    BY_NAME: "`OpSchema.is_inplace_op` looks at the last letter of the name",
}
"""What a maintainer would change, where a trait of a call shows it."""


def dispatch_trait(found: Attribution) -> str:
    """What of a call DTensor's dispatcher gets wrong: the trait in which the call differs from a plain one."""
    if not found.op:  # refused before a rule was looked for
        return found.detail
    op = overload(found.op)
    if reason := special_dispatch_reason(op):
        return reason
    program, arguments, wrong = found.program, op._schema.arguments, fault_class(found.reason)
    if program is not None and split_prior_call(program.then)[1]:
        return AFTER_ANOTHER
    call = program.sample.call if program is not None and program.sample.op == found.op else None
    own = {a.name for a in arguments if a.kwarg_only and not a.is_out and "Tensor" in str(a.type)}
    if own and wrong in (VALUES, SHAPE) and (call is None or any(name in own for name, _ in call.kwargs)):
        return BY_KEYWORD
    if call is not None and out_leaves(call):
        return "tensors given as out="
    if call is not None and any(name for name, _ in call.kwargs):
        return BY_KEYWORD
    return "an op in place" if op._schema.is_mutable else "the results of the ranks"


_WORDS = {
    ("P", VALUES): "partial results that do not add up to the result", ("S", VALUES): "shards with wrong values",
    ("R", VALUES): "wrong values", ("P", SHAPE): "partial results of a wrong shape", ("S", SHAPE): "shards of a wrong shape",
    ("R", SHAPE): "a wrong shape",
}  # fmt: skip


def _words(key: Key, members: Members) -> tuple[str, tuple[str, ...]]:
    """What is wrong, and the families of ops that are named with it."""
    kind, errors = key[0], sorted({raised[1] for _, one in members if (raised := _RAISED.search(one.reason))})
    if kind == UNKNOWN:
        return _happens(key[2], errors), (key[1],)
    if kind == PUBLIC_CALL:
        uses = use_in_words(key[1])
        return _happens(key[2], errors) + (f" ({uses})" if uses else ""), ()
    if kind == REDISTRIBUTION:
        return f"{_happens(key[3], errors)} in {key[2]}" + (f" {key[4]}" if key[4] else ""), ()
    if kind == DISPATCHER:
        return f"{key[2]} ({_happens(key[3], errors)})", ()
    if key[2] in (IN_PLACE, OUT):
        words = f"{key[2]} {'do not keep their placement' if key[2] == IN_PLACE else 'are refused'}"
    elif key[3] in (RAISES, REFUSED):
        stays = all(no_return_place(one.reason) for _, one in members)
        words = "no rank returns" if stays else _happens(key[3], errors)
    else:
        words = _WORDS.get((key[2], key[3]), f"wrong {key[3] or 'results'}")
        words += f" ({key[4]})" if key[0] == DECOMPOSITION and key[4] else ""
    return words, tuple(dict.fromkeys(family_of(one.op) for _, one in members))


_RAISED = re.compile(r"\b(?:raises?|on every rank:) (\w*(?:Error|Exception))\b")


def _happens(wrong: str, errors: Sequence[str]) -> str:
    """What happens: `wrong values`, or `IndexError on some ranks`."""
    ranks = {RAISES: "some ranks", REFUSED: "all ranks"}.get(wrong)
    return f"{' or '.join(errors) or 'an error'} on {ranks}" if ranks else f"wrong {wrong}"


def _cause(key: Key, members: Members, case: Case | None, torch: str) -> Cause:
    first = next((one for _, one in members if one.fix), members[0][1])
    place = tracer_place() if key[2:3] == (IN_PLACE,) else first.place
    place = place or CodePlace("", "", 0)
    words, families = _words(key, members)
    made = CauseRecord(
        id="", key=key, kind=first.kind, words=words, found_on=torch, families=families,
        findings=tuple(sorted(name for name, _ in members)),
        ops=tuple(sorted({one.op or (one.program.sample.op if one.program else "") for _, one in members} - {""})),
        function=place.name, file=place.file, line=place.line, detail=place.detail,
        why=next(iter(Counter(one.why for _, one in members if one.why).most_common(1)), ("", 0))[0]
        or (BEHIND.get(key[2], "") if first.kind == DISPATCHER and key[3] in (VALUES, SHAPE) else ""),
        tried=tuple(Counter(one.fix for _, one in members if one.fix).most_common()),
    )  # fmt: skip
    if case is not None:
        order = tuple(map(int, case.severity.order))
        made = replace(made, severity=str(case.severity), rank=order, reason=case.reason, ranks=case.program.ranks)
    return Cause(replace(made, id=_id(made)), case)


def _id(record: CauseRecord) -> str:
    """The name of a cause's script without its suffix: the same for the same cause in every run."""
    words = re.sub(r"\W+", "_", f"{record.function or record.kind} {record.what}", flags=re.ASCII).strip("_")
    return f"{words[:70].rstrip('_')}_{digest(record.key)[:6]}"


@dataclass(frozen=True, slots=True)
class CaseTask:
    """The programs that show a cause, those with the widest reach first."""

    key: Key
    starts: tuple[Attribution, ...]
    home: tuple[str, str] = ("", "")


def starts(members: Members) -> list[Attribution]:
    """The attributions whose cases are made ordinary: those of the least severity, of different ops first."""
    run = [(_soonest(one, one.program), one) for _, one in members if one.program is not None]
    ranked = [one for _, one in sorted(run, key=lambda pair: pair[0])]
    firsts = {id(one) for one in {one.op: one for one in reversed(ranked)}.values()}
    return sorted(ranked, key=lambda one: id(one) not in firsts)[:KEPT]


def _soonest(one: Attribution, program: Program) -> tuple[object, ...]:
    found = severity(program, raises(one.reason), one.reason)
    dims = sum(x.ndim for x in program.sample.tensors)
    return found.raises, found.reach, found.odd_placements, bool(program.then), found.axes, dims, program.sample.size


def ordinary_case(task: CaseTask, note: Callable[[int], None]) -> Case | None:
    """The most ordinary case of a cause; None if no program shows it."""
    best: Case | None = None
    for start in task.starts:
        if start.program is not None and no_return_place(start.reason):  # each try would take its whole time limit
            return Case(start.program, start.reason, severity(start.program, raises(start.reason), start.reason))
    for number, start in enumerate(_with_forwards(task.starts)):
        note(number)
        if best is not None and best.severity.reach == 0:
            break
        found = _ordinary(task.key, start)
        if found is not None and (best is None or found.severity < best.severity):
            best = found
    return best


def _with_forwards(given: Sequence[Attribution]) -> Iterator[Attribution]:
    for one in given:
        forwards = forward_programs(one.program) if one.program is not None else ()
        yield from (replace(one, program=program, reason="", judged=False) for program in forwards)
        yield one


def _fails_alike(reason: str, others: Sequence[Attribution]) -> bool:
    """Whether an error is of the kind of one of the others, for a cause without a function that would tie its cases together.

    Another error is another fault, or a call that is none.  The first run of the finding here counts beside the finding: a second
    run in one process may raise another error.
    """
    return len(others) < 2 or not raises(reason) or any(same_kind(one.reason, reason) for one in others)


def _ordinary(key: Key, start: Attribution) -> Case | None:
    shown: list[tuple[Program, Attribution]] = []

    def shows(program: Program) -> bool:
        try:
            judged = start.judged and not program.then
            found = Attributor(program_work(program), judged=judged, program=program).cause(start.reason)
        except (*REJECTIONS, LocalTensorError):
            return False
        if found is None:
            return False
        found = replace(found, program=program)
        if (UNKNOWN if found.kind == UNKNOWN else cause_key(found)) != (UNKNOWN if key[0] == UNKNOWN else key):
            return False
        if key[0] in (PUBLIC_CALL, UNKNOWN) and not _fails_alike(found.reason, [start, *(one for _, one in shown[:1])]):
            return False
        shown.append((program, found))
        return True

    if start.program is None or not shows(start.program):
        return None
    program = most_ordinary(start.program, shows)
    found = next(found for one, found in shown if one is program)
    return Case(program, found.reason, severity(program, raises(found.reason), found.reason))
