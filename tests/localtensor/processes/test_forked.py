"""Ranks that are forked from this process: closures run, errors come home, and nobody is left behind."""

import atexit
import ctypes
import os
import pickle
import random
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

import localtensor as lt
from localtensor._util import ambient
from localtensor._util.call_sites import place_of_error
from localtensor.errors import NestedRun, NeverEnded, RankRaised, TooFewGpus
from localtensor.processes import forked, worker
from localtensor.processes.forked import NoFork, run_forked
from tests.tools import warm


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(forked, "GRACE", 0.2)
    monkeypatch.setattr(forked, "LEAVE", 0.3)


def on_forks(body, ranks=2, timeout=60.0, tell=repr, seed=0):
    run_forked(body, ranks, "gloo", seed, timeout, tell)


def raised_by(body, ranks=2, **options):
    with pytest.raises(RankRaised) as caught:
        on_forks(body, ranks, **options)
    return caught.value


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def assert_all_end(pids, patience=20.0):
    end = time.monotonic() + patience
    while any(map(is_alive, pids)) and time.monotonic() < end:
        threading.Event().wait(0.01)
    left = [pid for pid in pids if is_alive(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert pids and not left


def pids_in(folder):
    return [int(file.name.partition("-")[2]) for file in folder.glob("pid-*")]


def test_what_the_body_has_closed_over_is_there_on_each_rank(tmp_path):
    class Local:
        weights = torch.arange(3.0)

    def body(rank):
        total = Local.weights * rank
        dist.all_reduce(total)
        (tmp_path / f"pid-{os.getpid()}").touch()
        (tmp_path / f"{rank}").write_text(str(total.tolist()))

    on_forks(body, ranks=3)
    assert [(tmp_path / str(rank)).read_text() for rank in range(3)] == ["[0.0, 3.0, 6.0]"] * 3
    assert len({*pids_in(tmp_path), os.getpid()}) == 4
    assert not any(map(is_alive, pids_in(tmp_path)))


def state():
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT", "LT_X")
    return [
        torch.rand(2).tolist(), random.random(), [os.environ.get(name) for name in names],
        torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads(), dist.get_rank(),
    ]  # fmt: skip


def test_a_rank_begins_in_the_state_of_a_rank_thread(tmp_path, monkeypatch):
    monkeypatch.setenv("LT_X", "mine")
    on_forks(lambda rank: (tmp_path / str(rank)).write_bytes(pickle.dumps(state())), seed=7)
    found = [pickle.loads((tmp_path / str(rank)).read_bytes()) for rank in range(2)]
    assert found == list(lt.run(state, ranks=2, seed=7).values)


def test_the_group_that_the_program_asks_for_is_there_and_can_be_made_anew(tmp_path):
    def body(rank):
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (2,))
        assert mesh.get_local_rank() == rank
        dist.destroy_process_group()
        dist.init_process_group()
        dist.barrier()
        (tmp_path / str(rank)).touch()

    on_forks(body)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["0", "1"]


def test_ranks_compute_whatever_this_process_has_computed_before():
    weights = torch.ones(300, 300, requires_grad=True)
    torch.set_num_threads(4)
    try:
        (weights @ weights).sum().backward()
    finally:
        torch.set_num_threads(1)

    def body(rank):
        mine = weights.detach().requires_grad_()
        (mine @ mine).sum().backward()
        assert torch.equal(mine.grad, weights.grad)

    try:
        assert on_forks(body) is None
    except RankRaised as fault:
        if {one.kind for one in fault.raised} != {"NoFork"} or not torch.backends.cuda.is_built():
            raise
        pytest.skip("another test has brought this process into the state that the next test is about")


AFTER_A_BACKWARD = """
import torch
from torch._subclasses import FakeTensorMode
from localtensor.errors import RankRaised
from localtensor.processes.forked import run_forked

with FakeTensorMode():
    torch.ones(2)

def body(rank):
    torch.ones(2, requires_grad=True).sum().backward()

run_forked(body, 2, "gloo", 0, 60.0, repr)
body(0)
try:
    run_forked(body, 2, "gloo", 0, 60.0, repr)
except RankRaised as fault:
    print(fault.raised[0].message, *{rank.kind for rank in fault.raised}, fault.where[fault.raised[0].rank].function)
"""


@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="only torch with CUDA refuses a backward after a fork")
def test_a_backward_that_torch_refuses_after_a_fork_comes_with_the_reason():
    ran = warm.run([sys.executable, "-c", AFTER_A_BACKWARD])
    assert ran.stdout.startswith("run_forked: on: on='gloo': the first backward of this process"), ran.stderr
    assert ran.stdout.endswith("own process. NoFork body\n")


@pytest.mark.parametrize("everywhere", [True, False])
def test_only_an_error_of_any_backward_is_taken_for_that(monkeypatch, everywhere):
    def backward(tensor, *ignored):
        if everywhere or tensor.numel() > 1:
            raise RuntimeError("not in a fork")

    monkeypatch.setattr(torch.Tensor, "backward", backward)
    fault = raised_by(lambda rank: torch.ones(2).backward())
    assert fault.raised[0].kind == ("NoFork" if everywhere else "RuntimeError")
    assert fault.raised[0].message.startswith("run_forked: on: on='gloo'" if everywhere else "not in a fork")


class Unsaid:
    def __str__(self):
        raise ValueError("no text")


class Refusing(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        raise ValueError(f"no {func} here")


def leave_a_mode_on():
    Refusing().__enter__()


def default_device():
    torch.set_default_device("cuda")


@pytest.mark.parametrize("before", [lambda: None, leave_a_mode_on, default_device])
@pytest.mark.parametrize("text", ["mine", "my fork", Unsaid()])
def test_an_error_of_the_users_stays_what_it_is_in_whatever_state_he_leaves_the_rank(before, text):
    def body(rank):
        before()
        raise RuntimeError(text)

    fault = raised_by(body, ranks=1)
    told = "(its own text failed: ValueError)" if isinstance(text, Unsaid) else text
    assert (fault.raised[0].kind, fault.raised[0].message) == ("RuntimeError", told)
    assert fault.where[0].function == "body"


def test_the_first_cause_comes_home_with_its_line_and_as_it_looked_in_its_process():
    def body(rank):
        if rank == 1:
            assert rank == 5, "not five"
        dist.barrier()

    fault = raised_by(body, tell=lambda error: f"{type(error).__name__} on rank {dist.get_rank()}")
    assert fault.raised[0].rank == 1 and fault.__cause__ is fault.errors[1]
    assert type(fault.errors[1]) is AssertionError and str(fault.errors[1]).startswith("not five")
    assert fault.rendered[1] == "AssertionError on rank 1"
    assert fault.where[1].line == body.__code__.co_firstlineno + 2 and fault.where[1].function == "body"
    assert "in body" in str(fault.errors[1].__cause__) and place_of_error(fault.errors[1]) == fault.where[1]
    [other] = [one.rank for one in (*fault.raised[1:], *fault.busy)]
    assert other == 0


def test_a_class_that_only_the_fork_knows_is_made_again_under_its_name():
    def body(rank):
        class Late(ValueError):
            pass

        raise Late("too late")

    error = raised_by(body).errors[0]
    assert (type(error).__name__, str(error)) == ("Late", "too late") and isinstance(error, ValueError)


def test_skips_on_every_rank_come_back_as_skips():
    fault = raised_by(lambda rank: pytest.skip(f"no device for {rank}"))
    assert [type(fault.errors[rank]) for rank in range(2)] == [pytest.skip.Exception] * 2
    assert str(fault.errors[1]) == "no device for 1"
    assert {place.function for place in fault.where.values()} == {"<lambda>"}  # not pytest's own that raises


def test_what_tells_of_an_exception_may_fail_itself():
    def tell(error):
        raise KeyError

    assert raised_by(lambda rank: 1 // rank, tell=tell).rendered == {0: "(its own text failed: KeyError)"}


def test_a_rank_that_dies_is_the_cause_and_says_by_which_signal():
    def body(rank):
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    fault = raised_by(body)
    assert fault.raised[0].rank == 1
    assert (type(fault.errors[1]).__name__, str(fault.errors[1])) == ("Died", "its process ended by signal SIGKILL")
    assert 1 not in fault.rendered


def stuck(folder):
    (folder / f"pid-{os.getpid()}").touch()
    dist.barrier()
    if dist.get_rank() == 1:
        threading.Event().wait()
    dist.barrier()


def test_a_run_past_its_limit_says_where_each_rank_is_and_leaves_no_one(tmp_path):
    with pytest.raises(NeverEnded) as caught:
        on_forks(lambda rank: stuck(tmp_path), timeout=1.5)
    first = stuck.__code__.co_firstlineno
    lines = {one.rank: one.where.split(" < ") for one in caught.value.busy}
    assert [lines[rank][0].partition(" in ")[0] for rank in range(2)] == [
        f"test_forked.py:{first + 5}", f"test_forked.py:{first + 4}",
    ]  # fmt: skip
    assert [len(lines[rank]) for rank in range(2)] == [2, 2]  # itself and the lambda: nothing of who forked it
    assert not any(map(is_alive, pids_in(tmp_path)))


def test_ctrl_c_ends_all_ranks(tmp_path):
    parent = os.getpid()

    def body(rank):
        (tmp_path / f"pid-{os.getpid()}").touch()
        dist.barrier()
        if rank == 0:
            os.kill(parent, signal.SIGINT)
        threading.Event().wait()

    with pytest.raises(KeyboardInterrupt):
        on_forks(body)
    pids = pids_in(tmp_path)
    assert len(pids) == 2 and not any(map(is_alive, pids))


def hold_all_up(folder):
    (folder / f"pid-{os.getpid()}").touch()
    ctypes.PyDLL(None).sleep(60)  # and no other thread of this process runs meanwhile


@pytest.mark.parametrize(("program", "system"), [
    (stuck, "other"),
    pytest.param(hold_all_up, "linux", marks=pytest.mark.skipif(sys.platform != "linux", reason="only Linux can")),
])  # fmt: skip
def test_ranks_end_with_a_parent_that_is_killed(program, system, tmp_path, monkeypatch):
    monkeypatch.setattr(worker, "SYSTEM", system)
    parent = os.fork()
    if parent == 0:
        on_forks(lambda rank: program(tmp_path))
        os._exit(1)
    end = time.monotonic() + 20
    while len(pids_in(tmp_path)) < 2 and time.monotonic() < end:
        threading.Event().wait(0.01)
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    assert_all_end(pids_in(tmp_path))


def test_what_ranks_print_is_out_even_if_the_stream_would_keep_it(tmp_path, monkeypatch):
    with (tmp_path / "out").open("w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        on_forks(lambda rank: print("no line end", end=""), ranks=1)
    assert (tmp_path / "out").read_text() == "no line end"


def test_what_ranks_print_is_captured_and_nothing_twice(capfd):
    def body(rank):
        print(f"said by {rank}", end="")
        os.system("echo from outside")

    print("before", end="")
    on_forks(body)
    out = capfd.readouterr().out
    assert [out.count(words) for words in ("before", "said by 0", "said by 1")] == [1, 1, 1]
    assert out.count("from outside") == 2


def test_ranks_do_not_run_what_this_process_wants_done_at_its_end(tmp_path):
    def leave_a_trace():
        (tmp_path / "trace").touch()

    atexit.register(leave_a_trace)
    try:
        on_forks(lambda rank: None)
        raised_by(lambda rank: sys.exit(3))
    finally:
        atexit.unregister(leave_a_trace)
    assert list(tmp_path.iterdir()) == []


def test_a_fork_leaves_the_kept_processes_their_folder():
    lt.run(dist.barrier, ranks=1, on="gloo")
    *_, pool = ambient._pools.values()  # the last used: those of other tests may have lost their processes
    folder = Path(pool._group.folder)
    on_forks(lambda rank: None, ranks=1)
    assert folder.is_dir()
    ambient.close_pools()
    assert not folder.exists()


def test_ranks_cannot_fork_ranks():
    def program():
        with pytest.raises(NestedRun):
            run_forked(print, 2, "gloo", 0, None, repr)
        return True

    assert all(lt.run(program, ranks=2).values)


def refusal_of(kind, on="gloo"):
    with pytest.raises(kind) as caught:
        run_forked(print, 2, on, 0, None, repr)
    return str(caught.value)


def test_a_process_with_a_group_of_its_own_is_refused(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        said = refusal_of(NoFork)
    finally:
        dist.destroy_process_group()
    assert said.startswith("run_forked: on: on='gloo': this process has a default process group")


def test_where_there_is_no_fork_it_is_refused(monkeypatch):
    monkeypatch.setattr(forked.multiprocessing, "get_all_start_methods", lambda: ["spawn"])
    assert refusal_of(NoFork).startswith("run_forked: on: on='gloo': this system cannot fork a process")


def test_nccl_wants_gpus_and_a_process_that_has_not_used_them(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert "ranks=2" in refusal_of(TooFewGpus, on="nccl")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert refusal_of(NoFork, on="nccl").startswith("run_forked: on: on='nccl': this process has used CUDA")
