"""localtensor.torch_suites.multi_process: MultiProcessTestCase and DTensorTestBase on rank threads."""

import os
import sys
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed import rpc
from torch.testing._internal import common_device_type as devices
from torch.testing._internal import common_distributed, common_utils
from torch.testing._internal.common_distributed import MultiProcessTestCase
from torch.testing._internal.distributed._tensor.common_dtensor import DTensorTestBase, with_comms

from localtensor.errors import Deadlock, NeverEnded
from localtensor.torch_suites import multi_process
from localtensor.torch_suites.rank_run import SuiteOptions, TorchsOwnWay
from tests.localtensor.torch_suites import foreign_processes
from tests.localtensor.torch_suites.ran import GPU, QUICK, suites_of, went

NOT_PASSED = {
    "Plain.test_wants_gpus": f"skipped: {GPU}",
    "Plain.test_all_ranks_skip": "skipped: not today",
    "Plain.test_skipped_outside": "skipped: a skip that no rank sees",
    "Plain.test_ranks_end_by_a_code_that_means_a_skip": "skipped: Skipped due to small world size.",
    "Plain.test_fails_as_expected": "failed as expected",
    "Tensors.test_skips_inside_its_group": f"skipped: {GPU}",
}


class Starts(MultiProcessTestCase):
    @property
    def world_size(self):
        return 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()


@pytest.mark.slow
def test_a_file_for_real_processes_runs_on_threads():
    found = went(*suites_of(foreign_processes), how=QUICK)
    assert len(found) > 30
    assert {name: how for name, how in found.items() if how != "passed"} == NOT_PASSED


def test_a_failure_is_the_first_exception_with_how_the_others_fared_below():
    class Fails(Starts):
        def test_it(self):
            dist.init_process_group("gloo", rank=self.rank, world_size=2)
            if self.rank == 1:
                raise KeyError("the first cause")
            dist.barrier()

    [error] = went(Fails, how=QUICK).values()
    assert type(error) is KeyError and error.args[0].startswith("the first cause")
    assert error.__traceback__ is not None
    frames = []
    trace = error.__traceback__
    while trace is not None:
        frames.append(trace.tb_frame.f_code.co_name)
        trace = trace.tb_next
    assert frames[-1] == "test_it" and "_live" not in frames
    if hasattr(error, "__notes__"):
        assert "First cause: rank 1 of 2" in error.__notes__[0]
        assert "rank 0 waits for rank 1 in barrier" in error.__notes__[0]


def test_ranks_that_wait_for_each_other_are_reported_at_once():
    class Hangs(Starts):
        def test_it(self):
            dist.init_process_group("gloo", rank=self.rank, world_size=2)
            dist.recv(torch.empty(1), 1 - self.rank)

    [error] = went(Hangs, how=QUICK).values()
    assert isinstance(error, Deadlock)


def test_a_rank_that_never_ends_is_ended():
    class Loops(Starts):
        def test_it(self):
            while True:
                dist.is_initialized()

    class Passes(Starts):
        def test_it(self):
            dist.init_process_group("gloo", rank=self.rank, world_size=2)
            dist.barrier()

    found = went(Loops, Passes, how=SuiteOptions(timeout=0.5))
    assert isinstance(found["Loops.test_it"], NeverEnded) and found["Passes.test_it"] == "passed"


def test_a_rank_ends_only_itself_by_a_signal():
    class Dies(Starts):
        def test_it(self):
            os.kill(os.getpid(), 9) if self.rank == 1 else os.abort()

        def _check_return_codes(self, fn, elapsed_time):
            assert [process.exitcode for process in self.processes] == [-6, -9]

    assert list(went(Dies, how=QUICK).values()) == ["passed"]


def test_what_threads_cannot_serve_runs_on_real_processes(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "29500")
    started = []

    class Calls(Starts):
        def test_it(self):
            dist.init_process_group("gloo", rank=self.rank, world_size=2)
            rpc.init_rpc(f"worker {self.rank}", rank=self.rank, world_size=2)

    monkeypatch.setattr(MultiProcessTestCase, "_start_processes", lambda self, proc: started.append(proc.__name__))
    monkeypatch.setattr(MultiProcessTestCase, "_join_processes", lambda self, fn: started.append("joined"))
    monkeypatch.setattr(Calls, "setUp", lambda self: (MultiProcessTestCase.setUp(self), self._spawn_processes())[0])
    assert list(went(Calls, how=QUICK).values()) == ["passed"]
    assert started == ["SpawnProcess", "joined"]


def test_a_class_that_joins_its_processes_itself_keeps_torchs(monkeypatch):
    class Joins(Starts):
        def _join_processes(self, fn):
            assert self.processes == []

        def test_it(self):
            raise AssertionError("nobody runs it")

    monkeypatch.setattr(MultiProcessTestCase, "_start_processes", lambda self, proc: None)
    methods = multi_process.replaced_methods(MultiProcessTestCase, QUICK)
    monkeypatch.setattr(MultiProcessTestCase, "_start_processes", methods["_start_processes"])
    case = Joins("test_it")
    with pytest.warns(TorchsOwnWay, match="Joins joins its processes itself"):
        case.setUp()
    assert case.processes == []


def test_a_class_may_run_its_ranks_in_its_own_way():
    class Prepares(DTensorTestBase):
        @classmethod
        def _run(cls, rank, test_name, file_name, parent_pipe, **kwargs):  # noqa: ARG003
            self = cls(test_name)
            self.rank, self.file_name, self.prepared = rank, file_name, rank * 10
            self.run_test(test_name, parent_pipe)

        @with_comms
        def test_it(self):
            assert self.prepared == 10 * dist.get_rank()

    assert list(went(Prepares, how=QUICK).values()) == ["passed"]


def test_the_barrier_of_torchs_own_tests_is_met_by_ranks(monkeypatch):
    class Barrier:
        @classmethod
        def sync(cls, wait_for=None, timeout=10):  # noqa: ARG003
            raise AssertionError("torch counts processes here")

    home = "torch.testing._internal.distributed.distributed_test"
    monkeypatch.setitem(sys.modules, home, SimpleNamespace(Barrier=Barrier))
    arrived = []

    class Meets(Starts):
        def test_it(self):
            for turn in range(3):
                arrived.append(turn)
                Barrier.sync()
                assert arrived.count(turn) == 2

        def test_too_late(self):
            if self.rank == 0:
                with self.assertRaisesRegex(RuntimeError, "barrier timeout"):  # noqa: PT027
                    Barrier.sync(timeout=0.05)

        def test_limits_of_other_ranks_pass_meanwhile(self):
            store = dist.FileStore(self.file_name, 2)
            dist.init_process_group("gloo", store=store, rank=self.rank, world_size=2)
            began = time.monotonic()
            if self.rank == 0:
                with pytest.raises(RuntimeError, match="Rank 1 failed to pass monitoredBarrier"):
                    dist.monitored_barrier(timeout=timedelta(seconds=2))
                assert time.monotonic() - began >= 2  # on the rank's clock
            Barrier.sync(timeout=30)

    began = time.monotonic()
    found = went(Meets, how=QUICK)
    assert set(found.values()) == {"passed"} and len(found) == 3
    assert time.monotonic() - began < 30
    with pytest.raises(AssertionError, match="torch counts"):
        Barrier.sync()


def test_the_environment_is_that_of_a_process_that_torchrun_has_not_started():
    class Looks(Starts):
        def test_it(self):
            assert dist.get_node_local_rank(fallback_rank=7) == 7
            assert "RANK" not in os.environ

    assert list(went(Looks, how=QUICK).values()) == ["passed"]


def test_the_private_parts_of_torch_are_there():
    homes = {"common_distributed": common_distributed, "common_utils": common_utils, "common_device_type": devices}
    for part in multi_process.PRIVATE:
        module, _, path = part.removeprefix("torch.testing._internal.").partition(".")
        home = homes[module]
        for name in path.split("."):
            home = getattr(home, name)
        assert home is not None
