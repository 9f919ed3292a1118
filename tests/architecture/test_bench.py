"""The bench's own manners: what was measured is kept when it is stopped, and how to go on is said."""

import json
import sys
from dataclasses import dataclass

import pytest

from tests.tools.bench import __main__


@dataclass(frozen=True)
class Took:
    seconds: float

    def figures(self):
        return {"took": self.seconds}


@pytest.fixture
def stopped(monkeypatch, tmp_path):
    """Two parts that take no time; the second is stopped if this list is not empty."""
    told = []

    def second(console):
        if told:
            raise KeyboardInterrupt
        return Took(2.0)

    def show(console, took):
        console.print(f"it took {took.seconds}")

    monkeypatch.setattr(__main__, "PARTS", ("first", "second"))
    monkeypatch.setattr(__main__, "BESIDE", {"first": (lambda console: Took(1.0), show), "second": (second, show)})
    monkeypatch.setattr(sys, "argv", ["bench", "--json", str(tmp_path / "figures.json")])
    return told


def test_a_run_that_is_stopped_keeps_what_was_measured_and_says_how_to_go_on(stopped, tmp_path, capsys):
    stopped.append(True)
    assert __main__.main() == 130
    said = capsys.readouterr().out
    assert "it took 1.0" in said
    assert "For the rest: python -m tests.tools.bench --only second" in said
    assert json.loads((tmp_path / "figures.json").read_text()) == {"first": {"took": 1.0}}


def test_a_run_that_is_left_alone_writes_every_part(stopped, tmp_path, capsys):
    assert __main__.main() == 0
    assert "stopped" not in capsys.readouterr().out
    assert json.loads((tmp_path / "figures.json").read_text()) == {"first": {"took": 1.0}, "second": {"took": 2.0}}
