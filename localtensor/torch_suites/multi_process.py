"""Tests of torch's MultiProcessTestCase, and so of DTensorTestBase, on rank threads.

torch's protocol is kept: methods that a class overrides are called, each rank runs `_run` of its class, and
`_check_return_codes` of the class checks the exit codes.  Only starting, joining and the first function of a process
are replaced.  A class that joins its processes itself keeps torch's real processes.
"""

import contextlib
import os
import unittest
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import multiprocessing
from torch.testing._internal import common_distributed, common_utils

from localtensor.torch_suites import rank_run
from localtensor.torch_suites.libraries import is_rank
from localtensor.torch_suites.rank_run import RankProcess, raise_fault, skip_test

# Private part of torch: why it is needed.  Tried on torch 2.13.0; read in the sources of 2.11 to 2.15.
PRIVATE = {
    "torch.testing._internal.common_distributed.MultiProcessTestCase._start_processes": "ranks wait for their join",
    "torch.testing._internal.common_distributed.MultiProcessTestCase._join_processes": "ranks run, and their outcome is raised",
    "torch.testing._internal.common_distributed.MultiProcessTestCase._check_return_codes": "what exit codes mean",
    "torch.testing._internal.common_distributed.MultiProcessTestCase.run_test": "what a process runs first",
    "torch.testing._internal.common_distributed.MultiProcessTestCase._run": "what a process runs",
    "torch.testing._internal.common_distributed.MultiProcessTestCase._current_test_name": "and under which name",
    "torch.testing._internal.common_device_type.DeviceTypeTestBase._tls": "precisions, which are kept by thread",
    "torch.testing._internal.common_distributed.TEST_SKIPS": "exit codes that mean a skip",
    "torch.testing._internal.common_utils.set_rng_seed": "the seed that every process begins with",
}
TERMINATED = -15

_NAMES = ("_start_processes", "_join_processes", "_check_return_codes", "run_test")
BASE = common_distributed.MultiProcessTestCase


def replaced_methods(owner: type, how: rank_run.SuiteOptions) -> dict[str, Any]:
    """The replacements for methods of `owner`, torch's base or a subclass, by name."""
    stock = {name: getattr(owner, name) for name in _NAMES}

    def _start_processes(self: common_distributed.MultiProcessTestCase, proc: object) -> None:
        if type(self)._join_processes is not _join_processes:
            rank_run.warn_fallback(f"{type(self).__name__} joins its processes itself")
            stock["_start_processes"](self, proc)
            return
        self.processes = [RankProcess(rank) for rank in range(int(self.world_size))]

    def _join_processes(self: common_distributed.MultiProcessTestCase, fn: Callable[..., Any]) -> None:
        __tracebackhide__ = True
        if not self.processes or not all(isinstance(process, RankProcess) for process in self.processes):
            stock["_join_processes"](self, fn)
            return
        result = rank_run.run_ranks(_body(self), len(self.processes), how, type(self))
        if rank_run.needs_fallback(result):
            with open(self.file_name, "wb"):  # the rendezvous file of the processes is empty, as before
                pass
            stock["_start_processes"](self, multiprocessing.get_context("spawn").Process)
            stock["_join_processes"](self, fn)
            return
        self.processes = list(result.processes)
        self.pid_to_pipe.update({process.pid: process for process in result.processes})
        with contextlib.suppress(OSError):
            os.remove(self.file_name)  # as the last process does after the rendezvous
        if type(self)._check_return_codes is stock["_check_return_codes"]:
            _raise_outcome(result)
        for process in result.processes:  # the class checks the other exit codes
            if process.exitcode is None:
                process.exitcode = self.TEST_ERROR_EXIT_CODE if process.text else TERMINATED
        self._check_return_codes(fn, result.seconds)

    return {
        "_start_processes": _start_processes,
        "_join_processes": _join_processes,
        "run_test": _run_test_on_rank(stock["run_test"]),
    }


def _body(case: common_distributed.MultiProcessTestCase) -> Callable[[RankProcess], None]:
    kind, name, set_precisions = type(case), case._current_test_name(), rank_run.precision_setter(type(case))
    options = {"fake_pg": getattr(case, "fake_pg", False)}

    def body(process: RankProcess) -> None:
        set_precisions()
        kind._run(process.rank, name, case.file_name, process, **options)

    return body


def _raise_outcome(result: rank_run.SuiteResult) -> None:
    """Raises the error that ended the run, or a skip with the test's own reason."""
    __tracebackhide__ = True
    codes = [process.exitcode for process in result.processes]
    generic = common_distributed.TEST_SKIPS["generic"].exit_code
    if result.skipped is not None and (codes[0] == generic or (result.fault is not None and generic in codes)):
        skip_test(result.skipped)
    if result.fault is None:
        return
    for known in common_distributed.TEST_SKIPS.values():
        if known.exit_code in codes:
            skip_test(known.message)
    raise_fault(result.fault, len(codes))


def _run_test_on_rank(stock: Callable[..., None]) -> Callable[..., None]:
    def run_test(self: common_distributed.MultiProcessTestCase, test_name: str, parent_pipe: object) -> None:
        """Runs the test on one rank.  Its exception ends the run; a skip is an exit code, as in torch."""
        if not is_rank():  # a process that was forked
            stock(self, test_name, parent_pipe)
            return
        common_utils.set_rng_seed()
        try:
            getattr(self, test_name)()
        except unittest.SkipTest as why:
            raise SystemExit(common_distributed.TEST_SKIPS["generic"].exit_code) from why
        if self.destroy_pg_upon_exit:
            with contextlib.suppress(AssertionError, ValueError):  # the test has destroyed it
                dist.destroy_process_group()

    return run_test
