"""The confirmation of a source's claims: in a process that has captured no samples, and where the source does not return."""

import json
import signal
import sys

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from strategies.model.rule import LEAVES, Call, Program, Rule, Sample
from strategies.model.settings import BadSource, Settings
from strategies.model.verdict import Evidence, Instance, Verdict
from strategies.sweep import confirmation
from strategies.validation.finding import Candidate, refused_program
from tests.tools import warm


def stays():
    while True:
        pass


class Stuck:
    def script(self, case, words):
        stays()


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="the system has no timer of processor time")
def test_a_source_that_does_not_return_when_it_is_asked_again_leaves_its_claim_suspect(monkeypatch):
    monkeypatch.setattr(confirmation, "SOURCE_SECONDS", 0.3)
    op = "aten.neg.default"
    sample, rule = Sample(Call(op, LEAVES[:1]), (torch.ones(4),), "a test"), Rule(op, (Shard(0),), (Shard(0),))
    instance = Instance(rule, 2, sample, Verdict.UNSOUND, "stuck", Evidence("differs", "", 0, None, None))
    found = confirmation._confirmed(Stuck(), "neg", [Candidate(instance, None)], Settings(("neg",)), None)
    assert found.finding.verdict is Verdict.SUSPECT
    assert "no return within 0.3 s of processor time from stays" in found.finding.reason


def test_a_call_about_which_a_source_does_not_answer_is_not_asked_again():
    sample = Sample(Call("aten.neg.default", LEAVES[:1]), (torch.ones(4),), "a test")
    candidate = refused_program(Program(sample, (2,), ((Replicate(),),)), "no return from view_groups")
    found = confirmation._confirmed(Stuck(), "neg", [candidate], Settings(("neg",)), None)
    assert found.finding.verdict is Verdict.SUSPECT
    assert "the source does not answer about it, so that there is no script" in found.finding.reason


def test_a_resumed_sweep_confirms_what_another_process_has_suspected(tmp_path):
    pytest.importorskip("spmd_types")
    asked = ["--source", "spmd_types", "torch.nansum", "--ranks", "2", "--journal", "j.jsonl"]
    command = [sys.executable, "-m", "localtensor", "validate", *asked]
    first = warm.run(command, cwd=tmp_path)
    assert first.returncode == 1, first.stdout + first.stderr
    lines = (tmp_path / "j.jsonl").read_text().splitlines()
    (tmp_path / "j.jsonl").write_text("".join(f"{x}\n" for x in lines if json.loads(x)["kind"] != "settled"))
    again = warm.run([*command, "--resume"], cwd=tmp_path)
    assert again.returncode == 1, again.stdout + again.stderr
    assert again.stdout.splitlines()[:4] == first.stdout.splitlines()[:4] and "nansum" in again.stdout


def test_what_is_no_source_of_functions_is_refused_in_one_sentence():
    with pytest.raises(
        BadSource, match=r"--source: mine: object is no FunctionSource\. Subclass localtensor\.testing\.F"
    ):
        confirmation.source_samples(object(), Settings(source="mine"))
