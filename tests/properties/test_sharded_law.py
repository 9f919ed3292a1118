"""DTensor on rank threads, held to what is drawn: whole tensors, the pieces of each rank, and layouts.

Each example runs on all ranks.  CI draws the same few each time; `--hypothesis-profile=nightly` draws many others.
"""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, distribute_tensor

from localtensor.layout.mesh import Mesh
from localtensor.layout.reductions import GLOO_DTYPES
from localtensor.testing import draws
from localtensor.testing.hypothesis_strategies.draws import Sharded

GRID = Mesh.of(2, 2)
CARRIED_DTYPES = tuple(dtype for dtype in draws.DTYPES if dtype in GLOO_DTYPES and not dtype.is_complex)
OnGrid = draws.sharded(mesh=GRID, dtypes=CARRIED_DTYPES, min_dims=1)
CutOnGrid = draws.sharded(mesh=GRID, dtypes=CARRIED_DTYPES, kinds=("R", "S"), min_dims=1)
SummedByFour = draws.sharded(mesh=Mesh.of(4), dtypes=CARRIED_DTYPES, kinds=("P",))


def held(x: Sharded, rank: int, mesh: DeviceMesh) -> DTensor:
    """The drawn value, of which this rank brings its piece."""
    whole = x.whole
    return DTensor.from_local(x.pieces[rank], mesh, x.spec.placements, shape=whole.shape, stride=whole.stride())


def alike(one: Tensor, other: Tensor) -> bool:
    return one.dtype is other.dtype and torch.equal(one, other)


@pytest.mark.mesh((2, 2))
@given(x=OnGrid)
def test_the_pieces_of_all_ranks_are_the_whole(x, rank, mesh):
    assert alike(held(x, rank, mesh).full_tensor(), x.whole)


@pytest.mark.mesh((2, 2))
@given(x=CutOnGrid)
def test_a_rank_gets_the_piece_that_the_draws_cut_for_it(x, rank, mesh):
    assert alike(distribute_tensor(x.whole, mesh, x.spec.placements).to_local(), x.pieces[rank])


@pytest.mark.mesh((2, 2))
@given(data=st.data(), x=OnGrid)
def test_a_value_that_moves_is_the_same_value(data, x, rank, mesh):
    wanted = data.draw(draws.layouts(GRID, x.whole.shape, x.whole.dtype, kinds=("R", "S")), label="to")
    moved = held(x, rank, mesh).redistribute(mesh, wanted)
    assert alike(moved.to_local(), distribute_tensor(x.whole, mesh, wanted).to_local())
    assert alike(moved.full_tensor(), x.whole)


@pytest.mark.ranks(4, schedule="shuffled:3")
@given(x=SummedByFour, root=st.integers(0, 3))
def test_a_reduction_gives_the_whole_in_whatever_order_the_ranks_arrive(x, root, rank, comms):
    [partial] = x.spec.placements
    assert isinstance(partial, Partial)
    mine = x.pieces[rank]
    ours = mine.clone()
    op = getattr(dist.ReduceOp, partial.reduce_op.upper())
    dist.all_reduce(ours, op)
    dist.reduce(mine, root, op)
    assert alike(ours, x.whole)
    assert rank != root or alike(mine, x.whole)
    assert comms.kinds == ["all_reduce", "reduce"]
