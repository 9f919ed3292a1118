import gc
import importlib
import sys
import weakref

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor, init_device_mesh

import localtensor as lt
from localtensor.worlds import PRIVATE


def lacks(path):
    """The first part of a dotted path that is not there, or None."""
    module, _, name = path.rpartition(".")
    while module not in sys.modules:
        module, _, head = module.rpartition(".")
        name = f"{head}.{name}"
    found = importlib.import_module(module)
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


def test_each_rank_has_a_world_of_its_own():
    def program():
        world = c10d._world
        dist.barrier()
        return id(world), c10d._world is world, dist.group.WORLD.rank()

    run = lt.run(program, ranks=3, schedule="shuffled:1")
    assert len({ident for ident, _, _ in run}) == 3
    assert [(same, rank) for _, same, rank in run] == [(True, 0), (True, 1), (True, 2)]


WAYS = [[Shard(0), Shard(0)], [Shard(1), Shard(0)], [Replicate(), Shard(1)], [Shard(0), Replicate()]]


def redistributes(rows, columns):
    """Uneven pieces on a 2-D mesh, each way to each other one, and whole again: how often that was wrong."""
    mesh = init_device_mesh("cpu", (2, 2))
    whole = torch.arange(rows * columns, dtype=torch.float64).reshape(rows, columns)
    wrong = 0
    for source in WAYS:
        for target in WAYS:
            there = distribute_tensor(whole, mesh, source).redistribute(mesh, target)
            wrong += not torch.equal(there.full_tensor(), whole)
    partial = (distribute_tensor(whole, mesh, WAYS[0]).sum() - whole.sum()).redistribute(mesh, [Replicate()] * 2)
    return wrong + int(partial.to_local() != 0) + (Partial() == Replicate())


def test_uneven_shards_on_a_square_of_ranks_are_right_twenty_runs_in_a_row():
    for seed in range(20):
        rows, columns = 5 - seed % 3, 3 + seed % 4
        run = lt.run(redistributes, rows, columns, ranks=4, schedule=f"shuffled:{seed}")
        assert run.values == (0, 0, 0, 0), (seed, rows, columns)


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
