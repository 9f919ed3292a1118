import contextlib
import gc
import multiprocessing.util
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import types
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh

from localtensor import errors
from localtensor._util.events import Died, Raised, Returned, Waiting
from localtensor.processes import Pool, idleness, prepare, worker, worker_group

ROOT = Path(__file__).parents[3]


# What the ranks run: found by name in each process, so it stands at the top level.


def my_rank():
    return dist.get_rank()


def total(x):
    dist.all_reduce(x)
    return x


def sharded_product(x):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = distribute_tensor(x, mesh, [Shard(0)]) @ distribute_tensor(x, mesh, [Replicate()])
    assert isinstance(whole, DTensor)
    return whole.full_tensor()


def same(x):
    return x


def refuse(x):
    raise ValueError(f"no {x}")


def refuse_after_a_sum(x):
    dist.all_reduce(torch.ones(1))
    raise ValueError("no")


def one_raises_one_waits(rank):
    if rank == 0:
        raise ValueError("no")
    dist.all_reduce(torch.ones(1))  # nobody comes


def one_returns_one_waits(rank):
    if rank == 1:
        dist.barrier()  # nobody comes


def one_returns_one_sleeps(rank):
    if rank == 1:
        threading.Event().wait()


def one_returns_one_computes(rank):
    while rank == 1:
        pass


def one_exits_one_waits(rank):
    if rank == 0:
        os._exit(3)
    dist.barrier()


def one_is_killed_one_waits(rank, number):
    if rank == 0:
        os.kill(os.getpid(), number)
    dist.barrier()


def one_exits_and_leaves_a_child(rank):
    """The child holds all that the process had open, so that no pipe of its ends."""
    if rank == 0:
        if os.fork() == 0:
            threading.Event().wait(30)
        os._exit(3)


def leave_by_sys_exit():
    sys.exit(4)


class Mute(Exception):
    def __str__(self):
        raise RuntimeError


def raise_something_mute():
    raise Mute


def a_lock():
    return threading.Lock()


class OnlyHere:
    """Pickles anywhere, and reads back only in the process that made it."""

    def __reduce__(self):
        return OnlyHere.back, (os.getpid(),)

    @staticmethod
    def back(pid):
        if pid != os.getpid():
            raise ValueError("not here")
        return OnlyHere()


def only_there(_):
    return OnlyHere()


def begin(name):
    """Begin an operation, wait for nothing, return."""
    peer = 1 - dist.get_rank()
    match name:
        case "all_reduce":
            dist.all_reduce(torch.ones(2), async_op=True)
        case "broadcast":
            dist.broadcast(torch.ones(2), 0, async_op=True)
        case "sum":
            dist.all_reduce(torch.ones(2))
        case "sum and tagged send":
            dist.all_reduce(torch.ones(2))
            dist.isend(torch.ones(2), peer, tag=7)
        case "send":
            dist.isend(torch.full((2,), 9.0), peer)
        case "recv":
            dist.irecv(torch.ones(2), peer)


def sum_and_swap(rank):
    """A sum and a message each way: what anything left over from another call would spoil."""
    x, got = torch.full((2,), rank + 1.0), torch.zeros(2)
    dist.all_reduce(x)
    for sender in (0, 1):
        if rank == sender:
            dist.send(x + rank, 1 - rank)
        else:
            dist.recv(got, sender)
    return x.tolist(), got.tolist()


def end_the_group():
    dist.destroy_process_group()


def leave_files_open():
    for _ in range(450):
        os.open(os.devnull, os.O_RDONLY)


def interrupt(pid, rank):
    if rank == 0:
        os.kill(pid, signal.SIGINT)
    threading.Event().wait()


def interrupt_myself():
    os.kill(os.getpid(), signal.SIGINT)
    return "still here"


def environment(*names):
    return [os.environ.get(name) for name in names]


def has_a_child():
    child = multiprocessing.get_context("fork").Process(target=os._exit, args=(5,))
    child.start()
    child.join()
    return child.exitcode


# What the tests share.


def values(outcomes):
    assert [type(outcome) for outcome in outcomes] == [Returned] * len(outcomes), outcomes
    return [outcome.value for outcome in outcomes]


def runs(pid):
    """Whether the process exists and is more than an entry that nobody has collected."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except ProcessLookupError:
        return False
    except FileNotFoundError:
        return not Path("/proc").exists()


def assert_ended(pids, seconds=20.0):
    assert pids
    deadline = time.monotonic() + seconds
    while left := [pid for pid in pids if runs(pid)]:
        assert time.monotonic() < deadline, f"still running: {left}"
        threading.Event().wait(0.01)


def assert_fresh_and_right(pool, before):
    """The next call is right, and other processes gave the answer."""
    assert values(pool.call(sum_and_swap, [(0,), (1,)])) == [([3.0, 3.0], [4.0, 4.0]), ([3.0, 3.0], [3.0, 3.0])]
    assert not set(pool.pids) & set(before)
    assert_ended(before)


@pytest.fixture(scope="module")
def pool():
    with Pool(2, timeout=20, grace=1.0) as pool:
        yield pool


@pytest.fixture
def pids(pool):
    """The processes that the next call will find."""
    values(pool.call(my_rank, [(), ()]))
    return pool.pids


# Answers.


def test_outcomes_come_in_rank_order(pool):
    assert pool.call(my_rank, [(), ()]) == [Returned(0, 0), Returned(1, 1)]


def test_ranks_meet_in_the_default_group(pool):
    for value in values(pool.call(total, [(torch.tensor([1.0]),), (torch.tensor([2.0]),)])):
        assert torch.equal(value, torch.tensor([3.0]))


def test_dtensor_programs_run(pool):
    x = torch.arange(9.0).reshape(3, 3)
    for value in values(pool.call(sharded_product, [(x,), (x,)])):
        assert torch.equal(value, x @ x)


def test_one_rank_is_a_pool_too():
    with Pool(1) as alone:
        assert torch.equal(values(alone.call(total, [(torch.ones(2),)]))[0], torch.ones(2))


def test_processes_start_at_the_first_call_and_stay():
    with Pool(2) as pool:
        assert pool.pids == ()
        values(pool.call(my_rank, [(), ()]))
        first = pool.pids
        assert len(set(first)) == 2
        for _ in range(3):
            values(pool.call(total, [(torch.ones(1),)] * 2))
        assert pool.pids == first


@pytest.mark.parametrize("tensor", [
    torch.tensor(2.5), torch.empty(0, 3), torch.arange(6).reshape(2, 3), torch.tensor([True, False]),
    torch.tensor([1 + 2j]), torch.tensor([1.5], dtype=torch.bfloat16), torch.tensor([float("nan"), -0.0]),
    torch.arange(6).reshape(2, 3).T, torch.arange(6)[::2], torch.tensor([1 + 2j]).conj(),
    torch.ones(2, requires_grad=True), torch.nn.Parameter(torch.ones(2)), torch.eye(2).to_sparse(),
])  # fmt: skip
def test_a_tensor_arrives_as_it_was_and_comes_back(pool, tensor):
    for value in values(pool.call(same, [(tensor,), (tensor,)])):
        assert type(value) is type(tensor)
        assert value.requires_grad == tensor.requires_grad
        assert value.is_conj() == tensor.is_conj()
        assert value.layout == tensor.layout
        if tensor.layout == torch.strided:
            assert value.stride() == tensor.stride()
        torch.testing.assert_close(value, tensor, rtol=0, atol=0, equal_nan=True)


def test_a_returned_tensor_is_the_callers_own(pool):
    first, second = values(pool.call(same, [(torch.ones(2),)] * 2))
    first.resize_(100).zero_()
    assert torch.equal(second, torch.ones(2))


def test_large_values_travel(pool):
    x = torch.arange(1_000_000)
    assert all(torch.equal(value, x) for value in values(pool.call(same, [(x,), (x,)])))


def test_a_module_found_only_later_is_found(pool, pids, tmp_path, monkeypatch):
    (tmp_path / "written_just_now.py").write_text("def answer(): return 42")
    monkeypatch.syspath_prepend(tmp_path)
    import written_just_now

    assert values(pool.call(written_just_now.answer, [(), ()])) == [42, 42]
    assert pool.pids == pids


def test_the_environment_at_the_start_and_the_seat_are_seen(monkeypatch):
    monkeypatch.setenv("SOMETHING_NEW", "yes")
    monkeypatch.delenv("TORCH_CPP_LOG_LEVEL", raising=False)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "SOMETHING_NEW", "TORCH_CPP_LOG_LEVEL")
    with Pool(2) as pool:
        assert values(pool.call(environment, [names, names])) == [
            ["0", "0", "2", "yes", "ERROR"],
            ["1", "1", "2", "yes", "ERROR"],
        ]


def test_gloo_and_nccl_are_reported_to_stay_on_the_loopback_interface(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    with Pool(1) as pool:
        [[gloo, nccl]] = values(pool.call(environment, [names]))
    assert gloo == nccl
    assert re.fullmatch(r"lo\d*", gloo)


def test_a_log_level_of_the_users_is_kept(monkeypatch):
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "INFO")
    with Pool(1) as pool:
        assert values(pool.call(environment, [("TORCH_CPP_LOG_LEVEL",)])) == [["INFO"]]
    assert os.environ["TORCH_CPP_LOG_LEVEL"] == "INFO"


def test_a_rank_may_have_children_of_its_own(pool):
    assert values(pool.call(has_a_child, [(), ()])) == [5, 5]


def test_threads_take_turns(pool):
    got = {}

    def ask(number):
        got[number] = values(pool.call(same, [(number,), (-number,)]))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == {number: [number, -number] for number in range(1, 9)}


@pytest.mark.slow
def test_without_a_fork_server_ranks_are_spawned(monkeypatch):
    monkeypatch.setattr("multiprocessing.get_all_start_methods", lambda: ["spawn"])
    with Pool(1) as pool:  # each takes the seconds that it takes to import torch
        assert torch.equal(values(pool.call(total, [(torch.ones(2),)]))[0], torch.ones(2))
        assert values(pool.call(os.getppid, [()])) == [os.getpid()]


def test_where_there_is_a_fork_server_it_is_the_ranks_parent(pool):
    assert os.getpid() not in values(pool.call(os.getppid, [(), ()]))


@pytest.mark.parametrize("methods", [["fork", "spawn", "forkserver"], ["spawn"]])
def test_the_fork_server_is_on_its_way_before_the_first_call_where_there_is_one(methods, monkeypatch):
    started = []
    monkeypatch.setattr("multiprocessing.forkserver.ensure_running", lambda: started.append("running"))
    monkeypatch.setattr("multiprocessing.get_all_start_methods", lambda: methods)
    prepare()
    assert started == ["running"] * ("forkserver" in methods)


DTENSOR_STARTS = """
import sys
import torch
import localtensor as lt

def has_it():
    return "torch._dynamo" in sys.modules

if __name__ == "__main__":  # each rank imports what stands above
    {imports}
    print(list(lt.run(has_it, ranks=2, on="gloo").values))
"""


@pytest.mark.parametrize("has_it", [True, False])
def test_the_fork_server_is_asked_for_what_dtensor_imports_at_its_first_call_where_the_caller_has_it(
    has_it, monkeypatch
):
    asked = []
    monkeypatch.setattr("multiprocessing.forkserver.ensure_running", lambda: None)
    monkeypatch.setattr(
        multiprocessing.get_context("forkserver"), "set_forkserver_preload", asked.append, raising=False
    )
    monkeypatch.setitem(sys.modules, "torch._dynamo", torch)
    if not has_it:
        monkeypatch.delitem(sys.modules, "torch._dynamo")
    prepare()
    assert "torch" in asked[0] and ("torch._dynamo" in asked[0]) is has_it


@pytest.mark.slow  # the test before shows what the fork server is asked for, all others that it does it
@pytest.mark.parametrize(("imports", "has_it"), [("import torch._dynamo", True), ("pass", False)])
def test_what_dtensor_imports_at_its_first_call_comes_with_the_fork_server_where_the_caller_has_it(
    imports, has_it, tmp_path
):
    file = tmp_path / "starts.py"
    file.write_text(DTENSOR_STARTS.format(imports=imports))
    done = subprocess.run([sys.executable, file], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == f"{[has_it] * 2}\n"


# What else a program may do.


def in_a_forked_copy(fn):
    """Whether `fn()` came out true in a copy of this process."""
    copy = os.fork()
    if copy == 0:
        signal.alarm(60)
        with contextlib.suppress(BaseException):
            os._exit(5 if fn() else 6)
        os._exit(7)
    return os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1]) == 5


forks = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # of Python 3.12, of forks beside threads


@forks
def test_a_forked_copy_of_the_caller_cannot_end_its_processes(pool, pids):
    assert in_a_forked_copy(lambda: pool.close() is None)
    assert values(pool.call(my_rank, [(), ()])) == [0, 1]
    assert pool.pids == pids


@forks
@pytest.mark.slow
def test_a_forked_copy_of_the_caller_gets_processes_of_its_own(pool, pids):
    def call():
        right = values(pool.call(my_rank, [(), ()])) == [0, 1] and not set(pool.pids) & set(pids)
        pool.close()
        return right

    assert in_a_forked_copy(call)
    assert values(pool.call(my_rank, [(), ()])) == [0, 1]
    assert pool.pids == pids


# Exceptions.


def test_what_a_rank_raises_is_reported_in_strings(pool):
    raised, returned = pool.call(one_raises_or_returns, [(0,), (1,)])
    assert (raised.rank, raised.kind, raised.message) == (0, "ValueError", "not rank 0")
    assert raised.traceback.endswith("ValueError: not rank 0\n")
    assert "in one_raises_or_returns" in raised.traceback
    assert "_worker" not in raised.traceback
    assert returned == Returned(1, "fine")


def one_raises_or_returns(rank):
    if rank == 0:
        raise ValueError("not rank 0")
    return "fine"


def test_leaving_by_sys_exit_is_raising(pool):
    assert [(out.kind, out.message) for out in pool.call(leave_by_sys_exit, [(), ()])] == [("SystemExit", "4")] * 2


def test_an_exception_that_cannot_say_what_it_is_is_reported_all_the_same(pool):
    assert [(out.kind, out.message) for out in pool.call(raise_something_mute, [(), ()])] == [
        ("Mute", "(its own text failed: RuntimeError)")
    ] * 2


def test_a_refusal_before_the_first_collective_keeps_the_processes(pool, pids):
    assert [out.message for out in pool.call(refuse, [("a",), ("b",)])] == ["no a", "no b"]
    assert [out.value for out in pool.call(my_rank, [(), ()])] == [0, 1]
    assert pool.pids == pids


def test_a_refusal_half_way_starts_other_processes(pool, pids):
    assert [type(out) for out in pool.call(refuse_after_a_sum, [(0,), (0,)])] == [Raised, Raised]
    assert_fresh_and_right(pool, pids)


# Silence.


def test_after_an_exception_the_silent_get_a_grace(pool, pids):
    start = time.monotonic()
    raised, waiting = pool.call(one_raises_one_waits, [(0,), (1,)], timeout=120)
    assert time.monotonic() - start < 60  # not the whole time
    assert (raised.kind, waiting.rank) == ("ValueError", 1)
    assert re.fullmatch(
        r"test_pool.py:\d+ in one_raises_one_waits: dist.all_reduce\(torch.ones\(1\)\)  # nobody comes", waiting.where
    )
    assert_fresh_and_right(pool, pids)


@pytest.mark.parametrize(
    ("fn", "line"),
    [
        (one_returns_one_waits, "dist.barrier()  # nobody comes"),
        (one_returns_one_sleeps, "threading.Event().wait()"),
        (one_returns_one_computes, ""),
    ],
)
def test_after_a_return_the_silent_get_the_whole_time(pool, pids, fn, line):
    start = time.monotonic()
    returned, waiting = pool.call(fn, [(0,), (1,)], timeout=1.0)
    assert time.monotonic() - start >= 1.0
    assert returned == Returned(0, None)
    assert isinstance(waiting, Waiting)
    assert re.match(rf"test_pool.py:\d+ in {fn.__name__}: {re.escape(line)}", waiting.where)
    assert_fresh_and_right(pool, pids)


def test_all_may_be_silent(pool, pids):
    outcomes = pool.call(one_returns_one_sleeps, [(1,), (1,)], timeout=0.3)
    assert [type(out) for out in outcomes] == [Waiting, Waiting]
    assert_fresh_and_right(pool, pids)


def one_computes_one_waits(rank, seconds):
    if rank == 0:
        until = time.process_time() + seconds
        while time.process_time() < until:
            pass
    dist.barrier()


def test_ranks_that_wait_for_each_other_are_given_up_early(pool, pids):
    start = time.monotonic()
    returned, waiting = pool.call(one_returns_one_waits, [(0,), (1,)], timeout=60.0, idle=idleness.Idleness(0.5))
    assert 0.5 <= time.monotonic() - start < 30
    assert returned == Returned(0, None)
    assert isinstance(waiting, Waiting) and "in one_returns_one_waits" in waiting.where
    assert_fresh_and_right(pool, pids)


def test_ranks_that_wait_for_one_that_works_are_not(pool):
    assert values(
        pool.call(one_computes_one_waits, [(0, 1.5), (1, 1.5)], timeout=60.0, idle=idleness.Idleness(0.5))
    ) == [None, None]


def test_processes_that_wait_may_use_a_little_of_the_processor_and_not_more(monkeypatch):
    clock, share = [100.0], [0.003]
    monkeypatch.setattr(idleness.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(idleness, "processor_time", lambda pid: 1 + share[0] * (clock[0] - 100))
    for share[0], ends in ((0.003, 12.0), (0.05, None)):
        clock[0] = 100.0
        watched = idleness.Idleness(12.0)
        watched.begin([1, 2])
        for _ in range(100):
            clock[0] += watched.pause
            if watched.over():
                break
        assert clock[0] - 100 == (ends or 100 * watched.pause)


def test_where_the_system_reports_no_use_of_the_processor_no_one_is_given_up(monkeypatch):
    monkeypatch.setattr(idleness, "processor_time", lambda pid: 0.0)
    watched = idleness.Idleness(1e-9)
    watched.begin([1, 2])
    assert not watched.over()


def test_a_frozen_process_that_takes_no_large_job_cannot_hold_the_call(pool, pids):
    os.kill(pids[1], signal.SIGSTOP)
    big = torch.zeros(1_000_000)
    assert pool.call(same, [(big,), (big,)], timeout=0.4) == [Waiting(0, "unknown"), Waiting(1, "unknown")]
    assert_fresh_and_right(pool, pids)


def test_a_frozen_process_is_waiting_no_one_knows_where(pool, pids):
    os.kill(pids[1], signal.SIGSTOP)
    assert pool.call(my_rank, [(), ()], timeout=1.0) == [Returned(0, 0), Waiting(1, "unknown")]
    assert_fresh_and_right(pool, pids)


def holds_an_error(rank):
    if rank:
        __raised__ = "ValueError: no"  # noqa: F841
        threading.Event().wait()
    return rank


def test_what_a_rank_was_about_to_tell_its_peers_is_said_of_it(pool, pids):
    returned, waiting = pool.call(holds_an_error, [(0,), (1,)], timeout=1.0)
    assert (returned, waiting.rank, waiting.raised) == (Returned(0, 0), 1, "ValueError: no")
    assert "holds_an_error" in waiting.where and "no" not in waiting.where.replace("holds_an_error", "")


# Death.


def test_a_process_that_exits_has_died(pool, pids):
    died, _ = pool.call(one_exits_one_waits, [(0,), (1,)])
    assert died == Died(0, 3)
    assert_fresh_and_right(pool, pids)


def test_a_process_that_leaves_a_child_has_died_all_the_same(pool, pids):
    start = time.monotonic()
    assert pool.call(one_exits_and_leaves_a_child, [(0,), (1,)], timeout=120) == [Died(0, 3), Returned(1, None)]
    assert time.monotonic() - start < 20  # the child lives on
    assert_fresh_and_right(pool, pids)


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGKILL])
def test_a_process_that_is_killed_has_died(pool, pids, number):
    died, _ = pool.call(one_is_killed_one_waits, [(0, number), (1, number)])
    assert died == Died(0, -number)
    assert_fresh_and_right(pool, pids)


def test_a_process_killed_between_calls_is_replaced(pool, pids):
    [victim] = [process for process in multiprocessing.active_children() if process.pid == pids[1]]
    os.kill(pids[1], signal.SIGKILL)
    victim.join(5)  # until its death is known here: later is between calls, earlier might be within one
    assert_fresh_and_right(pool, pids)


def test_ctrl_c_is_not_for_the_ranks(pool, pids):
    assert values(pool.call(interrupt_myself, [(), ()])) == ["still here"] * 2
    assert values(pool.call(my_rank, [(), ()])) == [0, 1]
    assert pool.pids == pids


# Nothing of one call reaches the next.


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("all_reduce", "nothing"),
        ("all_reduce", "broadcast"),
        ("all_reduce", "send"),
        ("send", "nothing"),
        ("send", "send"),
        ("recv", "recv"),
        ("sum and tagged send", "sum"),
    ],
)
def test_an_operation_that_a_call_left_behind_does_not_reach_the_next(pool, pids, left, right):
    assert values(pool.call(begin, [(left,), (right,)])) == [None, None]
    assert_fresh_and_right(pool, pids)


def test_operations_that_match_need_no_other_processes(pool, pids):
    values(pool.call(begin, [("all_reduce",), ("all_reduce",)]))
    assert values(pool.call(my_rank, [(), ()])) == [0, 1]
    assert pool.pids == pids


def test_a_call_that_ends_the_group_is_the_last_of_its_processes(pool, pids):
    assert values(pool.call(end_the_group, [(), ()])) == [None, None]
    assert_fresh_and_right(pool, pids)


def test_processes_full_of_litter_are_replaced(pool, pids):
    assert values(pool.call(leave_files_open, [(), ()])) == [None, None]
    assert_fresh_and_right(pool, pids)


# Errors of use.


@pytest.mark.parametrize(("ranks", "options", "kind", "message"), [
    (0, {}, errors.NoRanks,
     "Pool: ranks: ranks=0: a group has at least one rank, and a whole number of them. Ask for 1 rank or more."),
    (True, {}, errors.NoRanks, ("Pool: ranks: ranks=True: a group has at least one rank, and a whole number of them."
     " Ask for 1 rank or more.")),
    (70_000, {}, errors.NoRanks, "Pool: ranks: ranks=70000: one machine has no room for so many. Ask for fewer."),
    (2, {"backend": "glue"}, errors.NoSuchBackend,
     "Pool: backend: backend='glue': no such backend is known. Choose one of gloo, nccl, cpu:gloo,cuda:nccl."),
    (999, {"backend": "nccl"}, errors.NoSuchBackend,
     (f"Pool: backend: backend='nccl': NCCL wants a GPU for each of 999 ranks, and there are"
     f" {torch.cuda.device_count()}. Choose one of gloo.")),
    (2, {"timeout": 0}, errors.NoTime,
     "Pool: timeout: timeout=0: a limit is more than 0 seconds, and at most a day. Give it 30, say."),
    (2, {"grace": float("inf")}, errors.NoTime,
     "Pool: grace: grace=inf: a limit is more than 0 seconds, and at most a day. Give it 30, say."),
])  # fmt: skip
def test_a_pool_that_cannot_be_is_refused(ranks, options, kind, message):
    with pytest.raises(kind) as refused:
        Pool(ranks, **options)
    assert str(refused.value) == message


@pytest.mark.parametrize(("fn", "args", "options", "kind", "message"), [
    (same, [(1,)], {}, errors.WrongArguments, ("Pool.call: args_per_rank: 1 entries: there are 2 ranks."
     " Give one tuple of arguments for each rank, in rank order.")),
    (same, [(1,), torch.ones(1)], {}, errors.WrongArguments,
     ("Pool.call: args_per_rank: Tensor for rank 1: the arguments of a rank are a tuple or a list."
     " Give one tuple of arguments for each rank, in rank order.")),
    (same, [(1,), (2,)], {"timeout": -1}, errors.NoTime,
     "Pool.call: timeout: timeout=-1: a limit is more than 0 seconds, and at most a day. Give it 30, say."),
    (lambda x: x, [(1,), (2,)], {}, errors.NotImportable,
     (r"Pool.call: fn: (\S+\.)?test_pool.<lambda>: worker processes find a function by module and name,"
     r" and this failed \(\w+Error: .*<lambda>.*\)." r" Define it at the top level of a module that can be imported.")),
    (same, [(1,), (2, threading.Lock())], {}, errors.NotSendable,
     ("Pool.call: args_per_rank: a lock of rank 1: it cannot be pickled or read back"
     r" \(TypeError: cannot pickle '_thread.lock' object\)."
     " Send plain data and tensors, and make live objects inside the function.")),
    (same, [(1,), (OnlyHere(),)], {}, errors.NotSendable,
     (r"Pool.call: args_per_rank: a tuple of rank 1: it cannot be pickled or read back \(ValueError: not here\)."
     " Send plain data and tensors, and make live objects inside the function.")),
    (a_lock, [(), ()], {}, errors.NotSendable,
     ("Pool.call: returned value: a lock of rank 0: it cannot be pickled or read back"
     r" \(cannot pickle '_thread.lock' object\)."
     " Send plain data and tensors, and make live objects inside the function.")),
    (only_there, [(1,), (1,)], {}, errors.NotSendable,
     (r"Pool.call: returned value: a value of rank 0: it cannot be pickled or read back" r" \(ValueError: not here\)."
     " Send plain data and tensors, and make live objects inside the function.")),
])  # fmt: skip
def test_an_error_of_use_is_worded_and_leaves_the_pool_as_it_was(pool, pids, fn, args, options, kind, message):
    with pytest.raises(kind) as refused:
        pool.call(fn, args, **options)
    assert re.fullmatch(message, str(refused.value))
    assert values(pool.call(my_rank, [(), ()])) == [0, 1]
    assert pool.pids == pids


def test_a_function_that_the_ranks_do_not_find_is_named(pool, pids, tmp_path, monkeypatch):
    (tmp_path / "soon_gone.py").write_text("def answer(): return 42")
    monkeypatch.syspath_prepend(tmp_path)
    import soon_gone

    (tmp_path / "soon_gone.py").unlink()
    with pytest.raises(errors.NotImportable) as refused:
        pool.call(soon_gone.answer, [(), ()])
    assert str(refused.value) == (
        "Pool.call: fn: soon_gone.answer: worker processes find a function by module and name, and this failed"
        " (ModuleNotFoundError: No module named 'soon_gone')."
        " Define it at the top level of a module that can be imported."
    )
    assert values(pool.call(my_rank, [(), ()])) == [0, 1]
    assert pool.pids == pids


# The end.


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """Where temporary files go from now on, but for the folder that Python's multiprocessing makes once and keeps."""
    multiprocessing.util.get_temp_dir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_close_leaves_no_process_and_no_file(temporary):
    pool = Pool(2)
    values(pool.call(my_rank, [(), ()]))
    pids = pool.pids
    [folder] = temporary.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert [file.name for file in folder.iterdir()] == ["store"]
    pool.close()
    pool.close()
    assert pool.pids == ()
    assert_ended(pids, seconds=0.0)
    assert list(temporary.iterdir()) == []


def test_restarts_leave_nothing_behind(pool, temporary):
    seen = []
    for _ in range(4):
        pool.call(refuse_after_a_sum, [(0,), (0,)])
        gc.collect()
        seen.append((threading.active_count(), len(os.listdir("/dev/fd")), len(multiprocessing.active_children())))
    assert len(set(seen[1:])) == 1, seen
    assert list(temporary.iterdir()) == []


def test_a_thread_that_asks_after_the_processes_of_a_pool_may_be_overtaken_by_its_end():
    """Whoever starts a process asks all others whether they have ended: a closed one would raise, or be half closed."""
    pool = Pool(2)
    pool.call(my_rank, [(), ()])
    asked = [child for child in multiprocessing.active_children() if child.pid in pool.pids]
    pool.close()
    assert [child.exitcode for child in asked] == [-signal.SIGKILL] * 2


def test_a_ctrl_c_while_ranks_are_ended_leaves_neither_them_nor_their_folder(temporary, monkeypatch):
    pool = Pool(2)
    pids = [outcome.value for outcome in pool.call(os.getpid, [(), ()])]
    first = pool._group.members[0].process

    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(first, "join", interrupted)
    assert list(temporary.iterdir()) != []
    with pytest.raises(KeyboardInterrupt):
        pool.close()
    assert list(temporary.iterdir()) == [] and pool._group not in worker_group.WORKER_GROUPS
    assert_ended(pids)


def test_a_call_after_close_is_refused():
    pool = Pool(2)
    pool.close()
    with pytest.raises(errors.PoolClosed) as refused:
        pool.call(my_rank, [(), ()])
    assert str(refused.value) == (
        "Pool.call: pool: Pool(2): this pool was closed. Make a new Pool, or call before close()."
    )


def test_an_exception_in_the_parent_leaves_no_process():
    pids = []

    def call_and_fail():
        with Pool(2) as pool:
            values(pool.call(my_rank, [(), ()]))
            pids.extend(pool.pids)
            raise LookupError

    with pytest.raises(LookupError):
        call_and_fail()
    assert_ended(pids, seconds=0.0)


@pytest.mark.parametrize("gone", [ConnectionRefusedError(111, "refused"), BrokenPipeError(32, "broken"), EOFError()])
def test_a_fork_server_that_is_gone_is_a_pool_that_did_not_start(gone, monkeypatch):
    """As where the system has ended it, for want of memory say."""

    def hire(*_):
        raise gone

    monkeypatch.setattr(worker_group.WorkerGroup, "_start_worker", hire)
    with Pool(2) as pool, pytest.raises(errors.PoolDidNotStart, match=rf"rank 0: {type(gone).__name__}"):
        pool.call(my_rank, [(), ()])


def test_ctrl_c_while_processes_are_started_leaves_none(monkeypatch):
    prepare()
    ends, before = [], multiprocessing.active_children()

    @contextlib.contextmanager
    def deaf():
        yield
        ends.append(None)
        if len(ends) == 2:  # the first is that of the fork server
            raise KeyboardInterrupt

    monkeypatch.setattr(worker_group, "sigint_blocked", deaf)
    with Pool(2) as pool:
        with pytest.raises(KeyboardInterrupt):
            pool.call(my_rank, [()] * 2)
        assert [one.name for one in multiprocessing.active_children() if one not in before] == []
        monkeypatch.undo()
        assert pool.call(my_rank, [()] * 2) == [Returned(0, 0), Returned(1, 1)]


def test_ctrl_c_in_the_parent_leaves_no_process_and_a_pool_that_works():
    with Pool(2) as pool:
        values(pool.call(my_rank, [(), ()]))
        pids = pool.pids
        with pytest.raises(KeyboardInterrupt):
            pool.call(interrupt, [(os.getpid(), 0), (os.getpid(), 1)])
        assert_fresh_and_right(pool, pids)


def test_a_pool_that_no_one_holds_ends():
    pool = Pool(2)
    values(pool.call(my_rank, [(), ()]))
    pids = pool.pids
    del pool
    gc.collect()
    assert_ended(pids, seconds=0.0)


SCRIPT = """
import os, signal, sys, threading
sys.path.insert(0, {root!r})
from localtensor.processes import idleness, Pool, prepare

def meet_nobody(rank):
    import torch.distributed as dist  # here, so that the parent need not load it
    if rank == 0:
        print("waiting", flush=True)
        dist.barrier()
    threading.Event().wait()

def ignore_polite_requests():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)

if __name__ == "__main__":
    pool = Pool(2, timeout=60)
    pool.call(ignore_polite_requests, [(), ()])
    print(*pool.pids, flush=True)
    {then}
"""


@contextlib.contextmanager
def a_script(tmp_path, then):
    """A parent of its own, with two ranks up; its process and theirs."""
    file = tmp_path / "script.py"
    file.write_text(SCRIPT.format(root=str(ROOT), then=then))
    short = tempfile.mkdtemp(prefix="lt")  # the fork server's socket has a path of at most 107 characters
    (tmp_path / "temp").symlink_to(short)
    environ = {**os.environ, "TMPDIR": short}
    with subprocess.Popen([sys.executable, str(file)], stdout=subprocess.PIPE, text=True, env=environ) as parent:
        try:
            yield parent, [int(pid) for pid in parent.stdout.readline().split()]
        finally:
            parent.kill()


@pytest.mark.slow  # one that is killed leaves none either, which is harder
def test_a_script_that_ends_leaves_no_process(tmp_path):
    with a_script(tmp_path, "sys.exit(3)") as (parent, pids):
        assert parent.wait(60) == 3
        assert_ended(pids)
        assert list((tmp_path / "temp").glob("localtensor-*")) == []


def test_ranks_end_when_their_parent_is_killed_even_in_a_collective(tmp_path):
    with a_script(tmp_path, "pool.call(meet_nobody, [(0,), (1,)])") as (parent, pids):
        assert parent.stdout.readline() == "waiting\n"
        parent.kill()
        assert_ended(pids)
        assert list((tmp_path / "temp").glob("localtensor-*")) == []


@pytest.mark.slow  # those in a collective end, which is harder
def test_idle_ranks_end_when_their_parent_is_killed(tmp_path):
    with a_script(tmp_path, "print('idle', flush=True); threading.Event().wait()") as (parent, pids):
        assert parent.stdout.readline() == "idle\n"
        parent.kill()
        assert_ended(pids)
        assert list((tmp_path / "temp").glob("localtensor-*")) == []


@pytest.mark.slow
def test_sigterm_while_ranks_are_waited_for_leaves_neither_them_nor_a_folder(tmp_path):
    with a_script(tmp_path, "pool.call(meet_nobody, [(0,), (1,)])") as (parent, pids):
        assert parent.stdout.readline() == "waiting\n"
        parent.terminate()
        assert parent.wait(60) == -signal.SIGTERM
        assert_ended(pids, seconds=0.0)
        assert list((tmp_path / "temp").iterdir()) == []


def test_sigterm_is_heeded_for_as_long_as_a_call_and_where_no_one_else_does():
    def heeded():
        with worker_group.ranks_end_on_sigterm(), worker_group.ranks_end_on_sigterm():
            return signal.getsignal(signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        assert heeded() is worker_group._on_sigterm and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        for theirs in (signal.SIG_IGN, signal.default_int_handler):
            signal.signal(signal.SIGTERM, theirs)
            assert heeded() == theirs == signal.getsignal(signal.SIGTERM)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with worker_group.ranks_end_on_sigterm():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as a program may, meanwhile
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_rank_looks_for_no_store_in_a_folder_that_went_with_the_parent(tmp_path, monkeypatch):
    """It would look for minutes, without letting go of the GIL: no other thread would see that the parent is gone."""
    monkeypatch.setattr(dist, "FileStore", lambda *_: pytest.fail("it looks"))
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    with pytest.raises(FileNotFoundError):
        worker._init_group(worker.WorkerSpec(0, 2, "gloo", str(tmp_path / "gone"), {}))


@pytest.mark.slow
def test_a_script_without_a_main_guard_is_told_so(tmp_path):
    file = tmp_path / "unguarded.py"
    file.write_text(SCRIPT.format(root=str(ROOT), then="").replace('if __name__ == "__main__"', "if True"))
    run = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, check=False, timeout=60)
    assert run.returncode == 1
    assert (
        "localtensor.errors.runs.PoolDidNotStart: Pool.call: pool: Pool(2): the worker processes did not" in run.stderr
    )
    assert "In a script, start it under `if __name__ == '__main__':`" in run.stderr


def test_a_program_that_no_worker_can_read_again_starts_none(monkeypatch, tmp_path):
    main = types.ModuleType("__main__")
    main.__file__ = "<stdin>"  # as under `python < program.py`
    monkeypatch.setitem(sys.modules, "__main__", main)
    with Pool(2) as pool, pytest.raises(errors.PoolDidNotStart, match="__main__` is <stdin>, which is no file"):
        pool.call(os.getpid, [(), ()])
    assert pool._group is None or pool._group.members == []


# Only this machine.


def listening(pids):
    """Addresses on which these processes listen, as the kernel prints them."""
    inodes = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                inodes |= set(re.findall(r"socket:\[(\d+)\]", str(link.readlink())))
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    return [line[1].split(":")[0] for line in lines if line[3] == "0A" and line[9] in inodes]


def is_loopback(address):
    """The kernel prints 127.0.0.1 as 0100007F: words of four bytes, each in the machine's own order."""
    words = [int(address[i : i + 8], 16).to_bytes(4, sys.byteorder) for i in range(0, len(address), 8)]
    whole = b"".join(words)
    return whole[0] == 127 if len(whole) == 4 else whole == bytes(15) + b"\1"


needs_proc = pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="only Linux lists sockets in /proc/net")


@needs_proc
def test_the_ranks_listen_on_the_loopback_interface_only(pool, pids):
    values(pool.call(sharded_product, [(torch.eye(4),)] * 2))
    addresses = listening(pool.pids)
    assert addresses  # gloo does listen: an empty list would mean that we looked in the wrong place
    assert [address for address in addresses if not is_loopback(address)] == []


@needs_proc
def test_a_socket_open_to_the_world_would_be_seen():
    import socket

    with socket.create_server(("0.0.0.0", 0)), socket.create_server(("127.0.0.1", 0)):
        assert sorted(map(is_loopback, listening([os.getpid()]))) == [False, True]
    assert is_loopback("00000000000000000000000001000000")
    assert not is_loopback("00000000000000000000000000000000")


def test_a_machine_without_loopback_is_refused(monkeypatch):
    monkeypatch.setattr("socket.if_nameindex", lambda: [(1, "eth0")])
    with Pool(1) as pool, pytest.raises(errors.PoolDidNotStart, match="this machine has no loopback interface"):
        pool.call(my_rank, [()])


def test_a_machine_whose_loopback_is_down_is_refused_at_once(monkeypatch):
    def no_way(self, address):
        raise OSError(101, "Network is unreachable")

    with Pool(1) as pool, monkeypatch.context() as m:
        m.setattr("socket.socket.connect", no_way)
        with pytest.raises(errors.PoolDidNotStart, match="the loopback interface of this machine is down"):
            pool.call(my_rank, [()])
