"""The table: every member counted, every one without a verdict with its reason."""

import io
import json
from dataclasses import replace

from rich.console import Console

from strategies.model.verdict import LeftOut
from strategies.sweep.coverage import (
    ABSENT,
    UNDECIDED,
    UNTRIED,
    OverloadCoverage,
    SweepCoverage,
    as_json,
    coverage_table,
    left_out_of,
    render,
)
from strategies.torch_api.user_modules import RegisteredOverload

MEMBERS = [
    RegisteredOverload("aten.add.Tensor", "single-dim strategy"),
    RegisteredOverload("aten.add.out", "single-dim strategy"),
    RegisteredOverload("aten.neg.default", "single-dim strategy"),
    RegisteredOverload("aten.sub.out", "single-dim strategy"),
    RegisteredOverload("aten.zzz.default", "single-dim strategy", "no kernel for CPU"),
]
TRIED = {
    "aten.add.Tensor": OverloadCoverage(3, frozenset({"sound", "unsound"})),
    "aten.add.out": OverloadCoverage(2, frozenset({"untestable"}), ("", "DTensor's own rule raises")),
    "aten.neg.default": OverloadCoverage(0, reasons=("it refuses all calls",)),
    "aten.mm.dtype": OverloadCoverage(4, frozenset({"sound"})),
}


def made() -> SweepCoverage:
    return coverage_table([m for m in MEMBERS if m.op != "aten.zzz.default"] + [UNABLE], TRIED, torch="2.13.0")


UNABLE = RegisteredOverload(
    "aten._scaled_dot_product_flash_attention.default", "single-dim strategy", "no kernel for CPU"
)


def test_each_member_is_counted_in_its_family():
    rows = {row.family: (row.registered, row.able, row.exercised, row.decided) for row in made().rows}
    assert rows == {"forward": (3, 2, 1, 1), "out=": (2, 2, 1, 0)}


def test_the_total_adds_up():
    total = made().total
    assert (total.registered, total.able, total.exercised, total.decided) == (5, 4, 2, 1)
    assert (made().share, made().decided_share) == (0.5, 0.25)


def test_nothing_is_silently_absent():
    told = made()
    assert [(r.text, r.ops) for r in told.cannot] == [("no kernel for CPU", (UNABLE.op,))]
    assert [(r.text, r.ops) for r in told.unexercised] == [
        ("it refuses all calls", ("aten.neg.default",)),
        (ABSENT, ("aten.sub.out",)),
    ]
    assert [(r.text, r.ops) for r in told.undecided] == [("DTensor's own rule raises", ("aten.add.out",))]


def test_every_member_without_a_verdict_has_one_reason():
    told = made()
    reasons = [op for r in (*told.cannot, *told.unexercised, *told.undecided) for op in r.ops]
    assert len(reasons) == len(set(reasons)) == told.total.registered - told.total.decided


def test_overloads_beside_the_registered_ones_are_counted_apart():
    assert made().others == 1


def test_what_the_journal_does_not_name_is_distinguished_from_what_had_no_sample():
    members = [RegisteredOverload(name, "") for name in ("aten.sin.default", "aten.cos.default")]
    found = coverage_table(members, {"aten.sin.default": OverloadCoverage()}, torch="2.13.0").unexercised
    assert {(reason.text, reason.ops) for reason in found} == {
        (UNTRIED, ("aten.sin.default",)),
        (ABSENT, ("aten.cos.default",)),
    }


def test_a_reason_that_many_share_comes_first():
    members = [RegisteredOverload(f"aten.{name}.default", "") for name in ("abs", "cos", "sin")]
    tried = {m.op: OverloadCoverage(reasons=("rare" if "abs" in m.op else "usual",)) for m in members}
    assert [r.text for r in coverage_table(members, tried, torch="2.13.0").unexercised] == ["usual", "rare"]


def test_what_was_tried_in_vain_has_a_reason_too():
    told = coverage_table(
        [RegisteredOverload("aten.abs.default", "")],
        {"aten.abs.default": OverloadCoverage(1, frozenset({"suspect"}))},
        torch="2.13.0",
    )
    assert [r.text for r in told.undecided] == [UNDECIDED]


def test_no_members_is_all_of_them():
    assert coverage_table([], {}, torch="2.13.0").share == 1.0


def test_json_says_the_same_each_time():
    body = json.loads(as_json(made()))
    assert as_json(made()) == as_json(made())
    assert body["total"]["registered"] == 5
    assert body["share"] == 0.5
    assert body["unexercised"][0] == {"text": "it refuses all calls", "ops": ["aten.neg.default"]}


def text(coverage: SweepCoverage, *, left_out: bool = False) -> str:
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(render(coverage, left_out=left_out))
    return console.export_text()


def test_a_person_sees_the_table_and_every_reason():
    shown = text(made())
    assert "DTensor's registered overloads in torch 2.13.0 on cpu" in shown
    assert "50.0 % exercised, 25.0 % with a Sound or an Unsound verdict" in shown
    for reason in ("no kernel for CPU", "it refuses all calls", ABSENT, "DTensor's own rule raises"):
        assert reason in shown
    assert "aten.sub.out" in shown


def test_all_but_one_of_many_is_not_all():
    members = [RegisteredOverload(op, "") for op in ("aten.abs.default", "aten.cos.default")] * 1000
    tried = {
        "aten.abs.default": OverloadCoverage(1, frozenset({"sound"})),
        "aten.cos.default": OverloadCoverage(1, frozenset({"sound"})),
    }
    told = coverage_table([*members, RegisteredOverload("aten.sin.default", "")], tried, torch="2.13.0")
    assert "99.9 % exercised" in text(told)


# What was left out.

LINES = [
    {"kind": "unit", "unit": "aten.b.default alone real 2", "left_out": {"forms that do not apply": ["x", "y"]}},
    {"kind": "unit", "unit": "aten.b.default pairs real 2", "left_out": {"steps without a turn": ["sgd"]}},
    {"kind": "unit", "unit": "aten.a.default alone bool 3", "left_out": {"placement tuples": ["7 of 9 not drawn"]}},
    {"kind": "unit", "unit": "aten.b.default alone real 3", "left_out": {"forms that do not apply": ["y", "z"]}},
    {"kind": "unit", "unit": "aten.c.default alone real 3"},
    {"kind": "settled", "rule": "x", "left_out": {"no": ["no"]}},
]
LEFT = left_out_of(LINES)


def test_what_was_left_out_is_by_overload_and_class_of_dtypes_each_name_once():
    assert (
        LeftOut("aten.a.default", "bool", "placement tuples", ("7 of 9 not drawn",)),
        LeftOut("aten.b.default", "real", "forms that do not apply", ("x", "y", "z")),
        LeftOut("aten.b.default", "real", "steps without a turn", ("sgd",)),
    ) == LEFT


def test_what_was_left_out_is_in_the_json_and_on_request_in_the_text():
    coverage = replace(made(), left_out=LEFT)
    assert json.loads(as_json(coverage))["left_out"] == {
        "aten.a.default": {"bool": {"placement tuples": ["7 of 9 not drawn"]}},
        "aten.b.default": {"real": {"forms that do not apply": ["x", "y", "z"], "steps without a turn": ["sgd"]}},
    }
    assert "aten.a.default" not in text(coverage)
    shown = text(coverage, left_out=True)
    assert shown.startswith(text(coverage).rstrip())
    assert "aten.a.default\n  bool: placement tuples: 7 of 9 not drawn\naten.b.default\n  real: forms" in shown
    assert "  real: steps without a turn: sgd" in shown and shown.count("aten.b.default") == 1
