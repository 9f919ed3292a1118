"""torch.distributed's own collectives on LocalTensors: what rank threads give, bit for bit."""

import sys

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
from torch.distributed import ReduceOp

from localtensor import errors
from localtensor._util.call_sites import is_of_ours
from localtensor.lockstep.comms import collectives
from localtensor.lockstep.mode import LocalTensorMode, rank_map, tensor_map
from tests.localtensor.both_ways import check_both_ways, here, numbers

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
OPS = ["SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM"]


def reduction(name):
    return dist._make_nccl_premul_sum(0.3) if name == "PREMUL_SUM" else getattr(ReduceOp, name)


def fit(name):
    return torch.int32 if name.startswith("B") else torch.float32


def some_groups():
    """All ranks, a family of two groups, and a group that leaves ranks out."""
    pairs, _ = dist.new_subgroups_by_enumeration([[0, 3], [2, 1]])
    return [None, pairs, dist.new_group([0, 2, 3])]


def member(group):
    return group is not dist.GroupMember.NON_GROUP_MEMBER


@pytest.mark.parametrize("name", OPS)
def test_all_reduce(name):
    def program():
        found = []
        for group in some_groups():
            x = numbers(5, 3, dtype=fit(name))
            if member(group):
                dist.all_reduce(x, reduction(name), group=group)
            found.append(x)
        return found

    for x in check_both_ways(program)[:1]:
        assert x._partition.uniform


@pytest.mark.parametrize("name", OPS)
def test_reduce_scatter_and_its_list_form(name):
    def program():
        found = []
        for group, many in zip(some_groups(), (4, 2, 3), strict=True):
            x, out, other = numbers(2 * many, 3, dtype=fit(name)), torch.zeros(2, 3, dtype=fit(name)), None
            if member(group):
                dist.reduce_scatter_tensor(out, x, reduction(name), group=group)
                pieces = [piece.contiguous() for piece in x.chunk(many)]
                other = torch.zeros(2, 3, dtype=fit(name))
                dist.reduce_scatter(other, pieces, reduction(name), group=group)
                found += [out, other]
        return found[:4]

    assert len(check_both_ways(program)) == 4


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64, torch.uint8, torch.bool])
def test_gathering(dtype):
    def program():
        found = []
        for group, many in zip(some_groups()[:2], (4, 2), strict=True):
            x = numbers(3, 2, dtype=dtype)
            out = [torch.zeros(3, 2, dtype=dtype) for _ in range(many)]
            dist.all_gather(out, x, group=group)
            whole, stacked = torch.zeros(3 * many, 2, dtype=dtype), torch.zeros(many, 3, 2, dtype=dtype)
            dist.all_gather_into_tensor(whole, x, group=group)
            dist.all_gather_into_tensor(stacked, x, group=group)
            found += [*out, whole, stacked]
        return found

    for x in check_both_ways(program)[:4]:
        assert x._partition.uniform and len(x._cells) == 1


def test_scalars_are_gathered_as_a_row():
    def program():
        out = torch.zeros(4)
        dist.all_gather_into_tensor(out, here(lambda rank: torch.tensor(float(rank))))
        return out

    assert check_both_ways(program).reconcile().tolist() == [0, 1, 2, 3]


def test_roots_of_a_family_are_named_by_their_rank_in_the_group():
    def program():
        pairs, _ = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])
        x, y = numbers(4), numbers(4)
        dist.broadcast(x, group=pairs, group_src=1)
        dist.broadcast(y, dist.get_global_rank(pairs, 1), group=pairs)
        return x, y, dist.get_global_rank(pairs, 1), dist.get_rank(pairs), dist.get_world_size(pairs)

    x, y, root, *_ = check_both_ways(program)
    assert x._partition.rows == y._partition.rows == 2 and str(root) == "RankInts(1, 1, 3, 3)"


def test_all_to_all_in_its_forms():
    def program():
        x, out = numbers(8, 3), torch.zeros(8, 3)
        dist.all_to_all_single(out, x)
        lists = [torch.zeros(2, 3) for _ in range(4)]
        dist.all_to_all(lists, list(x.chunk(4)))
        evenly = torch.zeros(8, 3)
        dist.all_to_all_single(evenly, x, [2] * 4, [2] * 4)
        return out, lists, evenly

    assert len(check_both_ways(program)) == 3


def test_coalesced_forms():
    def program():
        x, y = numbers(3), numbers(2, 2, seed=1)
        with dist._coalescing_manager():
            dist.all_reduce(x)
            dist.all_reduce(y)
        z, w = numbers(3), numbers(2, 2, seed=1)
        dist.all_reduce_coalesced([z, w], ReduceOp.MAX)
        outs = [torch.zeros(12), torch.zeros(8, 2)]
        with dist._coalescing_manager():
            dist.all_gather_into_tensor(outs[0], z)
            dist.all_gather_into_tensor(outs[1], w)
        pieces = [torch.zeros(3), torch.zeros(2, 2)]
        with dist._coalescing_manager(async_ops=True) as manager:
            dist.reduce_scatter_tensor(pieces[0], outs[0])
            dist.reduce_scatter_tensor(pieces[1], outs[1])
        manager.wait()
        lists = [[torch.zeros(3), torch.zeros(2, 2)] for _ in range(4)]
        dist.all_gather_coalesced(lists, [x, y])
        return x, y, z, w, outs, pieces, lists

    assert check_both_ways(program)[0]._partition.uniform


# -- functional collectives

FUNCTIONAL = {
    "all_reduce": lambda x, g: fc.all_reduce(x, "sum", g),
    "all_reduce avg": lambda x, g: fc.all_reduce(x, "avg", g),
    "broadcast": lambda x, g: fc.broadcast(x, 1, g),
    "all_gather_tensor": lambda x, g: fc.all_gather_tensor(x, 0, g),
    "all_gather_tensor 1": lambda x, g: fc.all_gather_tensor(x, 1, g),
    "reduce_scatter_tensor": lambda x, g: fc.reduce_scatter_tensor(x, "max", 0, g),
    "reduce_scatter_tensor 1": lambda x, g: fc.reduce_scatter_tensor(x, "sum", 1, g),
    "all_reduce_coalesced": lambda x, g: fc.all_reduce_coalesced([x, x[:2] + 1], "sum", g),
    "all_gather_into_tensor_coalesced": lambda x, g: fc.all_gather_into_tensor_coalesced([x, x[:2]], g),
    "reduce_scatter_tensor_coalesced": lambda x, g: fc.reduce_scatter_tensor_coalesced([x, x + 1], "sum", [0, 0], g),
    "all_to_all_single": lambda x, g: fc.all_to_all_single(x, None, None, g),
    "all_to_all_single of a transposed one": lambda x, g: fc.all_to_all_single(x.t(), None, None, g),
    "permute_tensor": lambda x, g: fc.permute_tensor(x.reshape(-1), [1, 0], g),
    "shard_dim_alltoall": lambda x, g: torch.ops._dtensor.shard_dim_alltoall(x, 0, 1, g.group_name),
    "in place": lambda x, g: torch.ops._c10d_functional.all_reduce_(x.clone(), "sum", g.group_name),
    "into a buffer": lambda x, g: torch.ops._c10d_functional.all_gather_into_tensor_out(
        x, 2, g.group_name, out=torch.zeros(8, 4)
    ),
}


def waited(found):
    return [fc.wait_tensor(x) for x in found] if isinstance(found, list) else fc.wait_tensor(found)


@pytest.mark.parametrize("name", FUNCTIONAL)
def test_functional_collectives(name):
    def program():
        pairs, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
        x = numbers(4, 4)
        return waited(FUNCTIONAL[name](x, pairs)), x

    found, _ = check_both_ways(program)
    assert found is not None


# -- buffers


def test_a_buffer_may_be_a_part_of_a_larger_tensor():
    def program():
        x, whole = numbers(6, 4), numbers(6, 4, seed=1)
        dist.all_reduce(x[2:4])
        dist.broadcast(whole[1], 1)
        dist.all_gather_into_tensor(whole[2:], x[0])
        out = numbers(5, 4, seed=2)
        dist.all_gather([out[0], out[2], out[3], out[4]], x[5])
        return x, whole, out

    assert len(check_both_ways(program)) == 3


def test_views_of_a_buffer_see_what_is_written():
    def program():
        x = numbers(4, 3)
        row, turned = x[1], x.t()
        dist.all_reduce(x)
        y = numbers(3, 4)
        other = y.t()
        dist.broadcast(y.t(), 2)
        return row, turned, y, other

    assert check_both_ways(program)[0]._partition.uniform


def test_buffers_without_one_order_in_memory_are_written_where_they_lie():
    def program():
        x, out = numbers(4, 2), torch.zeros(8, 4)[:, ::2]
        dist.all_gather_into_tensor(torch.zeros(16, 2), x)
        y = numbers(3, 5).t()
        dist.all_reduce(y)
        return y, out

    assert check_both_ways(program)[0].stride() == (1, 5)


def test_a_tensor_from_outside_is_written_if_all_ranks_agree():
    outside, other = torch.ones(3), torch.ones(3)
    with LocalTensorMode(4):
        dist.all_reduce(outside)
        with pytest.raises(errors.OutsideWrite, match="the tensor written"):
            dist.all_reduce(other, group=dist.new_group([0, 1]))
        with pytest.raises(errors.OutsideWrite):
            dist.reduce_scatter_tensor(other, numbers(12))
        with pytest.raises(errors.OutsideWrite):
            dist.reduce_scatter_tensor(other[:3], numbers(12))
    assert outside.tolist() == [4, 4, 4] and other.tolist() == [1, 1, 1]


def test_who_is_in_no_group_keeps_what_it_had():
    with LocalTensorMode(4):
        group = dist.new_group([1, 3])
        x, out = numbers(2), numbers(4, seed=1)
        before, kept = x.clone(), out.clone()
        dist.all_reduce(x, group=group)
        dist.all_gather_into_tensor(out, before, group=group)
        for rank in (0, 2):
            assert torch.equal(x.on(rank), before.on(rank)) and torch.equal(out.on(rank), kept.on(rank))
        assert torch.equal(x.on(1), before.on(1) + before.on(3)) and x._partition.rows == 3
        assert torch.equal(out.on(3), torch.cat([before.on(1), before.on(3)]))


def test_a_tensor_that_members_do_not_hold_is_refused():
    with LocalTensorMode(4):
        part = tensor_map(numbers(2), lambda rank, x: x if rank < 3 else None)
        with pytest.raises(
            errors.NotHeld, match=r"all_reduce: ranks: rank 3: no value is held there, only on ranks 0, 1, 2"
        ):
            dist.all_reduce(part)
        dist.all_reduce(part, group=dist.new_group([0, 2]))
        assert part.ranks == (0, 1, 2) and torch.equal(part.on(0), numbers(2).on(0) + numbers(2).on(2))
        with pytest.raises(errors.NotHeld, match="rank 3"):
            dist.all_gather_into_tensor(tensor_map(numbers(8), lambda rank, x: x if rank < 3 else None), numbers(2))


def uneven():
    return rank_map(lambda rank: torch.ones(rank + 1))


REFUSED = {
    "uneven": (errors.ShapesDiffer, lambda: dist.all_reduce(uneven())),
    "uneven, functional": (errors.ShapesDiffer, lambda: fc.all_reduce(uneven(), "sum", dist.group.WORLD)),
    "uneven lists": (errors.ShapesDiffer, lambda: dist.all_gather([torch.ones(2)] * 4, uneven())),
    "indivisible": (errors.UnevenDim, lambda: dist.reduce_scatter_tensor(torch.ones(2), torch.ones(7))),
    "scalar": (errors.ScalarTensor, lambda: torch.ops._dtensor.shard_dim_alltoall(torch.ones(()), 0, 0, dist.group.WORLD.group_name)),
    "dtype": (errors.DtypeNotCarried, lambda: dist.all_reduce(torch.ones(2, dtype=torch.int16))),
    "dtype, functional": (errors.DtypeNotCarried, lambda: fc.all_reduce(torch.ones(2, dtype=torch.int16), "sum", dist.group.WORLD)),
    "no average": (errors.DtypeNotReducible, lambda: dist.all_reduce(torch.ones(2, dtype=torch.int32), ReduceOp.AVG)),
    "gaps": (errors.NotContiguous, lambda: dist.all_reduce(numbers(4, 4)[:, 1])),
    "turned": (errors.NotContiguous, lambda: dist.all_to_all_single(torch.zeros(4, 4), numbers(4, 4).t())),
    "complex": (errors.ComplexNotGathered, lambda: dist.gather(numbers(2, dtype=torch.complex64), [numbers(2)] * 4, 0)),
    "root": ((errors.RankOutside, ValueError), lambda: dist.broadcast(torch.ones(2), 7)),
    "length": (errors.WrongListLength, lambda: dist.all_gather([torch.ones(2)] * 3, torch.ones(2))),
    "size": (errors.CollectiveFailed, lambda: dist.all_gather_into_tensor(torch.ones(9), torch.ones(2))),
    "size on a rank": (errors.CollectiveFailed, lambda: dist.all_gather([rank_map(lambda r: torch.ones(2 + (r == 3)))] * 4, torch.ones(2))),
    "another mode's group": (errors.BadGroup, lambda: dist.all_reduce(torch.ones(2), group=ELSEWHERE[0])),
    "a group's name": (errors.BadGroup, lambda: torch.ops._c10d_functional.all_reduce(torch.ones(2), "sum", "nobody")),
}  # fmt: skip
ELSEWHERE = []


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name):
    with LocalTensorMode(4):
        ELSEWHERE[:] = [dist.new_group([0, 1])]
    kind, call = REFUSED[name]
    with LocalTensorMode(4):
        with pytest.raises(kind) as caught:
            call()
        x = torch.ones(2)
        dist.all_reduce(x)  # nothing is broken
        assert x.reconcile().tolist() == [4, 4]
    assert isinstance(caught.value, errors.LocalTensorError | ValueError) and len(str(caught.value)) > 30


def test_the_words_for_a_buffer_of_the_wrong_size():
    with LocalTensorMode(2), pytest.raises(errors.CollectiveFailed) as caught:
        dist.all_gather_into_tensor(torch.ones(3), torch.ones(2))
    assert "rank 0 offers a buffer of shape (3,) of torch.float32 for a result of shape (4,) of torch.float32" in str(
        caught.value
    )


def test_a_collective_does_not_touch_version_counters():
    with LocalTensorMode(2):
        x = numbers(4)
        before = x._version
        dist.all_reduce(x)
        assert x._version == before


def test_a_call_is_checked_once_and_each_other_call_by_itself(monkeypatch):
    seen, check = [], collectives.check_rank_arguments
    monkeypatch.setattr(collectives, "check_rank_arguments", lambda *args: seen.append(args[0]) or check(*args))
    monkeypatch.setattr(collectives, "_checked", {})
    plain, gaps = torch.ones(4, 6), torch.ones(4, 12)[:, ::2]
    with LocalTensorMode(3):
        wide, group = torch.ones(4, 6), dist.new_group([0, 1, 2])
        for _ in range(3):
            dist.all_reduce(torch.ones(4, 6))
        assert seen == ["all_reduce"]
        dist.all_reduce(torch.ones(4, 6), group=group)
        dist.broadcast(wide, 2)
        dist.all_reduce(plain)
        for refused, call in {
            ".contiguous": lambda: dist.all_reduce(gaps),
            "uint16": lambda: dist.all_reduce(torch.ones(4, 6, dtype=torch.uint16)),
            "band": lambda: dist.all_reduce(torch.ones(4, 6), op=dist.ReduceOp.BAND),
            "contiguous": lambda: dist.all_reduce(torch.ones(4, 12)[:, ::2]),
            "root": lambda: dist.broadcast(wide, 3),
        }.items():
            for _ in range(2):  # what was refused is refused again
                with pytest.raises((errors.LocalTensorError, ValueError), match=refused):
                    call()
        rows = rank_map(lambda rank: torch.ones(4, 6, dtype=torch.float32) * rank)
        dist.all_reduce(rows)
        before = len(seen)
        dist.all_reduce(rows * rank_map(torch.tensor))
        assert len(seen) == before


def calls_of_ours(run):
    """The functions of this package that a call enters."""
    names = []

    def note(frame, event, _):
        if event == "call" and is_of_ours(frame.f_code):
            names.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return names


@pytest.mark.parametrize(
    ("name", "most"),
    [("broadcast", 25), ("all_gather_into_tensor", 24), ("reduce_scatter_tensor", 32), ("all_to_all_single", 30),
     ("all_reduce", 31), ("all_gather", 38)],
)  # fmt: skip
def test_a_collective_that_comes_again_enters_few_functions(name, most):
    ranks = 4 if name == "all_gather" else 16  # it writes a tensor for each rank
    with LocalTensorMode(ranks):
        rows = rank_map(lambda rank: torch.arange(16.0) + rank)
        other, whole, each, out = (
            torch.empty(16),
            torch.empty(16 * ranks),
            torch.empty(16 // ranks),
            [torch.empty(16) for _ in range(ranks)],
        )
        run = {
            "broadcast": lambda x: dist.broadcast(x, 1),
            "all_reduce": dist.all_reduce,
            "all_gather": lambda x: dist.all_gather(out, x),
            "all_gather_into_tensor": lambda x: dist.all_gather_into_tensor(whole, x),
            "reduce_scatter_tensor": lambda x: dist.reduce_scatter_tensor(each, x),
            "all_to_all_single": lambda x: dist.all_to_all_single(other, x),
        }[name]
        for _ in range(2):
            run(rows.clone())
        x = rows.clone()
        entered = calls_of_ours(lambda: run(x))
    assert len(entered) <= most, entered
