"""Tests of torch's MultiThreadedTestCase, and so of DTensorOpTestBase, on rank threads.

torch runs these on threads already, all at once, with one random generator and a process group of its own in Python.
Here each rank has its own generators, and the collectives are those of a process group that autograd and dispatch
modes see as they see gloo's.
"""

import functools
import inspect
import unittest
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.testing._internal import common_distributed, common_utils

from localtensor.errors import GroupMismatch, LocalTensorError
from localtensor.torch_suites import rank_run
from localtensor.torch_suites.libraries import is_rank
from localtensor.torch_suites.rank_run import RankProcess, raise_fault, skip_test

# Private part of torch: why it is needed.  Tried on torch 2.13.0; read in the sources of 2.11 to 2.15.
PRIVATE = {
    "torch.testing._internal.common_distributed.MultiThreadedTestCase._spawn_threads": "ranks wait for their join",
    "torch.testing._internal.common_distributed.MultiThreadedTestCase._join_threads": "ranks run, and their outcome is raised",
    "torch.testing._internal.common_distributed.MultiThreadedTestCase.run_test_with_threaded_pg": "runs the test on one rank",
    "torch.testing._internal.common_distributed.MultiThreadedTestCase._run": "what a thread runs first",
    "torch.testing._internal.common_distributed.MultiThreadedTestCase._current_test_name": "the name of what it runs",
    "torch.testing._internal.common_distributed.spawn_threads_and_init_comms": "a decorator that does the same",
    "torch.testing._internal.common_distributed.TEST_SKIPS": "exit codes that mean a skip",
    "torch.testing._internal.common_utils.set_rng_seed": "the seed that every rank begins with",
}

_REPLACED = ("_spawn_threads", "_join_threads", "run_test_with_threaded_pg")
BASE = common_distributed.MultiThreadedTestCase


class _UnjoinedRanks:
    """Placeholder in `self.threads` for all ranks of a test, until they are joined."""

    def __init__(self, case: common_distributed.MultiThreadedTestCase) -> None:
        self.case = case


def replaced_methods(owner: type, how: rank_run.SuiteOptions) -> dict[str, Any]:
    """The replacements for methods of `owner`, torch's base or a subclass, by name."""
    stock = {name: inspect.getattr_static(owner, name) for name in _REPLACED}

    def _spawn_threads(self: Any) -> None:
        if inspect.getattr_static(type(self), "_join_threads") is not replacements["_join_threads"]:
            rank_run.warn_fallback(f"{type(self).__name__} joins its threads itself")
            stock["_spawn_threads"](self)
            return
        type(self).global_store = dist.HashStore()
        self.threads = [_UnjoinedRanks(self)]

    def _join_threads(cls: object, threads: Any, fn: Callable[..., Any]) -> None:
        __tracebackhide__ = True
        if len(threads) == 1 and isinstance(threads[0], _UnjoinedRanks):
            case = threads[0].case
            result = rank_run.run_ranks(_body(case), int(case.world_size), how, type(case))
            if not (rank_run.needs_fallback(result) or _only_own_groups(result)):
                raise_outcome(result)
                return
            case.threads = threads = []
            stock["_spawn_threads"](case)
        stock["_join_threads"].__get__(None, cls)(threads, fn)

    replacements: dict[str, Any] = {
        "_spawn_threads": _spawn_threads,
        "_join_threads": classmethod(_join_threads),
        "run_test_with_threaded_pg": _run_test_on_rank(stock["run_test_with_threaded_pg"]),
    }
    return replacements


def _only_own_groups(result: rank_run.SuiteResult) -> bool:
    """Whether each rank made only its own group, and groups of one name are disjoint.

    On real processes such groups collide as soon as anything is sent.  torch's own threads let a test inspect them, so
    the test runs on those; any other disagreement about groups is a failure.
    """
    fault = result.fault
    if not isinstance(fault, GroupMismatch):
        return False
    made = set(fault.groups.values())
    own = all(rank in members for rank, members in fault.groups.items())
    if not own or sum(map(len, made)) != len(set().union(*made)):
        return False
    rank_run.warn_fallback(f"each rank made only its own process group of the name {fault.name!r}")
    return True


def _body(case: common_distributed.MultiThreadedTestCase) -> Callable[[RankProcess], None]:
    kind, name, ranks = type(case), case._current_test_name, case.world_size
    set_precisions = rank_run.precision_setter(kind)

    def body(process: RankProcess) -> None:
        set_precisions()
        common_utils.set_rng_seed()
        kind._run(name, process.rank, ranks)

    return body


def _run_test_on_rank(stock: Callable[..., None]) -> Callable[..., None]:
    def run_test_with_threaded_pg(
        self: common_distributed.MultiThreadedTestCase, test_name: str, rank: int, world_size: int
    ) -> None:
        """Runs the test on one rank; its exception ends the run."""
        if not is_rank():  # a thread of torch's own
            stock(self, test_name, rank, world_size)
            return
        dist.init_process_group("threaded", rank=rank, world_size=world_size)
        self.perThreadSetUp()
        try:
            getattr(self, test_name)()
        finally:
            dist.destroy_process_group()
            self.perThreadTearDown()

    return run_test_with_threaded_pg


def raise_outcome(result: rank_run.SuiteResult) -> None:
    """Raises the error that ended the run, or the skip of any rank, which torch counts for all."""
    __tracebackhide__ = True
    codes = [process.exitcode for process in result.processes]
    raised = any(process.text for process in result.processes)
    if not raised and result.skipped is not None:
        skip_test(result.skipped)
    if not raised:
        for known in common_distributed.TEST_SKIPS.values():
            if known.exit_code in codes:
                skip_test(known.message)
    if result.fault is not None:
        raise_fault(result.fault, len(codes))


def _raise_as_runtime_error(result: rank_run.SuiteResult) -> None:
    """As `raise_outcome`, but wraps other exceptions in the `RuntimeError` that a test of torch may expect."""
    __tracebackhide__ = True
    try:
        raise_outcome(result)
    except (unittest.SkipTest, RuntimeError, LocalTensorError):
        raise
    except Exception as cause:  # why: a rank may raise anything; it is the cause of the RuntimeError
        raised = [process for process in result.processes if process.text]
        raise RuntimeError("\n".join(f"rank {process.rank} raised\n{process.text}" for process in raised)) from cause


def comms_decorator(how: rank_run.SuiteOptions) -> Callable[..., Any]:
    """A replacement for torch's `spawn_threads_and_init_comms`, which runs a test method on ranks with one `self`."""
    default = common_distributed.DEFAULT_WORLD_SIZE

    def spawn_threads_and_init_comms(func: Any = None, timeout: object = None, world_size: int = default) -> object:
        if func is None:
            return functools.partial(spawn_threads_and_init_comms, timeout=timeout, world_size=world_size)

        @functools.wraps(func)
        def wrapper(self: unittest.TestCase, *args: Any, **kwargs: object) -> None:
            __tracebackhide__ = True

            def body(process: RankProcess) -> None:
                common_utils.set_rng_seed()
                dist.init_process_group("threaded", rank=process.rank, world_size=world_size)
                func(self, *args, **kwargs)

            _raise_as_runtime_error(rank_run.run_ranks(body, world_size, how, func))

        return wrapper

    return spawn_threads_and_init_comms
