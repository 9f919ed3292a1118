"""Strided shards as shard orders and back: every rank holds what it held, and what cannot be is refused with the rank."""

import itertools
import math
import pickle

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from localtensor.errors import OtherRows
from localtensor.layout.mesh import Mesh
from localtensor.layout.shard_order import lies_alike, ordered, strided
from localtensor.layout.shards import split
from localtensor.layout.spec import Spec, StridedShard, parse

FACTORS = (1, 2, 3, 4, 6)


@st.composite
def specs(draw, like=None):
    """Plain and strided shards of one or two dims, uneven and empty, in any order; `like` another one's mesh and shape."""
    if like is None:
        sizes = tuple(draw(st.lists(st.sampled_from((1, 2, 3, 4)), min_size=1, max_size=3)))
        shape = tuple(draw(st.lists(st.sampled_from((0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 24)), min_size=1, max_size=2)))
        mesh = Mesh.of(*sizes)
    else:
        mesh, shape = like.mesh, like.shape
    dims = range(len(shape))
    some = [Replicate(), *map(Shard, dims), *(StridedShard(dim, split_factor=f) for dim in dims for f in FACTORS)]
    placements = tuple(draw(st.sampled_from(some)) for _ in mesh.sizes)
    plain = Spec(mesh, placements, shape, torch.int64)
    orders = tuple((dim, tuple(draw(st.permutations(plain.cut_by(dim))))) for dim in dims if plain.cut_by(dim))
    return Spec(mesh, placements, shape, torch.int64, orders)


def pieces(spec):
    x = torch.arange(math.prod(spec.shape)).reshape(spec.shape)
    return [(tuple(piece.shape), piece.flatten().tolist()) for piece in split(x, spec)]


def of(rows, *placements, mesh=(3, 2), order=(), dtype=torch.float32):
    return Spec(Mesh.of(*mesh), tuple(map(parse, placements)), (rows,), dtype, order)


@given(specs())
def test_a_spec_that_is_written_in_another_way_gives_every_rank_its_rows(spec):
    for write in (ordered, strided):
        try:
            made = write(spec)
        except OtherRows:
            continue
        assert pieces(made) == pieces(spec) and lies_alike(made, spec)
        assert (
            not made.shard_order if write is strided else not any(isinstance(p, StridedShard) for p in made.placements)
        )


@given(specs())
def test_strided_shards_are_refused_only_where_no_order_of_plain_ones_is_the_same(spec):
    try:
        ordered(spec)
    except OtherRows:
        dims = sorted({p.dim for p in spec.placements if isinstance(p, StridedShard)})
        cut = [axis for dim in dims for axis in spec.cut_by(dim)]
        plain = tuple(Shard(p.dim) if axis in cut else p for axis, p in enumerate(spec.placements))
        for order in itertools.product(*(itertools.permutations(spec.cut_by(dim)) for dim in dims)):
            kept = {dim: axes for dim, axes in spec.shard_order if dim not in dims}
            orders = tuple((kept | dict(zip(dims, order, strict=True))).items())
            assert pieces(Spec(spec.mesh, plain, spec.shape, spec.dtype, orders)) != pieces(spec)


@given(specs(), st.data())
def test_specs_lie_alike_if_and_only_if_every_rank_has_the_same_rows(spec, data):
    other = data.draw(specs(like=spec))
    assert lies_alike(spec, other) == lies_alike(other, spec) == (pieces(spec) == pieces(other))


@pytest.mark.parametrize("sizes", [(2, 3), (2, 2, 2), (2, 3, 2), (2, 2, 2, 2)], ids=str)
def test_every_order_of_even_pieces_is_written_strided_and_read_back(sizes):
    mesh, rows = Mesh.of(*sizes), 2 * math.prod(sizes)
    for order in itertools.permutations(range(len(sizes))):
        spec = Spec(mesh, (Shard(0),) * len(sizes), (rows, 2), torch.float32, ((0, order),))
        assert ordered(strided(spec)) == spec
        assert strided(ordered(strided(spec))) == strided(spec)


def test_what_is_plain_already_comes_back_as_it_is():
    plain, strided_spec = of(7, "S(0)", "R"), of(7, "SS(0,2)", "R")
    assert ordered(plain) is plain is strided(plain) and strided(strided_spec) is strided_spec


def test_the_order_of_uneven_pieces_is_refused_with_the_first_rank_that_would_hold_other_rows():
    with pytest.raises(OtherRows) as refused:
        ordered(of(7, "SS(0,2)", "S(0)"))
    assert str(refused.value) == (
        "orders.ordered: spec: f32[7] @ a:SS(0,2), b:S(0): rank 4 holds rows 6 of dim 0, and cut by b, a in this order "
        "it would hold no rows. Pad dim 0 to 12 rows, or keep the strided shards.")  # fmt: skip
    assert ordered(of(12, "SS(0,2)", "S(0)")) == of(12, "S(0)", "S(0)", order=((0, (1, 0)),))  # the remedy is one
    with pytest.raises(OtherRows) as refused:
        strided(of(7, "S(0)", "S(0)", order=((0, (1, 0)),)))
    assert str(refused.value) == (
        "orders.strided: spec: f32[7] @ a:S(0)[1], b:S(0)[0]: rank 4 holds no rows of dim 0, and in SS(0,2), S(0), read "
        "from left to right, it would hold rows 6. Pad dim 0 to 12 rows, or keep the shard order.")  # fmt: skip
    assert strided(of(12, "S(0)", "S(0)", order=((0, (1, 0)),))) == of(12, "SS(0,2)", "S(0)")


@pytest.mark.parametrize(("spec", "problem"), [
    (of(8, "SS(0,2)", "R"), "a:SS(0,2) stands alone on dim 0, and no order of one axis makes blocks"),
    (of(8, "SS(0,4)", "SS(0,4)"), "no order of the axes makes the blocks of a:SS(0,4), b:SS(0,4) on dim 0"),
    (of(12, "SS(0,3)", "S(0)"), "no order of the axes makes the blocks of a:SS(0,3), b:S(0) on dim 0"),
], ids=str)  # fmt: skip
def test_strided_shards_that_encode_no_order_are_refused(spec, problem):
    with pytest.raises(OtherRows) as refused:
        ordered(spec)
    assert str(refused.value) == f"orders.ordered: spec: {spec}: {problem}. Keep the strided shards."


def test_an_order_that_no_strided_shards_make_is_refused_without_a_remedy_that_does_not_help():
    spec = of(16, "S(0)", "SS(0,2)", mesh=(2, 2), order=((0, (1, 0)),))
    with pytest.raises(OtherRows, match=r"it would hold rows 0 to 1, 8 to 9\. Keep the shard order\.$"):
        strided(spec)


def test_strided_shards_in_an_order_are_written_in_more_blocks():
    spec = of(48, "SS(0,3)", "S(0)", mesh=(2, 4), order=((0, (1, 0)),))
    assert strided(spec) == of(48, "SS(0,12)", "S(0)", mesh=(2, 4))


def test_blocks_that_do_not_matter_are_no_obstacle():
    assert ordered(of(7, "SS(0,2)", "S(0)", mesh=(1, 2))) == of(7, "S(0)", "S(0)", mesh=(1, 2))
    assert ordered(of(1, "SS(0,4)", "R")) == of(1, "S(0)", "R") and ordered(of(0, "SS(0,4)", "R")) == of(0, "S(0)", "R")
    assert ordered(of(7, "SS(0,1)", "S(0)")) == of(7, "S(0)", "S(0)")


def test_rows_that_are_too_few_for_their_factors_are_written_in_an_order_all_the_same():
    few = of(2, "SS(0,6)", "S(0)", mesh=(2, 2), order=((0, (0, 1)),))
    assert ordered(few) == of(2, "S(0)", "S(0)", mesh=(2, 2), order=((0, (1, 0)),))
    empty = Spec(Mesh.of(2), (StridedShard(1, split_factor=2),), (0, 25), torch.float32)
    assert ordered(empty) == Spec(empty.mesh, (Shard(1),), empty.shape, empty.dtype)
    turned = Spec(Mesh.of(3, 2), (Shard(1), Shard(1)), (0, 7), torch.float32, ((1, (1, 0)),))
    with pytest.raises(OtherRows):  # the shapes differ, of which an empty piece has one
        strided(turned)


def test_each_dim_is_written_by_itself():
    mesh = Mesh.of(2, 2, 2, 2)
    placements = tuple(map(parse, ("SS(0,2)", "SS(1,2)", "S(1)", "S(0)")))
    made = ordered(Spec(mesh, placements, (8, 4), torch.float32))
    assert made.shard_order == ((0, (3, 0)), (1, (2, 1)))
    assert strided(made).placements == placements


def test_an_axis_of_one_rank_cuts_nothing_and_waits_for_nothing():
    lone = {"mesh": (1, 2)}
    one = of(4, "R", "S(0)", **lone)
    for placement in ("S(0)", "SS(0,3)", "P(sum)", "P(max)"):
        assert lies_alike(one, of(4, placement, "S(0)", **lone))
    assert lies_alike(of(4, "P(sum)", "R", **lone), of(4, "P(max)", "R", **lone))
    complex_max = of(4, "P(max)", "R", dtype=torch.complex64, **lone)
    assert not lies_alike(of(4, "R", "R", dtype=torch.complex64, **lone), complex_max)  # it means nothing
    assert lies_alike(complex_max, complex_max)


def test_partials_and_tensors_must_be_the_same():
    class Odd(Partial):
        pass

    assert not lies_alike(of(4, "P(sum)", "R"), of(4, "P(max)", "R"))
    assert not lies_alike(of(4, "P(sum)", "R"), of(4, "R", "P(sum)"))
    assert not lies_alike(of(0, "P(sum)", "R"), of(0, "R", "R"))
    assert not lies_alike(of(4, "R", "R"), of(5, "R", "R"))
    assert not lies_alike(of(4, "R", "R"), of(4, "R", "R", dtype=torch.float64))
    assert not lies_alike(of(4, "R", "R"), of(4, "R", "R", mesh=(2, 3)))
    mesh = Mesh.of(1, 1)
    odd, plain = (Spec(mesh, (one, Replicate()), (4,), torch.float32) for one in (Odd("sum"), Partial("sum")))
    assert odd == plain  # for torch
    assert not lies_alike(odd, plain) and lies_alike(odd, odd)
    assert not lies_alike(*(Spec(mesh, (Odd("sum"), Replicate()), (4,), torch.float32) for _ in range(2)))


def test_the_names_of_axes_do_not_matter():
    assert lies_alike(
        Spec(Mesh.of(dp=2), (Shard(0),), (3,), torch.int64), Spec(Mesh.of(2), (Shard(0),), (3,), torch.int64)
    )


def test_ranks_that_hold_nothing_hold_the_same_nothing_of_every_dim():
    mesh = Mesh.of(2, 2)
    one, other = (Spec(mesh, (Shard(1), Shard(1)), (0, 4), torch.int64, order) for order in ((), ((1, (1, 0)),)))
    assert lies_alike(one, other)  # all pieces are of shape (0, 1)
    assert not lies_alike(one, Spec(mesh, (Shard(1), Replicate()), (0, 4), torch.int64))


@given(specs(), st.data())
def test_lying_alike_is_an_equivalence(spec, data):
    other, third = (data.draw(specs(like=spec)) for _ in range(2))
    assume(lies_alike(spec, other) and lies_alike(other, third))
    assert lies_alike(spec, third)


def test_refusals_cross_processes():
    with pytest.raises(OtherRows) as refused:
        ordered(of(8, "SS(0,2)", "R"))
    assert str(pickle.loads(pickle.dumps(refused.value))) == str(refused.value)


def test_symbols_are_refused_where_rows_must_be_compared():
    size = ShapeEnv().create_unbacked_symint()
    turned, blocks = of(size, "S(0)", "S(0)", order=((0, (1, 0)),)), of(size, "SS(0,2)", "S(0)")
    for call in (lambda: strided(turned), lambda: ordered(blocks), lambda: lies_alike(turned, blocks)):
        with pytest.raises(OtherRows, match=r": a size is a symbol, and its rows cannot be compared\. Give sizes in"):
            call()
    assert lies_alike(turned, of(size, "S(0)", "S(0)", order=((0, (1, 0)),)))
