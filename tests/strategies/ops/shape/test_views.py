"""Views: by name, by shape, and of some of the elements."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from strategies.model.oracle import run_oracle
from strategies.model.rule import Call, Leaf
from strategies.model.verdict import Verdict
from strategies.ops.semantics.rule_registry import RuleRegistry
from strategies.ops.shape.views import RULES, groups
from strategies.ops.validation.claims import own_claims
from strategies.validation.probe import check_claims
from tests.strategies.cases import judged, numbers, sample
from tests.strategies.ops import held

X = numbers(4, 6, 5)
C = numbers(4, 3, dtype=torch.complex128)
ALL = "P(*) -> P(*)"

LINES = [
    (sample("alias.default", X), [ALL, "S(0) -> S(0)", "S(1) -> S(1)", "S(2) -> S(2)"]),
    (sample("prims.view_of.default", numbers(5)), [ALL, "S(0) -> S(0)"]),
    (sample("detach.default", numbers(0, 2)), [ALL, "S(0) -> S(0)", "S(1) -> S(1)"]),
    (sample("permute.default", X, [2, 0, -2]), [ALL, "S(2) -> S(0)", "S(0) -> S(1)", "S(1) -> S(2)"]),
    (sample("transpose.int", X, 0, -1), [ALL, "S(0) -> S(2)", "S(1) -> S(1)", "S(2) -> S(0)"]),
    (sample("transpose_copy.int", X, 0, 1), [ALL, "S(0) -> S(1)", "S(1) -> S(0)", "S(2) -> S(2)"]),
    (sample("t.default", numbers(5, 3)), [ALL, "S(0) -> S(1)", "S(1) -> S(0)"]),
    (sample("t.default", numbers(5)), [ALL, "S(0) -> S(0)"]),
    (sample("t.default", numbers()), [ALL]),
    (sample("unsqueeze.default", numbers(5, 3), 1), [ALL, "S(0) -> S(0)", "S(1) -> S(2)"]),
    (sample("unsqueeze.default", numbers(5, 3), -3), [ALL, "S(0) -> S(1)", "S(1) -> S(2)"]),
    (sample("squeeze.dim", numbers(5, 1, 3), 1), [ALL, "S(0) -> S(0)", "S(2) -> S(1)"]),
    (sample("squeeze.dim", numbers(3, 1, 5), 0), [ALL, "S(0) -> S(0)", "S(1) -> S(1)", "S(2) -> S(2)"]),
    (sample("squeeze.dims", numbers(3, 1, 2), [0, 1]), [ALL, "S(0) -> S(0)", "S(2) -> S(1)"]),
    (sample("squeeze_.dims", numbers(3, 1, 2), [0, 1]), [ALL, "S(0) -> S(0)"]),
    (sample("squeeze_.default", numbers(3, 2)), [ALL, "S(0) -> S(0)", "S(1) -> S(1)"]),
    (sample("squeeze_copy.dim_out", numbers(3, 2), 1, out=numbers(3, 2)),
     ["P(*), P(*) -> P(*)", "S(0), S(0) -> S(0)", "S(1), S(1) -> S(1)"]),
    (sample("squeeze.default", numbers()), [ALL]),
    (sample("squeeze.dims", numbers(5, 1), []), [ALL, "S(0) -> S(0)", "S(1) -> S(1)"]),
    (sample("squeeze.default", numbers(1, 0, 3)), [ALL, "S(1) -> S(0)", "S(2) -> S(1)"]),
    (sample("expand.default", numbers(3, 1), [2, -1, 5]), [ALL, "R -> S(0)", "S(0) -> S(1)", "R -> S(2)"]),
    (sample("view_as_real.default", C), ["P(+) -> P(+)", "S(0) -> S(0)", "S(1) -> S(1)"]),
    (sample("view_as_complex_copy.default", numbers(5, 2)), ["P(+) -> P(+)", "S(0) -> S(0)"]),
    (sample("view_as_complex.default", numbers(5, 3, 2)), ["P(+) -> P(+)", "S(0) -> S(0)", "S(1) -> S(1)"]),
    (sample("_neg_view.default", numbers(5)), ["P(+) -> P(+)", "S(0) -> S(0)"]),
    (sample("view.default", X, [-1, 5]), [ALL, "S(0) -> S(0), even", "S(2) -> S(1)"]),
    (sample("_unsafe_view.default", X, [4, 2, 3, 5]), [ALL, "S(0) -> S(0)", "S(1) -> S(1), even", "S(2) -> S(3)"]),
    (sample("_reshape_copy.default", X, [120]), [ALL, "S(0) -> S(0), even"]),
    (sample("reshape.default", X, [120]), [ALL, "S(0) -> S(0), even"]),
    (sample("view.default", numbers(5), [1, 5, 1]), [ALL, "S(0) -> S(1)"]),
    (sample("view.default", numbers(1, 5), [5, 1]), [ALL, "S(0) -> S(1)", "S(1) -> S(0)"]),
    (sample("view.default", numbers(0, 3), [7, 0]), [ALL, *(f"S({i}) -> S({j})" for i in (0, 1) for j in (0, 1))]),
    (sample("view.default", numbers(), [1, 1]), [ALL]),
    (sample("view.dtype", numbers(5, 4), torch.float64), [ALL, "S(0) -> S(0)", "S(1) -> S(1)"]),
    (sample("view.dtype", numbers(5, 4), torch.int64), ["S(0) -> S(0)", "S(1) -> S(1)"]),
    (sample("view.dtype", numbers(5, 4), torch.int16), ["S(0) -> S(0)", "S(1) -> S(1), even"]),
    (sample("select.int", X, -2, 3), [ALL, "S(0) -> S(0)", "S(2) -> S(1)"]),
    (sample("unbind.int", numbers(2, 5), 0), ["P(*) -> P(*), P(*)", "S(1) -> S(0), S(0)"]),
    (sample("slice.Tensor", X, 1, 1, 4), [ALL, "S(0) -> S(0)", "S(2) -> S(2)"]),
    (sample("slice.Tensor", X, 1, -9, 2**62), [ALL, "S(0) -> S(0)", "S(1) -> S(1)", "S(2) -> S(2)"]),
    (sample("split.Tensor", numbers(5, 3), 3), ["P(*) -> P(*), P(*)", "S(1) -> S(1), S(1)"]),
    (sample("split.Tensor", numbers(5, 3), 5), [ALL, "S(0) -> S(0)", "S(1) -> S(1)"]),
    (sample("split_with_sizes.default", numbers(5, 3), [5]), [ALL, "S(1) -> S(1)"]),
    (sample("narrow_copy.default", numbers(5, 3), 0, 1, 2), [ALL, "S(1) -> S(1)"]),
    (sample("unsafe_split_with_sizes.default", numbers(5, 3), [2, 3]), ["P(*) -> P(*), P(*)", "S(1) -> S(1), S(1)"]),
    (sample("diagonal.default", X, 1, 0, 2), [ALL, "S(1) -> S(0)"]),
    (sample("diag_embed.default", numbers(5, 3), 1, 0, 2), [ALL, "S(0) -> S(1)"]),
    (sample("diag.default", numbers(5)), [ALL]),
    (sample("unfold.default", numbers(5, 12), 1, 3, 3), [ALL, "S(0) -> S(0)", "S(1) -> S(1), even"]),
    (sample("unfold.default", numbers(5, 12), 1, 3, 2), [ALL, "S(0) -> S(0)"]),
    (sample("unfold.default", numbers(5, 6), 1, 3, 2), [ALL, "S(0) -> S(0)"]),
    (sample("unfold.default", numbers(5, 8), 1, 3, 3), [ALL, "S(0) -> S(0)"]),
    (sample("unfold.default", numbers(5), 0, 1, 1), [ALL, "S(0) -> S(0), filled"]),
    (sample("select_backward.default", numbers(5, 3), [5, 4, 3], 1, 2), [ALL, "S(0) -> S(0)", "S(1) -> S(2)"]),
    (sample("slice_backward.default", numbers(5, 2), [5, 4], 1, 1, 3, 1), [ALL, "S(0) -> S(0)"]),
    (sample("slice_backward.default", numbers(5, 2), [5, 2], 1, 0, 9, 1), [ALL, "S(0) -> S(0)", "S(1) -> S(1)"]),
    (sample("diagonal_backward.default", numbers(5, 3), [3, 5, 4], 0, 0, 2), [ALL, "S(0) -> S(1)"]),
    (sample("unfold_backward.default", numbers(4, 5, 3), [4, 7], 1, 3, 1),
        ["P(+) -> P(+)", "S(0) -> S(0)"]),
]  # fmt: skip


@pytest.mark.few(24)
@held.for_each_line_case(LINES)
def test_a_view_has_just_these_lines_and_they_hold(one, texts):
    held.assert_lines(RULES, one, *texts)


TEMPTING = [
    ("three rows of four and two of four", sample("view.default", numbers(5, 4), [20]), "S(0) -> S(0)", "raises"),
    ("rows of two dims are interleaved", sample("reshape.default", numbers(4, 6), [24]), "S(1) -> S(0)", "raises"),
    ("bits carry over", sample("view.dtype", numbers(5, dtype=torch.int64), torch.int32), "P(sum) -> P(sum)", "make"),
    ("halves multiply alone", sample("view_as_real.default", C), "P(product) -> P(product)", "the parts make"),
    ("each rank slices its piece", sample("slice.Tensor", numbers(6), 0, 0, 4), "S(0) -> S(0)", "has shape"),
    ("each rank has its own diagonal", sample("diagonal.default", numbers(4, 4)), "S(0) -> S(0)", "the op gives"),
    ("windows across the cut", sample("unfold.default", numbers(6, 2), 0, 2, 1), "S(0) -> S(0)", "has shape"),
    ("one row is made two on each rank", sample("expand.default", numbers(1), [2]), "S(0) -> S(0)", "raises"),
    ("windows overlap", sample("unfold_backward.default", numbers(4, 2), [5], 0, 2, 1), "P(max) -> P(max)", "make"),
]  # fmt: skip


@held.for_each_tempting_case(TEMPTING)
def test_a_tempting_line_of_a_view_is_wrong_and_not_there(one, text, because):
    held.assert_tempting(RULES, one, text, because)


SQUEEZED = [
    (sample("squeeze.default", numbers(2, 1, 3)), [1]), (sample("squeeze_.default", numbers(2, 3)), []),
    (sample("squeeze.dim", numbers(2, 1, 3), 0), []), (sample("squeeze_.dim", numbers(2, 1, 3), -3), []),
    (sample("squeeze.dims", numbers(2, 1, 3), [0, -2]), [1]),
]  # fmt: skip


@pytest.mark.parametrize(("one", "dims"), SQUEEZED, ids=lambda x: x.op if hasattr(x, "op") else "")
def test_a_piece_of_one_row_keeps_its_dim_as_each_rank_is_told_which_go_of_the_whole(one, dims):
    found = judged(one, "S(0) -> S(0)", ranks=2)
    assert found.verdict is Verdict.UNSOUND and "has shape" in found.evidence.reason  # where ranks call the op itself
    (claim,) = (
        c
        for c in own_claims(RuleRegistry.of(*RULES).get(one.op), one, 2, run_oracle(one).raw)
        if "S(0) -> S(0)" in str(c.rule)
    )
    assert claim.local == (Call(f"{one.op.rpartition('.')[0]}.dims", (Leaf(0), tuple(dims))),) * 2
    (tried,) = check_claims(one, run_oracle(one), 2, [claim], seed=0)
    assert tried.verdict is Verdict.SOUND


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.data())
def test_groups_part_both_shapes_in_order_and_by_equal_products(sizes, data):
    cut = sorted(data.draw(st.sets(st.integers(0, len(sizes)), max_size=3)))
    after = tuple(math.prod(sizes[a:b]) for a, b in itertools.pairwise([0, *cut, len(sizes)]))
    for old, new in ((tuple(sizes), after), (after, tuple(sizes))):
        found = list(groups(old, new))
        assert [d for group in found for d in group.before] == [d for d, size in enumerate(old) if size != 1]
        assert [d for group in found for d in group.after] == [d for d, size in enumerate(new) if size != 1]
        assert all(math.prod(old[d] for d in g.before) == math.prod(new[d] for d in g.after) for g in found)


@given(st.lists(st.integers(2, 4), min_size=1, max_size=4))
def test_a_shape_beside_itself_is_one_group_for_each_dim(sizes):
    assert [(g.before, g.after, g.same) for g in groups(sizes, sizes)] == [
        ((d,), (d,), True) for d in range(len(sizes))
    ]
