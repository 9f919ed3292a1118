"""Drawn values: the same for a seed wherever it runs, all of them possible, and never more than asked for."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from strategies.inputs.typed_values import drawn

SCRIPT = """
from strategies.inputs.typed_values import drawn
{more}
print(drawn(lambda pick: (pick(range(1000)), pick("abc")), seed=5, budget=12))
"""


def pairs(pick):
    return pick(range(1000)), pick("abc")


def told(more, folder):
    """What another process draws, which has loaded this source too."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(more=more)], capture_output=True, text=True, check=True, cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": "7"},
    )  # fmt: skip
    assert done.stderr == ""
    return done.stdout.strip()


def test_a_seed_draws_the_same_again_and_another_seed_draws_others():
    assert drawn(pairs, seed=5, budget=12) == drawn(pairs, seed=5, budget=12)
    assert drawn(pairs, seed=5, budget=12) != drawn(pairs, seed=6, budget=12)


@pytest.mark.slow
def test_another_process_with_other_source_loaded_draws_the_same(tmp_path):
    numbers = tmp_path / "numbers_of_mine.py"
    numbers.write_text("many = [501, 502, 503, 777, 778, 779]\n")
    assert told("import numbers_of_mine", tmp_path) == str(drawn(pairs, seed=5, budget=12))
    assert [file.name for file in tmp_path.iterdir() if "hypothesis" in file.name] == []


def test_all_options_come():
    found = drawn(lambda pick: (pick("abcde"), pick(range(3))), seed=0, budget=15)
    assert {letter for letter, _ in found} == set("abcde")
    assert {number for _, number in found} == {0, 1, 2}


@pytest.mark.parametrize("budget", [0, 1, 7])
def test_there_are_as_many_as_asked_for_and_no_two_alike(budget):
    found = drawn(pairs, seed=1, budget=budget)
    assert len(found) == len(set(found)) == budget


def test_where_there_are_fewer_it_ends():
    assert sorted(drawn(lambda pick: pick("ab"), seed=0, budget=50)) == ["a", "b"]
    assert drawn(lambda pick: pick([3]), seed=0, budget=50) == [3]


def test_nothing_is_left_out_but_what_came_to_nothing():
    found = drawn(lambda pick: None if (n := pick(range(16))) % 2 else n, seed=0, budget=16)
    assert set(found) <= set(range(0, 16, 2)) and len(found) > 4
