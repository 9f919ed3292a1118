"""What stands in the README and in docs/findings.md."""

from localtensor.layout.spec import parse
from strategies.model.rule import Rule
from strategies.model.verdict import Finding, Verdict
from tests.tools.bench.findings import markdown


def finding(op, inputs="S(1)", verdict=Verdict.UNSOUND, reason="1 at [0] where the op gives 2"):
    rule = Rule(op, (parse(inputs),), (parse("S(1)"),))
    return Finding(rule, 2, verdict, reason, ("f64[2,4]", "-1"), f"{op} #1", "gloo", "[1]", "[2]")


def test_the_table_has_a_row_for_each_op():
    wrong = [finding("aten.cumprod.default"), finding("aten.cumprod.default", "S(0)")]
    others = [finding("aten.add.Tensor", reason="a | b"), finding("aten.sub.Tensor", verdict=Verdict.MISSING)]
    head, rule, *rows = markdown([*wrong, *others]).splitlines()
    assert head == "| rules found wrong | smallest case, ranks | what happens | show it |"
    assert [row.split("**")[1] for row in rows] == ["aten.add.Tensor", "aten.cumprod.default"]
    assert "a \\| b" in rows[0] and "`S(1) -> S(1)`; `S(0) -> S(1)`" in rows[1]
    assert rule.count("|") == head.count("|")
