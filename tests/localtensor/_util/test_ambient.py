import threading

import pytest
import torch.distributed as dist

import localtensor as lt
from localtensor._util.ambient import running, simulation_entered


def test_nothing_runs_outside_of_a_run():
    assert running() is None
    assert lt.run(lambda: running() is not None and running().ranks, ranks=2).values == (2, 2)
    assert running() is None


def test_a_block_that_fails_is_left():
    def fails():
        with simulation_entered("mine"):
            assert running() == "mine"
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert running() is None


def test_a_second_thread_waits_until_the_first_is_out():
    order, inside = [], threading.Event()

    def second():
        inside.wait()
        with simulation_entered("second"):
            order.append(("second in", running()))

    thread = threading.Thread(target=second)
    thread.start()
    with simulation_entered("first"):
        inside.set()
        thread.join(0.05)  # it cannot come in, however long we wait
        order.append(("first", running(), thread.is_alive()))
    thread.join()
    assert order == [("first", "first", True), ("second in", "second")] and running() is None


def test_every_run_is_another_simulation():
    assert len({lt.run(lambda: running().serial, ranks=1)[0] for _ in range(3)}) == 3
    assert len(set(lt.run(lambda: (dist.barrier(), running().serial)[1], ranks=3))) == 1
