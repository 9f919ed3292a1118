import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard

from localtensor.errors import BadPlacement, NoSuchDim, WrongPieces
from localtensor.mesh import Mesh
from localtensor.placement import KINDS, Spec
from localtensor.shards import assemble, bounds, local_shape, local_shapes, split


@given(size=st.integers(0, 40), ranks=st.integers(1, 9))
def test_pieces_are_those_of_torch_chunk_with_empty_ones_added(size, ranks):
    pieces = torch.arange(size).chunk(ranks)
    lengths = [len(p) for p in pieces] if size else [0]
    lengths += [0] * (ranks - len(lengths))
    assert [length for _, length in bounds(size, ranks)] == lengths


@given(
    rows=st.integers(0, 7),
    cols=st.integers(1, 5),
    sizes=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    data=st.data(),
)
def test_assembling_the_split_is_the_identity(rows, cols, sizes, data):
    choices = [Replicate(), Shard(0), Shard(1), *(Partial(k) for k in KINDS)]
    placements = tuple(data.draw(st.sampled_from(choices)) for _ in sizes)
    dtype = data.draw(st.sampled_from([torch.float64, torch.int64]))
    x = torch.randint(-9, 9, (rows, cols)).to(dtype)
    spec = Spec(Mesh.of(*sizes), placements, (rows, cols), dtype)
    rng = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    pieces = split(x, spec, rng)
    assert [tuple(p.shape) for p in pieces] == local_shapes(spec)
    torch.testing.assert_close(assemble(pieces, spec).to(dtype), x, atol=1e-9, rtol=1e-9)


def test_axes_apply_from_left_to_right():
    spec = Spec(Mesh.of(2, 2), (Shard(0), Shard(0)), (6,), torch.int64)
    assert [p.tolist() for p in split(torch.arange(6), spec)] == [[0, 1], [2], [3, 4], [5]]


def test_a_piece_of_the_wrong_shape_is_refused():
    spec = Spec(Mesh.of(2), (Shard(0),), (5,), torch.int64)
    with pytest.raises(WrongPieces, match=r"^shards.assemble: pieces: pieces of shapes \[\(2,\), \(3,\)\]: the spec "
                       r"asks for \[\(3,\), \(2,\)\]. Give rank i the piece that split gives it.$"):  # fmt: skip
        assemble([torch.arange(2), torch.arange(3)], spec)


def test_a_partial_without_a_generator_is_refused():
    spec = Spec(Mesh.of(2), (Partial("sum"),), (5,), torch.int64)
    with pytest.raises(BadPlacement, match="a Partial needs a generator to split with"):
        split(torch.arange(5), spec)


def test_a_dim_that_is_not_there_is_refused():
    with pytest.raises(NoSuchDim, match="a tensor of 1 dims has dims 0 to 0"):
        local_shape((5,), Shard(1), 2, 0)
    with pytest.raises(NoSuchDim, match="dim=-1 of shape"):
        Spec(Mesh.of(2), (Shard(-1),), (5,), torch.int64)
