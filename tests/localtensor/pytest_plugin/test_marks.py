import math
from types import SimpleNamespace

import pytest

from localtensor.pytest_plugin.marks import (
    Marks,
    RankPlan,
    SessionSettings,
    collect_marks,
    file_name,
    mesh_ranks,
    plan_test,
)


def marks(*levels):
    """Of a test: each level is the marks of one node, the closest first."""
    return collect_marks((number, mark) for number, level in enumerate(levels) for mark in level)


def plan(found, chosen=None, **settings):
    typed = frozenset(settings.pop("typed", ()))
    return plan_test("t.py::test_a", found, SessionSettings(typed=typed, **settings), chosen)


def ranks(*args, **kwargs):
    return SimpleNamespace(name="ranks", args=args, kwargs=kwargs)


def mesh(*args, **kwargs):
    return SimpleNamespace(name="mesh", args=args, kwargs=kwargs)


def test_without_marks_nothing_is_said():
    assert collect_marks([]) == Marks()


def test_a_mark_without_a_number_takes_the_option_and_two_without_one():
    assert plan(marks([ranks()])) == RankPlan(2, (2,))
    assert plan(marks([ranks()]), ranks=5) == RankPlan(5, (5,))


@pytest.mark.parametrize("shape", [(2, None), (2, True), (-1, -2), (2, "4"), ()])
def test_a_mesh_that_has_no_proper_shape_has_no_number_of_ranks(shape):
    assert mesh_ranks(mesh(shape)) is None and mesh_ranks(mesh((2, 3))) == 6


def test_the_closest_number_wins_over_a_farther_one_and_over_the_option():
    assert plan(marks([ranks(3)], [ranks(4)]), ranks=5).ranks == 3
    assert plan(marks([ranks()], [ranks(4)]), ranks=5).ranks == 4


def test_a_mesh_says_how_many_ranks_there_are():
    made = plan(marks([mesh((2, 3), names=("dp", "tp"))]))
    assert (made.ranks, made.shape, made.names) == (6, (2, 3), ("dp", "tp"))
    assert math.prod(made.shape) == made.ranks
    assert plan(marks([mesh(shape=4, names="x")])).names == ("x",)


def test_the_closer_of_ranks_and_mesh_decides():
    assert plan(marks([mesh((2, 2))], [ranks(2)])).shape == (2, 2)
    assert plan(marks([ranks(8)], [mesh((2, 2))])).shape == (8,)
    assert plan(marks([ranks(4)], [mesh((2, 2))])).shape == (2, 2)


def test_of_one_node_ranks_and_mesh_must_agree():
    assert plan(marks([ranks(4), mesh((2, 2))])).shape == (2, 2)
    with pytest.raises(pytest.UsageError, match=r"a mesh of 4 ranks, and @pytest\.mark\.ranks says 3"):
        plan(marks([ranks(3), mesh((2, 2))]))


def test_each_keyword_is_taken_from_the_closest_mark_that_has_it():
    made = plan(marks([ranks(2, seed=7)], [ranks(4, seed=1, timeout=60, schedule="pct:1")]))
    assert (made.ranks, made.seed, made.timeout, made.schedule) == (2, 7, 60.0, "pct:1:3:1000")


def test_the_command_line_beats_the_mark_and_the_mark_beats_the_ini_file():
    found = marks([ranks(2, seed=7)])
    assert plan(found, seed=3).seed == 7
    assert plan(found, seed=3, typed={"seed"}).seed == 3


def test_a_policy_without_a_seed_gets_one_for_all_runs_of_the_test():
    text = plan(marks([ranks(schedule="shuffled")])).schedule
    assert text.startswith("shuffled:") and int(text.partition(":")[2]) >= 0


def test_a_typed_schedule_is_not_tried_beside_others_of_the_ini_file():
    assert plan(marks([ranks()]), schedule="pct:1", flaky=9, typed={"schedule"}).flaky == 1
    assert plan(marks([ranks()]), schedule="pct:1", flaky=9, typed={"schedule", "flaky"}).flaky == 9


def test_whoever_repeats_a_test_must_give_what_was_typed_for_it():
    assert plan(marks(), ranks=4, typed={"ranks"}).words == ("--ranks", "4")
    assert plan(marks([ranks(4)]), ranks=8, on="gloo", typed={"ranks", "on"}).words == ("--ranks-on", "gloo")


def test_one_of_several_numbers_is_the_chosen_one():
    assert plan(marks([ranks(2, 4)]), chosen=4).ranks == 4
    with pytest.raises(pytest.UsageError, match="several numbers make a test of each"):
        plan(marks([ranks(2, 4)]))


@pytest.mark.parametrize("letter", ["a", "é", "中", "𝛼"])
def test_a_name_of_a_file_fits_a_file_system_in_any_script(letter):
    one, other = (file_name(letter * 300 + last) for last in "xy")
    assert len(one.encode()) < 230 and one != other
    assert file_name(letter * 40) == letter * 40
