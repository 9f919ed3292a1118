"""What each rank of a test does: its own fixtures, the test's body, and the fixtures' other halves.

Tensors, modules and optimizers that pytest set up once are copied for each rank, as a process would have its own: else
ranks would add up their gradients in one `.grad`.  Other objects are one for all ranks.
"""

import asyncio
import copy
import re
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from localtensor._util import ambient
from localtensor._util.call_sites import raised_at
from localtensor._util.events import Call, Raised, Waiting
from localtensor.errors.base import LocalTensorError
from localtensor.errors.programs import RankRaised
from localtensor.pytest_plugin.fixtures import Comms, RankFixtures
from localtensor.pytest_plugin.marks import RankPlan
from localtensor.threads.run_token import Abort

# Hypothesis within rank threads: `@given` draws an example in pytest's thread, and the test runs it on the ranks.
#
# Private parts of Hypothesis (for: tried on 6.170), each of which may be missing, and then is done without:
#     control._current_build_context       what note(), assume() and event() speak to; Hypothesis keeps it by thread
#     reporting.reporter                   where note() writes; kept by thread, too
#     strategies.DataObject                what data() gives a test: exported, and called semi-stable
#     _hypothesis_internal_use_settings    where a test keeps its settings: a fixture that each rank makes anew for each
#                                          example need not be refused for its scope, as Hypothesis would

_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")
_SETTINGS = "_hypothesis_internal_use_settings"


def kept_by_thread() -> list[tuple[Any, Any]]:
    """Hypothesis' variables of this thread, with their values: none if it is not at work."""
    control, reporting = sys.modules.get("hypothesis.control"), sys.modules.get("hypothesis.reporting")
    variables: list[Any] = [getattr(control, "_current_build_context", None), getattr(reporting, "reporter", None)]
    return [(one, one.value) for one in variables if hasattr(one, "with_value")]


@contextmanager
def passed_on(values: list[tuple[Any, Any]]) -> Iterator[None]:
    """In this thread the variables have the values that they had in the other."""
    with ExitStack() as stack:
        for variable, value in values:
            stack.enter_context(variable.with_value(value))
        yield


class RankData:
    """What a rank has where the test has Hypothesis' `data()`: the nth value that it draws is the nth of every rank.

    The rank that comes first draws it; `drawn` is what was drawn so far in this example, for all ranks.
    """

    __slots__ = ("_count", "_data", "_drawn")

    def __init__(self, data: Any, drawn: list[tuple[str, Any]]) -> None:
        self._data, self._drawn, self._count = data, drawn, 0

    def draw(self, strategy: Any, label: Any = None) -> Any:
        """As Hypothesis' own.  Ranks that draw from different strategies fail."""
        if self._count == len(self._drawn):
            self._drawn.append((_told(strategy), self._data.draw(strategy, label)))
        first, value = self._drawn[self._count]
        self._count += 1
        if first != _told(strategy):
            problem = (
                f"another rank drew {first} as its value {self._count}, and all ranks draw the same values in one order"
            )
            remedy = "Draw on every rank, before the ranks part."
            pytest.fail(f"data.draw: strategy: {_told(strategy)}: {problem}. {remedy}", pytrace=False)
        return value

    def __repr__(self) -> str:
        return repr(self._data)


def of_ranks(value: Any, drawn: dict[int, list[tuple[str, Any]]]) -> Any:
    """A `RankData` for Hypothesis' `data()`, anything else as it is; `drawn`: what was drawn from each in this example."""
    kind = getattr(sys.modules.get("hypothesis.strategies"), "DataObject", None)
    return RankData(value, drawn.setdefault(id(value), [])) if kind is not None and isinstance(value, kind) else value


def _told(strategy: Any) -> str:
    """Two strategies that were made alike have one text."""
    return _ADDRESS.sub("...", repr(strategy))


@contextmanager
def at_ease(test: Any) -> Iterator[None]:
    """Hypothesis does not mind fixtures of function scope, for those of a rank are made for each example; and its
    default deadline, which is for one function and not for all ranks, does not count.
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


# One event loop for each rank, for tests and fixtures that are async.


class Loop:
    """Begins with the first coroutine; all that a rank awaits runs on it, so a fixture and its test share it."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        return self._loop.run_until_complete(coroutine)

    def close(self) -> None:
        """Tasks that are left are cancelled, as asyncio.run does."""
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

_COPIED = (torch.Tensor, torch.nn.Module, torch.optim.Optimizer)


@dataclass(slots=True)
class Program:
    """The program that each rank runs once."""

    item: Any
    plan: RankPlan
    function: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    drawn: dict[int, list[tuple[str, Any]]] = field(default_factory=dict)  # of Hypothesis' data, in this example
    spoke: list[tuple[Any, Any]] = field(default_factory=kept_by_thread)
    failed: dict[int, BaseException] = field(default_factory=dict)  # and had something to tear down then
    done: set[int] = field(default_factory=set)

    def live(self, rank: int) -> Any:
        """One rank: its fixtures, the body, and the fixtures' other halves."""
        copies: dict[int, Any] = {}  # one for all, so that an optimizer still has the weights of its model
        own = _own(self.item.instance, copies)
        loop = Loop()
        fixtures = RankFixtures(self._base(rank), own, loop.run, lambda value: copied(value, copies))
        failure: BaseException | None = None
        value = None
        try:
            with passed_on(self.spoke):
                value = self._body(own, fixtures, loop)
        except BaseException as error:  # why: the fixtures are torn down, whatever ended the body
            failure = error
            if fixtures.unfinished and not isinstance(error, Abort):
                self.failed[rank] = error
        for worse in [*fixtures.finish(), *_closed(loop)]:
            if failure is None or isinstance(worse, Abort):
                failure = worse
            elif worse is not failure:
                words = f"and while the fixtures were torn down: {type(worse).__name__}: {worse}"
                vars(failure)["__notes__"] = [
                    *getattr(failure, "__notes__", ()),
                    words,
                ]  # add_note is not in Python 3.10
        if not isinstance(failure, Abort):
            self.done.add(rank)
        if failure is not None:
            raise failure
        return value

    def _body(self, own: Any, fixtures: RankFixtures, loop: Loop) -> Any:
        item = self.item
        for name in item.fixturenames:  # in pytest's order, and those that nobody names as an argument too
            fixtures.of(item.funcargs.get(name))
        shared = item.instance

        def mine(value: Any) -> Any:
            return own if value is shared and shared is not None else of_ranks(fixtures.of(value), self.drawn)

        args, kwargs = map(mine, self.args), {name: mine(value) for name, value in self.kwargs.items()}
        function = self.function
        if shared is not None and getattr(function, "__self__", None) is shared:
            function = MethodType(function.__func__, own)  # type: ignore[attr-defined]  # it has a __self__
        value = function(*args, **kwargs)
        return loop.run(value) if hasattr(value, "__await__") else value

    def _base(self, rank: int) -> dict[str, Callable[[], Any]]:
        plan = self.plan
        device = "cuda" if plan.on == "nccl" else "cpu"
        return {
            "rank": lambda: rank,
            "world_size": lambda: plan.ranks,
            "mesh": lambda: init_device_mesh(device, plan.shape, mesh_dim_names=plan.names),
            "comms": lambda: Comms(_log_of(ambient.running()), rank),
        }

    def cause_of(self, fault: LocalTensorError) -> LocalTensorError:
        """The fault; or the failure of a body, if it was what its fixtures did after it that ended the run."""
        if isinstance(fault, RankRaised) or not self.failed:
            return fault
        raised = [Raised(rank, type(error).__name__, str(error), "") for rank, error in self.failed.items()]
        places = {rank: raised_at(error) for rank, error in self.failed.items()}
        log: Sequence[Call] = getattr(fault, "log", ())
        last = {
            call.rank: str(call.place) for call in log if call.rank not in self.failed and call.rank not in self.done
        }
        cause = RankRaised(raised, (), places, [Waiting(rank, where) for rank, where in sorted(last.items())])
        cause.errors, cause.log = dict(self.failed), tuple(log)
        return cause


def copied(value: Any, copies: dict[int, Any]) -> Any:
    """A rank's own of a tensor, a module or an optimizer, and of tuples with such; others as they are.

    Lists and dicts are shared, whatever is in them, for tests collect in them.  So is what torch cannot copy, such as
    a tensor in the middle of a graph.  `copies` are those of this rank so far.

    >>> x = torch.zeros(2)
    >>> copied((1, x), {})[1] is x, copied("text", {}), copied(kept := [x], {}) is kept
    (False, 'text', True)
    """
    if not _to_copy(value):
        return value
    try:
        return copy.deepcopy(value, copies)
    except Exception:  # why: whatever a class raises when it is copied, the test may do without a copy
        return value


def _to_copy(value: Any) -> bool:
    return isinstance(value, _COPIED) or (isinstance(value, tuple) and any(map(_to_copy, value)))


def _own(instance: Any, copies: dict[int, Any]) -> Any:
    """The rank's copy of the object that the test is a method of."""
    own = copy.copy(instance)
    for name, value in getattr(own, "__dict__", {}).items():
        own.__dict__[name] = copied(value, copies)
    for loop in ("_asyncioRunner", "_asyncioTestLoop"):  # of unittest's async test case, which closes it when an object
        if getattr(own, loop, None) is not None:  # is gone; the second is that of Python 3.10
            setattr(own, loop, None)
    return own


def _log_of(simulation: Any) -> Callable[[], Sequence[Call]]:
    log: Callable[[], Sequence[Call]] = simulation.calls
    return log


def _closed(loop: Loop) -> list[BaseException]:
    try:
        loop.close()
    except BaseException as error:  # why: what a cancelled task raises is the test's failure
        return [error]
    return []
