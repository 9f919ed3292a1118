"""What stands in the README and in docs/findings.md."""

import json

from strategies.model.verdict import Counts, Report
from strategies.sweep.causes.cause import Case, Cause
from strategies.sweep.causes.pages import Page, as_json, as_text, short_table, table
from strategies.sweep.causes.reach import severity
from strategies.sweep.causes.script import RIGHT, SHOWS, ScriptRun
from strategies.torch_api.code_places import CodePlace
from tests.strategies.sweep.causes.programs import CUMPROD


def page(what, verdict=SHOWS):
    case = Case(CUMPROD, "a | b (2 of 4 elements differ)", severity(CUMPROD, raises=False))
    place = CodePlace("scan", "torch/x.py", 7)
    cause = Cause(
        ("rule", what), "rule", place, what, ("aten.cumprod.default",), ("one", "two"), ("2.13.0",), "replicas", 2, case
    )
    return Page(cause, ScriptRun("script", "x = 1", "DTensor gives 1", verdict), "scan.py")


PAGES = [page("shards"), page("other", RIGHT)]


def test_the_table_has_a_row_for_each_cause():
    head, rule, *rows = table(PAGES).splitlines()
    assert rule.count("|") == head.count("|") and len(rows) == 2
    assert "scan: shards" in rows[0] and "`torch.cumprod(f32[4] S(0), -1)`" in rows[0] and "a \\| b" in rows[0]
    assert "`torch/x.py:7`" in rows[0] and "replicas cured 2 of 2 findings" in rows[0]
    assert "does not show" in rows[1]


def test_only_what_reproduces_stands_in_the_readme():
    assert short_table(PAGES, 10).count("scan") == 0 and len(short_table(PAGES, 10).splitlines()) == 3


def test_a_script_that_no_longer_reproduces_says_so():
    report = Report("2.13.0", 0, (2,), "gloo", Counts(instances=9))
    text = as_text(report, PAGES)
    assert text.count("no longer reproduces it: it does not show") == 1 and text.count("run it: python scan.py") == 1
    assert "4 findings have 2 causes; the scripts of 2 were run on gloo, and 1 of them show the fault" in text
    found = json.loads(as_json(report, PAGES, 1))["causes"]
    assert [one["reproduces"] for one in found] == [True, False] and found[0]["line"] == 7
