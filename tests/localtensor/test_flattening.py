"""Several axes as one and one as several: every rank keeps its rows, or the first that would not is named."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from localtensor.errors import BadMesh, OtherRows
from localtensor.flattening import flattened, unflattened
from localtensor.layout.mesh import Mesh
from localtensor.layout.shards import split
from localtensor.layout.spec import Spec, StridedShard, parse

ANY = [Replicate(), Shard(0), Shard(1), StridedShard(0, split_factor=2), StridedShard(1, split_factor=3)]


def of(rows, *placements, mesh=(2, 2), order=()):
    return Spec(Mesh.of(*mesh), tuple(map(parse, placements)), (rows,), torch.float32, order)


def pieces(spec):
    x = torch.arange(math.prod(spec.shape)).reshape(spec.shape)
    return [piece.tolist() for piece in split(x, spec)]


@given(rows=st.integers(0, 25), cols=st.integers(1, 7), one=st.sampled_from(ANY), beside=st.sampled_from(ANY),
       sizes=st.tuples(st.integers(1, 3), st.integers(1, 3)), first=st.booleans(), turned=st.booleans())  # fmt: skip
def test_a_flat_axis_gives_every_rank_its_rows_or_is_refused(rows, cols, one, beside, sizes, first, turned):
    placements = (one, one, beside) if first else (beside, one, one)
    names = ("a", "b") if first else ("b", "c")
    mesh = Mesh.of(*((*sizes, 2) if first else (2, *sizes)))
    spec = Spec(mesh, placements, (rows, cols), torch.int64)
    orders = tuple((dim, tuple(reversed(spec.cut_by(dim)))) for dim in (0, 1) if spec.cut_by(dim))
    spec = Spec(mesh, placements, (rows, cols), torch.int64, orders if turned else ())
    try:
        flat = flattened(spec, names, "flat")
    except OtherRows as error:
        refused = str(error)
    else:
        refused = ""
        assert flat.mesh.names == (("flat", "c") if first else ("a", "flat")) and pieces(flat) == pieces(spec)
        assert turned or unflattened(flat, "flat", Mesh(sizes, names)) == spec
    assert not refused or "would hold" in refused  # the placements are the same, so rows must differ


def test_a_nested_uneven_shard_is_not_a_flat_one():
    with pytest.raises(OtherRows) as refused:
        flattened(of(5, "S(0)", "S(0)"), ("a", "b"), "all")
    assert str(refused.value) == (
        "flattening.flattened: spec: f32[5] @ a:S(0), b:S(0): rank 1 holds rows 2 of dim 0, and on one axis it would "
        "hold rows 2 to 3. Pad dim 0 to 8 rows, or keep the axes apart.")  # fmt: skip
    with pytest.raises(OtherRows) as refused:
        unflattened(of(5, "S(0)", mesh=(4,)), "a", Mesh.of(dp=2, tp=2))
    assert str(refused.value) == (
        "flattening.unflattened: spec: f32[5] @ a:S(0): rank 1 holds rows 2 to 3 of dim 0, and on dp and tp it would "
        "hold rows 2. Pad dim 0 to 8 rows, or keep a in one.")  # fmt: skip
    flat = flattened(of(8, "S(0)", "S(0)"), ("a", "b"), "all")
    assert flat == Spec(Mesh.of(all=4), (Shard(0),), (8,), torch.float32)
    assert unflattened(flat, "all", Mesh.of(2, 2)) == of(8, "S(0)", "S(0)")


def test_axes_that_cut_the_other_way_round_are_no_flat_one_however_long_the_dim_is():
    with pytest.raises(
        OtherRows, match=r"rank 1 holds rows 4 to 5 of dim 0, .* hold rows 2 to 3\. Keep the axes apart\."
    ):
        flattened(of(8, "S(0)", "S(0)", order=((0, (1, 0)),)), ("a", "b"), "all")


def test_strided_shards_replicas_and_partials_are_flat_ones_too():
    for held in ("R", "P(sum)", "P(avg)", "P(max)", "SS(0,3)"):
        assert flattened(of(24, held, held), ("a", "b"), "all").placements == (parse(held),)
        assert unflattened(of(24, held, mesh=(4,)), "a", Mesh.of(2, 2)) == of(24, held, held)


def test_different_placements_are_refused_unless_an_axis_has_one_rank():
    with pytest.raises(OtherRows, match=r"a and b hold different placements\. Redistribute to one placement on all"):
        flattened(of(8, "S(0)", "R"), ("a", "b"), "all")
    with pytest.raises(OtherRows, match="a and b hold different placements"):
        flattened(of(8, "P(sum)", "P(max)"), ("a", "b"), "all")
    for placement in ("R", "S(0)", "SS(0,2)", "P(sum)"):
        assert flattened(of(7, placement, "S(0)", mesh=(1, 3)), ("a", "b"), "all").placements == (Shard(0),)
    assert flattened(of(7, "P(sum)", "S(0)", mesh=(1, 1)), ("a", "b"), "all").placements == (Partial("sum"),)


def test_an_order_with_other_axes_is_kept():
    spec = of(16, "S(0)", "S(0)", "S(0)", mesh=(2, 2, 2), order=((0, (2, 0, 1)),))
    flat = flattened(spec, ("a", "b"), "ab")
    assert str(flat) == "f32[16] @ ab:S(0)[1], c:S(0)[0]"
    assert unflattened(flat, "ab", Mesh.of(2, 2)) == spec


def test_axes_that_do_not_stand_side_by_side_are_refused():
    spec = of(8, "R", "R", "R", mesh=(2, 2, 2))
    for axes in (("a", "c"), ("b", "a"), ()):
        with pytest.raises(OtherRows, match=r"^flattening.flattened: axes: .* do not stand side by side in this order"):
            flattened(spec, axes, "flat")
    with pytest.raises(BadMesh, match="the axes are a, b, c"):
        flattened(spec, ("d",), "flat")
    with pytest.raises(BadMesh, match="two axes share a name"):
        flattened(spec, ("a", "b"), "c")


def test_axes_of_another_number_of_ranks_are_refused():
    with pytest.raises(OtherRows, match=r"^flattening.unflattened: into: Mesh\(a=2, b=3\): it has 6 ranks, and a has 4\. "
                       r"Give sizes whose product is 4\.$"):  # fmt: skip
        unflattened(of(8, "S(0)", mesh=(4,)), "a", Mesh.of(2, 3))


def test_a_placement_of_a_class_of_its_own_and_symbols_are_refused():
    class Odd(Partial):
        pass

    odd = Spec(Mesh.of(2, 2), (Odd(), Shard(0)), (4,), torch.float32)
    with pytest.raises(OtherRows, match=r"what P\(odd\) stands for on a is known to its own class only\. Redistribute"):
        flattened(odd, ("a",), "flat")
    size = ShapeEnv().create_unbacked_symint()
    with pytest.raises(OtherRows, match=r"^flattening.flattened: spec: .* a size is a symbol, and its rows"):
        flattened(of(size, "S(0)", "S(0)"), ("a", "b"), "all")
    with pytest.raises(OtherRows, match=r"^flattening.unflattened: spec: .* a size is a symbol, and its rows"):
        unflattened(of(size, "S(0)", "R"), "a", Mesh.of(dp=2, tp=1))


def test_a_flat_axis_cuts_when_the_first_of_its_axes_did_before_one_further_left():
    mesh, placements = Mesh.of(a=2, b=2, c=2), (Shard(0),) * 3
    flat = flattened(Spec(mesh, placements, (16,), torch.float32, ((0, (1, 2, 0)),)), ("b", "c"), "bc")
    assert repr(flat) == "f32[16] @ a:S(0)[1], bc:S(0)[0]"
