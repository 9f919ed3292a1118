import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from strategies.model.rule import Program, flat_results
from strategies.programs.run.follow_ups import CallWithFollowUp, gradients, input_alone
from strategies.programs.run.real_run import run_simulated_programs
from strategies.programs.run.step_functions import uneven
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


def test_the_gradient_of_one_input_alone_leaves_the_others_without_one():
    one = sample("native_layer_norm.default", numbers(3, 4), [4], numbers(4, seed=1), numbers(4, seed=2), 1e-5)
    asked = []

    def op(given):
        asked.append([x.requires_grad for x in given])
        return flat_results(one.call(given))

    every = gradients(op, one.tensors, Replicate(), False)
    (weight,) = gradients(op, one.tensors, Replicate(), False, only=1)
    assert asked == [[True] * 3, [False, True, False]]
    torch.testing.assert_close(weight, every[1])


def test_an_integer_alone_has_no_gradient():
    one = sample("gather.default", X, 0, torch.tensor([[0, 1, 2]]))
    with pytest.raises(RuntimeError, match="no result of this call has a gradient"):
        gradients(lambda given: flat_results(one.call(given)), one.tensors, Replicate(), False, only=1)


def test_the_step_by_its_name_is_that_gradient():
    one = sample("mm.default", X, Y)
    call = CallWithFollowUp(one.op, one.call.args, one.call.kwargs, "grad of input 1 alone")
    (dy,) = call(one.tensors)
    torch.testing.assert_close(dy, taken(one)[1])
    assert input_alone(call.then) == "1" and input_alone("grad of 1") == ""


@pytest.mark.parametrize(("given", "coming"), [(Shard(1), Shard(1)), (Partial("sum"), Replicate())])
def test_ones_come_in_with_the_placements_that_dtensor_gives_them(monkeypatch, given, coming):
    seen, own = set(), torch.ones_like

    def ones_like(x, **options):
        made = own(x, **options)
        seen.add(getattr(made, "placements", None))
        return made

    monkeypatch.setattr(torch, "ones_like", ones_like)
    (found,) = run_simulated_programs([Program(sample("mul.Scalar", X, 2.0), (2,), ((given,),), "grad of ones")])
    assert found.note == "DTensor's own run is right"
    assert seen == {None, (coming,)}
