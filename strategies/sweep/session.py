"""A whole validation: capture samples, validate every overload in workers, confirm suspected rules, report.

Each step is a line of the journal.  A sample that kills its worker, hangs or raises costs that step alone, and is
reported as a crash.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from localtensor.errors import LocalTensorError, WrongType
from strategies.base import worker_pool
from strategies.base.atomic_files import write_lines
from strategies.base.journal import (
    FOREIGN_LINE_ERRORS,
    WRITES,
    DiskFull,
    Journal,
    foreign_line_error,
    lines_of_kind,
    open_journal,
)
from strategies.base.progress import Progress
from strategies.base.worker_pool import TIMED_OUT, TaskAnswer, TaskDone, TaskFailed, TaskLost, Workers
from strategies.inputs import gathering
from strategies.inputs.gathering import SamplesByOp, gather_samples, overloads_of_rules
from strategies.inputs.variants.all_variants import samples_for
from strategies.model.kernels import kernels_on, run_in_batches
from strategies.model.rule import Sample, dtype_class
from strategies.model.settings import DEFAULT_DTYPES, Settings, rules_module
from strategies.model.verdict import ALONE, MESHES, PAIRS, Crash, Report, Verdict, WorkUnit, digest, read_unit
from strategies.programs.chained import validate_on_meshes, validate_with_follow_ups
from strategies.programs.mesh_validation import validate_context_parallel, validate_handlers
from strategies.programs.random_laws import validate_laws
from strategies.programs.shrink.search import ShrinkTask, smaller_candidates
from strategies.sweep import aggregate, confirmation, executors
from strategies.torch_api import user_modules
from strategies.torch_api.decompositions import plain_instance_checks, without_dynamo, without_stacks
from strategies.torch_api.faster_propagation import faster_propagation
from strategies.torch_api.mesh_and_caches import cached_traces
from strategies.torch_api.rank_runs import prepare_confirmation, shared_worlds
from strategies.torch_api.user_modules import import_rules
from strategies.validation import finding
from strategies.validation.finding import Candidate, OverloadTask, RuleOutcome, TaskResult
from strategies.validation.overload import Note, validate_overload
from strategies.validation.sources.registry import source_of_rules

SECONDS = 30.0
"""Time limit of one step: one sample on one mesh."""
RETRIES = 40
"""Steps of one task that may kill a worker before the rest of it is given up."""
KEPT_CASES = 3
"""Cases of one suspected rule that are run on real processes, over all units."""
SHRINK_SECONDS = 60.0
"""Time limit in seconds for shrinking one finding; after it the finding stays as it is."""
_VALIDATORS = {ALONE: validate_overload, PAIRS: validate_with_follow_ups, MESHES: validate_on_meshes}


def validate_task(task: OverloadTask, note: Note) -> list[TaskResult]:
    """Validate a task in a worker: one result for each unit, none if its time is up.

    The task's rules module is imported first.  `note` is called with the number of each step before it begins.
    """
    if task.until and time.time() >= task.until:
        return []
    if task.home[0]:
        import_rules(*task.home)
    # What follows an op, and several axes, are simulated with the kernels of the CPU.
    with shared_worlds(), kernels_on(task.device if task.kind == ALONE and task.source == "dtensor" else "cpu"):
        results = run_in_batches(functools.partial(_VALIDATORS[task.kind], task), note)
    if task.source == "dtensor":
        validate_laws(task, results, note)
        validate_context_parallel(task, results, note)
        validate_handlers(task, results, note)
    return results


def validate_tasks(
    workers: Workers,
    tasks: Sequence[OverloadTask],
    journal: Journal,
    run: str,
    tick: Callable[[int], None],
    suspected: Callable[[], None] = lambda: None,
) -> None:
    """Add a journal line for every unit of the tasks that begins in time.

    A step that kills its process is left out of the next attempt.  A process that dies before its first step is
    retried once: the cause may lie outside.  `suspected` is called whenever there is something to confirm.
    """
    deaths: dict[int, list[tuple[OverloadTask, TaskLost]]] = defaultdict(list)
    latest = list(tasks)
    retries: Counter[int] = Counter()
    unbegun: set[int] = set()  # those whose worker died once before their first step

    def again(at: int, lost: TaskLost) -> OverloadTask | None:
        if retries[at] == RETRIES or (lost.noted < 0 and at in unbegun):
            return None
        retries[at] += 1
        if lost.noted < 0:
            unbegun.add(at)
        else:
            task = latest[at]
            deaths[at].append((task, lost))
            latest[at] = replace(task, skip=task.skip | _steps_to_skip(task, lost), until=0.0)  # has begun
        return latest[at]

    def record(at: int, answer: TaskAnswer) -> None:
        if isinstance(answer, TaskDone):
            found, seconds = answer.value, answer.seconds
        else:
            found, seconds = _abandoned(latest[at], answer), 0.0
        for result in _with_deaths(found, deaths.pop(at, [])):
            journal.add({**finding.task_line(result, seconds / len(found)), "run": run})
        if any(result.suspects or result.whole for result in found):
            suspected()

    # As they come: what is done is in the journal, also while a task before it is at work.
    for _ in workers.run(validate_task, tasks, limit=SECONDS, tick=tick, again=again, arrived=record):
        pass


def _steps_to_skip(task: OverloadTask, lost: TaskLost) -> set[int]:
    """The step that killed its worker; all steps of a sample that hung, since it would hang on each mesh."""
    number, _ = task.at(lost.noted)
    return {lost.noted, task.oracle_step(number)} if lost.why.startswith(TIMED_OUT) else {lost.noted}


def _with_deaths(found: list[TaskResult], deaths: Sequence[tuple[OverloadTask, TaskLost]]) -> list[TaskResult]:
    for task, lost in deaths:
        number, mesh = task.at(lost.noted)
        sample = task.samples[number]
        call = f"{', '.join(sample.arguments())} from {sample.origin}"
        where = "the whole tensors" if lost.noted >= task.oracle_step(0) else "a rank's piece"
        crash = Crash(task.op, call, f"{lost.why} on {where}")
        units = [h for h in found if (h.unit.dtypes, h.unit.mesh) == (dtype_class(sample), mesh)]
        (units or found)[0].crashed.append(crash)
    return found


def _abandoned(task: OverloadTask, answer: TaskFailed | TaskLost) -> list[TaskResult]:
    found = [TaskResult(unit) for unit in task.units()]
    if isinstance(answer, TaskFailed):
        crash = Crash(task.op, "the whole overload", answer.error, answer.trace)
    else:
        crash = Crash(task.op, "before its first sample" if answer.noted < 0 else "again and again", answer.why)
    found[0].crashed.append(crash)
    return found


def validate(settings: Settings, progress: Progress | None = None) -> Report:
    """Validate the rules that the settings name.

    Raises `WrongType`, `UnknownOp`, `BadSetting`, `BadRules` or `BadJournal` before any work, `DiskFull` when the journal
    cannot be extended.  A crash of one sample, native or ours, is in the report and does not stop the rest.
    """
    if not isinstance(settings, Settings):
        raise WrongType("validate", "settings", settings, "it is no Settings", "Pass Settings(('cumprod',)), say.")
    progress = progress or Progress()
    with open_journal(settings.journal, resume=settings.resume) as journal:
        try:
            work = _Validation(settings, journal, progress)
            work.do()
        except LocalTensorError:
            journal.drop()
            raise
        return work.report()


def run_validation(settings: Settings, journal: Journal, progress: Progress) -> Sequence[tuple[str, float]]:
    """Do the work that the journal does not hold yet, and add its lines.

    Returns the seconds of each phase.  Raises as `validate`.
    """
    return _Validation(settings, journal, progress).do()


class _Validation:
    """One validation and its journal."""

    def __init__(self, settings: Settings, journal: Journal, progress: Progress) -> None:
        self.settings, self.journal, self.progress = settings, journal, progress
        self.seconds: list[tuple[str, float]] = []
        self.before: tuple[int, Report] | None = None
        if journal.cut:
            progress.say(journal.cut)
        if journal.begun is not None and journal.path is not None:
            try:  # before any work: all lines are read again when there are results
                self.before = len(journal.lines), aggregate.report(journal.begun, journal.lines)
            except FOREIGN_LINE_ERRORS as error:
                raise foreign_line_error(journal.path, error, WRITES) from None
        self.done = {read_unit(line["unit"]) for line in lines_of_kind(journal.lines, "unit")}

    def do(self) -> Sequence[tuple[str, float]]:
        """The seconds of each phase."""
        dynamo = without_dynamo(many=self.settings.everything)
        # Workers keep these, too.
        with dynamo, without_stacks(), plain_instance_checks(), faster_propagation(), cached_traces():
            return self._run_phases()

    def report(self) -> Report:
        """The report on all lines; that of the resumed journal where nothing was left to do."""
        if self.before and self.before[0] == len(self.journal.lines):
            return replace(self.before[1], seconds=tuple(self.seconds))
        return aggregate.report(self.journal.begun or {}, self.journal.lines, self.seconds)

    @contextlib.contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds.append((phase, round(time.perf_counter() - start, 2)))

    def _run_phases(self) -> Sequence[tuple[str, float]]:
        settings = self.settings
        with self._timed("imports"):
            self.source = source_of_rules(settings.source, settings.rules, settings.folder)
            own = settings.source == "dtensor"
            rules = (
                user_modules.load_rules(settings.rules, settings.folder)
                if own and settings.rules != "dtensor"
                else None
            )
            rules = rules.only(settings.only) if rules and settings.only else rules
            if rules and settings.patterns:
                rules = rules.only(overloads_of_rules(rules, settings.patterns))
        self.home = (settings.rules, settings.folder) if settings.rules != "dtensor" else ("", "")
        rules_text = {"rules_text": user_modules.module_digest(rules.module)} if rules else {}
        self.settings_line = settings.asked() | rules_text
        self.run = digest([sorted((k, v) for k, v in self.settings_line.items() if k != "shard")])
        if self.journal.begun is not None:
            self.journal.begin(self.settings_line)  # raises if the journal is of another run
        if settings.case:
            with self._timed("confirmation"):
                self._confirm_case()
            return self.seconds
        with self._workers() as workers:
            with self._timed("samples"):
                shelf = self._captured_samples(workers, rules)
                tasks = self._tasks(shelf)
                del shelf  # tens of thousands of samples, of which the tasks hold those that are left to do
            with self._timed("trials"):
                self.progress.phase("trying rules", len(tasks))
                tick = self._ticks(workers)
                validate_tasks(
                    workers, tasks, self.journal, self.run, tick, lambda: prepare_confirmation(settings.confirm)
                )
            del tasks
            with self._timed("confirmation"):
                self._confirm(workers)
        return self.seconds

    def _confirm_case(self) -> None:
        """Run the one case of the settings on real processes, as it is."""
        seed, candidate = finding.read_case(self.settings.case)
        self.settings = replace(self.settings, seed=seed)
        confirmation.check_case(candidate, seed, self.settings.device)
        sample, program = candidate.instance.sample, candidate.program
        mesh = program.mesh if program else (candidate.instance.ranks,)
        kind = MESHES if len(mesh) > 1 else PAIRS if program else ALONE
        found = TaskResult(WorkUnit(sample.op, kind, dtype_class(sample), mesh), samples=1, tried=1)
        judged = candidate.instance.verdict is not Verdict.SUSPECT
        (found.suspects if judged else found.whole)[candidate.name] = [candidate]
        self.journal.begin(aggregate.first_line(self.settings_line, [sample.op], [], ()))
        self.journal.add({**finding.task_line(found, 0.0), "run": self.run})
        self._confirm(None)

    def _ticks(self, workers: Workers) -> Callable[[int], None]:
        """Progress that names the overloads or rules at work, where the workers are processes of ours."""

        def tick(count: int) -> None:
            tasks = getattr(workers, "running", ())
            self.progress.now(", ".join(dict.fromkeys(getattr(task, "op", "") or task.name for task in tasks)))
            self.progress.tick(count)

        return tick

    def _workers(self) -> Workers:
        if self.settings.executor:
            factory = executors.executor_factory(self.settings.executor, self.settings.folder)
            return executors.ExecutorPool(factory, [self.settings.folder])
        return worker_pool.WorkerPool(self.settings.workers, cuda=self.settings.device == "cuda")

    def _pending(self, ops: Sequence[str]) -> list[str]:
        """The overloads of this shard with a unit that is not done yet."""
        mine = self.settings.mine(ops)
        if not self.done:
            return mine
        return [op for op in mine if any(set(d.units()) - self.done for d in self._tasks_of(op, [], ""))]

    def _captured_samples(self, workers: Workers, rules: user_modules.RegisteredRules | None) -> SamplesByOp:
        """The samples of the overloads that are left to do: those of the resumed run, or captured now."""
        begun, path = self.journal.begun, self.settings.journal
        if begun is not None and path is not None:
            pending = self._pending(begun["ops"])
            if not pending:
                return {}
            kept = gathering.read_samples(gathering.samples_path(path), self.run, set(pending))
            if kept is not None and any(lines_of_kind(self.journal.lines, "captured")):
                return kept
        if self.settings.source == "dtensor":
            # A file has no samples, its module has.
            module, home = rules_module(self.settings.rules, self.settings.folder)
            here = replace(self.settings, rules=module, folder=home)
            found = gather_samples(workers, here, rules, self.progress)
        else:
            found = confirmation.source_samples(self.source, self.settings)
        ignored = rules.ignored if rules else ()
        self.journal.begin(
            aggregate.first_line(self.settings_line, found.shelf, self.settings.kinds_and_meshes(), ignored)
        )
        if next(lines_of_kind(self.journal.lines, "captured"), None) is None:
            crashed = [[c.op, c.sample, c.error, c.trace] for c in found.crashed]
            refused = dict(sorted(found.refused.items()))
            self.journal.add({"kind": "captured", "crashed": crashed, "refused": refused, "run": self.run})
        if path is not None:
            samples_path = gathering.samples_path(path)
            try:
                write_lines(samples_path, gathering.samples_lines(self.run, found.shelf))
            except OSError as error:
                problem = f"the samples could not be written ({error.strerror})"
                raise DiskFull(samples_path, problem, "Make room, then go on with --resume.") from error
        wanted = set(self._pending(list(found.shelf)))
        return {op: kept for op, kept in found.shelf.items() if op in wanted}

    def _tasks_of(self, op: str, found: Sequence[Sample], why: str) -> list[OverloadTask]:
        """The tasks of one overload: on one axis, with following ops, and on several axes."""
        settings = self.settings
        kinds: dict[str, list[tuple[int, ...]]] = {}
        for kind, mesh in settings.kinds_and_meshes():
            kinds.setdefault(kind, []).append(mesh)
        return [
            OverloadTask(
                op, samples_for(kind, found, settings.seed), tuple(meshes), settings.seed, kind,
                settings.search and kind == ALONE, home=self.home, why=why, until=settings.until,
                further=settings.dtypes == DEFAULT_DTYPES, source=settings.source, device=settings.device,
            )
            for kind, meshes in kinds.items()
        ]  # fmt: skip

    def _tasks(self, shelf: SamplesByOp) -> list[OverloadTask]:
        every = [d for op, (found, why) in shelf.items() for d in self._tasks_of(op, found, why)]
        if self.settings.device != "cpu":  # what this device alone can run comes first: a run may be cut
            every.sort(key=lambda task: not user_modules.missing_kernel_reason(task.op))
        if not self.done:
            return every
        left = [replace(d, only=frozenset(set(d.units()) - self.done)) for d in every]
        return [d for d in left if d.only]

    def _confirm(self, workers: Workers | None) -> None:
        """Add a line for each rule that some unit suspects, and for each that only a real run can judge.

        `workers` make the cases smaller first.
        """
        known = {line["rule"] for line in lines_of_kind(self.journal.lines, "settled")}
        units = lines_of_kind(self.journal.lines, "unit")
        left = [line for line in units if any(line.get(part, {}).keys() - known for part in ("suspects", "whole"))]
        results = sorted(map(finding.read_task, left), key=lambda one: one.unit)
        suspected = finding.merge_candidates([r.suspects for r in results], KEPT_CASES)
        whole = finding.merge_candidates([r.whole for r in results], 2 * KEPT_CASES)
        todo = {name: found for name, found in {**whole, **suspected}.items() if name not in known}
        if self.settings.confirm == "none":
            for settled in confirmation.leave_unconfirmed({n: c for n, c in todo.items() if n in suspected}):
                self._add_confirmation(settled)
            return
        if self.settings.source != "dtensor":
            for settled in confirmation.confirm_claims(self.source, suspected, known, self.settings, self.progress):
                self._add_confirmation(settled)
            return
        smaller = self._shrunk(workers, todo, set(suspected)) if workers else todo
        tried, same = confirmation.merge_equal(smaller, set(suspected))
        for settled in same:
            self._add_confirmation(settled)
        self.progress.phase("confirming on real processes", len(tried))
        kernels = kernels_on(self.settings.device)  # what the op gives is that of the device on which DTensor runs it
        with kernels, confirmation.real_confirmation(self.settings, self.home) as session:
            session.note = self.progress.now
            with contextlib.closing(session.settle(tried, set(suspected))) as outcomes:
                for settled in outcomes:
                    self._add_confirmation(settled)
                    self.progress.tick()

    def _shrunk(
        self, workers: Workers, todo: Mapping[str, Sequence[Candidate]], suspected: set[str]
    ) -> dict[str, Sequence[Candidate]]:
        """The same, with smaller cases first.  A rule whose shrinking kills its worker stays as it was."""
        seed, home = self.settings.seed, self.home
        device = self.settings.device
        doubts = [ShrinkTask(name, tuple(found), name in suspected, seed, home, device) for name, found in todo.items()]
        self.progress.phase("making findings small", len(doubts))
        answers = workers.run(smaller_candidates, doubts, limit=SHRINK_SECONDS, tick=self._ticks(workers))
        pairs = zip(doubts, answers, strict=True)
        return {d.name: a.value if isinstance(a, worker_pool.TaskDone) else d.suspects for d, a in pairs}

    def _add_confirmation(self, settled: RuleOutcome) -> None:
        self.journal.add({**finding.outcome_line(settled), "run": self.run})
