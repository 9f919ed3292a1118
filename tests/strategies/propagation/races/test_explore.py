"""Programs of ours under their share of the schedules."""

import sys

from localtensor.concurrency.explorer import ExplorationResult, Program, replay
from strategies.propagation.races import cache_programs
from strategies.propagation.races import explore as races
from strategies.propagation.races.cache_programs import CacheUnderTest


def good(sync):
    """Nothing is wrong."""
    return Program([lambda: sync.step("a"), lambda: sync.step("b")])


def bad(sync):
    """Two additions are never lost."""
    box = [0]

    def add():
        seen = box[0]
        sync.step("writes")
        box[0] = seen + 1

    def check():
        assert box == [2], "one is lost"

    return Program([add, add], check)


def test_each_program_has_its_share_and_all_are_used_up():
    tried = races.explore_all([good, good, good], 100)
    assert [one.schedules for one in tried] == [34, 33, 33]
    assert (tried[0].name, tried[0].promise) == ("good", "Nothing is wrong")


def test_a_failure_is_kept_beside_what_holds():
    right, wrong = races.explore_all([good, bad], 100)
    assert right.failure is None and wrong.failure.detail == "one is lost"
    assert replay(bad, wrong.failure.text) == wrong.failure


def test_the_seconds_are_shared_too_and_a_seed_is_passed_on(monkeypatch):
    asked = []

    def noted(program, **settings):
        asked.append(settings)
        return ExplorationResult(settings["schedules"], False, None)

    monkeypatch.setattr(races, "explore", noted)
    races.explore_all([good, good, good, good], 400, seed=7, seconds=80.0)
    assert {settings["seed"] for settings in asked} == {7}
    firsts = [settings["seconds"] for settings in asked[:: len(races.SCHEDULE_STAGES)]]
    assert 19 < firsts[0] <= 20 and firsts == sorted(firsts)  # who is quick leaves more to the others
    assert 75 < firsts[-1] <= 80


def test_after_a_failure_a_program_is_not_tried_in_further_stages():
    [tried] = races.explore_all([bad], 1000)
    assert tried.failure is not None and tried.yields == "marked" and tried.schedules < 250


def test_when_the_seconds_are_over_nothing_is_begun():
    assert [one.schedules for one in races.explore_all([good, bad], 100, seconds=0.0)] == [0, 0]


def test_the_caller_hears_how_far_each_program_is():
    told = []
    races.explore_all([good], 400, progress=lambda name, count: told.append((name, count)))
    assert told[0] == ("good", 0) and told[-1] == ("good", 400)
    assert [count for _, count in told] == sorted(count for _, count in told)


def test_the_world_sees_a_value_from_before_the_clear():
    class Stuck(CacheUnderTest):
        """Its cache never forgets."""

        def make(self, sync, limit):
            cache = super().make(sync, limit)
            cache.clear = lambda: None
            return cache

    [found] = races.explore_all([lambda sync: cache_programs.cleared(sync, Stuck)], 100)
    assert "answered by rule 0" in found.failure.detail or "stale" in found.failure.detail


class Unmarked:
    """A race without a yield point in it."""

    def __init__(self):
        self.hits = 0

    def add(self):
        self.hits += 1


def unmarked(sync):
    """Two additions are never lost."""
    count = Unmarked()

    def check():
        assert count.hits == 2, "one is lost"

    return Program([count.add, count.add], check)


def test_the_last_stages_find_what_no_yield_point_marks():
    [found] = races.explore_all([unmarked], 10_000, within=[sys.modules[__name__]])
    assert (found.failure.detail, found.yields) == ("one is lost", "bytecodes")
    again = races.made(unmarked, found.yields, [sys.modules[__name__]])
    assert replay(again, found.failure.text) == found.failure


def test_the_stages_are_in_order_and_end_with_all():
    parts = [part for _, _, part in races.SCHEDULE_STAGES]
    assert parts == sorted(parts) and parts[-1] == 1.0
