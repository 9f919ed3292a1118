"""The lot is the same again and meets every cause; the runner accuses what is wrong, and nothing else."""

import json
import subprocess
import sys

import pytest
import torch

from tests.tools.by_hand import draw
from tests.tools.by_hand.__main__ import APART, DIFFERS, EQUAL, HANGS, NO_CHECK, RAISES, holds, outcome_of
from tests.tools.by_hand.words import BUG, CHECKS, RIGHT, SUM, Check, Given, difference
from tests.tools.versions.ranks import UNCAUGHT

CAUSES = {"one": ["a"], "many": [f"b{n}" for n in range(30)], "few": ["c", "d"]}


def test_each_cause_is_drawn_once_and_then_all_findings_until_there_are_enough():
    found = draw.drawn(CAUSES, 10, seed=1)
    assert [cause for cause, _ in found[:3]] == ["few", "many", "one"]
    assert len(set(found)) == 10 and all(one in CAUSES[cause] for cause, one in found)
    assert found == draw.drawn(CAUSES, 10, seed=1) != draw.drawn(CAUSES, 10, seed=2)
    assert len(draw.drawn(CAUSES, 1, seed=1)) == 3 and len(draw.drawn(CAUSES, 99, seed=1)) == 33


def test_the_draw_says_which_findings_have_no_check(tmp_path, capsys):
    causes = tmp_path / "causes.json"
    records = [{"name": "scan", "id": "x", "findings": ["aten.cumprod.default: S(1) -> S(1)"]}]
    causes.write_text(json.dumps({"causes": records}))
    assert draw.main([str(causes)]) == 0
    assert "| cumprod along the sharded dim" in capsys.readouterr().out
    causes.write_text(json.dumps({"causes": [*records, {"name": "new", "id": "y", "findings": ["aten.new"]}]}))
    assert draw.main([str(causes)]) == 1
    assert "aten.new | -\n" in capsys.readouterr().out
    causes.write_text("[]")
    assert draw.main([str(causes)]) == 3


@pytest.mark.parametrize(
    ("codes", "found"),
    [
        ([0, 0], EQUAL), ([0, 1], DIFFERS), ([UNCAUGHT, UNCAUGHT], RAISES), ([UNCAUGHT, None], APART), ([3, 3], NO_CHECK),
        ([-24, None], HANGS), ([-14, -14], HANGS),
    ],
)  # fmt: skip
def test_the_exit_codes_of_the_ranks_are_the_outcome(codes, found):
    assert outcome_of({"codes": codes, "output": "first\nValueError: last\n"})[0] == found
    for judged in (BUG, RIGHT, "because"):
        one = Check("", lambda d: None, (2,), judged)
        assert holds(one, found) == (found == EQUAL if judged == RIGHT else found in (DIFFERS, RAISES, APART))


def test_what_differs_is_named():
    x = torch.ones(2)
    assert difference(x, x) == difference(3, 3) == difference(x + 1e-7, x) == ""
    for other in (x + 1e-3, x.double(), torch.ones(3), 1.0):
        assert difference(other, x)
    assert difference(2, 3) == "is 2, not 3" and difference(x, 1.0)


def test_parts_make_the_value_of_plain_torch():
    d = Given(None)
    assert d.pieces(SUM, [1.0, 2.0], [3.0, -2.0]).tolist() == [4.0, 0.0]
    assert len(CHECKS) == len({check.name for check in CHECKS.values()}) > 250


@pytest.mark.slow
def test_a_wrong_rule_is_accused_and_a_right_one_is_not():
    command = [sys.executable, "-m", "tests.tools.by_hand"]
    found = subprocess.run(
        [*command, "shift to the left by a number", "sum of shards"], check=False, capture_output=True, text=True
    )
    assert "sum of shards (right): equal" in found.stdout and "number (bug): differs" in found.stdout, found.stderr
    assert found.returncode == 0
    assert subprocess.run([*command, "no such check"], check=False, capture_output=True).returncode == 2
