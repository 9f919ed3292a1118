"""Rules that are right stay sound in every form of their call, and for all values."""

import pytest
import torch

from strategies.inputs.variants.adversarial import VALUES
from strategies.inputs.variants.all_variants import FORMS
from strategies.model.arguments import argument_values
from strategies.model.rule import Sample
from strategies.model.verdict import Verdict
from tests.strategies.adverse_ops import WrongRule, argument, tried
from tests.strategies.cases import numbers, sample

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


X, Y = numbers(12, 4), numbers(12, 4, seed=1)
WHOLE = numbers(12, 4, dtype=torch.int64)
RIGHT: list[tuple[Sample, WrongRule]] = [
    (sample("add.Tensor", X, Y), kept("P(sum)", "P(avg)")),
    (sample("add.Tensor", WHOLE, WHOLE + 1), kept("P(sum)")),
    (sample("mul.Tensor", X, Y), scaled),
    (sample("div.Tensor", X, Y), lambda one: ["P(sum), R -> P(sum)", "P(avg), R -> P(avg)", *kept()(one)]),
    (sample("maximum.default", X, Y), kept("P(max)")),
    (sample("minimum.default", X.float(), Y.float()), kept("P(min)")),
    (sample("relu.default", X), kept("P(max)", "P(min)")),
    (sample("exp.default", X), kept("P(max)", "P(min)")),
    (sample("neg.default", X), lambda one: ["P(sum) -> P(sum)", "P(max) -> P(min)", "P(min) -> P(max)", *kept()(one)]),
    (sample("bitwise_not.default", WHOLE), kept()),
    (sample("mm.default", X, Y.t()), product),
    (sample("mm.default", X.float(), numbers(4, 12).float()), product),
    (sample("sum.dim_IntList", X, [0], True), reduced("P(sum)", "P(sum)", "P(avg)")),
    (sample("sum.dim_IntList", WHOLE, [1]), reduced("P(sum)", "P(sum)")),
    (sample("mean.dim", numbers(12, 24), [0]), reduced("P(avg)", "P(sum)", "P(avg)")),
    (sample("amax.default", numbers(12, 24), [0]), reduced("P(max)", "P(max)")),
    (sample("amin.default", numbers(12, 12, dtype=torch.int64), [1]), reduced("P(min)", "P(min)")),
    (sample("cumsum.default", X, 1), along("P(sum)", "P(avg)")),
    (sample("_softmax.default", X, 1, False), along()),
    (sample("_log_softmax.default", X.float(), 0, False), along()),
    (sample("sort.stable", X, stable=True, dim=0), lambda one: [f"{c}, {c[-4:]}" for c in along()(one)]),
    (sample("max.dim", X, 0), lambda one: [f"{c}, {c[-4:]}" for c in reduced("P(max)")(one) if c.endswith(")") and "P" not in c]),
    (sample("argmax.default", X, 1), lambda one: [c for c in reduced("P(max)")(one) if "P" not in c] if argument(one, "dim") is not None else []),
    (sample("gather.default", numbers(4, 4), 1, INDEX), gathered),
    (sample("index_select.default", X, 0, INDEX[0]), chosen),
    (sample("embedding.default", X, INDEX), lambda one: ["S(1), R -> S(2)", "R, S(0) -> S(0)", "P(sum), R -> P(sum)"] if one.tensors[1].ndim == 2 else []),
    (sample("where.self", X > 0, X, Y), selected),
    (sample("clamp.default", X, -0.5, 0.5), kept("P(max)", "P(min)")),
    (sample("nan_to_num.default", X), kept()),
    (sample("native_layer_norm.default", X, [4], Y[0], Y[1], 1e-5), rows_of),
    (sample("mse_loss.default", X, Y, 1), losses),
    (sample("cat.default", [X, Y], 1), lambda one: ["S(0), S(0) -> S(0)"] if dims(one) == {1} and one.tensors[0].ndim > 1 else []),
    (sample("all.dim", X > 0, 0), reduced("P(min)")),
    (sample("any.dim", X > 0, 0), reduced("P(max)")),
]  # fmt: skip


@pytest.mark.parametrize(("one", "rule"), RIGHT, ids=[f"{one.op}-{i}" for i, (one, _) in enumerate(RIGHT)])
def test_a_right_rule_stays_sound_in_every_form_and_for_all_values(one, rule):
    found = tried(one, rule, FORMS, VALUES, turns=2, each=4)
    wrong = {
        f"{i.rule} on {i.ranks} ranks, {i.sample.origin} {i.sample.arguments()} {i.evidence.variant}: {i.evidence.reason}"
        for i in found
        if i.verdict is Verdict.UNSOUND
    }
    assert wrong == set()
    assert sum(i.verdict is Verdict.SOUND for i in found) > 20
