import pickle
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard

from localtensor.errors import BadMesh, BadPlacement, BadShardOrder
from localtensor.layout.mesh import Mesh
from localtensor.layout.spec import PARTIAL_KINDS, Spec, StridedShard, is_standard, is_supported, parse, short


@given(
    st.one_of(
        st.just(Replicate()), st.builds(Shard, st.integers(0, 5)), st.builds(Partial, st.sampled_from(PARTIAL_KINDS))
    )
)
def test_what_is_printed_is_read_back(placement):
    assert parse(short(placement)) == placement


def test_a_strided_shard_is_read_back():
    assert short(parse("SS(0,2)")) == "SS(0,2)"


def test_a_strided_shard_has_a_definition_without_being_plain_and_one_that_makes_no_blocks_has_none():
    assert is_supported(parse("SS(0,2)")) and not is_standard(parse("SS(0,2)"))
    assert is_supported(Partial("max")) and is_supported(Shard(1)) and is_supported(Replicate())
    assert not is_supported(StridedShard(0, split_factor=0)) and not is_supported(None)
    with pytest.raises(BadPlacement, match="a split factor is 1 or more"):
        Spec(Mesh.of(2), (StridedShard(0, split_factor=0),), (4,), torch.int64)


def test_a_partial_subclass_is_not_a_sum_because_its_reduction_says_so():
    class _OddPartial(Partial):
        pass

    assert short(_OddPartial("sum")) == "P(odd)"
    assert not is_standard(_OddPartial("sum")) and not is_supported(_OddPartial("sum"))
    assert is_standard(Partial("sum"))


@pytest.mark.parametrize(
    "text", ["S(-1)", "P(norm)", "S0", "", "Shard(0)", 3, None, Shard(0), f"S({1 << 63})", f"SS(0,{1 << 63})"]
)
def test_anything_else_is_refused(text):
    with pytest.raises(BadPlacement, match=r"Write R, S\(0\), SS\(0,2\), P\(sum\)"):
        parse(text)


def test_a_spec_needs_a_placement_for_each_axis():
    with pytest.raises(BadPlacement, match="1 placements for 2 mesh axes"):
        Spec(Mesh.of(2, 2), (Replicate(),), (4,), torch.float32)


NESTED = Spec(Mesh.of(2, 2, 2), (Shard(0), Shard(1), Shard(0)), (8, 4), torch.float32, ((0, (2, 0)),))


def test_a_spec_knows_the_order_of_its_cuts_however_it_is_given():
    two, none = torch.arange(3).numpy()[[2, 0]]
    same = [((0, (2, 0)), (1, (1,))), ((1, [1]), (0, [2, 0])), ((0, (2, 0)),), [(none, (two, none))]]
    specs = [replace(NESTED, shard_order=order) for order in same]
    assert specs == [NESTED] * 4 and len(set(map(repr, specs))) == len(set(specs)) == 1
    assert {type(axis) for spec in specs for dim, axes in spec.shard_order for axis in (dim, *axes)} == {int}
    assert NESTED.shard_order == ((0, (2, 0)),) and NESTED.sequence == (2, 1, 0)
    assert [NESTED.cut_by(dim) for dim in (0, 1, 2)] == [(2, 0), (1,), ()]
    assert str(NESTED) == "f32[8,4] @ a:S(0)[1], b:S(1), c:S(0)[0]"


def test_from_left_to_right_is_no_order_of_its_own():
    plain = replace(NESTED, shard_order=((0, (0, 2)), (1, (1,))))
    assert (
        plain == replace(NESTED, shard_order=()) == replace(NESTED, shard_order=[]) != NESTED
        and plain.shard_order == ()
    )
    assert plain.sequence == (0, 1, 2) and plain.cut_by(0) == (0, 2)


@pytest.mark.parametrize(("order", "problem"), [
    (((0, (0, 1)),), r"dim 0 is cut by the axes \[0, 2\], and not by \[0, 1\]"),
    (((0, (0,)),), r"dim 0 is cut by the axes \[0, 2\], and not by \[0\]"),
    (((0, (0, 0)),), r"and not by \[0, 0\]"),
    (((2, (1, 0)),), r"dim 2 is cut by the axes \[\], and not by \[1, 0\]"),
    (((-1, (1, 0)),), r"dim -1 is cut by the axes \[\], and not by \[1, 0\]"),
    (((0, (2, 0)), (0, (0, 2))), "it names dim 0 twice"),
    ((0, (2, 0)), "0 is no pair of a dim and its axes"),
    (((0, 2),), r"\(0, 2\) is no pair of a dim and its axes"),
    (((0, ("a", 0)),), r"\(0, \('a', 0\)\) is no pair of a dim and its axes"),
    ((([0], (2, 0)),), r"\(\[0\], \(2, 0\)\) is no pair of a dim and its axes"),
    (((),), r"\(\) is no pair of a dim and its axes"),
    (None, "it is no tuple of dims with their axes"),
    (5, "it is no tuple of dims with their axes"),
], ids=str)  # fmt: skip
def test_an_order_that_does_not_fit_the_placements_is_refused(order, problem):
    with pytest.raises(
        BadShardOrder, match=rf"^Spec: shard_order: .* of S\(0\), S\(1\), S\(0\): .*{problem}\. Give each such"
    ):
        replace(NESTED, shard_order=order)


def test_other_placements_with_an_order_that_is_theirs_no_more_are_refused():
    with pytest.raises(BadShardOrder) as refused:
        replace(NESTED, placements=(Replicate(), Shard(1), Shard(0)))
    assert str(refused.value) == (
        "Spec: shard_order: ((0, (2, 0)),) of R, S(1), S(0): dim 0 is cut by the axes [2], and not by [2, 0]. "
        "Give each such dim once, with the axes that cut it, as in ((0, (1, 0)),), or pass shard_order=().")  # fmt: skip
    assert replace(NESTED, placements=(Replicate(), Shard(1), Shard(0)), shard_order=()).sequence == (0, 1, 2)


def test_a_spec_crosses_processes_with_its_order():
    again = pickle.loads(pickle.dumps(NESTED))
    assert again == NESTED and again.shard_order == NESTED.shard_order and hash(again) == hash(NESTED)


def test_what_hypothesis_prints_of_a_spec_makes_it_again():
    from hypothesis.vendor.pretty import pretty

    for spec in (NESTED, replace(NESTED, shard_order=())):
        assert eval(pretty(spec), {"Spec": Spec, "Mesh": Mesh, "parse": parse, "torch": torch}) == spec


MESHES = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(lambda sizes: Mesh.of(*sizes))


@given(MESHES)
def test_coordinate_and_rank_are_inverse(mesh):
    assert [mesh.rank(mesh.coordinate(r)) for r in range(mesh.ranks)] == list(range(mesh.ranks))


@given(MESHES)
def test_the_groups_along_an_axis_hold_every_rank_once(mesh):
    for name, size in zip(mesh.names, mesh.sizes, strict=True):
        groups = mesh.groups(name)
        assert sorted(rank for group in groups for rank in group) == list(range(mesh.ranks))
        assert {len(group) for group in groups} == {size}


@pytest.mark.parametrize(
    ("sizes", "names", "why"),
    [
        ((), (), "sizes and names must pair up"),
        ((0,), ("a",), "a size is no whole number of ranks"),
        ((2, 2), ("a", "a"), "two axes share a name"),
    ],
)
def test_what_is_no_mesh_is_refused(sizes, names, why):
    with pytest.raises(BadMesh, match=why):
        Mesh(sizes, names)


def test_an_unknown_axis_or_rank_is_named():
    mesh = Mesh.of(dp=2, tp=2)
    with pytest.raises(BadMesh, match=r"Mesh.axis: name: 'pp': the axes are dp, tp. Name one of them."):
        mesh.axis("pp")
    with pytest.raises(BadMesh, match=r"Mesh.coordinate: rank: rank 4: the ranks are 0 to 3. Name one of them."):
        mesh.coordinate(4)


@pytest.mark.parametrize("place", [(0, 2), (2, 0), (-1, 0)])
def test_a_place_outside_of_the_mesh_is_no_rank(place):
    with pytest.raises(BadMesh, match=r"Mesh.rank: coordinate: \(.*\): the sizes are \(2, 2\)"):
        Mesh.of(2, 2).rank(place)


def test_axes_without_names_are_called_by_the_alphabet():
    assert Mesh.of(*[1] * 12).names == tuple("abcdefghijkl")
