"""`run(on="gloo")`: real processes in the same state as rank threads, kept from call to call, and refused in words."""

import os
import random
import re
import signal
import sys
import threading
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import localtensor as lt
from localtensor import errors
from localtensor._util import ambient
from localtensor._util.events import Died, Raised, Returned, Waiting
from localtensor.processes import pool as real
from tests.tools import warm


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(real, "GRACE", 0.3)
    monkeypatch.setattr(real, "LEAVE", 0.4)


@pytest.fixture(autouse=True, scope="module")
def _no_pool_of_others():
    ambient.close_pools()
    yield
    ambient.close_pools()


def on_gloo(program, *args, ranks=2, timeout=30.0, **options):
    return lt.run(program, *args, ranks=ranks, on="gloo", timeout=timeout, **options)


def process():
    return os.getpid()


def state():
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT", "LT_X")
    return (
        torch.rand(2), random.random(), np.random.rand(), [os.environ.get(name) for name in names],
        torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_default_device().type, torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip


@pytest.mark.parametrize("seed", [0, 7, 2**40])
def test_a_process_begins_in_the_state_of_a_rank_thread(seed, monkeypatch):
    monkeypatch.setenv("LT_X", "mine")
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)
    try:
        lt.testing.assert_same(lt.run(state, ranks=2, seed=seed), on_gloo(state, seed=seed))
    finally:
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)


def spoil():
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.set_grad_enabled(False)
    os.environ["LT_X"] = os.environ["RANK"] = "spoilt"
    torch.manual_seed(99)


def test_what_a_program_changes_is_gone_in_the_next_call():
    first = on_gloo(state)
    pids = on_gloo(process)
    on_gloo(spoil)
    lt.testing.assert_same(first, on_gloo(state))
    assert on_gloo(process).values == pids.values


def test_numpys_first_draw_is_seeded_where_the_program_is_the_first_to_ask_for_it():
    look = (
        "import torch, localtensor as lt\ndef draw():\n    import numpy as np\n    return np.random.rand()\n"
        "one, two = lt.run(draw, ranks=2)\nassert one == two == 0.5488135039273248, (one, two)\n"
    )
    done = warm.run([sys.executable, "-c", look])
    assert (done.returncode, done.stderr) == (0, "")


def initialise(times):
    totals = []
    for _ in range(times):
        dist.init_process_group("gloo", init_method="env://")
        x = torch.tensor(dist.get_rank() + 1)
        dist.all_reduce(x)
        totals.append(x.item())
        dist.destroy_process_group()
    return totals, dist.is_initialized()


def test_a_program_may_initialise_and_destroy_its_group_as_often_as_it_likes():
    for times in (1, 3):
        assert on_gloo(initialise, times).values == lt.run(initialise, times, ranks=2).values
        assert on_gloo(dist.get_rank).values == (0, 1)


def leave_groups():
    dist.new_group([0, 1])
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
    x = torch.ones(1)
    dist.all_reduce(x, group=mesh.get_group("a"))
    return x.item()


def groups_there():
    return sorted(dist.distributed_c10d._world.pg_names.values()), dist.distributed_c10d._world.group_count


def test_groups_of_one_call_are_not_there_in_the_next():
    before = on_gloo(groups_there)
    assert on_gloo(leave_groups).values == (2, 2)
    assert on_gloo(groups_there).values == before.values


def wrong_world():
    dist.init_process_group("gloo", rank=0, world_size=5)


def test_a_world_that_is_not_this_one_is_refused_as_on_threads():
    said = []
    for way in ("threads", "gloo"):
        with pytest.raises(errors.RankRaised) as refused:
            lt.run(wrong_world, ranks=2, on=way)
        assert isinstance(refused.value.__cause__, errors.BadGroup)
        said.append(str(refused.value.__cause__))
    assert said[0] == said[1] == (
        "init_process_group: world_size: world_size=5: this run has 2. Leave it out, or read it from the "
        "environment (RANK, WORLD_SIZE) as under torchrun."
    )  # fmt: skip


def device_of(x, module):
    return x.device.type, module.weight.device.type, torch.ones(1).device.type


def test_a_device_is_that_of_arguments_and_the_default():
    assert on_gloo(device_of, torch.ones(2), torch.nn.Linear(1, 1), device="meta").values == (("meta",) * 3,) * 2
    assert on_gloo(device_of, torch.ones(2), torch.nn.Linear(1, 1)).values == (("cpu",) * 3,) * 2


def one_raises():
    if dist.get_rank() == 1:
        raise KeyError("boom")
    dist.barrier()


def test_the_first_rank_to_raise_is_the_cause_and_who_waited_is_named():
    line = one_raises.__code__.co_firstlineno
    with pytest.raises(errors.RankRaised) as told:
        on_gloo(one_raises)
    error = told.value
    assert str(error) == (
        f"run: rank 1: KeyError: 'boom' at test_pool_run_runs.py:{line + 2} in one_raises: this is the first rank that "
        "raised, and rank 0 had not come back. Repair this line first: what the other ranks say may only be its echo.\n"
        f"  rank 0 was at test_pool_run_runs.py:{line + 3} in one_raises: dist.barrier()"
    )
    assert isinstance(error.__cause__, KeyError) and error.ranks == (1, 0)
    assert [one.rank for one in error.raised] == [1] and [one.rank for one in error.busy] == [0]
    assert 'raise KeyError("boom")' in str(error.__cause__.__cause__)
    assert on_gloo(dist.get_rank).values == (0, 1)


def one_dies():
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def test_a_rank_that_dies_is_the_cause_and_its_peers_only_echo():
    with pytest.raises(
        errors.RankRaised, match=r"^run: rank 1: Died: its process ended by signal SIGKILL: this is the first"
    ):
        on_gloo(one_dies)
    assert on_gloo(dist.get_rank).values == (0, 1)


def leave_early(seconds):
    dist.barrier()
    if dist.get_rank() == 0:
        return
    time.sleep(seconds)
    dist.barrier()


def test_a_rank_that_waits_for_one_that_has_returned_is_reported_and_not_met_by_our_own_barrier():
    with pytest.raises(errors.RankRaised, match=r"rank 1: RuntimeError: .*Connection closed by peer"):
        on_gloo(leave_early, 0)


def compute(seconds):
    time.sleep(seconds if dist.get_rank() else 0)
    return dist.get_rank()


def test_a_rank_that_takes_longer_than_its_peers_is_waited_for():
    assert on_gloo(compute, 1.0).values == (0, 1)


def wait_for_ever():
    dist.recv(torch.ones(1), 1 - dist.get_rank())


def test_a_run_that_does_not_end_says_where_it_was():
    with pytest.raises(errors.NeverEnded) as told:
        on_gloo(wait_for_ever, timeout=0.5)
    line = wait_for_ever.__code__.co_firstlineno + 1
    assert str(told.value) == (
        "run: timeout: timeout=0.5: the run has not ended in time; ranks 0, 1 were still at work. Look for a loop "
        "without end there, or give timeout= more seconds.\n"
        f"  ranks 0, 1 were at test_pool_run_runs.py:{line} in wait_for_ever: dist.recv(torch.ones(1), 1 - dist.get_rank())"
    )
    assert told.value.ranks == (0, 1)


def leave_by_exit():
    sys.exit(3)


def test_sys_exit_is_an_exception_as_on_threads():
    for way in ("threads", "gloo"):
        with pytest.raises(
            errors.RankRaised, match=r"SystemExit: 3 at test_pool_run_runs.py:\d+ in leave_by_exit"
        ) as told:
            lt.run(leave_by_exit, ranks=2, on=way)
        assert isinstance(told.value.__cause__, SystemExit)


def give_a_generator():
    return (i for i in range(3))


def test_what_cannot_travel_is_refused_in_the_name_of_run():
    with pytest.raises(errors.NotSendable) as refused:
        on_gloo(give_a_generator)
    assert str(refused.value).startswith(
        "run: returned value: a generator of rank 0: it cannot be pickled or read back"
    )
    with pytest.raises(errors.NotImportable) as refused:
        on_gloo(lambda: 1)
    assert re.match(r"run: fn: .*<lambda>: worker processes find a function by module and name", str(refused.value))


def test_an_argument_that_cannot_travel_is_refused():
    class Local:
        pass

    with pytest.raises(errors.NotSendable, match=r"^run: args: a Local of rank 0: it cannot be pickled or read back"):
        on_gloo(type, Local())


def test_nccl_wants_a_gpu_for_each_rank():
    ranks = torch.cuda.device_count() + 1
    with pytest.raises(errors.TooFewGpus) as refused:
        lt.run(process, ranks=ranks, on="nccl")
    assert str(refused.value).startswith(f"run: ranks: ranks={ranks}: NCCL wants a GPU for each rank")


def one_sum():
    x = torch.ones(2)
    dist.all_reduce(x)
    return x.device.type, x.cpu()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, which all ranks share")
def test_gloo_ranks_share_one_gpu():
    lt.testing.assert_same(on_gloo(one_sum, device="cuda"), [("cuda", torch.full((2,), 2.0))] * 2)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU for each rank")
def test_nccl_ranks_have_a_gpu_each():
    ranks = min(torch.cuda.device_count(), 2)
    sums = [("cuda", torch.full((2,), float(ranks)))] * ranks
    lt.testing.assert_same(lt.run(one_sum, ranks=ranks, on="nccl"), sums)


def nest():
    return lt.run(process, ranks=2, on="gloo")


def test_a_rank_thread_starts_no_processes():
    with pytest.raises(errors.RankRaised) as refused:
        lt.run(nest, ranks=2)
    assert isinstance(refused.value.__cause__, errors.NestedRun)
    assert "called by rank 0 at test_pool_run_runs.py" in str(refused.value.__cause__)


def test_threads_of_the_caller_take_turns():
    got = []
    threads = [threading.Thread(target=lambda: got.append(on_gloo(dist.get_rank).values)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == [(0, 1)] * 3


def test_few_processes_are_kept_and_those_used_last(monkeypatch):
    monkeypatch.setattr(ambient, "MOST_KEPT", 3)
    ambient.close_pools()
    two, one = on_gloo(process), on_gloo(process, ranks=1)
    assert on_gloo(process).values == two.values
    on_gloo(process, ranks=3)
    assert list(ambient._pools) == [(3, "gloo")]
    for pid in (*two, *one):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_pools_that_are_closed_are_replaced():
    with ambient.pool_of((2, "gloo"), lambda: real.Pool(2)) as pool:
        pids = pool.pids
    ambient.close_pools()
    with pytest.raises(errors.PoolClosed):
        pool.call(process, [(), ()])
    assert not set(pids) & set(on_gloo(process))


def test_a_forked_child_knows_nothing_of_the_parents_processes():
    on_gloo(process)
    child = os.fork()
    if child == 0:
        os._exit(len(ambient._pools))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


ECHO = "[pair.cc:553] Connection closed by peer [127.0.0.1]:1. GLHF!"


def test_causes_come_in_order_of_time_and_echoes_last():
    outcomes = [
        Raised(0, "RuntimeError", ECHO, "", at=1.0), Raised(1, "ValueError", "late", "", at=3.0), Died(2, 7),
        Raised(3, "ValueError", "early", "", at=2.0), Waiting(4, "unknown"), Returned(5, None),
    ]  # fmt: skip
    error = real.error_of_outcomes(outcomes, 5.0)
    assert [(one.rank, one.kind) for one in error.raised] == [
        (3, "ValueError"), (1, "ValueError"), (2, "Died"), (0, "RuntimeError"),
    ]  # fmt: skip
    assert error.raised[2].message == "its process ended with exit code 7"
    assert str(error.__cause__) == "early" and type(error.__cause__) is ValueError


@pytest.mark.parametrize(("kind", "message", "want"), [
    ("KeyError", "x", KeyError("x")), ("BadGroup", "no", errors.BadGroup("a", "b", "c", "d", "e")),
    ("DistBackendError", "x", dist.DistBackendError("x")), ("MyError", "x", RuntimeError("MyError: x")),
    ("UnicodeDecodeError", "x", RuntimeError("UnicodeDecodeError: x")), ("print", "x", RuntimeError("print: x")),
])  # fmt: skip
def test_an_exception_comes_again_of_its_own_class_where_that_is_known(kind, message, want):
    error = real.error_of_outcomes([Raised(0, kind, message, "")], 1.0).__cause__
    assert type(error) is type(want)
    assert isinstance(want, errors.BadGroup) or str(error) == str(want)


FORKED = """
import sys, threading, types
from localtensor.processes import prepare
import localtensor as lt

def has():
    return "of_the_caller" in sys.modules

if __name__ == "__main__":
    sys.modules["of_the_caller"] = types.ModuleType("of_the_caller")
    if sys.argv[1] == "two":
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    prepare(forked=True)
    print(*lt.run(has, ranks=2, on="gloo"), flush=True)
    from multiprocessing import forkserver
    print(forkserver._forkserver._forkserver_pid)
"""


@pytest.mark.few(1)
@pytest.mark.parametrize(("threads", "said"), [("one", "True True"), ("two", "False False")])
def test_the_fork_server_may_be_a_fork_of_a_process_with_one_thread_and_ends_with_it(threads, said, tmp_path):
    (tmp_path / "forked.py").write_text(FORKED)
    done = warm.run([sys.executable, "forked.py", threads], cwd=tmp_path, env={**os.environ, "PYTHONPATH": warm.ROOT})
    first, pid = done.stdout.split("\n")[:2]
    assert first == said, done.stderr
    assert gone(int(pid))


def gone(pid):
    """Whether the process ends; it does as soon as the pipe that its parent held is closed."""
    for _ in range(200):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        threading.Event().wait(0.05)
    return False
