import pytest
from hypothesis import given
from hypothesis import strategies as st

from localtensor.errors import BadMesh
from localtensor.layout.mesh import Mesh

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
