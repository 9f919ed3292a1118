"""Real runs whose ranks do not return: how long they are waited for.  Runs in lockstep that share a mesh."""

import os
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from localtensor._util import Waiting
from localtensor.lockstep.values.rank_int import rank_int
from localtensor.processes import Pool, idleness
from strategies.torch_api import rank_runs
from strategies.torch_api.mesh_and_caches import world_mesh
from tests.strategies.base.test_worker_pool import alive


def wait_for_the_other(sent: bytes) -> bytes:
    dist.recv(torch.zeros(1), src=1 - dist.get_rank())
    return sent


def work_for_ever(sent: bytes) -> bytes:
    while True:
        pass


@pytest.fixture
def calls(monkeypatch):
    """The time limits of the calls of pools."""
    seen, call = [], Pool.call

    def counted(pool, *args, timeout=None, **named):
        seen.append(timeout)
        return call(pool, *args, timeout=timeout, **named)

    monkeypatch.setattr(Pool, "call", counted)
    return seen


def test_ranks_that_wait_for_each_other_wait_twice_and_not_for_the_whole_limit(calls, monkeypatch):
    monkeypatch.setattr(rank_runs, "IDLE_SECONDS", 0.5)
    monkeypatch.setattr(idleness, "free_time", lambda: 0.0)  # another program may have kept them from going on
    start = time.monotonic()
    with rank_runs.RankProcesses("gloo", 100.0) as processes:
        outcomes = processes.run(wait_for_the_other, [0, 1])
    assert [type(one) for one in outcomes] == [Waiting, Waiting] and time.monotonic() - start < 60
    assert calls == [None, 300.0]


def test_ranks_that_wait_on_a_free_machine_do_so_once(calls, monkeypatch):
    monkeypatch.setattr(rank_runs, "IDLE_SECONDS", 0.5)
    monkeypatch.setattr(idleness, "free_time", time.monotonic)  # one processor has nothing to do
    with rank_runs.RankProcesses("gloo", 100.0) as processes:
        outcomes = processes.run(wait_for_the_other, [0, 1])
    assert [type(one) for one in outcomes] == [Waiting, Waiting] and calls == [None]


def test_ranks_that_work_all_the_time_do_so_once(calls, monkeypatch):
    monkeypatch.setattr(idleness, "processor_time", lambda pid: time.monotonic())  # whatever else runs on this machine
    with rank_runs.RankProcesses("gloo", 2.0) as processes:
        outcomes = processes.run(work_for_ever, [0, 1])
    assert [type(one) for one in outcomes] == [Waiting, Waiting] and calls == [None]


def pid_of_rank(part):
    return str(os.getpid()).encode()


def pids_of(processes, ranks=2):
    return {int(outcome.value) for outcome in processes.run(pid_of_rank, [0] * ranks)}


def test_processes_for_the_next_renewal_are_started_beside_a_call():
    with rank_runs.RankProcesses() as processes:
        first = pids_of(processes)
        assert pids_of(processes) == first and not processes.fresh(2)
        processes.renew(2)
        assert processes.fresh(2)
        begun = set(processes._next.pids)
        second = pids_of(processes)
        assert not processes.fresh(2) and len(begun) == 2 and not first & second
        processes.renew(2)
        assert pids_of(processes) == begun
        left = set(processes._next.pids)
        processes.renew(3)  # other ranks than were begun
        assert len(pids_of(processes, 3)) == 3 and not alive(left)
        left = {*processes._pool.pids, *processes._next.pids}
    assert not alive(left)


def test_a_number_that_differs_between_ranks_is_a_value_of_each():
    numbers = rank_int([4, 6])
    assert rank_runs.values_by_rank(numbers, 2) == [4, 6]
    assert rank_runs.values_by_rank(numbers == 6, 2) == [False, True]


# Shared worlds.


def task(body, ranks=2):
    return rank_runs.MeshTask(
        ranks,
        (world_mesh, "cpu", (ranks,), False),
        lambda mesh: [body(mesh)] * ranks,
        None,
        lambda by_rank, _: by_rank[0],
    )


def summed(mesh):
    x = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
    return (x + x).sum().full_tensor().item()


def seen_mesh(mesh):
    return mesh


def runs(*bodies):
    return [rank_runs.run_in_lockstep([task(body)])[0] for body in bodies]


def test_runs_on_equal_meshes_share_the_mesh_and_what_was_propagated_there(monkeypatch):
    propagated = []
    propagator = DTensor._op_dispatcher.sharding_propagator
    original = propagator.propagate_op_sharding_non_cached
    counted = lambda schema: propagated.append(str(schema.op)) or original(schema)  # noqa: E731
    monkeypatch.setattr(propagator, "propagate_op_sharding_non_cached", counted)
    with rank_runs.shared_worlds():
        first, value, second, again = runs(seen_mesh, summed, seen_mesh, summed)
        assert first is second and value == again == 12.0
        assert sorted(propagated) == ["aten.add.Tensor", "aten.sum.default"]
        other, own = rank_runs.run_in_lockstep([task(seen_mesh, 3)])[0], rank_runs.run_in_lockstep([task(summed)])[0]
        assert other is not first and own == 12.0
    third, fourth = runs(seen_mesh, seen_mesh)
    assert first is not third is not fourth


def test_no_group_of_a_shared_world_is_left_behind():
    with rank_runs.shared_worlds():
        [mesh] = runs(seen_mesh)
        torch._C._distributed_c10d._resolve_process_group(mesh._dim_group_names[0])
    with pytest.raises(RuntimeError, match="group"):
        torch._C._distributed_c10d._resolve_process_group(mesh._dim_group_names[0])


def test_each_program_in_a_shared_world_begins_without_a_group_that_it_has_made_itself():
    def makes(mesh):
        dist.init_process_group("gloo")
        return dist.get_world_size()

    with rank_runs.shared_worlds():
        assert runs(makes, makes) == [2, 2]


@pytest.mark.parametrize("change", [lambda mesh: dist.new_group([0, 1]), lambda mesh: dist.destroy_process_group()])
def test_a_program_that_makes_or_ends_a_group_has_the_world_to_itself(change):
    with rank_runs.shared_worlds():
        first, _, second, value = runs(seen_mesh, change, seen_mesh, summed)
    assert first is not second and value == 12.0


def test_a_program_that_was_stopped_inside_has_the_world_to_itself(monkeypatch):
    def stays(mesh):
        raise rank_runs.DoesNotReturn([stays.__code__], 1.0)

    monkeypatch.setattr(rank_runs, "no_return_error", str)
    with rank_runs.shared_worlds():
        first = runs(seen_mesh)[0]
        rank_runs.run_in_lockstep([replace(task(stays), verdict=lambda by_rank, why: why)])
        assert runs(seen_mesh)[0] is not first


def test_after_a_rule_was_registered_nothing_that_was_propagated_before_is_taken(monkeypatch):
    propagator = DTensor._op_dispatcher.sharding_propagator
    with rank_runs.shared_worlds():
        first = runs(seen_mesh)[0]
        rules = dict(propagator.op_strategy_funcs)
        monkeypatch.setattr(propagator, "op_strategy_funcs", {**rules, next(iter(rules)): lambda schema: None})
        assert runs(seen_mesh)[0] is not first
