"""localtensor.testing.suites: RankThreads and on_rank_threads, for files that one may edit."""

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.common_distributed import (
    MultiProcContinuousTest,
    MultiProcessTestCase,
    MultiThreadedTestCase,
)
from torch.testing._internal.distributed._tensor.common_dtensor import DTensorOpTestBase, DTensorTestBase, with_comms

from localtensor.errors import NeverEnded
from localtensor.testing.suites import RankThreads, on_rank_threads
from localtensor.torch_suites.bases import NotASuite
from tests.localtensor.torch_suites.ran import went


class Mixed(RankThreads, DTensorTestBase):
    @with_comms
    def test_sum(self):
        x = torch.ones(1)
        dist.all_reduce(x)
        assert x.item() == self.world_size


class Below(Mixed):
    @with_comms
    def test_more(self):
        assert self.build_device_mesh().size() == 4


class Threads(RankThreads, DTensorOpTestBase):
    def test_mesh(self):
        assert self.build_device_mesh().get_rank() == self.rank


@on_rank_threads
class Continuous(MultiProcContinuousTest):
    world_size = 3

    @classmethod
    def backend_str(cls):
        return "gloo"

    def test_rank(self):
        assert dist.get_rank() == type(self).rank


def test_classes_run_on_rank_threads_by_mixin_and_by_decorator(monkeypatch):
    def start(*args):
        raise AssertionError("a real process")

    monkeypatch.setattr(MultiProcessTestCase, "_start_processes", start)
    monkeypatch.setattr(MultiProcContinuousTest, "_spawn_processes", start)
    monkeypatch.setattr(MultiThreadedTestCase, "_spawn_threads", start)
    assert went(Mixed, Below, Threads, Continuous) == dict.fromkeys(
        ["Mixed.test_sum", "Below.test_more", "Below.test_sum", "Threads.test_mesh", "Continuous.test_rank"], "passed"
    )


def test_a_limit_and_a_schedule_can_be_given():
    @on_rank_threads(timeout=0.5, schedule="shuffled:3")
    class Limited(MultiProcessTestCase):
        def setUp(self):
            super().setUp()
            self._spawn_processes()

        def test_never_ends(self):
            while True:
                dist.is_initialized()

    [error] = went(Limited).values()
    assert isinstance(error, NeverEnded)
    assert error.replay is not None and error.replay.startswith("schedule='shuffled:3")


def test_other_classes_are_as_they_were():
    class Other(MultiProcessTestCase):
        def test_it(self):
            raise AssertionError("nobody runs it")

    assert Other._start_processes is MultiProcessTestCase._start_processes
    assert Mixed._start_processes is not MultiProcessTestCase._start_processes


@pytest.mark.parametrize("cls", [int, RankThreads])
def test_a_class_over_none_of_torchs_bases_is_refused(cls):
    with pytest.raises(NotASuite, match="Use one of MultiProcessTestCase, MultiThreadedTestCase, MultiProcContinuous"):
        on_rank_threads(cls)
