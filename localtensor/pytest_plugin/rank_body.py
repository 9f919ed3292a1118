"""What each rank of a test does: its own fixtures, the test's body, and the fixtures' other halves.

Tensors, modules and optimizers that pytest set up once are copied for each rank, as a process would have its own: else
ranks would add up their gradients in one `.grad`.  Other objects are one for all ranks.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

from localtensor._util import ambient as _context
from localtensor._util.events import Call, Raised, Waiting
from localtensor._util.rank_places import raised_at
from localtensor.errors.base import LocalTensorError
from localtensor.errors.programs import RankRaised
from localtensor.pytest_plugin.fixtures import RankFixtures
from localtensor.pytest_plugin.hypothesis_support import kept_by_thread, of_ranks, passed_on
from localtensor.pytest_plugin.marks import Plan
from localtensor.pytest_plugin.rank_comms import Comms
from localtensor.pytest_plugin.rank_loops import Loop
from localtensor.threads.run_token import Abort

__tracebackhide__ = True

_COPIED = (torch.Tensor, torch.nn.Module, torch.optim.Optimizer)


@dataclass(slots=True)
class Program:
    """The program that each rank runs once."""

    item: Any
    plan: Plan
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
            "comms": lambda: Comms(_log_of(_context.running()), rank),
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
