import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard

from localtensor.errors import BadPlacement, NoSuchDim, WrongPieces, WrongShape
from localtensor.layout.mesh import Mesh
from localtensor.layout.shards import (
    assemble,
    assemble_axis,
    chunk_bounds,
    local_length,
    local_shape,
    local_shapes,
    local_shapes_on,
    split,
    split_axis,
    split_by_axes,
    strided_chunk_bounds,
)
from localtensor.layout.spec import PARTIAL_KINDS, Spec, StridedShard, parse


@given(size=st.integers(0, 40), ranks=st.integers(1, 9))
def test_pieces_are_those_of_torch_chunk_with_empty_ones_added(size, ranks):
    pieces = torch.arange(size).chunk(ranks)
    lengths = [len(p) for p in pieces] if size else [0]
    lengths += [0] * (ranks - len(lengths))
    assert [length for _, length in chunk_bounds(size, ranks)] == lengths


@given(
    rows=st.integers(0, 7),
    cols=st.integers(1, 5),
    sizes=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    data=st.data(),
)
def test_assembling_the_split_is_the_identity(rows, cols, sizes, data):
    strided = [StridedShard(dim, split_factor=factor) for dim in (0, 1) for factor in (1, 2, 3, 5)]
    choices = [Replicate(), Shard(0), Shard(1), *(Partial(k) for k in PARTIAL_KINDS), *strided]
    placements = tuple(data.draw(st.sampled_from(choices)) for _ in sizes)
    dtype = data.draw(st.sampled_from([torch.float64, torch.int64]))
    x = torch.randint(-9, 9, (rows, cols)).to(dtype)
    plain = Spec(Mesh.of(*sizes), placements, (rows, cols), dtype)
    orders = tuple((dim, tuple(data.draw(st.permutations(plain.cut_by(dim))))) for dim in (0, 1) if plain.cut_by(dim))
    spec = Spec(plain.mesh, placements, plain.shape, dtype, orders)
    rng = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    pieces = split(x, spec, rng)
    assert [tuple(p.shape) for p in pieces] == local_shapes(spec)
    torch.testing.assert_close(assemble(pieces, spec).to(dtype), x, atol=1e-9, rtol=1e-9)


def test_axes_apply_from_left_to_right():
    spec = Spec(Mesh.of(2, 2), (Shard(0), Shard(0)), (6,), torch.int64)
    assert [p.tolist() for p in split(torch.arange(6), spec)] == [[0, 1], [2], [3, 4], [5]]


def test_axes_apply_in_the_order_of_the_spec():
    spec = Spec(Mesh.of(2, 2), (Shard(0), Shard(0)), (5,), torch.int64, ((0, (1, 0)),))
    assert [p.tolist() for p in split(torch.arange(5), spec)] == [[0, 1], [3], [2], [4]]
    assert local_shapes(spec) == [(2,), (1,), (1,), (1,)]


@given(st.permutations(range(3)), st.tuples(*[st.integers(1, 3)] * 3), st.integers(0, 20))
def test_an_order_is_that_of_a_mesh_whose_axes_are_turned(order, sizes, rows):
    spec = Spec(Mesh.of(*sizes), (Shard(0),) * 3, (rows,), torch.int64, ((0, tuple(order)),))
    turned = Spec(Mesh.of(*(sizes[axis] for axis in order)), (Shard(0),) * 3, (rows,), torch.int64)
    ranks = torch.arange(spec.mesh.ranks).reshape(sizes).permute(order).flatten().tolist()
    other = dict(zip(ranks, split(torch.arange(rows), turned), strict=True))
    assert [p.tolist() for p in split(torch.arange(rows), spec)] == [other[rank].tolist() for rank in range(len(ranks))]


@given(size=st.integers(0, 40), factor=st.integers(1, 9), ranks=st.integers(1, 9))
def test_the_length_of_a_piece_is_that_of_its_chunks(size, factor, ranks):
    blocks = strided_chunk_bounds(size, factor, ranks)
    for rank in range(ranks):
        assert local_length(size, factor, ranks, rank) == sum(block[rank][1] for block in blocks)


@given(size=st.integers(0, 40), factor=st.integers(1, 9), ranks=st.integers(1, 9))
def test_strided_shards_are_those_of_torch_and_make_the_whole_again(size, factor, ranks):
    """Torch's own cut is `_StridedShard._split_tensor`."""
    strided, x = StridedShard(1, split_factor=factor), torch.arange(2 * size).reshape(2, size)
    ours = split_axis(x, strided, ranks)
    theirs, _ = strided._split_tensor(x, ranks, with_padding=False, contiguous=False)
    assert [piece.tolist() for piece in ours] == [piece.tolist() for piece in theirs]
    assert [local_shape((2, size), strided, ranks, rank) for rank in range(ranks)] == [tuple(p.shape) for p in ours]
    assert torch.equal(assemble_axis(ours, strided), x)


@pytest.mark.parametrize("order", [(1, 2, 0), (2, 0, 1), (2, 1, 0)])
def test_pieces_cut_in_an_order_that_is_not_its_own_inverse_make_the_whole_again(order):
    spec = Spec(Mesh.of(2, 3, 2), (Shard(0),) * 3, (25,), torch.int64, ((0, order),))
    assert torch.equal(assemble(split(torch.arange(25), spec), spec), torch.arange(25))


def test_a_rank_of_a_strided_shard_holds_its_chunk_of_every_block():
    def held(size, factor, ranks):
        return [p.tolist() for p in split_axis(torch.arange(size), StridedShard(0, split_factor=factor), ranks)]

    assert held(8, 2, 2) == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert held(7, 2, 3) == [[0, 1, 4], [2, 3, 5], [6]]  # the blocks are 0 to 3 and 4 to 6
    assert held(2, 3, 2) == [[0, 1], []]  # of three blocks the last is empty, and so is rank 1
    assert held(0, 2, 2) == [[], []]


def test_a_strided_shard_of_what_another_axis_has_left():
    placements = (parse("SS(0,2)"), Shard(0))
    spec = Spec(Mesh.of(3, 2), placements, (7,), torch.int64)
    pieces = split(torch.arange(7), spec)
    assert [p.tolist() for p in pieces] == [[0, 1], [4], [2, 3], [5], [6], []]
    assert local_shapes_on((7,), placements, (3, 2)) == local_shapes(spec) == [(2,), (1,), (2,), (1,), (1,), (0,)]
    assert torch.equal(assemble(pieces, spec), torch.arange(7))


def test_replicas_of_partial_values_are_replicas():
    spec = Spec(Mesh.of(2, 2), (Replicate(), Partial("sum")), (6,), torch.float64)
    pieces = split(torch.arange(6.0).double(), spec, torch.Generator().manual_seed(0))
    assert torch.equal(pieces[0], pieces[2]) and torch.equal(pieces[1], pieces[3])
    assert not torch.equal(pieces[0], pieces[1])


def test_replicas_are_cut_once():
    cut = []

    def deal(x, placement, ranks):
        cut.append(x.tolist())
        return split_axis(x, placement, ranks)

    held = split_by_axes(torch.arange(4), (Replicate(), Shard(0), Shard(0)), (2, 2, 2), deal)
    assert [x.tolist() for x in held] == [[0], [1], [2], [3]] * 2
    assert cut == [[0, 1, 2, 3], [0, 1, 2, 3], [0, 1], [2, 3]]


def test_what_has_no_definition_here_is_refused():
    class Odd(Partial):
        pass

    for placement in (Odd("sum"), StridedShard(0, split_factor=0)):
        with pytest.raises(BadPlacement, match=r"only R, S\(dim\), SS\(dim,factor\) and the five P have a definition"):
            split_axis(torch.arange(4), placement, 2, torch.Generator())
        with pytest.raises(BadPlacement, match="have a definition"):
            assemble_axis([torch.arange(2), torch.arange(2)], placement)


def test_a_piece_of_the_wrong_shape_is_refused():
    spec = Spec(Mesh.of(2), (Shard(0),), (5,), torch.int64)
    with pytest.raises(WrongPieces, match=r"^shards.assemble: pieces: pieces of shapes \[\(2,\), \(3,\)\]: the spec "
                       r"asks for \[\(3,\), \(2,\)\]. Give rank i the piece that split gives it.$"):  # fmt: skip
        assemble([torch.arange(2), torch.arange(3)], spec)
    for pieces in ([torch.arange(3)], [], [torch.arange(3), torch.arange(2)[None]]):
        with pytest.raises(WrongPieces, match=r"^shards.assemble: pieces: "):
            assemble(pieces, spec)
    strided = Spec(Mesh.of(2), (parse("SS(0,2)"),), (5,), torch.int64)
    with pytest.raises(WrongPieces, match=r"the spec asks for \[\(3,\), \(2,\)\]"):
        assemble([torch.arange(4), torch.arange(1)], strided)


def test_a_partial_without_a_generator_is_refused():
    spec = Spec(Mesh.of(2), (Partial("sum"),), (5,), torch.int64)
    with pytest.raises(BadPlacement, match=r"no generator says which. Pass rng=torch.Generator\(\).$"):
        split(torch.arange(5), spec)


def test_a_tensor_of_another_shape_than_the_specs_is_not_split():
    spec = Spec(Mesh.of(2), (Shard(0),), (5,), torch.int64)
    with pytest.raises(
        WrongShape, match=r"^shards.split: x: shape \(4,\): the spec is of shape \(5,\). Pass a tensor of"
    ):
        split(torch.arange(4), spec)


def test_of_many_pieces_a_few_are_shown_and_the_first_that_is_wrong_is_named():
    spec = Spec(Mesh.of(100), (Shard(0),), (200,), torch.int64)
    pieces = split(torch.arange(200), spec)
    pieces[42] = torch.arange(7)
    with pytest.raises(
        WrongPieces, match=r"\(2,\) and 92 more\], \(2,\) and not \(7,\) of rank 42. Give rank i"
    ) as caught:
        assemble(pieces, spec)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("ranks", "told"), [(8, "(1,)]. Give rank i"), (9, "and 1 more], (2,) and not (7,) of rank 4. Give rank i")]
)
def test_of_several_wrong_pieces_the_first_is_named_if_not_all_are_shown(ranks, told):
    spec = Spec(Mesh.of(ranks), (Shard(0),), (2 * ranks - 1,), torch.int64)
    pieces = split(torch.arange(2 * ranks - 1), spec)
    pieces[4], pieces[-1] = torch.arange(7), torch.arange(9)
    with pytest.raises(WrongPieces) as caught:
        assemble(pieces, spec)
    assert told in str(caught.value)


def test_a_dim_that_is_not_there_is_refused():
    with pytest.raises(NoSuchDim, match="a tensor of 1 dims has dims 0 to 0"):
        local_shape((5,), Shard(1), 2, 0)
    with pytest.raises(NoSuchDim, match="a tensor of 1 dims has dims 0 to 0"):
        split_axis(torch.arange(5), parse("SS(1,2)"), 2)
    with pytest.raises(NoSuchDim, match="dim=-1 of shape"):
        Spec(Mesh.of(2), (Shard(-1),), (5,), torch.int64)
