import io

import pytest
import rich.progress
from rich.console import Console

from strategies.base.progress import Progress, ProgressBar, progress_bar


@pytest.fixture
def sink():
    return io.StringIO()


def test_a_bar_counts_what_is_done_of_its_phase(sink):
    console = Console(file=sink)
    with rich.progress.Progress(console=console, disable=False, auto_refresh=False) as progress:
        shown = ProgressBar(progress, console)
        shown.tick()  # before any phase: nobody knows of what
        shown.phase("first", 3)
        shown.phase("second", 4)
        shown.tick(2)
        shown.tick()
        (task,) = progress.tasks
        assert (task.description, task.completed, task.total) == ("second", 3, 4)


def test_a_terminal_sees_the_phases(sink):
    with progress_bar(Console(file=sink, force_terminal=True), quiet=False) as loud:
        loud.phase("trying rules", 3)
        loud.tick()
    assert "trying rules" in sink.getvalue() and "1/3" in sink.getvalue()


@pytest.mark.parametrize(("terminal", "quiet"), [(False, False), (True, True), (False, True)])
def test_elsewhere_nothing_is_shown(terminal, quiet, sink):
    with progress_bar(Console(file=sink, force_terminal=terminal), quiet=quiet) as silent:
        silent.phase("trying rules", 3)
        silent.tick()
    assert sink.getvalue() == ""


@pytest.mark.parametrize(("terminal", "quiet"), [(False, True), (True, False)])
def test_what_is_to_be_said_is_said_anyway_and_as_it_is(terminal, quiet, sink):
    with progress_bar(Console(file=sink, force_terminal=terminal, width=200, color_system=None), quiet=quiet) as shown:
        shown.say("a.jsonl: [red] 12 bytes")
    assert "a.jsonl: [red] 12 bytes\n" in sink.getvalue()


def test_silence_takes_all_that_a_bar_takes(capsys):
    silent = Progress()
    assert (silent.phase("x", 3), silent.tick(), silent.tick(2), silent.say("x")) == (None,) * 4
    assert capsys.readouterr() == ("", "")
