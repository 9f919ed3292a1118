import io

import pytest
import rich.progress
from rich.console import Console

from strategies.base import progress
from strategies.base.progress import Progress, ProgressBar, progress_bar


@pytest.fixture
def sink():
    return io.StringIO()


def test_a_bar_counts_what_is_done_of_its_phase(sink):
    console = Console(file=sink)
    with rich.progress.Progress(console=console, disable=False, auto_refresh=False) as bars:
        shown = ProgressBar(bars, console)
        shown.tick()  # before any phase: nobody knows of what
        shown.phase("first", 3)
        shown.phase("second", 4)
        shown.tick(2)
        shown.tick()
        (task,) = bars.tasks
        assert (task.description, task.completed, task.total) == ("second", 3, 4)


def test_a_terminal_sees_the_phases(sink):
    with progress_bar(Console(file=sink, force_terminal=True), quiet=False) as loud:
        loud.phase("trying rules", 3)
        loud.tick()
    assert "trying rules" in sink.getvalue() and "1/3" in sink.getvalue()


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test moves."""
    now = [1000.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_a_terminal_moves_and_names_what_is_at_work_and_what_remains(sink, clock):
    with progress_bar(Console(file=sink, force_terminal=True, width=200), quiet=False) as loud:
        loud.phase("trying rules", 3)
        loud.now("aten.add.Tensor")
        before = len(sink.getvalue())
        loud.tick(0)
        first = len(sink.getvalue())
        loud.tick(0)
        assert first > before and len(sink.getvalue()) == first  # not drawn again at once
        clock[0] += 1.0
        loud.tick(0)
        assert len(sink.getvalue()) > first
    assert "aten.add.Tensor" in sink.getvalue() and "0/3" in sink.getvalue() and "left" in sink.getvalue()


def test_a_pipe_gets_a_line_now_and_then(sink, clock):
    with progress_bar(Console(file=sink), quiet=False) as lines:
        lines.phase("trying rules", 1200)
        for _ in range(130):
            clock[0] += 1.0
            lines.now("aten.add.Tensor")
            lines.tick(9)
    assert sink.getvalue() == (
        "localtensor: trying rules: 549 of 1,200 done after 61 s, now aten.add.Tensor\n"
        "localtensor: trying rules: 1,098 of 1,200 done after 122 s, now aten.add.Tensor\n"
    )


def test_each_item_is_a_unit_and_is_named(sink, clock):
    with progress_bar(Console(file=sink), quiet=False) as lines:
        for number in lines.each("planning", ["a", "b"]):
            clock[0] += 61.0
            assert number in "ab"
    assert sink.getvalue().splitlines()[0] == "localtensor: planning: 1 of 2 done after 61 s, now a"


@pytest.mark.parametrize(("terminal", "quiet"), [(False, False), (True, True), (False, True)])
def test_elsewhere_nothing_is_shown_at_once(terminal, quiet, sink):
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
