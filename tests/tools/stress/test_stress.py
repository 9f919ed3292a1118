"""A few of the strikes of `python -m tests.tools.stress`, at events that are the same in every run."""

import json
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.tools.stress.struck import Strike, faults, struck
from tests.tools.stress.victims import VICTIMS


def stopped(victim, strike, folder):
    """What is wrong with how that command ends when it is stopped so; it was stopped indeed."""
    victim.prepare(folder, folder)
    left = struck(victim.words, folder, strike, python=victim.python)
    assert left.code == 128 + strike.number
    return faults(left, strike, ()) + victim.whole(folder, left)


@pytest.mark.few(2)
@pytest.mark.parametrize("strike", [
    Strike(1), Strike(40), Strike(900, group=False), Strike(2500, number=signal.SIGTERM), Strike(9000, times=2),
], ids=str)  # fmt: skip
def test_a_search_for_races_that_is_stopped_leaves_one_sentence(strike, tmp_path):
    assert stopped(VICTIMS["races once"], strike, tmp_path / "w") == []


def test_a_terminal_gets_its_cursor_back(tmp_path):
    strike = Strike(event=25000)
    left = struck(VICTIMS["races once"].words, tmp_path, strike, tty=60)
    assert left.code == 130
    assert "\x1b[?25l" in left.out  # it was hidden for the bar
    assert faults(left, strike, ()) == []


@pytest.mark.slow
@pytest.mark.parametrize("columns", [20, pytest.param(60, marks=pytest.mark.slow)])
def test_a_narrow_terminal_shows_all(columns, tmp_path):
    left = struck(["races", "--schedules", "40"], tmp_path, tty=columns)
    assert (left.code, faults(left, None, (0,))) == (0, [])
    assert left.out.endswith("\r\n\r\nno findings in 40 tried\r\n")


@pytest.mark.slow
def test_two_at_once_write_one_whole_file(tmp_path):
    words = ["races", "--schedules", "13", "--json", "r.json", "-q"]
    with ThreadPoolExecutor(2) as pool:
        codes = [left.code for left in pool.map(lambda _: struck(words, tmp_path), range(2))]
    assert codes == [0, 0]
    assert json.loads((tmp_path / "r.json").read_text())["target"] == "once"
    assert sorted(p.name for p in tmp_path.iterdir()) == [".tmp", "r.json"]
