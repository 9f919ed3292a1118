from dataclasses import replace

import pytest
import torch

from localtensor.layout.spec import parse
from strategies.model.rule import Rule
from strategies.model.verdict import Crash, Finding, Verdict, WorkUnit
from strategies.validation import finding
from strategies.validation.finding import RuleOutcome, TaskResult
from tests.strategies.cases import numbers, sample
from tests.strategies.planted_ops import planted
from tests.strategies.wrong_here import if_cumprod_is_wrong
from tests.tools.cuda import __main__
from tests.tools.cuda.agreement import agreement
from tests.tools.cuda.differs import UNTRIED, Differs, Word, by_op, confirmed, crashes, differing, words

UNIT = WorkUnit("aten.relu.default", "alone", "real", (2,))
NAME = "aten.relu.default: S(0) -> S(0)"


def task(**said):
    return finding.task_line(replace(TaskResult(UNIT), **said), 0.0)


def settled(verdict, reason="got 1, expected 2"):
    rule = Rule("aten.relu.default", (parse("S(0)"),), (parse("S(0)"),))
    return finding.outcome_line(RuleOutcome(NAME, verdict and Finding(rule, 2, verdict, reason, (), "test")))


def test_a_rule_that_is_wrong_on_one_device_only_is_reported_with_its_reason():
    (found,), both = differing([task(sound={NAME})], [task(), settled(Verdict.UNSOUND)])
    assert both == 1
    assert (found.rule, found.cpu, found.cuda) == (NAME, Word("sound"), Word("unsound", "got 1, expected 2"))


def test_what_was_settled_counts_more_than_what_one_unit_said():
    lines = [task(sound={NAME}), settled(Verdict.UNSOUND), task(sound={NAME})]
    assert words(lines)[NAME].verdict == "unsound"
    assert words([task(), settled(None)])[NAME] == Word("sound", "cleared")


def test_equal_verdicts_do_not_differ_whatever_their_reasons():
    assert differing([settled(Verdict.UNSOUND, "a")], [settled(Verdict.UNSOUND, "b")]) == ([], 1)


def test_a_rule_that_one_device_could_not_try_is_none_of_them():
    assert differing([task()], [task(untestable={NAME: "P(max) means nothing"})]) == ([], 0)


def test_a_rule_that_is_wrong_on_cuda_and_that_the_cpu_could_not_try_comes_last(monkeypatch):
    other = "aten.abs.default: S(0) -> S(0)"
    cuda = [task(sound={other}), settled(Verdict.UNSOUND)]
    found, both = differing([task() | {"suspects": {other: []}}], cuda)
    assert both == 1
    assert [(one.rule, one.cpu.verdict) for one in found] == [(other, "wrong"), (NAME, UNTRIED)]
    monkeypatch.setattr(
        "tests.tools.cuda.differs._confirmations",
        lambda todo, device, *_: iter([(NAME, Word("cleared"))] * (device == "cuda")),
    )
    left = confirmed(found, {"cuda": cuda, "cpu": []}, {"cuda": "gloo", "cpu": "gloo"}, until=0.0)
    assert [one.rule for one in left] == [other], "right on real processes, and not tried elsewhere"


def test_in_a_journal_that_was_cut_what_was_not_confirmed_is_wrong():
    (found,), _ = differing([task(sound={NAME})], [task(sound={NAME}) | {"suspects": {NAME: []}}])
    assert found.cuda == Word("wrong")


def test_what_no_real_run_was_asked_for_is_wrong_too():
    unconfirmed = settled(Verdict.SUSPECT, "got 1, expected 2 (not confirmed: --confirm none was asked for)")
    lines = [task() | {"suspects": {NAME: []}}, unconfirmed]
    assert words(lines) == {NAME: Word("wrong")}
    assert differing([task() | {"suspects": {NAME: []}}], lines) == ([], 1)


def test_what_is_wrong_on_one_device_is_run_there_and_what_is_right_there_differs_no_more(monkeypatch):
    ran = []

    def runs(todo, device, backend, until):
        ran.append((device, backend, sorted(todo)))
        yield from ((name, Word("cleared" if device == "cuda" else "unsound")) for name in todo)

    monkeypatch.setattr("tests.tools.cuda.differs._confirmations", runs)
    lines = {"cuda": [task() | {"suspects": {NAME: []}}], "cpu": [task(sound={NAME})]}
    found = [Differs(NAME, Word("sound"), Word("wrong"))]
    monkeypatch.setattr("tests.tools.cuda.differs.findings.merge_candidates", lambda groups, most: {NAME: [object()]})
    assert confirmed(found, lines, {"cuda": "gloo", "cpu": "gloo"}, until=0.0) == []
    assert ran == [("cuda", "gloo", [NAME]), ("cpu", "gloo", [])]
    (left,) = confirmed([Differs(NAME, Word("wrong"), Word("sound"))], lines, {"cuda": "x", "cpu": "gloo"}, until=0.0)
    assert left.cpu == Word("unsound")
    assert list(by_op([left])) == ["aten.relu.default: 1 wrong on the CPU, right on CUDA"]


def test_crashes_are_reported_by_overload():
    assert crashes([task(crashed=[Crash("aten.relu.default", "relu()", "it died")])]) == {
        "aten.relu.default": "it died"
    }


def test_without_a_gpu_it_says_so_and_is_no_pass(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["python -m tests.tools.cuda"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert __main__.main() == __main__.NOTHING
    assert "no GPU" in capsys.readouterr().out


@pytest.mark.parametrize(("one", "apart"), [
    (sample("cumprod.default", numbers(4, 6), -1), 0),
    (sample("relu.default", numbers(4, 6)), 0),
    (planted("trips", numbers(4)), 0),
], ids=["a wrong rule", "a right one", "a planted op"])  # fmt: skip
def test_simulation_and_real_processes_agree(one, apart):
    seen = agreement({one.op: [one]}, device="cpu", backend="gloo", most=1)
    assert (seen.cases, len(seen.apart), seen.share) == (1, apart, 0.0)


@if_cumprod_is_wrong
def test_a_disagreement_is_counted_and_told(monkeypatch):
    one = sample("relu.default", numbers(4, 6))
    monkeypatch.setattr("tests.tools.cuda.agreement.finding.case_of", _of_cumprod)
    seen = agreement({one.op: [one]}, device="cpu", backend="gloo", most=1)
    assert seen.share == 100.0
    assert "the probe says sound, the real run: rank 0: result gathered" in seen.apart[0]


def _of_cumprod(instance, seed):
    """The case of another rule, one that is wrong."""
    from strategies.model.oracle import run_oracle
    from strategies.validation.probe import Probe

    wrong = sample("cumprod.default", numbers(4, 6), -1)
    rule = Rule(wrong.op, (parse("S(1)"),), (parse("S(1)"),))
    return Probe(wrong, run_oracle(wrong), 2, seed=seed).case(rule, 0)
