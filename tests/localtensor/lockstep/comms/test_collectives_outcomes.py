"""The quick ways against the ways of rank threads, for every kind of collective."""

import pytest
import torch

from localtensor.collectives.c10d_table import COLLECTIVE_OPS, CallArguments
from localtensor.lockstep.comms import c10d_kernels, collectives
from localtensor.lockstep.comms.collectives import StackedValue
from localtensor.lockstep.comms.stacked_collectives import family_of_lists
from localtensor.lockstep.dispatch.dispatcher import plain_dispatch
from localtensor.lockstep.mode import LocalTensorMode
from localtensor.lockstep.values.partition import every_rank_alone, everyone
from tests.localtensor.both_ways import numbers, same

PAIRS = family_of_lists([[0, 3], [2, 1]], 4)


def brought(kind):
    x, lists = numbers(4, 3), [numbers(2, 3, seed=i) for i in range(2)]
    reads = lists if kind in ("scatter", "reduce_scatter", "all_to_all") or "coalesced" in kind else x
    many = {"all_gather": 2, "gather": 2, "all_to_all": 2, "all_gather_coalesced": 4}
    writes = [x] * many.get(kind, 2 if "coalesced" in kind else 1)
    rooted = kind in ("reduce", "broadcast", "gather", "scatter")
    return CallArguments(reads, writes, op="max" if "reduce" in kind else None, root=1 if rooted else None)


QUICK = [served for served in COLLECTIVE_OPS.values() if served.kind in c10d_kernels._KERNELS]


@pytest.mark.parametrize("served", QUICK, ids=lambda served: served.kind)
def test_both_ways_give_the_same(served):
    with LocalTensorMode(4) as mode:
        given = brought(served.kind)
        with plain_dispatch():
            quick = c10d_kernels._KERNELS[served.kind](mode, given, PAIRS)
            slow = c10d_kernels.run_rank_by_rank(mode, served, given, PAIRS)
    assert quick is not None and len(quick) == len(slow) > 0
    for one, other in zip(quick, slow, strict=True):
        assert (one.held.row_of >= 0).tolist() == (other.held.row_of >= 0).tolist()
        for rank in range(4):
            if one.held.row_of[rank] >= 0:
                assert one.on(rank).reshape(-1).tolist() == other.on(rank).reshape(-1).tolist()


def test_every_kind_but_barriers_has_a_quick_way():
    assert {served.kind for served in COLLECTIVE_OPS.values()} - set(c10d_kernels._KERNELS) == {
        "barrier",
        "monitored_barrier",
    }


def test_joined_rows_and_moved_dims():
    x = StackedValue((torch.randn(4, 2, 3, 5),), every_rank_alone(4))
    assert same(collectives.merge_rows(x, 1).on(2), x.on(2).movedim(0, 1).reshape(3, 10))
    assert same(collectives.move_dim(x, 2, 0).on(1), x.on(1).movedim(2, 0))
    scalars = StackedValue((torch.arange(4.0),), everyone(4))
    assert same(collectives.merge_rows(scalars).on(0), torch.arange(4.0))
    assert [piece.on(3).item() for piece in collectives.unbind_value(scalars, 4)] == [0, 1, 2, 3]
