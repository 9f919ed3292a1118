"""Joins, repeats, turns, triangles and pads."""

from strategies.ops.shape.joining import RULES as JOINED
from strategies.ops.shape.joining import RULES as PADDED
from strategies.ops.shape.joining import padded_dims
from tests.strategies.cases import numbers, sample
from tests.strategies.ops import held

RULES = (*JOINED, *PADDED)
X, Y = numbers(4, 6, 5), numbers(5, 3)
ALL, BOTH = "P(*) -> P(*)", "P(*), P(*) -> P(*)"

LINES = [
    (sample("cat.default", [Y, numbers(5, 2)], -1), [BOTH, "S(0), S(0) -> S(0)"]),
    (sample("cat.default", [Y, numbers(0, 3)], 0), [BOTH, "S(1), S(1) -> S(1)", "S(0), R -> S(0)"]),
    (sample("cat.default", [numbers(0), Y], 1), [BOTH, "S(0), S(0) -> S(0)", "R, S(1) -> S(1)"]),
    (sample("cat.default", [numbers(3), numbers(2)], 0), [BOTH]),
    (sample("cat.default", [numbers(5).long(), numbers(5)], 0), []),
    (sample("cat.default", [Y]), [ALL, "S(0) -> S(0)", "S(1) -> S(1)"]),
    (sample("stack.default", [Y, Y + 1], 1), [BOTH, "S(0), S(0) -> S(0)", "S(1), S(1) -> S(2)"]),
    (sample("repeat.default", Y, [2, 1, 3]), [ALL, "S(0) -> S(1)"]),
    (sample("repeat.default", Y, [0, 2]), [ALL, "S(0) -> S(0)"]),
    (sample("roll.default", X, [1, 2], [0, -1]), [ALL, "S(1) -> S(1)"]),
    (sample("roll.default", Y, [1], []), [ALL]),
    (sample("roll.default", Y, [0], [1]), [ALL, "S(0) -> S(0)", "S(1) -> S(1)"]),
    (sample("flip.default", X, [0, -1]), [ALL, "S(1) -> S(1)"]),
    (sample("flip.default", numbers(1, 3), [0, 1]), [ALL, "S(0) -> S(0)"]),
    (sample("rot90.default", X, 1, [0, -1]), [ALL, "S(1) -> S(1)"]),
    (sample("block_diag.default", [Y, numbers(3)]), [BOTH]),
    (sample("tril.default", X, 1), [ALL, "S(0) -> S(0)"]),
    (sample("triu_.default", X), [ALL, "S(0) -> S(0)"]),
    (sample("constant_pad_nd.default", X, [1, 0, 0, 0], 0.0), [ALL, "S(0) -> S(0)", "S(1) -> S(1)"]),
    (sample("constant_pad_nd.default", Y, [1, 0], 1), [*(f"P({k}) -> P({k})" for k in ("avg", "max", "min", "product")), "S(0) -> S(0)"]),
    (sample("constant_pad_nd.default", Y, [1, 0], 7.5), [*(f"P({k}) -> P({k})" for k in ("avg", "max", "min")), "S(0) -> S(0)"]),
    (sample("constant_pad_nd.default", Y, [-1, 0], 7.5), [ALL, "S(0) -> S(0)"]),
    (sample("reflection_pad1d.default", X, [1, 2]), [ALL, "S(0) -> S(0), filled", "S(1) -> S(1), filled"]),
    (sample("replication_pad2d.default", X, [1, 2, 0, 0]), [ALL, "S(0) -> S(0), filled", "S(1) -> S(1), filled"]),
    (sample("replication_pad1d_backward.default", numbers(4, 6, 8), X, [1, 2]),
        ["P(+), R -> P(+)", "S(0), S(0) -> S(0), filled", "S(1), S(1) -> S(1), filled"]),
]  # fmt: skip


@held.for_each_line_case(LINES)
def test_a_join_has_just_these_lines_and_they_hold(one, texts):
    held.assert_lines(RULES, one, *texts)


TEMPTING = [
    ("pieces of each in turn", sample("cat.default", [numbers(4), numbers(4) + 1], 0), "S(0), S(0) -> S(0)", "the shards make"),
    ("copies of pieces", sample("repeat.default", numbers(4), [2]), "S(0) -> S(0)", "the shards make"),
    ("each rolls its own", sample("roll.default", numbers(4), [1], [0]), "S(0) -> S(0)", "the shards make"),
    ("each turns its own", sample("flip.default", numbers(4), [0]), "S(0) -> S(0)", "the shards make"),
    ("rows are numbered from the top", sample("tril.default", numbers(4, 4)), "S(0) -> S(0)", "the shards make"),
    ("each adds its own ones", sample("constant_pad_nd.default", Y, [1, 0], 1.0), "P(sum) -> P(sum)", "the parts make"),
    ("a padding on each rank", sample("constant_pad_nd.default", Y, [1, 0]), "S(1) -> S(1)", "has shape"),
    ("mirrors inside", sample("reflection_pad1d.default", numbers(1, 8), [1, 1]), "S(1) -> S(1)", "has shape"),
    ("no maximum of sums", sample("replication_pad1d_backward.default", numbers(2, 5), numbers(2, 3), [1, 1]), "P(max), R -> P(max)", "make"),
]  # fmt: skip


@held.for_each_tempting_case(TEMPTING)
def test_a_tempting_line_of_a_join_is_wrong_and_not_there(one, text, because):
    held.assert_tempting(RULES, one, text, because)


def test_padding_names_the_last_dims_first_two_numbers_each():
    assert [padded_dims(4, pad) for pad in ([1, 0], [0, 0, 0, 2], [0, -1, 0, 0, 3, 3], [0] * 8)] == [
        [3],
        [2],
        [3, 1],
        [],
    ]
