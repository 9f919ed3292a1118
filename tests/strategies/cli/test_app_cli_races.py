"""`localtensor races` as one types it."""

import typer
from typer.testing import CliRunner

from strategies.cli import app as cli_races

app = typer.Typer(rich_markup_mode=None)
app.command("races", epilog=cli_races.RACES_EXAMPLES)(cli_races.races)


def typed(*words):
    return CliRunner().invoke(app, list(words))


def test_what_is_asked_is_run_and_its_exit_code_is_the_commands():
    done = typed("--schedules", "26", "--seed", "3")
    assert done.exit_code == 0
    assert "localtensor races --target once: " in done.stdout and "seed 3" in done.stdout


def test_a_usage_error_is_one_sentence_and_exit_code_2():
    done = typed("--target", "cuda")
    assert done.exit_code == 2
    assert (
        done.stderr == "localtensor races: --target: 'cuda': there is no such target. Use once, propagate, dtensor.\n"
    )


def test_the_help_has_examples_for_each_target_and_the_exit_codes():
    text = typed("--help").stdout
    for words in ("--target propagate", "--target dtensor", "Exit codes: 0 nothing found"):
        assert words in text
