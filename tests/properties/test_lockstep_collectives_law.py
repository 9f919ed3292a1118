"""Random programs of collectives in lockstep: the plain functions group by group, and rank threads, give the same bits.

The ranks start with values that some of them share; groups are any, of any sizes, and may leave ranks out.
"""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import localtensor.collectives.reference as c
import localtensor.lockstep.collectives_api as lc
from localtensor._util import ambient
from localtensor.layout.reductions import PremulSum
from localtensor.lockstep.mode import LocalTensorMode, rank_map
from tests.localtensor.both_ways import check_both_ways, here, same

SIDE = 12  # divides by every size of a group
OPS = ["sum", "avg", "product", "min", "max", PremulSum(0.3)]
KEEP = ("all_reduce", "reduce", "broadcast", "permute")  # who is in no group keeps what it had


@st.composite
def groups_of(draw, world, *, everybody):
    """Groups of 1, 2, 3, 4 or 6 ranks."""
    ranks, found = list(draw(st.permutations(range(world)))), []
    while ranks:
        size = draw(st.sampled_from([n for n in (1, 2, 3, 4, 6) if n <= len(ranks)]))
        found.append([ranks.pop() for _ in range(size)])
    return found if everybody else found[: draw(st.integers(1, len(found)))]


@st.composite
def steps(draw, world):
    kind = draw(st.sampled_from([*KEEP, "gather and cut", "scatter and gather", "all_to_all", "shards there and back"]))
    groups = draw(groups_of(world, everybody=kind not in KEEP))
    smallest = min(map(len, groups))
    if kind == "permute":
        groups = [group for group in groups if len(group) == smallest]
    return (
        kind,
        groups,
        draw(st.sampled_from(OPS)),
        draw(st.integers(0, smallest - 1)),
        draw(st.permutations(range(smallest))),
    )


@st.composite
def programs(draw):
    world = draw(st.integers(1, 7))
    sharing = [draw(st.integers(0, world - 1)) for _ in range(world)]
    return world, sharing, draw(st.lists(steps(world), min_size=1, max_size=5))


def start(number):
    return torch.randn(SIDE, SIDE, generator=torch.Generator().manual_seed(number))


def in_lockstep(x, step):
    kind, groups, op, root, order = step
    if kind == "gather and cut":
        return lc.all_gather_into_tensor(x, groups)[:SIDE]
    if kind == "scatter and gather":
        return lc.all_gather_into_tensor(lc.reduce_scatter_tensor(x, op, groups), groups)
    if kind == "shards there and back":
        return lc.shard_dim_alltoall(lc.shard_dim_alltoall(x, 0, 1, groups) * 2, 1, 0, groups)
    calls = {
        "all_reduce": lambda: lc.all_reduce(x, op, groups), "reduce": lambda: lc.reduce(x, root, op, groups),
        "broadcast": lambda: lc.broadcast(x, root, groups), "permute": lambda: lc.permute(x, order, groups),
        "all_to_all": lambda: lc.all_to_all_single(x, groups),
    }  # fmt: skip
    return calls[kind]()


def plainly(held, step):
    kind, groups, op, root, order = step
    calls = {
        "all_reduce": lambda xs: c.all_reduce(xs, op), "reduce": lambda xs: c.reduce(xs, op, root=root),
        "broadcast": lambda xs: c.broadcast(xs, root), "permute": lambda xs: c.permute(xs, order),
        "all_to_all": c.all_to_all_single, "gather and cut": lambda xs: [y[:SIDE] for y in c.all_gather_into_tensor(xs)],
        "scatter and gather": lambda xs: c.all_gather_into_tensor(c.reduce_scatter_tensor(xs, op)),
        "shards there and back": lambda xs: c.shard_dim_alltoall(
            [y * 2 for y in c.shard_dim_alltoall(xs, gather_dim=0, shard_dim=1)], gather_dim=1, shard_dim=0
        ),
    }  # fmt: skip
    found = list(held)
    for group in groups:
        for rank, x in zip(group, calls[kind]([held[rank] for rank in group]), strict=True):
            found[rank] = x
    return found


@given(programs())
def test_the_plain_functions_group_by_group(program):
    world, sharing, steps = program
    held = [start(number) for number in sharing]
    with LocalTensorMode(world):
        numbers = {number: start(number) for number in sharing}
        x = rank_map(lambda rank: numbers[sharing[rank]])
        assert x._partition.rows == len(set(sharing))
        for step in steps:
            x, held, before = in_lockstep(x, step), plainly(held, step), x._partition
            check_rows(x._partition, before, step)
            assert all(same(x.on(rank), held[rank]) for rank in range(world)), step
            x, held = x + 0.25, [y + 0.25 for y in held]


def check_rows(after, before, step):
    """Each group holds its result once; groups that brought the same, once together."""
    kind, groups, _, root, _ = step
    brought = [tuple(before.row_of[rank] for rank in group) for group in groups]
    outside = {int(before.row_of[rank]) for rank in range(before.world) if not any(rank in group for group in groups)}
    if kind in ("all_reduce", "gather and cut"):
        assert after.rows <= len(set(brought)) + len(outside)
    if kind == "broadcast":
        assert after.rows <= len({rows[root] for rows in brought}) + len(outside)
    if kind == "permute":
        assert after.rows <= before.rows


# -- the same program of torch.distributed, by rank threads


@st.composite
def distributed_programs(draw):
    world = draw(st.integers(2, 6))
    sharing = [draw(st.integers(0, world - 1)) for _ in range(world)]
    found = [draw(steps(world)) for _ in range(draw(st.integers(1, 4)))]
    return world, sharing, [(*step, draw(st.booleans())) for step in found]


def distributed(sharing, steps):
    def program():
        x = here(lambda rank: start(sharing[rank]))
        for kind, groups, op, root, _, later in steps:
            if ambient.lockstep() is None and dist.get_rank() not in {rank for group in groups for rank in group}:
                dist.new_subgroups_by_enumeration(groups)
                continue
            mine, _ = dist.new_subgroups_by_enumeration(groups)
            done = call(x, mine, kind, op, root, later)
            x = done
        return x

    return program


def call(x, group, kind, op, root, later):
    op = dist._make_nccl_premul_sum(op.factor) if isinstance(op, PremulSum) else getattr(dist.ReduceOp, op.upper())
    many = dist.get_world_size(group)
    work = None
    if kind == "all_reduce":
        work = dist.all_reduce(x, op, group=group, async_op=later)
    elif kind in ("reduce", "broadcast"):
        work = dist.broadcast(x, group=group, group_src=root, async_op=later)
    elif kind in ("permute", "all_to_all"):
        x, brought = x.clone(), x
        work = dist.all_to_all_single(x, brought, group=group, async_op=later)
    elif type(many) is int:
        piece = torch.zeros(SIDE // many, SIDE)
        dist.reduce_scatter_tensor(piece, x, op, group=group)
        work = dist.all_gather_into_tensor(x, piece, group=group, async_op=later)
    if work is not None:
        work.wait()
    return x


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
@settings(max_examples=25)
@given(distributed_programs())
def test_rank_threads_give_the_same_bits(program):
    world, sharing, steps = program
    steps = [step for step in steps if len({len(group) for group in step[1]}) == 1]
    assert check_both_ways(distributed(sharing, steps), world) is not None
