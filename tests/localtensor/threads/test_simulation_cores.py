"""The threads of a run keep to one core, and leave it together when others keep it busy."""

import os

import pytest
import torch

import localtensor as lt
from localtensor.threads import cores
from localtensor.threads.cores import CHECK_INTERVAL, CoreAffinity

pytestmark = pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2,
    reason="needs a system with affinity, and two cores",
)


def allowed_here(_rank=None):
    return frozenset(os.sched_getaffinity(0))


def test_all_ranks_run_on_one_core_and_the_caller_on_all_of_his(monkeypatch):
    monkeypatch.delenv("LOCALTENSOR_CORES", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(cores, "MIN_CPU_SHARE", 0)  # on a busy machine the run would move
    before = allowed_here()
    used = lt.run(allowed_here, ranks=3).values
    assert len(used[0]) == 1 and set(used) == {used[0]}
    assert allowed_here() == before


@pytest.mark.parametrize(("name", "value"), [("LOCALTENSOR_CORES", "all"), ("OMP_NUM_THREADS", "2")])
def test_who_wants_all_cores_gets_them(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    assert lt.run(allowed_here, ranks=2).values == (allowed_here(), allowed_here())


@pytest.mark.parametrize(
    ("value", "one_core"), [("1", True), ("1,4", True), ("2,1", False), ("many", False), ("", True)]
)
def test_any_number_of_threads_that_openmp_takes_is_read(monkeypatch, value, one_core):
    monkeypatch.delenv("LOCALTENSOR_CORES", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    kept, run = [], CoreAffinity()
    monkeypatch.setattr(cores.os, "sched_setaffinity", lambda pid, where: kept.append(where))
    run.follow(0)
    assert bool(kept) is one_core


def test_a_starved_run_moves_and_a_busy_one_stays(monkeypatch):
    moved_to, clock, used = [], [100.0], [5.0]
    monkeypatch.setattr(cores.os, "sched_setaffinity", lambda pid, where: moved_to.append(where))
    monkeypatch.setattr(cores.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(cores.time, "process_time", lambda: used[0])
    monkeypatch.delenv("LOCALTENSOR_CORES", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    run = CoreAffinity()
    run.follow(0)
    assert len(moved_to) == 1  # the thread goes where the run is
    clock[0], used[0] = clock[0] + 2 * CHECK_INTERVAL, used[0] + 2 * CHECK_INTERVAL
    run.follow(0)
    assert len(moved_to) == 1  # the core was ours all the time
    clock[0], used[0] = clock[0] + 2 * CHECK_INTERVAL, used[0] + 0.1 * CHECK_INTERVAL
    run.follow(0)
    assert len(moved_to) == 2 and moved_to[0] != moved_to[1]


@pytest.mark.parametrize(
    ("value", "threads"), [("2,1", 2), ("many", 1), ("-1", 1), ("9" * 5_000, 1), ("0", 1), ("", 1)]
)
@pytest.mark.parametrize("on", ["threads", "gloo"])
def test_an_op_of_a_rank_has_the_threads_of_openmps_first_level(monkeypatch, value, threads, on):
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    assert cores.threads_per_op() == threads
    if value in ("2,1", "many"):
        assert lt.run(torch.get_num_threads, ranks=2, on=on).values == (threads, threads)
