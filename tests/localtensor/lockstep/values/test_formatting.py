"""A LocalTensor in print."""

import pytest
import torch

from localtensor.lockstep.mode import LocalTensorMode, rank_map, tensor_map
from localtensor.lockstep.values.formatting import MOST_VALUES, format_tensor
from localtensor.lockstep.values.partition import by_value, every_rank_alone, everyone, one_row_per_rank


def tensors():
    """By what they are, tensors of four ranks."""
    pairs = rank_map(lambda rank: torch.tensor([rank // 2, 1]))
    return {
        "the same on all": torch.arange(3),
        "two values": pairs,
        "uneven": rank_map(lambda rank: torch.full((rank % 2, 2), float(rank))),
        "held by some": tensor_map(pairs, lambda rank, x: x if rank != 2 else None),
        "held by one": tensor_map(pairs, lambda rank, x: x if rank == 2 else None),
        "a parameter": torch.nn.Parameter(pairs.float()),
        "nothing in it": torch.empty(2, 0),
        "equal by now": pairs * 0,
        "other strides": rank_map(lambda rank: torch.ones(2, 2).t() if rank else torch.ones(2, 2)),
        "of lines": rank_map(lambda rank: torch.full((2, 1), rank // 3)),
    }


SHOWN = {
    "the same on all": "LocalTensor(4 ranks, the same on all: tensor([0, 1, 2]))",
    "two values": "LocalTensor(4 ranks, 2 different values,\n  ranks 0, 1: tensor([0, 1]),\n  ranks 2, 3: tensor([1, 1]))",
    "uneven": "LocalTensor(4 ranks, 3 different values,\n  ranks 0, 2: tensor([], size=(0, 2)),\n"
    "  rank 1: tensor([[1., 1.]]),\n  rank 3: tensor([[3., 3.]]))",
    "held by some": "LocalTensor(ranks 0, 1, 3 of 4, 2 different values,\n  ranks 0, 1: tensor([0, 1]),\n  rank 3: tensor([1, 1]))",
    "held by one": "LocalTensor(rank 2 of 4, the same on all: tensor([1, 1]))",
    "a parameter": "LocalTensor(4 ranks, 2 different values,\n  ranks 0, 1: tensor([0., 1.]),\n"
    "  ranks 2, 3: tensor([1., 1.]), requires_grad=True)",
    "nothing in it": "LocalTensor(4 ranks, the same on all: tensor([], size=(2, 0)))",
    "equal by now": "LocalTensor(4 ranks, the same on all: tensor([0, 0]))",
    "other strides": "LocalTensor(4 ranks, the same on all: tensor([[1., 1.],\n          [1., 1.]]))",
    "of lines": "LocalTensor(4 ranks, 2 different values,\n  ranks 0, 1, 2: tensor([[0],\n          [0]]),\n"
    "  rank 3: tensor([[1],\n          [1]]))",
}  # fmt: skip


@pytest.mark.parametrize("name", SHOWN)
def test_a_tensor_in_print(name):
    with LocalTensorMode(4):
        x = tensors()[name]
        inside = repr(x)
    assert inside == repr(x) == str(x) == f"{x}" == SHOWN[name]


def test_of_many_values_the_first_are_shown():
    with LocalTensorMode(100):
        lines = repr(rank_map(torch.tensor)).splitlines()
    assert lines[0] == "LocalTensor(100 ranks, 100 different values," and len(lines) == MOST_VALUES + 2
    assert lines[MOST_VALUES] == "  rank 11: tensor(11)," and lines[-1] == "  and 88 more: x.on(rank) gives each)"


def test_a_thousand_ranks_of_two_values_are_two_lines():
    with LocalTensorMode(1000):
        text = repr(rank_map(lambda rank: torch.tensor(rank >= 400)))
    assert text == (
        "LocalTensor(1000 ranks, 2 different values,\n  ranks 0-399: tensor(False),\n  ranks 400-999: tensor(True))"
    )


def test_values_as_they_are_given():
    assert (
        format_tensor([([0], torch.tensor(1))], everyone(1), False) == "LocalTensor(1 rank, the same on all: tensor(1))"
    )
    two = [([0], torch.tensor(2)), ([1], torch.tensor(2))]
    assert (
        format_tensor(two, every_rank_alone(2), True)
        == "LocalTensor(2 ranks, the same on all: tensor(2), requires_grad=True)"
    )
    assert (
        format_tensor(two[:1], one_row_per_rank([0], 2), False)
        == "LocalTensor(rank 0 of 2, the same on all: tensor(2))"
    )
    apart = [([0], torch.tensor(1)), ([1], torch.tensor(1.0))]
    assert format_tensor(apart, by_value([0, 1]), False).startswith("LocalTensor(2 ranks, 2 different values,")
