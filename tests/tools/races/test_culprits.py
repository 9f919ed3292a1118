"""The harness finds what was planted, its replay fails again, and it is silent about the right twins."""

import pytest

from localtensor.concurrency.explorer import explore, replay
from tests.tools.races.culprits import CULPRITS

WITHIN, SILENT = 1000, 2000
WAYS = ({"policy": "pct"}, {"policy": "bounded", "bound": 2})


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way["policy"])
@pytest.mark.parametrize("culprit", CULPRITS, ids=lambda culprit: culprit.name)
def test_a_planted_race_is_found_and_its_replay_line_fails_again(culprit, way):
    found = explore(culprit.of(culprit.wrong), schedules=WITHIN, **way)
    assert found.failure is not None, f"not found in {found.schedules}"
    assert culprit.says in found.failure.detail
    assert found.failure.repeats
    again = replay(culprit.of(culprit.wrong), found.failure.text)
    assert again == found.failure


@pytest.mark.few(3)
@pytest.mark.parametrize("culprit", CULPRITS, ids=lambda culprit: culprit.name)
def test_nothing_is_said_about_the_right_twin(culprit):
    tried = 0
    for way in WAYS[::-1]:
        explored = explore(culprit.of(culprit.right), schedules=SILENT - tried, **way)
        assert explored.failure is None
        assert explored.complete or explored.schedules == SILENT - tried
        tried += explored.schedules
    assert tried == SILENT


def test_the_planted_races_are_many_and_no_two_are_the_same():
    assert len(CULPRITS) >= 16
    assert len({culprit.name for culprit in CULPRITS}) == len(CULPRITS)
    assert len({culprit.wrong for culprit in CULPRITS}) == len(CULPRITS)
