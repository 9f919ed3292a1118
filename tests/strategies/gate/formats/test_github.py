import html
import re
from dataclasses import replace

import pytest
from markdown_it import MarkdownIt

from localtensor._util.html_page import xml_safe
from strategies.gate.formats.github import (
    MARK,
    MOST,
    MOST_COMMENT,
    annotations,
    command_escaped,
    comment,
    markdown_escaped,
    summary,
)
from tests.strategies.gate_cases import CLEAN, EVERY, FULL, HOSTILE, ONE_FUNCTION, finding, hostile, huge, new


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
        "on 2 ranks, cumprod(f64[2], -1): differs at [0]: got 1, expected 2; seen on real gloo processes "
        "(new for real on 1 axis, complex on 1 axis)"
    )


def test_what_is_gone_points_at_the_baseline_and_trouble_nowhere():
    told = [read(line) for line in annotations(FULL, baseline="b.json").splitlines()]
    assert [properties.get("file") for _, properties, _ in told] == ["my ops/rules.py", "b.json", "b.json", None]
    assert [properties.get("line") for _, properties, _ in told] == ["12", "1", "1", None]
    assert told[-1][2] == "a worker was killed twice"


def test_accepted_findings_are_not_annotated():
    assert "gather" not in annotations(FULL)


def test_all_forms_of_one_rule_function_are_one_annotation():
    (line,) = annotations(ONE_FUNCTION).splitlines()
    assert line.endswith("(new for real on 1 axis, complex on 1 axis); and 2 other forms of this function")


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


def rendered(result):
    return MarkdownIt("commonmark").enable("table").render(summary(result))


def test_a_clean_gate_is_two_lines():
    assert summary(CLEAN) == (
        "## localtensor gate: clean\n\n"
        "0 new, 0 accepted, 0 gone, 0 not tried; 3 rules sound, 9 instances of 2 overloads on torch 2.13.0 in 1.5 s.\n"
    )


def test_a_full_one_has_a_table_of_what_is_new_and_lists_of_the_rest():
    text = rendered(FULL)
    assert text.count("<tr>") == 3 and text.count("<td>") == 12
    titles = ["New: these fail the gate: 2", "Gone: remove these from the baseline with localtensor gate --update (1)",
              "Accepted once, and past their date (1)", "Crashed (1)", "Good to know (1)", "Not tried (1)", "Chosen by the change (1)",
              "Accepted crashes that did not come back (1)", "Accepted (2)"]  # fmt: skip
    places = [text.index(title) for title in titles]
    assert places == sorted(places)
    assert "a worker was killed twice" in text and "until 2027-01-31" in text


def test_silent_and_raising_are_distinguished():
    rows = [line for line in summary(FULL).splitlines() if line.startswith("| <code>")]
    assert [row.split(" | ")[-1] for row in rows] == ["silent |", "loud |"]


def test_no_text_breaks_out_of_its_cell_or_its_line():
    text = rendered(hostile())
    assert "<script>" not in text and "<a " not in text and "<img" not in text
    assert text.count("<td>") == 6 and "<td>silent</td>" in text
    shown = html.unescape(text)
    assert "%0A::error::" in shown and "| `t`" in shown


def test_plain_text_shows_as_itself():
    odd = "a|b `c` *d* _e_ [f](g) <h> &amp; \\i # j ~k~ $l$ ![m]"
    shown = html.unescape(MarkdownIt("commonmark").enable("table").render(f"{markdown_escaped(odd)}")).strip()
    assert shown == f"<p>{odd}</p>"


@pytest.mark.parametrize("which", EVERY)
def test_it_fits_into_what_github_takes(which):
    assert 0 < len(summary(EVERY[which]()).encode()) < MOST


def test_what_does_not_fit_is_counted():
    shown = summary(huge())
    kept = shown.count("| <code>my.op")
    assert 1_000 < kept < 6_000
    assert int(shown.strip().splitlines()[-1].strip("*").split()[0]) >= 6_000 - kept


def test_a_single_text_beyond_the_limit_is_left_out_too():
    vast = replace(CLEAN, findings=(new(finding(reason="é" * MOST)),))
    assert len(summary(vast).encode()) < MOST and "more lines do not fit" in summary(vast)


def commented(result):
    return MarkdownIt("commonmark").enable("table").render(comment(result))


def test_a_comment_has_a_collapsed_table_for_each_function_and_a_mark():
    text = commented(ONE_FUNCTION)
    assert comment(ONE_FUNCTION).splitlines()[:4] == [
        MARK, "### localtensor gate: 1 new wrong rule function", "", "1 new (3 forms), 0 accepted, 0 gone.",
    ]  # fmt: skip
    assert text.count("<details>") == text.count("</details>") == text.count("<table>") == 1
    assert (
        "<details><summary><code>rule (my&#95;ops/rules.py:12)</code>: 3 wrong forms, 2 of them silent</summary>"
        in text
    )
    assert text.count("<tr>") == 4
    assert "complex on 1 axis" in text and commented(FULL).count("<table>") == 2


def test_a_comment_on_a_clean_gate_is_short_and_one_on_trouble_names_it():
    assert comment(CLEAN) == f"{MARK}\n### localtensor gate: clean\n\n0 new, 0 accepted, 0 gone.\n"
    assert "nothing was tested" in comment(EVERY["nothing"]())
    assert "until 2027-01-31" in comment(FULL) and "1 expired" in comment(FULL)


@pytest.mark.parametrize("which", EVERY)
def test_a_comment_fits_into_what_github_takes_and_nothing_breaks_out_of_it(which):
    assert 0 < len(comment(EVERY[which]()).encode()) < MOST_COMMENT
    text = commented(EVERY[which]())
    assert not set(re.findall(r"<(script|a|img)\b", text))


def test_the_headline_says_the_worst():
    one = summary(replace(CLEAN, findings=(new(finding()),)))
    assert one.startswith("## localtensor gate: 1 new wrong rule function\n")
    assert summary(FULL).startswith("## localtensor gate: 2 new wrong rule functions\n")
    assert summary(replace(FULL, findings=())).startswith("## localtensor gate: the baseline must shrink\n")
    assert summary(EVERY["nothing"]()).startswith("## localtensor gate: in trouble\n")
    assert HOSTILE not in one
