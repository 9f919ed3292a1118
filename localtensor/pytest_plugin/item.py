"""A test body as a rank program: each rank runs it with fixtures of its own, and the test ends with one exception."""

import functools
import os
import re
import shlex
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import pytest

from localtensor.concurrency.schedule import replay
from localtensor.errors.base import LocalTensorError, ProgramFault
from localtensor.errors.programs import GroupsLeftOver
from localtensor.pytest_plugin.assertions import first_cause, forget, trimmed
from localtensor.pytest_plugin.marks import RankPlan
from localtensor.pytest_plugin.rank_body import Program, at_ease
from localtensor.runner.api import TIMEOUT, LeftoverWarning, limit
from localtensor.threads.run import run_in_threads
from localtensor.threads.state.special_slots import torchrun_environment
from localtensor.threads.state.swap import RankState

# Torchrun's variables around a rank test.
#
# Each rank has RANK and its like for itself, and monkeypatch is one for all: at the end of the test it puts back, in
# pytest's own environment, what one of the ranks had.


class Environment:
    """Remembers the variables when it is made, before a test is set up, and at each look."""

    def __init__(self) -> None:
        self._seen = [_now()]

    def look(self) -> None:
        self._seen.append(_now())

    def tidy_up(self) -> None:
        """A variable that is as it never was before is as it was at first; what fixtures set or put back stays."""
        for name, value in _now().items():
            first = self._seen[0][name]
            if value in [before[name] for before in self._seen]:
                continue
            if first is None:
                del os.environ[name]
            else:
                os.environ[name] = first


def _now() -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in torchrun_environment(RankState(0, 1, 0))}


__tracebackhide__ = True

_SPECIAL = frozenset('"$`!\\')  # what a shell would read between double quotes


@dataclass(slots=True)
class Failure:
    """What a report has to add to the exception: the fault, the command that repeats it, how many schedules passed."""

    error: BaseException
    fault: LocalTensorError
    replay: str
    tried: str = ""


@dataclass(slots=True)
class RankTest:
    """One test on its ranks; `failure` is how it ended, if it ended badly."""

    item: Any
    plan: RankPlan
    failure: Failure | None = None
    draws: bool = field(default=False, init=False)
    environment: Environment = field(default_factory=Environment, init=False)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The test's function is one that runs it on the ranks; that of a `@given` does so for each example."""
        item = self.item
        self.environment.look()
        function = item.obj
        handle: Any = getattr(function, "hypothesis", None)
        inner = getattr(handle, "inner_test", None)
        if inner is None:
            item.obj = self._on_ranks(function)
            if not hasattr(item.parent, "nofuncargs"):  # else unittest runs it, which takes what it is given
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
            with at_ease(function):
                yield
        finally:
            handle.inner_test = inner

    def _on_ranks(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def on_ranks(*args: Any, **kwargs: Any) -> Any:
            return self._run(function, args, kwargs)

        return on_ranks

    def _run(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Raises what the test ends with, under the first schedule that it fails under."""
        texts = schedules(self.plan)
        drawn: dict[int, list[tuple[str, Any]]] = {}
        for tried, text in enumerate(texts):
            program = Program(self.item, self.plan, function, args, kwargs, drawn)
            failure, value = self._once(program, text)
            if failure is not None:
                if tried:
                    failure.tried = (
                        f"Flaky: under {tried} of {len(texts)} schedules it passed, then it failed under {text}."
                    )
                self.failure = failure
                raise failure.error
        return value

    def _once(self, program: Program, text: str) -> tuple[Failure | None, Any]:
        """Under one schedule.  Returns what to raise: an exception raised here would bear that which is handled."""
        plan = self.plan
        seconds = limit(TIMEOUT) if plan.timeout is None else plan.timeout or None
        schedule = replay(text)
        forget(self.item.stash)
        try:
            if plan.on == "threads":
                ran = run_in_threads(program.live, plan.ranks, schedule, plan.seed, seconds)
            else:
                from localtensor.processes.forked import run_forked

                run_forked(program.live, plan.ranks, plan.on, plan.seed, seconds, self._told)
                return None, None
        except LocalTensorError as fault:
            error, told = first_cause(program.cause_of(fault), plan.ranks)
            if isinstance(told, ProgramFault):
                told.replay = None  # said in pytest's words
            return Failure(error, told, self._command(schedule.text)), None
        failure = None if ran.groups_left is None else self._left(ran.groups_left, schedule.text)
        return failure, next((value for value in ran.values if value is not None), None)

    def _left(self, groups: GroupsLeftOver, ran: str) -> Failure | None:
        """Nothing, a failure, or a warning at the test: which is a failure too where warnings are errors."""
        if self.plan.leftovers == "ignore":
            return None
        if self.plan.leftovers == "raise":
            return Failure(groups, groups, self._command(ran))
        path, line, _ = self.item.reportinfo()
        try:
            warnings.warn_explicit(str(groups), LeftoverWarning, str(path), (line or 0) + 1)
        except LeftoverWarning as error:
            return Failure(error, groups, self._command(ran))
        return None

    def _told(self, error: BaseException) -> str:
        """pytest's own text of an exception, in the process where it was raised."""
        return str(self.item.repr_failure(pytest.ExceptionInfo.from_exception(trimmed(error))))

    def _command(self, ran: str) -> str:
        """What brings this run about again.  Of many examples each has its own run, under one policy."""
        words = list(self.plan.words)
        if self.plan.on == "threads":
            words += ["--rank-schedule", shlex.quote(re.split("[=@]", ran)[0] if self.draws else ran)]
        here, file = self.item.config.invocation_params.dir, self.item.path
        name = "".join([os.path.relpath(file, here), *self.item.nodeid.partition("::")[1:]])
        name = shlex.quote(name) if set(name) & _SPECIAL else f'"{name}"'
        return " ".join(["pytest", name, *words, "--rank-seed", str(self.plan.seed)])


def schedules(plan: RankPlan) -> list[str]:
    """The plan's own, then as many others as `--rank-flaky` wants, the same in every run: two shuffled, one pct."""
    if plan.on != "threads":
        return [plan.schedule] * plan.flaky
    more = [f"pct:{number}" if number % 3 == 2 else f"shuffled:{number}" for number in range(plan.flaky - 1)]
    return [plan.schedule, *more]
