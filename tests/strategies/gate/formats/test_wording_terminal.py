import io
from dataclasses import replace

from rich.console import Console
from torch.distributed.tensor import Shard

from strategies.base.progress import with_count
from strategies.gate.baseline import BaselineEntry, ChosenOverload, FindingKey, GateResult, ReviewedFinding, SourceLine
from strategies.gate.decision import ignored_finding
from strategies.gate.formats.wording import MOST, show, verdict_line
from strategies.model.rule import Rule
from strategies.model.verdict import Counts, Finding, Report, Verdict

OP = "my.scale.default"
KEY = FindingKey(OP, "S(0) -> S(0)", "real", "1 axis")
FOUND = Finding(
    Rule(OP, (Shard(0),), (Shard(0),)), 2, Verdict.UNSOUND, "differs at [0]: got 1, expected [bold]2", ("f64[2]",), "#1",
    "gloo", picture="argument 0, S(0)\n  rank 0  [1] of shape (1,)",
)  # fmt: skip
REPORT = Report("2.13.0", 0, (2,), "gloo", Counts(instances=9))
NEW = ReviewedFinding(FOUND, (KEY,), (KEY,), SourceLine("pkg/rules.py", 7))
CLEAN = GateResult(REPORT, judged=(OP,), seconds=1.25)


def shown(result, width=200, **more):
    sink = io.StringIO()
    show(result, Console(file=sink, width=width), **more)
    return sink.getvalue()


def test_a_clean_gate_is_one_line():
    assert shown(CLEAN) == (
        "gate passed: 0 new, 0 accepted, 0 gone; 9 rule instances of 1 overload; torch 2.13.0, 1.2 s\n"
    )


def test_what_is_new_comes_with_rule_reason_place_and_picture():
    text = shown(replace(CLEAN, findings=(NEW,)))
    assert "New: wrong, and not accepted: 1" in text
    for part in (FOUND.name, "real on 1 axis", "scale(f64[2]) on 2 ranks: ", "pkg/rules.py:7", "rank 0  [1] of shape"):
        assert part in text
    assert text.splitlines()[-1].startswith("gate failed: 1 new, 0 accepted, 0 gone; ")


def test_text_of_a_finding_is_no_markup():
    assert "expected [bold]2" in shown(replace(CLEAN, findings=(NEW,)))


def test_forms_of_one_function_count_once_and_expired_ones_are_in_the_total():
    other = replace(FOUND, rule=Rule(OP, (Shard(1),), (Shard(1),)))
    forms = [replace(NEW, function="f"), replace(NEW, finding=other, function="f")]
    text = shown(replace(CLEAN, findings=tuple(forms), expired=(BaselineEntry(KEY, "known"),)))
    assert "New: wrong, and not accepted: 1 (2 forms)" in text
    assert text.splitlines()[-1].startswith("gate failed: 1 new (2 forms), 0 accepted, 0 gone, 1 expired; ")
    accepted = [replace(one, new=(), accepted=(BaselineEntry(KEY, "known"),)) for one in forms]
    assert "0 new, 1 accepted (2 forms), 0 gone;" in shown(replace(CLEAN, findings=tuple(accepted)))
    assert "1 new, 0 accepted, 0 gone;" in shown(replace(CLEAN, findings=(forms[0], accepted[1])))


def test_what_is_accepted_is_counted_and_not_shown():
    text = shown(replace(CLEAN, findings=(replace(NEW, new=(), accepted=(BaselineEntry(KEY, "known"),)),)))
    assert text.startswith("gate passed: 0 new, 1 accepted, 0 gone; ")


def test_an_ignored_registration_is_reported_without_ranks():
    key = FindingKey(OP, "ignored", "any", "any")
    text = shown(replace(CLEAN, findings=(ReviewedFinding(ignored_finding(OP, "it is never used"), (key,), (key,)),)))
    assert f"{OP}: ignored" in text and "never used" in text and "ranks" not in text


def test_each_kind_of_news_has_its_line_in_one_order():
    entry = BaselineEntry(KEY, "known")
    suspect = replace(FOUND, verdict=Verdict.SUSPECT, reason="maybe")
    crash = BaselineEntry(FindingKey(OP, "crashed", "any", "any"), "torch#1")
    text = shown(GateResult(
        replace(REPORT, findings=(suspect,)), gone=(entry,), expired=(entry,), untried=((OP, "no time"),),
        choices=(ChosenOverload(OP, "its rule function f changed"),), trouble=("it died",), unseen=(crash,),
        notes=("good to know",),
    ), done=("b.json: 1 written, 0 removed",))  # fmt: skip
    assert text.splitlines()[:-1] == [
        "Chosen (1):", f"  {OP}: its rule function f changed", f"gone, run --update {KEY}: known",
        f"expired {KEY}: known (until None)", "trouble it died", f"suspect, not confirmed {FOUND.name}: maybe",
        f"not tried {OP}: no time", f"crash did not come back {crash.key}", "note good to know",
        "done b.json: 1 written, 0 removed",
    ]  # fmt: skip


def test_a_line_is_one_line_however_narrow_the_terminal():
    assert [len(shown(replace(CLEAN, notes=("x" * 90,)), width=40).splitlines())] == [2]


def test_a_long_list_is_cut_and_says_so():
    text = shown(replace(CLEAN, notes=tuple(f"number {n}" for n in range(MOST + 5))))
    assert text.count("note number") == MOST and "  ... and 5 more (all of them in --json)" in text


def test_the_verdict_names_what_equal_runs_gave_and_what_was_not_tried():
    said = verdict_line(replace(CLEAN, remembered=(OP,), untried=((OP, ""),), trouble=("x",))).plain
    assert said == (
        "gate in trouble: 0 new, 0 accepted, 0 gone, 1 not tried, 1 in trouble; 9 rule instances of 1 overload, "
        "1 of these from cache; torch 2.13.0, 1.2 s"
    )


def test_colours_are_for_terminals_alone():
    assert "\x1b[" not in shown(replace(CLEAN, findings=(NEW,)))
    sink = io.StringIO()
    show(CLEAN, Console(file=sink, width=200, force_terminal=True, color_system="standard"))
    assert "\x1b[" in sink.getvalue()


def test_things_are_counted_in_words():
    assert [with_count(n, "overload") for n in (0, 1, 2)] == ["0 overloads", "1 overload", "2 overloads"]
