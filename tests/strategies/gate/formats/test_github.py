import re
from dataclasses import replace

import pytest

from strategies.base.progress import xml_safe
from strategies.gate.formats.github import annotations, command_escaped
from tests.strategies.gate_cases import CLEAN, FULL, HOSTILE, finding, hostile, huge, new


def read(line):
    """A workflow command as GitHub's runner takes it apart."""
    found = re.fullmatch(r"::(error|notice) ([^:]*)::(.*)", line)
    assert found, line
    kind, properties, text = found.groups()
    undo = {"%0D": "\r", "%0A": "\n", "%3A": ":", "%2C": ",", "%25": "%"}

    def plain(value):
        for code, char in undo.items():
            value = value.replace(code, char)
        return value

    pairs = dict(part.split("=", 1) for part in properties.split(","))
    return kind, {name: plain(value) for name, value in pairs.items()}, plain(text)


def test_a_clean_gate_says_nothing():
    assert annotations(CLEAN) == ""


def test_a_finding_points_at_its_rule():
    assert annotations(FULL).splitlines()[0] == (
        "::error file=my ops/rules.py,line=12,title=Wrong sharding rule aten.cumprod.default%3A S(0) -> S(0)::"
        "on 2 ranks, cumprod(f64[2], -1): 1 at [0] where the op gives 2; seen on real gloo processes "
        "(new for real on 1 axis, complex on 1 axis)"
    )


def test_what_is_gone_points_at_the_baseline_and_trouble_nowhere():
    told = [read(line) for line in annotations(FULL, baseline="b.json").splitlines()]
    assert [properties.get("file") for _, properties, _ in told] == ["my ops/rules.py", "b.json", "b.json", None]
    assert [properties.get("line") for _, properties, _ in told] == ["12", "1", "1", None]
    assert told[-1][2] == "a worker was killed twice"


def test_accepted_findings_are_not_annotated():
    assert "gather" not in annotations(FULL)


def test_ten_are_shown_and_the_rest_counted():
    lines = annotations(huge(37)).splitlines()
    assert [line.startswith("::error ") for line in lines] == [True] * 10 + [False]
    assert lines[-1] == "::notice title=localtensor gate::+27 more"


@pytest.mark.parametrize(("many", "last"), [(10, "::error"), (11, "::notice title=localtensor gate::+1 more")])
def test_ten_need_no_more_and_eleven_do(many, last):
    told = replace(CLEAN, findings=tuple(new(finding(f"my.op_{i}.default")) for i in range(many)))
    lines = annotations(told).splitlines()
    assert len(lines) == many and lines[-1].startswith(last)


def test_hostile_text_stays_within_its_own_command():
    lines = annotations(hostile()).splitlines()
    told = [read(line) for line in lines]
    assert len(told) == 3
    assert told[0][1]["file"] == "a b,c:d%\n.py"
    assert told[2][2] == xml_safe(HOSTILE)


def test_a_percent_sign_is_escaped_first():
    assert command_escaped("%0A\n") == "%250A%0A"
