"""Losses: none, sums and means of pieces, and what the gradient of a mean is divided by."""

import torch

from strategies.ops.nn.losses import RULES
from tests.strategies.cases import numbers, sample
from tests.strategies.ops import held

NONE, MEAN, SUM = 0, 1, 2
X, T, G = numbers(4, 6), numbers(4, 6, seed=1), numbers(4, 6, seed=2)
P, Q, W = X.sigmoid(), T.sigmoid(), numbers(6, seed=3).abs()
ONE, CLASSES, SCORES = numbers(seed=4), torch.tensor([0, 3, 5, 1]), numbers(4, 6).log_softmax(1)
IMAGE, PIXELS = numbers(2, 3, 4, 5), torch.zeros(2, 4, 5, dtype=torch.int64)
TOTAL = torch.tensor(4.0, dtype=torch.float64)
ROWS = {NONE: "S(0)", SUM: "P(sum)"}


def nll(reduction, weight=None, scores=SCORES, target=CLASSES):
    return sample("nll_loss_forward.default", scores, target, weight, reduction, -100)


def nll_backward(reduction, grad):
    return sample("nll_loss_backward.default", grad, SCORES, CLASSES, None, reduction, -100, TOTAL)


UNUSED = "R, R, R, P(*) -> R"
LINES = [
    (sample("mse_loss.default", X, T, NONE), ["S(0), S(0) -> S(0)", "S(1), S(1) -> S(1)"]),
    (sample("mse_loss.default", X, T, SUM), ["S(0), S(0) -> P(sum)", "S(1), S(1) -> P(sum)"]),
    (sample("mse_loss.default", X, T, MEAN), ["S(0), S(0) -> P(avg), even", "S(1), S(1) -> P(avg), even"]),
    (sample("mse_loss.default", X, T[0], SUM), ["S(0), R -> P(sum)", "S(1), S(0) -> P(sum)"]),
    (sample("huber_loss.default", X[:1], T, MEAN), ["R, S(0) -> P(avg), even", "S(1), S(1) -> P(avg), even"]),
    (sample("binary_cross_entropy.default", P, Q, W, SUM), ["S(0), S(0), R -> P(sum)", "S(1), S(1), S(0) -> P(sum)",
     "R, R, P(+) -> P(+)"]),
    (sample("binary_cross_entropy_with_logits.default", X, Q, None, W, MEAN),
     ["S(0), S(0), R -> P(avg), even", "S(1), S(1), S(0) -> P(avg), even", "R, P(avg), R -> P(avg)"]),
    (sample("binary_cross_entropy_with_logits.default", X, Q, W, None, NONE),
     ["S(0), S(0), R -> S(0)", "S(1), S(1), S(0) -> S(1)", "R, R, P(+) -> P(+)", "R, P(avg), R -> P(avg)"]),
    (sample("binary_cross_entropy_backward.default", ONE, P, Q, W, MEAN),
     ["P(+), R, R, R -> P(+)", "R, R, R, P(+) -> P(+)", "R, R, P(avg), R -> P(avg)"]),
    (sample("binary_cross_entropy_backward.default", G, P[:1], Q, None, NONE),
     ["P(+), R, R -> P(+)", "R, R, P(avg) -> P(avg)"]),  # torch 2.13 gives it the shape of one row
    (sample("mse_loss_backward.default", G, X, T, NONE),
     ["S(0), S(0), S(0) -> S(0)", "S(1), S(1), S(1) -> S(1)", "P(+), R, R -> P(+)", "R, P(+), P(+) -> P(+)",
      "R, P(avg), R -> P(avg)", "R, R, P(avg) -> P(avg)"]),
    (sample("smooth_l1_loss_backward.default", ONE, X, T, SUM, 1.0),
     ["R, S(0), S(0) -> S(0)", "R, S(1), S(1) -> S(1)", "P(+), R, R -> P(+)"]),
    (sample("huber_loss_backward.default", ONE, X, T, MEAN, 1.0), ["P(+), R, R -> P(+)"]),
    (sample("soft_margin_loss_backward.grad_input", ONE, X, T.sign(), SUM, grad_input=G),
     ["R, S(0), S(0), S(0) -> S(0)", "R, S(1), S(1), S(1) -> S(1)", "P(+), R, R, P(+) -> P(+)"]),
    (nll(NONE), ["S(0), S(0) -> S(0), R", "P(+), R -> P(+), R"]),
    (nll(SUM, W), ["S(0), S(0), R -> P(sum), P(sum)", "P(+), R, R -> P(+), R"]),
    (nll(MEAN), ["P(+), R -> P(+), R"]),
    (nll(SUM, scores=SCORES[0], target=CLASSES[0]), ["P(+), R -> P(+), R"]),
    (sample("nll_loss2d_forward.default", IMAGE, PIXELS, None, SUM, -100),
     ["S(0), S(0) -> P(sum), P(sum)", "S(2), S(1) -> P(sum), P(sum)", "S(3), S(2) -> P(sum), P(sum)", "P(+), R -> P(+), R"]),
    (nll_backward(MEAN, ONE), ["R, S(0), S(0), R -> S(0)", "P(+), R, R, R -> P(+)"]),
    (nll_backward(NONE, W[:4]), ["S(0), S(0), S(0), R -> S(0)", "S(0), S(0), S(0), P(sum) -> S(0)", UNUSED, "P(+), R, R, R -> P(+)"]),
    (sample("multi_margin_loss.default", X, CLASSES, 1, 1, None, SUM), ["S(0), S(0) -> P(sum), filled"]),
    (sample("multi_margin_loss.default", X, CLASSES, 1, 1, None, MEAN), ["S(0), S(0) -> P(avg), even"]),
    (sample("multi_margin_loss_backward.default", ONE, X, CLASSES, 1, 1, W, SUM),
     ["R, S(0), S(0), R -> S(0)", "P(+), R, R, R -> P(+)"]),
    (sample("multilabel_margin_loss_forward.default", X, PIXELS.new_zeros(4, 6), NONE), ["S(0), S(0) -> S(0), S(0)"]),
]  # fmt: skip
IGNORING = sample("nll_loss_forward.default", SCORES, torch.tensor([0, 0, 0, 1]), None, MEAN, 1)
TEMPTING = [
    ("a part of a target may be above one", sample("binary_cross_entropy.default", P, Q, W, SUM),
     "R, P(avg), R -> P(avg)", "between 0 and 1", 2),
    ("a target is counted once", sample("mse_loss_backward.default", G, X, T, NONE), "R, R, P(sum) -> P(sum)", "the parts make", 2),
    ("a loss is not straight in its scores", sample("binary_cross_entropy_with_logits.default", X, Q, None, W, MEAN),
     "P(avg), R, R -> P(avg)", "the parts make", 2),
    ("a mean of unequal pieces", sample("mse_loss.default", X, T, MEAN), "S(0), S(0) -> P(avg)", "the parts make", 3),
    ("each divides by what it has", sample("mse_loss_backward.default", ONE, X, T, MEAN), "R, S(0), S(0) -> S(0)", "make", 2),
    ("also of the huber loss", sample("huber_loss_backward.default", ONE, X, T, MEAN, 1.0), "R, S(0), S(0) -> S(0)", "make", 2),
    ("and of margins", sample("multi_margin_loss_backward.default", ONE, X, CLASSES, 1, 1, None, MEAN),
     "R, S(0), S(0) -> S(0)", "make", 2),
    ("weights differ", nll(MEAN, W), "S(0), S(0), R -> P(avg), P(sum)", "the parts make", 2),
    ("what is ignored does not count", IGNORING, "S(0), S(0) -> P(avg), P(sum)", "the parts make", 2),
    ("a square of a sum", sample("mse_loss.default", X, T, SUM), "P(sum), R -> P(sum)", "the parts make", 2),
]  # fmt: skip


@held.for_each_line_case(LINES)
def test_a_loss_has_just_these_lines_and_they_hold(one, texts):
    held.assert_lines(RULES, one, *texts)


@held.for_each_tempting_case(TEMPTING)
def test_a_tempting_line_of_a_loss_is_wrong_and_not_there(one, text, because, ranks):
    held.assert_tempting(RULES, one, text, because, ranks)


def test_what_sums_its_old_out_has_no_rule():
    assert "aten.binary_cross_entropy.out" not in {entry.op for entry in RULES}
    assert "aten.mse_loss.out" in {entry.op for entry in RULES}
