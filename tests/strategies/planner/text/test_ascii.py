import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from localtensor.layout.mesh import Mesh
from localtensor.layout.shards import split
from localtensor.layout.spec import Spec, parse
from strategies.planner.search.api import plan
from strategies.planner.text.ascii import (
    ASCII,
    WIDTH,
    PlanStage,
    ascii_picture,
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

TEXTS = [
    "f32[4096,4096] @ dp=8,tp=16: S(0),P(sum) -> R,S(1)",
    "f32[] @ dp=4: P(sum) -> R",
    "f32[0,3] @ dp=100000: S(0) -> R",
    "f32[8,4,16] @ pp=2,dp=2,tp=2: S(0),S(1),S(2) -> R,R,S(0)",
    "f32[100] @ a_rather_long_name=64,b=3: S(0),S(0) -> R,R",
    "f32[8,8] @ a=2,b=2,c=2,d=2: S(0),S(1),R,R -> S(0),S(1),R,R",
]


@pytest.mark.parametrize("text", TEXTS)
def test_it_is_readable_in_sixty_columns_and_says_every_step(text):
    made = plan(*read(text))
    picture = ascii_picture(made.stages)
    assert max(map(len, picture.splitlines())) <= WIDTH
    for step in made.steps:
        assert str(step) in picture
    assert len(picture.splitlines()) < 25 * len(made.stages)


def test_each_rank_is_a_box_with_its_rows():
    src, _ = read("f32[2,4] @ dp=2,tp=2: S(0),S(1) -> R,R")
    assert ascii_picture([PlanStage(src)]).splitlines()[:6] == [
        "dp:S(0), tp:S(1)   1 x 2 on a rank",
        "      tp 0  tp 1",
        "dp 0  ██··  ··██",
        "      ····  ····",
        "dp 1  ····  ····",
        "      ██··  ··██",
    ]


def test_a_long_dim_has_cells_of_equally_many_rows():
    src, _ = read("f32[12] @ dp=3: S(0) -> R")
    assert ascii_picture([PlanStage(src)]).splitlines()[2] == "  ██····  ··██··  ····██"


def test_every_rank_that_holds_something_is_seen_to():
    src, _ = read("f32[13] @ dp=2,tp=7: R,S(0) -> R,R")
    assert ascii_picture([PlanStage(src)], width=90).splitlines()[2].split()[2:] == [
        "██······", "·██·····", "··██····", "···██···", "····███·", "······██", "·······█",
    ]  # fmt: skip


def test_parts_look_otherwise_and_an_order_is_seen():
    src, dst = read("f32[6] @ dp=2,tp=3: S(0)[1],S(0)[0] -> P(sum),R")
    picture = ascii_picture([PlanStage(src), PlanStage(dst)]).splitlines()
    assert picture[2:4] == ["dp 0  █·····  ··█···  ····█·", "dp 1  ·█····  ···█··  ·····█"]
    assert picture[7] == "dp 0  ▒▒▒▒▒▒  ▒▒▒▒▒▒  ▒▒▒▒▒▒"


def test_ranks_that_are_left_out_are_marked_and_explained():
    src, _ = read("f32[100,4] @ dp=50,tp=50: S(0),R -> R,R")
    picture = ascii_picture([PlanStage(src)])
    assert "tp 49" in picture and "dp 49" in picture and picture.endswith("┊ more ranks")
    small, _ = read("f32[100,4] @ dp=2,tp=2: S(0),R -> R,R")
    assert "more ranks" not in ascii_picture([PlanStage(small)])


def test_signs_of_ascii_will_do():
    src, dst = read("f32[100,4] @ dp=50,tp=50: S(0),R -> P(sum),R")
    picture = ascii_picture([PlanStage(src), PlanStage(dst)], signs=ASCII)
    assert picture.isascii() and all(sign in picture for sign in ASCII)


def test_no_line_of_a_picture_is_too_wide_whatever_the_axes_are_called():
    long = ["data_parallel_and_more", "tensor_parallel_and_more", "x" * 200, "tp", "dp", "e", "f", "g"]
    for names in (long[:1], long[:2], long[2:4], long[3:], long):
        mesh = ",".join(f"{name}={size}" for name, size in zip(names, (3, 1024, 2, 2, 2, 2, 2, 2)))
        [spec, _] = read(
            f"f32[64,64] @ {mesh}: {','.join(['S(0)', *['R'] * (len(names) - 1)])} -> {','.join('R' for _ in names)}"
        )
        boxes = [
            line
            for line in ascii_picture([PlanStage(spec)]).splitlines()
            if "\u2588" in line or line.startswith("     ")
        ]
        assert len(boxes) > 4 and max(map(len, boxes)) <= 60


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


def test_the_dims_that_are_cut_are_drawn_and_others_are_reported():
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
