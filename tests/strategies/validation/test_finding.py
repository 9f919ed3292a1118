import json
from dataclasses import replace

import pytest
from torch.distributed.tensor import Replicate, Shard

from strategies.model.rule import Program
from strategies.model.verdict import Crash, Verdict
from strategies.torch_api.code_places import without_numbers
from strategies.validation import finding
from strategies.validation.finding import Candidate, RuleOutcome, finding_of_candidate, finding_of_instance
from tests.strategies.cases import numbers, sample
from tests.strategies.validation.test_finding_candidate import instance

CRASH = Crash("aten.a.default", "a(f64[2])", "ValueError: no", "Traceback ...")
FOUND = finding_of_instance(instance(), "the reason")
ALL = replace(
    FOUND, confirmed_on="gloo", picture="a\nb", script="# {name} {}", title="a title", mesh=(2, 3), got="[nan]",
)  # fmt: skip


def there_and_back(settled):
    return finding.read_outcome(json.loads(json.dumps(finding.outcome_line(settled))))


@pytest.mark.parametrize("settled", [
    RuleOutcome("a: S(0) -> S(0)", None), RuleOutcome("a", None, CRASH), RuleOutcome("a", FOUND), RuleOutcome("a", ALL, CRASH),
], ids=["cleared", "cleared by a crash", "found", "all there is"])  # fmt: skip
def test_what_was_settled_comes_back(settled):
    assert there_and_back(settled) == settled


def test_a_line_says_what_it_is():
    assert finding.outcome_line(RuleOutcome("a", None)) == {"kind": "settled", "rule": "a", "verdict": "cleared"}
    told = finding.outcome_line(RuleOutcome("a", ALL))
    assert (told["kind"], told["rule"], told["verdict"]) == ("settled", "a", "unsound")


@pytest.mark.parametrize("errors", [
    ("WrongPieceShape: its piece has shape (), R of (1,) is (1,)", "WrongPieceShape: its piece has shape (4,), R of (4, 1) is (4, 1)",
     "WrongPieceShape: its piece has shape (2, 4), R of (2, 4, 1) is (2, 4, 1)"),
    ("RuntimeError: weight of size [1, 2, 1], expected input[1, 1, 1]", "RuntimeError: weight of size [4, 4], expected input[-1]"),
], ids=["shapes", "sizes"])  # fmt: skip
def test_a_refusal_of_tensors_of_any_shape_has_one_key(errors):
    program = Program(sample("neg.default", numbers(2)), (2,), ((Replicate(),),))
    assert len({finding.refusal_key(finding.refused_program(program, error)) for error in errors}) == 1
    assert without_numbers("amax(): dim -1 of ()") == "amax(): dim # of (#)"


def test_a_finding_tells_its_sample_and_where_its_values_come_from():
    assert (FOUND.sample, FOUND.origin, FOUND.elements, FOUND.ranks) == (("f64[4,6]", "-1"), "test", 24, 2)
    assert (FOUND.verdict, FOUND.reason, FOUND.title, FOUND.mesh) == (Verdict.UNSOUND, "the reason", "", ())
    assert finding_of_instance(instance(variant="specials"), "x").origin.startswith(
        "test (specials: NaN and infinities"
    )


def test_the_finding_of_a_suspect_has_its_evidence():
    found = finding_of_candidate(Candidate(instance()), Verdict.SUSPECT, "why")
    assert (found.verdict, found.reason, found.got, found.want) == (Verdict.SUSPECT, "why", "[1]", "[2]")
    assert (found.title, found.mesh, found.name) == ("", (), "aten.cumprod.default: S(1) -> S(1)")


def test_the_finding_of_a_program_is_called_after_it():
    one = sample("cumprod.default", numbers(4, 6), -1)
    program = Program(one, (2, 2), ((Shard(1), Replicate()),), "sum")
    found = finding_of_candidate(Candidate(instance(one, ranks=4), program), Verdict.UNSOUND, "why")
    assert (found.title, found.name, found.mesh) == (str(program), str(program), (2, 2))
