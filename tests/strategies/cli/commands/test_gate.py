import datetime as dt
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from torch.distributed.tensor import Shard

from localtensor.errors import LocalTensorError
from strategies.cli.commands import gate
from strategies.cli.commands.gate import run
from strategies.gate import baseline
from strategies.gate import plan as gate_work
from strategies.gate.baseline import BaselineEntry, FindingKey
from strategies.gate.decision import RunCoverage
from strategies.gate.options import GateOptions
from strategies.gate.plan import GateFindings
from strategies.model.rule import Rule
from strategies.model.settings import BadSetting
from strategies.model.verdict import Counts, Crash, Finding, Report, Verdict
from tests.strategies import users

OP = "my.scale.default"
KEY = FindingKey(OP, "S(0) -> S(0)", "real", "1 axis")
FOUND = Finding(
    Rule(OP, (Shard(0),), (Shard(0),)), 2, Verdict.UNSOUND, "differs at [0]: got 1, expected 2", ("f64[2]",), "#1", "gloo",
    kinds=(("real", "1 axis"),),
)  # fmt: skip
REPORT = Report("2.13.0", 0, (2,), "gloo", Counts(instances=9, overloads=1))
ALL = RunCoverage(frozenset({OP}), frozenset({OP}), frozenset({(OP, "real", "1 axis", "alone")}))
CLEAN = GateFindings(REPORT, ALL, Path("/"))
WRONG = replace(CLEAN, report=replace(REPORT, findings=(FOUND,)))
DEAD = replace(CLEAN, report=replace(REPORT, crashed=(Crash(OP, "scale(f64[2])", "the process died with SIGSEGV"),)),
               tried=RunCoverage(frozenset({OP})))  # fmt: skip
FILE = Path("localtensor-baseline.json")


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    with users.undone():
        yield


@pytest.fixture
def gated(monkeypatch, capsys):
    """`gated(work, **options)`: exit code, standard output and error of a gate that finds this, or raises it."""

    def go(found, **options):
        def answer(*_):
            if isinstance(found, BaseException):
                raise found
            return replace(found, top=Path.cwd())

        monkeypatch.setattr(gate_work, "run_plan", answer)
        monkeypatch.setattr(gate_work, "make_plan", lambda *_: None)
        return run(GateOptions(rules="my_rules", quiet=True, **options)), *capsys.readouterr()

    return go


def accept(*entries):
    baseline.write(baseline.Baseline(FILE, entries=entries), "2.13.0")


def held():
    return baseline.read(FILE).entries


# The table.


def test_0_nothing_wrong(gated):
    accept()
    code, out, errors = gated(CLEAN)
    assert (code, errors) == (0, "") and out.startswith("gate passed: 0 new, 0 accepted, 0 gone; 9 rule instances")


def test_0_what_is_wrong_is_accepted(gated):
    accept(BaselineEntry(KEY, "known"))
    code, out, _ = gated(WRONG)
    assert code == 0 and "1 accepted" in out


def test_0_nothing_had_to_be_judged(gated):
    note = "no rule changed since HEAD: nothing had to be judged (3 overloads unchanged)"
    idle = GateFindings(replace(REPORT, counts=Counts()), RunCoverage(), Path("/"), notes=(note,), idle=True)
    accept(BaselineEntry(KEY, "known"))
    code, out, _ = gated(idle)
    assert code == 0 and f"note {note}\n" in out and held() == (BaselineEntry(KEY, "known"),)


def test_1_what_no_one_has_accepted(gated):
    code, out, _ = gated(WRONG)
    assert code == 1 and "gate failed: 1 new" in out
    assert "note localtensor-baseline.json is not there: nothing is accepted yet" in out


def test_1_what_is_gone_and_still_accepted(gated):
    accept(BaselineEntry(KEY, "known"))
    code, out, _ = gated(CLEAN)
    assert code == 1 and f"gone, run --update {KEY}: known" in out and held() == (BaselineEntry(KEY, "known"),)


def test_2_a_baseline_that_is_none(gated):
    FILE.write_text("[]")
    assert gated(AssertionError("no work is done")) == (
        2, "", f"localtensor gate: --baseline: {FILE}: it is no baseline of localtensor. Name another file by --baseline.\n",
    )  # fmt: skip


def test_2_a_day_that_is_past(gated):
    code, _, errors = gated(AssertionError("no work is done"), accept="x", expires="2020-01-01")
    assert code == 2 and errors.startswith("localtensor gate: --expires: 2020-01-01: that day is past (today is ")


def test_2_what_the_validation_refuses_is_reported_as_the_gates_own(gated):
    assert gated(BadSetting("--ranks", 1, "too few", "Pass 2.")) == (
        2, "", "localtensor gate: --ranks: 1: too few. Pass 2.\n"
    )  # fmt: skip


def test_3_a_crash(gated):
    code, out, _ = gated(DEAD)
    assert code == 3 and f"trouble {OP} crashed: scale(f64[2]): the process died with SIGSEGV" in out


def test_3_nothing_tested(gated):
    code, out, _ = gated(replace(CLEAN, report=replace(REPORT, counts=Counts()), tried=RunCoverage()))
    assert code == 3 and "trouble nothing was tested" in out


def test_3_our_own_failure(gated):
    assert gated(LocalTensorError("Pool: it did not start.")) == (
        3, "", "localtensor itself failed: Pool: it did not start.\n"
    )  # fmt: skip


def test_3_a_file_that_cannot_be_written_after_all(gated, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device", "g.json")

    monkeypatch.setattr(gate, "write_whole", full)
    code, out, errors = gated(WRONG, json=Path("g.json"))
    assert (code, errors) == (3, "localtensor gate: cannot write g.json: No space left on device.\n")
    assert "gate failed: 1 new" in out  # what was found is shown all the same


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ZeroDivisionError("ours")])
def test_what_is_no_refusal_goes_on_to_the_caller_and_the_baseline_stays(error, gated):
    accept(BaselineEntry(KEY, "known"))
    before = FILE.read_bytes()
    with pytest.raises(type(error)):
        gated(error, update=True, accept="why")
    assert FILE.read_bytes() == before and sorted(Path.cwd().iterdir()) == [FILE.absolute()]


# The baseline.


def test_to_accept_writes_what_is_new_and_passes(gated):
    code, out, _ = gated(WRONG, accept=" torch#7 ", expires="2999-01-01")
    assert (code, held()) == (0, (BaselineEntry(KEY, "torch#7", dt.date(2999, 1, 1)),))
    assert (
        "done localtensor-baseline.json: 1 entry of 1 rule function written, 0 removed" in out
        and "is not there" not in out
    )


def test_to_accept_a_crash_ends_the_trouble(gated):
    assert gated(DEAD, accept="torch#8")[0] == 0
    assert held() == (BaselineEntry(FindingKey(OP, "crashed", "any", "any"), "torch#8"),)
    assert gated(DEAD)[0] == 0


def test_to_accept_does_not_remove_what_is_gone(gated):
    other = BaselineEntry(replace(KEY, rule="S(1) -> S(1)"), "known")
    accept(other)
    assert gated(WRONG, accept="why")[0] == 1
    assert set(held()) == {other, BaselineEntry(KEY, "why")}


def test_an_update_removes_what_is_gone_and_passes(gated):
    accept(BaselineEntry(KEY, "known"))
    code, out, _ = gated(CLEAN, update=True)
    assert (code, held()) == (0, ()) and "done localtensor-baseline.json: 0 entries written, 1 removed" in out


def test_an_update_adds_nothing(gated):
    accept()
    before = FILE.read_bytes()
    code, out, _ = gated(WRONG, update=True)
    assert code == 1 and "done localtensor-baseline.json stays as it is" in out and FILE.read_bytes() == before


def test_an_update_without_a_baseline_makes_none(gated):
    assert gated(CLEAN, update=True)[0] == 0
    assert not FILE.exists()


def test_both_in_one_run(gated):
    accept(BaselineEntry(replace(KEY, rule="S(1) -> S(1)"), "known"))
    assert gated(WRONG, update=True, accept="why")[0] == 0
    assert held() == (BaselineEntry(KEY, "why"),)


def test_a_baseline_that_changes_meanwhile_is_not_overwritten(gated, monkeypatch):
    accept()
    text = baseline.as_text(baseline.Baseline(FILE, entries=(BaselineEntry(KEY, "theirs"),)), "2.13.0")
    beside = GateFindings.beside
    monkeypatch.setattr(GateFindings, "beside", lambda *given: FILE.write_text(text) and beside(*given))
    code, _, errors = gated(WRONG, accept="ours")
    assert code == 2 and "it changed while the gate ran" in errors and held() == (BaselineEntry(KEY, "theirs"),)


def test_entries_of_overloads_that_are_not_among_those_judged_are_reported(gated):
    accept(*(BaselineEntry(replace(KEY, op=f"my.{name}.default"), "known") for name in "abc"))
    code, out, _ = gated(replace(CLEAN, looked_at=frozenset({OP, "my.b.default"})))
    assert code == 0
    assert "has entries of overloads that are not among those judged here: my.a.default and 1 more" in out
    assert "not among" not in gated(CLEAN)[1]


# Files.


def test_every_file_that_is_asked_for_is_written(gated):
    files = {"junit": "g.xml", "sarif": "g.sarif", "json": "g.json", "summary": "g.md", "comment": "c.md"}
    code, out, _ = gated(WRONG, **{option: Path(name) for option, name in files.items()}, github=True)
    assert json.loads(Path("g.json").read_text())["exit_code"] == code == 1
    assert json.loads(Path("g.sarif").read_text())["version"] == "2.1.0"
    assert Path("g.xml").read_text().startswith("<?xml") and Path("g.md").read_text().startswith("## localtensor gate")
    assert (
        Path("c.md")
        .read_text()
        .startswith("<!-- localtensor gate -->\n### localtensor gate: 1 new wrong rule function")
    )
    assert out.count("::error file=localtensor-baseline.json,line=1") == 1


def test_without_github_nothing_is_annotated(gated):
    assert "::error" not in gated(WRONG)[1]


def test_the_summary_of_a_step_is_added_to_what_is_there(gated, monkeypatch):
    Path("step.md").write_text("before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", "step.md")
    gated(CLEAN, summary=Path("step.md"))
    assert Path("step.md").read_text().startswith("before\n## localtensor gate")
    Path("own.md").write_text("before\n")
    gated(CLEAN, summary=Path("own.md"))
    assert Path("own.md").read_text().startswith("## localtensor gate")


def test_a_reader_that_leaves_early_does_not_change_the_verdict(monkeypatch, gated):
    monkeypatch.setattr(gate.wording, "show", lambda *_, **__: (_ for _ in ()).throw(BrokenPipeError()))
    monkeypatch.setattr(os, "dup2", lambda *_: None)
    monkeypatch.setattr(gate.sys.stdout, "fileno", lambda: 1, raising=False)
    assert gated(WRONG)[0] == 1


def test_standard_output_without_room_is_reported_and_is_no_pass(monkeypatch, gated):
    monkeypatch.setattr(
        gate.wording, "show", lambda *_, **__: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    )
    monkeypatch.setattr(os, "dup2", lambda *_: None)
    monkeypatch.setattr(gate.sys.stdout, "fileno", lambda: 1, raising=False)
    code, _, errors = gated(CLEAN)
    assert (code, errors) == (3, "localtensor gate: cannot write to standard output: No space left on device.\n")
    assert gated(WRONG)[0] == 1


def test_without_a_standard_output_the_exit_code_is_the_verdict(monkeypatch, gated):
    monkeypatch.setattr(gate.sys, "stdout", None)
    assert [gated(WRONG)[0], gated(CLEAN)[0]] == [1, 0]
