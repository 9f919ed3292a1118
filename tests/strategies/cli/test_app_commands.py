"""Every command of the command line has its help, and its options reach what does the work; tests/end_to_end/test_help.py
has the examples."""

import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from strategies.cli import app as cli
from strategies.cli.commands import coverage, discover, plans_audit, validate
from strategies.cli.commands import report as merging
from strategies.cli.options import CoverageOptions, DiscoverOptions, MergeOptions, ValidateOptions
from strategies.model.verdict import ALONE, MESHES, PAIRS
from tests.strategies.sweep.report.test_text_and_json import EMPTY

WORK = {
    "coverage": (coverage, "run"), "discover": (discover, "run"), "merge": (merging, "merge_journals"),
    "validate": (validate, "run"),
}  # fmt: skip


def called(line):
    return CliRunner().invoke(cli.app, cli.repeat_options(shlex.split(line)), terminal_width=200)


@pytest.fixture(autouse=True)
def unchecked(monkeypatch):
    """Journals that are not there reach the work all the same."""
    for options in (CoverageOptions, MergeOptions):
        monkeypatch.setattr(options, "check", lambda self: None)


@pytest.fixture
def validated(monkeypatch):
    """What each command hands on, instead of its work, which would leave with this code."""
    asked = []
    for name, (room, function) in WORK.items():
        monkeypatch.setattr(room, function, lambda options, _name=name: asked.append((_name, options)) or 0)
    monkeypatch.setattr(plans_audit, "run", lambda options: asked.append(("plans", options)) or 0)
    return asked


@pytest.mark.parametrize(("name", "said"), [
    ("coverage", ["[JOURNAL]", "--json", "--seed", "--workers", "--quiet", "0 something was tested; 2 a file that is no journal;"]),
    ("discover", ["OP", "--emit", "--ranks", "--seed", "--workers", "0 searched, whether something is missing or not;"]),
    ("merge", ["JOURNAL...", "--out", "--json", "--repro", "2 a file that is no journal, or of another run;"]),
    ("validate", ["--mesh", "--pairs", "--journal", "--resume", "--shard", "--executor", "0 nothing wrong;"]),
])  # fmt: skip
def test_help_has_the_options_and_the_exit_codes(name, said):
    result = called(f"{name} --help")
    assert result.exit_code == 0
    assert [text for text in said if text not in result.output] == []


def test_plans_are_judged_instead_of_rules(validated):
    assert called("validate --plans --mesh 2,2 --samples 7 --planner graph --seed 5 --confirm none -q").exit_code == 0
    assert called("validate add --plans --search").exit_code == 2
    given = {"mesh": ("2,2",), "samples": 7, "planner": "graph", "seed": 5, "confirm": "none", "quiet": True}
    assert validated == [("plans", ValidateOptions(plans=True, **given))]


def test_what_coverage_is_given_reaches_it(validated):
    assert called("coverage a.jsonl --json b.json --seed 5 --workers 3 -q").exit_code == 0
    assert called("coverage --workers 2").exit_code == 0
    assert validated == [
        ("coverage", CoverageOptions(Path("a.jsonl"), Path("b.json"), seed=5, workers=3, quiet=True)),
        ("coverage", CoverageOptions(None, None, seed=0, workers=2, quiet=False)),
    ]


def test_what_discover_is_given_reaches_it(validated):
    assert called("discover add.Tensor --emit --ranks 2 4 --seed 5 --workers 3").exit_code == 0
    assert validated == [("discover", DiscoverOptions("add.Tensor", emit=True, ranks=(2, 4), seed=5, workers=3))]


@pytest.mark.parametrize("code", [0, 2, 3])
@pytest.mark.parametrize("line", ["coverage a", "discover a"])
def test_the_exit_code_is_that_of_the_work(line, code, monkeypatch):
    room, function = WORK[line.split()[0]]
    monkeypatch.setattr(room, function, lambda *_, **__: code)
    assert called(line).exit_code == code


@pytest.mark.parametrize("line", ["coverage a", "discover a", "merge a", "validate a"])
def test_a_failure_of_our_own_does_not_leave_with_the_code_of_a_wrong_rule(line, monkeypatch):
    def fails(*_, **__):
        raise KeyError("device")

    monkeypatch.setattr(*WORK[line.split()[0]], fails)
    result = called(line)
    assert result.exit_code == 3 and "KeyError: 'device'" in result.output
    assert result.output.endswith("localtensor itself failed, as shown above; this says nothing about any rule.\n")


@pytest.mark.parametrize("line", ["coverage", "discover a"])
def test_ctrl_c_leaves_one_sentence(line, monkeypatch):
    def stopped(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(*WORK[line.split()[0]], stopped)
    result = called(line)
    assert (result.exit_code, result.output) == (130, "localtensor: stopped by Ctrl-C.\n")


@pytest.mark.parametrize(("line", "trials"), [
    ("add --mesh 2,2 --pairs --ranks 3", [(ALONE, (3,)), (PAIRS, (3,)), (MESHES, (2, 2))]),
    ("add --mesh 2,2 --mesh 2 --mesh 2,3", [(ALONE, (2,)), (MESHES, (2, 2)), (MESHES, (2, 3))]),
    ("add --pairs", [(ALONE, (2,)), (ALONE, (3,)), (ALONE, (4,)), (PAIRS, (2,))]),
])  # fmt: skip
def test_meshes_and_pairs_reach_the_settings(line, trials, monkeypatch):
    asked = []
    monkeypatch.setattr("strategies.sweep.session.validate", lambda settings, progress: asked.append(settings) or EMPTY)
    called(f"validate {line} --confirm none -q")
    (settings,) = asked
    assert sorted(settings.kinds_and_meshes()) == sorted(trials)
    assert settings.asked()["pairs"] is ("--pairs" in line)


@pytest.mark.parametrize("mesh", ["2,x", "2,,2", "a"])
def test_what_is_no_mesh_is_usage(mesh):
    result = called(f"validate add --mesh {mesh} -q")
    assert result.exit_code == 2 and "this is no mesh. Write the size of each axis: --mesh 2,2." in result.output
