"""What is installed in torch: in a thread without a mode it does what it did before."""

import threading
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.tensor import _random
from torch.distributed.tensor import _random as dtensor_random

import localtensor as lt
from localtensor.errors import TorchChanged
from localtensor.lockstep.comms.process_groups import RoutedWorld
from localtensor.lockstep.mode import LocalTensorMode, rank_map
from localtensor.lockstep.patches import distributed_calls, rank_queries
from localtensor.lockstep.values.rank_int import rank_int


def test_they_are_installed_once():
    for _ in range(2):
        with LocalTensorMode(2):
            pass
    world, gather = c10d._world, c10d.gather.__wrapped__
    with LocalTensorMode(2):
        pass
    assert c10d._world is world and type(world) is RoutedWorld and c10d.gather.__wrapped__ is gather
    assert type(world._original) is not RoutedWorld


def test_a_real_job_of_one_process_works_beside(tmp_path):
    with LocalTensorMode(4):
        pass
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        x = torch.ones(2)
        dist.all_reduce(x)
        found, objects = [torch.zeros(2)], [None]
        dist.all_gather(found, x)
        dist.gather(x, [torch.zeros(2)], 0)
        dist.scatter(torch.zeros(2), [x], 0)
        dist.all_gather_object(objects, "a")
        dist.barrier()
        group = dist.new_group([0])
        assert objects == ["a"] and found[0].tolist() == [1, 1] and dist.get_rank(group) == 0
        with LocalTensorMode(3):  # whose groups are its own
            assert dist.get_world_size() == 3 and type(dist.group.WORLD).__name__ == "LockstepGroup"
            with pytest.raises(lt.LocalTensorError, match="not of this LocalTensorMode"):
                dist.all_reduce(torch.ones(1), group=group)
        dist.destroy_process_group(group)
        assert dist.get_world_size() == 1
    finally:
        dist.destroy_process_group()
    assert not dist.is_initialized()


def test_another_thread_sees_nothing_of_the_mode():
    seen = []
    with LocalTensorMode(3):
        thread = threading.Thread(target=lambda: seen.append((dist.is_initialized(), type(torch.ones(1)))))
        thread.start()
        thread.join(20)
        assert dist.is_initialized()
    assert seen == [(False, torch.Tensor)]


def test_functions_imported_by_name_before_are_reached():
    from torch.distributed import init_process_group, new_group

    with LocalTensorMode(2):
        init_process_group()
        assert type(new_group([0])).__name__ == "LockstepGroup"


def test_names_and_signatures_are_kept():
    with LocalTensorMode(2):
        pass
    for name in (*rank_queries._GROUP_PATCHES, *distributed_calls.DISTRIBUTED_PATCHES):
        function = getattr(dist, name)
        assert function.__name__ == name and function.__doc__


def test_seeds_and_states():
    with LocalTensorMode(3):
        torch.manual_seed(rank_int([1, 1, 2]))
        x = torch.randn(4)
        state = torch.get_rng_state()
        y = torch.randn(4)
        torch.set_rng_state(state)
        assert x._partition.rows == 2 and all(torch.equal(torch.randn(4).on(r), y.on(r)) for r in [0])
        torch.manual_seed(7)
        z = torch.randn(4).reconcile()
    assert torch.equal(z, torch.randn(4, generator=torch.Generator().manual_seed(7)))


class TrackerOnTheCpu(_random.OffsetBasedRNGTracker):
    """DTensor's tracker of offsets, which wants CUDA, over the CPU's generator."""

    def _get_device_state(self):
        return torch.get_rng_state()

    def _set_device_state(self, state):
        torch.set_rng_state(state)


def test_the_seed_of_each_rank_is_the_one_that_it_was_given():
    with LocalTensorMode(3):
        torch.manual_seed(7)
        assert torch.initial_seed() == 7
        torch.manual_seed(dist.get_rank() + 5)
        torch.rand(3)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            assert torch.random.initial_seed() == 1
        assert repr(torch.initial_seed()) == repr(rank_int([5, 6, 7]))


def test_the_tracker_of_random_offsets_gives_all_ranks_the_state_of_rank_0(monkeypatch):
    monkeypatch.setattr(_random, "_resolve_device", lambda device_mesh: torch.device("meta"))
    monkeypatch.setattr(_random, "_get_device_handle", lambda kind: SimpleNamespace(is_available=lambda: True))
    with LocalTensorMode(3):
        torch.manual_seed(rank_int([5, 6, 7]))
        TrackerOnTheCpu(None, run_state_sync=False)
        apart = torch.rand(4)
        torch.manual_seed(rank_int([5, 6, 7]))
        TrackerOnTheCpu(None)
        alike = torch.rand(4)
    assert not torch.equal(apart.on(0), apart.on(1))
    assert [alike.on(rank).tolist() for rank in range(3)] == [apart.on(0).tolist()] * 3


def test_a_function_that_is_no_longer_decorated_is_reported():
    def plain():
        return 1

    def decorated():
        return plain

    decorated.__wrapped__ = lambda: 2
    with pytest.raises(TorchChanged):
        rank_queries._patch_within_decorators(decorated, lambda *args: None)


def test_rank_threads_still_have_their_own_world():
    with LocalTensorMode(2):
        pass

    def program():
        x = torch.tensor([dist.get_rank()])
        out = [torch.zeros(1, dtype=torch.int64) for _ in range(2)] if dist.get_rank() == 0 else None
        dist.gather(x, out, 0)
        dist.barrier()
        return [one.item() for one in out or ()]

    assert lt.run(program, ranks=2).values == ([0, 1], [])


def test_a_rank_that_torch_is_asked_for_in_the_mode_is_an_int_of_each_rank():
    with LocalTensorMode(2):
        assert str(dist.get_rank()) == "RankInts(0, 1)" and rank_map(lambda r: torch.tensor(dist.get_rank())).on(1) == 1


def test_each_run_in_lockstep_begins_without_a_state_of_random_dtensors():
    kept = dtensor_random._rng_tracker
    try:
        dtensor_random._rng_tracker = before = object()
        with LocalTensorMode(2):
            assert dtensor_random._rng_tracker is None
            dtensor_random._rng_tracker = object()
        assert dtensor_random._rng_tracker is before
    finally:
        dtensor_random._rng_tracker = kept
