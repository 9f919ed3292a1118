"""Results of a gate that every output must bear: clean, full, hostile, huge, empty."""

import datetime as dt
from dataclasses import replace

from localtensor.layout.spec import parse
from strategies.gate.baseline import BaselineEntry, ChosenOverload, FindingKey, GateResult, ReviewedFinding, SourceLine
from strategies.gate.decision import ignored_finding, keys_of
from strategies.model.rule import Rule
from strategies.model.verdict import Counts, Crash, Finding, Report, Verdict
from strategies.torch_api.user_modules import SINGLE_DIM_FIRST

HOSTILE = '</testcase>]]> & "q" | `t` %0A::error::\r\n \x00\x1b[31m \ud800 <script>alert(1)</script> ünï,:'
PICTURE = (
    "argument 0, S(0)\n  rank 0  [1] of shape (1,)\n  rank 1  [2] of shape (1,)\nthe op gives [1, 2] of shape (2,)"
)
RAISES = "rank 1 raises ValueError: odd; its peers go on and wait for it at the next collective"


def finding(op="aten.cumprod.default", placements="S(0)", **more):
    rule = Rule(op, (parse(placements),), (parse(placements),))
    found = Finding(
        rule, 2, Verdict.UNSOUND, "differs at [0]: got 1, expected 2", ("f64[2]", "-1"), "cumprod #1", "gloo", "[1]", "[2]",
        PICTURE,
    )  # fmt: skip
    return replace(found, **more)


def key(found, dtypes="real", mesh="1 axis"):
    return FindingKey(found.rule.op, found.name.removeprefix(f"{found.rule.op}: "), dtypes, mesh)


def new(found, *dtypes, **more):
    keys = tuple(key(found, one) for one in dtypes or ("real",))
    return ReviewedFinding(found, keys, keys, **more)


def known(found, *entries):
    return ReviewedFinding(found, tuple(entry.key for entry in entries), (), accepted=entries)


COUNTS = Counts(sound=3, unsound=2, crashed=1, samples=4, overloads=5, instances=90)
CLEAN = GateResult(
    Report("2.13.0", 7, (2, 3), "gloo", Counts(sound=3, instances=9, overloads=2)),
    judged=("aten.add.Tensor", "aten.mul.Tensor"),
    seconds=1.5,
)
NOTHING = GateResult(Report("2.13.0", 0, (2,), "none", Counts()), trouble=("nothing was tested",))
SEEN = finding("aten.gather.default", "S(1)", reason=RAISES)
UNTIL = BaselineEntry(key(SEEN, "bool"), "reported upstream, 100 % known", dt.date(2027, 1, 31))
GONE = BaselineEntry(FindingKey("aten.sort.default", "S(0) -> S(0)", "real", "1 axis"), "as torch had it")
FULL = GateResult(
    Report(
        "2.13.0", 7, (2, 3), "gloo", COUNTS, crashed=(Crash("aten.var.correction", "var(f64[2])", "KeyError: 'x'", "Tr"),)
    ),
    (
        new(finding(), "real", "complex", place=SourceLine("my ops/rules.py", 12)),
        new(finding(placements="S(1)", reason=RAISES)),
        known(SEEN, UNTIL, BaselineEntry(key(SEEN), "for good")),
    ),
    (GONE,), (UNTIL,), (("aten.topk.default", "the budget of 300 s was spent"),),
    (ChosenOverload("aten.cumprod.default", "its rule function cumprod_rule changed"),), ("a worker was killed twice",), 12.34567,
    judged=("aten.cumprod.default", "aten.gather.default", "aten.sort.default", "aten.add.Tensor"),
    unseen=(GONE,), remembered=("aten.add.Tensor",), notes=("no rule of this file is registered",),
)  # fmt: skip


ONE_FUNCTION = replace(
    CLEAN,
    findings=(
        new(
            finding(), "real", "complex", place=SourceLine("my_ops/rules.py", 12), function="rule (my_ops/rules.py:12)"
        ),
        new(finding(placements="S(1)", reason=RAISES), function="rule (my_ops/rules.py:12)"),
        new(finding("aten.cumsum.default"), function="rule (my_ops/rules.py:12)"),
    ),
)
"""Three forms of one mistake, on four keys."""


def hostile():
    """Every text that a user's op, rule, error or reason may bring along, at its worst."""
    bad = finding(
        "my.bad.default", reason=HOSTILE, title=f"my.bad.default on {HOSTILE}", sample=(HOSTILE,), picture=HOSTILE
    )
    told = BaselineEntry(FindingKey("my.old.default", HOSTILE, "real", "1 axis"), HOSTILE)
    return GateResult(
        Report(HOSTILE, 0, (2,), "gloo", COUNTS, crashed=(Crash("my.bad.default", HOSTILE, HOSTILE, HOSTILE),)),
        (new(bad, place=SourceLine("a b,c:d%\n.py", 3)), known(finding("my.old.default"), told)),
        (replace(told, key=replace(told.key, dtypes="bool")),), (told,), (("my.slow.default", HOSTILE),), (ChosenOverload("my.bad.default", HOSTILE),), (HOSTILE,), 0.0, (told,),
        notes=(HOSTILE,),
    )  # fmt: skip


def huge(count=6_000):
    """More than any reader takes."""
    many = tuple(new(finding(f"my.op_{i}.default"), place=SourceLine("r.py", i + 1)) for i in range(count))
    old = tuple(known(f := finding(f"my.old_{i}.default"), BaselineEntry(key(f), "old")) for i in range(20))
    return replace(CLEAN, findings=(*old, *many))


def unasked():
    """A registration that torch never asks, as the gate judges it."""
    found = ignored_finding("my.scale.default", SINGLE_DIM_FIRST)
    return replace(CLEAN, findings=(ReviewedFinding(found, keys_of(found), keys_of(found), SourceLine("rules.py", 4)),))


EVERY = {
    "unasked": unasked,
    "clean": lambda: CLEAN,
    "nothing": lambda: NOTHING,
    "full": lambda: FULL,
    "hostile": hostile,
    "one function": lambda: ONE_FUNCTION,
    "huge": huge,
}
