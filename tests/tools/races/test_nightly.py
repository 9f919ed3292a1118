"""The nightly's own manners: its number, its progress, a finding, Ctrl-C."""

import pytest

from localtensor.concurrency.explorer import Failure
from strategies.propagation.races import explore as races
from strategies.propagation.races.linearizability import ExploredProgram
from tests.tools.races import nightly


def test_it_says_how_far_it_is_and_that_nothing_was_found(capsys):
    assert nightly.main(["--schedules", "130"]) == 0
    progress, last = capsys.readouterr().out.splitlines()
    assert progress.startswith("130 schedules in ") and last == "Nothing found."


def test_a_finding_ends_it_with_its_interleaving(monkeypatch, capsys):
    failure = Failure("check", "one is lost", "bounded", ((0, "begins"),))
    monkeypatch.setattr(races, "explore_all", lambda *_, **__: [ExploredProgram("asks", "One key", 7, 0.1, failure)])
    assert nightly.main(["--schedules", "130"]) == 1
    out = capsys.readouterr().out
    assert "asks: One key\ncheck: one is lost\n  thread 0: begins\nReplay: bounded\n" in out
    assert "Its replay does not fail." in out


def test_ctrl_c_leaves_it_with_what_was_done(monkeypatch, capsys):
    real, runs = races.explore_all, []

    def then_stop(programs, share, **settings):
        runs.append(settings["seed"])
        if len(runs) > 1:
            raise KeyboardInterrupt
        return real(programs, share, **settings)

    monkeypatch.setattr(races, "explore_all", then_stop)
    monkeypatch.setattr(nightly, "CHUNK", 26)
    assert nightly.main(["--schedules", "260", "--seed", "4"]) == 130
    assert "26 schedules in " in capsys.readouterr().out
    assert runs == [4, 30]


def test_no_schedules_are_refused():
    with pytest.raises(SystemExit) as ended:
        nightly.main(["--schedules", "0"])
    assert ended.value.code == 2
