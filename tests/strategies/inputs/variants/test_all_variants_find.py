"""What each form of a call, and each kind of values, alone finds: a wrong rule that is found sound without it.
Rules that are right stay sound in every form of their call, and for all values."""

import pytest
import torch

from strategies.inputs.variants.adversarial import VALUES
from strategies.inputs.variants.all_variants import FORMS
from strategies.model.arguments import argument_values
from strategies.model.rule import Sample
from strategies.model.verdict import Verdict
from tests.strategies.adverse_ops import WrongRule, always, argument, tried, verdicts
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


def right_for_two(one: Sample) -> list[str]:
    return ["S(2) -> S(2)"] if argument(one, "upscale_factor") == 2 else ["S(1) -> S(1)"]


def takes_sizes_for_the_tensor(one: Sample) -> list[str]:
    """Ones that are as large as a tensor with parts of a sum are taken for parts, too."""
    return ["P(sum) -> P(sum)"] if tuple(argument(one, "size")) == tuple(one.tensors[0].shape) else ["R -> R"]


BY_FORM: list[tuple[str, Sample, WrongRule]] = [
    ("dims respelled", sample("cumsum.default", X, 1), compares_spellings),
    ("other dims", sample("cumsum.default", X, 1), always("S(0) -> S(0)")),
    ("no dims", sample("sum.dim_IntList", X, [1], True), free_dims),
    ("keepdim", sample("sum.dim_IntList", X, [0]), always("S(1) -> S(0)")),
    ("negative indices", sample("index.Tensor", numbers(1, 3).expand(12, 3), [torch.zeros(12, dtype=torch.int64)]),
     always("S(0), S(0) -> S(0)")),
    ("operand of another length", sample("gather.default", ROWS, 1, torch.zeros(12, 12, dtype=torch.int64)),
     always("S(0), S(0) -> S(0)")),
    ("even", sample("sum.dim_IntList", numbers(5, 3), [0]), sum_or_average),
    ("one row short", sample("mean.dim", ROWS, [0]), always("S(0) -> P(avg)")),
    ("uneven", sample("mean.dim", ROWS, [0]), always("S(0) -> P(avg)")),
    ("square", sample("t.default", X), finds_the_dim_by_its_size),
    ("oblong", sample("t.default", numbers(4, 4)), minds_squares_only),
    ("no rows", sample("relu.default", X), minds_empty_tensors_wrongly),
    ("one row", sample("squeeze.dim", X, 0), always("S(1) -> S(1)")),
    ("broadcast", sample("add.Tensor", X, X), always("S(0), S(0) -> S(0)")),
    ("operand of more dims", sample("mul.Tensor", ROWS, ROWS + 2), always("S(0), S(0) -> S(0)")),
    ("without dims", sample("relu.default", X + 9), minds_points_wrongly),
    ("transposed", sample("relu.default", X), looks_at_strides),
    ("gaps", sample("relu.default", X), looks_at_strides),
    ("expanded", sample("relu.default", X), looks_at_strides),
    ("other scalars", sample("mul.Scalar", X, 3.0), always("P(max) -> P(max)")),
    ("equal numbers", sample("histc.default", X, 4, -2, 2), always("S(0) -> P(sum)")),
    ("other flags", sample("index_put.default", X, [torch.tensor([1])], X[:1]), always("P(max), R, P(max) -> P(max)")),
    ("other dtypes", sample("sum.dim_IntList", X, [0]), always("P(sum) -> P(sum)")),
    ("own sizes", sample("new_ones.default", X, [2]), takes_sizes_for_the_tensor),
    ("other reductions", sample("mse_loss.default", X, X + 1, 2), always("S(0), S(0) -> P(sum)")),
    ("ignored class", loss(None, 1, -100), MEANS[1]),
    ("weights", loss(None, 1, -100), unweighted),
    ("left out", sample("clamp.Tensor", X, X - 1, X + 1), counts_on_a_bound),
    ("one output", normalised(), moves_up),
    ("other counts", sample("pixel_shuffle.default", numbers(1, 4, 12, 2), 2), right_for_two),
    ("other lists", sample("repeat.default", ROWS, [1, 2]), always("S(0) -> S(0)")),
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
    ("infinity", sample("nan_to_num.default", X, 0.0, -50.0), always("P(max) -> P(max)")),
    ("minus infinity", sample("nan_to_num.default", X, 0.0, 9.0, 50.0), always("P(min) -> P(min)")),
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


INDEX = torch.tensor([[0, 3, 1, 2], [3, 3, 0, 1], [1, 1, 1, 0], [2, 0, 3, 3]])


def kept(*kinds: str) -> WrongRule:
    """Shards of every dim of the first tensor, where all tensors have its shape, and these kinds of parts."""

    def claims(one: Sample) -> list[str]:
        first, count = one.tensors[0], len(one.tensors)
        alike = all(x.shape == first.shape for x in one.tensors)
        every = [f"S({d})" for d in range(first.ndim)] if alike else []
        return [f"{', '.join([p] * count)} -> {p}" for p in (*every, *kinds)]

    return claims


def scaled(one: Sample) -> list[str]:
    return ["P(sum), R -> P(sum)", "R, P(sum) -> P(sum)", "P(avg), R -> P(avg)", *kept()(one)]


def product(one: Sample) -> list[str]:
    inner = one.tensors[0].shape[1] == one.tensors[1].shape[0]
    return ["S(0), R -> S(0)", "R, S(1) -> S(1)", "P(sum), R -> P(sum)", *(["S(1), S(0) -> P(sum)"] if inner else [])]


def dims(one: Sample) -> set[int]:
    given, ndim = argument(one, "dim"), max(one.tensors[0].ndim, 1)
    every = [given] if isinstance(given, int) else given or range(ndim)
    return {d % ndim for d in every}


def linear(one: Sample, kinds: tuple[str, ...]) -> list[str]:
    """What a sum keeps if it is not cast to integers."""
    return [f"{p} -> {p}" for p in kinds if argument_values(one).get("dtype") in (None, one.tensors[0].dtype)]


def along(*kinds: str) -> WrongRule:
    """What works along one dim may be sharded along all others."""

    def claims(one: Sample) -> list[str]:
        free = [f"S({d}) -> S({d})" for d in range(one.tensors[0].ndim) if d not in dims(one)]
        return [*free, *linear(one, kinds)]

    return claims


def reduced(partial: str, *kinds: str) -> WrongRule:
    """A reduction: its own dims make parts, the others move up if the dims are not kept."""

    def claims(one: Sample) -> list[str]:
        gone, keep = dims(one), argument(one, "keepdim")
        x = one.tensors[0]
        found = linear(one, kinds)
        for d, size in enumerate(x.shape):
            if d not in gone:
                found.append(f"S({d}) -> S({d if keep else d - sum(g < d for g in gone)})")
            elif partial == "P(sum)" or size % 12 == 0:  # a maximum of no rows is none; means need even shards
                found.append(f"S({d}) -> {partial}")
        return found

    return claims


def gathered(one: Sample) -> list[str]:
    x, index = one.tensors
    (dim,) = dims(one)
    free = [d for d in range(x.ndim) if d != dim and x.shape[d] == index.shape[d]]
    shared = [f"R, S({dim}) -> S({dim})"] if index.ndim else []
    return [*shared, "P(sum), R -> P(sum)", "P(max), R -> P(max)", *(f"S({d}), S({d}) -> S({d})" for d in free)]


def chosen(one: Sample) -> list[str]:
    (dim,) = dims(one)
    free = [d for d in range(one.tensors[0].ndim) if d != dim]
    return [
        "P(sum), R -> P(sum)",
        "P(min), R -> P(min)",
        f"R, S(0) -> S({dim})",
        *(f"S({d}), R -> S({d})" for d in free),
    ]


def selected(one: Sample) -> list[str]:
    return ["R, P(sum), P(sum) -> P(sum)", "R, P(max), P(max) -> P(max)", *kept()(one)]


def rows_of(one: Sample) -> list[str]:
    return ["S(0), R, R -> S(0), S(0), S(0)"]


def losses(one: Sample) -> list[str]:
    mean, sums = argument(one, "reduction") == 1, argument(one, "reduction") == 2
    even = one.tensors[0].shape == one.tensors[1].shape and all(s % 12 == 0 for s in one.tensors[0].shape[:1])
    alike = one.tensors[0].shape == one.tensors[1].shape and one.tensors[0].ndim > 0
    found = ["S(0), S(0) -> P(sum)"] if sums and alike else []
    return [*found, *(["S(0), S(0) -> P(avg)"] if mean and even and alike else []), "R, R -> R"]


LONG_X, LONG_Y = numbers(12, 4), numbers(12, 4, seed=1)
WHOLE = numbers(12, 4, dtype=torch.int64)
RIGHT: list[tuple[Sample, WrongRule]] = [
    (sample("add.Tensor", LONG_X, LONG_Y), kept("P(sum)", "P(avg)")),
    (sample("add.Tensor", WHOLE, WHOLE + 1), kept("P(sum)")),
    (sample("mul.Tensor", LONG_X, LONG_Y), scaled),
    (sample("div.Tensor", LONG_X, LONG_Y), lambda one: ["P(sum), R -> P(sum)", "P(avg), R -> P(avg)", *kept()(one)]),
    (sample("maximum.default", LONG_X, LONG_Y), kept("P(max)")),
    (sample("minimum.default", LONG_X.float(), LONG_Y.float()), kept("P(min)")),
    (sample("relu.default", LONG_X), kept("P(max)", "P(min)")),
    (sample("exp.default", LONG_X), kept("P(max)", "P(min)")),
    (sample("neg.default", LONG_X), lambda one: ["P(sum) -> P(sum)", "P(max) -> P(min)", "P(min) -> P(max)", *kept()(one)]),
    (sample("bitwise_not.default", WHOLE), kept()),
    (sample("mm.default", LONG_X, LONG_Y.t()), product),
    (sample("mm.default", LONG_X.float(), numbers(4, 12).float()), product),
    (sample("sum.dim_IntList", LONG_X, [0], True), reduced("P(sum)", "P(sum)", "P(avg)")),
    (sample("sum.dim_IntList", WHOLE, [1]), reduced("P(sum)", "P(sum)")),
    (sample("mean.dim", numbers(12, 24), [0]), reduced("P(avg)", "P(sum)", "P(avg)")),
    (sample("amax.default", numbers(12, 24), [0]), reduced("P(max)", "P(max)")),
    (sample("amin.default", numbers(12, 12, dtype=torch.int64), [1]), reduced("P(min)", "P(min)")),
    (sample("cumsum.default", LONG_X, 1), along("P(sum)", "P(avg)")),
    (sample("_softmax.default", LONG_X, 1, False), along()),
    (sample("_log_softmax.default", LONG_X.float(), 0, False), along()),
    (sample("sort.stable", LONG_X, stable=True, dim=0), lambda one: [f"{c}, {c[-4:]}" for c in along()(one)]),
    (sample("max.dim", LONG_X, 0), lambda one: [f"{c}, {c[-4:]}" for c in reduced("P(max)")(one) if c.endswith(")") and "P" not in c]),
    (sample("argmax.default", LONG_X, 1), lambda one: [c for c in reduced("P(max)")(one) if "P" not in c] if argument(one, "dim") is not None else []),
    (sample("gather.default", numbers(4, 4), 1, INDEX), gathered),
    (sample("index_select.default", LONG_X, 0, INDEX[0]), chosen),
    (sample("embedding.default", LONG_X, INDEX), lambda one: ["S(1), R -> S(2)", "R, S(0) -> S(0)", "P(sum), R -> P(sum)"] if one.tensors[1].ndim == 2 else []),
    (sample("where.self", LONG_X > 0, LONG_X, LONG_Y), selected),
    (sample("clamp.default", LONG_X, -0.5, 0.5), kept("P(max)", "P(min)")),
    (sample("nan_to_num.default", LONG_X), kept()),
    (sample("native_layer_norm.default", LONG_X, [4], LONG_Y[0], LONG_Y[1], 1e-5), rows_of),
    (sample("mse_loss.default", LONG_X, LONG_Y, 1), losses),
    (sample("cat.default", [LONG_X, LONG_Y], 1), lambda one: ["S(0), S(0) -> S(0)"] if dims(one) == {1} and one.tensors[0].ndim > 1 else []),
    (sample("all.dim", LONG_X > 0, 0), reduced("P(min)")),
    (sample("any.dim", LONG_X > 0, 0), reduced("P(max)")),
]  # fmt: skip


@pytest.mark.few(6)
@pytest.mark.parametrize(("one", "rule"), RIGHT, ids=[f"{one.op}-{i}" for i, (one, _) in enumerate(RIGHT)])
@pytest.mark.parametrize(("turns", "each"), [(1, 3), pytest.param(2, 4, marks=pytest.mark.slow)])
def test_a_right_rule_stays_sound_in_every_form_and_for_all_values(one, rule, turns, each):
    found = tried(one, rule, FORMS, VALUES, turns=turns, each=each)
    wrong = {
        f"{i.rule} on {i.ranks} ranks, {i.sample.origin} {i.sample.arguments()} {i.evidence.variant}: {i.evidence.reason}"
        for i in found
        if i.verdict is Verdict.UNSOUND
    }
    assert wrong == set()
    assert sum(i.verdict is Verdict.SOUND for i in found) > 10
