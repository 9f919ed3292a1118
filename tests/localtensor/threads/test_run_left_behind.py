import gc
import importlib
import os
import random
import signal
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

import localtensor as lt
from localtensor.errors import LocalTensorError, RankRaised
from localtensor.threads import run as threads
from localtensor.threads.run_token import RunToken

# -- programs that end badly, of many kinds


def raises():
    raise ValueError("no")


def exits():
    sys.exit(3)


def one_raises_and_others_wait():
    if dist.get_rank() == 1:
        raise KeyError("no")
    dist.barrier()


def returns_early():
    if dist.get_rank() == 0:
        dist.barrier()


def goes_round():
    dist.recv(torch.zeros(1), src=1 - dist.get_rank())


def differs_in_shape():
    dist.all_reduce(torch.ones(2 + dist.get_rank()))


def differs_in_kind():
    dist.barrier() if dist.get_rank() else dist.all_reduce(torch.ones(1))


def does_not_wait():
    dist.all_reduce(torch.ones(1), async_op=True)


def reads_before_the_wait():
    x = torch.ones(1)
    dist.all_reduce(x, async_op=True)
    x.tolist()


def writes_before_the_wait():
    x = torch.ones(1)
    work = dist.all_reduce(x, async_op=True)
    x.zero_()
    work.wait()


def leaves_a_letter():
    if dist.get_rank() == 0:
        dist.isend(torch.ones(1), 1)


def groups_differ():
    dist.new_group([0] if dist.get_rank() else [0, 1])


def runs_within_a_run():
    lt.run(dist.get_rank, ranks=2)


def fails_backward():
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(_ctx, x):
            return x + 1

        @staticmethod
        def backward(_ctx, grad):
            dist.all_reduce(grad)
            raise ArithmeticError("backward")

    Fails.apply(torch.ones(1, requires_grad=True)).backward()


def asks_for_another_world():
    dist.init_process_group("gloo", world_size=7)


def disagrees():
    lt.assert_same_on_all_ranks(dist.get_rank())


def changes_everything_and_raises():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(99)
    os.environ["LT_TEST_LEFT"] = "1"
    torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    warnings.simplefilter("ignore")
    torch.use_deterministic_algorithms(True)
    torch.set_grad_enabled(False)
    dist.all_reduce(torch.ones(2), async_op=True)
    raise ValueError("all changed")


FAILING = (
    raises, exits, one_raises_and_others_wait, returns_early, goes_round, differs_in_shape, differs_in_kind,
    does_not_wait, reads_before_the_wait, writes_before_the_wait, leaves_a_letter, groups_differ, runs_within_a_run,
    fails_backward, asks_for_another_world, disagrees, changes_everything_and_raises,
)  # fmt: skip


def good():
    x = torch.full((2,), dist.get_rank() + 1.0)
    dist.all_reduce(x)
    return x.tolist(), torch.rand(1).item(), torch.get_default_dtype()


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.slow  # hundreds of runs
def test_after_hundreds_of_failing_programs_a_good_one_is_right_and_nothing_has_grown():
    expected, before = lt.run(good, ranks=2).values, threading.enumerate()
    sizes = {}
    for count in range(1, 301):
        with pytest.raises(LocalTensorError):
            lt.run(FAILING[count % len(FAILING)], ranks=2, schedule=f"shuffled:{count}")
        if count in (100, 300):
            gc.collect()
            sizes[count] = resident()
    assert threading.enumerate() == before
    assert lt.run(good, ranks=2).values == expected
    assert sizes[300] - sizes[100] < 15e6, sizes


# -- what is left behind


def process_state():
    names = ("_world", "_new_process_group_helper", "init_process_group", "split_group")
    kernels = [torch._C._dispatch_dump(f"c10d::{op}") for op in ("allreduce_", "send", "barrier", "alltoall_base_")]
    return {
        "rng": (torch.get_rng_state().tolist(), random.getstate()),
        "dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "grad": torch.is_grad_enabled(),
        "world": [getattr(c10d, name) for name in names],
        "inside": [cell.cell_contents for cell in c10d.init_process_group.__closure__],
        "excepthook": (sys.excepthook, threading.excepthook),
        "environment": dict(os.environ),
        "mesh": sorted(vars(DeviceMesh)),
        "kernels": kernels,
        "hooks": dict(torch.nn.modules.module._global_forward_hooks),
        "warnings": (list(warnings.filters), warnings.showwarning),
        "signals": signal.getsignal(signal.SIGINT),
        "modes": (torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()),
        "affinity": os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None,
        "initialized": dist.is_initialized(),
    }


@pytest.mark.parametrize("program", [good, *FAILING], ids=lambda fn: fn.__name__)
def test_torch_and_the_process_are_as_they_were(program):
    lt.run(good, ranks=2)  # what torch and Python set up at their first use is not tested
    alive, before = threading.enumerate(), process_state()
    if program is good:
        lt.run(program, ranks=2)
    else:
        with pytest.raises(LocalTensorError):
            lt.run(program, ranks=2)
    after = process_state()
    assert {name: after[name] for name in after if after[name] != before[name]} == {}
    assert threading.enumerate() == alive


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="needs a signal to one thread")
@pytest.mark.parametrize("busy", [int, dist.barrier])
def test_ctrl_c_ends_every_rank_and_leaves_nothing(busy):
    lt.run(good, ranks=2)
    alive, before = threading.enumerate(), process_state()
    main = threading.main_thread().ident

    def interrupted():
        while dist.get_rank() == 0:
            signal.pthread_kill(main, signal.SIGINT)  # again, because Python can miss one on its way into a wait
            patience = time.perf_counter() + 0.5
            while time.perf_counter() < patience:
                busy()
        while True:
            busy()

    with pytest.raises(KeyboardInterrupt):
        lt.run(interrupted, ranks=3, timeout=60)
    after = process_state()
    assert {name: after[name] for name in after if after[name] != before[name]} == {}
    assert threading.enumerate() == alive
    assert lt.run(good, ranks=2)[0][0] == [3.0, 3.0]


def test_a_second_ctrl_c_does_not_wait_for_ranks_that_do_not_obey(monkeypatch):
    over, began, graces, interrupt = threading.Lock(), threading.Event(), [], RunToken.interrupt
    over.acquire()

    def stuck():
        began.set()
        over.acquire()  # of C, from outside of the run: no exception gets in there

    def pressed(simulation, timeout):
        began.wait()
        raise KeyboardInterrupt

    def pressed_again(baton, grace):
        graces.append(grace)
        if len(graces) == 1:
            raise KeyboardInterrupt
        return interrupt(baton, grace)

    before = threading.enumerate()
    monkeypatch.setattr(threads, "_wait_for_ranks", pressed)
    monkeypatch.setattr(RunToken, "interrupt", pressed_again)
    with pytest.raises(KeyboardInterrupt):
        lt.run(stuck, ranks=3)
    assert graces == [threads.GRACE, 0]
    left = [thread for thread in threading.enumerate() if thread not in before]
    for thread in left:
        thread.join(0 if thread.name == "rank 0" else 20)  # the others are on their way out, on a busy machine slowly
    assert [thread.name for thread in left if thread.is_alive()] == ["rank 0"]
    over.release()
    left[0].join()
    monkeypatch.undo()
    assert lt.run(good, ranks=2)[0][0] == [3.0, 3.0]


def registers_for_its_end(seen):
    """A thread that only a call at the end of its process ends, as the pools of loky do."""
    over = threading.Event()

    def note(name, *, then=int):
        seen.append((name, dist.get_rank(), thread.is_alive()))
        then()

    def wait():
        over.wait()
        seen.append(("thread", dist.get_rank(), True))

    thread = threading.Thread(target=wait)
    thread.start()
    threading._register_atexit(note, "first", then=over.set)
    in_thread = threading.Thread(target=threading._register_atexit, args=(note, "in a thread"))
    in_thread.start()
    in_thread.join()
    threading._register_atexit(note, "last")
    seen.append(("returned", dist.get_rank(), True))


@pytest.mark.parametrize("isolate", [False, True])
@pytest.mark.parametrize("schedule", ["round_robin", "shuffled:1", "pct:3"])
def test_what_a_rank_registers_for_its_end_is_called_before_it_waits_for_its_threads(isolate, schedule):
    seen, before = [], list(threading._threading_atexits)
    lt.run(lambda: registers_for_its_end(seen), ranks=2, schedule=schedule, isolate=isolate)
    for rank in (0, 1):
        names = ["returned", "last", "in a thread", "first", "thread"]
        assert [one for one in seen if one[1] == rank] == [(name, rank, True) for name in names]
    assert len(seen) == 10 and threading._threading_atexits == before


def test_at_its_end_a_rank_may_use_its_pools_and_registers_no_more():
    def program():
        pool = ThreadPoolExecutor(1)
        assert pool.submit(dist.get_rank).result() == dist.get_rank()

        def end():
            seen.append(pool.submit(dist.get_rank).result())
            with pytest.raises(RuntimeError, match="after shutdown"):
                threading._register_atexit(seen.append, 7)

        threading._register_atexit(end)

    seen = []
    lt.run(program, ranks=2)
    assert sorted(seen) == [0, 1]


def test_of_a_rank_that_fails_nothing_is_called_and_nothing_is_left():
    def program():
        threading._register_atexit(seen.append, dist.get_rank())
        dist.barrier()
        raise ValueError("no")

    seen, before = [], list(threading._threading_atexits)
    with pytest.raises(RankRaised):
        lt.run(program, ranks=2)
    assert seen == [] and threading._threading_atexits == before


def test_what_a_shared_module_registers_as_it_is_imported_is_the_processs(tmp_path, monkeypatch):
    (tmp_path / "lt_registers.py").write_text(
        "import threading\nseen = []\nthreading._register_atexit(seen.append, 1)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    before = list(threading._threading_atexits)
    lt.run(lambda: importlib.import_module("lt_registers").__name__, ranks=2)
    (call,) = [one for one in threading._threading_atexits if one not in before]
    threading._threading_atexits.remove(call)
    assert sys.modules.pop("lt_registers").seen == []
    assert call.args == (1,)
