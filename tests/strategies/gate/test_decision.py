import datetime as dt
import json
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
from torch.distributed.tensor import Replicate, Shard

from strategies.gate import decision
from strategies.gate.baseline import Baseline, BaselineEntry, FindingKey, GateResult, SourceLine
from strategies.gate.decision import RunCoverage, amend_baseline, decide, keys_of, new_keys, rule_name
from strategies.gate.formats.json_output import as_json
from strategies.gate.formats.wording import what_happens
from strategies.model.rule import Program, Rule
from strategies.model.verdict import Counts, Crash, Finding, Report, Verdict
from strategies.sweep.report.text_and_json import is_silent
from tests.strategies.cases import numbers, sample

OP = "my.scale.default"
TODAY = dt.date(2026, 11, 21)
KIND = ("real", "1 axis")
KEY = FindingKey(OP, "S(0) -> S(0)", *KIND)


def finding(dim=0, verdict=Verdict.UNSOUND, kinds=(KIND,), op=OP, **more):
    rule = Rule(op, (Shard(dim),), (Shard(dim),))
    return Finding(
        rule, 2, verdict, "differs at [0]: got 1, expected 2", ("f64[2]",), "#1", "gloo", kinds=kinds, **more
    )


def report(*findings, **more):
    facts = {"counts": Counts(instances=9), "findings": findings, **more}
    return Report("2.13.0", 0, (2,), "gloo", **facts)


def accepted(*entries, torch="2.13.0"):
    return Baseline(Path("b.json"), torch, entries, "text")


def entry(key=KEY, reason="known", expires=None):
    return BaselineEntry(key, reason, expires)


ALL = RunCoverage(frozenset({OP}), frozenset({OP}), frozenset(
    (OP, dtypes, mesh, trial)
    for dtypes in ("real", "bool") for mesh, trial in (("1 axis", "alone"), ("1 axis", "pairs"), ("2 axes", "meshes"))
))  # fmt: skip
"""A run that has tried all there is of `OP`."""


def gated(*findings, baseline=None, tried=ALL, today=TODAY, **more):
    return decide(report(*findings, **more), baseline or accepted(), tried, today)


# Keys.


def test_a_key_is_the_rule_without_its_overload_for_each_kind():
    found = finding(kinds=(("real", "2 axes"), ("bool", "1 axis")))
    assert keys_of(found) == (
        FindingKey(OP, "S(0) -> S(0)", "bool", "1 axis"),
        FindingKey(OP, "S(0) -> S(0)", "real", "2 axes"),
    )


def test_a_finding_of_no_known_kind_has_a_key_all_the_same():
    assert keys_of(finding(kinds=())) == (FindingKey(OP, "S(0) -> S(0)", "any", "any"),)


@pytest.mark.parametrize("mesh", [(2, 2), (2, 3), (3,)])
def test_the_sizes_of_a_mesh_are_not_in_a_key(mesh):
    inputs = ((Shard(0), Replicate())[: len(mesh)],)
    program = Program(sample("cumsum.default", numbers(4, 4), 1), mesh, inputs, "sum")
    found = finding(op="aten.cumsum.default", title=str(program), mesh=mesh)
    assert rule_name(found) == ("(S(0), R), then sum" if len(mesh) == 2 else "S(0), then sum")


# New and accepted.


def test_what_no_one_has_accepted_fails():
    result = gated(finding())
    assert [judged.new for judged in result.new] == [(KEY,)]
    assert result.exit_code == 1


def test_what_is_accepted_does_not_fail_and_is_reported():
    result = gated(finding(), baseline=accepted(entry()))
    assert (result.new, result.exit_code) == ((), 0)
    assert result.findings[0].accepted == (entry(),)


def test_a_rule_that_is_accepted_for_one_class_of_dtypes_is_new_for_another():
    result = gated(finding(kinds=(("bool", "1 axis"), KIND)), baseline=accepted(entry()))
    (judged,) = result.new
    assert (judged.new, judged.accepted) == ((replace(KEY, dtypes="bool"),), (entry(),))


@pytest.mark.parametrize("other", [
    replace(KEY, op="my.other.default"), replace(KEY, rule="S(1) -> S(1)"), replace(KEY, mesh="2 axes"),
])  # fmt: skip
def test_no_part_of_a_key_stands_for_another(other):
    assert gated(finding(), baseline=accepted(entry(other))).exit_code == 1


def test_suspects_are_no_findings_of_the_gate():
    result = gated(finding(verdict=Verdict.SUSPECT), finding(1, Verdict.MISSING))
    assert (result.findings, result.exit_code) == ((), 0)


def test_findings_stay_in_the_order_of_the_report_and_have_their_places():
    lines = {OP: SourceLine("rules.py", 7)}
    result = decide(report(finding(1), finding(0)), accepted(), ALL, TODAY, places=lines.get)
    assert [judged.finding.rule.inputs[0].dim for judged in result.findings] == [1, 0]
    assert {judged.place for judged in result.findings} == {SourceLine("rules.py", 7)}


def test_an_ignored_registration_is_new_until_it_is_accepted():
    result = gated(ignored=((OP, "it is never used"),))
    (judged,) = result.new
    assert (judged.new, result.exit_code) == ((FindingKey(OP, "ignored", "any", "any"),), 1)
    assert "never used" in judged.finding.reason
    assert gated(ignored=((OP, "it is never used"),), baseline=accepted(entry(judged.new[0]))).exit_code == 0


def test_an_ignored_registration_reads_like_a_finding():
    (judged,) = gated(ignored=((OP, "it is never used"),)).new
    assert judged.finding.name == f"{OP}: ignored"
    assert is_silent(judged.finding) and what_happens(judged) == judged.finding.reason


# Dates.


@pytest.mark.parametrize(("day", "code"), [(TODAY, 0), (TODAY - dt.timedelta(1), 1), (TODAY + dt.timedelta(1), 0)])
def test_an_entry_counts_until_its_last_day_is_over(day, code):
    result = gated(finding(), baseline=accepted(entry(expires=day)))
    assert result.exit_code == code
    assert result.expired == ((entry(expires=day),) if code else ())


def test_an_expired_entry_that_no_longer_shows_is_gone_and_not_expired():
    old = entry(expires=TODAY - dt.timedelta(9))
    result = gated(baseline=accepted(old))
    assert (result.gone, result.expired) == ((old,), ())


# Gone.


def test_an_entry_that_was_tried_and_does_not_show_fails():
    result = gated(baseline=accepted(entry()))
    assert (result.gone, result.exit_code) == ((entry(),), 1)


def test_an_entry_that_is_suspected_and_not_confirmed_this_time_is_not_gone():
    assert gated(finding(verdict=Verdict.SUSPECT), baseline=accepted(entry())).gone == ()


UNTRIED = {
    "another overload": (replace(KEY, op="my.other.default"), ALL),
    "an overload that was begun and not finished": (KEY, RunCoverage(frozenset({OP}))),
    "a class of dtypes without a sample": (replace(KEY, dtypes="complex"), ALL),
    "a mesh that was not asked for": (replace(KEY, mesh="3 axes"), ALL),
    "what follows an op, without --pairs": (replace(KEY, rule="S(0), then sum"),
        replace(ALL, slots=frozenset(slot for slot in ALL.slots if slot[3] != "pairs"))),
    "an ignored registration of an overload that was not tried": (FindingKey(OP, "ignored", "any", "any"),
        RunCoverage()),
}  # fmt: skip


@pytest.mark.parametrize("name", UNTRIED)
def test_what_was_not_tried_is_not_gone(name):
    key, tried = UNTRIED[name]
    result = gated(baseline=accepted(entry(key)), tried=tried)
    assert (result.gone, result.exit_code) == ((), 0)


@pytest.mark.parametrize("key", [
    KEY, replace(KEY, rule="S(0), then sum"), replace(KEY, mesh="2 axes"), FindingKey(OP, "ignored", "any", "any"),
    FindingKey(OP, "S(0) -> S(0)", "any", "any"),
])  # fmt: skip
def test_whatever_was_tried_and_does_not_show_is_gone(key):
    assert gated(baseline=accepted(entry(key))).gone == (entry(key),)


# Crashes.

DIED = Crash(OP, "scale(f64[2])", "the process died with SIGSEGV on a rank's piece")
LATE = Crash(OP, "scale(f64[4])", "no answer within 30 s on the whole tensors")
DEAD, SLOW = FindingKey(OP, "crashed", "any", "any"), FindingKey(OP, "hangs", "any", "any")


def test_a_crash_is_trouble_and_no_finding():
    result = gated(crashed=(DIED, replace(DIED, sample="scale(f64[6])"), LATE))
    assert (result.new, result.exit_code) == ((), 3)
    assert result.trouble == (
        f"{OP} crashed: scale(f64[2]): the process died with SIGSEGV on a rank's piece (and 1 more like it)",
        f"{OP} hangs: scale(f64[4]): no answer within 30 s on the whole tensors",
    )


def test_a_crash_that_is_accepted_is_a_note_and_no_trouble():
    result = gated(crashed=(DIED,), baseline=accepted(entry(DEAD, "torch#2")))
    assert (result.trouble, result.report.crashed, result.exit_code) == ((), (), 0)
    assert result.notes == (f"{DEAD}: accepted: torch#2",)


def test_a_crash_that_is_accepted_does_not_excuse_a_hang():
    result = gated(crashed=(DIED, LATE), baseline=accepted(entry(DEAD)))
    assert (result.report.crashed, result.exit_code) == ((LATE,), 3)


def test_what_is_wrong_outranks_a_crash():
    assert gated(finding(), crashed=(DIED,)).exit_code == 1


def test_a_crash_that_does_not_come_back_fails_nothing():
    result = gated(baseline=accepted(entry(DEAD)))
    assert (result.unseen, result.gone, result.exit_code) == ((entry(DEAD),), (), 0)


def test_nothing_tested_is_trouble():
    result = gated(counts=Counts())
    assert (result.trouble, result.exit_code) == (
        ("nothing was tested: no rule was tried on any sample, and that is not a pass",), 3,
    )  # fmt: skip


# Notes.


def test_where_nothing_is_wrong_no_baseline_is_asked_for():
    result = gated(baseline=Baseline(Path("b.json")))
    assert (result.notes, result.exit_code) == (("b.json is not there: nothing is accepted yet",), 0)


def test_a_baseline_that_is_not_there_is_said():
    result = gated(finding(), baseline=Baseline(Path("b.json")))
    assert (result.notes, result.exit_code) == (
        ("b.json is not there: nothing is accepted yet; --accept REASON writes it",),
        1,
    )


def test_a_baseline_of_another_torch_is_a_note_and_no_error():
    result = gated(finding(), baseline=accepted(entry(), torch="2.12.0"))
    assert (result.notes, result.exit_code) == (("b.json was written under torch 2.12.0, this is torch 2.13.0",), 0)


# What is written.


def entries_after(result, baseline, **how):
    return amend_baseline(baseline, result, **{"remove": False, **how}).entries


def test_an_update_removes_what_is_gone_and_adds_nothing():
    held = accepted(entry(), entry(DEAD))
    result = gated(finding(1), baseline=held)
    assert entries_after(result, held, remove=True) == ()


def test_an_update_leaves_what_was_not_tried_and_what_has_expired():
    other, old = entry(replace(KEY, op="my.other.default")), entry(expires=TODAY - dt.timedelta(1))
    held = accepted(other, old)
    assert entries_after(gated(finding(), baseline=held), held, remove=True) == (other, old)


def test_to_accept_adds_what_is_new_with_the_reason_and_removes_nothing():
    held = accepted(entry(replace(KEY, rule="S(1) -> S(1)")))
    result = gated(finding(), crashed=(DIED,), ignored=((OP, "it is never used"),), baseline=held)
    day = dt.date(2027, 1, 1)
    after = amend_baseline(held, result, remove=False, reason="why", expires=day)
    assert set(after.entries) - set(held.entries) == {
        BaselineEntry(key, "why", day) for key in (KEY, DEAD, FindingKey(OP, "ignored", "any", "any"))
    }
    assert set(held.entries) <= set(after.entries)
    again = decide(report(finding(), crashed=(DIED,), ignored=((OP, "it is never used"),)), after, ALL, TODAY)
    assert (again.new, again.trouble) == ((), ())


def test_to_accept_again_what_has_expired_gives_it_the_new_reason_and_day():
    held = accepted(entry(expires=TODAY - dt.timedelta(1)))
    result = gated(finding(), baseline=held)
    assert entries_after(result, held, reason="still") == (BaselineEntry(KEY, "still"),)


def test_to_accept_leaves_the_reason_of_what_is_accepted():
    held = accepted(entry())
    result = gated(finding(), finding(1), baseline=held)
    assert entries_after(result, held, reason="why") == (
        entry(),
        BaselineEntry(replace(KEY, rule="S(1) -> S(1)"), "why"),
    )


def test_nothing_tested_cannot_be_accepted():
    result = gated(counts=Counts())
    assert new_keys(result) == () and entries_after(result, accepted(), reason="why") == ()


def test_rules_of_keys_that_are_no_rules_are_in_the_words_of_the_schema():
    text = (Path(decision.__file__).parents[1] / "schema/baseline.json").read_text()
    assert [word for word in (decision.IGNORED, decision.CRASHED, decision.HANGS) if f"`{word}`" not in text] == []


def test_keys_of_what_is_no_rule_obey_the_schema_of_the_result():
    found = gated(
        ignored=((OP, "it is never used"),),
        crashed=(DIED,),
        baseline=accepted(entry(SLOW), entry(FindingKey(OP, "x", "any", "any"))),
    )
    schema = json.loads((Path(decision.__file__).parents[1] / "schema/gate.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(json.loads(as_json(found)))
    assert (len(found.new), len(found.unseen), len(found.gone)) == (1, 1, 1)


def test_the_result_names_all_that_was_tried():
    assert gated(tried=replace(ALL, any=frozenset({"b", "a"}))).judged == ("a", "b")
    assert isinstance(gated(), GateResult)
