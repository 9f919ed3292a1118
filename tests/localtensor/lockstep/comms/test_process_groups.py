"""Process groups that are families: who is where, as each rank of a real job would be told."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from localtensor.errors import BadGroup
from localtensor.lockstep.comms.process_groups import resolve_group
from localtensor.lockstep.comms.stacked_collectives import family_of_lists
from localtensor.lockstep.mode import LocalTensorMode, rank_map
from localtensor.lockstep.values.rank_int import rank_int
from tests.localtensor.both_ways import check_both_ways, here


def places(group):
    return (
        dist.get_rank(group), dist.get_world_size(group), dist.get_process_group_ranks(group),
        [dist.get_global_rank(group, i) for i in range(2)], dist.get_group_rank(group, dist.get_global_rank(group, 1)),
    )  # fmt: skip


def test_a_family_tells_each_rank_its_own_group():
    def program():
        pairs, _ = dist.new_subgroups_by_enumeration([[0, 3], [1, 2]])
        rows, _ = dist.new_subgroups(2)
        halves = dist.split_group(split_ranks=[[0, 1], [2, 3]])
        return [places(group) for group in (dist.group.WORLD, pairs, rows, halves)]

    found = check_both_ways(program)
    assert str(found[1][0]) == "RankInts(0, 0, 1, 1)" and found[1][1] == 2 and found[0][2] == [0, 1, 2, 3]


def test_a_group_that_leaves_ranks_out():
    def program():
        group = dist.new_group([1, 3])
        return dist.get_rank(group)

    assert str(check_both_ways(program)) == "RankInts(-1, 0, -1, 1)"
    with LocalTensorMode(4):
        group = dist.new_group([1, 3])
        assert dist.get_process_group_ranks(group) == [1, 3] and dist.get_world_size(group) == 2
        assert dist.get_group_rank(group, 3) == 1 and dist.get_global_rank(group, 0) == 1
        with pytest.raises(ValueError, match="not part of group"):
            dist.get_group_rank(group, 2)


def test_groups_of_two_sizes():
    with LocalTensorMode(4) as mode:
        group = mode.groups.make([[0, 1, 2], [3]])
        assert str(dist.get_world_size(group)) == "RankInts(3, 3, 3, 1)"
        x = rank_map(torch.tensor)
        dist.all_reduce(x, group=group)
        assert [x.on(rank).item() for rank in range(4)] == [3, 3, 3, 3]
        with pytest.raises(BadGroup, match="different sizes"):
            dist.get_process_group_ranks(group)
        with mode.running_as(3):
            assert dist.get_process_group_ranks(group) == [3] and dist.get_world_size(group) == 1


def test_ranks_that_differ_by_rank_make_a_family():
    with LocalTensorMode(4) as mode:
        first = rank_int([0, 0, 2, 2])
        group = dist.new_group([first, first + 1], use_local_synchronization=True)
        assert resolve_group(mode, group).family is family_of_lists([[0, 1], [2, 3]], 4)
        with pytest.raises(BadGroup):
            dist.new_group([first, rank_int([0, 1, 2, 3])])


def test_torchs_own_code_runs_as_a_rank():
    with LocalTensorMode(4) as mode:
        pairs, _ = dist.new_subgroups_by_enumeration([[0, 3], [1, 2]])
        outside = dist.new_group([0, 1])
        with mode.running_as(2):
            assert (dist.get_rank(), dist.get_rank(pairs), dist.get_rank(outside)) == (2, 1, -1)
            assert dist.get_process_group_ranks(pairs) == [1, 2]
        assert str(dist.get_rank()) == "RankInts(0, 1, 2, 3)"
        assert rank_map(lambda rank: torch.tensor(dist.get_rank() - rank)).reconcile() == 0


def test_what_names_groups():
    with LocalTensorMode(4) as mode:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        rows, columns = family_of_lists([[0, 1], [2, 3]], 4), family_of_lists([[0, 2], [1, 3]], 4)
        assert (
            resolve_group(mode, mesh["b"]).family
            is resolve_group(mode, (mesh, "b")).family
            is resolve_group(mode, (mesh, 1)).family
            is rows
        )
        assert (
            resolve_group(mode, mesh.get_group("a")).family
            is resolve_group(mode, mesh.get_group(0).group_name).family
            is columns
        )
        assert resolve_group(mode, [[0, 1], [2, 3]]).family is rows and resolve_group(
            mode, [2, 0]
        ).family is family_of_lists([[2, 0]], 4)
        assert resolve_group(mode, None).family is family_of_lists([[0, 1, 2, 3]], 4)


@pytest.mark.parametrize("group", [[0, 0], [4], [[0, 1], [1, 2]], [[0], []], [], [1.5], ["a"]])
def test_lists_that_are_no_groups(group):
    with LocalTensorMode(4) as mode, pytest.raises(BadGroup, match="they must be different ranks of this mode"):
        resolve_group(mode, group)


@pytest.mark.parametrize(("axis", "said"), [
    (None, r"group=DeviceMesh.*: a mesh has a group along each of its axes, .*\. Name one: \(mesh, 'dp'\)\."),
    ("pp", r"group=\(DeviceMesh.*, 'pp'\): the mesh has no such axis\. Its axes are 'dp', 'tp'\."),
    (2, "the mesh has no such axis"), (1.5, "the mesh has no such axis"),
])  # fmt: skip
def test_axes_that_a_mesh_has_not_and_one_that_is_not_named(axis, said):
    with LocalTensorMode(4) as mode:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        assert resolve_group(mode, (mesh, -1)).family is resolve_group(mode, (mesh, "tp")).family
        with pytest.raises(BadGroup, match=f"collective: group: .*{said}"):
            resolve_group(mode, mesh if axis is None else (mesh, axis))
        with pytest.raises(BadGroup, match=said):
            resolve_group(mode, (mesh, axis))


@pytest.mark.parametrize("make", [
    lambda: dist.new_group([0, 9]), lambda: dist.new_subgroups_by_enumeration([[0, 1], [1, 2]]),
    lambda: dist.split_group(split_ranks=[[0, 7]]), lambda: dist.split_group(split_ranks=[[0, 1], [1]]),
])  # fmt: skip
def test_groups_that_cannot_be_made(make):
    with LocalTensorMode(4), pytest.raises(BadGroup):
        make()


def test_each_part_of_a_family_is_split_alike():
    with LocalTensorMode(8) as mode:
        halves, _ = dist.new_subgroups(4)
        group = dist.split_group(halves, [[0, 2], [1, 3]])
        assert resolve_group(mode, group).family is family_of_lists([[0, 2], [1, 3], [4, 6], [5, 7]], 8)


@pytest.mark.parametrize("rank", [lambda own: own + 1, lambda own: 0, lambda own: own * 0])
def test_a_rank_that_is_not_each_ranks_own_is_refused_in_words(rank):
    with (
        LocalTensorMode([1, 2]),
        pytest.raises(BadGroup, match=r"rank=.*: in one control flow each rank has a number of"),
    ):
        dist.init_process_group("gloo", rank=rank(dist.get_rank()), world_size=2)


def test_a_mode_of_one_rank_takes_its_number():
    with LocalTensorMode(1):
        dist.init_process_group("gloo", rank=0, world_size=1)
        assert dist.get_world_size() == 1


def test_in_a_mode_of_some_ranks_the_default_group_counts_by_number_and_any_other_by_place():
    with LocalTensorMode([1, 3, 5]) as mode:
        pair = dist.new_group([3, 5])
        assert [resolve_group(mode, None).place(rank) for rank in (1, 3, 5)] == [0, 1, 2]
        assert [resolve_group(mode, pair).place(place) for place in (0, 1)] == [0, 1]
        x, y = rank_map(torch.tensor), rank_map(torch.tensor)
        dist.broadcast(x, group=pair, group_src=1)
        dist.broadcast(y, src=3)
        assert [x.on(rank).item() for rank in (1, 3, 5)] == [1, 5, 5] and y.reconcile().item() == 3


def test_init_and_destroy_inside():
    def program():
        dist.init_process_group("gloo", rank=dist.get_rank(), world_size=4)
        group = dist.new_group([0, 1, 2, 3])
        dist.destroy_process_group(group)
        x = here(torch.tensor)
        dist.all_reduce(x)
        dist.destroy_process_group()
        gone = dist.is_initialized()
        return x, gone

    assert check_both_ways(program)[1] is False
    with LocalTensorMode(4):
        dist.init_process_group(world_size=4)
        with pytest.raises(ValueError, match="twice"):
            dist.init_process_group()
        dist.destroy_process_group()
        with pytest.raises(BadGroup, match="world_size=5"):
            dist.init_process_group(world_size=5)
        with pytest.raises(ValueError, match="not been initialized"):
            dist.get_rank()
        dist.init_process_group()
        assert dist.get_world_size() == 4
        group = dist.new_group([0, 1])
        dist.destroy_process_group(group)
        with pytest.raises(BadGroup, match="not of this LocalTensorMode"):
            dist.all_reduce(torch.ones(2), group=group)


def test_a_mode_of_some_ranks_keeps_their_numbers():
    with LocalTensorMode([0, 2, 5]) as mode:
        assert str(dist.get_rank()) == "RankInts(0, -, 2, -, -, 5)" and dist.get_world_size() == 3
        x = rank_map(lambda rank: torch.tensor([rank]))
        y = x.clone()
        dist.all_reduce(y)
        assert y.reconcile().item() == 7 and y.ranks == (0, 2, 5)
        dist.broadcast(x, 5)
        assert x.reconcile().item() == 5
        group = dist.new_group([2, 5])
        assert dist.get_group_rank(group, 5) == 1 and str(dist.get_rank(group)) == "RankInts(-1, -, 0, -, -, 1)"
        out = [torch.zeros(1, dtype=torch.int64) for _ in range(3)]
        dist.all_gather(out, rank_map(lambda rank: torch.tensor([rank])))
        assert [one.reconcile().item() for one in out] == [0, 2, 5]
        with pytest.raises(BadGroup):
            dist.new_group([0, 1])
        assert mode.groups.default_pg.family.groups == ((0, 2, 5),)


def test_a_large_mesh_has_two_families():
    with LocalTensorMode(64) as mode:
        before = len(mode.groups.by_name)
        mesh = init_device_mesh("cpu", (8, 8), mesh_dim_names=("a", "b"))
        assert len(mode.groups.by_name) <= before + 3
        assert resolve_group(mode, mesh["a"]).family.matrix.shape == (8, 8)
