"""`localtensor races`: exit codes, refusals, files."""

import errno
import json
import sys
from pathlib import Path

import pytest

from localtensor.concurrency.explorer import Failure
from strategies.base.options import BadOption
from strategies.base.signals import EXIT_CLEAN, EXIT_NOTHING, EXIT_WRONG
from strategies.cli import options as commands
from strategies.cli.commands import races as races_command
from strategies.cli.commands.races import exit_code, run
from strategies.cli.options import RacesOptions
from strategies.propagation.races import explore as races
from strategies.propagation.races.linearizability import ExploredProgram, ProgramSummary, RaceFinding
from tests.tools import warm

FAILURE = Failure("deadlock", "thread 0 waits", "bounded:1:1", ((0, "begins"), (1, "takes lock")))


@pytest.mark.parametrize(("settings", "words"), [
    ({"target": "torch"}, "localtensor races: --target: 'torch': there is no such target. Use once, propagate, dtensor."),
    ({"target": "once", "schedules": 0}, "localtensor races: --schedules: 0: it has to be 1 or more. Pass --schedules 1."),
    ({"target": "dtensor", "threads": 1}, "localtensor races: --threads: 1: it has to be 2 or more. Pass --threads 2."),
    ({"target": "once", "seconds": 0.0}, "localtensor races: --seconds: 0: nothing can be tried in no time. Pass --seconds 60."),
    ({"target": "once", "threads": 4}, ("localtensor races: --threads: 4: programs of --target once bring their own threads. "
                                        "Leave it out, or use --target dtensor.")),
])  # fmt: skip
def test_what_cannot_be_followed_is_refused(settings, words):
    with pytest.raises(BadOption) as refused:
        RacesOptions(**settings)
    assert str(refused.value) == words


def test_a_folder_for_a_file_is_refused(tmp_path):
    with pytest.raises(BadOption, match="this is a folder"):
        RacesOptions("once", json=tmp_path)


def test_nothing_found_is_reported_and_written(tmp_path, capsys):
    file = tmp_path / "races.json"
    assert run(RacesOptions("once", schedules=26, json=file)) == EXIT_CLEAN
    out = capsys.readouterr().out
    assert "no findings in 26 tried" in out and "Repeat:" not in out
    report = json.loads(file.read_text())
    assert report["target"] == "once" and report["exit_code"] == 0
    assert sum(part["tried"] for part in report["parts"]) == 26


def test_what_is_found_is_reported_with_its_interleaving_and_a_script(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(races, "explore_all", lambda *_, **__: [ExploredProgram("asks", "One key", 7, 0.1, FAILURE)])
    assert run(RacesOptions("once", repro=tmp_path / "scripts")) == EXIT_WRONG
    out = capsys.readouterr().out
    assert "1. asks: deadlock, once" in out and "thread 1: takes lock" in out and "Replay: bounded:1:1" in out
    script = tmp_path / "scripts" / "races_asks.py"
    done = warm.run([sys.executable, str(script)], timeout=60)
    assert done.returncode == 0, done.stderr  # the real program does not fail by that schedule


@pytest.mark.parametrize(("target", "name", "module", "within"), [
    ("once", "asks", "cache_programs", "explore.WITHIN"),
    ("once", "calls", "linearizability", "explore.WITHIN"),
    ("propagate", "same_key", "propagator_programs", "propagator_programs.WITHIN"),
])  # fmt: skip
def test_a_script_names_the_program_that_failed_and_what_was_traced(target, name, module, within):
    [finding] = races_command._summary(target, ExploredProgram(name, "One key", 7, 0.1, FAILURE, "lines")).findings
    assert f"explore.made({module}.{name}, 'lines', {within})" in finding.script


def test_parts_without_a_finding_have_no_script(tmp_path):
    found = RaceFinding("a", "crash", 1, "", "text")
    parts = [ProgramSummary("a", "?", 3, 0.0, (found,)), ProgramSummary("b", "?", 3, 0.0)]
    assert races_command._scripts(tmp_path, parts) == [(tmp_path / "races_a.py", "text")]


def test_seconds_that_are_over_leave_parts_that_were_not_run(capsys):
    assert run(RacesOptions("dtensor", seconds=0.5)) == EXIT_NOTHING
    assert "not run: too little was left of --seconds 0.5" in capsys.readouterr().out


def test_what_cannot_be_written_is_infrastructure(tmp_path, capsys):
    options = RacesOptions("once", schedules=13, json=tmp_path / "file" / "races.json")
    (tmp_path / "file").write_text("")  # meanwhile
    assert run(options) == EXIT_NOTHING
    assert "the report above is whole" in capsys.readouterr().err


@pytest.mark.parametrize(("settings", "named"), [
    ({"json": Path("races.json")}, "races.json"),
    ({"repro": Path("scripts")}, "scripts/races_asks.py"),
    ({"json": Path("races.json"), "repro": Path("scripts")}, "races.json"),
])  # fmt: skip
def test_a_full_disk_names_no_file_so_the_command_does(capsys, monkeypatch, settings, named):
    def full(path, text):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(races, "explore_all", lambda *_, **__: [ExploredProgram("asks", "One key", 7, 0.1, FAILURE)])
    monkeypatch.setattr(commands, "write_whole", full)
    assert run(RacesOptions("once", **settings)) == EXIT_NOTHING
    assert f"localtensor: {named}: No space left on device; the report above is whole" in capsys.readouterr().err


@pytest.mark.parametrize(("parts", "code"), [
    ([], EXIT_NOTHING),
    ([ProgramSummary("a", "?", 3, 0.0)], EXIT_CLEAN),
    ([ProgramSummary("a", "?", 3, 0.0), ProgramSummary("b", "?", 0, 0.0, trouble="over")], EXIT_NOTHING),
    ([ProgramSummary("a", "?", 3, 0.0, (RaceFinding("a", "crash", 1, "", ""),)), ProgramSummary("b", "?", 0, 0.0, trouble="over")], EXIT_WRONG),
])  # fmt: skip
def test_exit_codes(parts, code):
    assert exit_code(parts) == code


def test_free_running_threads_are_told_what_was_asked(monkeypatch):
    ran = []
    monkeypatch.setattr(
        races_command, "run_race_script", lambda *asked: ran.append(asked) or ProgramSummary(asked[0], asked[1], 1, 0.0)
    )
    assert run(RacesOptions("dtensor", schedules=5, threads=3, seed=9, quiet=True)) == EXIT_CLEAN
    assert all("THREADS, ROUNDS, SEED, SECONDS = 3, 5, 9, 60\n" in text for _, _, text, _ in ran)
    assert len(ran) == 7
