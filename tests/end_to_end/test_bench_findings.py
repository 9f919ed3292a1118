"""What stands in the README and in docs/findings.md."""

import json
from dataclasses import replace
from pathlib import Path

from strategies.model.cause import RIGHT, definitions
from strategies.model.verdict import Counts, Report
from strategies.sweep.causes.pages import as_json, as_text, wrong_results
from tests.strategies.model.test_cause import SCAN
from tests.tools.bench.findings import short_table, table

CAUSES = (
    replace(SCAN, reason="a | b (2 of 4 elements differ)", call="torch.cumprod(f32[4] S(0), -1)"),
    replace(SCAN, id="other", words="other", verdict=RIGHT, ran_on="2.15.0"),
)


def test_the_table_has_a_row_for_each_cause():
    head, rule, *rows = table(CAUSES).splitlines()
    assert rule.count("|") == head.count("|") and len(rows) == 2
    assert (
        "scan_strategy: shards" in rows[0] and "`torch.cumprod(f32[4] S(0), -1)`" in rows[0] and "a \\| b |" in rows[0]
    )
    assert "`torch/x.py:7`" in rows[0] and "With replicas, all 2 findings are right." in rows[0]
    assert "does not show" in rows[1]


def test_only_what_reproduces_stands_in_the_readme():
    assert short_table(CAUSES, 10).count("shards with") == 1 and len(short_table(CAUSES, 10).splitlines()) == 3


def test_a_script_that_no_longer_reproduces_says_so():
    report = Report("2.13.0", 0, (2,), "gloo", Counts(instances=9), causes=CAUSES)
    text = as_text(report)
    said = "Found on torch 2.13.0, this no longer reproduces: its script shows nothing wrong on torch 2.15.0."
    assert text.count(said) == 1 and text.count("run it: python scan_1.py") == 1
    assert "run it: python scripts/scan_1.py\n" in as_text(report, Path("scripts"))
    assert "4 findings have 2 causes; the scripts of 2 were run on gloo, and 1 of them show the fault" in text
    found = json.loads(as_json(report, 1))["causes"]
    assert [one["reproduces"] for one in found] == [True, False] and found[0]["line"] == 7
    assert (found[0]["run"], found[1]["run"]) == (None, said)


TIED = '''
class TiedNorms(nn.Module):
    """Two layer norms that share one weight, and a buffer."""


def trained(x):
    """The parameters of a module after a step of SGD."""
    return x


def program(x):
    return trained(TiedNorms(2))
'''
PRINTS = "rank 0 got  1\nrank 0 want 1\nrank 0 right\nrank 0 placements R\nrank 0 got  2\nrank 0 want 3\nrank 0 WRONG"


def test_a_page_has_the_case_what_its_names_are_and_of_several_results_the_wrong_ones():
    given = replace(
        SCAN,
        call="TiedNorms(n)",
        lines="def program(x):\n    return trained(x)\nprogram(d0)",
        script=TIED,
        prints=PRINTS,
    )
    text = as_text(Report("2.13.0", 0, (2,), "gloo", Counts(instances=9), causes=(given,)))
    assert text.splitlines()[1:] == [
        "   silent, everyday; torch/x.py:7; torch 2.13.0",
        "   affects 2 findings, of aten.cumprod.default",
        "   case    TiedNorms(n) on 2 ranks",
        "   result  got 1, expected 2",
        "",
        "       def program(x):",
        "           return trained(x)",
        "       program(d0)",
        "",
        "   where   TiedNorms: Two layer norms that share one weight, and a buffer.",
        "   where   trained: The parameters of a module after a step of SGD.",
        "   prints  rank 0 placements R",
        "   prints  rank 0 got  2",
        "   prints  rank 0 want 3",
        "   prints  rank 0 WRONG",
        "   run it: python scan_1.py, which --repro writes",
        "   With replicas, all 2 findings are right.",
        "",
        "torch 2.13.0: 2 findings have 1 cause; the scripts of 1 were run on gloo, and 1 of them show the fault.",
    ]  # fmt: skip


def test_of_long_results_the_place_where_they_differ_is_on_the_page():
    want = [float(i) for i in range(200)]
    got = [*want[:150], 0.5, *want[151:]]
    shown = wrong_results(f"rank 0 got  {got}\nrank 0 want {want}\nrank 0 WRONG").splitlines()
    assert ", 149.0, 0.5, 151.0" in shown[0] and ", 149.0, 150.0, 151.0" in shown[1] and shown[2:] == ["rank 0 WRONG"]
    assert max(map(len, shown)) < 200
    assert wrong_results("it hangs") == "it hangs"
    assert wrong_results("a WRONG\nb right\nc WRONG\nd WRONG") == "a WRONG\nfurther wrong results: 2"


def test_a_script_that_is_no_python_defines_nothing():
    assert definitions("class Tied(", "Tied(n)") == definitions("\0", "Tied(n)") == ()
    assert definitions(TIED, "nn.TiedNorms(n)", "TiedNorms") == ()
