"""Real threads: locks exclude, gates stay open, numbers differ."""

import threading

from localtensor.concurrency.sync import THREAD_SYNC


def test_a_lock_lets_one_in_at_a_time():
    lock = THREAD_SYNC.lock("table")
    with lock:
        assert not lock.acquire(blocking=False)
    assert lock.acquire(blocking=False)


def test_a_gate_is_shut_at_first_and_stays_open():
    gate = THREAD_SYNC.gate("ready")
    assert not gate.wait(0.0)
    gate.open()
    gate.open()
    assert gate.wait() and gate.wait(0.0)


def test_threads_that_live_at_once_have_different_numbers():
    numbers, start = [], threading.Barrier(4)

    def thread():
        start.wait()
        numbers.append(THREAD_SYNC.me())
        start.wait()

    threads = [threading.Thread(target=thread) for _ in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert len(set(numbers)) == 4


def test_a_step_is_nothing():
    assert THREAD_SYNC.step("anything") is None
