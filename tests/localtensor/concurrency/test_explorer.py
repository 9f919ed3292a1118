"""Explorations: what is found, by which policy, how it replays, and what is refused.  The bounded search: texts,
what costs a preemption, and that nothing comes twice."""

import math
from math import comb

import pytest

from localtensor.concurrency import controlled_run
from localtensor.concurrency.bounded import BoundedSchedule, Frontier, read_bounded
from localtensor.concurrency.explorer import Failure, Program, explore, replay
from localtensor.concurrency.schedule import round_robin
from localtensor.errors import BadSchedule, ReplayDiverged
from localtensor.errors.runs import BadExploration, BadProgram, WaitsAlone


def stepping(*lengths):
    """Threads that do nothing but so many steps; `seen` gathers who did what in each run."""
    seen = []

    def program(sync):
        done = []

        def thread(who, steps):
            for _ in range(steps):
                sync.step("s")
                done.append(who)

        threads = [lambda who=who, steps=steps: thread(who, steps) for who, steps in enumerate(lengths)]
        return Program(threads, lambda: seen.append(tuple(done)))

    return program, seen


def adds(sync):
    box = {"n": 0}

    def add():
        seen = box["n"]
        sync.step("writes")
        box["n"] = seen + 1

    def check():
        assert box["n"] == 2, f"two additions made {box['n']}"

    return Program([add, add], check)


def crossed(sync):
    a, b = sync.lock("a"), sync.lock("b")

    def thread(one, two):
        with one, two:
            pass

    return Program([lambda: thread(a, b), lambda: thread(b, a)])


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_without_a_bound_each_interleaving_is_run_exactly_once(steps):
    program, seen = stepping(steps, steps)
    found = explore(program, policy="bounded", bound=99, schedules=10_000)
    assert found.complete and found.failure is None
    assert found.schedules == comb(2 * (steps + 1), steps + 1)  # a beginning and so many steps of each thread
    assert len(set(seen)) == comb(2 * steps, steps)


def test_a_bound_leaves_out_what_needs_more_preemptions():
    program, seen = stepping(2, 2)
    assert explore(program, policy="bounded", bound=0).schedules == 2
    assert set(seen) == {(0, 0, 1, 1), (1, 1, 0, 0)}


def test_a_cut_search_does_not_call_itself_complete():
    program, _ = stepping(6, 6, 6)
    found = explore(program, policy="bounded", bound=2, schedules=100)
    assert not found.complete and found.schedules == 100


def test_three_threads_of_six_steps_are_all_there_within_two_preemptions():
    program, seen = stepping(6, 6, 6)
    found = explore(program, policy="bounded", bound=2, schedules=10**6)
    assert found.complete and found.longest == 21
    assert len(seen) == found.schedules == 1500


@pytest.mark.parametrize("policy", ["bounded", "pct", "shuffled"])
@pytest.mark.parametrize("program", [adds, crossed])
def test_every_policy_finds_it_twice_alike_and_it_replays(program, policy):
    found = explore(program, policy=policy)
    assert found == explore(program, policy=policy)
    assert replay(program, found.failure.text) == found.failure


@pytest.mark.parametrize(("policy", "text"), [("pct", "pct:"), ("shuffled", "shuffled:"), ("bounded", "bounded:")])
def test_the_text_of_a_failure_names_the_policy_and_holds_its_answers(policy, text):
    found = explore(adds, policy=policy, seed=3).failure.text
    assert found.startswith(text)
    assert policy == "bounded" or "=2:" in found


def test_a_deadlock_names_who_waits_for_what():
    found = explore(crossed, policy="bounded")
    assert found.failure.kind == "deadlock"
    want = "thread 0 waits for b, which thread 1 has; thread 1 waits for a, which thread 0 has"
    assert found.failure.detail == want


def test_past_the_limit_of_steps_it_is_a_livelock():
    def program(sync):
        def spin():
            while True:
                sync.step("spins")

        return Program([spin])

    found = explore(program, steps=50)
    assert (found.failure.kind, found.failure.detail) == ("livelock", "50 steps, and threads 0 have not ended")
    assert "thread 0: begins, spins 49 times\n" in str(found.failure)


def test_what_a_thread_raises_is_a_failure_and_the_others_are_ended():
    ended = []

    def program(sync):
        def wait():
            try:
                sync.gate().wait()
            finally:
                ended.append(True)

        def fail():
            raise KeyError("k")

        return Program([wait, fail])

    found = explore(program, policy="bounded")
    assert (found.failure.kind, found.failure.detail) == ("raised", "thread 1 raised KeyError: 'k'")
    assert ended


def test_a_thread_without_yield_points_is_given_up(monkeypatch):
    monkeypatch.setattr(controlled_run, "HANG_SECONDS", 0.02)
    free = []

    def program(sync):
        def hang():
            sync.step("enters C")
            while not free:
                pass

        return Program([hang])

    found = explore(program)
    free.append(True)
    assert found.failure.kind == "hung"
    assert found.failure.detail.endswith("after: enters C")


def test_what_a_thread_did_is_reported_in_lines_that_break_between_words():
    steps = tuple((0, f"opens outer-d{'o' * (number % 7 + 1)}r") for number in range(30))
    _, *lines, _ = str(Failure("check", "it fails", "pct:7", steps)).splitlines()
    assert len(lines) > 3 and all(
        line.startswith("  thread 0: opens" if not at else " " * 12) for at, line in enumerate(lines)
    )
    assert max(map(len, lines)) <= 110 and not any(line.endswith("-") for line in lines)
    assert "\n".join(lines).count("outer-d") == 30


def test_what_was_explored_is_reported_in_one_line():
    program, seen = stepping(1, 1)
    assert (
        str(explore(program, policy="bounded", bound=99))
        == f"all {len(seen)} schedules, at most 4 steps each: nothing found"
    )
    assert str(explore(program, policy="pct", schedules=5)) == "5 schedules, at most 4 steps each: nothing found"


def test_what_went_wrong_is_reported_after_the_number_of_its_schedule():
    runs = []

    def program(sync):
        runs.append(1)
        return Program([lambda: sync.step("s")], lambda: _raise_if(len(runs) > 2))

    found = explore(program, policy="pct")
    assert str(found).startswith("schedule 3: check: ")


def test_objects_that_a_check_shows_are_no_other_failure_in_another_run():
    kept = []  # an address is not used again

    def program(sync):
        kept.append(box := [object()])

        def check():
            raise AssertionError(f"{box} is not empty")

        return Program([lambda: sync.step("looks")], check)

    found = explore(program, policy="bounded").failure
    assert found.detail == "[<object object at 0x...>] is not empty" and found.repeats
    assert replay(program, found.text) == found


def test_a_failure_that_the_schedule_does_not_decide_says_so():
    runs = []

    def program(sync):
        runs.append(1)
        return Program([lambda: None], lambda: pytest.fail.Exception and _raise_if(len(runs) == 1))

    found = explore(program)
    assert not found.failure.repeats
    assert "did not fail again" in str(found.failure)


def _raise_if(wrong):
    assert not wrong, "once only"


def test_seconds_end_it():
    program, _ = stepping(2, 2)
    assert explore(program, seconds=0.0).schedules == 0


def test_the_caller_is_told_how_far_it_is():
    program, _ = stepping(1, 1)
    told = []
    explore(program, schedules=600, progress=told.append)
    assert told == [256, 512]


def test_ctrl_c_in_the_caller_ends_all_threads():
    def program(sync):
        return Program([lambda: sync.step("s")] * 2)

    def stop(count):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        explore(program, progress=stop)
    assert explore(program, schedules=10).failure is None


@pytest.mark.parametrize("late", [True, False], ids=["as the last thread ends", "in the midst"])
def test_ctrl_c_ends_a_run_without_a_wait_for_what_has_ended(monkeypatch, late):
    monkeypatch.setattr(controlled_run, "HANG_SECONDS", 0.01 if late else 10.0)

    class Interrupted:
        """Ctrl-C in the first wait for a run: at its begin, or when it is over."""

        def __init__(self, lock):
            self.acquire, self.lock, self.release = self.interrupted, lock, lock.release

        def interrupted(self, timeout):
            self.acquire = self.lock.acquire
            if late:
                self.lock.acquire()
            raise KeyboardInterrupt

    with controlled_run.ThreadGroup() as crew:
        crew.home = Interrupted(crew.home)
        stage = controlled_run.ControlledRun(crew, BoundedSchedule(), 100)
        with pytest.raises(KeyboardInterrupt):
            stage.run([lambda: stage.pause(0, "a step")])
        assert not crew.lost


@pytest.mark.parametrize(("setting", "words"), [
    ({"policy": "dfs"}, "explore: policy: 'dfs': there is no such policy. Use bounded, pct, shuffled."),
    ({"schedules": 0}, "explore: schedules: schedules=0: it has to be a whole number from 1. Pass 1 or more."),
    ({"bound": -1}, "explore: bound: bound=-1: it has to be a whole number from 0. Pass 0 or more."),
    ({"steps": True}, "explore: steps: steps=True: it has to be a whole number from 1. Pass 1 or more."),
    ({"seconds": -1}, "explore: seconds: seconds=-1: it has to be a number of seconds. Pass 60, or None for no limit."),
    ({"seconds": math.nan}, "explore: seconds: seconds=nan: it has to be a number of seconds. Pass 60, or None for no limit."),
    ({"seconds": "1"}, "explore: seconds: seconds='1': it has to be a number of seconds. Pass 60, or None for no limit."),
])  # fmt: skip
def test_a_setting_that_is_none_is_refused(setting, words):
    with pytest.raises(BadExploration) as refused:
        explore(adds, **setting)
    assert str(refused.value) == words


def test_a_search_without_time_says_that_nothing_was_run():
    assert str(explore(adds, seconds=0)) == "no schedule was run"


def test_what_is_no_program_is_refused():
    with pytest.raises(BadProgram, match="None: it is no Program with threads"):
        explore(lambda sync: None)
    with pytest.raises(BadProgram, match="no Program with threads"):
        explore(lambda sync: Program([]))


def test_a_check_that_would_wait_for_ever_is_refused():
    def program(sync):
        gate = sync.gate("news")
        return Program([lambda: None], gate.wait)

    assert "WaitsAlone" in explore(program).failure.detail

    def locked(sync):
        lock = sync.lock("l")
        with lock, lock:
            return Program([lambda: None])

    with pytest.raises(WaitsAlone, match="l: it is waited for outside of the threads"):
        explore(locked)


def test_a_text_of_another_program_diverges():
    program, _ = stepping(1)
    with pytest.raises(ReplayDiverged):
        replay(program, "bounded:0:1")
    with pytest.raises(ReplayDiverged):
        replay(program, "pct:4:3:10=2:0x2,1x2")
    with pytest.raises(BadSchedule):
        replay(program, "bounded:1")
    assert replay(program, "bounded") is None


@pytest.mark.parametrize("text", ["bounded", "bounded:3:1", "bounded:0:2:17:1"])
def test_a_text_reads_as_what_it_says(text):
    assert read_bounded(text).text == text


@pytest.mark.parametrize(
    "text", ["bounded:1", "bounded:1:2:3", "bounded:5:1:4:0", "bounded:5:1:5:0", "bounded:-1:0", "bounding"]
)
def test_a_text_that_says_nothing_is_refused(text):
    with pytest.raises(BadSchedule):
        read_bounded(text)


@pytest.mark.parametrize(("runnable", "current"), [([0, 1, 2], None), ([0, 2], 0), ([0, 2], 1), ([0, 1], 2), ([1], 0)])
def test_without_turns_it_is_round_robin(runnable, current):
    assert BoundedSchedule().next(runnable, current) == round_robin().next(runnable, current)


def test_to_take_the_run_from_who_could_go_on_costs_and_else_it_is_free():
    schedule = BoundedSchedule()
    schedule.begin(3)
    schedule.next([0, 1, 2], None)
    schedule.next([0, 1, 2], 0)
    schedule.next([1, 2], 0)
    schedule.next([2], 1)
    schedule.number(3)
    told = [(choice.place, choice.others, choice.preempts) for choice in schedule.choices]
    assert told == [(0, (1, 2), False), (1, (1, 2), True), (2, (2,), False), (4, (1, 2), False)]


def test_choices_before_the_last_turn_belong_to_other_schedules():
    schedule = BoundedSchedule(((1, 1),))
    schedule.begin(2)
    for _ in range(3):
        schedule.next([0, 1], 0)
    assert [choice.place for choice in schedule.choices] == [2]


def test_fewer_turns_come_first_and_among_them_fewer_preemptions():
    frontier, seen = Frontier(2, 1000), []
    while True:
        schedule = frontier.take()
        if schedule is None:
            break
        schedule.begin(2)
        for _ in range(4):
            schedule.next([0, 1], 0)
        schedule.number(2)
        seen.append((len(schedule.turns), schedule.preemptions))
        frontier.grow(schedule)
    assert seen == sorted(seen)
    assert seen[:6] == [(0, 0), (1, 0), (1, 1), (1, 1), (1, 1), (1, 1)]
    assert seen[-1] == (3, 2)


def test_what_costs_no_preemption_is_run_within_a_bound_of_none():
    frontier, told = Frontier(0, 1000), []
    while (schedule := frontier.take()) is not None:
        schedule.begin(2)
        first = schedule.next([0, 1], None)
        schedule.next([0, 1], first)
        schedule.number(2)
        told.append(schedule.text)
        frontier.grow(schedule)
    assert told == ["bounded", "bounded:0:1", "bounded:2:1", "bounded:0:1:2:1"]


def test_a_turn_to_what_cannot_run_diverges():
    schedule = read_bounded("bounded:0:1")
    with pytest.raises(ReplayDiverged, match=r"answer 0 is thread 1, and what can run is \[0\]"):
        schedule.next([0], None)
    schedule = read_bounded("bounded:0:4")
    with pytest.raises(ReplayDiverged, match="has to be below 3"):
        schedule.number(3)
