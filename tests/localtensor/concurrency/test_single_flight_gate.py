"""The gate of real threads, at which those wait whom `SingleFlightCache` makes wait: whoever is ended there holds up nobody."""

import threading

import pytest

from localtensor.concurrency import sync as controlled_sync
from localtensor.concurrency.sync import THREAD_SYNC
from tests.localtensor.single_flight_threads import LONG, Ended, Running, send


@pytest.mark.parametrize("seconds", [None, LONG])
def test_all_who_wait_go_on_when_a_gate_is_opened(seconds):
    gate = THREAD_SYNC.gate()
    running = Running(*[lambda: gate.wait(seconds)] * 8)
    gate.open()
    assert running.ends() == [True] * 8


def test_who_leaves_a_gate_locked_holds_up_no_one_for_good(monkeypatch):
    monkeypatch.setattr(controlled_sync, "SLICE", 0.01)
    gate = THREAD_SYNC.gate()
    gate.open()
    gate._lock.acquire()  # as a thread does that is ended between two steps of a wait
    gate._open = False
    running = Running(gate.wait, lambda: gate.wait(LONG))
    gate.open()
    assert running.ends() == [True, True]


def test_a_wait_without_end_is_ended_by_an_exception_from_another_thread(monkeypatch):
    monkeypatch.setattr(controlled_sync, "SLICE", 0.01)
    gate, begun = THREAD_SYNC.gate(), threading.Event()
    running = Running(lambda: (begun.set(), gate.wait()))
    assert begun.wait(LONG)
    send(running.threads[0], Ended)
    assert [type(outcome) for outcome in running.ends()] == [Ended]
