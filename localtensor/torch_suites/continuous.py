"""Tests of torch's MultiProcContinuousTest, and so of DTensorContinuousTestBase, on rank threads.

torch keeps the processes of such a class from one test to the next, and each of them keeps its rank on the class.
Here each test has ranks of its own, and each rank a subclass of the test's class of its own, so that ranks do not
overwrite each other's class attributes.  A test that fails does not keep the others from running.
"""

import inspect
import tempfile
import types
import unittest
from collections.abc import Callable
from functools import wraps
from typing import Any

from torch.testing._internal import common_distributed, common_utils

from localtensor.torch_suites.multi_threaded import raise_outcome
from localtensor.torch_suites.rank_run import RankProcess, SuiteOptions, precision_setter, run_ranks, warn_fallback

# Private part of torch: why it is needed.  Tried on torch 2.13.0; read in the sources of 2.11 to 2.15.
PRIVATE = {
    "torch.testing._internal.common_distributed.MultiProcContinuousTest._spawn_processes": "no process is started",
    "torch.testing._internal.common_distributed.MultiProcContinuousTest._worker_run_main_wait": "where ranks run",
    "torch.testing._internal.common_distributed.MultiProcContinuousTest._worker_loop": "what a process runs",
    "torch.testing._internal.common_utils.set_rng_seed": "the seed that every process begins with",
}
BASE = common_distributed.MultiProcContinuousTest


class _TaskQueue:
    """The queue of a worker's tests: one, and then the end."""

    def __init__(self, test_id: str) -> None:
        self.left = [test_id, None]

    def get(self) -> str | None:
        return self.left.pop(0)


class _ResultQueue:
    """The queue of a worker's results.  A failure is raised as its exception."""

    def __init__(self) -> None:
        self.skip: unittest.SkipTest | None = None

    def put(self, result: object) -> None:
        if isinstance(result, unittest.SkipTest):
            self.skip = result
        elif isinstance(result, BaseException):
            raise result.__cause__ or result


class _NoProcess:
    """Placeholder for the processes and their queues; waiting for a result raises RuntimeError."""

    def put(self, test_id: str | None) -> None:
        """Does nothing: all ranks start where their test waits for them."""

    def join(self) -> None:
        """Does nothing: there is no process."""

    def get(self, timeout: float | None = None) -> None:
        raise RuntimeError("this test waits for processes in its own way, and there are none: its ranks are threads")


def replaced_methods(owner: type, how: SuiteOptions) -> dict[str, Any]:
    """The replacements for methods of `owner`, torch's base or a subclass, by name."""
    stock_spawn = inspect.getattr_static(owner, "_spawn_processes")

    def _spawn_processes(cls: Any, world_size: int) -> None:
        if cls._worker_run_main_wait is not _worker_run_main_wait:
            warn_fallback(f"{cls.__name__} waits for its processes itself")
            stock_spawn.__get__(None, cls)(world_size)
            return
        cls.processes, cls.task_queues, cls.completion_queues = [_NoProcess()], [_NoProcess()], [_NoProcess()]
        with tempfile.NamedTemporaryFile(delete=False) as file:
            cls.rdvz_file = file.name

    def _worker_run_main_wait(self: common_distributed.MultiProcContinuousTest, fn: Callable[..., Any]) -> object:
        @wraps(fn)
        def wrapper(self: common_distributed.MultiProcContinuousTest) -> None:
            __tracebackhide__ = True
            if self.rank == self.MAIN_PROCESS_RANK:
                raise_outcome(run_ranks(_body(type(self), self.id()), int(type(self).world_size), how, type(self)))
            else:
                fn()

        return types.MethodType(wrapper, self)

    return {"_spawn_processes": classmethod(_spawn_processes), "_worker_run_main_wait": _worker_run_main_wait}


def _body(kind: Any, test_id: str) -> Callable[[RankProcess], None]:
    ranks, file, set_precisions = int(kind.world_size), kind.rdvz_file, precision_setter(kind)

    def body(process: RankProcess) -> None:
        set_precisions()
        common_utils.set_rng_seed()
        results = _ResultQueue()
        names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
        rank_class = type(kind)(kind.__name__, (kind,), names)
        rank_class._worker_loop(process.rank, ranks, file, _TaskQueue(test_id), results)
        if results.skip is not None:
            raise results.skip

    return body
