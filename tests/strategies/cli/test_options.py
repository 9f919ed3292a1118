"""`localtensor plan` and `localtensor cost check` as one types them."""

import json
import shlex

import pytest
import typer
from typer.testing import CliRunner

from strategies.cli import app as cli

app = typer.Typer(rich_markup_mode=None)
app.command("plan", epilog=cli.PLAN_EXAMPLES)(cli.plan)
app.add_typer(cli.cost)
EXAMPLES = [
    shlex.split(line, comments=False)[1:]
    for line in cli.PLAN_EXAMPLES.splitlines()
    if line.startswith("  localtensor plan")
]


def typed(*words):
    return CliRunner().invoke(app, list(words))


@pytest.mark.parametrize("words", EXAMPLES, ids=" ".join)
def test_each_example_of_the_help_runs(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = words[: words.index("-") + 1] if "-" in words else words  # what follows is a remark
    done = typed(*words)
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout) if "--json" in words else "the cheapest" in done.stdout
    assert (tmp_path / "plan.svg").exists() is ("plan.svg" in words)


def test_the_help_has_examples_options_and_exit_codes():
    text = typed("plan", "--help").stdout
    for words in ("--no-dtensor", "--memory", "--flattened", "--picture FILE", "Exit", "S(0)[1],S(0)[0]", "Examples:"):
        assert words in text
    assert all(len(line) <= 120 for line in text.splitlines())


def test_options_reach_the_plan():
    done = typed("plan", "f32[64] @ dp=2,tp=2: P(sum),P(sum) -> R,R", "--flattened", "dp,tp", "--by", "bytes", "--json", "--no-dtensor", "--no-alternatives", "--memory", "1MB")  # fmt: skip
    told = json.loads(done.stdout)
    assert (told["by"], told["memory_limit"], told["flattened"], told["dtensor"]) == (
        "bytes",
        1_000_000,
        [["dp", "tp"]],
        {},
    )
    assert len(told["alternatives"]) == 1


def test_a_usage_error_is_one_sentence_and_exit_code_2():
    done = typed("plan", "f32[8] @ dp=2: S(0) -> S(1)")
    assert done.exit_code == 2 and done.stdout == ""
    assert (
        done.stderr == "localtensor plan: to: 'S(1)': the tensor has dim 0 only. Write 'f32[8] @ dp=2: S(0) -> S(0)'.\n"
    )


def test_too_little_memory_is_exit_code_1():
    assert typed("plan", "f32[8] @ dp=2: S(0) -> R", "--memory", "1B").exit_code == 1


def test_a_cost_is_checked():
    assert typed("cost", "check", "bytes", "--mesh", "2", "--shape", "4").exit_code == 0
    done = typed("cost", "check", "bytes", "--mesh", "2,x")
    assert (
        done.exit_code == 2
        and done.stderr == "localtensor cost check: --mesh: '2,x': these are no sizes. Write --mesh 2,2.\n"
    )
    assert json.loads(typed("cost", "check", "bytes", "--mesh", "2", "--shape", "4", "--json").stdout)
