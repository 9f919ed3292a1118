"""A small share of the free-running stress (`python -m tests.tools.races.stress`), and that the stress sees what is wrong."""

import gc
import random
import threading

import pytest

from localtensor.concurrency.single_flight import SingleFlightCache
from tests.tools.races import stress


@pytest.mark.few(4)
@pytest.mark.parametrize("name", stress.ROUNDS)
def test_nothing_is_lost_nothing_is_computed_twice_and_all_come_to_an_end(name):
    check, make, _ = stress.ROUNDS[name]
    with stress.switching(1e-6):
        assert check(make, 6_000, 1) == []


def test_no_thread_that_is_ended_is_ended_in_a_callback_of_the_garbage_collector():
    """The interpreter reports such an exception, drops it, and the thread lives on."""
    ours, called = threading.get_ident(), []

    def callback(phase, info):
        if threading.get_ident() != ours:
            called.append(phase)

    gc.callbacks.append(callback)
    thresholds = gc.get_threshold()
    gc.set_threshold(1)
    try:
        assert stress.with_threads_that_are_ended(int, 1_000, 1) == []
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(callback)
    assert called == [] and gc.isenabled()


class Careless(SingleFlightCache):
    """Computes without asking whether another does."""

    def get(self, key, compute=None, *args):
        for cell in self._table.get(hash(key), ()):
            if cell.key == key:
                return cell.value
        return self._missed((key, random.random()), compute, args)


class Forgetful(SingleFlightCache):
    """Now and then an answer is another key's."""

    def get(self, key, compute=None, *args):
        answer = super().get(key, compute, *args)
        return answer + 1 if answer == 49 else answer


@pytest.mark.parametrize(("twin", "says"), [(Careless, "times"), (Forgetful, "answered with")])
def test_the_stress_sees_a_careless_twin(twin, says, monkeypatch):
    monkeypatch.setattr(stress, "SingleFlightCache", twin)
    with stress.switching(1e-6):
        assert any(says in what for what in stress.with_room_for_all(int, 1_000, 1))


def test_ctrl_c_ends_it_in_a_sentence(monkeypatch, capsys):
    def pressed(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(stress, "stress", pressed)
    assert stress.main(["--operations", "5"]) == 130
    assert "Stopped by Ctrl-C" in capsys.readouterr().out


def test_no_operations_are_refused(capsys):
    with pytest.raises(SystemExit) as ended:
        stress.main(["--operations", "0"])
    assert ended.value.code == 2 and "pass 1 or more" in capsys.readouterr().err


def test_a_limit_that_is_passed_is_seen(monkeypatch):
    monkeypatch.setattr(stress, "SingleFlightCache", lambda name, limit: SingleFlightCache(name=name, limit=limit + 20))
    with stress.switching(1e-6):
        assert any("values were kept" in what for what in stress.with_little_room(stress.Yields, 6_000, 1))
