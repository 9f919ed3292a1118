import pytest

from strategies.sweep.report.html_pictures import parse_picture, same_number

TEXT = """argument 0, S(1)
  rank 0  [1, 3] of shape (2, 1)
  rank 1  [2, 4] of shape (2, 1)
result 0, S(1)
  rank 0  [1, 3] of shape (2, 1)
  rank 1  [2, 9] of shape (2, 1)
  together  [1, 2, 3, 9] of shape (2, 2)
the op gives [1, 2, 3, 4] of shape (2, 2)"""
RAISED = "argument 0, R\n  rank 0  [1] of shape (1,)\n  rank 1  [1] of shape (1,)\n  rank 10  [1] of shape (1,)\nthe op gives [2] of shape (1,)"


def wrong(part):
    return [[value.text for value in box.values if value.wrong] for box in part.boxes]


def result(placement, held, together, want):
    ranks = [f"  rank {rank}  {text}" for rank, text in enumerate(held)]
    text = [f"result 0, {placement}", *ranks, f"  together  {together}", f"the op gives {want}"]
    return parse_picture("\n".join(text), "rank 0: result gathered")[0]


def test_each_tensor_is_a_part_with_a_box_for_each_rank():
    first, second = parse_picture(TEXT)
    assert (first.title, first.what, first.placement) == ("argument 0", "argument", "S(1)")
    assert [box.who for box in second.boxes] == ["rank 0", "rank 1", "together", "the op gives"]
    assert [box.shape for box in second.boxes] == [(2, 1), (2, 1), (2, 2), (2, 2)]
    assert [(box.size, box.columns) for box in second.boxes[1:3]] == [("2 × 1", 1), ("2 × 2", 2)]


def test_the_wrong_value_is_marked_in_the_whole_and_on_the_rank_that_holds_it():
    first, second = parse_picture(TEXT)
    assert wrong(first) == [[], []]
    assert wrong(second) == [[], ["9"], ["9"], []]


def test_uneven_and_empty_shards_along_the_first_dim_fall_into_place():
    part = result(
        "S(0)", ["[1, 2, 3, 4] of shape (2, 2)", "[5, 0] of shape (1, 2)", "[] of shape (0, 2)"],
        "[1, 2, 3, 4, 5, 0] of shape (3, 2)", "[1, 2, 3, 4, 5, 6] of shape (3, 2)",
    )  # fmt: skip
    assert wrong(part) == [[], ["0"], [], ["0"], []]


def test_a_replicated_result_is_compared_on_each_rank():
    part = result("R", ["[1] of shape (1,)", "[2] of shape (1,)"], "[1] of shape (1,)", "[2] of shape (1,)")
    assert wrong(part) == [["1"], [], ["1"], []]


def test_no_rank_is_blamed_for_a_sum_and_none_for_axes_that_are_not_distinguished():
    for placement in ("P(sum)", "(S(0), S(0))"):
        part = result(placement, ["[1] of shape (1,)", "[1] of shape (1,)"], "[2] of shape (1,)", "[3] of shape (1,)")
        assert wrong(part) == [[], [], ["2"], []]


def test_another_shape_is_marked_as_a_whole():
    part = result("R", ["[1] of shape (1,)"], "[1] of shape (1,)", "[1, 1] of shape (2,)")
    assert [box.wrong for box in part.boxes] == [False, True, False]


def test_the_rank_whose_shape_is_wrong_is_marked():
    text = (
        "result 0, S(0)\n  rank 0  [0] of shape (1,)\n  rank 1  [0] of shape (1,)\n"
        "  together  could not be assembled\nthe op gives [0] of shape (1,)"
    )
    (part,) = parse_picture(text, "rank 1 holds shape (1,), S(0) of (1,) is (0,)")
    assert [(box.who, box.wrong, box.note) for box in part.boxes] == [
        ("rank 0", False, ""), ("rank 1", True, "this shape is wrong"), ("together", True, "could not be assembled"),
        ("the op gives", False, ""),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("reason", "ranks"),
    [
        ("rank 1 raises ValueError: rank 0 raises", [1]), ("rank 0, 10 raises E", [0, 10]),
        ("the process of rank 1 dies (exit code -6)", [1]), ("every rank raises E", [0, 1, 10]), ("hangs: x", []),
    ],
)  # fmt: skip
def test_ranks_that_raise_or_die_are_marked_where_they_start(reason, ranks):
    held, gives = parse_picture(RAISED, reason)
    assert [box.who for box in held.boxes if box.wrong] == [f"rank {rank}" for rank in ranks]
    assert [box.note for box in held.boxes if box.wrong] == ["fails here"] * len(ranks)
    assert (gives.what, gives.boxes[0].values[0].text) == ("op", "2")


def test_results_and_what_the_op_gives_go_together_by_number():
    text = (
        "result 0, R\n  rank 0  [1] of shape (1,)\nresult 1, R\n  rank 0  [5] of shape ()\n"
        "the op gives [1] of shape (1,)\n  and        [6] of shape ()"
    )
    first, second = parse_picture(text)
    assert (wrong(first), wrong(second)) == ([[], []], [["5"], []])
    assert second.boxes[0].size == "scalar"


def test_elements_left_out_are_reported_and_not_compared():
    part = result(
        "R", ["[1, 2, ...] of shape (4,)"], "[1, 2, ...] of shape (4,)", "[1, 3, ...] of shape (4,)"
    )  # fmt: skip
    assert [[value.text for value in box.values] for box in part.boxes] == [["1", "2"], ["1", "2"], ["1", "3"]]
    assert [box.more for box in part.boxes] == [True] * 3 and wrong(part) == [["2"], ["2"], []]


def test_what_is_no_tensor_is_a_note():
    part = parse_picture("argument 0, R\n  rank 0  <b>None</b>")[0]
    assert (part.boxes[0].note, part.boxes[0].shape) == ("<b>None</b>", None)


@pytest.mark.parametrize("text", ["", "something else", "  rank 0  [1] of shape (1,)", TEXT + "\nand more"])
def test_any_other_text_is_no_picture(text):
    assert parse_picture(text) == ()


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        ("nan", "nan", True), ("inf", "inf", True), ("inf", "-inf", False), ("1", "1.00001", True),
        ("1+2j", "1+2j", True), ("1+2j", "1-2j", False), ("True", "False", False), ("0", "1e-9", True),
        ("nan", "1", False), ("x", "y", False),
    ],
)  # fmt: skip
def test_numbers_are_compared_as_numbers(one, other, equal):
    assert same_number(one, other) is equal
