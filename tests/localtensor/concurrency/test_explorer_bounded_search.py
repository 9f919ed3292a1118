"""The bounded search: texts, what costs a preemption, and that nothing comes twice."""

import pytest

from localtensor.concurrency.explorer import BoundedSchedule, Frontier, read_bounded
from localtensor.concurrency.schedule import round_robin
from localtensor.errors import BadSchedule, ReplayDiverged


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


def test_fewer_preemptions_come_first():
    frontier, seen = Frontier(2, 1000), []
    while True:
        schedule = frontier.take()
        if schedule is None:
            break
        schedule.begin(2)
        for _ in range(4):
            schedule.next([0, 1], 0)
        seen.append(schedule.preemptions)
        frontier.grow(schedule)
    assert seen == sorted(seen) and set(seen) == {0, 1, 2}


def test_what_costs_no_preemption_is_run_within_a_bound_of_none():
    frontier, told = Frontier(0, 1000), []
    while (schedule := frontier.take()) is not None:
        schedule.begin(2)
        first = schedule.next([0, 1], None)
        schedule.next([0, 1], first)
        schedule.number(2)
        told.append(schedule.text)
        frontier.grow(schedule)
    assert told == ["bounded", "bounded:0:1", "bounded:0:1:2:1", "bounded:2:1"]


def test_a_turn_to_what_cannot_run_diverges():
    schedule = read_bounded("bounded:0:1")
    with pytest.raises(ReplayDiverged, match=r"answer 0 is thread 1, and what can run is \[0\]"):
        schedule.next([0], None)
    schedule = read_bounded("bounded:0:4")
    with pytest.raises(ReplayDiverged, match="has to be below 3"):
        schedule.number(3)
