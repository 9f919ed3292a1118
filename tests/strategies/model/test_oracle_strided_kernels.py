"""Gaps between elements, and the arguments that cannot have any."""

import pytest
import torch

from strategies.model.oracle import run_oracle, strided, strided_copies
from strategies.model.rule import Claim, Rule
from strategies.validation.probe import Probe
from tests.strategies.cases import assert_sound, assert_wrong, numbers, placements, sample

X, G = numbers(4, 6), numbers(4, 6, seed=1)
W, B = numbers(6, seed=2), numbers(6, seed=3)
LAYER = torch.ops.aten.native_layer_norm.default(X, [6], W, B, 1e-5)
GRADIENTS = sample("native_layer_norm_backward.default", G, X, [6], *LAYER[1:], W, B, [True, True, True])
BAG = sample("_embedding_bag.default", numbers(5, 3), torch.tensor([0, 4, 2, 1]), torch.tensor([0, 1]))
SOFTMAX = sample("_softmax.out", X, 1, False, out=torch.zeros_like(X))
SGD = sample("_fused_sgd_.default", [X], [G], [], weight_decay=0.1, momentum=0.0, lr=0.1, dampening=0.0, nesterov=False,
             maximize=False, is_first_step=True)  # fmt: skip


def with_gaps(one):
    return [not x.is_contiguous() for x in strided_copies(one.call, one.tensors)]


def test_strided_data_are_the_same_values_with_gaps():
    x = numbers(3, 4)
    assert torch.equal(strided(x), x)
    assert not strided(x).is_contiguous()
    assert strided(x).data_ptr() != x.data_ptr()
    assert strided(torch.tensor(3.0)).shape == ()


@pytest.mark.parametrize(("one", "gaps"), [
    (sample("add.Tensor", X, G), [True, True]),
    (sample("add_.Tensor", X, G), [True, True]),
    (sample("index_select.default", X, 0, torch.tensor([0, 2])), [True, True]),
    (GRADIENTS, [True, True, False, False, True, True]),
    (SOFTMAX, [True, False]),
    (BAG, [True, False, False]),
    (SGD, [False, False]),
], ids=lambda given: getattr(given, "op", ""))  # fmt: skip
def test_all_tensors_have_gaps_but_those_that_kernels_read_as_if_they_had_none(one, gaps):
    assert with_gaps(one) == gaps


@pytest.mark.parametrize("one", [GRADIENTS, SOFTMAX, BAG, SGD], ids=lambda one: one.op)
def test_what_has_no_gaps_is_a_copy_all_the_same(one):
    made = strided_copies(one.call, one.tensors)
    assert all(torch.equal(a, b) for a, b in zip(made, one.tensors, strict=True))
    assert not {x.data_ptr() for x in made} & {x.data_ptr() for x in one.tensors}


@pytest.mark.parametrize("one", [GRADIENTS, SOFTMAX, BAG, SGD], ids=lambda one: one.op)
def test_a_kernel_that_reads_without_strides_leaves_its_results_comparable(one):
    assert not any(slack.isinf().any() for slack in run_oracle(one).slack)


def test_the_gradients_of_layer_norm_are_judged():
    assert_sound(GRADIENTS, "S(0), S(0), S(0), S(0), R, R -> S(0), P(sum), P(sum)")
    assert_wrong(GRADIENTS, "S(0), S(0), S(0), S(0), R, R -> S(0), R, R", "as R: rank 0 make")
    assert_wrong(GRADIENTS, "P(max), R, R, R, R, R -> P(max), P(max), P(max)", "the parts make")


def test_a_softmax_that_is_written_somewhere_is_judged():
    assert_sound(SOFTMAX, "S(0), S(0) -> S(0)")
    assert_wrong(SOFTMAX, "S(1), S(1) -> S(1)", "the shards make")


@pytest.mark.parametrize(("inputs", "reason"), [
    ("S(0), S(0)", ""), ("S(1), S(1)", ""), ("P(max), P(max)", "the parts make"), ("P(sum), R", "the parts make"),
])  # fmt: skip
def test_a_fused_optimizer_is_judged_on_pieces_without_gaps_as_real_ranks_have_them(inputs, reason):
    one = Probe(SGD, run_oracle(SGD), 3, seed=0)
    found = one.judge(Claim(Rule(SGD.op, placements(inputs), ()), "test"))
    assert reason in found.reason if reason else found is None
