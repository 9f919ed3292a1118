"""DeviceMesh in lockstep: what each rank is told, against rank threads; meshes of some ranks, in any order."""

import copy
import inspect
import pickle

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from localtensor.errors import BadGroup
from localtensor.lockstep.mode import LocalTensorMode, rank_map
from localtensor.lockstep.patches import device_mesh
from localtensor.lockstep.values.rank_int import on_rank, rank_values
from tests.end_to_end.programs.lockstep_ways import assert_bits, assert_both, in_lockstep, on_threads

pytestmark = pytest.mark.filterwarnings("ignore:Slicing a flattened dim", "ignore:.*left behind:UserWarning")
S0, S1, R = Shard(0), Shard(1), Replicate()


def numbers(*shape):
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape)


def facts(mesh):
    """What a rank learns from a mesh; every method is asked for every axis."""
    axes = range(mesh.ndim)
    return [
        list(mesh.get_coordinate()), [mesh.get_local_rank(axis) for axis in axes], mesh.get_rank(), mesh.mesh.clone(),
        tuple(mesh.shape), mesh.size(), [mesh.size(axis) for axis in axes], mesh.ndim, mesh.device_type,
        mesh.mesh_dim_names, [group.size() for group in mesh.get_all_groups()],
        [dist.get_process_group_ranks(mesh.get_group(axis)) for axis in axes], repr(mesh),
    ]  # fmt: skip


def grid():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def by_name(mesh):
    mesh._flatten("all")
    return mesh["all"]


def put_together(mesh):
    return DeviceMesh._concatenate([mesh["dp"], mesh["tp"]])


MADE = {
    "a row": lambda: init_device_mesh("cpu", (4,)),
    "a grid": grid,
    "an axis": lambda: grid()["tp"],
    "the other axis": lambda: grid()["dp"],
    "both axes": lambda: grid()["dp", "tp"],
    "flattened": lambda: grid()._flatten("all"),
    "flattened, by name": lambda: by_name(grid()),
    "unflattened": lambda: init_device_mesh("cpu", (4,), mesh_dim_names=("all",))._unflatten(0, (2, 2), ("a", "b")),
    "put together": lambda: put_together(grid()),
    "of ranks in another order": lambda: DeviceMesh("cpu", [3, 1, 0, 2]),
    "a grid in another order": lambda: DeviceMesh("cpu", [[3, 1], [0, 2]], mesh_dim_names=("a", "b")),
    "of a group": lambda: DeviceMesh.from_group(dist.group.WORLD, "cpu"),
    "an axis of size one": lambda: init_device_mesh("cpu", (1, 4)),
    "from a pickle": lambda: pickle.loads(pickle.dumps(grid())),
    "a deep copy": lambda: copy.deepcopy(grid()),
}


@pytest.mark.parametrize("name", MADE)
def test_each_rank_learns_what_it_learns_on_rank_threads(name):
    assert_both(lambda: facts(MADE[name]()), ranks=4)


@pytest.mark.few(6)
@pytest.mark.parametrize("name", MADE)
def test_tensors_lie_where_they_lie_on_rank_threads(name):
    def program():
        mesh = MADE[name]()
        first, then = ([S0, S1][: mesh.ndim], [S1] + [R] * (mesh.ndim - 1))
        x = distribute_tensor(numbers(5, 3), mesh, first)
        y = DTensor.from_local(numbers(2, 2) * dist.get_rank(), mesh, [Partial()] * mesh.ndim)
        return [x, x.redistribute(mesh, then), x.full_tensor(), y.full_tensor(), (x + 1).sum(0).full_tensor()]

    assert_both(program, ranks=4)


def test_equality_and_hash_are_as_on_rank_threads():
    def program():
        one, other = grid(), grid()
        same = [one == other, hash(one) == hash(other), one["dp"] == one["dp"], hash(one["tp"]) == hash(one["tp"])]
        return [*same, one["dp"] == one["tp"], one == init_device_mesh("cpu", (4,)), {one: 1}.get(other)]

    assert assert_both(program, ranks=4)[0] == [True, True, True, True, False, False, 1]


def test_the_wrong_axis_is_refused_in_torchs_words():
    for ask in (lambda: grid().get_local_rank(), lambda: grid().get_group("ep"), lambda: grid()["ep"]):
        with pytest.raises((RuntimeError, KeyError)) as mine:
            in_lockstep(ask, ranks=4)
        with pytest.raises(Exception, match=r"RankRaised|rank") as theirs:
            on_threads(ask, ranks=4)
        assert str(mine.value).strip("'\"")[:50] in str(theirs.value)


# -- meshes that leave ranks out

SOME = {"a row": [0, 2], "in another order": [2, 1, 3], "a grid": [[0, 1], [2, 3]], "one rank": [1]}


@pytest.mark.parametrize("name", SOME)
def test_results_are_held_by_the_ranks_of_the_mesh_alone(name):
    ranks = torch.tensor(SOME[name])

    def program():
        mesh = DeviceMesh("cpu", ranks)
        first = [S0, S1][: mesh.ndim]
        x = distribute_tensor(numbers(5, 3), mesh, first)
        alone = distribute_tensor(numbers(5, 3), mesh, first, src_data_rank=None)
        replicas = distribute_tensor(numbers(5, 3), mesh, [R] * mesh.ndim)
        local = DTensor.from_local(numbers(2, 2) * (dist.get_rank() + 1), mesh, [Partial()] * mesh.ndim)
        found = [x, alone, replicas, x + 1, x.redistribute(mesh, [S1] + [R] * (mesh.ndim - 1)), x.full_tensor()]
        return [*found, local, local.full_tensor()]

    world = 6
    mine, theirs = in_lockstep(program, ranks=world), on_threads(program, ranks=world)
    for rank in range(world):
        if rank in ranks:
            assert_bits(mine[rank], theirs[rank], f"rank {rank}")
        else:  # there, torch leaves empty tensors
            assert all((x["local"] if isinstance(x, dict) else x) is None for x in mine[rank]), rank


def test_coordinates_are_those_of_the_ranks_of_the_mesh():
    with LocalTensorMode(4):
        mesh = DeviceMesh("cpu", [0, 2])
        (place,) = mesh.get_coordinate()
        assert [on_rank(place, 0), on_rank(place, 2)] == [0, 1]
        assert place.node.held.tolist() == [True, False, True, False]


def test_a_mesh_with_ranks_that_the_mode_has_not_is_refused():
    with LocalTensorMode(4), pytest.raises((BadGroup, RuntimeError)):
        DeviceMesh("cpu", [0, 7])


def test_a_mode_of_some_ranks_has_meshes_of_those():
    with LocalTensorMode([1, 3, 4, 6]):
        mesh = DeviceMesh("cpu", [[1, 3], [4, 6]], mesh_dim_names=("dp", "tp"))
        x = distribute_tensor(numbers(4, 2), mesh, [S0, S0])
        local = x.to_local()
        assert local.ranks == (1, 3, 4, 6)
        assert local.on(4).tolist() == [[4, 5]]
        assert x.full_tensor().reconcile().tolist() == numbers(4, 2).tolist()


def test_all_meshes_along_an_axis_have_its_groups():
    with LocalTensorMode(4):
        columns = grid()._get_all_submeshes("dp")
        sums = [
            DTensor.from_local(rank_map(torch.tensor), mesh, [Partial()], run_check=False).full_tensor()
            for mesh in columns
        ]
    assert [mesh.mesh.tolist() for mesh in columns] == [[0, 2], [1, 3]]
    assert [(x.ranks, x.on(x.ranks[1]).item()) for x in sums] == [((0, 2), 2), ((1, 3), 4)]


# -- in and out of the mode


def test_meshes_of_two_modes_are_not_equal():
    with LocalTensorMode(4):
        first = grid()
    with LocalTensorMode(4):
        assert first != grid()


def test_outside_of_a_mode_a_mesh_is_what_it_was(tmp_path):
    device_mesh.install()
    for name in device_mesh.MESH_PATCHES:
        assert inspect.getattr_static(DeviceMesh, name, None) is not None, f"torch has no DeviceMesh.{name} any more"
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
        assert (mesh.get_coordinate(), mesh.get_local_rank(), mesh.get_rank(), mesh.size()) == ((0,), 0, 0, 1)
        assert mesh["dp"].mesh.tolist() == [0]
        with LocalTensorMode(2):
            inside = init_device_mesh("cpu", (2,))
            assert rank_values(inside.get_local_rank(), 2).tolist() == [0, 1]
        assert dist.get_world_size() == 1
    finally:
        dist.destroy_process_group()


def test_a_pickled_mesh_of_a_mode_can_be_read_outside():
    with LocalTensorMode(4):
        data = pickle.dumps(grid())
    mesh = pickle.loads(data)
    assert (mesh.mesh.tolist(), mesh.mesh_dim_names) == ([[0, 1], [2, 3]], ("dp", "tp"))


def test_a_dtensor_can_be_printed_and_looked_at_after_the_mode():
    with LocalTensorMode(4):
        x = distribute_tensor(numbers(5, 2), grid(), [S0, R])
        shown = repr(x)
    assert "LocalTensor(4 ranks, 2 different values" in shown
    assert "(Shard(dim=0), Replicate())" in shown
    assert x.to_local().on(3).tolist() == [[6, 7], [8, 9]]


def test_rank_map_makes_the_shards_of_a_dtensor():
    with LocalTensorMode(4):
        mesh = grid()
        x = DTensor.from_local(rank_map(lambda rank: torch.full((1,), rank)), mesh["tp"], [S0])
        assert [x.full_tensor().on(rank).tolist() for rank in range(4)] == [[0, 1], [0, 1], [2, 3], [2, 3]]
