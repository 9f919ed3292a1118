import pytest

from strategies.planner.picture.ascii import ASCII, WIDTH, PlanStage, ascii_picture
from strategies.planner.search.api import plan
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
