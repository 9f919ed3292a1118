import gc
import importlib
import threading
import weakref
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

import localtensor as lt
from localtensor.threads.rank_world import PRIVATE, world_now


def lacks(path):
    """The first part of a dotted path that is not there, or None."""
    module, _, name = path.rpartition(".")
    while True:
        try:
            found = importlib.import_module(module)
            break
        except ModuleNotFoundError:
            module, _, head = module.rpartition(".")
            name = f"{head}.{name}"
    for part in name.split("."):
        if not hasattr(found, part):
            return f"{path}: this torch ({torch.__version__}) has no {part} there"
        found = getattr(found, part)
    return None


@pytest.mark.parametrize("path", PRIVATE)
def test_each_private_part_of_torch_is_there(path):
    assert lacks(path) is None, PRIVATE[path]


def test_a_private_part_that_is_gone_is_named():
    said = lacks("torch.distributed.distributed_c10d._World.planted.deeper")
    assert said == (
        f"torch.distributed.distributed_c10d._World.planted.deeper: this torch ({torch.__version__}) has no planted there"
    )


# -- ranks do not see each other


@pytest.mark.ranks(3, schedule="shuffled:1")
def test_each_rank_has_a_world_of_its_own(rank):
    world, everybody = c10d._world, [None] * 3
    dist.all_gather_object(everybody, id(world))
    assert len(set(everybody)) == 3 and c10d._world is world
    assert dist.group.WORLD.rank() == rank


@pytest.mark.ranks(2)
def test_a_thread_that_a_rank_starts_has_no_world(rank):
    seen = []
    thread = threading.Thread(target=lambda: seen.append(world_now()))
    thread.start()
    thread.join()
    assert world_now().rank == rank and seen == [None]


def test_outside_of_a_run_there_is_no_world():
    assert world_now() is None and lt.run(lambda: world_now().rank, ranks=2).values == (0, 1)


WAYS = [[Shard(0), Shard(0)], [Shard(1), Shard(0)], [Replicate(), Shard(1)], [Shard(0), Replicate()]]


@pytest.mark.mesh((2, 2))
@pytest.mark.ranks(schedules=4)
@pytest.mark.parametrize("seed", range(5))
def test_uneven_shards_on_a_square_of_ranks_are_right_each_way_to_each_other_and_whole_again(mesh, seed):
    rows, columns = 5 - seed % 3, 3 + seed % 4
    whole = torch.arange(rows * columns, dtype=torch.float64).reshape(rows, columns)
    for source, target in product(WAYS, WAYS):
        there = distribute_tensor(whole, mesh, source).redistribute(mesh, target)
        assert torch.equal(there.full_tensor(), whole), (source, target)
    partial = distribute_tensor(whole, mesh, WAYS[0]).sum() - whole.sum()
    assert partial.redistribute(mesh, [Replicate()] * 2).to_local() == 0


def test_meshes_of_different_ranks_and_of_different_runs_are_not_equal():
    def program():
        return init_device_mesh("cpu", (2,))

    first, second = lt.run(program, ranks=2), lt.run(program, ranks=2)
    meshes = [*first, *second]
    assert [[a == b for b in meshes] for a in meshes] == [[i == j for j in range(4)] for i in range(4)]
    assert len({hash(mesh) for mesh in meshes}) == 4


def test_no_cache_of_torchs_keeps_a_mesh_of_a_run_that_is_over():
    meshes = []

    def program():
        mesh = init_device_mesh("cpu", (2, 2))
        spread = distribute_tensor(torch.ones(5, 3), mesh, WAYS[0])
        (spread.redistribute(mesh, WAYS[1]) + 1).full_tensor()
        meshes.append(weakref.ref(mesh))

    lt.run(program, ranks=4)
    gc.collect()
    assert [mesh() for mesh in meshes] == [None] * 4
