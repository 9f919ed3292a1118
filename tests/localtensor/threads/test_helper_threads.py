"""Threads that a program starts in its ranks, as on gloo processes."""

import os
import queue
import select
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils.data import DataLoader, TensorDataset

import localtensor as lt
from localtensor.errors import Deadlock, RankRaised


def in_thread(function):
    """What the function returns in a thread of its own."""
    found = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    assert not thread.is_alive()
    return found[0]


def collective_in_a_thread():
    group = dist.new_group()
    x, y = torch.full((2,), float(dist.get_rank())), torch.ones(1)
    thread = threading.Thread(target=dist.all_reduce, args=(x,), kwargs={"group": group})
    thread.start()
    dist.all_reduce(y)
    thread.join()
    dist.destroy_process_group(group)
    return x.tolist(), y.tolist()


def meshes_and_groups():
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    sharded = distribute_tensor(torch.arange(4.0), mesh["dp"], [Shard(0)])

    def look():
        again = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
        whole = (sharded * 2).full_tensor().tolist()
        functional = torch.ops._c10d_functional.all_reduce(torch.ones(1), "sum", mesh.get_group("dp").group_name)
        functional = torch.ops._c10d_functional.wait_tensor(functional).tolist()
        return again == mesh, dist.get_rank(), mesh.get_local_rank("dp"), mesh["tp"].size(), whole, functional

    return in_thread(look), look()


def a_group_made_in_a_thread():
    group = in_thread(lambda: dist.new_group([0, 1]))
    x = torch.full((1,), 1.0 + dist.get_rank())
    dist.all_reduce(x, group=group)
    dist.destroy_process_group(group)
    return x.tolist()


def pool():
    def work(number):
        torch.manual_seed(number)
        return number, dist.get_rank(), os.environ["RANK"]

    with ThreadPoolExecutor(2) as workers:
        first = list(workers.map(work, range(4)))
    idle = ThreadPoolExecutor(2)
    return first, idle.submit(work, 5).result()


def queues():
    todo, done = queue.Queue(maxsize=1), queue.SimpleQueue()

    def worker():
        while (item := todo.get()) is not None:
            x = torch.full((1,), float(item))
            dist.all_reduce(x)
            done.put(x.item())

    thread = threading.Thread(target=worker)
    thread.start()
    for item in (1, 2, 3):
        todo.put(item)
    todo.put(None)
    thread.join()
    try:
        done.get(timeout=0)
        done.get(), done.get()
        done.get(timeout=0.01)
    except queue.Empty:
        return "empty"
    return "more"


def heartbeats():
    """A daemon that beats while the ranks work, and one that nothing ends."""
    stop, beats = threading.Event(), []

    def beat():
        while not stop.wait(0.001):
            beats.append(dist.get_rank())

    def forever():
        while True:
            time.sleep(0.001)

    thread = threading.Thread(target=beat, daemon=True)
    threading.Thread(target=forever, daemon=True).start()
    thread.start()
    while not beats:
        time.sleep(0.001)
    dist.barrier()
    stop.set()
    thread.join()
    return set(beats)


def polling():
    """Loops that only look."""
    seen = []

    def work():
        dist.barrier()
        seen.append(dist.get_rank())

    thread = threading.Thread(target=work)
    thread.start()
    while thread.is_alive():
        pass
    return seen


def left_running(done=()):
    """A process waits at its end for threads that are no daemons."""

    def late():
        time.sleep(0.01)
        dist.barrier()
        if done:
            done.append(dist.get_rank())

    threading.Thread(target=late).start()
    return tuple(done)


def server():
    """A server that waits for connections, as a socket and by select, while the rank is its client."""
    listening = socket.create_server(("127.0.0.1", 0))

    def serve():
        ready, _, _ = select.select([listening], [], [])
        connection, _ = ready[0].accept()
        with connection:
            connection.sendall(connection.recv(10).upper())

    thread = threading.Thread(target=serve)
    thread.start()
    dist.barrier()
    with socket.create_connection(listening.getsockname()) as client:
        client.sendall(b"rank %d" % dist.get_rank())
        answer = client.recv(10)
    thread.join()
    listening.close()
    return answer


def child_process():
    """A thread waits for a child, which waits for the rank."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    thread = threading.Thread(target=child.wait)
    thread.start()
    dist.barrier()
    child.stdin.close()
    thread.join()
    return child.returncode


def loader():
    """Processes of a loader, which a thread of the rank feeds."""
    numbers = TensorDataset(torch.arange(8.0) + dist.get_rank())
    sums = []
    for (x,) in DataLoader(numbers, batch_size=2, num_workers=1):
        dist.all_reduce(x)
        sums.append(x.sum().item())
    return sums


def caught_in_a_future():
    def fails():
        raise ValueError("in the pool")

    with ThreadPoolExecutor(1) as workers:
        return type(workers.submit(fails).exception()).__name__


def gradients():
    weight = torch.ones(2, requires_grad=True)

    def step():
        with torch.no_grad():
            nothing = (weight * 2).requires_grad
        (weight * (1.0 + dist.get_rank())).sum().backward()
        return nothing, torch.is_grad_enabled()

    return in_thread(step), weight.grad.tolist()


PROGRAMS = [
    collective_in_a_thread,
    meshes_and_groups,
    a_group_made_in_a_thread,
    pool,
    queues,
    heartbeats,
    polling,
    left_running,
    server,
    child_process,
    loader,
    caught_in_a_future,
    gradients,
]


@pytest.mark.few(7)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_thread_of_a_rank_does_what_it_does_in_a_process(program):
    want = lt.run(program, ranks=2, on="gloo").values
    schedules = (lt.round_robin(), lt.shuffled(1), lt.shuffled(2), lt.pct(3))
    if program is polling:
        schedules = schedules[:3]  # a loop that only looks may starve the others under priorities
    for schedule in schedules:
        assert lt.run(program, ranks=2, schedule=schedule).values == want


def test_a_rank_ends_when_its_threads_have_ended():
    done = [-1]
    assert lt.run(lambda: left_running(done), ranks=2).values == ((-1,), (-1,))
    assert sorted(done) == [-1, 0, 1]


def raises(kind):
    def helper():
        dist.barrier()
        if dist.get_rank() == 1:
            raise kind("in the helper thread")
        dist.barrier()

    thread = threading.Thread(target=helper)
    thread.start()
    thread.join()


def test_an_error_in_a_thread_is_that_of_its_rank():
    with pytest.raises(RankRaised, match=r"rank 1: ValueError: in the helper thread .* in helper") as caught:
        lt.run(raises, ValueError, ranks=2)
    assert list(caught.value.errors) == [1]


def test_an_exit_of_a_thread_is_no_error_as_in_python():
    with pytest.raises(lt.errors.EarlyReturn):  # rank 0 waits for the second barrier of a thread that has ended
        lt.run(raises, SystemExit, ranks=2)


def test_a_hook_of_the_programs_gets_the_error_instead():
    def program():
        seen, before = [], threading.excepthook
        threading.excepthook = lambda args: seen.append((args.exc_type, str(args.exc_value)))
        try:
            in_thread_only(lambda: 1 / 0)
        finally:
            threading.excepthook = before
        return seen

    assert lt.run(program, ranks=2).values == ([(ZeroDivisionError, "division by zero")],) * 2


def in_thread_only(function):
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def test_a_lock_that_no_one_releases_is_a_deadlock_at_once():
    def program():
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()

    with pytest.raises(Deadlock, match="Let another thread of the rank release the lock") as caught:
        lt.run(program, ranks=2, timeout=60)
    assert "in program" in str(caught.value)


def test_a_thread_outside_of_the_run_may_release_what_a_rank_waits_for():
    with ThreadPoolExecutor(1) as outside:
        outside.submit(int).result()  # its thread is there before the run

        def program():
            return outside.submit(lambda: threading.current_thread().name).result()

        assert lt.run(program, ranks=2, timeout=60).values == (outside._thread_name_prefix + "_0",) * 2


def test_threads_take_turns_in_the_order_that_a_schedule_repeats():
    def program():
        order = []

        def note(name):
            for _ in range(3):
                dist.barrier(group)
                order.append(name)
                time.sleep(0)

        group = dist.new_group()
        threads = [threading.Thread(target=note, args=(name,)) for name in "ab"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        dist.destroy_process_group(group)
        return order

    first = lt.run(program, ranks=3, schedule=lt.shuffled(5))
    again = lt.run(program, ranks=3, schedule=lt.replay(first.replay))
    assert again.values == first.values and again.replay == first.replay
    assert len({tuple(lt.run(program, ranks=3, schedule=lt.shuffled(seed)).values[0]) for seed in range(5)}) > 1


def test_locks_of_ranks_are_locks():
    def program():
        lock, again = threading.Lock(), threading.RLock()
        assert isinstance(lock, threading.Lock) and not isinstance(3, threading.Lock)
        with lock:
            assert lock.locked() and not lock.acquire(False) and not lock.acquire(timeout=0.001)
        with again, again:
            pass
        with pytest.raises(RuntimeError):
            lock.release()
        with pytest.raises(TypeError, match="cannot pickle"):
            torch.save(lock, os.devnull)
        with pytest.raises(ValueError, match="timeout"):
            lock.acquire(False, 1)
        return type(again).__name__

    before = (threading.Lock, threading.RLock, time.sleep, queue.SimpleQueue, select.select, os.waitpid)
    lt.run(program, ranks=2)
    assert before == (threading.Lock, threading.RLock, time.sleep, queue.SimpleQueue, select.select, os.waitpid)
    assert "recv" not in vars(socket.socket)


def test_a_tensor_of_a_mesh_is_used_by_a_pool_as_transformers_loads_weights():
    def program():
        mesh = init_device_mesh("cpu", (2,))

        def load(number):
            return (
                DTensor.from_local(torch.full((2,), float(number)), mesh, [Shard(0)]).shape[0] + mesh.get_local_rank()
            )

        with ThreadPoolExecutor(3) as workers:
            return [future.result() for future in [workers.submit(load, number) for number in range(4)]]

    assert lt.run(program, ranks=2).values == ([4] * 4, [5] * 4)
