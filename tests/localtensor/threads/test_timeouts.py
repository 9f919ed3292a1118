"""Time limits: on gloo the clock decides, on rank threads a simulated one, which moves when no rank can run."""

import functools
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import localtensor as lt
from localtensor.errors import CollectiveTimeout, Deadlock, EarlyReturn, KindMismatch, RankRaised

SHORT = timedelta(milliseconds=400)


def attempt(call):
    try:
        return call()
    except RuntimeError as error:
        return error


def work():
    return dist.all_reduce(torch.ones(2), async_op=True).wait(SHORT)


def receive():
    return dist.irecv(torch.ones(2), 1).wait(SHORT)


def send():
    return dist.send(torch.ones(2), 1, group=dist.new_group([0, 1], timeout=SHORT))


def barrier_of_a_group():
    dist.barrier(group=dist.new_group([0, 1], timeout=SHORT))


def reduce_of_a_group():
    return dist.all_reduce(torch.ones(2), group=dist.new_group([0, 1], timeout=SHORT), async_op=True).wait()


def monitored():
    dist.monitored_barrier(timeout=SHORT)


def monitored_for_all():
    dist.monitored_barrier(timeout=SHORT, wait_all_ranks=True)


def store():
    dist.distributed_c10d._get_default_store().wait(["never"], SHORT)


CALLS = {
    "Operation timed out!": (work, reduce_of_a_group),
    "Timed out waiting 400ms for recv operation to complete": (receive, barrier_of_a_group),
    "Timed out waiting 400ms for send operation to complete": (send,),
    "[Rank 0]: Rank 1 failed to pass monitoredBarrier in 400 ms": (monitored,),
    "[Rank 0]: Ranks 1 failed to pass monitoredBarrier in 400 ms": (monitored_for_all,),
    "Wait timeout": (store,),
}
GROUPS = (send, barrier_of_a_group, reduce_of_a_group)
CASES = [(call, words) for words, calls in CALLS.items() for call in calls]


def on_rank_0(call, real):
    """What the call raises on rank 0: its words.  Rank 1 makes the group, and nothing else."""
    if dist.get_rank() == 0:
        return str(attempt(call))
    if call in GROUPS:
        dist.new_group([0, 1], timeout=SHORT)
    time.sleep(3 * SHORT.total_seconds() if real else 0)
    return ""


@pytest.mark.parametrize(("call", "words"), CASES, ids=[call.__name__ for call, _ in CASES])
def test_the_limit_of_a_call_passes_as_on_gloo(call, words):
    began = time.monotonic()
    for _ in range(5):
        (threads, _) = lt.run(on_rank_0, call, False, ranks=2, leftovers="ignore").values
        assert words in threads and "on rank 0" in threads
    assert time.monotonic() - began < 60  # no rank waits for the real clock
    (gloo, _) = lt.run(on_rank_0, call, True, ranks=2, on="gloo", leftovers="ignore").values
    assert words in gloo or call is reduce_of_a_group, gloo


def test_the_error_is_a_runtime_error_and_the_limit_of_the_default_group_counts():
    def program():
        dist.init_process_group("gloo", timeout=SHORT)
        if dist.get_rank() == 0:
            return attempt(dist.barrier)
        return None

    (error, _) = lt.run(program, ranks=2, leftovers="ignore").values
    assert isinstance(error, RuntimeError) and isinstance(error, CollectiveTimeout) and error.seconds == 0.4


def test_a_work_whose_wait_timed_out_can_be_waited_for_again():
    def program():
        x, rank = torch.ones(2), dist.get_rank()
        if rank:
            dist.recv(torch.ones(1), 0)  # rank 0 sends when its first wait is over
        pending = dist.all_reduce(x, async_op=True)
        first = None if rank else attempt(lambda: pending.wait(SHORT))
        if rank == 0:
            dist.send(torch.ones(1), 1)
        pending.wait()
        return type(first).__name__, x.tolist()

    assert lt.run(program, ranks=2).values == (("CollectiveTimeout", [2.0, 2.0]), ("NoneType", [2.0, 2.0]))


def test_no_limit_passes_while_another_rank_can_still_come():
    def program():
        if dist.get_rank() == 2:
            for _ in range(50):
                dist.distributed_c10d._get_default_store().check(["no such key"])  # the others run meanwhile
        return dist.all_reduce(torch.ones(2), async_op=True).wait(timedelta(milliseconds=1))

    for seed in range(5):
        assert lt.run(program, ranks=3, schedule=lt.shuffled(seed)).values == (True, True, True)


def test_the_nearest_limit_passes_first():
    def program():
        rank = dist.get_rank()
        attempt(lambda: dist.irecv(torch.ones(1), (rank + 1) % 3).wait(timedelta(seconds=5 - rank)))
        order.append(rank)

    order = []
    for _ in range(3):
        order.clear()
        lt.run(program, ranks=3)
        assert order == [2, 1, 0]


def stuck(limit):
    group = dist.new_group([0, 1], timeout=limit)
    if dist.get_rank() == 0:
        dist.barrier(group=group)


def cycle(limit):
    group = dist.new_group([0, 1], timeout=limit)
    dist.recv(torch.ones(1), 1 - dist.get_rank(), group=group)


@pytest.mark.parametrize(("program", "kind"), [(stuck, EarlyReturn), (cycle, Deadlock)])
def test_a_limit_that_no_rank_catches_is_the_fault_that_it_shows(program, kind):
    for limit in (None, SHORT):
        with pytest.raises(kind) as caught:
            lt.run(program, limit, ranks=2, leftovers="ignore")
        assert type(caught.value) is kind


def test_neither_a_mismatch_nor_the_error_of_another_rank_hides_behind_a_limit():
    def differ():
        dist.barrier() if dist.get_rank() else attempt(work)

    def raises():
        if dist.get_rank():
            raise KeyError("first")
        attempt(work)

    with pytest.raises(KindMismatch):
        lt.run(differ, ranks=2)
    with pytest.raises(RankRaised) as caught:
        lt.run(raises, ranks=2)
    assert isinstance(caught.value.__cause__, KeyError) and list(caught.value.errors) == [1]


def after_timeout():
    group = dist.new_group([0, 1], timeout=SHORT)
    calls = [functools.partial(dist.recv, torch.ones(1), 1, group=group), functools.partial(dist.barrier, group=group)]
    if dist.get_rank() == 0:
        return [isinstance(attempt(call), RuntimeError) for call in (calls[0], *calls)]
    time.sleep(0.8)
    return []


def test_after_a_timeout_the_connections_of_the_rank_are_closed():
    assert lt.run(after_timeout, ranks=2, leftovers="ignore").values[0] == [True] * 3
    assert lt.run(after_timeout, ranks=2, on="gloo", leftovers="ignore").values[0] == [True] * 3


def test_a_wait_for_a_rank_that_is_late_is_no_deadlock():
    def program():
        dist.all_reduce(torch.ones(2), async_op=True).wait(timedelta(seconds=2))

    with pytest.raises(RankRaised, match="rank 0: CollectiveTimeout: ") as raised:
        lt.run(program, ranks=2, faults=lt.Faults(delay={1: 5.0}))
    assert isinstance(raised.value.__cause__, CollectiveTimeout)


def test_a_monitored_barrier_of_no_time_fails_on_the_first_rank():
    def program():
        if dist.get_rank() == 0:
            with pytest.raises(RuntimeError, match="Rank 0 timed out in monitoredBarrier"):
                dist.group.WORLD.monitored_barrier(timedelta(0))

    assert lt.run(program, ranks=2).values == (None, None)
