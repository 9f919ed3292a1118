"""What autograd sees: a linear function of all ranks' tensors, and its adjoint."""

import numpy as np
import pytest
import torch

from localtensor.errors import AnotherMode, DtypeNotCarried
from localtensor.lockstep.collectives_api import all_gather_into_tensor
from localtensor.lockstep.comms.autograd import CollectiveCall, apply_linear, select_tensors
from localtensor.lockstep.comms.collectives import StackedValue
from localtensor.lockstep.mode import LocalTensorMode, rank_map
from tests.localtensor.both_ways import numbers


def doubled(value):
    return StackedValue(tuple(cell * 2 for cell in value.cells), value.held)


def tripled(value):
    return StackedValue(tuple(cell * 3 for cell in value.cells), value.held)


def test_forward_and_backward_are_the_two_functions():
    with LocalTensorMode(3) as mode:
        x = numbers(2).requires_grad_()
        y = apply_linear(CollectiveCall(mode, "all_reduce", None), x, doubled, tripled)
        (gradient,) = torch.autograd.grad(y, x, torch.ones(2), create_graph=True)
        assert torch.equal(y.on(1), x.on(1) * 2) and gradient.reconcile().tolist() == [3, 3]
        assert not apply_linear(CollectiveCall(mode, "all_reduce", None), x.detach(), doubled, tripled).requires_grad


def test_each_tensor_gets_the_gradient_of_those_who_chose_it():
    with LocalTensorMode(3) as mode:
        x, y = numbers(2).requires_grad_(), numbers(2, seed=1).requires_grad_()
        z = select_tensors(CollectiveCall(mode, "permute", None), [x, y], np.array([0, 1, 0]), np.array([2, 1, 1]))
        weights = numbers(2, seed=2)
        for_x, for_y = torch.autograd.grad(z, [x, y], weights)
        assert torch.equal(z.on(0), x.on(2)) and torch.equal(z.on(1), y.on(1))
        assert torch.equal(for_x.on(2), weights.on(0)) and torch.equal(for_x.on(1), weights.on(2))
        assert not for_x.on(0).any() and not for_y.on(2).any() and torch.equal(for_y.on(1), weights.on(1))


def test_what_is_not_chosen_is_not_held():
    with LocalTensorMode(3) as mode:
        assert select_tensors(CollectiveCall(mode, "permute", None), [numbers(2)], np.array([0, -1, 0])).ranks == (0, 2)


def test_what_does_not_fit_is_refused_before_anything_moves():
    with LocalTensorMode(2):
        other = rank_map(torch.tensor)
    with LocalTensorMode(2) as mode:
        with pytest.raises(AnotherMode):
            CollectiveCall(mode, "all_reduce", None).check([other])
        with pytest.raises(DtypeNotCarried):
            CollectiveCall(mode, "all_reduce", None).check([torch.ones(2, dtype=torch.int16)])


def test_who_holds_an_input_and_nothing_of_the_result_gets_zeros_for_a_gradient():
    with LocalTensorMode(3):
        x = rank_map(lambda rank: torch.full((2,), float(rank))).requires_grad_()
        y = all_gather_into_tensor(x, [[0, 1]])
        assert y.ranks == (0, 1)
        (gradient,) = torch.autograd.grad(y, x, torch.ones(4))
    assert [gradient.on(rank).tolist() for rank in range(3)] == [[2, 2], [2, 2], [0, 0]]
