"""Real runs whose ranks do not return: how long they are waited for."""

import time

import pytest
import torch
import torch.distributed as dist

from localtensor._util import Waiting
from localtensor.processes import Pool
from strategies.torch_api import rank_runs


def wait_for_the_other(sent: bytes) -> bytes:
    dist.recv(torch.zeros(1), src=1 - dist.get_rank())
    return sent


def work_for_ever(sent: bytes) -> bytes:
    while True:
        pass


@pytest.fixture
def calls(monkeypatch):
    """The time limits of the calls of pools."""
    seen, call = [], Pool.call

    def counted(pool, *args, timeout=None, **named):
        seen.append(timeout)
        return call(pool, *args, timeout=timeout, **named)

    monkeypatch.setattr(Pool, "call", counted)
    return seen


def test_ranks_that_wait_for_each_other_wait_twice_and_not_for_the_whole_limit(calls, monkeypatch):
    monkeypatch.setattr(rank_runs, "IDLE_SECONDS", 0.5)
    start = time.monotonic()
    with rank_runs.RankProcesses("gloo", 100.0) as processes:
        outcomes = processes.run(wait_for_the_other, [0, 1])
    assert [type(one) for one in outcomes] == [Waiting, Waiting] and time.monotonic() - start < 60
    assert calls == [None, 300.0]


def test_ranks_that_work_all_the_time_do_so_once(calls, monkeypatch):
    monkeypatch.setattr(rank_runs, "ALL_THE_TIME", 0.3)  # the machine of the tests is busy
    with rank_runs.RankProcesses("gloo", 2.0) as processes:
        outcomes = processes.run(work_for_ever, [0, 1])
    assert [type(one) for one in outcomes] == [Waiting, Waiting] and calls == [None]
