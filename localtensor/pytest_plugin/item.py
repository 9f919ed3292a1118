"""A test body as a rank program: each rank runs it with fixtures of its own, and the test ends with one exception.

Each rank has torchrun's variables (RANK and the like) for itself, but monkeypatch is one for all ranks: at the end of
the test it writes the values of one rank into pytest's own environment, which `EnvironmentSnapshots` undoes.

pytest's private parts (for: tried on 9.0, 9.2):
    _pytest._code.code: ExceptionChainRepr, ReprFileLocation    where a fault without a traceback happened
    _pytest._code.code: ReprEntry                               its source lines
    _pytest._code.code: ReprEntryNative, ReprTraceback          the failure text of a real process
"""

import ast
import functools
import linecache
import os
import re
import shlex
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import pytest
from _pytest._code.code import ExceptionChainRepr, ReprEntry, ReprEntryNative, ReprFileLocation, ReprTraceback

from localtensor._util.events import Place
from localtensor.collectives.rendezvous import RunObserver
from localtensor.concurrency.schedule import replay
from localtensor.errors.base import LocalTensorError, ProgramFault, first_line
from localtensor.errors.failure_report import failure_text
from localtensor.errors.programs import GroupsLeftOver, RankRaised
from localtensor.pytest_plugin.assertions import (
    clear_passed,
    expected_by_xfail,
    first_cause,
    passed_texts,
    trim_traceback,
)
from localtensor.pytest_plugin.fixtures import shadowing_notes
from localtensor.pytest_plugin.marks import RankPlan
from localtensor.pytest_plugin.rank_body import RankBody, relaxed_hypothesis
from localtensor.runner.api import DEFAULT_TIMEOUT, LeftoverWarning, timeout_limit
from localtensor.runner.trace.files import TraceOptions, recorded
from localtensor.threads.run import run_in_threads
from localtensor.threads.state.special_slots import torchrun_environment


class EnvironmentSnapshots:
    """Snapshots of torchrun's variables: one when it is made, before a test is set up, and more on request."""

    def __init__(self) -> None:
        self._snapshots = [_current_variables()]

    def take_snapshot(self) -> None:
        self._snapshots.append(_current_variables())

    def restore(self) -> None:
        """Resets each variable whose value is in no snapshot to the first; what fixtures set or restored stays."""
        for name, value in _current_variables().items():
            first = self._snapshots[0][name]
            if value in [before[name] for before in self._snapshots]:
                continue
            if first is None:
                del os.environ[name]
            else:
                os.environ[name] = first


def _current_variables() -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in torchrun_environment(0, 1)}


__tracebackhide__ = True

_SHELL_SPECIAL = frozenset('"$`!\\')  # characters that a shell interprets within double quotes


@dataclass(slots=True)
class RankTestFailure:
    """The additions of a report to the exception: the fault, the command that repeats it, the schedules that passed."""

    error: BaseException
    fault: LocalTensorError
    replay: str
    tried: str = ""


@dataclass(slots=True)
class RankTest:
    """One test on its ranks; `failure` is None unless it failed."""

    item: Any
    plan: RankPlan
    failure: RankTestFailure | None = None
    draws: bool = field(default=False, init=False)
    environment: EnvironmentSnapshots = field(default_factory=EnvironmentSnapshots, init=False)

    @contextmanager
    def running_on_ranks(self) -> Iterator[None]:
        """While inside, the test's function runs it on the ranks; that of a `@given` does so for each example."""
        item = self.item
        self.environment.take_snapshot()
        function = item.obj
        handle: Any = getattr(function, "hypothesis", None)
        inner = getattr(handle, "inner_test", None)
        if inner is None:
            item.obj = self._on_ranks(function)
            if not hasattr(item.parent, "nofuncargs"):  # else unittest runs it, and passes no arguments
                item.runtest = MethodType(pytest.Function.runtest, item)  # past plugins that would await it
            try:
                yield
            finally:
                item.obj = function
                item.__dict__.pop("runtest", None)
            return
        self.draws = True
        handle.inner_test = self._on_ranks(inner)
        try:
            with relaxed_hypothesis(function):
                yield
        finally:
            handle.inner_test = inner

    def _on_ranks(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def on_ranks(*args: object, **kwargs: object) -> object:
            return self._run(function, args, kwargs)

        return on_ranks

    def _run(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> object:
        """Runs the test under each schedule.  Raises the test's exception under the first that it fails under."""
        texts = schedule_texts(self.plan)
        drawn: dict[int, list[tuple[str, Any]]] = {}
        for tried, text in enumerate(texts):
            program = RankBody(self.item, self.plan, function, args, kwargs, drawn)
            failure, value = self._run_under(program, text)
            if failure is not None:
                if tried:
                    passed = f"under {tried} of {len(texts)} schedules it passed"
                    failure.tried = f"Flaky: {passed}, then it failed under {text}."
                self.failure = failure
                raise failure.error
        return value

    def _run_under(self, program: RankBody, text: str) -> tuple[RankTestFailure | None, Any]:
        """Runs under one schedule.  Returns the failure: raised here, it would have the handled error as its context."""
        plan = self.plan
        seconds = timeout_limit(DEFAULT_TIMEOUT) if plan.timeout is None else plan.timeout or None
        schedule = replay(text)
        clear_passed(self.item.stash)
        try:
            if plan.on == "threads":
                with self._recorded() as recorder:
                    given = (program.run_rank, plan.ranks, schedule, plan.seed, seconds)
                    ran = run_in_threads(*given, observer=recorder)
            else:
                from localtensor.processes.forked import run_forked

                run_forked(program.run_rank, plan.ranks, plan.on, plan.seed, seconds, self._failure_text)
                return None, None
        except LocalTensorError as fault:
            error, fault_first = first_cause(program.cause_of(fault), plan.ranks, expected_by_xfail(self.item))
            if isinstance(fault_first, ProgramFault):
                fault_first.replay = None  # the report prints a pytest command instead
            return RankTestFailure(error, fault_first, self._replay_command(schedule.text)), None
        failure = None if ran.groups_left is None else self._leftover_failure(ran.groups_left, schedule.text)
        return failure, next((value for value in ran.values if value is not None), None)

    def _recorded(self) -> AbstractContextManager[RunObserver | None]:
        """Records the ranks for `--rank-trace`; of several runs of a test the last one stays."""
        if self.plan.trace is None:
            return nullcontext()
        return recorded(TraceOptions(self.plan.trace), self.plan.ranks, "pytest")

    def _leftover_failure(self, groups: GroupsLeftOver, ran: str) -> RankTestFailure | None:
        """A failure or nothing, by the setting; a warning at the test is a failure where warnings are errors."""
        if self.plan.leftovers == "ignore":
            return None
        if self.plan.leftovers == "raise":
            return RankTestFailure(groups, groups, self._replay_command(ran))
        path, line, _ = self.item.reportinfo()
        try:
            warnings.warn_explicit(str(groups), LeftoverWarning, str(path), (line or 0) + 1)
        except LeftoverWarning as error:
            return RankTestFailure(error, groups, self._replay_command(ran))
        return None

    def _failure_text(self, error: BaseException) -> str:
        """pytest's own text of an exception, in the process where it was raised."""
        return str(self.item.repr_failure(pytest.ExceptionInfo.from_exception(trim_traceback(error))))

    def _replay_command(self, ran: str) -> str:
        """The command that repeats this run; of drawn examples, whose runs differ, with the policy alone."""
        words = list(self.plan.words)
        if self.plan.on == "threads":
            words += ["--rank-schedule", shlex.quote(re.split("[=@]", ran)[0] if self.draws else ran)]
        here, file = self.item.config.invocation_params.dir, self.item.path
        name = "".join([os.path.relpath(file, here), *self.item.nodeid.partition("::")[1:]])
        name = shlex.quote(name) if set(name) & _SHELL_SPECIAL else f'"{name}"'
        return " ".join(["pytest", name, *words, "--rank-seed", str(self.plan.seed)])


def schedule_texts(plan: RankPlan) -> list[str]:
    """The plan's schedule, then the others of `--rank-flaky`, the same in every session: two shuffled, one pct, and so on."""
    if plan.on != "threads":
        return [plan.schedule] * plan.flaky
    more = [f"pct:{number}" if number % 3 == 2 else f"shuffled:{number}" for number in range(plan.flaky - 1)]
    return [plan.schedule, *more]


def add_rank_section(report: pytest.TestReport, error: BaseException, test: RankTest) -> None:
    """Adds to the report how each rank failed, and the command that repeats it.  `error` is what pytest reports."""
    failure = test.failure
    if lines := getattr(error, "rank_lines", ()):  # the run was interrupted, as by pytest-timeout
        _add_section(report, "\n".join(["When the test was interrupted:", *lines]))
        return
    if failure is None or failure.error is not error or not report.failed:
        return
    text = failure_text(failure.fault, test.plan.ranks, failure.replay, passed_texts(test.item.stash, failure.fault))
    if failure.tried:
        text = f"{failure.tried}\n{text}"
    text += "".join(f"\n{line}" for line in shadowing_notes(test.item))
    longrepr: Any = report.longrepr
    rendered = _rendered_text(failure)
    if rendered is not None:
        longrepr = report.longrepr = _with_rendered_text(longrepr, rendered)
    elif not isinstance(failure.fault, RankRaised) and isinstance(longrepr, ExceptionChainRepr):
        style = test.item.config.getoption("tbstyle", "auto")
        longrepr = report.longrepr = _with_own_place(longrepr, failure, style)
    _add_section(report, text)


def _add_section(report: pytest.TestReport, text: str) -> None:
    longrepr: Any = report.longrepr
    if hasattr(longrepr, "addsection"):
        longrepr.addsection("ranks", text)
    else:
        report.longrepr = f"{longrepr}\n---- ranks ----\n{text}"


def _rendered_text(failure: RankTestFailure) -> str | None:
    """The failure text of a real process; None if there is none."""
    if not isinstance(failure.fault, RankRaised):
        return None
    by_rank: dict[int, str] = getattr(failure.fault, "rendered", {})
    return by_rank.get(failure.fault.raised[0].rank)


def _with_rendered_text(longrepr: object, rendered: str) -> ExceptionChainRepr | str:
    """The report with the text of the process, which had the source of its lines."""
    if not isinstance(longrepr, ExceptionChainRepr):
        return rendered
    _, crash, _ = longrepr.chain[-1]
    text = ReprTraceback([ReprEntryNative(f"{rendered}\n".splitlines(keepends=True))], None, "native")
    return ExceptionChainRepr([(text, crash, None)])


def _with_own_place(longrepr: ExceptionChainRepr, failure: RankTestFailure, style: str) -> ExceptionChainRepr:
    """The report of a fault that no code of the user raised: its own text, and the lines of the user that it names."""
    traceback, crash, _ = longrepr.chain[-1]
    traceback.extraline = None
    places = getattr(failure.fault, "places", ())
    if places:
        text = f"{type(failure.error).__name__}: {first_line(str(failure.error))}"
        crash = ReprFileLocation(places[0].file, places[0].line, text)
        kind = type(failure.error).__name__
        rows = [line for entry in traceback.reprentries for line in entry.lines]
        begin = next((number for number, line in enumerate(rows) if line.startswith("E ")), len(rows))
        message = rows[begin:]
        if style in ("auto", "long") and message and (entries := _source_entries(places, message, kind)):
            traceback = ReprTraceback(entries, None, "long")
    return ExceptionChainRepr([(traceback, crash, None)])


def _source_entries(places: Sequence[Place], message: Sequence[str], kind: str) -> list[ReprEntry]:
    """An entry for each function of these places, with its source down to the last of its places, as of an assertion.

    The first place, which is the likely culprit's, comes last, with the message; of the others there are two at most.
    """
    by_function: dict[tuple[str, int], list[int]] = {}
    for place in places:
        start = _first_line_of_function(place)
        if start:
            by_function.setdefault((place.file, start), []).append(place.line)
    entries = []
    for number, ((file, start), marked) in enumerate(list(by_function.items())[:MOST_FUNCTIONS]):
        rows = [(line, linecache.getline(file, line).rstrip()) for line in range(start, max(marked) + 1)]
        lines = [f"{'>' if line in marked else ' '}   {row}" if row else "" for line, row in rows]
        where = ReprFileLocation(file, marked[0], "" if number else kind)
        entries.append(ReprEntry(lines if number else [*lines, *message], None, None, where, "long"))
    return entries[::-1]


MOST_FUNCTIONS = 3


def _first_line_of_function(place: Place) -> int:
    """The line on which the innermost function around the place begins; its own line outside of functions, 0 without source."""
    try:
        tree = ast.parse("".join(linecache.getlines(place.file)))
    except SyntaxError:
        return 0
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    around = [node for node in functions if node.lineno <= place.line <= (node.end_lineno or 0)]
    if not around:
        return place.line if linecache.getline(place.file, place.line) else 0
    inner = max(around, key=lambda node: node.lineno)
    return min([inner.lineno, *(one.lineno for one in inner.decorator_list)])
