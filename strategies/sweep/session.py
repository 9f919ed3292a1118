"""The whole validation: gather samples, hear every overload, settle the suspects, report."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from localtensor.errors import LocalTensorError
from localtensor.processes import pool
from strategies.base import worker_pool
from strategies.base.atomic_files import write_lines
from strategies.base.journal import DiskFull, Journal, of_kind, open_journal
from strategies.base.progress import Progress, Silent
from strategies.base.worker_pool import LATE, Done, Failed, Lost, Workers
from strategies.inputs import gathering
from strategies.inputs.gathering import Shelf, capture
from strategies.inputs.selection import matching
from strategies.model.rule import Sample
from strategies.model.settings import Settings
from strategies.model.verdict import ALONE, MESHES, PAIRS, Crash, Report, class_of, digest, read_unit
from strategies.programs.chained import on_meshes, with_followers
from strategies.programs.run.real_run import RealRuns
from strategies.programs.shrink.search import Doubt, regrouped, shrunk
from strategies.sweep import aggregate, executors
from strategies.sweep import aggregate as confirmation
from strategies.torch_api import user_modules
from strategies.torch_api.user_modules import at_home
from strategies.validation import finding
from strategies.validation.finding import Candidate, Settled, Task, TaskResult
from strategies.validation.overload import Note, alone

# Dockets heard in workers, into lines of a journal: what dies, hangs or raises on the way costs one step, and is said.

SECONDS = 30.0
"""Time limit of one step: one sample on one mesh."""
RETRIES = 40
"""Steps of one docket that may kill a worker before the rest of it is given up."""
_KINDS = {ALONE: alone, PAIRS: with_followers, MESHES: on_meshes}


def hear(docket: Task, note: Note) -> list[TaskResult]:
    """A worker's part: one hearing for each unit of the docket, none if its time is up.

    The rules module that it names is imported.  `note` hears the number of each step before it is begun.
    """
    if docket.until and time.time() >= docket.until:
        return []
    at_home(*docket.home)
    return _KINDS[docket.trial](docket, note)


def hear_all(
    hands: Workers, dockets: Sequence[Task], journal: Journal, run: str, tick: Callable[[int], None],
    suspected: Callable[[], None] = lambda: None,
) -> None:  # fmt: skip
    """A line for every unit of the dockets that is begun in time.  A step that kills the process is left out the next time; a process that
    is killed before its first step, by somebody else perhaps, is forgiven once.  `suspected` is called whenever there
    is something to confirm."""
    dead: dict[int, list[tuple[Task, Lost]]] = defaultdict(list)
    forgiven: set[int] = set()
    todo = dict(enumerate(dockets))
    for attempt in range(RETRIES + 1):
        answers = hands.run(hear, list(todo.values()), limit=SECONDS, tick=tick if not attempt else None)
        again: dict[int, Task] = {}
        since = time.perf_counter()
        for (at, docket), answer in zip(todo.items(), answers, strict=True):
            if isinstance(answer, Done):
                found = answer.value
            elif isinstance(answer, Lost) and attempt < RETRIES and (answer.noted >= 0 or at not in forgiven):
                if answer.noted < 0:
                    forgiven.add(at)
                    again[at] = docket
                else:
                    dead[at].append((docket, answer))
                    again[at] = replace(docket, skip=docket.skip | _left_out(docket, answer), until=0.0)  # it is begun
                continue
            else:
                found = _given_up(docket, answer)
            _add(journal, run, _with_deaths(found, dead.pop(at, [])), time.perf_counter() - since)
            if any(hearing.suspects or hearing.whole for hearing in found):
                suspected()
            since = time.perf_counter()
        todo = again
        if not todo:
            return


def _left_out(docket: Task, lost: Lost) -> set[int]:
    """What is not tried again: the step that killed, and of a sample that hung all: it would hang on each mesh."""
    number, _ = docket.at(lost.noted)
    return {lost.noted, docket.truth_step(number)} if lost.why.startswith(LATE) else {lost.noted}


def _add(journal: Journal, run: str, found: Sequence[TaskResult], seconds: float) -> None:
    for hearing in found:
        journal.add({**finding.task_line(hearing, seconds / len(found)), "run": run})


def _with_deaths(found: list[TaskResult], deaths: Sequence[tuple[Task, Lost]]) -> list[TaskResult]:
    for docket, lost in deaths:
        number, mesh = docket.at(lost.noted)
        sample = docket.samples[number]
        told = f"{', '.join(sample.arguments())} from {sample.origin}"
        where = "the whole tensors" if lost.noted >= docket.truth_step(0) else "a rank's piece"
        crash = Crash(docket.op, told, f"{lost.why} on {where}")
        units = [h for h in found if (h.unit.dtypes, h.unit.mesh) == (class_of(sample), mesh)]
        (units or found)[0].crashed.append(crash)
    return found


def _given_up(docket: Task, answer: Failed | Lost) -> list[TaskResult]:
    found = [TaskResult(unit) for unit in docket.units()]
    if isinstance(answer, Failed):
        crash = Crash(docket.op, "the whole overload", answer.error, answer.trace)
    else:
        crash = Crash(docket.op, "before its first sample" if answer.noted < 0 else "again and again", answer.why)
    found[0].crashed.append(crash)
    return found


KEPT = 3
"""Cases of one suspected rule that are tried for real, over all units."""
SHRINKING = 60.0
"""Seconds that it may take to make one finding small; after them it stays as it is."""
FOLLOWED = {PAIRS: {"real": 2, "integer": 1, "complex": 1}, MESHES: {"real": 1, "integer": 1}}
"""Samples of one overload and class of dtypes that are tried with what follows them, and on several axes."""


def validate(settings: Settings, progress: Progress | None = None) -> Report:
    """Put the rules that the settings name on trial.

    Raises `UnknownOp`, `BadSetting`, `BadRules` or `BadJournal` before any work, `DiskFull` when a journal has no
    room; a crash of one sample, native or ours, is in the report and does not stop the rest.
    """
    progress = progress or Silent()
    with open_journal(settings.journal, resume=settings.resume) as journal:
        try:
            seconds = put_on_trial(settings, journal, progress)
        except LocalTensorError:
            journal.drop()
            raise
        return aggregate.report(journal.begun or {}, journal.lines, seconds)


def put_on_trial(settings: Settings, journal: Journal, progress: Progress) -> Sequence[tuple[str, float]]:
    """Do all that is left to do, a line of the journal each; the seconds of each phase.  Raises as `validate`."""
    return _Run(settings, journal, progress).go()


class _Clock:
    def __init__(self) -> None:
        self.seconds: list[tuple[str, float]] = []

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds.append((name, round(time.perf_counter() - start, 2)))


class _Run:
    """One validation and its journal."""

    def __init__(self, settings: Settings, journal: Journal, progress: Progress) -> None:
        self.settings, self.journal, self.progress = settings, journal, progress
        self.clock = _Clock()
        if journal.cut:
            progress.say(journal.cut)
        self.done = {read_unit(line["unit"]) for line in of_kind(journal.lines, "unit")}

    def go(self) -> Sequence[tuple[str, float]]:
        """The seconds that each phase took."""
        settings, clock = self.settings, self.clock
        with clock("imports"):
            rules = user_modules.load(settings.rules, settings.folder) if settings.rules != "dtensor" else None
            rules = rules.only(settings.only) if rules and settings.only else rules
            if rules and settings.patterns:
                rules = rules.only(matching(settings.patterns, (*rules.ops, *rules.ignored)))
        self.home = (settings.rules, settings.folder) if rules else ("", "")
        self.asked = settings.asked() | ({"rules_text": user_modules.text_of(settings.rules)} if rules else {})
        self.run = digest([sorted((k, v) for k, v in self.asked.items() if k != "shard")])
        if self.journal.begun is not None:
            self.journal.begin(self.asked)  # refuses the journal of another run
        with self._hands() as hands:
            with clock("samples"):
                shelf = self._shelf(hands, rules)
                dockets = self._dockets(shelf)
                del shelf  # tens of thousands of samples, of which the dockets hold what is left to do
            with clock("trials"):
                self.progress.phase("trying rules", len(dockets))
                hear_all(hands, dockets, self.journal, self.run, self.progress.tick, self._suspected)
            del dockets
            with clock("confirmation"):
                self._settle(hands)
        return clock.seconds

    def _suspected(self) -> None:
        """Real processes will be needed soon: what they start from can be on its way meanwhile."""
        if self.settings.confirm != "none":
            pool.prepare()

    def _hands(self) -> Workers:
        if self.settings.executor:
            factory = executors.factory(self.settings.executor, self.settings.folder)
            return executors.Borrowed(factory, [self.settings.folder])
        return worker_pool.WorkerPool(self.settings.workers, cuda=self.settings.device == "cuda")

    def _pending(self, ops: Sequence[str]) -> list[str]:
        """The overloads of this shard that have a unit which is not done yet."""
        mine = self.settings.mine(ops)
        if not self.done:
            return mine
        return [op for op in mine if any(set(d.units()) - self.done for d in self._trials(op, [], ""))]

    def _shelf(self, hands: Workers, rules: user_modules.Registered | None) -> Shelf:
        """The samples of the overloads that are left to do, kept from the run that is gone on with, or captured."""
        begun, path = self.journal.begun, self.settings.journal
        if begun is not None and path is not None:
            pending = self._pending(begun["ops"])
            if not pending:
                return {}
            kept = gathering.read(gathering.path_of(path), self.run, set(pending))
            if kept is not None and any(of_kind(self.journal.lines, "captured")):
                return kept
        found = capture(hands, self.settings, rules, self.progress)
        ignored = rules.ignored if rules else ()
        self.journal.begin(aggregate.first_line(self.asked, found.shelf, self.settings.trials(), ignored))
        if next(of_kind(self.journal.lines, "captured"), None) is None:
            crashed = [[c.op, c.sample, c.error, c.trace] for c in found.crashed]
            told = {"crashed": crashed, "refused": dict(sorted(found.refused.items()))}
            self.journal.add({"kind": "captured", **told, "run": self.run})
        if path is not None:
            self._spool(gathering.path_of(path), found.shelf)
        wanted = set(self._pending(list(found.shelf)))
        return {op: kept for op, kept in found.shelf.items() if op in wanted}

    def _spool(self, path: Path, shelf: Shelf) -> None:
        try:
            write_lines(path, gathering.lines(self.run, shelf))
        except OSError as error:
            problem = f"the samples could not be written ({error.strerror})"
            raise DiskFull(path, problem, "Make room, then go on with --resume.") from error

    def _trials(self, op: str, found: Sequence[Sample], why: str) -> list[Task]:
        """The dockets of one overload: on one axis, with what follows, and on several axes."""
        settings = self.settings
        kinds: dict[str, list[tuple[int, ...]]] = {}
        for kind, mesh in settings.trials():
            kinds.setdefault(kind, []).append(mesh)
        return [
            Task(
                op, _for(kind, found), tuple(meshes), settings.seed, kind,
                settings.search and kind == ALONE, home=self.home, why=why, until=settings.until,
            )
            for kind, meshes in kinds.items()
        ]  # fmt: skip

    def _dockets(self, shelf: Shelf) -> list[Task]:
        every = [d for op, (found, why) in shelf.items() for d in self._trials(op, found, why)]
        if not self.done:
            return every
        left = [replace(d, only=frozenset(set(d.units()) - self.done)) for d in every]
        return [d for d in left if d.only]

    def _settle(self, hands: Workers) -> None:
        """A line for each rule that some unit suspects, and for each that only a real run can judge."""
        heard = [finding.read_task(line) for line in of_kind(self.journal.lines, "unit")]
        doubted = finding.merged([h.suspects for h in heard], KEPT)
        whole = finding.merged([h.whole for h in heard], 2 * KEPT)
        known = {line["rule"] for line in of_kind(self.journal.lines, "settled")}
        todo = {name: found for name, found in {**whole, **doubted}.items() if name not in known}
        if self.settings.confirm == "none":
            for settled in confirmation.unconfirmed({n: c for n, c in todo.items() if n in doubted}):
                self._add(settled)
            return
        tried, same = regrouped(self._shrunk(hands, todo, set(doubted)), set(doubted))
        for settled in same:
            self._add(settled)
        self.progress.phase("confirming on real processes", len(tried))
        with RealRuns(self.settings.confirm, self.settings.device, self.home) as court:
            session = confirmation.Session(court, self.settings.confirm, self.settings.seed, self.home[0])
            for settled in session.settle(tried, set(doubted)):
                self._add(settled)
                self.progress.tick()

    def _shrunk(
        self, hands: Workers, todo: Mapping[str, Sequence[Candidate]], doubted: set[str]
    ) -> dict[str, Sequence[Candidate]]:
        """The same, with smaller cases first.  What kills its worker on the way stays as it was."""
        seed, home = self.settings.seed, self.home
        doubts = [Doubt(name, tuple(found), name in doubted, seed, home) for name, found in todo.items()]
        self.progress.phase("making findings small", len(doubts))
        answers = hands.run(shrunk, doubts, limit=SHRINKING, tick=self.progress.tick)
        pairs = zip(doubts, answers, strict=True)
        return {d.name: a.value if isinstance(a, worker_pool.Done) else d.suspects for d, a in pairs}

    def _add(self, settled: Settled) -> None:
        self.journal.add({**finding.settled_line(settled), "run": self.run})


def _for(kind: str, found: Sequence[Sample]) -> tuple[Sample, ...]:
    """The samples for a kind of trial: all of them for the op alone, the first of each class of dtypes else."""
    if kind == ALONE:
        return tuple(found)
    left = dict(FOLLOWED[kind])
    chosen = []
    for sample in found:
        dtypes = class_of(sample)
        if left.get(dtypes, 0) and sample.tensors:
            left[dtypes] -= 1
            chosen.append(sample)
    return tuple(chosen)
