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
from localtensor.torch_suites.exits import RankProcess, fail, skip
from localtensor.torch_suites.libraries import is_rank
from localtensor.torch_suites.rank_run import How, RankResult, kept, not_served, precisions, run_ranks

# Private part of torch: why it is needed.  Tried on torch 2.13.0; read in the sources of 2.11 to 2.15.
PRIVATE = {
    "torch.testing._internal.common_distributed.MultiThreadedTestCase._spawn_threads": "ranks wait for their join",
    "torch.testing._internal.common_distributed.MultiThreadedTestCase._join_threads": "ranks run, and are judged",
    "torch.testing._internal.common_distributed.MultiThreadedTestCase.run_test_with_threaded_pg": "one rank's life",
    "torch.testing._internal.common_distributed.MultiThreadedTestCase._run": "what a thread runs first",
    "torch.testing._internal.common_distributed.MultiThreadedTestCase._current_test_name": "the name of what it runs",
    "torch.testing._internal.common_distributed.spawn_threads_and_init_comms": "a decorator that does the same",
    "torch.testing._internal.common_distributed.TEST_SKIPS": "exit codes that mean a skip",
    "torch.testing._internal.common_utils.set_rng_seed": "the seed that every rank begins with",
}

_OURS = ("_spawn_threads", "_join_threads", "run_test_with_threaded_pg")


def base() -> type:
    return common_distributed.MultiThreadedTestCase


class _Waiting:
    """What stands in `self.threads` for all the ranks of a test, until they are joined."""

    def __init__(self, case: Any) -> None:
        self.case = case


def methods(owner: Any, how: How) -> dict[str, Any]:
    """What `owner`, torch's base or a class over it, has instead of its own, by name."""
    stock = {name: inspect.getattr_static(owner, name) for name in _OURS}

    def _spawn_threads(self: Any) -> None:
        if inspect.getattr_static(type(self), "_join_threads") is not ours["_join_threads"]:
            kept(f"{type(self).__name__} joins its threads itself")
            stock["_spawn_threads"](self)
            return
        type(self).global_store = dist.HashStore()
        self.threads = [_Waiting(self)]

    def _join_threads(cls: Any, threads: Any, fn: Callable[..., Any]) -> None:
        __tracebackhide__ = True
        if len(threads) == 1 and isinstance(threads[0], _Waiting):
            case = threads[0].case
            told = run_ranks(_body(case), int(case.world_size), how)
            if not (not_served(told) or _only_own_groups(told)):
                judge(told)
                return
            case.threads = threads = []
            stock["_spawn_threads"](case)
        stock["_join_threads"].__get__(None, cls)(threads, fn)

    ours: dict[str, Any] = {
        "_spawn_threads": _spawn_threads,
        "_join_threads": classmethod(_join_threads),
        "run_test_with_threaded_pg": _life(stock["run_test_with_threaded_pg"]),
    }
    return ours


def _only_own_groups(told: RankResult) -> bool:
    """Whether each rank made only the group that it is in, and groups of one name have no rank in common.

    On real processes such groups stand in each other's way as soon as anything is sent.  torch's own threads let a
    test look at them, and so its own way is left to it; any other disagreement about groups is a failure.
    """
    fault = told.fault
    if not isinstance(fault, GroupMismatch):
        return False
    made = set(fault.groups.values())
    own = all(rank in members for rank, members in fault.groups.items())
    if not own or sum(map(len, made)) != len(set().union(*made)):
        return False
    kept(f"each rank made only its own process group of the name {fault.name!r}")
    return True


def _body(case: Any) -> Callable[[RankProcess], None]:
    kind, name, ranks, give = type(case), case._current_test_name, case.world_size, precisions(type(case))

    def body(process: RankProcess) -> None:
        give()
        common_utils.set_rng_seed()
        kind._run(name, process.rank, ranks)

    return body


def _life(stock: Callable[..., None]) -> Callable[..., None]:
    def run_test_with_threaded_pg(self: Any, test_name: str, rank: int, world_size: int) -> None:
        """The test on one rank; what it raises ends the run."""
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


def judge(told: RankResult) -> None:
    """Raises what ended the run, or the skip that any rank asked for: torch counts it for all."""
    __tracebackhide__ = True
    codes = [process.exitcode for process in told.processes]
    raised = any(process.text for process in told.processes)
    if not raised and told.skipped is not None:
        skip(told.skipped)
    if not raised:
        for known in common_distributed.TEST_SKIPS.values():
            if known.exit_code in codes:
                skip(known.message)
    if told.fault is not None:
        fail(told.fault, len(codes))


def _judge_for_a_caller(told: RankResult) -> None:
    """`judge`, where a test may have called the ranks itself and expect torch's `RuntimeError` of what they raised."""
    __tracebackhide__ = True
    try:
        judge(told)
    except (unittest.SkipTest, RuntimeError, LocalTensorError):
        raise
    except Exception as cause:  # why: a rank may raise anything
        raised = [process for process in told.processes if process.text]
        raise RuntimeError("\n".join(f"rank {process.rank} raised\n{process.text}" for process in raised)) from cause


def comms_decorator(how: How) -> Callable[..., Any]:
    """torch's `spawn_threads_and_init_comms`, which runs one test method on ranks of the same `self`."""
    default = common_distributed.DEFAULT_WORLD_SIZE

    def spawn_threads_and_init_comms(func: Any = None, timeout: Any = None, world_size: int = default) -> Any:
        if func is None:
            return functools.partial(spawn_threads_and_init_comms, timeout=timeout, world_size=world_size)

        @functools.wraps(func)
        def wrapper(self: unittest.TestCase, *args: Any, **kwargs: Any) -> None:
            __tracebackhide__ = True

            def body(process: RankProcess) -> None:
                common_utils.set_rng_seed()
                dist.init_process_group("threaded", rank=process.rank, world_size=world_size)
                func(self, *args, **kwargs)

            _judge_for_a_caller(run_ranks(body, world_size, how))

        return wrapper

    return spawn_threads_and_init_comms
