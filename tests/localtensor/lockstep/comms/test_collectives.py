"""Values with a partition: what comes out, in how many rows, and that it is fresh.  The quick ways against the ways
of rank threads, for every kind of collective."""

import numpy as np
import pytest
import torch

from localtensor.collectives import reference
from localtensor.collectives.c10d_table import COLLECTIVE_OPS, CallArguments
from localtensor.errors import NotHeld, ShapesDiffer
from localtensor.lockstep.comms import c10d_kernels, collectives, stacked_collectives
from localtensor.lockstep.comms.collectives import StackedValue
from localtensor.lockstep.comms.stacked_collectives import family_of_lists
from localtensor.lockstep.dispatch.dispatcher import plain_dispatch
from localtensor.lockstep.mode import LocalTensorMode
from localtensor.lockstep.values.partition import by_value, every_rank_alone, everyone, partition
from tests.localtensor.both_ways import numbers, same

PAIRS = family_of_lists([[0, 2], [1, 3]], 4)
SOME = family_of_lists([[3, 1]], 4)


def alone(*shape):
    return StackedValue((torch.randn(4, *shape),), every_rank_alone(4))


def test_each_group_has_its_sum_once():
    x = alone(3)
    y = collectives.all_reduce(x, PAIRS, "sum")
    assert y.held.rows == 2 and len(y.cells) == 1
    assert all(torch.equal(y.on(r), x.on(r % 2) + x.on(r % 2 + 2)) for r in range(4))


def test_equal_operands_give_one_row_for_all_groups(monkeypatch):
    monkeypatch.setattr(collectives, "group_by_group", None)
    x = StackedValue((torch.randn(2, 3),), partition([0, 0, 1, 1], [2]))
    assert collectives.all_reduce(x, PAIRS, "sum").held is everyone(4)
    assert collectives.all_gather(x, PAIRS).held is everyone(4)
    assert collectives.broadcast(x, PAIRS, 1).held is everyone(4)


def test_who_is_in_no_group_keeps_its_rows_and_others_go():
    x = alone(2)
    y = collectives.all_reduce(x, SOME, "sum")
    assert y.held.rows == 3 and torch.equal(y.on(0), x.on(0)) and torch.equal(y.on(1), x.on(3) + x.on(1))
    assert collectives.all_gather(x, SOME).held.row_of.tolist() == [-1, 0, -1, 0]
    assert collectives.gather(x, SOME, root=1).held.row_of.tolist() == [-1, 0, -1, -1]


@pytest.mark.parametrize("whole", [PAIRS, SOME, family_of_lists([[2]], 4)])
@pytest.mark.parametrize("held", [everyone(4), every_rank_alone(4), by_value([1, 2, 1, 2])])
def test_results_share_memory_with_nothing(whole, held, monkeypatch):
    monkeypatch.setattr(collectives, "group_by_group", None)  # all of them are computed on stacks
    shape = (held.rows, 4, 4)
    cells = (torch.randn(shape),) if len(held.sizes) == 1 and held.rows > 1 else tuple(torch.randn(shape).unbind())
    x = StackedValue(cells, held)
    found = [
        collectives.all_reduce(x, whole, "max"), collectives.reduce(x, whole, "sum", 0),
        collectives.broadcast(x, whole, root=0), collectives.all_gather(x, whole),
        collectives.reduce_scatter(x, whole, "sum"), collectives.all_to_all_single(x, whole),
        collectives.shard_dim_alltoall(x, whole, 0, 1), collectives.permute(x, whole, [0] if whole.matrix.shape[1] == 1 else [1, 0]),
    ]  # fmt: skip
    brought = {cell.untyped_storage().data_ptr() for cell in cells}
    assert not any(cell.untyped_storage().data_ptr() in brought for value in found for cell in value.cells)
    assert all(cell.is_contiguous() for value in found for cell in value.cells)


def test_what_ranks_outside_of_all_groups_keep_is_a_copy_too():
    x = StackedValue((torch.randn(2, 3), torch.randn(2, 5)), partition([0, 1, 2, 3], [2, 2]))
    y = collectives.broadcast(x, family_of_lists([[2, 3]], 4), root=0)
    brought = {cell.untyped_storage().data_ptr() for cell in x.cells}
    assert torch.equal(y.on(0), x.on(0)) and torch.equal(y.on(3), x.on(2)) and len(y.cells) == 2
    assert not any(cell.untyped_storage().data_ptr() in brought for cell in y.cells)


def test_two_shapes_in_two_groups_and_within_one():
    x = StackedValue((torch.ones(2, 3), torch.ones(2, 5)), partition([0, 2, 1, 3], [2, 2]))
    y = collectives.all_reduce(x, PAIRS, "sum")
    assert y.on(0).tolist() == [2] * 3 and y.on(3).tolist() == [2] * 5
    with pytest.raises(ShapesDiffer):
        collectives.all_reduce(x, family_of_lists([[0, 1]], 4), "sum")


def test_groups_of_two_sizes_are_served_together():
    x = alone(2)
    y = collectives.all_gather(x, family_of_lists([[0, 1, 2], [3]], 4))
    assert y.on(1).shape == (3, 2) and torch.equal(y.on(3), x.on(3)[None])


def test_a_member_without_a_value_is_named():
    x = StackedValue((torch.ones(2),), by_value([0] * 4, [True, True, True, False]))
    with pytest.raises(NotHeld, match=r"^all_reduce: ranks: rank 3: no value is held there, only on ranks 0, 1, 2\. "):
        collectives.all_reduce(x, PAIRS, "sum")
    assert collectives.all_reduce(x, family_of_lists([[0, 2]], 4), "sum").on(0).tolist() == [2, 2]


@pytest.mark.parametrize("shape", [(), (3,)])
def test_what_does_not_divide_is_left_to_the_plain_function(shape, monkeypatch):
    x, asked = alone(*shape), []
    plain = lambda held, **op: asked.append([each.shape for each in held]) or held  # noqa: E731
    for name in ("reduce_scatter_tensor", "all_to_all_single"):
        monkeypatch.setattr(reference, name, plain)
    collectives.reduce_scatter(x, PAIRS, "sum")
    collectives.all_to_all_single(x, PAIRS)
    assert asked == [[shape] * 2] * 4


def test_combined_takes_only_rows_that_are_read():
    x, y = alone(2), StackedValue((torch.zeros(2),), everyone(4))
    z = collectives.select([x, y], np.array([0, 1, -1, 1]), np.array([3, 0, 0, 0]))
    assert z.held.rows == 2 and torch.equal(z.on(0), x.on(3)) and z.held.row_of[2] == -1
    assert torch.equal(collectives.scatter_from_roots([x, y], PAIRS, 1).on(0), x.on(2))


def test_a_recipe_is_worked_out_once():
    x = alone(2)
    collectives.all_reduce(x, PAIRS, "sum")
    before = stacked_collectives.collective_plan.cache_info().misses
    collectives.all_reduce(x, PAIRS, "max")
    assert stacked_collectives.collective_plan.cache_info().misses == before


def test_strides_that_differ_do_not_make_it_slow(monkeypatch):
    """Short shards that were padded have other strides on dims of size one: still one stack, and one pass."""
    monkeypatch.setattr(collectives, "group_by_group", None)
    whole = partition([0, 1, 2, 2], [2, 1])
    cells = (torch.arange(4.0).reshape(2, 1, 2), torch.empty_strided((1, 2), (7, 1)).copy_(torch.tensor([[4.0, 5.0]])))
    one = family_of_lists([[0, 1, 2, 3]], 4)
    gathered = collectives.all_gather(StackedValue(cells, whole), one)
    assert gathered.held.rows == 1
    assert gathered.cells[0].flatten().tolist() == [0, 1, 2, 3, 4, 5, 4, 5]


CROSSED_PAIRS = family_of_lists([[0, 3], [2, 1]], 4)


def brought(kind):
    x, lists = numbers(4, 3), [numbers(2, 3, seed=i) for i in range(2)]
    reads = lists if kind in ("scatter", "reduce_scatter", "all_to_all") or "coalesced" in kind else x
    many = {"all_gather": 2, "gather": 2, "all_to_all": 2, "all_gather_coalesced": 4}
    writes = [x] * many.get(kind, 2 if "coalesced" in kind else 1)
    rooted = kind in ("reduce", "broadcast", "gather", "scatter")
    return CallArguments(reads, writes, op="max" if "reduce" in kind else None, root=1 if rooted else None)


QUICK_KINDS = {*c10d_kernels._OF_EACH_TENSOR, *c10d_kernels._KERNELS}
QUICK = [served for served in COLLECTIVE_OPS.values() if served.kind in QUICK_KINDS]


@pytest.mark.parametrize("served", QUICK, ids=lambda served: served.kind)
def test_both_ways_give_the_same(served, monkeypatch):
    with LocalTensorMode(4) as mode:
        given = brought(served.kind)
        with plain_dispatch():
            slow = c10d_kernels.run_rank_by_rank(mode, served, given, CROSSED_PAIRS)
            monkeypatch.setattr(c10d_kernels, "run_rank_by_rank", None)  # it is not called
            quick = c10d_kernels.run_kernel(mode, served, given, CROSSED_PAIRS)
    assert len(quick) == len(slow) > 0
    for one, other in zip(quick, slow, strict=True):
        assert (one.held.row_of >= 0).tolist() == (other.held.row_of >= 0).tolist()
        for rank in range(4):
            if one.held.row_of[rank] >= 0:
                assert one.on(rank).reshape(-1).tolist() == other.on(rank).reshape(-1).tolist()


def test_every_kind_but_barriers_has_a_quick_way():
    assert {served.kind for served in COLLECTIVE_OPS.values()} - QUICK_KINDS == {
        "barrier",
        "monitored_barrier",
    }


def test_joined_rows_and_moved_dims():
    x = StackedValue((torch.randn(4, 2, 3, 5),), every_rank_alone(4))
    assert same(collectives.merge_rows(x, 1).on(2), x.on(2).movedim(0, 1).reshape(3, 10))
    assert same(collectives.move_dim(x, 2, 0).on(1), x.on(1).movedim(2, 0))
    scalars = StackedValue((torch.arange(4.0),), everyone(4))
    assert same(collectives.merge_rows(scalars).on(0), torch.arange(4.0))
    assert [piece.on(3).item() for piece in collectives.unbind_value(scalars)] == [0, 1, 2, 3]
