"""Waits for processes, pipes and semaphores in a rank let the rank's other threads run: each of these programs hung."""

import multiprocessing as mp
import os
import pickle
import queue
import select
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.connection import Connection
from multiprocessing.pool import ThreadPool

import pytest
import torch.distributed as dist

import localtensor as lt
from localtensor.concurrency.system_calls import RankSemaphore

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
FORK = mp.get_context("fork")
LEFT = []


def add_rank(x):
    return x + dist.get_rank()


def wide(x):
    return bytes([x]) * 200_000  # more than a pipe holds


def pool():
    with FORK.Pool(2) as workers:
        return (
            workers.map(add_rank, range(5)),
            list(workers.imap(add_rank, [7])),
            [len(x) for x in workers.map(wide, [1, 2])],
        )


def idle_pools():
    """Pools that the program leaves to the end of its process."""
    executor, workers = ProcessPoolExecutor(1, mp_context=FORK), FORK.Pool(1)
    LEFT.extend((workers.close, executor.shutdown))  # which keep them; a pool warns when it is collected
    return executor.submit(add_rank, 1).result(), workers.map(add_rank, [2])


def queues():
    todo, done = FORK.JoinableQueue(), FORK.Queue()

    def work():
        for _ in range(3):
            done.put(add_rank(todo.get()))
            todo.task_done()

    child = FORK.Process(target=work)
    child.start()
    got = []
    for item in range(3):
        todo.put(item)
        got.append(done.get())
    todo.join()
    child.join()
    return got, child.exitcode


def wide_messages():
    """Each side writes more than the pipe holds before it reads; a thread of the rank reads."""
    ours, theirs = FORK.Pipe()

    def work():
        theirs.send(wide(3))
        theirs.send(len(theirs.recv()))

    child = FORK.Process(target=work)
    child.start()
    got = []
    reader = threading.Thread(target=lambda: got.extend([len(ours.recv()), ours.recv()]))
    reader.start()
    ours.send(wide(4))
    reader.join()
    child.join()
    return got


def asleep_beside_a_pool():
    """A sleep ends though the threads of the pool never do."""
    with ThreadPool(1) as workers:
        result = workers.apply_async(time.sleep, (0.02,))
        while not result.ready():
            time.sleep(0.001)
        return result.get()


def event_of_a_thread():
    """An event of multiprocessing that a thread of the rank sets."""
    event = FORK.Event()
    thread = threading.Thread(target=event.set)
    thread.start()
    seen = event.wait(), event.wait(0)
    thread.join()
    return seen


def looking_for_the_end():
    """A loop that only looks whether a child has ended, which a thread of the rank keeps."""
    stop = FORK.Event()
    child = FORK.Process(target=stop.wait)
    child.start()
    thread = threading.Thread(target=stop.set)
    thread.start()
    while child.is_alive():
        pass
    return child.exitcode


PROGRAMS = [pool, idle_pools, queues, wide_messages, asleep_beside_a_pool, event_of_a_thread, looking_for_the_end]


@pytest.mark.few(6)
@pytest.mark.parametrize("schedule", ["round_robin", "shuffled:1"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_it_ends_as_in_a_process(program, schedule):
    want = {
        pool: lambda rank: ([rank, rank + 1, rank + 2, rank + 3, rank + 4], [rank + 7], [200_000] * 2),
        idle_pools: lambda rank: (rank + 1, [rank + 2]),
        queues: lambda rank: ([rank, rank + 1, rank + 2], 0),
        wide_messages: lambda rank: [200_000, 200_000],
        event_of_a_thread: lambda rank: (True, True),
    }.get(program, lambda rank: 0 if program is looking_for_the_end else None)
    assert lt.run(program, ranks=2, timeout=60, schedule=schedule).values == (want(0), want(1))
    while LEFT:
        LEFT.pop()()


def test_what_ranks_replace_is_as_before():
    def state():
        kept = Connection._recv.__defaults__, Connection._send.__defaults__
        return (
            kept,
            os.read,
            os.write,
            os.waitpid,
            select.select,
            type(FORK.Lock()._semlock),
            threading._register_atexit,
        )

    before = state()
    assert lt.run(lambda: type(FORK.Lock()._semlock), ranks=2).values == (RankSemaphore, RankSemaphore)
    assert state() == before


def test_the_locks_of_threading_pickle_as_the_originals_for_a_child():
    """A manager that is spawned gets them by name."""

    def program():
        kinds = [threading.Lock, threading.RLock, queue.SimpleQueue]
        return pickle.dumps(kinds), pickle.loads(pickle.dumps(kinds)) == kinds

    for text, same in lt.run(program, ranks=2).values:
        assert same and pickle.loads(text) == [threading.Lock, threading.RLock, queue.SimpleQueue]


def test_a_write_to_a_pipe_of_a_rank_is_whole():
    def program():
        read, write = os.pipe()
        got = []

        def reader():
            while len(b"".join(got)) < 200_000:
                got.append(os.read(read, 70_000))

        thread = threading.Thread(target=reader)
        thread.start()
        count = os.write(write, wide(5))
        thread.join()
        os.close(read)
        os.close(write)
        return count, b"".join(got) == wide(5)

    assert lt.run(program, ranks=2, timeout=60).values == ((200_000, True),) * 2
