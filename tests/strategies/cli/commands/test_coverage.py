"""`localtensor coverage`: what a journal says of each overload, and the exit codes."""

import json

import pytest

from localtensor.errors import LocalTensorError
from strategies.base.journal import open_journal
from strategies.base.options import BadOption
from strategies.cli.commands import coverage
from strategies.cli.commands.coverage import coverage_of_lines, run
from strategies.cli.options import CoverageOptions
from strategies.model.verdict import Crash, WorkUnit
from strategies.torch_api import user_modules
from strategies.torch_api.user_modules import RegisteredOverload
from strategies.validation import finding
from strategies.validation import finding as findings
from strategies.validation.finding import RuleOutcome, TaskResult, finding_of_instance
from tests.strategies.validation.test_finding_candidate import instance

CUMPROD, NEG, MM = "aten.cumprod.default", "aten.neg.default", "aten.mm.default"
RULE = f"{CUMPROD}: S(1) -> S(1)"
BEGIN = {
    "torch": "2.13.0", "seed": 0, "ranks": [2], "confirm": "none", "device": "cpu", "ops": [CUMPROD, NEG],
    "trials": [["alone", [2]]], "ignored": [],
}  # fmt: skip


def line(op=CUMPROD, trial="alone", mesh=(2,), **what):
    return {**finding.task_line(TaskResult(WorkUnit(op, trial, "real", mesh), **what), 0.1), "run": "r"}


def settled(name=RULE, *, cleared=False):
    finding = None if cleared else finding_of_instance(instance(), "it is wrong")
    return {**findings.outcome_line(RuleOutcome(name, finding)), "run": "r"}


LINES = [
    line(samples=3, sound={RULE}), line(mesh=(3,), samples=2, untestable={"odd": "means nothing"}), line(NEG), settled(),
]  # fmt: skip


@pytest.fixture
def members(monkeypatch):
    kinds = [RegisteredOverload(op, "single-dim strategy") for op in (CUMPROD, MM, NEG)]
    monkeypatch.setattr(user_modules, "all_registered_overloads", lambda device: kinds if device == "cpu" else [])


def written(path, *lines, **begin):
    with open_journal(path, resume=False) as journal:
        journal.begin({**BEGIN, **begin})
        for one in lines:
            journal.add(one)
    return path


def ran(capsys, journal, json_file=None):
    """The exit code, what was printed, and what went wrong."""
    try:
        code = run(CoverageOptions(journal, json_file, workers=1, quiet=True))
    except BadOption as error:  # as the command line does
        return 2, "", f"{error}\n"
    told = capsys.readouterr()
    return code, told.out, told.err


# Lines.


def test_samples_add_up_over_meshes_and_verdicts_are_those_met():
    found = coverage_of_lines(LINES)
    assert sorted(found) == [CUMPROD, NEG]
    assert (found[CUMPROD].samples, found[CUMPROD].verdicts) == (5, {"sound", "unsound"})
    assert (found[NEG].samples, found[NEG].verdicts, found[NEG].reasons) == (0, frozenset(), ())


def test_reasons_are_those_of_rules_samples_crashes_and_findings_each_once():
    told = line(untestable={"a": "no such dim", "b": "no such dim"}, skipped={"it refuses": 2},
                crashed=[Crash(CUMPROD, "x", "died")])  # fmt: skip
    assert coverage_of_lines([told, told, settled()])[CUMPROD].reasons == (
        "no such dim",
        "it refuses",
        "died",
        "it is wrong",
    )


def test_what_a_real_run_cleared_is_sound():
    assert coverage_of_lines([line(samples=1), settled(cleared=True)])[CUMPROD].verdicts == {"sound"}


def test_programs_say_nothing_of_a_rule():
    lines = [line(samples=1), line(trial="meshes", mesh=(2, 2), samples=7, sound={"x"}),
             line(NEG, trial="pairs", samples=7), settled(f"{CUMPROD} on (2, 2): (S(1), R)")]  # fmt: skip
    found = coverage_of_lines(lines)
    assert (sorted(found), found[CUMPROD].samples, found[CUMPROD].verdicts) == ([CUMPROD], 1, frozenset())


# The command.


@pytest.mark.usefixtures("members")
def test_the_table_of_a_journal_and_the_same_as_json(tmp_path, capsys):
    code, out, errors = ran(capsys, written(tmp_path / "j", *LINES), tmp_path / "t.json")
    assert (code, errors) == (0, "")
    body = json.loads((tmp_path / "t.json").read_text())
    assert (body["torch"], body["device"]) == ("2.13.0", "cpu")
    assert MM in json.dumps(body) and MM in out


@pytest.mark.usefixtures("members")
def test_a_journal_in_which_nothing_was_tried_is_no_success(tmp_path, capsys):
    assert ran(capsys, written(tmp_path / "j", line(), line(NEG)))[0] == 3
    assert ran(capsys, written(tmp_path / "k"))[0] == 3


@pytest.mark.parametrize(("data", "said"), [
    (None, "it cannot be read (No such file or directory)"), (b"a letter\nto somebody\n", "line 1 is no line of a journal"),
    (b"", "it does not begin as a journal does"),
], ids=["no file", "a letter", "empty"])  # fmt: skip
def test_what_is_no_journal_is_usage_in_one_sentence(data, said, tmp_path, capsys):
    if data is not None:
        (tmp_path / "j").write_bytes(data)
    code, out, errors = ran(capsys, tmp_path / "j")
    assert (code, out) == (2, "") and said in errors
    assert errors.startswith(f"localtensor coverage: JOURNAL: {tmp_path / 'j'}: ")
    assert errors.count("\n") == 1


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"kind": "begin", "format": 1}', "line 2 begins another run. It was changed by something else: start anew."),
        ('{"kind": "unit", "unit": 3}', "line 2 does not hold what a journal's does: it.unit is 3. It was changed by"),
        ('{"kind": "unit", "unit": "x"}', "a line does not hold what a journal's does (ValueError: "),
    ],
)
def test_a_journal_of_somebody_else_is_usage_in_one_sentence(line, said, tmp_path, capsys):
    first = '{"kind": "begin", "format": 1, "torch": "2.13.0"}'
    (tmp_path / "j").write_text(f"{first}\n{line}\n")
    code, out, errors = ran(capsys, tmp_path / "j")
    assert (code, out) == (2, "") and errors.startswith("localtensor coverage: JOURNAL: ") and errors.count("\n") == 1
    assert said in errors


@pytest.mark.usefixtures("members")
def test_a_table_that_cannot_be_written_is_said(tmp_path, capsys):
    code, _, errors = ran(capsys, written(tmp_path / "j", *LINES), tmp_path)
    assert (code, errors) == (2, f"localtensor coverage: --json: {tmp_path}: this is a folder. Name a file.\n")


@pytest.mark.usefixtures("members")
def test_a_full_disk_does_not_cost_the_table(tmp_path, capsys, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(coverage, "write_whole", full)
    file = tmp_path / "c.json"
    code, out, errors = ran(capsys, written(tmp_path / "j", *LINES), file)
    assert (code, errors) == (3, f"localtensor coverage: cannot write {file}: No space left on device.\n")
    assert "Not exercised:" in out


@pytest.mark.usefixtures("members")
def test_without_a_journal_everything_is_tried_now(monkeypatch, capsys):
    asked = []

    def put_on_trial(settings, journal, progress):
        asked.append((settings.everything, settings.ranks, settings.seed, settings.workers, settings.journal))
        journal.begin(BEGIN)
        for one in LINES:
            journal.add(one)
        return ()

    monkeypatch.setattr(coverage, "run_validation", put_on_trial)
    code, out, _ = ran(capsys, None)
    assert (code, asked) == (0, [(True, (2, 3), 0, 1, None)]) and out


def test_a_failure_of_our_own_is_no_verdict(monkeypatch, capsys):
    def put_on_trial(*_):
        raise LocalTensorError("no room")

    monkeypatch.setattr(coverage, "run_validation", put_on_trial)
    code, _, errors = ran(capsys, None)
    assert (code, errors) == (3, "localtensor itself failed: no room\n")


def test_what_was_left_out_is_listed_on_request(tmp_path, capsys, members):
    journal = written(
        tmp_path / "s.jsonl", line(samples=3, sound={RULE}, left_out={"forms that do not apply": ["even"]})
    )
    for asked in (False, True):
        assert run(CoverageOptions(journal, tmp_path / "c.json", left_out=asked)) == 0
        assert ("real: forms that do not apply: even" in capsys.readouterr().out) is asked
        body = json.loads((tmp_path / "c.json").read_text())
        assert body["left_out"] == {CUMPROD: {"real": {"forms that do not apply": ["even"]}}}
