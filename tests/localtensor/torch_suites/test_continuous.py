"""localtensor.torch_suites.continuous: MultiProcContinuousTest and DTensorContinuousTestBase on rank threads."""

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal import common_distributed, common_utils
from torch.testing._internal.common_distributed import MultiProcContinuousTest

from localtensor.torch_suites import continuous
from localtensor.torch_suites.bases import bases_on_rank_threads
from localtensor.torch_suites.rank_run import TorchsOwnWay
from tests.localtensor.torch_suites import foreign_continuous
from tests.localtensor.torch_suites.ran import GPU, QUICK, suites_of, went

NOT_PASSED = {
    "Plain.test_wants_gpus": f"skipped: {GPU}",
    "Plain.test_skip_inside": "skipped: not today",
    "Plain.test_exit_that_means_a_skip": "skipped: CUDA is not available.",
}


class Starts(MultiProcContinuousTest):
    world_size = 2

    @classmethod
    def backend_str(cls):
        return "gloo"


def test_a_file_for_continuous_processes_runs_on_threads():
    found = went(*suites_of(foreign_continuous), how=QUICK)
    assert len(found) == (12 if foreign_continuous.HAS_LOCAL_BASE else 10)
    assert {name: how for name, how in found.items() if how != "passed"} == NOT_PASSED


def test_a_failure_is_the_first_exception_and_does_not_keep_the_next_test_from_running():
    class Mixed(Starts):
        def test_a_fails(self):
            if self.rank == 1:
                raise ZeroDivisionError("of rank 1")
            dist.barrier()

        def test_b_passes(self):
            x = torch.ones(1)
            dist.all_reduce(x)
            assert x.item() == 2

    found = went(Mixed, how=QUICK)
    assert isinstance(found["Mixed.test_a_fails"], ZeroDivisionError) and found["Mixed.test_b_passes"] == "passed"


def test_what_a_rank_writes_to_its_class_is_its_own():
    class Writes(Starts):
        def test_it(self):
            type(self).mine = self.rank
            dist.barrier()
            assert type(self).mine == self.rank

    assert went(Writes, how=QUICK) == {"Writes.test_it": "passed"}
    assert not hasattr(Writes, "mine")


def test_a_test_that_waits_for_processes_in_its_own_way_does_not_pass_for_want_of_any():
    class Late(Starts):
        def test_it(self):
            raise AssertionError("nobody runs it")

    case = Late("test_it")  # made before the bases are on rank threads, so that it waits as torch does
    with bases_on_rank_threads(QUICK):
        case.setUp()
        with pytest.raises(RuntimeError, match="its ranks are threads"):
            case.test_it()
        Late.tearDownClass()


def test_a_class_that_waits_for_its_processes_itself_keeps_torchs(monkeypatch):
    started = []

    class Waits(Starts):
        def _worker_run_main_wait(self, fn):
            return fn

    monkeypatch.setattr(MultiProcContinuousTest, "_spawn_processes", classmethod(lambda *told: started.append(told)))
    with bases_on_rank_threads(QUICK), pytest.warns(TorchsOwnWay, match="Waits waits for its processes itself"):
        Waits._ensure_processes_spawned()
    assert started == [(Waits, 2)]


def test_the_private_parts_of_torch_are_there():
    homes = {"common_distributed": common_distributed, "common_utils": common_utils}
    for part in continuous.PRIVATE:
        module, _, path = part.removeprefix("torch.testing._internal.").partition(".")
        home = homes[module]
        for name in path.split("."):
            home = getattr(home, name)
        assert home is not None
