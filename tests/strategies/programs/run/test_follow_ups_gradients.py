import pytest
import torch
from torch.distributed.tensor import Replicate

from strategies.model.rule import flat_results
from strategies.programs.run.follow_ups import gradients
from strategies.programs.run.local_inputs import uneven
from tests.strategies.cases import numbers, sample

X, Y = numbers(4, 3), numbers(3, 2)


def taken(one, writes=False):
    return gradients(lambda given: flat_results(one.call(given)), one.tensors, Replicate(), writes)


def test_plain_gradients_are_those_of_autograd_for_a_cotangent_that_is_not_uniform():
    dx, dy = taken(sample("mm.default", X, Y))
    coming = uneven((4, 2), torch.float64, "cpu")
    torch.testing.assert_close(dx, coming @ Y.t())
    torch.testing.assert_close(dy, X.t() @ coming)


def test_integers_have_none_and_what_does_not_count_is_none():
    index = torch.tensor([[0, 1, 2]])
    assert len(taken(sample("gather.default", X, 0, index))) == 1
    _, unused = taken(sample("where.self", torch.ones(4, 3).bool(), X, numbers(4, 3, seed=1)))
    assert not unused.any()


def test_an_op_that_writes_gets_copies():
    one = sample("mul_.Tensor", X.clone(), numbers(4, 3, seed=1))
    dx, _ = taken(one, writes=True)
    torch.testing.assert_close(dx, uneven((4, 3), torch.float64, "cpu") * one.tensors[1])
    assert torch.equal(one.tensors[0], X)


def test_a_call_without_a_gradient_is_refused_by_autograd():
    with pytest.raises(RuntimeError):
        taken(sample("argmax.default", X, 0))
