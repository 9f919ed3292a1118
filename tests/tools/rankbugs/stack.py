"""Ranks that run out of stack, memory or tests while others wait; writes that no op makes; children and threads of ranks."""

import os
import threading
import unittest

import numpy as np
import torch
import torch.distributed as dist

from tests.tools.rankbugs.corpus import fault, right


def descend(depth):
    dist.barrier()  # fault
    descend(depth + 1)  # fault


@fault("RankRaised", ranks=3, cause="RecursionError", helpers=(descend,))
def a_recursion_with_a_barrier_has_no_end():
    descend(0)


def descend_to(depth):
    dist.barrier()
    return descend_to(depth - 1) + 1 if depth else 0


@right(ranks=3)
def a_recursion_with_a_barrier_has_an_end():
    assert descend_to(20) == 20


def halve(x):
    work = dist.all_reduce(x, async_op=True)  # fault
    work.wait()  # fault
    return halve(x / 2)  # fault


@fault("RankRaised", ranks=2, cause="RecursionError", helpers=(halve,))
def a_recursion_with_works_has_no_end():
    halve(torch.ones(2))


@right(ranks=2)
def a_recursion_ends_in_an_error_that_is_caught():
    def forever(depth):
        return forever(depth + 1)

    ended = torch.zeros(1)
    try:
        forever(0)
    except RecursionError:
        ended += 1
    dist.all_reduce(ended)
    assert ended.item() == 2


def count(depth):
    return count(depth + 1)  # fault


@fault("RankRaised", ranks=4, cause="RecursionError", helpers=(count,))
def one_rank_recurs_while_the_others_wait():
    if dist.get_rank() == 1:
        count(0)
    dist.barrier()


@right(ranks=4)
def every_rank_recurs_as_deep_as_it_may():
    def sum_to(n):
        return n + sum_to(n - 1) if n else 0

    x = torch.tensor(sum_to(10 * dist.get_rank()))
    dist.all_reduce(x)
    assert x.item() == 55 + 210 + 465


@fault("RankRaised", ranks=2, cause="MemoryError")
def one_rank_runs_out_of_memory():
    if dist.get_rank() == 1:
        bytearray(1 << 62)  # fault
    dist.all_reduce(torch.ones(2))


@right(ranks=2)
def one_rank_does_with_less_memory():
    size = 1 << (62 if dist.get_rank() == 1 else 3)
    try:
        held = len(bytearray(size))
    except MemoryError:
        held = 8
    x = torch.tensor(held)
    dist.all_reduce(x)
    assert x.item() == 16


@fault("RankRaised", ranks=3, cause="RuntimeError")
def a_tensor_is_larger_than_any_memory():
    parts = 1 << (58 if dist.get_rank() == 2 else 2)
    got = torch.empty(parts, dtype=torch.float64)  # fault
    dist.broadcast(got, src=0)


@right(ranks=3)
def no_tensor_is_larger_than_the_memory():
    got = torch.full((4,), float(dist.get_rank()), dtype=torch.float64)
    dist.broadcast(got, src=2)
    assert got.tolist() == [2.0] * 4


@fault("RankRaised", ranks=3, cause="SkipTest")
def a_test_is_skipped_on_one_rank():
    if dist.get_rank() == 2:
        raise unittest.SkipTest("this rank has no GPU")  # fault
    dist.barrier()


@right(ranks=3)
def a_test_is_decided_upon_by_all():
    able = torch.tensor(int(dist.get_rank() != 2))
    dist.all_reduce(able, dist.ReduceOp.MIN)
    if able:
        dist.broadcast(torch.ones(2), src=dist.get_rank())
    assert able.item() == 0


@fault("BufferReused", ranks=2)
def numpy_writes_into_a_buffer_in_flight():
    x = torch.ones(4)
    array = x.numpy()
    work = dist.all_reduce(x, async_op=True)
    array[1] = 7.0
    work.wait()  # fault


@right(ranks=2)
def numpy_writes_after_the_wait():
    x = torch.ones(4)
    array = x.numpy()
    dist.all_reduce(x, async_op=True).wait()
    array[1] = 7.0
    assert x.tolist() == [2.0, 7.0, 2.0, 2.0]


@fault("BufferReused", ranks=3)
def a_ufunc_of_numpy_has_a_buffer_in_flight_as_its_output():
    x = torch.from_numpy(np.ones(8))
    work = dist.broadcast(x, src=0, async_op=True)
    if dist.get_rank() == 0:
        np.multiply(x.numpy(), 2.0, out=x.numpy())
    work.wait()  # fault


@right(ranks=3)
def a_ufunc_of_numpy_has_an_output_of_its_own():
    x = torch.from_numpy(np.ones(8))
    work = dist.broadcast(x, src=0, async_op=True)
    twice = np.multiply(np.ones(8), 2.0)
    work.wait()
    assert x.sum().item() == 8 and twice.sum() == 16


@fault("BufferReused", ranks=2)
def an_array_that_a_tensor_was_made_from_is_filled():
    array = np.zeros(6, dtype=np.float32)
    x = torch.from_numpy(array)
    work = dist.isend(x, 1) if dist.get_rank() == 0 else dist.irecv(x, 0)
    if dist.get_rank() == 0:
        array.fill(3.0)
    work.wait()  # fault


@right(ranks=2)
def a_copy_of_an_array_is_sent():
    array = np.zeros(6, dtype=np.float32)
    x = torch.tensor(array)
    work = dist.isend(x, 1) if dist.get_rank() == 0 else dist.irecv(x, 0)
    array.fill(3.0)
    work.wait()
    assert x.sum().item() == 0 and array.sum() == 18


def ended(child):
    status = os.waitpid(child, 0)[1]
    if status:
        raise ChildProcessError(status)  # fault


@fault("RankRaised", ranks=2, cause="ChildProcessError", helpers=(ended,))
def a_forked_child_calls_a_collective():
    child = os.fork()
    if child == 0:
        os.close(2)
        dist.barrier()
    ended(child)


@right(ranks=2)
def a_forked_child_works_alone():
    child = os.fork()
    if child == 0:
        os._exit(int(torch.ones(2).sum().item()))
    code = os.waitpid(child, 0)[1] >> 8
    dist.barrier()
    assert code == 2


def prefetch(batches):
    return batches[len(batches)]  # fault


@fault("RankRaised", ranks=2, cause="IndexError", helpers=(prefetch,))
def a_thread_of_a_rank_fails_and_the_rank_goes_on():
    thread = threading.Thread(target=prefetch, args=([1, 2],))
    thread.start()
    dist.barrier()
    thread.join()
    dist.barrier()


@right(ranks=2)
def a_thread_of_a_rank_reduces_for_it():
    x = torch.ones(2)
    thread = threading.Thread(target=dist.all_reduce, args=(x,))
    thread.start()
    thread.join()
    assert x.tolist() == [2.0, 2.0]
