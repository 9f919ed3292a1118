import json
from dataclasses import replace

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from strategies.model.codec import NotEncodable
from strategies.model.rule import Program
from strategies.model.verdict import UNDEFINED, Evidence, Instance, Verdict
from strategies.validation import finding
from strategies.validation.finding import Candidate, OverloadTask, case_of
from strategies.validation.overload import validate_overload
from tests.strategies.cases import numbers, rule, sample
from tests.strategies.planted_ops import planted
from tests.strategies.wrong_here import if_cumprod_is_wrong

X = numbers(4, 6)
ONE = sample("cumprod.default", X, -1)


def instance(one=ONE, line="S(1) -> S(1)", *, ranks=2, variant="", draw=0, reason="wrong"):
    evidence = Evidence(reason, variant, draw, "[1]", "[2]")
    return Instance(rule(one, line), ranks, one, Verdict.UNSOUND, "single dim strategy", evidence)


def there_and_back(suspect):
    return finding.read_candidate(json.loads(json.dumps(finding.candidate_data(suspect))))


def same(one, other):
    """But for the tensors, of which == says nothing."""
    return replace(one.instance, sample=None) == replace(other.instance, sample=None) and all(
        torch.equal(x, y) and x.stride() == y.stride()
        for x, y in zip(one.instance.sample.tensors, other.instance.sample.tensors, strict=True)
    )


def found_by(*samples, seed=0):
    """All that the trial suspects of these samples."""
    validated = validate_overload(OverloadTask(samples[0].op, samples, ((2,), (3,)), seed), lambda number: None)
    return [s for h in validated for kept in (h.suspects, h.whole) for found in kept.values() for s in found]


def test_a_suspect_comes_back_from_a_journal():
    before = Candidate(instance(sample("cumprod.default", X.t(), -1), variant="specials", draw=3))
    after = there_and_back(before)
    assert same(before, after)
    assert (after.name, after.weight, after.program) == (before.name, before.weight, None)


def test_a_program_comes_back_with_its_sample():
    placements = ((Shard(1), Replicate()), (Partial("max"), Shard(0)))
    two = sample("add.Tensor", X, X)
    program = Program(two, (2, 3), placements, "sum", 5, 2, True)
    after = there_and_back(Candidate(instance(two, "S(1), P(max) -> S(1)", ranks=6), program))
    assert replace(after.program, sample=two) == program
    assert after.program.sample is after.instance.sample
    assert after.name == str(program)


def test_a_suspect_whose_call_is_no_data_says_so():
    one = sample("bernoulli.p", X, 0.5, generator=torch.Generator())
    with pytest.raises(NotEncodable):
        finding.candidate_data(Candidate(instance(one)))


def test_ordinary_values_weigh_less_then_few_ranks_then_few_elements():
    small = sample("cumprod.default", numbers(2, 2), -1)
    order = [
        Candidate(instance(small)), Candidate(instance()), Candidate(instance(small, ranks=3)),
        Candidate(instance(small, variant="specials")), Candidate(instance(variant="specials")),
    ]  # fmt: skip
    nothing = Candidate(replace(instance(small), evidence=Evidence(f"avg of torch.int8{UNDEFINED}")))
    order.append(nothing)  # DTensor refuses to gather it: what it gathers wrongly comes first
    backwards = list(reversed(order))
    assert sorted(backwards, key=lambda s: s.weight) == order


@pytest.mark.parametrize("samples", [
    pytest.param((sample("cumprod.default", X, -1), sample("cumprod.default", numbers(2, 3, 4), -1)), marks=if_cumprod_is_wrong),
    (planted("patched", numbers(4, 4)),), pytest.param((sample("cumprod.default", X.t(), 1),), marks=if_cumprod_is_wrong),
], ids=["cumprod", "wild values", "transposed"])  # fmt: skip
@pytest.mark.parametrize("seed", [0, 7])
def test_the_case_of_a_suspect_from_a_journal_is_to_the_last_bit_that_of_the_probe(samples, seed):
    found = found_by(*samples, seed=seed)
    assert found
    for suspect in found:
        one, other = case_of(suspect.instance, seed), case_of(there_and_back(suspect).instance, seed)
        assert (one.rule, one.ranks) == (other.rule, other.ranks)
        assert [[p.tolist() for p in held] for held in map(list, one.held)].__repr__() == (
            [[p.tolist() for p in held] for held in map(list, other.held)].__repr__()
        )  # as text: NaN is itself there


def test_placements_of_dtensors_own_come_in_replicated():
    one = sample("embedding.default", X, torch.tensor([0, 3]))
    (suspect, *_) = [s for s in found_by(one) if "P(mask) -> P(mask)" in s.name]
    assert str(case_of(there_and_back(suspect).instance, 0).rule) == "aten.embedding.default: S(0), R -> P(mask)"


def test_a_case_has_the_draw_and_the_values_that_its_evidence_names():
    one = sample("ne.Scalar", X, 0.0)
    first, other = (case_of(instance(one, "P(sum) -> R", draw=n), 0).held[0] for n in (0, 1))
    assert not all(map(torch.equal, first, other))
    wild = case_of(instance(planted("patched", numbers(4, 4)), "S(0) -> S(0)", variant="specials"), 0)
    assert wild.oracle.inputs[0].isnan().any()
