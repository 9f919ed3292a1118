import sys
import threading
from contextlib import suppress

import pytest

from localtensor import replay, round_robin, shuffled
from localtensor.threads.run_token import Abort, RunToken


class Told:
    """A baton over plain Python, and what it told: who handed over to whom, and whether it had to diagnose."""

    def __init__(self, ranks, schedule=None):
        self.swaps, self.diagnosed, self.log = [], 0, []
        self.run_token = RunToken(
            ranks, schedule or round_robin(), lambda *pair: self.swaps.append(pair), self.diagnose
        )

    def diagnose(self):
        self.diagnosed += 1

    def run(self, body):
        self.run_token.start(body)
        assert self.run_token.wait(20)
        self.run_token.join()
        return self

    @property
    def order(self):
        return [new for _, new in self.swaps]


def test_each_hand_over_is_reported_the_last_to_no_rank():
    told = Told(3)
    told.run(lambda rank: told.log.append((rank, told.run_token.holder)))
    assert told.swaps == [(None, 0), (0, 1), (1, 2), (2, None)]
    assert told.log == [(0, 0), (1, 1), (2, 2)] and told.run_token.holder is None and told.diagnosed == 0


@pytest.mark.parametrize("seed", range(10))
def test_only_one_rank_runs_at_a_time(seed):
    told, inside = Told(4, shuffled(seed)), []

    def body(rank):
        for _ in range(50):
            inside.append(rank)
            assert inside == [rank]
            inside.remove(rank)
            told.run_token.pause(rank)

    told.run(body)
    assert inside == [] and len(told.swaps) > 100


def test_the_thread_of_a_rank_that_has_gone_is_no_rank_any_more():
    told = Told(3)
    told.run(lambda rank: told.log.append([gone for gone in range(rank) if gone in told.run_token.idents]))
    assert told.log == [[], [], []] and told.run_token.idents == {}


def test_round_robin_goes_on_with_the_same_rank_at_a_pause():
    told = Told(2)
    told.run(lambda rank: [told.run_token.pause(rank) for _ in range(5)])
    assert told.order == [0, 1, None]


def test_who_blocks_runs_again_when_it_has_been_woken():
    told = Told(3)

    def body(rank):
        if rank < 2:
            told.run_token.block(rank)
        else:
            told.run_token.wake(1)
            told.run_token.wake(0)
        told.log.append(rank)

    told.run(body)
    assert sorted(told.log) == [0, 1, 2] and told.log[0] == 2 and told.diagnosed == 0


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("polling", [2, 3, 4])
def test_ranks_that_poll_do_not_keep_the_others_from_running(polling, seed):
    told, come = Told(5, replay(f"pct:{seed}:1:10")), []

    def body(rank):
        if rank >= polling:
            told.run_token.pause(rank)
            return come.append(rank)
        for _ in range(100):
            if len(come) == 5 - polling:
                return told.log.append(rank)
            told.run_token.step_aside(rank)
        return None

    told.run(body)
    assert sorted(told.log) == list(range(polling))


def test_when_everybody_waits_it_is_diagnosed_once_and_all_are_ended():
    told = Told(3)

    def body(rank):
        try:
            told.run_token.block(rank)
        except Abort:
            told.log.append(rank)
            raise

    told.run(body)
    assert sorted(told.log) == [0, 1, 2] and told.diagnosed == 1 and told.swaps[-1][1] is None


def test_when_the_last_that_could_wake_others_returns_it_is_diagnosed():
    told = Told(2)
    told.run(lambda rank: told.run_token.block(rank) if rank == 0 else None)
    assert told.diagnosed == 1 and told.run_token.aborting


def test_no_call_gets_through_once_a_run_is_over():
    told = Told(2)

    def body(rank):
        if rank == 0:
            told.run_token.aborting = True
        for act in (told.run_token.pause, told.run_token.step_aside, told.run_token.block, told.run_token.check):
            with pytest.raises(Abort):
                act(rank)
        told.log.append(rank)

    told.run_token.start(body)
    told.run_token.wait(None)
    told.run_token.join()
    assert told.log == [0]


class Refuses:
    """A schedule that raises at its n-th question."""

    text = "refuses"

    def __init__(self, count):
        self.count = count

    def begin(self, ranks):
        self.left = self.count

    def next(self, runnable, current):
        self.left -= 1
        if self.left < 0:
            raise LookupError(f"question {self.count}")
        return runnable[0] if current is None or current not in runnable else runnable[-1]

    def number(self, below):
        return self.next([0], 0)


@pytest.mark.parametrize("count", range(12))
def test_a_schedule_that_refuses_ends_the_run_and_no_thread_stays(count):
    before = threading.enumerate()
    told = Told(3, Refuses(count))

    def body(rank):
        told.run_token.pause(rank)
        told.run_token.number(2)
        told.run_token.step_aside(rank)

    try:
        told.run(body)
    except LookupError:
        told.log.append("at the start")
        assert told.run_token.interrupt(5) == ()
        told.run_token.join()
    assert threading.enumerate() == before and told.swaps[-1:] in ([], [(told.swaps[-1][0], None)])
    assert (told.log == ["at the start"]) == (count == 0)


def test_a_rank_that_runs_for_ever_is_interrupted():
    told, began = Told(2), threading.Event()

    def body(rank):
        began.set()
        while True:
            pass

    told.run_token.start(body)
    began.wait()
    assert not told.run_token.wait(0.01)
    assert told.run_token.interrupt(20) == ()
    told.run_token.join()
    assert told.run_token.holder is None and told.swaps[-1][1] is None


def test_a_rank_that_does_not_obey_is_named_and_the_others_end_without_it():
    told, shut, began = Told(3), threading.Lock(), threading.Event()
    shut.acquire()

    def body(rank):
        if rank == 0:
            began.set()
            shut.acquire()
        told.run_token.pause(rank)
        told.log.append(rank)

    told.run_token.start(body)
    began.wait()
    assert told.run_token.interrupt(0.3) == (0,)
    told.run_token.join()
    assert told.log == []
    (lost,) = [thread for thread in threading.enumerate() if thread.name == "rank 0"]
    shut.release()
    lost.join()


def test_a_machine_without_more_threads_ends_those_that_there_are(monkeypatch):
    before, told, start = threading.enumerate(), Told(5), threading.Thread.start

    def fails_at_the_third(thread):
        if thread.name == "rank 3":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", fails_at_the_third)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        told.run_token.start(told.log.append)
    assert told.run_token.interrupt(5) == ()
    told.run_token.join()
    assert [thread for thread in threading.enumerate() if thread not in before] == [] and told.log == []


def test_a_thread_that_begins_when_the_run_is_over_ends_at_once(monkeypatch):
    told, start, late = Told(2), threading.Thread.start, []

    def interrupted_at_the_second(thread):
        if thread.name == "rank 1":
            late.append(thread)
            raise KeyboardInterrupt
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", interrupted_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        told.run_token.start(told.log.append)
    assert told.run_token.interrupt(5) == ()
    start(late[0])
    late[0].join(20)
    assert not late[0].is_alive() and told.log == []


def test_a_thread_that_began_when_the_run_was_interrupted_waits_for_its_turn_to_end(monkeypatch):
    told, start = Told(2), threading.Thread.start

    def interrupted_after_the_second(thread):
        if thread.name == "rank 1":
            told.run_token.aborting = True
            start(thread)
            raise KeyboardInterrupt
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", interrupted_after_the_second)
    with pytest.raises(KeyboardInterrupt):
        told.run_token.start(told.log.append)
    assert told.run_token.interrupt(20) == ()
    told.run_token.join()
    assert told.log == [] and told.run_token.holder is None


def test_who_is_interrupted_while_he_interrupts_goes_on_where_he_was(monkeypatch):
    told, over, began = Told(3), threading.Event(), threading.Event()

    def body(rank):
        began.set()
        over.wait()  # no exception gets in there

    def interrupted(rank):
        monkeypatch.undo()
        raise KeyboardInterrupt

    told.run_token.start(body)
    began.wait()
    monkeypatch.setattr(told.run_token, "_end_next", interrupted)
    with pytest.raises(KeyboardInterrupt):
        told.run_token.interrupt(0.05)
    assert told.run_token.interrupt(0.3) == (0,)  # enough for the other two, on a busy machine too
    told.run_token.join()
    lost = [thread for thread in threading.enumerate() if thread.name.startswith("rank ")]
    assert [thread.name for thread in lost] == ["rank 0"]
    over.set()
    lost[0].join()


def test_ranks_that_do_not_obey_have_little_time_together_and_not_each(monkeypatch):
    told, over, waited = Told(20), threading.Event(), []
    wait = told.run_token.wait
    monkeypatch.setattr(told.run_token, "wait", lambda seconds: waited.append(seconds) or wait(seconds))

    def body(rank):
        with suppress(Abort):
            told.run_token.step_aside(rank)
        over.wait()  # no exception gets in there

    before = threading.enumerate()
    told.run_token.start(body)
    assert not told.run_token.wait(0.1)
    lost = [thread for thread in threading.enumerate() if thread not in before]
    assert told.run_token.interrupt(0.5) == tuple(range(20))
    assert sum(waited) < 3
    over.set()
    for thread in lost:
        thread.join()


@pytest.mark.parametrize("at", range(20))
def test_a_rank_may_be_sent_away_at_any_moment_of_the_hand_over(at):
    """What `interrupt` sends arrives where a call begins or has just ended: here at the `at`-th, counted from the wish."""
    told, calls = Told(3), []

    def profile(frame, event, arg):
        name, ours = frame.f_code.co_name, frame.f_code.co_filename == RunToken.check.__code__.co_filename
        over = (name, event) == ("_run_rank", "return")  # the thread's last moment: it has nothing more to do
        if ours and not over and event in ("call", "return", "c_return") and told.run_token.aborting:
            calls.append((name, event))
            if len(calls) == at + 1:
                raise Abort

    def body(rank):
        if rank == 1:
            sys.setprofile(profile)
        for _ in range(3):
            told.run_token.step_aside(rank)
        if rank == 1:
            told.run_token.aborting = True
        told.run_token.step_aside(rank)

    before = threading.enumerate()
    told.run(body)
    assert threading.enumerate() == before and told.run_token.holder is None
    assert len(calls) > at or calls[-1][0] == "_leave"
