"""Runs end, and end rightly, wherever Python raises: no stack left, no memory, another process."""

import itertools
import linecache
import os
import sys
import threading
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist

import localtensor as lt
from localtensor.errors import RankRaised

LIMIT = 20  # seconds: a run that hangs is `NeverEnded`, which no test here expects


def barrier_at(depth):
    """Whether a barrier works this many calls down."""
    if depth:
        return barrier_at(depth - 1)
    dist.barrier()
    return True


def depths_that_work():
    works = []
    for depth in range(880, 1000):
        with suppress(RecursionError):
            works.append(barrier_at(depth) and depth)
    return works, sys.getrecursionlimit()


def test_a_barrier_works_down_to_the_depth_at_which_it_does_on_gloo():
    limit = sys.getrecursionlimit()
    threads = lt.run(depths_that_work, ranks=2, timeout=LIMIT).values
    gloo = lt.run(depths_that_work, ranks=2, on="gloo").values
    for (here, here_limit), (there, there_limit) in zip(threads, gloo, strict=True):
        assert here == list(range(880, here[-1] + 1)) and here_limit == there_limit
        assert abs(here[-1] - there[-1]) <= 1  # what torch has imported in this process wraps its functions once more
        assert 900 < here[-1] < 1000
    assert sys.getrecursionlimit() == limit


def in_turn(depth):
    if depth:
        return in_turn(depth - 1)
    x = torch.ones(2)
    dist.all_reduce(x, async_op=True).wait()
    dist.send(x, 0) if dist.get_rank() else dist.recv(x, 1)
    dist.all_gather_object([None] * 2, x)
    dist.new_group([0, 1])
    return x.tolist()


@pytest.mark.few(14)
@pytest.mark.parametrize("depth", range(880, 1000, 3))
def test_a_rank_without_stack_raises_recursion_error_and_no_rank_waits_for_ever(depth):
    found = {RecursionError}
    try:
        assert lt.run(in_turn, depth, ranks=2, timeout=LIMIT, leftovers="ignore").values == ([2.0, 2.0],) * 2
    except RankRaised as raised:
        found = {type(error) for error in raised.errors.values()}
    assert found == {RecursionError}


def test_infinite_recursion_through_a_collective_ends_in_recursion_error():
    def forever(rest):
        dist.barrier()
        forever(rest + 1)

    with pytest.raises(RankRaised) as raised:
        lt.run(forever, 0, ranks=3, timeout=LIMIT)
    assert isinstance(raised.value.errors[0], RecursionError)


def test_a_program_sets_the_recursion_limit_that_it_reads():
    def program():
        sys.setrecursionlimit(sys.getrecursionlimit() + 500)
        return sys.getrecursionlimit()

    limit = sys.getrecursionlimit()
    assert lt.run(program, ranks=1).values == (limit + 500,)
    assert sys.getrecursionlimit() == limit


STEPS = ("run_token.py", "simulation.py", "process_group.py", "store.py", "buffer_watch.py", "threads/run.py")


class RaisedAt:
    """Raises at the n-th line that the ranks run in the files above, of those that may allocate: a trace function."""

    def __init__(self, number, error):
        self.left, self.error, self.raised = number, error, False

    def __call__(self, frame, event, arg):
        if not frame.f_code.co_filename.endswith(STEPS):
            return None
        text = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        self.left -= event == "line" and text.strip() not in ("try:", "while True:", "break", "continue", "pass")
        if not self.left and not self.raised:
            self.raised = True
            raise self.error
        return self


def talk():
    rank, x = dist.get_rank(), torch.ones(3)
    dist.all_reduce(x, async_op=True).wait()
    work = dist.isend(x, 1) if rank == 0 else dist.irecv(x, 0) if rank == 1 else None
    if work is not None and not work.is_completed():
        work.wait()
    dist.new_group([0, 1])
    dist.barrier()
    return x.tolist()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("first", [2, 30])
def test_a_run_ends_wherever_memory_runs_out(first):
    lt.run(talk, ranks=3, leftovers="ignore")  # imports what it needs
    ends = set()
    for number in itertools.count(first, 53):
        tracer = RaisedAt(number, MemoryError("no memory"))
        threading.settrace(tracer)
        try:
            lt.run(talk, ranks=3, timeout=LIMIT, leftovers="ignore")
        except (MemoryError, lt.errors.LocalTensorError) as end:
            ends.add(type(end).__name__)
        finally:
            threading.settrace(None)
        if not tracer.raised:
            break
    assert number > 500 and {"MemoryError", "RankRaised"} <= ends
    assert not ends & {"NeverEnded", "Deadlock"}
    assert lt.run(talk, ranks=3, leftovers="ignore").values == ([3.0] * 3,) * 3


def forks(catches):
    child = os.fork()
    if child == 0:
        try:
            dist.barrier()
        except lt.errors.ForkedRank:
            if catches:
                os._exit(17)
            raise
    return os.waitpid(child, 0)[1] >> 8


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Python 3.12 warns of a fork with threads
def test_a_forked_child_is_refused_and_ends_with_its_error():
    assert lt.run(forks, True, ranks=2, timeout=LIMIT).values == (17, 17)
    assert lt.run(forks, False, ranks=2, timeout=LIMIT).values == (1, 1)
