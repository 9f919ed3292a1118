import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from localtensor.layout.mesh import Mesh
from localtensor.layout.shards import split
from localtensor.layout.spec import Spec, parse
from strategies.planner.picture.ascii import (
    PlanStage,
    dims_drawn,
    drawn_coordinates,
    drawn_indices,
    drawn_sizes,
    layout_text,
    share_of_rank,
    share_text,
    undrawn_text,
)
from strategies.planner.text.parser import read


def stages(text):
    return [PlanStage(spec) for spec in read(text)]


@st.composite
def cut(draw):
    """A spec of shards alone, in any order."""
    mesh = Mesh.of(*(draw(st.integers(1, 3)) for _ in range(draw(st.integers(1, 3)))))
    shape = tuple(draw(st.lists(st.integers(0, 7), min_size=1, max_size=2)))
    offered = ["R", *(f"S({dim})" for dim in range(len(shape))), *(f"SS({dim},2)" for dim in range(len(shape)))]
    placements = tuple(parse(draw(st.sampled_from(offered))) for _ in mesh.sizes)
    plain = Spec(mesh, placements, shape, torch.int64)
    orders = tuple(
        (dim, tuple(draw(st.permutations(plain.cut_by(dim))))) for dim in range(len(shape)) if plain.cut_by(dim)
    )
    return Spec(mesh, placements, shape, torch.int64, orders)


@given(cut())
@settings(max_examples=80, deadline=None)
def test_a_box_holds_what_the_definition_gives_the_rank(spec):
    whole = torch.arange(torch.Size(spec.shape).numel()).reshape(spec.shape)
    dims = dims_drawn([PlanStage(spec)])
    _, wide = drawn_sizes(spec, dims)
    for rank, piece in enumerate(split(whole, spec)):
        share = share_of_rank(spec, spec.mesh.coordinate(rank), dims)
        rows = [row for start, length in share.down for row in range(start, start + length)]
        columns = [column for start, length in share.across for column in range(start, start + length)]
        assert [row * wide + column for row in rows for column in columns] == piece.flatten().tolist()
        assert not share.part


def test_a_box_of_parts_says_so_and_a_number_is_one_cell():
    [src, dst] = stages("f32[] @ dp=2: P(sum) -> R")
    assert dims_drawn([src]) == () and drawn_sizes(src.spec, ()) == (1, 1)
    assert share_of_rank(src.spec, (1,), ()).part and not share_of_rank(dst.spec, (1,), ()).part
    assert share_of_rank(src.spec, (1,), ()).down == share_of_rank(src.spec, (1,), ()).across == ((0, 1),)


def test_the_dims_that_are_cut_are_drawn_and_others_are_told():
    found = stages("f32[2,3,4,5] @ a=2,b=2,c=2: S(3),R,R -> S(1),S(2),S(3)")
    assert dims_drawn(found) == (1, 3)
    assert [undrawn_text(stage.spec, (1, 3)) for stage in found] == ["", "dim 2 is cut, too, and not drawn"]
    assert undrawn_text(found[1].spec, (0, 1)) == "dim 2 and dim 3 are cut, too, and not drawn"
    assert dims_drawn(stages("f32[2,3,4] @ a=2: R -> R")) == (0, 1)


def test_a_long_axis_is_folded_and_its_last_rank_is_there():
    assert drawn_indices(1, 4) == [0] and drawn_indices(4, 4) == [0, 1, 2, 3] and drawn_indices(5, 4) == [0, 1, None, 4]
    assert drawn_indices(1_000_000, 5) == [0, 1, 2, None, 999_999]
    assert drawn_coordinates((3, 1_000_000), 4) == [(0, 0), (0, 1), None, (2, 999_999)]


def test_what_a_rank_holds_in_words():
    src, dst = (stage.spec for stage in stages("f32[7,4] @ dp=3,tp=2: S(0),P(sum) -> P(sum),P(sum)"))
    assert share_text(src) == "parts of at most 3 x 4 on a rank, P(sum) over tp"
    assert share_text(dst) == "parts of 7 x 4 on a rank, P(sum) over dp, tp"
    assert layout_text(src) == "dp:S(0), tp:P(sum)"
