from strategies.gate.decision import RunCoverage
from strategies.gate.plan import NO_TIME, PARTLY_TRIED, coverage_of, run_of_lines
from strategies.model.rule import DTYPE_CLASSES

BEGIN = {
    "torch": "2.13.0", "seed": 0, "ranks": [2], "confirm": "gloo", "ops": ["my.a.default", "my.b.default"],
    "trials": [["alone", [2]], ["meshes", [2, 2]]], "ignored": [],
}  # fmt: skip


def unit(op, dtypes="real", trial="alone", mesh="2", **more):
    return {"kind": "unit", "unit": f"{op} {trial} {dtypes} {mesh}", "samples": 1, "tried": 1, **more}


def every(op, trial="alone", mesh="2", **more):
    return [unit(op, dtypes, trial, mesh, **more) for dtypes in DTYPE_CLASSES]


def whole(op, **more):
    return every(op, **more) + every(op, "meshes", "2,2", **more)


def test_what_was_tried_to_the_end_is_known_by_all_its_slots():
    tried, untried = coverage_of(BEGIN, whole("my.a.default") + whole("my.b.default"))
    assert untried == ()
    assert tried.ops == tried.any == {"my.a.default", "my.b.default"}
    assert ("my.a.default", "bool", "2 axes", "meshes") in tried.slots and len(tried.slots) == 16


def test_what_there_was_no_time_for_is_named():
    tried, untried = coverage_of(BEGIN, [*every("my.a.default")])
    assert untried == (("my.a.default", PARTLY_TRIED), ("my.b.default", NO_TIME))
    assert tried == RunCoverage(frozenset({"my.a.default"}))


def test_an_overload_that_crashed_was_not_tried_to_the_end():
    crash = {"op": "my.a.default", "sample": "", "error": "", "trace": ""}
    lines = whole("my.a.default") + whole("my.b.default")
    lines[0] |= {"crashed": [crash]}
    tried, untried = coverage_of(BEGIN, lines)
    assert (tried.ops, untried) == ({"my.b.default"}, ())
    assert tried.any == {"my.a.default", "my.b.default"}


def test_an_overload_that_crashed_when_it_was_confirmed_was_not_tried_to_the_end():
    settled = {"kind": "settled", "rule": "x", "verdict": "cleared", "crash": ["my.a.default", "", "", ""]}
    tried, _ = coverage_of(BEGIN, [*whole("my.a.default"), *whole("my.b.default"), settled])
    assert tried.ops == {"my.b.default"}


def test_an_overload_of_which_no_rule_was_tried_was_not_tried_to_the_end():
    tried, untried = coverage_of(BEGIN, whole("my.a.default", tried=0) + whole("my.b.default"))
    assert (tried.ops, untried) == ({"my.b.default"}, ())


def test_a_class_without_a_sample_counts_unless_a_crash_may_have_cost_it():
    lines = whole("my.a.default") + whole("my.b.default")
    lines[0]["samples"] = 0
    slot = ("my.a.default", DTYPE_CLASSES[0], "1 axis", "alone")
    captured = {"kind": "captured", "refused": {}}
    assert slot in coverage_of(BEGIN, [*lines, {**captured, "crashed": []}])[0].slots
    assert (
        slot not in coverage_of(BEGIN, [*lines, {**captured, "crashed": [["add", "its samples", "died", ""]]}])[0].slots
    )


def test_lines_that_are_all_there_make_a_report():
    found = run_of_lines(BEGIN, whole("my.a.default") + whole("my.b.default"))
    assert (found.report.counts.instances, found.report.unfinished) == (16, 0)
    assert len(found.lines) == 16 and found.begin is BEGIN
