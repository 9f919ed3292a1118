"""Strided shards and shard orders, held to torch's own on rank threads.

| torch part (under torch.distributed.tensor)                      | run on |
|------------------------------------------------------------------|--------|
| _redistribute.redistribute_local_tensor                          | 2.13   |
| placement_types._StridedShard, as `localtensor.layout.spec` has it | 2.13   |
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor._redistribute import redistribute_local_tensor

from localtensor.errors import OtherRows
from localtensor.layout.mesh import Mesh
from localtensor.layout.shard_order import lies_alike, ordered, strided
from localtensor.layout.shards import assemble, split
from localtensor.layout.spec import Spec, parse
from localtensor.testing import draws
from strategies.torch_api.specs import to_torch

GRID = Mesh.of(3, 2)
Cut = draws.specs(
    mesh=GRID, dtype=torch.int64, kinds=("R", "S", "SS"), orders=True, min_dims=1, max_dims=2, max_size=13
)
Ordered = draws.specs(mesh=GRID, dtype=torch.int64, kinds=("R", "S"), orders=True, min_dims=1, max_dims=2, max_size=13)
Anything = draws.specs(kinds=("R", "S", "SS"), orders=True, dtype=torch.int64, max_axes=4, max_ranks=16)


def numbers(spec):
    return torch.arange(torch.Size(spec.shape).numel()).reshape(spec.shape)


def alike(one, other):
    return one.shape == other.shape and torch.equal(one, other)


@given(Anything)
def test_assembling_the_pieces_of_any_order_gives_the_whole(spec):
    x = numbers(spec)
    assert alike(assemble(split(x, spec), spec), x)


@given(Anything)
def test_a_spec_in_another_form_cuts_the_same_pieces(spec):
    x = numbers(spec)
    for write in (ordered, strided):
        try:
            made = write(spec)
        except OtherRows:
            continue
        assert lies_alike(made, spec)
        assert all(map(alike, split(x, made), split(x, spec)))


@pytest.mark.mesh((3, 2))
@given(spec=Cut)
def test_torch_distributes_strided_shards_from_left_to_right(spec, rank, mesh):
    plain = Spec(GRID, spec.placements, spec.shape, spec.dtype)
    x = numbers(spec)
    # From its own copy: with a source rank torch 2.13 refuses strided shards of uneven pieces.
    local = distribute_tensor(x, mesh, plain.placements, src_data_rank=None).to_local()
    assert alike(local, split(x, plain)[rank])


@pytest.mark.mesh((3, 2))
@given(data=st.data(), spec=Ordered)
def test_torch_cuts_in_the_order_of_a_spec_and_puts_it_together_again(data, spec, rank, mesh):
    x, whole = numbers(spec), Spec(GRID, (parse("R"),) * 2, spec.shape, spec.dtype)
    there, back = to_torch(spec, mesh), to_torch(whole, mesh)
    local = redistribute_local_tensor(x.clone(), back, there)
    assert alike(local, split(x, spec)[rank])
    assert alike(redistribute_local_tensor(local, there, back), x)
