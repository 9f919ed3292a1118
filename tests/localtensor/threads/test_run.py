import queue
import sys
import threading
import time
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

import localtensor as lt
from localtensor.errors import LocalTensorError, NeverEnded, NoTime, RankRaised
from localtensor.threads import run as threads
from localtensor.threads.run import limit_from_environment
from localtensor.threads.run_token import RunToken

HERE = "test_run.py"


def line(fn, offset=1):
    return fn.__code__.co_firstlineno + offset


def runs_within_a_run():
    lt.run(dist.get_rank, ranks=2)


def good():
    x = torch.full((2,), dist.get_rank() + 1.0)
    dist.all_reduce(x)
    return x.tolist(), torch.rand(1).item(), torch.get_default_dtype()


@pytest.fixture(params=["gloo", "fake"])
def real_group(request):
    """A default group of another backend, and a call that shows that it works."""
    store, ranks = (dist.HashStore(), 1) if request.param == "gloo" else (FakeStore(), 2)
    hook = sys.excepthook
    dist.init_process_group(request.param, store=store, rank=0, world_size=ranks)

    def works():
        x = torch.ones(2)
        dist.all_reduce(x)
        name = dist.group.WORLD.group_name
        y = torch.ops._c10d_functional.all_reduce(torch.ones(2), "sum", name)
        group = dist.new_group([0])
        dist.destroy_process_group(group)
        return x.tolist(), torch.ops._c10d_functional.wait_tensor(y).tolist(), dist.get_world_size(), dist.get_backend()

    yield works
    dist.destroy_process_group()
    sys.excepthook = hook


def test_a_real_group_works_before_and_after_and_no_rank_sees_it(real_group):
    before, world, group = real_group(), c10d._world, dist.group.WORLD
    for _ in range(2):
        assert lt.run(lambda: (dist.get_world_size(), good()[0]), ranks=3).values == ((3, [6.0, 6.0]),) * 3
        with pytest.raises(RankRaised):
            lt.run(sys.exit, 3, ranks=2)
        assert real_group() == before == ([1.0, 1.0], [1.0, 1.0], group.size(), dist.get_backend())
        assert c10d._world is world and dist.group.WORLD is group


def test_a_group_of_another_backend_can_be_used_by_a_rank(real_group):
    outside = dist.group.WORLD

    def program():
        x = torch.ones(2)
        outside.allreduce([x]).wait()
        dist.all_reduce(x)
        return x.tolist()

    assert lt.run(program, ranks=2).values == ([2.0, 2.0],) * 2


def test_a_rank_given_up_for_lost_that_comes_back_harms_no_one(real_group, monkeypatch):
    monkeypatch.setattr(threads, "GRACE", 1.0)
    expected, alive = real_group(), threading.enumerate()
    shut = threading.Lock()
    shut.acquire()
    with pytest.raises(NeverEnded) as caught:
        lt.run(shut.acquire, ranks=2, timeout=0.1)
    assert caught.value.left_behind == (0,) and real_group() == expected
    lost = [thread for thread in threading.enumerate() if thread not in alive]
    assert [thread.name for thread in lost] == ["rank 0"]
    shut.release()
    for thread in lost:
        thread.join()
    assert real_group() == expected and threading.enumerate() == alive


def test_a_rank_that_comes_back_into_another_run_takes_no_part_in_it(monkeypatch):
    monkeypatch.setattr(threads, "GRACE", 1.0)
    shut, after = threading.Lock(), []
    shut.acquire()

    def stuck():
        with suppress(BaseException):  # it does not even obey
            shut.acquire()
        after.append("came back")
        dist.all_reduce(torch.ones(2))
        after.append("took part")

    with pytest.raises(NeverEnded):
        lt.run(stuck, ranks=2, timeout=0.1)
    (lost,) = [thread for thread in threading.enumerate() if thread.name == "rank 0"]

    def lets_it_out():
        if dist.get_rank() == 0:
            shut.release()
            lost.join()
        return good()[0]

    assert lt.run(lets_it_out, ranks=2).values == ([3.0, 3.0],) * 2
    assert after == ["came back"]


# -- runs that do not end


def python_loop():
    while True:
        pass


def naps():
    for _ in range(10_000):
        time.sleep(0.01)


def collective_loop():
    while True:
        dist.barrier()


def says(program, rank, offset, where=None):
    place = f"{HERE}:{line(program, offset)} in {where or program.__name__}"
    return (
        f"run: timeout: timeout=1: the run has not ended in time; rank {rank} was running at {place}. "
        "Look for a loop without end there, or give timeout= more seconds."
    )


# What ends a rank may be raised while a callback of the collector runs in it (Hypothesis has one); then Python drops it
# with a warning, and it is sent again.
@pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(("program", "lines"), [(python_loop, (1, 2)), (naps, (1, 2)), (collective_loop, (1, 2))])
def test_a_run_past_its_limit_names_the_line_and_leaves_no_thread(program, lines):
    before = threading.enumerate()
    with pytest.raises(NeverEnded) as caught:
        lt.run(program, ranks=2, timeout=1)
    first = str(caught.value).splitlines()[0]
    assert first in [says(program, rank, offset) for rank in (0, 1) for offset in lines]
    assert caught.value.left_behind == ()
    assert threading.enumerate() == before


def swallows_one():
    for _ in range(2):
        with suppress(BaseException):  # as a callback of the collector does
            while True:
                pass


def test_what_ends_a_rank_is_sent_again_where_the_rank_swallows_it(monkeypatch):
    monkeypatch.setattr(threads, "GRACE", 1.0)
    with pytest.raises(NeverEnded) as caught:
        lt.run(swallows_one, ranks=1, timeout=0.5)
    assert caught.value.left_behind == ()


def test_a_rank_stuck_in_c_is_named_and_the_others_end(monkeypatch):
    monkeypatch.setattr(threads, "GRACE", 1.0)
    before, shut = threading.enumerate(), threading.Lock()
    shut.acquire()

    def stuck():
        if dist.get_rank() == 1:
            shut.acquire()
        dist.barrier()

    with pytest.raises(NeverEnded) as caught:
        lt.run(stuck, ranks=3, timeout=1)
    first, *rest = str(caught.value).splitlines()
    barrier = f"waits for ranks 1, 2 in barrier #0 in group 0 at {HERE}:{line(stuck, 3)} in stuck"
    assert first == says(stuck, 1, 2)
    assert rest == [f"  rank 0 {barrier}", "  rank 1 could not be stopped: the thread goes on until the process ends"]
    assert caught.value.left_behind == (1,)
    lost = [thread for thread in threading.enumerate() if thread not in before]
    assert [thread.name for thread in lost] == ["rank 1"]
    shut.release()
    lost[0].join()
    assert threading.enumerate() == before


# -- who may run what


def test_a_rank_may_not_start_a_run():
    with pytest.raises(RankRaised) as caught:
        lt.run(runs_within_a_run, ranks=1)
    place = f"{HERE}:{line(runs_within_a_run)} in runs_within_a_run"
    assert type(caught.value.__cause__).__name__ == "NestedRun"
    assert str(caught.value.__cause__) == (
        f"run: fn: called by rank 0 at {place}: the ranks of a run cannot start another. "
        "Call run where no run is going on, or make a process group inside this one with new_group."
    )


def test_two_threads_may_run_one_after_the_other():
    got, together = {}, threading.Barrier(3)

    def runs(ranks):
        together.wait()
        got[ranks] = lt.run(good, ranks=ranks)[0][0]

    others = [threading.Thread(target=runs, args=(ranks,)) for ranks in (1, 2, 3)]
    for thread in others:
        thread.start()
    for thread in others:
        thread.join()
    assert got == {1: [1.0, 1.0], 2: [3.0, 3.0], 3: [6.0, 6.0]}


def test_a_collective_belongs_to_a_thread_of_its_rank():
    todo = queue.SimpleQueue()

    def work():
        todo.get()()

    other = threading.Thread(target=work, name="helper")
    other.start()  # before the run: it belongs to no rank

    def program():
        told = []

        def elsewhere():
            try:
                dist.all_reduce(torch.ones(1))
            except LocalTensorError as error:
                told.append(str(error))

        todo.put(elsewhere)
        other.join()
        return told

    (said,) = lt.run(program, ranks=1)[0]
    assert said == (
        "a collective: thread: called from helper: a collective belongs to a rank, and this thread is none. "
        "Call it on the rank's own thread, or on one that the rank has started."
    )


def test_a_thread_from_outside_is_no_rank_though_it_has_the_ident_of_one_that_has_ended():
    token = RunToken(2, lt.round_robin(), lambda *pair: None, lambda: None)
    token.start(lambda rank: None)
    assert token.wait(20)
    token.join()
    assert token.numbers == token.idents == {}


def test_the_environment_says_before_anybody_else_how_long_a_run_may_take(monkeypatch):
    monkeypatch.delenv("LOCALTENSOR_TIMEOUT", raising=False)
    assert (limit_from_environment(7.0), limit_from_environment(0.0), limit_from_environment(None)) == (7.0, None, None)
    monkeypatch.setenv("LOCALTENSOR_TIMEOUT", "9")
    assert (limit_from_environment(7.0), limit_from_environment(None)) == (9.0, 9.0)
    monkeypatch.setenv("LOCALTENSOR_TIMEOUT", "0")
    assert limit_from_environment(7.0) is None


@pytest.mark.parametrize("said", ["soon", "-1", "nan", "1e9"])
def test_what_the_environment_must_not_say_is_refused(monkeypatch, said):
    monkeypatch.setenv("LOCALTENSOR_TIMEOUT", said)
    with pytest.raises(NoTime) as caught:
        lt.run(dist.get_rank, ranks=2)
    assert str(caught.value) == (
        f"run: LOCALTENSOR_TIMEOUT: LOCALTENSOR_TIMEOUT={said!r}: a limit is more than 0 seconds, and at most a day. "
        "Give it 30, say."
    )
