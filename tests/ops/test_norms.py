"""Normalisation: rows by themselves, channels by themselves, and sums of what is learned."""

import pytest
import torch

from strategies.ops.norms import RULES
from tests.ops.held import assert_lines, assert_tempting, lines_of
from tests.strategies.cases import numbers, sample

X, G = numbers(4, 6), numbers(4, 6, seed=1)
W, B = numbers(6, seed=2), numbers(6, seed=3)
MEAN, SPREAD = numbers(6, seed=4), numbers(6, seed=5).abs() + 1
BOTH = [True, True, True]
LAYER = torch.ops.aten.native_layer_norm.default(X, [6], W, B, 1e-5)
BATCH = torch.ops.aten.native_batch_norm.default(X, W, B, None, None, True, 0.1, 1e-5)
TRAINED = ["S(1), S(1), S(0), S(0), S(0), S(0), S(0) -> S(1), S(0), S(0), filled"]
GRADS = ["P(+), R, R, R, R -> P(+), P(+), P(+)"]


def backward(training, mask=BOTH, saved=BATCH[1:]):
    return sample("native_batch_norm_backward.default", G, X, W, MEAN, SPREAD, *saved, training, 1e-5, mask)


LINES = [
    (sample("native_layer_norm.default", X, [6], W, B, 1e-5), ["S(0), R, R -> S(0), S(0), S(0)"]),
    (sample("native_layer_norm.default", X, [4, 6], None, None, 1e-5), []),
    (sample("native_layer_norm_backward.default", G, X, [6], *LAYER[1:], W, B, BOTH),
     ["S(0), S(0), S(0), S(0), R, R -> S(0), P(sum), P(sum)", "P(+), R, R, R, R, R -> P(+), P(+), P(+)"]),
    (sample("native_layer_norm_backward.default", G, X, [6], *LAYER[1:], W, B, [False, True, False]),
     ["S(0), S(0), S(0), S(0), R, R -> -, P(sum), -", "P(+), R, R, R, R, R -> -, P(+), -"]),
    (sample("_fused_rms_norm.default", X, [6], W, None), ["S(0), R -> S(0), S(0)"]),
    (sample("_fused_rms_norm.default", X, [6], W.expand(4, 6), None), []),
    (sample("native_batch_norm.default", X, W, B, MEAN, SPREAD, True, 0.1, 1e-5),
     ["S(1), S(0), S(0), S(0), S(0) -> S(1), S(0), S(0), filled"]),
    (sample("native_batch_norm.default", X, None, None, MEAN, SPREAD, False, 0.1, 1e-5),
     ["S(1), S(0), S(0) -> S(1), S(0), S(0)", "S(0), R, R -> S(0), R, R"]),
    (sample("_native_batch_norm_legit.no_stats", numbers(3, 4, 5), None, None, True, 0.1, 1e-5),
     ["S(1) -> S(1), S(0), S(0), filled"]),
    (sample("_native_batch_norm_legit_no_training.default", numbers(3, 6, 5), W, B, MEAN, SPREAD, 0.1, 1e-5),
     ["S(1), S(0), S(0), S(0), S(0) -> S(1), S(0), S(0)", "S(0), R, R, R, R -> S(0), R, R", "S(2), R, R, R, R -> S(2), R, R"]),
    (sample("_batch_norm_with_update.default", X, W, B, MEAN, SPREAD, 0.1, 1e-5),
     ["S(1), S(0), S(0), S(0), S(0) -> S(1), S(0), S(0), R, filled"]),
    (backward(True), [*TRAINED, "P(+), R, R, R, R, R, R -> P(+), P(+), P(+)"]),
    (backward(False, saved=(torch.empty(0, dtype=X.dtype),) * 2),
     ["S(1), S(1), S(0), S(0), S(0), R, R -> S(1), S(0), S(0), filled",
      "S(0), S(0), R, R, R, R, R -> S(0), P(sum), P(sum), filled", "P(+), R, R, R, R, R, R -> P(+), P(+), P(+)"]),
    (sample("renorm.default", X, 2, 1, 0.5), ["S(1) -> S(1)"]),
]  # fmt: skip
TEMPTING = [
    ("a row is one", sample("native_layer_norm.default", X, [6], None, None, 1e-5), "S(1) -> S(1), R, R", "expected input with shape"),
    ("the batch makes the statistics", sample("native_batch_norm.default", X, None, None, None, None, True, 0.1, 1e-5),
     "S(0) -> S(0), R, R", "the shards make"),
    ("and their gradient", backward(True), "S(0), S(0), R, R, R, R, R -> S(0), P(sum), P(sum)", "the shards make"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("one", "texts"), LINES, ids=lambda x: " ".join([x.op, *x.arguments()]) if hasattr(x, "op") else ""
)
def test_a_norm_has_just_these_lines_and_they_hold(one, texts):
    assert_lines(RULES, one, *texts)


@pytest.mark.parametrize(
    ("one", "text", "because"), [case[1:] for case in TEMPTING], ids=[case[0] for case in TEMPTING]
)
def test_a_tempting_line_of_a_norm_is_wrong_and_not_there(one, text, because):
    assert_tempting(RULES, one, text, because)


@pytest.fixture
def a_kernel_for_cpus():
    """What the kernel for GPUs computes, which is the only one that torch has."""

    def gradients(grad, x, shape, rstd, weight, mask):
        dims = tuple(range(x.ndim - len(shape), x.ndim))
        scaled, normal = grad if weight is None else grad * weight, x * rstd
        front = tuple(range(x.ndim - len(shape)))
        learned = (grad * normal).sum(front) if front else grad * normal
        return rstd * (scaled - normal * (scaled * normal).mean(dims, keepdim=True)), learned

    library = torch.library.Library("aten", "IMPL")
    library.impl("_fused_rms_norm_backward", gradients, "CPU")
    yield
    del library


@pytest.mark.usefixtures("a_kernel_for_cpus")
def test_the_gradients_of_rms_norm_are_cut_by_rows_and_summed_over_them():
    _, rstd = torch.ops.aten._fused_rms_norm.default(X, [6], W, None)
    one = sample("_fused_rms_norm_backward.default", G, X, [6], rstd, W, [True, True])
    assert_lines(RULES, one, "S(0), S(0), S(0), R -> S(0), P(sum)", "P(+), R, R, R -> P(+), P(+)")
    assert_tempting(RULES, one, "S(0), S(0), S(0), R -> S(0), R", "rank 0 make")


# torch's kernels read saved statistics as if they had no gaps, so a judge who puts gaps in finds them unstable and is
# silent: the gradients of layer and group norm are compared here.


@pytest.mark.parametrize("rows", [(2, 2), (3, 1), (4, 0)])
def test_the_gradients_of_layer_norm_are_cut_by_rows_and_summed_over_them(rows):
    def run(*pieces):
        return torch.ops.aten.native_layer_norm_backward.default(pieces[0], pieces[1], [6], *pieces[2:], W, B, BOTH)

    whole = run(G, X, *LAYER[1:])
    ranks = [run(*pieces) for pieces in zip(*(x.split(rows) for x in (G, X, *LAYER[1:])), strict=True)]
    torch.testing.assert_close(torch.cat([out[0] for out in ranks]), whole[0])
    for learned in (1, 2):
        torch.testing.assert_close(sum(out[learned] for out in ranks), whole[learned])
    assert (0 in rows) == torch.allclose(ranks[0][1], whole[1])  # a replica it is only where one rank has all


@pytest.mark.parametrize("parts", [(0.25, 0.75), (3.0, -2.0)])
def test_the_gradients_of_layer_norm_add_up_as_those_of_the_result_do(parts):
    def run(grad):
        return torch.ops.aten.native_layer_norm_backward.default(grad, X, [6], *LAYER[1:], W, B, BOTH)

    noise = numbers(4, 6, seed=9)
    ranks = [run(G * parts[0] + noise), run(G * parts[1] - noise)]
    for one, two, whole in zip(*ranks, run(G), strict=True):
        torch.testing.assert_close(one + two, whole)
        assert not torch.allclose(one, whole)


def test_the_gradients_of_group_norm_are_linear_in_that_of_the_result():
    x, grad = numbers(2, 6, 5), numbers(2, 6, 5, seed=1)
    _, mean, rstd = torch.ops.aten.native_group_norm.default(x, W, B, 2, 6, 5, 3, 1e-5)
    one = sample("native_group_norm_backward.default", grad, x, mean, rstd, W, 2, 6, 5, 3, BOTH)
    texts = {f"P({kind}), R, R, R, R -> P({kind}), P({kind}), P({kind})" for kind in ("sum", "avg")}
    assert {str(line) for line in lines_of(RULES, one)} == texts
    noise = numbers(2, 6, 5, seed=2)
    whole, first, second = (one.call([g, *one.tensors[1:]]) for g in (grad, grad + noise, -noise))
    for all_, left, right in zip(whole, first, second, strict=True):
        torch.testing.assert_close(left + right, all_)
