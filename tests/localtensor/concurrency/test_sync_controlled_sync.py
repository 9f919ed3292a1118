"""Locks, gates, time and interrupts as a schedule serves them."""

import pytest

from localtensor.concurrency.explorer import Program, explore, replay
from localtensor.concurrency.sync import SETUP_THREAD


def outcomes(program, **settings):
    """All that the program's threads left in its list, over all interleavings."""
    seen = set()

    def watched(sync):
        threads, out = program(sync)
        return Program(threads, lambda: seen.add(tuple(out)))

    found = explore(watched, policy="bounded", bound=3, schedules=100_000, **settings)
    assert found.complete and found.failure is None, found
    return seen


def test_one_thread_at_a_time_is_behind_a_lock_and_either_may_be_first():
    def program(sync):
        lock, out = sync.lock(), []

        def thread(who):
            with lock:
                out.append(f"{who} in")
                sync.step("inside")
                out.append(f"{who} out")

        return [lambda: thread("a"), lambda: thread("b")], out

    assert outcomes(program) == {("a in", "a out", "b in", "b out"), ("b in", "b out", "a in", "a out")}


def test_of_those_who_wait_for_a_lock_any_may_be_next():
    def program(sync):
        lock, out = sync.lock(), []

        def thread(who):
            out.append(f"{who} asks")
            with lock:
                out.append(f"{who} has it")
                sync.step("inside")

        return [lambda who=who: thread(who) for who in "abc"], out

    begun = ("a asks", "a has it", "b asks", "c asks")
    after = {outcome[4:] for outcome in outcomes(program) if outcome[:4] == begun}
    assert after == {("b has it", "c has it"), ("c has it", "b has it")}


def test_a_lock_is_freed_by_what_is_raised_inside():
    def program(sync):
        lock, out = sync.lock(), []

        def thread():
            with pytest.raises(ValueError, match="no"), lock:
                raise ValueError("no")
            out.append("free")

        return [thread, thread], out

    assert outcomes(program) == {("free", "free")}


def test_a_thread_that_takes_its_own_lock_again_waits_for_itself():
    def program(sync):
        lock = sync.lock("l")

        def thread():
            with lock, lock:
                pass

        return Program([thread])

    assert explore(program).failure.detail == "thread 0 waits for l, which thread 0 has"


def test_a_gate_lets_through_all_that_come_before_and_after():
    def program(sync):
        gate, out = sync.gate(), []

        def wait():
            out.append(gate.wait())

        return [wait, wait, gate.open], out

    assert outcomes(program) == {(True, True)}


def test_timed_waits_run_out_when_no_one_can_run_the_shortest_first():
    def program(sync):
        gate, out = sync.gate(), []

        def wait(seconds):
            out.append((seconds, gate.wait(seconds)))

        return [lambda: wait(2.0), lambda: wait(1.0)], out

    assert outcomes(program) == {((1.0, False), (2.0, False))}


def test_a_timed_wait_does_not_run_out_while_somebody_comes_to_open():
    def program(sync):
        gate, out = sync.gate(), []
        return [lambda: out.append(gate.wait(0.001)), gate.open], out

    assert outcomes(program) == {(True,)}


def test_an_interrupt_ends_a_wait_now_or_the_next_one():
    def program(sync):
        gate, out = sync.gate(), []

        def wait():
            try:
                gate.wait()
            except KeyboardInterrupt:
                out.append("interrupted")

        return [wait, lambda: sync.interrupt(0)], out

    assert outcomes(program) == {("interrupted",)}


def test_numbers_are_the_schedules_and_a_bounded_search_tries_each():
    def program(sync):
        out = []
        return [lambda: out.append(sync.number(3))], out

    assert outcomes(program) == {(0,), (1,), (2,)}


def test_a_number_replays():
    def program(sync):
        def draw():
            assert sync.number(5) != 4, "four"

        return Program([draw])

    failure = explore(program, policy="bounded").failure
    assert failure.text == "bounded:1:4"
    assert replay(program, failure.text) == failure


def test_threads_know_who_they_are_and_the_setup_is_no_one():
    def program(sync):
        out = [sync.me()]
        return [lambda: out.append(sync.me())], out

    assert outcomes(program) == {(SETUP_THREAD, 0)}


def test_outside_of_the_threads_what_is_free_can_be_taken():
    def program(sync):
        lock, gate = sync.lock(), sync.gate()
        with lock:
            gate.open()
        return [lambda: None], [gate.wait(), sync.gate().wait(0.1)]

    assert outcomes(program) == {(True, False)}
