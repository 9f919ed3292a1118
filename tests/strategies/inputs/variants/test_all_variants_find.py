"""What each form of a call, and each kind of values, alone finds: a wrong rule that is found sound without it."""

import pytest
import torch

from strategies.inputs.variants.adversarial import VALUES
from strategies.inputs.variants.all_variants import FORMS
from strategies.model.rule import Sample
from strategies.model.verdict import Verdict
from tests.strategies.adverse_ops import WrongRule, always, argument, verdicts
from tests.strategies.cases import numbers, sample
from tests.strategies.planted_ops import planted

FORM = {form.name: form for form in FORMS}
KIND = {kind.name: kind for kind in VALUES}
X = numbers(4, 6)
ROWS = numbers(12, 12)
TARGET = torch.tensor([0, 1, 2, 1] * 3)
SORTED = torch.arange(12.0, dtype=torch.float64)


def compares_spellings(one: Sample) -> list[str]:
    """Every dim is free that is not spelled like the one of the call."""
    return [f"S({d}) -> S({d})" for d in range(one.tensors[0].ndim) if d != argument(one, "dim")]


def free_dims(one: Sample) -> list[str]:
    """No dims are taken for no reduction."""
    dims = [d % one.tensors[0].ndim for d in argument(one, "dim") or []]
    return [f"S({d}) -> S({d})" for d in range(one.tensors[0].ndim) if d not in dims]


def sum_or_average(one: Sample) -> list[str]:
    return ["S(0) -> P(avg)"] if one.tensors[0].shape[0] % 12 == 0 else ["S(0) -> P(sum)"]


def finds_the_dim_by_its_size(one: Sample) -> list[str]:
    rows, columns = one.tensors[0].shape
    return [f"S(0) -> S({[columns, rows].index(rows)})"]


def minds_squares_only(one: Sample) -> list[str]:
    rows, columns = one.tensors[0].shape
    return ["S(0) -> S(1)"] if rows == columns else ["S(0) -> S(0)"]


def minds_empty_tensors_wrongly(one: Sample) -> list[str]:
    return ["S(1) -> S(1)"] if one.tensors[0].numel() else ["S(1) -> R"]


def minds_points_wrongly(one: Sample) -> list[str]:
    return ["S(0) -> S(0)"] if one.tensors[0].ndim else ["R -> P(sum)"]


def looks_at_strides(one: Sample) -> list[str]:
    return ["S(0) -> S(0)"] if one.tensors[0].is_contiguous() else ["S(0) -> P(sum)"]


def counts_on_a_bound(one: Sample) -> list[str]:
    return ["S(0), S(0), S(0) -> S(0)"] if len(one.tensors) == 3 else ["S(0), S(0) -> P(sum)"]


def moves_up(one: Sample) -> list[str]:
    """The placements of the results that are asked for, in the order of the results."""
    left = ["S(0)", "P(sum)", "P(sum)"]
    return [
        f"S(0), S(0), S(0), S(0), R, R -> {', '.join(left.pop(0) if a else '-' for a in argument(one, 'output_mask'))}"
    ]


def loss(*rest: object) -> Sample:
    return sample("nll_loss_forward.default", numbers(12, 3), TARGET, *rest)


def normalised() -> Sample:
    x, gain = numbers(12, 6), numbers(6, seed=2)
    _, mean, scale = torch.native_layer_norm(x, [6], gain, gain, 1e-5)
    grad = numbers(12, 6, seed=1)
    return sample("native_layer_norm_backward.default", grad, x, [6], mean, scale, gain, gain, [True, True, True])


MEANS = always("S(0), S(0), R -> P(avg), P(sum)"), always("S(0), S(0) -> P(avg), P(sum)")


def unweighted(one: Sample) -> list[str]:
    return MEANS[0 if argument(one, "weight") is not None else 1](one)


BY_FORM: list[tuple[str, Sample, WrongRule]] = [
    ("dims respelled", sample("cumsum.default", X, 1), compares_spellings),
    ("other dims", sample("cumsum.default", X, 1), always("S(0) -> S(0)")),
    ("no dims", sample("sum.dim_IntList", X, [1], True), free_dims),
    ("keepdim", sample("sum.dim_IntList", X, [0]), always("S(1) -> S(0)")),
    ("negative indices", sample("index.Tensor", numbers(1, 3).expand(12, 3), [torch.zeros(12, dtype=torch.int64)]),
     always("S(0), S(0) -> S(0)")),
    ("operand shortened", sample("gather.default", ROWS, 1, torch.zeros(12, 12, dtype=torch.int64)),
     always("S(0), S(0) -> S(0)")),
    ("even", sample("sum.dim_IntList", numbers(5, 3), [0]), sum_or_average),
    ("one row short", sample("mean.dim", ROWS, [0]), always("S(0) -> P(avg)")),
    ("uneven", sample("mean.dim", ROWS, [0]), always("S(0) -> P(avg)")),
    ("square", sample("t.default", X), finds_the_dim_by_its_size),
    ("oblong", sample("t.default", numbers(4, 4)), minds_squares_only),
    ("no rows", sample("relu.default", X), minds_empty_tensors_wrongly),
    ("one row", sample("squeeze.dim", X, 0), always("S(1) -> S(1)")),
    ("broadcast", sample("add.Tensor", X, X), always("S(0), S(0) -> S(0)")),
    ("without dims", sample("relu.default", X + 9), minds_points_wrongly),
    ("transposed", sample("relu.default", X), looks_at_strides),
    ("gaps", sample("relu.default", X), looks_at_strides),
    ("expanded", sample("relu.default", X), looks_at_strides),
    ("other scalars", sample("mul.Scalar", X, 3.0), always("P(max) -> P(max)")),
    ("other flags", sample("index_put.default", X, [torch.tensor([1])], X[:1]), always("P(max), R, P(max) -> P(max)")),
    ("other dtypes", sample("sum.dim_IntList", X, [0]), always("P(sum) -> P(sum)")),
    ("other reductions", sample("mse_loss.default", X, X + 1, 2), always("S(0), S(0) -> P(sum)")),
    ("ignored class", loss(None, 1, -100), MEANS[1]),
    ("weights", loss(None, 1, -100), unweighted),
    ("left out", sample("clamp.Tensor", X, X - 1, X + 1), counts_on_a_bound),
    ("one output", normalised(), moves_up),
]  # fmt: skip


@pytest.mark.parametrize(("name", "one", "rule"), BY_FORM, ids=[name for name, *_ in BY_FORM])
def test_what_a_form_alone_finds(name, one, rule):
    assert verdicts(one, rule) == {Verdict.SOUND}
    assert Verdict.UNSOUND in verdicts(one, rule, forms=(FORM[name],))


def test_every_form_has_a_rule_that_it_alone_finds():
    assert [name for name, *_ in BY_FORM] == [form.name for form in FORMS]
    assert len(FORM) == len(FORMS)


FLAGS = torch.tensor([True] + [False] * 11)
BY_VALUES: list[tuple[str, Sample, WrongRule]] = [
    ("specials", planted("patched", X), always("S(0) -> S(0)")),
    ("holes", sample("nan_to_num.default", X), always("P(sum) -> P(sum)")),
    ("cancelling", sample("clamp.default", X, -300.0, 300.0), always("P(sum) -> P(sum)")),
    ("ascending", sample("adverse.running_min.default", SORTED.flip(0)), always("S(0) -> S(0)")),
    ("descending", sample("adverse.running_max.default", SORTED), always("S(0) -> S(0)")),
    ("middle", sample("adverse.not_at_an_end.default", SORTED), always("S(0) -> P(max)")),
    ("ties", sample("adverse.zeros_in.default", numbers(12)), always("S(0) -> R")),
    ("few integers", sample("adverse.peaks.default", torch.arange(12)), always("S(0) -> P(max)")),
    ("all equal", sample("adverse.matrix_rank.default", torch.eye(12, dtype=torch.float64)), always("S(0) -> P(sum)")),
    ("zeros", sample("any.dim", X + 9, 1), always("P(sum) -> P(sum)")),
    ("positive", sample("abs.default", -X.abs() - 1), always("P(max) -> P(min)")),
    ("negative", sample("abs.default", X.abs() + 1), always("P(min) -> P(min)")),
    ("fading", sample("adverse.of_the_largest.default", torch.ones(12, 2)), always("S(0) -> S(0)")),
    ("cotangents", sample("adverse.averaged_backward.default", torch.ones(12)), always("S(0) -> S(0)")),
    ("all true", sample("adverse.some.default", FLAGS), always("S(0) -> P(sum)")),
    ("all false", sample("adverse.some_missing.default", FLAGS.logical_not()), always("S(0) -> P(sum)")),
    ("repeated indices", sample("adverse.distinct.default", torch.arange(12)), always("S(0) -> P(sum)")),
    ("limits", sample("adverse.saturated.default", torch.arange(12)), always("S(0) -> P(sum)")),
]  # fmt: skip


@pytest.mark.parametrize(("name", "one", "rule"), BY_VALUES, ids=[name for name, *_ in BY_VALUES])
def test_what_values_alone_find(name, one, rule):
    assert verdicts(one, rule) == {Verdict.SOUND}
    assert Verdict.UNSOUND in verdicts(one, rule, kinds=(KIND[name],))


def test_all_values_have_a_rule_that_they_alone_find():
    assert [name for name, *_ in BY_VALUES] == [kind.name for kind in VALUES]
    assert len(KIND) == len(VALUES)
