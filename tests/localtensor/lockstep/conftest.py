import pytest
import torch

from localtensor.lockstep.mode import LocalTensorMode, rank_map


@pytest.fixture
def mode():
    with LocalTensorMode(4) as made:
        yield made


@pytest.fixture
def x():
    return rank_map(lambda rank: torch.arange(3.0) + rank)


@pytest.fixture
def uneven():
    return rank_map(lambda rank: torch.arange(2.0 * rank).view(rank, 2))


def on_all(x):
    return [x.on(rank).tolist() for rank in range(4)]
