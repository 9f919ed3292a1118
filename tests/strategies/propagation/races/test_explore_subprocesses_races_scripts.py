"""The scripts over torch's own propagator: whole files of plain torch, and one of them run."""

import ast

import pytest

from strategies.propagation.races.explore import RACE_SCRIPTS, race_script, run_race_script
from strategies.propagation.races.linearizability import MEANINGS


def text_of(name):
    return race_script(name, threads=4, rounds=2, seed=3, seconds=50)


@pytest.mark.parametrize("name", RACE_SCRIPTS)
def test_a_script_is_one_file_of_plain_torch_with_its_settings(name):
    tree = ast.parse(text_of(name))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not {module for module in imported if module.startswith(("localtensor", "strategies"))}
    assert "THREADS, ROUNDS, SEED, SECONDS = 4, 2, 3, 50\n" in text_of(name)


@pytest.mark.parametrize("name", RACE_SCRIPTS)
def test_every_kind_that_a_script_finds_has_a_meaning(name):
    calls = [node for node in ast.walk(ast.parse(text_of(name))) if isinstance(node, ast.Call)]
    found = [node.args[0] for node in calls if ast.unparse(node.func) == "found"]
    kinds = {word.value for first in found for word in ast.walk(first) if isinstance(word, ast.Constant)}
    assert kinds and kinds <= set(MEANINGS)


@pytest.mark.slow
def test_a_clear_in_one_thread_leaves_the_answers_of_another():
    part = run_race_script(
        "clear", RACE_SCRIPTS["clear"], race_script("clear", threads=4, rounds=1, seed=0, seconds=240), 240
    )
    assert part.trouble == ""
    assert [(finding.kind, finding.count) for finding in part.findings] == [("stale after a clear", 1)]
