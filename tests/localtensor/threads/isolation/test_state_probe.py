"""The state of a process that a program may change: rank threads are as separate as processes, and nothing is left."""

import random
import sys

import numpy as np
import pytest
import torch
import torch.distributed as dist

import localtensor as lt
from tests.localtensor.threads.isolation import state_probe

REPORTED = {"signal handler": "ValueError"}  # refused: a rank is not the main thread
SHARED = {"locale"}  # listed by --explain-isolation


@pytest.fixture(scope="module")
def threads():
    return lt.run(state_probe.probe, ranks=2, isolate=True).values


@pytest.mark.slow
def test_every_item_is_as_on_processes(threads):
    processes = lt.run(state_probe.probe, ranks=2, on="gloo").values
    for mine, real in zip(threads, processes, strict=True):
        assert {name: mine[name] for name in REPORTED} == REPORTED
        same = set(mine) - set(REPORTED) - SHARED
        assert {name: mine[name] for name in same} == {name: real[name] for name in same}


@pytest.mark.parametrize("name", sorted(set(state_probe.ITEMS) - set(REPORTED) - SHARED))
def test_a_rank_reads_what_it_wrote(threads, name):
    first, second = (read[name] for read in threads)
    assert first != second


def test_there_are_sixty_items():
    assert len(set(state_probe.ITEMS) - set(REPORTED) - SHARED) >= 60


def test_nothing_is_left_after_a_run(threads):
    before = state_probe.state()
    random_state = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    again = lt.run(state_probe.probe, ranks=2, isolate=True).values
    random_after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    assert random_after == random_state
    random.setstate(random_state[0])
    np.random.seed(0)
    torch.set_rng_state(torch.tensor(random_state[2], dtype=torch.uint8))
    after = state_probe.state()
    drawn = {"random", "numpy's random", "torch's random"}
    assert {name: after[name] for name in after if name not in drawn} == {
        n: before[n] for n in before if n not in drawn
    }
    assert again == threads


def own_recursion_limit():
    sys.setrecursionlimit(3000 + dist.get_rank())
    for _ in range(5):
        dist.barrier()
    return sys.getrecursionlimit()


def test_a_ranks_recursion_limit_stays_as_it_was_set():
    assert lt.run(own_recursion_limit, ranks=2).values == (3000, 3001)
