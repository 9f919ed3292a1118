"""The program of each rank of a test: its own fixtures, the test's body, and the teardown of the fixtures.

Tensors, modules and optimizers that pytest set up once are copied for each rank, as processes would have their own: else
ranks would add up their gradients in one `.grad`.  All ranks share other objects.  A rank that awaits has an event loop.

Hypothesis: `@given` draws an example in pytest's thread, and the test runs it on the ranks.  Private parts of
Hypothesis (for: tried on 6.170), each of which is optional:
    control._current_build_context       the target of note(), assume() and event(); Hypothesis keeps it by thread
    reporting.reporter                   the output of note(); kept by thread, too
    strategies.DataObject                the argument that data() passes to a test: exported, and called semi-stable
    _hypothesis_internal_use_settings    the settings of a test: Hypothesis need not refuse a fixture for its scope that
                                         each rank makes anew for each example

In a rank `sys.stdout` and `sys.stderr` are the rank's own, so a capture that starts there sees no other rank; what the rank
does not read goes on to the capture of the test when the rank ends.  `caplog` is a handler that takes the records of one
thread.  `capfd` is one for all ranks: they share the file descriptors.

pytest's private parts (for: tried on 9.0, 9.2):
    CaptureFixture: captureclass, _config, _start, _suspend, _resume     a second capture like that of the test
    _pytest.capture.SysCaptureBase                                       which captures are of sys.stdout
    LogCaptureFixture: _item, _finalize                                  a second one, with a handler of its own
    _pytest.logging: LogCaptureHandler, caplog_handler_key, caplog_records_key
"""

from __future__ import annotations

import asyncio
import copy
import logging
import random
import re
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import MethodType, SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
from _pytest.capture import SysCaptureBase
from _pytest.logging import LogCaptureHandler, caplog_handler_key, caplog_records_key
from torch.distributed.device_mesh import init_device_mesh

from localtensor._util import ambient
from localtensor._util.call_sites import place_of_error
from localtensor._util.events import Call, Raised, Waiting
from localtensor.errors.base import LocalTensorError
from localtensor.errors.programs import RankRaised
from localtensor.pytest_plugin.assertions import subtests_counted
from localtensor.pytest_plugin.comms import Comms
from localtensor.pytest_plugin.fixtures import RankFixtures
from localtensor.pytest_plugin.marks import RankPlan
from localtensor.pytest_plugin.thread_state import ThreadState
from localtensor.threads.run_token import Abort


class RankCapture(pytest.CaptureFixture[Any]):
    """The `capsys` of one rank."""

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Inside the block the rank's output goes where pytest's own does."""
        self._suspend()
        try:
            with super().disabled():
                yield
        finally:
            self._resume()


def own_capture(value: object, at_end: Callable[[Callable[[], Any]], None]) -> Any:
    """The calling rank's `capsys` or `caplog` for that of the test; None for any other value.

    It begins at once; `at_end` takes what ends it.
    """
    if isinstance(value, pytest.CaptureFixture) and issubclass(value.captureclass, SysCaptureBase):
        capture = RankCapture(value.captureclass, value.request, config=value._config, _ispytest=True)
        capture._start()
        at_end(capture.close)
        return capture
    if isinstance(value, pytest.LogCaptureFixture):
        return _own_log(value, at_end)
    return None


def _own_log(whole: pytest.LogCaptureFixture, at_end: Callable[[Callable[[], Any]], None]) -> pytest.LogCaptureFixture:
    """A `caplog` of the records of this thread."""
    thread, handler = threading.get_ident(), LogCaptureHandler()
    handler.setFormatter(whole.handler.formatter)
    handler.setLevel(whole.handler.level)
    handler.addFilter(lambda record: record.thread in (None, thread))
    stash: Any = pytest.Stash()
    stash[caplog_handler_key] = handler
    of_phases = whole._item.stash[caplog_records_key]
    stash[caplog_records_key] = {**of_phases, "call": handler.records}
    own = pytest.LogCaptureFixture(SimpleNamespace(stash=stash), _ispytest=True)  # type: ignore[arg-type]
    root = logging.getLogger()
    root.addHandler(handler)

    def end() -> None:
        own._finalize()
        root.removeHandler(handler)

    at_end(end)
    return own


T = TypeVar("T")

_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")
_SETTINGS = "_hypothesis_internal_use_settings"


def hypothesis_variables() -> list[tuple[Any, Any]]:
    """Hypothesis' variables of this thread, with their values; empty if it does not run."""
    control, reporting = sys.modules.get("hypothesis.control"), sys.modules.get("hypothesis.reporting")
    variables: list[Any] = [getattr(control, "_current_build_context", None), getattr(reporting, "reporter", None)]
    return [(one, one.value) for one in variables if hasattr(one, "with_value")]


@contextmanager
def with_variables(values: list[tuple[Any, Any]]) -> Iterator[None]:
    """While inside, this thread's variables have the values of the other thread."""
    with ExitStack() as stack:
        for variable, value in values:
            stack.enter_context(variable.with_value(value))
        yield


class RankData:
    """A rank's `data()` of Hypothesis: the nth value that a rank draws is the same on every rank.

    The first rank to request it draws it; `drawn` holds the values of this example so far, for all ranks.
    """

    __slots__ = ("_count", "_data", "_drawn")

    def __init__(self, data: Any, drawn: list[tuple[str, Any]]) -> None:
        self._data, self._drawn, self._count = data, drawn, 0

    def draw(self, strategy: object, label: object = None) -> Any:
        """As Hypothesis' own `draw`.  Fails if ranks draw from different strategies."""
        if self._count == len(self._drawn):
            self._drawn.append((_strategy_text(strategy), self._data.draw(strategy, label)))
        first, value = self._drawn[self._count]
        self._count += 1
        if first != _strategy_text(strategy):
            problem = f"another rank drew {first} as its value {self._count}"
            problem += ", and all ranks draw the same values in one order"
            remedy = "Draw on every rank, before the ranks part."
            pytest.fail(f"data.draw: strategy: {_strategy_text(strategy)}: {problem}. {remedy}", pytrace=False)
        return value

    def __repr__(self) -> str:
        return repr(self._data)


def shared_draws(value: object, drawn: dict[int, list[tuple[str, Any]]]) -> object:
    """A `RankData` for Hypothesis' `data()`, any other value itself; `drawn`: the values of this example, by data object."""
    kind = getattr(sys.modules.get("hypothesis.strategies"), "DataObject", None)
    return RankData(value, drawn.setdefault(id(value), [])) if kind is not None and isinstance(value, kind) else value


def _strategy_text(strategy: object) -> str:
    """The text of a strategy; equal for two that were made in the same way."""
    return _ADDRESS.sub("...", repr(strategy))


@contextmanager
def relaxed_hypothesis(test: Callable[..., Any]) -> Iterator[None]:
    """Allows fixtures of function scope, since those of a rank are made for each example; and drops the default
    deadline of Hypothesis, which is meant for one function and not for all ranks.
    """
    function = getattr(test, "__func__", test)
    before = getattr(function, _SETTINGS, None)
    if before is None:
        yield
        return
    from hypothesis import HealthCheck, settings

    allowed = {*before.suppress_health_check, HealthCheck.function_scoped_fixture}
    deadline = None if before.deadline == getattr(settings.default, "deadline", None) else before.deadline
    setattr(function, _SETTINGS, settings(parent=before, suppress_health_check=allowed, deadline=deadline))
    try:
        yield
    finally:
        setattr(function, _SETTINGS, before)


class RankEventLoop:
    """A rank's event loop, made for its first coroutine and shared by its fixtures and the test."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        return self._loop.run_until_complete(coroutine)

    def close(self) -> None:
        """Cancels the remaining tasks, as asyncio.run does, and closes the loop."""
        if self._loop is None:
            return
        try:
            left = asyncio.all_tasks(self._loop)
            for task in left:
                task.cancel()
            if left:
                self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        finally:
            self._loop.close()


__tracebackhide__ = True

_COPIED = (torch.Tensor, torch.nn.Module, torch.optim.Optimizer, torch.Generator, random.Random)
_COPIED_OF_NUMPY = ("Generator", "RandomState")
_CLEANUPS = "_cleanups"  # of a unittest's test case


@dataclass(slots=True)
class RankBody:
    """The program that each rank runs once."""

    item: pytest.Function
    plan: RankPlan
    function: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    drawn: dict[int, list[tuple[str, Any]]] = field(default_factory=dict)  # by data object, in this example
    hypothesis_values: list[tuple[Any, Any]] = field(default_factory=hypothesis_variables)
    of_thread: ThreadState = field(default_factory=ThreadState.of_this_thread)  # what fixtures have put in place
    failed: dict[int, BaseException] = field(default_factory=dict)  # failed with fixtures left to tear down
    done: set[int] = field(default_factory=set)

    def run_rank(self, rank: int) -> object:
        """Runs one rank: its fixtures, the body, and the teardown of the fixtures."""
        if self.plan.on == "threads":
            with self.of_thread.entered():
                return self._run_rank(rank)
        with subtests_counted(self.item.config) as raise_failed:
            value = self._run_rank(rank)
            raise_failed()
            return value

    def _run_rank(self, rank: int) -> object:
        copies: dict[int, Any] = {}  # one memo for all values, so that an optimizer keeps the weights of its model
        own = _own_instance(self.item.instance, copies)
        loop = RankEventLoop()
        captures: dict[int, Any] = {}  # by the id of the test's own

        def of_this_rank(value: object) -> object:
            if id(value) in captures:
                return captures[id(value)]
            found = own_capture(value, fixtures.add_finalizer) if self.plan.on == "threads" else None
            if found is None:
                return copy_for_rank(value, copies)
            captures[id(value)] = found
            return found

        fixtures = RankFixtures(self._base(rank), own, loop.run, of_this_rank)
        failure: BaseException | None = None
        value = None
        try:
            with with_variables(self.hypothesis_values):
                value = self._body(own, fixtures, loop)
        except BaseException as error:  # why: the fixtures are torn down after any error; it is raised below
            failure = error
            if fixtures.unfinished and not isinstance(error, Abort):
                self.failed[rank] = error
        for later in [*_clean_up(own, loop), *fixtures.finish(), *_close(loop)]:
            if failure is None or isinstance(later, Abort):
                failure = later
            elif later is not failure:
                text = f"and while the fixtures were torn down: {type(later).__name__}: {later}"
                notes = [*getattr(failure, "__notes__", ()), text]
                vars(failure)["__notes__"] = notes  # add_note is not in Python 3.10
        if not isinstance(failure, Abort):
            self.done.add(rank)
        if failure is not None:
            raise failure
        return value

    def _body(self, own: object, fixtures: RankFixtures, loop: RankEventLoop) -> object:
        item = self.item
        for name in item.fixturenames:  # in pytest's order, also those that are no argument
            fixtures.of(item.funcargs.get(name))
        shared = item.instance

        def own_value(value: object) -> object:
            return own if value is shared and shared is not None else shared_draws(fixtures.of(value), self.drawn)

        args, kwargs = map(own_value, self.args), {name: own_value(value) for name, value in self.kwargs.items()}
        function = self.function
        if shared is not None and getattr(function, "__self__", None) is shared:
            function = MethodType(function.__func__, own)  # type: ignore[attr-defined]  # it has a __self__
        value = function(*args, **kwargs)
        return loop.run(value) if hasattr(value, "__await__") else value

    def _base(self, rank: int) -> dict[str, Callable[[], Any]]:
        plan = self.plan
        device = "cuda" if plan.on == "nccl" else "cpu"

        def comms() -> Comms:
            simulation: Any = ambient.running()
            return Comms(simulation.calls, rank)

        return {
            "rank": lambda: rank,
            "world_size": lambda: plan.ranks,
            "mesh": lambda: init_device_mesh(device, plan.shape, mesh_dim_names=plan.names),
            "comms": comms,
        }

    def cause_of(self, fault: LocalTensorError) -> LocalTensorError:
        """The fault; or the earlier failure of a test body, if the teardown of its fixtures ended the run."""
        if isinstance(fault, RankRaised) or not self.failed:
            return fault
        raised = [Raised(rank, type(error).__name__, str(error), "") for rank, error in self.failed.items()]
        places = {rank: place_of_error(error) for rank, error in self.failed.items()}
        log: Sequence[Call] = getattr(fault, "log", ())
        ended = self.failed.keys() | self.done
        last = {call.rank: str(call.place) for call in log if call.rank not in ended}
        cause = RankRaised(raised, (), places, [Waiting(rank, where) for rank, where in sorted(last.items())])
        cause.errors, cause.log = dict(self.failed), tuple(log)
        return cause


def copy_for_rank(value: T, copies: dict[int, Any]) -> T:
    """A rank's copy of a tensor, a module, an optimizer, a generator, or a tuple with such; any other value itself.

    Lists and dicts are shared, whatever they hold, since tests collect results in them.  So are objects that cannot be
    copied, such as a tensor in the middle of a graph.  `copies` is the memo of this rank's copies.

    >>> x = torch.zeros(2)
    >>> copy_for_rank((1, x), {})[1] is x, copy_for_rank("text", {}), copy_for_rank(kept := [x], {}) is kept
    (False, 'text', True)
    """
    if not _to_copy(value):
        return value
    try:
        return copy.deepcopy(value, copies)
    except Exception:  # why: copying a user's class may raise anything; the test then uses the original
        return value


def _to_copy(value: object) -> bool:
    numpy: Any = sys.modules.get("numpy")
    kinds = _COPIED if numpy is None else (*_COPIED, *(getattr(numpy.random, name) for name in _COPIED_OF_NUMPY))
    return isinstance(value, kinds) or (isinstance(value, tuple) and any(map(_to_copy, value)))


def _own_instance(instance: T, copies: dict[int, Any]) -> T:
    """The rank's copy of the object whose method the test is."""
    own = copy.copy(instance)
    for name, value in getattr(own, "__dict__", {}).items():
        own.__dict__[name] = [] if name == _CLEANUPS else copy_for_rank(value, copies)
    # Of unittest's async test case (the second of Python 3.10), which closes it when an object is collected.
    for loop in ("_asyncioRunner", "_asyncioTestLoop"):
        if getattr(own, loop, None) is not None:
            setattr(own, loop, None)
    return own


def _clean_up(own: object, loop: RankEventLoop) -> list[BaseException]:
    """Calls what the body has given to a unittest's `addCleanup`, the last first; returns the errors."""
    left, errors = vars(own).get(_CLEANUPS) if hasattr(own, "__dict__") else None, []
    while left:
        function, args, kwargs = left.pop()
        try:
            done = function(*args, **kwargs)
            if hasattr(done, "__await__"):
                loop.run(done)
        except BaseException as error:  # why: any error is the test's failure, and the others are called, too
            errors.append(error)
    return errors


def _close(loop: RankEventLoop) -> list[BaseException]:
    try:
        loop.close()
    except BaseException as error:  # why: any error of a cancelled task is the test's failure
        return [error]
    return []
