import os

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

import localtensor as lt
from localtensor.errors import BadGroup, EarlyReturn, GroupMismatch, GroupsLeftOver, RankRaised, TorchChanged
from localtensor.threads.dist_patches import patched_torch_distributed


def cause_of(kind, program, ranks):
    with pytest.raises(RankRaised) as caught:
        lt.run(program, ranks=ranks)
    assert type(caught.value.__cause__) is kind
    return str(caught.value.__cause__)


# -- the default group


def test_the_default_group_is_there_already_and_may_be_asked_for():
    def program():
        before = dist.is_initialized(), dist.get_backend(), dist.get_rank(), dist.get_world_size()
        dist.init_process_group("nccl", rank=dist.get_rank(), world_size=2)
        after = dist.get_backend(), dist.group.WORLD.size(), dist.group.WORLD.rank()
        dist.destroy_process_group()
        return before, after, dist.is_initialized()

    assert lt.run(program, ranks=2).values == tuple(
        ((True, "gloo", rank, 2), ("nccl", 2, rank), False) for rank in (0, 1)
    )


def test_a_default_group_that_is_made_again_has_groups_of_its_own():
    def program():
        dist.new_group([0])
        dist.destroy_process_group()
        dist.init_process_group("gloo")
        dist.new_group([0, 1])  # named as the first one was: torch counts from the start
        dist.destroy_process_group()
        return True

    assert lt.run(program, ranks=2).values == (True, True)


BACKENDS = ["gloo", "nccl", "cpu:gloo,cuda:nccl", "GLOO"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_get_backend_answers_what_was_asked_for(backend):
    def program():
        dist.destroy_process_group()
        dist.init_process_group(backend)
        whole, (group, other) = dist.get_backend(), (dist.new_group([0, 1]), dist.new_group([0], backend="nccl"))
        shown = whole, dist.get_backend(group), dist.get_backend(other) if dist.get_rank() == 0 else "nccl"
        dist.destroy_process_group()
        return shown

    assert lt.run(program, ranks=2).values == ((backend.lower(), backend.lower(), "nccl"),) * 2


def test_a_default_group_can_be_destroyed_and_made_again_many_times():
    def program():
        sums = []
        for count in range(1, 6):
            group = dist.new_group([0, 2])
            x = torch.tensor(count)
            dist.all_reduce(x)
            if dist.get_rank() in (0, 2):
                dist.all_reduce(x, group=group)
            sums.append(x.item())
            dist.destroy_process_group()
            assert not dist.is_initialized()
            dist.init_process_group()
        dist.destroy_process_group()
        return sums

    assert lt.run(program, ranks=3).values == ([6, 12, 18, 24, 30], [3, 6, 9, 12, 15], [6, 12, 18, 24, 30])


def test_a_second_default_group_is_refused_in_torchs_own_words():
    def program():
        dist.init_process_group("gloo")
        dist.init_process_group("gloo")

    assert cause_of(ValueError, program, 2) == "trying to initialize the default process group twice!"


@pytest.mark.parametrize(("asked", "problem"), [
    ({"world_size": 3}, "init_process_group: world_size: world_size=3: this run has 2"),
    ({"rank": 5}, "init_process_group: rank: rank=5: this run has 0"),
    ({"rank": 5, "world_size": 3}, "init_process_group: world_size: world_size=3: this run has 2"),
])  # fmt: skip
def test_a_world_of_another_size_is_refused(asked, problem):
    remedy = "Leave it out, or read it from the environment (RANK, WORLD_SIZE) as under torchrun."
    assert cause_of(BadGroup, lambda: dist.init_process_group("gloo", **asked), 2) == f"{problem}. {remedy}"


def test_our_backend_is_refused_outside_of_a_run():
    lt.run(dist.get_rank, ranks=1)
    with pytest.raises(BadGroup) as caught:
        dist.init_process_group("localtensor", store=dist.HashStore(), rank=0, world_size=1)
    assert str(caught.value) == (
        "init_process_group: backend: backend='localtensor': this backend lives inside a simulation only. "
        "Call your function through localtensor.run(fn, ranks=...)."
    )
    assert not dist.is_initialized()


def test_the_environment_is_that_of_torchrun():
    def program():
        dist.init_process_group(init_method="env://")
        dist.destroy_process_group()
        return tuple(int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))

    assert lt.run(program, ranks=3).values == ((0, 3, 0, 3), (1, 3, 1, 3), (2, 3, 2, 3))


# -- groups


def test_groups_in_a_loop_have_names_of_their_own():
    def program():
        names = []
        for _ in range(20):
            group = dist.new_group([0, 1])
            if dist.get_rank() < 2:
                dist.barrier(group)
                names.append(group.group_name)
                dist.destroy_process_group(group)
        return names

    names = [str(number) for number in range(1, 21)]
    assert lt.run(program, ranks=3).values == (names, names, [])


def test_ranks_in_a_group_are_counted_in_its_own_order():
    def program():
        group = dist.new_group([3, 1])
        if dist.get_rank() in (1, 3):
            held = [torch.zeros(1), torch.zeros(1)]
            dist.all_gather(held, torch.tensor([float(dist.get_rank())]), group=group)
            x = torch.tensor([dist.get_rank()])
            dist.broadcast(x, group_src=0, group=group)
            shown = dist.get_rank(group), [int(one) for one in held], x.item(), dist.get_process_group_ranks(group)
            dist.destroy_process_group(group)
            return shown
        return dist.get_rank(group), group is dist.GroupMember.NON_GROUP_MEMBER

    assert lt.run(program, ranks=4).values == ((-1, True), (0, [1, 3], 1, [1, 3]), (-1, True), (1, [1, 3], 1, [1, 3]))


def test_a_group_may_be_made_by_its_members_alone():
    def program():
        if dist.get_rank() == 2:
            return None
        group = dist.new_group([0, 1], use_local_synchronization=True)
        x = torch.ones(1)
        dist.all_reduce(x, group=group)
        dist.destroy_process_group(group)
        return x.item()

    assert lt.run(program, ranks=3).values == (2.0, 2.0, None)


def groups_of_one_rank_each():
    """A name for two groups: each rank makes those of its own half, as `new_subgroups(group=...)` does."""
    half = [[0, 2], [1, 3]][dist.get_rank() % 2]
    made = [dist.new_group([rank]) for rank in half]
    (mine,) = [group for group in made if group is not dist.GroupMember.NON_GROUP_MEMBER]
    x = torch.full((1,), float(dist.get_rank()))
    dist.all_reduce(x, group=mine)
    members = dist.get_process_group_ranks(mine)
    dist.destroy_process_group(mine)
    return members, x.item()


@pytest.mark.parametrize("schedule", ["round_robin", "shuffled:1", "shuffled:2", "pct:3"])
def test_groups_of_one_rank_do_not_meet_those_of_the_same_name(schedule):
    assert lt.run(groups_of_one_rank_each, ranks=4, schedule=schedule).values == tuple(([r], r) for r in range(4))


def test_a_group_of_one_rank_is_not_one_of_several_on_other_ranks():
    def program():
        dist.new_group([dist.get_rank()] if dist.get_rank() == 2 else [0, 1])

    with pytest.raises(GroupMismatch, match=r"\[2\] on rank 2"):
        lt.run(program, ranks=3)


def test_a_member_that_does_not_make_the_group_is_missed_in_its_first_collective():
    def program():
        if dist.get_rank() == 0:
            dist.barrier(dist.new_group([0, 1]))

    with pytest.raises(EarlyReturn) as caught:
        lt.run(program, ranks=2)
    line = program.__code__.co_firstlineno + 2
    assert str(caught.value).splitlines()[1:] == [
        "  rank 1 returned, last seen in no call",
        f"  rank 0 waits for rank 1 in barrier #0 in group 1 at test_dist_patches.py:{line} in program",
    ]


def test_split_group_gives_each_rank_the_group_of_its_part():
    def program():
        group = dist.split_group(split_ranks=[[0, 2], [3, 1]])
        x = torch.tensor(dist.get_rank())
        dist.all_reduce(x, group=group)
        part = dist.get_process_group_ranks(group), x.item()
        halves = dist.split_group(group, split_ranks=[[0], [1]])
        alone = dist.get_process_group_ranks(halves)
        for one in (halves, group):
            dist.destroy_process_group(one)
        return part, alone

    assert lt.run(program, ranks=4).values == (
        (([0, 2], 2), [0]), (([1, 3], 4), [1]), (([0, 2], 2), [2]), (([1, 3], 4), [3]),
    )  # fmt: skip


@pytest.mark.parametrize("splits", [[[0, 0]], [[0], [0, 1]], [[]], [], [[0, 2]]])
def test_a_split_of_ranks_that_are_not_there_is_refused(splits):
    assert cause_of(BadGroup, lambda: dist.split_group(split_ranks=splits), 2) == (
        f"split_group: split_ranks: split_ranks={splits}: they must be lists of different ranks below 2, "
        "none of them empty. Name each rank at most once."
    )


def test_ranks_that_disagree_about_a_group_are_reported():
    def program():
        dist.new_group([0, 1] if dist.get_rank() < 2 else [0, 2])

    line = program.__code__.co_firstlineno + 1
    with pytest.raises(GroupMismatch) as caught:
        lt.run(program, ranks=3)
    assert f"test_dist_patches.py:{line} in program" in str(caught.value)
    assert (line, "program") in {(place.line, place.function) for place in caught.value.places}


def test_only_groups_that_the_program_made_count_as_left_over():
    def program():
        mesh = init_device_mesh("cpu", (2, 2))
        distribute_tensor(torch.ones(4, 4), mesh, [Shard(0), Shard(1)]).full_tensor()

    lt.run(program, ranks=4, leftovers="raise")
    with pytest.raises(GroupsLeftOver) as caught:
        lt.run(lambda: dist.new_subgroups(2), ranks=4, leftovers="raise")
    assert set(caught.value.groups.values()) == {(0, 1), (2, 3)} and caught.value.ranks == (0, 1, 2, 3)


# -- what stands where


def stands():
    functions = c10d.init_process_group, c10d.split_group, c10d._new_process_group_helper
    inside = [cell.cell_contents for function in functions[:2] for cell in function.__closure__]
    return [*functions, *inside, "_thread_id" in vars(DeviceMesh), c10d._world]


def test_everything_is_put_back_when_the_block_ends_however_it_ends():
    before = stands()
    inside = []

    def fails():
        with patched_torch_distributed():
            inside.extend(stands())
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert [a is b for a, b in zip(inside, before)].count(False) >= 3
    assert all(a is b for a, b in zip(stands(), before))


def test_a_function_that_the_program_imported_by_name_is_reached():
    init, split = dist.init_process_group, dist.split_group

    def program():
        dist.destroy_process_group()
        init("gloo")
        group = split(split_ranks=[[0], [1]])
        shown = dist.get_backend(), dist.get_process_group_ranks(group)
        dist.destroy_process_group()
        return shown

    assert lt.run(program, ranks=2).values == (("gloo", [0]), ("gloo", [1]))


def test_a_torch_that_no_longer_wraps_its_functions_is_named(monkeypatch):
    def init_process_group():
        pass

    monkeypatch.setattr(c10d, "init_process_group", init_process_group)
    with pytest.raises(TorchChanged) as caught:
        lt.run(dist.get_rank, ranks=1)
    assert str(caught.value) == (
        "localtensor: torch: torch.distributed.init_process_group: it is no longer wrapped in torch's logging decorators. "
        "Use torch 2.13, with which this was tried, and report it with your version."
    )


def test_a_fake_group_is_torchs_own_and_any_size():
    def fake():
        dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=64)
        x = torch.ones(2)
        dist.all_reduce(x)
        inner = dist.new_group([0, 5])
        seen = dist.get_backend(), dist.get_world_size(), x.tolist(), dist.get_world_size(inner)
        dist.destroy_process_group()
        dist.init_process_group("gloo")
        dist.all_reduce(x)
        dist.destroy_process_group()
        return seen, x.tolist()

    assert lt.run(fake, ranks=2).values == ((("fake", 64, [1.0, 1.0], 2), [2.0, 2.0]),) * 2


def test_the_debug_level_detail_puts_no_gloo_around_a_group():
    def reduce():
        x = torch.ones(1)
        dist.all_reduce(x, group=dist.new_group([0, 1]))
        return x.item()

    level = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        assert lt.run(reduce, ranks=2, timeout=20, leftovers="ignore").values == (2, 2)
    finally:
        dist.set_debug_level(level)


def identity():
    """What a program reads of its groups, and of a Work."""
    cpu, group = torch.device("cpu"), dist.new_group([0, 1], group_desc="mine")
    work = dist.all_reduce(torch.ones(1), async_op=True, group=group)
    work.wait()
    facts = [isinstance(work, dist.Work), dist.get_backend(group)]
    for one in (dist.group.WORLD, group):
        facts += [one.name(), dist.get_backend_config(one), one.group_name, one.group_desc, type(one).__name__]
        facts += [one.size(), one.rank(), isinstance(one._get_backend(cpu), dist.distributed_c10d.Backend)]
    return facts


def test_groups_have_the_name_and_configuration_that_they_have_on_gloo():
    threads, gloo = (
        lt.run(identity, ranks=2, leftovers="ignore"),
        lt.run(identity, ranks=2, on="gloo", leftovers="ignore"),
    )
    assert threads.values == gloo.values and "gloo" in threads.values[0]


def test_a_group_of_another_backend_has_its_name():
    def program():
        group = dist.new_group([0, 1], backend="nccl")
        x = torch.ones(2)
        dist.all_reduce(x, group=group)
        return group.name(), dist.get_backend_config(group), x.tolist()

    assert lt.run(program, ranks=2, leftovers="ignore").values == (("nccl", "cuda:nccl", [2.0, 2.0]),) * 2
