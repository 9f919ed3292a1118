"""Products of matrices: letters that stay, letters that are summed over, and what is added."""

import pytest
import torch

from localtensor.layout.shards import assemble_axis, split_axis
from strategies.model.rule import Leaf
from strategies.ops.linalg.matmul import RULES, scaled
from strategies.ops.semantics.rule_registry import Meta, RuleQuery, RuleRegistry
from strategies.ops.validation.claims import query_of_sample, validate_rule
from tests.strategies.cases import numbers, sample
from tests.strategies.ops import held

A, B, C = numbers(4, 6), numbers(6, 8, seed=1), numbers(4, 8, seed=2)
V, W = numbers(6, seed=3), numbers(4, seed=4)
WHOLE = {"dtype": torch.int64}
ABC = numbers(3, 4, 6), numbers(3, 6, 8, seed=1)
MM = ["S(0), R -> S(0)", "R, S(1) -> S(1)", "S(1), S(0) -> P(sum)", "P(+), R -> P(+)", "R, P(+) -> P(+)"]
AVERAGES = ["P(avg), R, R -> P(avg)", "R, P(avg), R -> P(avg)", "R, R, P(avg) -> P(avg)",
            "P(avg), P(avg), R -> P(avg)", "P(avg), R, P(avg) -> P(avg)"]  # fmt: skip
SUMS = ["P(sum), S(1), S(0) -> P(sum)", "P(sum), P(sum), R -> P(sum)", "P(sum), R, P(sum) -> P(sum)"]
LINES = [
    (sample("mm.default", A, B), MM),
    (sample("mm.default", numbers(4, 6, **WHOLE), numbers(6, 8, **WHOLE)), [t.replace("P(+)", "P(sum)") for t in MM]),
    (sample("mm.default", A.to(torch.complex64), B.to(torch.complex64)), MM),
    (sample("mm.default", numbers(4, 0), numbers(0, 8)), MM),
    (sample("mm.out", A, B, out=C), ["S(0), R, S(0) -> S(0)", "R, S(1), S(1) -> S(1)", "S(1), S(0), P(sum) -> P(sum)",
                                     "P(+), R, P(+) -> P(+)", "R, P(+), P(+) -> P(+)"]),
    (sample("_int_mm.default", numbers(24, 16, dtype=torch.int8), numbers(16, 8, dtype=torch.int8)),
     ["S(0), R -> S(0)", "R, S(1) -> S(1)", "S(1), S(0) -> P(sum)"]),
    (sample("mv.default", A, V), ["S(0), R -> S(0)", "S(1), S(0) -> P(sum)", "P(+), R -> P(+)", "R, P(+) -> P(+)"]),
    (sample("dot.default", V, V), ["S(0), S(0) -> P(sum)", "P(+), R -> P(+)", "R, P(+) -> P(+)"]),
    (sample("bmm.default", *ABC), ["S(0), S(0) -> S(0)", "S(1), R -> S(1)", "R, S(2) -> S(2)", "S(2), S(1) -> P(sum)",
                                   "P(+), R -> P(+)", "R, P(+) -> P(+)"]),
    (sample("addmm.default", C, A, B), ["S(0), S(0), R -> S(0)", "S(1), R, S(1) -> S(1)", *SUMS, *AVERAGES]),
    (sample("addmm.default", numbers(8), A, B), ["R, S(0), R -> S(0)", "S(0), R, S(1) -> S(1)", *SUMS, *AVERAGES]),
    (sample("addmm.default", C * torch.nan, A, B, beta=0),
     ["S(0), S(0), R -> S(0)", "S(1), R, S(1) -> S(1)", "R, S(1), S(0) -> P(sum)", "R, P(sum), R -> P(sum)",
      "R, R, P(sum) -> P(sum)", *SUMS, *AVERAGES]),
    (sample("addmm_.default", C, A, B), ["S(0), S(0), R -> S(0)", "S(1), R, S(1) -> S(1)", *SUMS, AVERAGES[0], *AVERAGES[3:]]),
    (sample("addmv.default", W[:1], A, V), ["R, S(0), R -> S(0), filled", "P(sum), S(1), S(0) -> P(sum), filled",
                                            *SUMS[1:], *AVERAGES]),
    (sample("addmm.default", C.long(), A.long(), B.long(), beta=2.5),
     ["S(0), S(0), R -> S(0)", "S(1), R, S(1) -> S(1)", SUMS[0] + ", filled", *SUMS[1:]]),
    (sample("addmm.default", C.long(), A.long(), B.long(), beta=1.0),
     ["S(0), S(0), R -> S(0)", "S(1), R, S(1) -> S(1)", SUMS[0] + ", filled", *SUMS[1:]]),
    (sample("linear.default", numbers(2, 4, 6), numbers(8, 6), None),
     ["S(0), R -> S(0)", "S(1), R -> S(1)", "R, S(0) -> S(2)", "S(2), S(1) -> P(sum)", "P(+), R -> P(+)", "R, P(+) -> P(+)"]),
    (sample("matmul.default", numbers(2, 1, 4, 6), numbers(3, 6, 8)),
     ["S(0), R -> S(0)", "R, S(0) -> S(1)", "S(2), R -> S(2)", "R, S(2) -> S(3)", "S(3), S(1) -> P(sum)",
      "P(+), R -> P(+)", "R, P(+) -> P(+)"]),
    (sample("matmul.default", V, B), ["R, S(1) -> S(0)", "S(0), S(0) -> P(sum)", "P(+), R -> P(+)", "R, P(+) -> P(+)"]),
    (sample("_addmm_activation.default", numbers(8), A, B), ["R, S(0), R -> S(0)", "S(0), R, S(1) -> S(1)"]),
]  # fmt: skip


@held.for_each_line_case(LINES)
def test_a_product_has_just_these_lines_and_they_hold(one, texts):
    held.assert_lines(RULES, one, *texts)


TEMPTING = [
    ("both operands are sums", sample("mm.default", A, B), "P(sum), P(sum) -> P(sum)", "the parts make"),
    ("the product of maxima", sample("mm.default", A, B), "P(max), R -> P(max)", "the parts make"),
    ("every rank adds all of the bias", sample("addmm.default", C, A, B), "R, S(1), S(0) -> P(sum)", "the parts make"),
    ("every rank adds all of the product", sample("addmm.default", C, A, B), "P(sum), R, R -> P(sum)", "the parts make"),
    ("a bias of one row has no rows to cut", sample("addmm.default", C[:1], A, B), "S(0), S(0), R -> S(0)", "rank"),
    ("a function of a sum", sample("_addmm_activation.default", numbers(8), A, B), "P(sum), S(1), S(0) -> P(sum)", "make"),
]  # fmt: skip


@held.for_each_tempting_case(TEMPTING)
def test_a_tempting_line_of_a_product_is_wrong_and_not_there(one, text, because):
    held.assert_tempting(RULES, one, text, because)


def test_addmv_of_no_columns_has_no_line_where_its_shape_is_that_of_what_is_added():
    assert held.lines_of(RULES, sample("addmv.default", W[:1], A[:, :0], V[:0])) == set()


@pytest.mark.few(2)
@pytest.mark.parametrize("op", ["aten.mm.default", "aten.addmm.default", "aten.addmv_.default", "aten.dot.out"])
def test_no_line_of_a_product_is_wrong_before_the_judge(op):
    book = RuleRegistry.of(*RULES)
    given = [one for one, _ in LINES if one.op == op] or [
        sample("addmv_.default", W, A, V)
        if "addmv" in op
        else sample("dot.out", V, V, out=torch.zeros((), dtype=V.dtype))
    ]
    found = validate_rule(book.get(op), given=given, seed=5)
    assert found.wrong == ()
    assert len(found.sound) >= 3


# Nothing moves a number of 8 bits by a unit in its last place, so the judge has no oracle about these; they are whole
# numbers, and every result here is exact.
EIGHT = torch.float8_e4m3fn
LEFT, RIGHT = (numbers(*shape, dtype=torch.float32).round().clamp(-4, 4).to(EIGHT) for shape in ((32, 64), (96, 64)))
ONE, ROWS, COLUMNS = torch.tensor(0.5), torch.arange(32.0)[:, None] + 1, torch.arange(96.0)[None] + 1
BIAS = torch.arange(96.0)
EIGHTS = [
    ((ONE, ONE), ["S(0), R, R, R -> S(0), even", "R, S(1), R, R -> S(1), even", "S(1), S(0), R, R -> P(sum), even"]),
    (
        (ROWS, COLUMNS),
        ["S(0), R, S(0), R -> S(0), even", "R, S(1), R, S(1) -> S(1), even", "S(1), S(0), R, R -> P(sum), even"],
    ),
    ((ONE, ONE, BIAS), ["S(0), R, R, R, R -> S(0), even", "R, S(1), R, R, S(0) -> S(1), even"]),
]


@pytest.mark.parametrize(("scales", "texts"), EIGHTS, ids=["one scale", "a scale for each", "a bias"])
def test_a_scaled_product_has_just_these_lines_and_their_pieces_make_it(scales, texts):
    one = sample("_scaled_mm.default", LEFT, RIGHT.t(), *scales, out_dtype=torch.float32)
    lines = list(scaled(query_of_sample(one, one.call(one.tensors))))
    assert {str(line) for line in lines} == set(texts)
    for line in lines:
        held = [split_axis(x, p, 2) for x, p in zip(one.tensors, line.inputs, strict=True)]
        pieces = [one.call([column[rank] for column in held]) for rank in (0, 1)]
        assert torch.equal(assemble_axis(pieces, line.outputs[0]), one.call(one.tensors))


def test_a_scaled_product_with_a_scale_for_each_block_has_no_lines():
    tensors = tuple(Meta(shape, torch.float32) for shape in ((256, 256), (256, 256), (256, 2), (2, 2)))
    arguments = {name: Leaf(i) for i, name in enumerate(("self", "mat2", "scale_a", "scale_b"))}
    query = RuleQuery("aten._scaled_mm.default", arguments, tensors, (Meta((256, 256), torch.bfloat16),))
    assert list(scaled(query)) == []
