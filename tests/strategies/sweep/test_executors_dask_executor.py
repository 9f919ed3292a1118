"""The refusals without dask, the start with a stand-in, and once the real thing where it is installed."""

import multiprocessing
import sys
import types
from concurrent.futures import Future

import pytest

from strategies.base.worker_pool import TaskDone, TaskFailed, TaskLost
from strategies.model.settings import BadSetting
from strategies.sweep import executors
from strategies.sweep.executors import ExecutorPool, executor_factory
from tests.strategies.base.test_worker_pool import work


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


def test_work_that_nobody_waits_for_is_cancelled(clients):
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
