"""The refusals without dask, the start with a stand-in, and once the real thing where it is installed."""

import multiprocessing
import os
import sys
import threading
import types
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures import TimeoutError as Late
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context

import pytest

from localtensor._util import pickling
from strategies.base.worker_pool import TaskDone, TaskFailed, TaskLost
from strategies.model.settings import BadSetting
from strategies.sweep import executors
from strategies.sweep.executors import BATCH, TRIES, ExecutorPool, executor_factory
from tests.strategies import users
from tests.strategies.base.test_worker_pool import alive, pid_of, work


def threads():
    return ThreadPoolExecutor(2)


def processes():
    return ProcessPoolExecutor(1, mp_context=get_context("spawn"))


def answers(made, tasks, *, what=work, limit=60.0, tick=None):
    with ExecutorPool(made) as hands:
        return list(hands.run(what, tasks, limit=limit, tick=tick))


# Executors that are there.


@pytest.mark.few(1)
@pytest.mark.parametrize("made", [threads, processes], ids=["threads", "processes"])
def test_an_executor_gives_what_workers_of_our_own_give(made, monkeypatch):
    monkeypatch.setattr(executors, "BATCH", 2)
    ticks = []
    one, dead, failed = answers(made, [1, "die", "raise"], tick=ticks.append)
    assert (one, dead) == (TaskDone(2), TaskLost("the process died with SIGKILL", 7))
    assert isinstance(failed, TaskFailed) and failed.error == "ValueError: no good"
    assert ticks == [2, 1]


@pytest.mark.slow  # a task that is lost is tried without an executor, too
def test_on_an_executor_too_what_is_made_of_a_lost_task_runs_in_its_place(monkeypatch):
    monkeypatch.setattr(executors, "BATCH", 2)
    lost = []

    def again(at, answer):
        lost.append(at)
        return 5 if at == 3 else "die" if len(lost) < 3 else None

    arrived = []
    with ExecutorPool(threads) as hands:
        todo = [1, 2, "die", "die"]
        found = list(hands.run(work, todo, limit=60.0, again=again, arrived=lambda *one: arrived.append(one)))
    assert arrived == list(enumerate(found))
    assert found == [TaskDone(2), TaskDone(4), TaskLost("the process died with SIGKILL", 7), TaskDone(10)]
    assert lost == [2, 2, 2, 3]


@pytest.mark.slow
def test_a_task_runs_in_a_child_of_the_executors_worker_and_no_one_is_left_behind():
    with ExecutorPool(threads) as hands:
        pids = [a.value for a in hands.run(pid_of, [0] * 2, limit=60.0)]
    assert os.getpid() not in pids and not alive(pids)
    assert [t.name for t in threading.enumerate() if t.name.startswith("ThreadPoolExecutor")] == []


# Executors that fail, without any process: what a batch comes to is said by the test.


class Odd(Executor):
    """Does what is sent as soon as it is sent, unless `fails(number)` of all batches so far gives an error."""

    made = 0
    left = 0

    def __init__(self, fails):
        self.fails = fails
        type(self).made += 1

    def submit(self, fn, /, *args, **kwargs):
        future = Future()
        error = self.fails()
        if isinstance(error, RuntimeError) and not isinstance(error, BrokenExecutor):
            raise error
        if error:
            future.set_exception(error)
        else:
            future.set_result(fn(*args, **kwargs))
        return future

    def shutdown(self, wait=True, *, cancel_futures=False):
        type(self).left += 1


@pytest.fixture
def odd(monkeypatch):
    """`odd(errors)`: a factory of executors of which the n-th batch fails with the n-th error; None is none."""
    monkeypatch.setattr(executors, "run_in_subprocess", served)
    Odd.made = Odd.left = 0

    def made(errors):
        left = iter(errors)
        return lambda: Odd(lambda: next(left, None))

    return made


def served(sent):
    do, tasks, _, _ = pickling.loads(sent)
    return pickling.dumps([TaskDone(do(task, lambda number: None)) for task in tasks])


def doubled(task, note):
    return 2 * task


TASKS = list(range(3 * BATCH))
DOUBLED = [TaskDone(2 * n) for n in TASKS]


def test_batches_come_back_in_order(odd):
    assert answers(odd([]), TASKS, what=doubled) == DOUBLED
    assert (Odd.made, Odd.left) == (1, 1)


@pytest.mark.parametrize("errors", [
    [BrokenProcessPool("gone")], [None, BrokenProcessPool("gone")], [None, None, ValueError("an engine's own")],
    [BrokenProcessPool("gone")] * 5, [Late()],
], ids=["the first", "the second", "the last", "all", "too late"])  # fmt: skip
def test_a_batch_whose_worker_is_gone_is_given_to_a_new_executor(errors, odd):
    assert answers(odd(errors), TASKS, what=doubled) == DOUBLED
    assert Odd.made == Odd.left > 1


def test_an_executor_that_breaks_while_it_is_given_work_is_replaced(odd):
    refuses = RuntimeError("cannot schedule new futures: the pool is broken")
    assert answers(odd([None, refuses, refuses]), TASKS, what=doubled) == DOUBLED


def test_a_worker_that_always_dies_costs_its_batch_and_says_so(odd):
    found = answers(odd([BrokenProcessPool("gone")] * 99), TASKS[:5], what=doubled)
    assert found == [TaskLost(f"its worker was lost {TRIES} times: BrokenProcessPool: gone", -1)] * 5


def test_answers_that_do_not_come_in_time_are_said(odd):
    found = answers(odd([Late()] * 99), TASKS[:1], what=doubled)
    assert found == [TaskLost(f"its worker was lost {TRIES} times: no answer in time", -1)]


def test_an_executor_that_exits_costs_its_batch_and_is_no_pass(odd):
    found = answers(odd([SystemExit(0)] * 99), TASKS[:5], what=doubled)
    assert found == [TaskLost(f"its worker was lost {TRIES} times: SystemExit: 0", -1)] * 5


class Leaving(Odd):
    """Leaves the program as soon as it is given work."""

    def submit(self, fn, /, *args, **kwargs):
        raise SystemExit(0)


def test_an_executor_that_exits_when_it_is_given_work_is_no_pass():
    (lost,) = answers(lambda: Leaving(None), [1], what=doubled)
    assert isinstance(lost, TaskLost) and lost.why.endswith("SystemExit: 0")


@pytest.mark.parametrize("said", [[], [TaskDone(1)], [TaskDone(1)] * 3, ["done", "done"], None], ids=repr)
def test_answers_that_are_none_of_ours_are_lost_tasks(said, odd, monkeypatch):
    monkeypatch.setattr(executors, "run_in_subprocess", lambda sent: pickling.dumps(said))
    found = answers(odd([]), [1, 2], what=doubled)
    assert [type(one) for one in found] == [TaskLost] * 2 and "it gave no answers to 2 tasks" in found[0].why


def test_no_tasks_need_no_executor(odd):
    assert answers(odd([]), []) == []
    assert Odd.made == 0


def test_a_batch_that_works_is_not_done_again(odd, monkeypatch):
    seen = []
    monkeypatch.setattr(executors, "run_in_subprocess", lambda sent: seen.append(sent) or served(sent))
    assert answers(odd([None, BrokenProcessPool("gone"), None]), TASKS, what=doubled) == DOUBLED
    assert len(seen) == len(set(seen)) == 3


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_an_executor_is_left_whatever_happens(error, odd):
    def raises(count):
        raise error

    with pytest.raises(error), ExecutorPool(odd([])) as hands:
        next(hands.run(doubled, TASKS, limit=1.0, tick=raises))
    assert (Odd.made, Odd.left) == (1, 1)


def dies(task, note):
    raise AssertionError("never runs: its worker dies first")


def test_a_process_pool_whose_workers_really_die_is_lost_and_the_run_goes_on(monkeypatch):
    """Its initializer leaves, so that nothing is ever served: what concurrent.futures makes of it is the test."""
    monkeypatch.setattr(executors, "BATCH", 1)

    def made():
        return ProcessPoolExecutor(1, mp_context=get_context("fork"), initializer=os._exit, initargs=(3,))

    found = answers(made, [1, 2], what=dies)
    assert [a.why.partition(":")[0] for a in found] == [f"its worker was lost {TRIES} times"] * 2


# Names.


@pytest.fixture
def here(tmp_path):
    with users.undone():
        yield tmp_path


def test_a_users_own_factory_is_found_in_the_folder(here):
    (here / "my_engine.py").write_text(
        "from concurrent.futures import ThreadPoolExecutor\ndef made():\n    return ThreadPoolExecutor(1)\n"
    )
    with executor_factory("my_engine:made", str(here))() as executor:
        assert executor.submit(int).result() == 0
    assert sys.path[0] == str(here)


@pytest.mark.parametrize(("name", "problem", "remedy"), [
    ("nothing", "this names no function", "Write MODULE:FUNCTION, or dask."),
    (":made", "this names no function", "Write MODULE:FUNCTION, or dask."),
    ("my_engine:", "this names no function", "Write MODULE:FUNCTION, or dask."),
    ("no_such_engine:made", "there is no such module", "Run from the folder that holds it (now {folder})."),
    ("my_exit:made", "importing it raises SystemExit: 5 ({folder}/my_exit.py, line 1)", "Fix that first."),
    ("my_engine:mad", "my_engine has no mad", "Name a function that returns an executor."),
    ("my_engine:NUMBER", "this is no function", "Name a function that returns an executor."),
    ("my_broken:made", "importing it raises ZeroDivisionError: division by zero ({folder}/my_broken.py, line 1)", "Fix that first."),
])  # fmt: skip
def test_a_name_that_is_none_is_refused_in_one_sentence(name, problem, remedy, here):
    (here / "my_engine.py").write_text("NUMBER = 7\n\ndef made():\n    return None\n")
    (here / "my_broken.py").write_text("1 / 0\n")
    (here / "my_exit.py").write_text("raise SystemExit(5)\n")
    with pytest.raises(BadSetting) as refused:
        executor_factory(name, str(here))
    shown = name.partition(":")[0] if "import" in problem or "module" in problem else name
    want = f"localtensor validate: --executor: {shown}: {problem}. {remedy}".replace("{folder}", str(here))
    assert str(refused.value) == want


@pytest.mark.parametrize(("body", "problem", "remedy"), [
    ("return None", "it returns NoneType, which is no executor", "Return a concurrent.futures.Executor."),
    ("return '/home'", "it returns str, which is no executor", "Return a concurrent.futures.Executor."),
    ("raise OSError('no\\nroom')", "calling it raises OSError: no room", "Fix that first."),
    ("raise SystemExit(0)", "calling it raises SystemExit: 0", "Fix that first."),
])  # fmt: skip
def test_a_function_that_gives_no_executor_is_refused_in_one_sentence(body, problem, remedy, here):
    (here / "my_engine.py").write_text(f"def made():\n    {body}\n")
    with pytest.raises(BadSetting) as refused:
        executor_factory("my_engine:made", str(here))()
    assert str(refused.value) == f"localtensor validate: --executor: my_engine:made: {problem}. {remedy}"


class Client:
    """As much of dask's as the adapter uses, and what it was asked."""

    def __init__(self, address="", **local):
        self.address, self.local, self.told, self.futures = address, local, [], ["pending"]

    def get_executor(self, retries):
        assert retries == 0
        return self

    def submit(self, fn, *args):
        made = Future()
        made.set_result(fn(*args))
        return made

    def shutdown(self, wait):
        self.told.append(f"shutdown wait={wait}")

    def cancel(self, futures, force):
        self.told.append(f"cancel {futures} force={force}")

    def close(self):
        self.told.append("close")


@pytest.fixture
def clients(monkeypatch):
    """dask is there, and these are the clients that were started."""
    started = []

    def start(*args, **kwargs):
        started.append(Client(*args, **kwargs))
        return started[-1]

    stand_in = types.ModuleType("distributed")
    stand_in.Client = start
    monkeypatch.setitem(sys.modules, "distributed", stand_in)
    return started


def test_without_dask_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(BadSetting) as refused:
        executor_factory("dask", "")
    assert str(refused.value) == (
        "localtensor validate: --executor: dask: dask.distributed is not installed. "
        "Install it: pip install 'localtensor[dask]'."
    )


@pytest.mark.parametrize(("name", "address"), [("dask", ""), ("dask:tcp://10.0.0.1:8786", "tcp://10.0.0.1:8786")])
def test_a_cluster_of_this_machine_or_that_of_an_address(name, address, clients):
    made = executor_factory(name, "")
    assert clients == []  # only when there is work
    with made() as executor:
        assert executor.submit(max, 2, 3).result() == 3
    (client,) = clients
    assert (client.address, bool(client.local)) == (address, not address)


def test_the_client_ends_with_its_executor(clients):
    executors.dask_factory("")().shutdown()
    assert clients[0].told == ["shutdown wait=True", "close"]


def test_work_that_no_one_waits_for_is_cancelled(clients):
    executors.dask_factory("")().shutdown(wait=False, cancel_futures=True)
    assert clients[0].told == ["cancel ['pending'] force=True", "shutdown wait=False", "close"]


@pytest.mark.filterwarnings("ignore")
def test_a_real_cluster_gives_what_workers_of_our_own_give(monkeypatch):
    pytest.importorskip("distributed")
    monkeypatch.setattr(executors, "BATCH", 2)
    with ExecutorPool(executor_factory("dask", "")) as hands:
        one, dead, failed, more = hands.run(work, [1, "die", "raise", 4], limit=60.0)
    assert (one, dead, more) == (TaskDone(2), TaskLost("the process died with SIGKILL", 7), TaskDone(8))
    assert isinstance(failed, TaskFailed) and failed.error == "ValueError: no good"
    assert multiprocessing.active_children() == []
