"""localtensor.torch_suites.multi_threaded: MultiThreadedTestCase, DTensorOpTestBase and torch's decorator on rank threads."""

import threading
import unittest

import pytest
import torch
import torch.distributed as dist
from torch.distributed import rpc
from torch.testing._internal import common_distributed, common_utils
from torch.testing._internal.common_distributed import MultiThreadedTestCase

from localtensor.errors import EarlyReturn, GroupMismatch
from localtensor.torch_suites import multi_threaded
from localtensor.torch_suites.bases import bases_on_rank_threads
from tests.localtensor.torch_suites.ran import GPU, QUICK, suites_of, went

NOT_PASSED = {
    "Plain.test_skip_on_one_rank": "skipped: rank 2 does not want to",
    "Plain.test_wants_gpus": f"skipped: {GPU}",
    "Plain.test_fails_as_expected": "failed as expected",
}


class Starts(MultiThreadedTestCase):
    @property
    def world_size(self):
        return 2

    def setUp(self):
        super().setUp()
        self._spawn_threads()


@pytest.mark.slow
def test_a_file_for_torchs_threads_runs_on_ours():
    with bases_on_rank_threads(QUICK):  # torch's decorator is bound when the file is imported
        from tests.localtensor.torch_suites import foreign_threads
    found = went(*suites_of(foreign_threads), how=QUICK)
    assert len(found) == 11
    assert {name: how for name, how in found.items() if how != "passed"} == NOT_PASSED


def test_a_failure_is_the_first_exception_and_the_next_test_is_none_the_worse():
    class Mixed(Starts):
        def test_a_fails(self):
            if self.rank == 0:
                raise ZeroDivisionError("of rank 0")
            dist.barrier()

        def test_b_passes(self):
            dist.barrier()

    found = went(Mixed, how=QUICK)
    assert isinstance(found["Mixed.test_a_fails"], ZeroDivisionError) and found["Mixed.test_b_passes"] == "passed"


def test_each_rank_has_random_numbers_of_its_own_from_one_seed():
    drawn = {}

    class Draws(Starts):
        def test_it(self):
            dist.barrier()
            drawn[self.rank] = torch.rand(2).tolist()

    assert went(Draws, how=QUICK) == {"Draws.test_it": "passed"}
    assert drawn[0] == drawn[1]


def test_what_ours_cannot_serve_runs_on_torchs_threads(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "29500")
    ran = []

    class Calls(Starts):
        def test_it(self):
            ran.append(threading.current_thread().name)
            if threading.current_thread().name.startswith("rank"):
                rpc.init_rpc("worker", rank=dist.get_rank(), world_size=2)

    assert went(Calls, how=QUICK) == {"Calls.test_it": "passed"}
    assert [name.startswith("rank") for name in ran] == [True, True, False, False]


def test_a_class_that_joins_its_threads_itself_keeps_torchs():
    joined = []

    class Joins(Starts):
        @classmethod
        def _join_threads(cls, threads, fn):
            joined.append([type(thread) for thread in threads])
            MultiThreadedTestCase.__dict__["_join_threads"].__get__(None, cls)(threads, fn)

        def test_it(self):
            dist.barrier()

    assert went(Joins, how=QUICK) == {"Joins.test_it": "passed"}
    assert joined == [[threading.Thread] * 2]


def test_the_private_parts_of_torch_are_there():
    homes = {"common_distributed": common_distributed, "common_utils": common_utils}
    for part in multi_threaded.PRIVATE:
        module, _, path = part.removeprefix("torch.testing._internal.").partition(".")
        home = homes[module]
        for name in path.split("."):
            home = getattr(home, name)
        assert home is not None


def test_ranks_that_make_only_their_own_groups_are_left_to_torchs_threads_which_let_them_look(monkeypatch):
    """What those threads do is not tried: such groups have one name there, and a few times in a thousand they wait for ever."""
    handed = []
    monkeypatch.setattr(MultiThreadedTestCase, "_spawn_threads", lambda self: handed.append(type(self).__name__))
    monkeypatch.setattr(MultiThreadedTestCase, "_join_threads", classmethod(lambda cls, threads, fn: None))

    class OfFour(Starts):
        @property
        def world_size(self):
            return 4

    class Own(OfFour):
        def test_it(self):
            mine = [0, 1] if self.rank < 2 else [2, 3]
            assert dist.get_process_group_ranks(dist.new_group(mine)) == mine

    class Overlapping(Starts):
        def test_it(self):
            dist.new_group([0, 1] if self.rank else [0])

    class NotOwn(OfFour):
        def test_it(self):
            dist.new_group([2, 3] if self.rank < 2 else [0, 1])

    found = went(Own, Overlapping, NotOwn, how=QUICK)
    assert (found["Own.test_it"], handed) == ("passed", ["Own"])
    assert isinstance(found["Overlapping.test_it"], GroupMismatch)
    assert isinstance(found["NotOwn.test_it"], GroupMismatch)


def test_groups_of_one_rank_are_no_disagreement():
    class Single(Starts):
        def test_it(self):
            group = dist.new_group([self.rank])
            assert dist.get_process_group_ranks(group) == [self.rank]

        def test_of_the_other_rank(self):
            assert dist.new_group([1 - self.rank]) is dist.GroupMember.NON_GROUP_MEMBER

    assert went(Single, how=QUICK) == {"Single.test_it": "passed", "Single.test_of_the_other_rank": "passed"}


def test_who_calls_the_ranks_of_torchs_decorator_gets_its_runtime_error():
    def decorated(body):
        return multi_threaded.comms_decorator(QUICK)(world_size=2)(body)

    def fails(self):
        assert dist.get_rank() == 0, "not zero"

    def is_refused(self):
        if dist.get_rank() == 0:
            dist.barrier()

    with bases_on_rank_threads(QUICK), pytest.raises(RuntimeError, match=r"rank 1 raised\n[^$]*not zero") as told:
        decorated(fails)(None)
    assert type(told.value.__cause__) is AssertionError
    assert [at.name for at in told.traceback if not at.ishidden(told)] == [
        told.traceback[0].name
    ]  # pytest shows no more
    with bases_on_rank_threads(QUICK), pytest.raises(EarlyReturn):
        decorated(is_refused)(None)
    with bases_on_rank_threads(QUICK), pytest.raises(unittest.SkipTest, match="no need"):
        decorated(unittest.skip("no need")(fails))(None)
