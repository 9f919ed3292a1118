"""pytest-randomly shuffles tests and seeds generators: what ranks draw stays what --rank-seed says."""

import re
from importlib.util import find_spec

import pytest
import torch

pytest_plugins = ["pytester"]

DRAWS = """
    import random

    pytest.SAID = []

    @pytest.mark.parametrize("turn", range(8))
    @pytest.mark.ranks(2)
    def test_draws(turn, rank):
        pytest.SAID.append((turn, rank, torch.rand(1).item(), random.random()))

    @pytest.fixture(scope="session", autouse=True)
    def told():
        yield
        for turn, rank, first, second in pytest.SAID:
            print(f"draw {turn} {rank} {first} {second}")
"""


def draws(said):
    assert "8 passed" in said, said
    return re.findall(r"draw (\d) (\d) (\S+) (\S+)", said)


def test_without_randomly_the_option_that_turns_it_off_does_no_harm(session, pytester):
    found = draws(session.inside(pytester, DRAWS, "-s", "-p", "no:randomly"))
    assert [(int(turn), int(rank)) for turn, rank, *_ in found] == [
        (turn, rank) for turn in range(8) for rank in (0, 1)
    ]
    [(first, _)] = {(first, second) for *_, first, second in found}
    assert float(first) == torch.rand(1, generator=torch.Generator().manual_seed(0)).item()


@pytest.mark.skipif(find_spec("pytest_randomly") is None, reason="needs pytest-randomly")
def test_with_randomly_other_order_same_draws(session):
    shuffled = draws(session(DRAWS, "-s", "-p", "randomly", "--randomly-seed=1").stdout)
    plain = draws(session(DRAWS, "-s", "-p", "no:randomly").stdout)
    assert sorted(shuffled) == sorted(plain) and shuffled != plain
