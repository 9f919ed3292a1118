import pytest
import torch

from strategies.validation.discover import discover
from strategies.validation.rule_inference import RuleLine, infer_lines, line_text, values_by_name
from tests.strategies.cases import numbers, sample
from tests.strategies.planted_ops import planted

X, CUBE, ROW = numbers(4, 6), numbers(4, 6, 5), numbers(6)


def said(*given, op=""):
    return [line_text(line) for line in infer_lines(discover(op or given[0].op, given=given).surveys)]


def test_rules_of_all_dims_become_one_line_for_each_d():
    found = said(planted("forgotten", X), planted("forgotten", CUBE), planted("forgotten", ROW))
    assert found == [
        "S(d) -> S(d)", *(f"P({kind}) -> P({kind}) where numbers == 'f'" for kind in ("sum", "avg", "min", "max")),
    ]  # fmt: skip


def test_on_one_number_of_dims_a_line_says_so():
    assert "S(d) -> S(d) where ndims[0] == 2" in said(planted("forgotten", X))


def test_a_line_is_for_the_numbers_on_which_it_was_seen():
    both = said(planted("forgotten", X), planted("forgotten", numbers(4, 6, dtype=torch.int64)))
    assert "P(sum) -> P(sum) where numbers in ('f', 'i')" in both


def test_a_sign_is_named_where_the_other_was_not_seen_or_is_wrong():
    plus, minus = sample("add.Tensor", X, X, alpha=0.5), sample("add.Tensor", X, X, alpha=-0.5)
    assert "R, P(max) -> P(max) where alpha > 0 and numbers == 'ff'" in said(plus)
    assert "R, P(max) -> P(min) where alpha < 0 and numbers == 'ff'" in said(plus, minus)


def test_a_dim_that_an_argument_names_is_written_by_that_name():
    calls = [sample("planted.totalled.default", x, dim=dim) for x in (X, CUBE) for dim in range(x.ndim)]
    found = said(*calls)
    assert "S(d) -> P(sum) where d == dim % ndims[0]" in found
    assert "S(d) -> S(d - (d > dim % ndims[0])) where d != dim % ndims[0]" in found


def test_an_argument_that_was_always_the_same_is_named():
    found = said(*(sample("planted.totalled.default", x, dim=0) for x in (X, CUBE)))
    assert "P(avg) -> P(avg) where dim == 0 and numbers == 'f'" in found


def test_leading_dims_are_distinguished_from_the_last_two():
    calls = [sample("tril.default", numbers(*shape), k) for shape in ((4, 6, 5), (3, 4, 6, 5)) for k in (0, 1)]
    assert "S(d) -> S(d) where d < ndims[0] - 2" in said(*calls)


def test_no_line_says_what_a_survey_speaks_against():
    calls = [sample("add.Tensor", x, y, alpha=a) for x, y in ((X, X), (CUBE, X[:, :5]), (X, ROW)) for a in (1, -1, 0)]
    surveys = discover("aten.add.Tensor", given=calls).surveys
    for line in infer_lines(surveys):
        for one in surveys:
            words = values_by_name(one) | {"Shard": str, "Partial": str, "Replicate": lambda: "R"}
            holds = all(eval(where, words | {"d": 0}) for where in line.where)
            assert not holds or not any(
                b.against for n, b in one.backing.items() if n.endswith(line_text(line).partition(" where")[0])
            )


def test_nothing_missing_makes_no_lines():
    assert said(sample("neg.default", X)) == []


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (RuleLine(("Partial('max')", "Replicate()"), ("None",)), "P(max), R -> None"),
        (RuleLine(("Shard(d)",), ("Shard(d + max(ndims) - ndims[0])",), (), 0), "S(d) -> S(d + max(ndims) - ndims[0])"),
    ],
)
def test_lines_in_words(line, words):
    assert line_text(line) == words
