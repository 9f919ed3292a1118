"""Planted wrong rules of several families, shrunk as the probe sees them; and what tells one bug from another."""

import math
from dataclasses import replace

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from strategies.inputs.variants.all_variants import oracle_with_values
from strategies.model.oracle import run_oracle
from strategies.model.rule import Claim, Program
from strategies.model.verdict import Verdict
from strategies.programs.shrink.search import (
    FailureKind,
    RuleWitness,
    element_count,
    failure_kind,
    program_of,
    same_kind,
    shrink,
    still_fails,
)
from strategies.validation.probe import Probe
from strategies.validation.sources.dtensor import claims
from tests.strategies.cases import judged, numbers, rule, sample
from tests.strategies.planted_ops import planted

X = numbers(8, 6)
INDEX = torch.tensor([5, 0, 3, 7])


def claimed(text, least=1):
    """Whoever claims this rule wherever its shards give each rank a row, or `least` of them."""

    def source(one, ranks, raw, alone):
        made = rule(one, text)
        pairs = zip(made.inputs, one.tensors, strict=True)
        fit = all(x.shape[p.dim] >= ranks * least for p, x in pairs if isinstance(p, Shard))
        return [Claim(made, "test")] if fit else []

    return source


def example(one, text, ranks=2, source=None, extremes=False):
    instance = judged(one, text, ranks=ranks, extremes=extremes)
    assert instance.verdict is Verdict.UNSOUND
    oracle = (
        run_oracle(one) if not instance.evidence.variant else oracle_with_values(one, run_oracle(one), "specials", 0)
    )
    case = Probe(one, oracle, ranks, seed=0, variant=instance.evidence.variant).case(
        instance.rule, instance.evidence.draw
    )
    return RuleWitness(instance, case, source=source or claimed(text))


FAMILIES = [
    (sample("cumsum.default", X, 0), "S(0) -> S(0)"),
    (sample("cumprod.default", X, -1), "S(1) -> S(1)"),
    (sample("sort.default", X, 0), "S(0) -> S(0), S(0)"),
    (sample("flip.default", X, [0]), "S(0) -> S(0)"),
    (sample("exp.default", X), "P(sum) -> P(sum)"),
    (sample("neg.default", X), "P(max) -> P(max)"),
    (sample("_softmax.default", X, 0, False), "S(0) -> S(0)"),
    (sample("mean.dim", numbers(7, 3), [0]), "S(0) -> P(sum)"),
    (sample("var.correction", numbers(7, 3), [0]), "S(0) -> P(avg)"),
    (sample("amax.default", X, [0]), "S(0) -> P(min)"),
    (sample("mm.default", numbers(6, 4), numbers(4, 6)), "S(0), S(1) -> P(sum)"),
    (sample("mm.default", numbers(6, 4), numbers(4, 6)), "S(1), S(0) -> P(avg)"),
    (sample("mul.Tensor", X, X + 1), "P(sum), P(sum) -> P(sum)"),
    (sample("add.Tensor", X, X, alpha=2), "P(sum), R -> P(sum)"),
    (sample("index_select.default", X, 0, INDEX), "S(0), R -> S(0)"),
    (sample("cat.default", [X, X], 0), "S(0), S(0) -> S(0)"),
    (sample("where.self", X > 0, X, X), "R, P(sum), R -> P(sum)"),
    (sample("native_layer_norm.default", X, [6], numbers(6), numbers(6), 1e-5), "S(1), R, R -> S(1), S(1), S(1)"),
    (sample("add_.Scalar", X, 2), "P(sum) -> P(sum)"),
    (sample("t.default", X), "S(0) -> S(0)"),
    (sample("logical_not.default", X > 0), "P(max) -> P(max)"),
    (sample("mse_loss.default", numbers(7, 3), numbers(7, 3, seed=1)), "S(0), S(0) -> P(avg)"),
]


@pytest.mark.few(16)
@pytest.mark.parametrize(("one", "text"), FAMILIES, ids=lambda given: getattr(given, "op", given))
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_planted_wrong_rule_shrinks_to_two_ranks_and_few_elements(one, text, ranks):
    shows = example(one, text, ranks)
    found = shrink(shows.start, shows)
    assert found.smallest.ranks == 2 and element_count(found.smallest) <= 8, found.smallest.sample.arguments()
    instance = shows.failing_instance(found.smallest)
    assert str(instance.rule) == f"{one.op}: {text}" and instance.verdict is Verdict.UNSOUND
    assert instance.evidence.reason and (instance.sample, instance.ranks) == (found.smallest.sample, 2)
    assert all(map(shows, found.steps)) and found.steps


def test_a_rule_that_needs_three_ranks_keeps_them():
    one = sample("amax.default", numbers(5, 4), [0])
    shows = example(one, "S(0) -> P(max)", 4)
    found = shrink(shows.start, shows).smallest
    assert (found.ranks, found.sample.arguments()) == (3, ["f32[4]", "[0]"])
    assert shows.failing_instance(found).evidence.reason.startswith("rank 2 raises IndexError")


def test_a_rule_that_needs_unevenness_keeps_it():
    shows = example(sample("mean.default", numbers(11, 4)), "S(0) -> P(avg)", 4)
    found = shrink(shows.start, shows).smallest
    assert (found.ranks, found.sample.arguments()) == (2, ["f32[3]"])


def test_a_rule_of_a_later_dim_keeps_the_dims_before_it():
    shows = example(sample("cumsum.default", numbers(4, 5, 6, 3), 2), "S(2) -> S(2)", 3)
    assert shrink(shows.start, shows).smallest.sample.arguments() == ["f32[1,1,2]", "2"]


def test_a_claim_for_some_numbers_of_ranks_is_asked_for_each():
    def from_three_on(one, ranks, raw, alone):
        return claimed("S(0) -> S(0)")(one, ranks, raw, alone) if ranks > 2 else []

    shows = example(sample("cumsum.default", numbers(8), 0), "S(0) -> S(0)", 4, from_three_on)
    assert shrink(shows.start, shows).smallest.ranks == 3


def test_where_every_rank_raises_so_it_stays():
    shows = example(sample("pixel_unshuffle.default", numbers(1, 1, 6, 6), 3), "S(2) -> S(2)", 3)
    found = shrink(shows.start, shows).smallest
    assert found.ranks == 2 and shows.failing_instance(found).evidence.reason.startswith(
        "every rank raises RuntimeError"
    )


def test_twice_the_same():
    first, second = (example(sample("mul.Tensor", X, X), "P(sum), P(sum) -> P(sum)") for _ in range(2))
    one, two = shrink(first.start, first), shrink(second.start, second)
    assert [p.sample.arguments() for p in one.steps] == [p.sample.arguments() for p in two.steps]
    assert all(torch.equal(a, b) for a, b in zip(one.smallest.sample.tensors, two.smallest.sample.tensors, strict=True))


# What DTensor claims itself.


def test_what_is_no_longer_claimed_shows_nothing():
    few = claimed("S(0) -> S(0)", least=3)
    shows = example(sample("cumsum.default", numbers(12), 0), "S(0) -> S(0)", source=few)
    assert element_count(shrink(shows.start, shows).smallest) == 6


def test_calls_that_the_source_rewrites_for_each_rank_are_judged_as_rewritten():
    def local(one, ranks):
        rows, columns = one.call.args[1]
        call = replace(one.call, args=(one.call.args[0], [max(rows - 1, 1), columns // ranks]))
        return (call,) * ranks

    def source(one, ranks, raw, alone):
        fit = isinstance(one.call.args[1], list) and len(one.call.args[1]) == 2 and one.call.args[1][1] % ranks == 0
        return [Claim(rule(one, "S(1) -> S(1)"), "test", local(one, ranks))] if fit else []

    one = sample("expand.default", numbers(1, 6), [5, 6])
    instance = judged(one, "S(1) -> S(1)", ranks=3, local=local(one, 3))
    shows = RuleWitness(instance, Probe(one, run_oracle(one), 3, seed=0).case(instance.rule, 0), source=source)
    found = shrink(shows.start, shows).smallest
    assert (found.ranks, found.sample.arguments()) == (2, ["f32[1,2]", "[2, 2]"])


def test_the_very_values_with_nan_are_shrunk_and_the_nan_that_it_takes_stays():
    shows = example(planted("patched", numbers(8, 6)), "S(0) -> S(0)", source=claims, extremes=True)
    found = shrink(shows.start, shows).smallest
    assert sum(map(math.isnan, found.sample.tensors[0].flatten().tolist())) == 1 and element_count(found) <= 4
    assert not found.sample.tensors[0].isinf().any()
    assert shows.failing_instance(found).evidence.variant == ""


def test_whole_numbers_made_of_nan_say_nothing():
    x = numbers(8, 6)
    x[3, 3] = math.nan
    shows = example(planted("patched_floor", x), "S(0) -> S(0)")
    assert not shows(shows.start)


def test_what_was_not_wrong_shows_nothing_at_all():
    one = sample("relu.default", X)
    instance = judged(one, "S(0) -> S(0)")
    case = Probe(one, run_oracle(one), 2, seed=0).case(instance.rule, 0)
    shows = RuleWitness(instance, case, source=claimed("S(0) -> S(0)"))
    assert not shows(shows.start) and shows.failing_instance(shows.start) is None


def test_other_inputs_other_meshes_and_what_follows_are_other_findings():
    shows = example(sample("cumsum.default", X, 0), "S(0) -> S(0)")
    start = shows.start
    assert shows(start)
    assert not shows(replace(start, inputs=((Shard(1),),)))
    assert not shows(replace(start, mesh=(2, 2), inputs=((Shard(0), Shard(0)),)))
    assert not shows(replace(start, then="sum"))


def test_what_the_op_refuses_and_what_gives_nothing_shows_nothing():
    shows = example(sample("index_select.default", X, 0, INDEX), "S(0), R -> S(0)")
    sample_of = shows.start.sample
    far = replace(shows.start, sample=replace(sample_of, tensors=(X, INDEX + 3)))
    empty = replace(shows.start, sample=replace(sample_of, tensors=(X, INDEX[:0])))
    assert shows(shows.start) and not shows(far) and not shows(empty)


def test_a_program_of_a_case_holds_the_values_that_were_judged():
    one = sample("add.Tensor", X, X)
    oracle = run_oracle(one, [X, X + 1])
    case = Probe(one, oracle, 2, seed=0).case(rule(one, "S(0), R -> S(0)"), 1)
    assert program_of(case, 1, 7) == Program(
        replace(one, tensors=oracle.inputs), (2,), ((Shard(0),), (Replicate(),)), seed=7, draw=1
    )


# Kinds.


@pytest.mark.parametrize(("reason", "want"), [
    ("as S(1): the shards make -0.387948 at [0, 1, 0], the op gives -0.241042 (72 of 96 elements differ)", FailureKind("values")),
    ("as P(max): the parts make nan at [1], the op gives 0 (1 of 8 elements differ)", FailureKind("values", "", True)),
    ("output 1 as R: rank 1 makes 3 at [], the op gives inf (1 of 1 elements differ)", FailureKind("values", "1", True)),
    ("output 2 is 3 on rank 0, the op gives 4", FailureKind("values", "2")),
    ("rank 0: output 0 gathered from P(avg) differs at []: got nan, expected 4.82806", FailureKind("values", "0", True)),
    ("rank 0: result gathered from S(0) differs at [2]: got 1.3985, expected 20.5683", FailureKind("values")),
    ("as S(0): rank 1 has shape (1,), the placement asks for (0,)", FailureKind("shape")),
    ("rank 2 holds shape (1,), S(0) of (4,) is (0,)", FailureKind("shape")),
    ("as R: rank 0 has torch.float32, not torch.float64", FailureKind("dtype")),
    ("rank 2 raises IndexError: amax(): Expected reduction dim -1 to have", FailureKind("a rank raises IndexError: amax(): Expected reduction dim #")),
    ("rank 2 raises ValueError: got [4, 0, 4]; its peers go on and wait for it", FailureKind("a rank raises ValueError: got [#]")),
    ("every rank raises ValueError: got 3; the op takes the whole tensors", FailureKind("every rank raises ValueError: got #")),
    ("hangs: rank 1 waits at x.py:3", FailureKind("hangs")),
    ("the process of rank 1 dies (exit code -11)", FailureKind("dies")),
])  # fmt: skip
def test_what_a_reason_is_about(reason, want):
    assert failure_kind(reason) == want


def test_nan_may_go_but_not_come():
    finite, wild = (
        "as R: rank 0 makes 3 at [], the op gives 4 (1 of 1)",
        "as R: rank 0 makes nan at [], the op gives 4 (1 of 1)",
    )
    assert same_kind(wild, finite) and same_kind(wild, wild) and not same_kind(finite, wild)


def test_another_output_is_another_bug():
    first, second = (
        "output 0 as R: rank 0 makes 3 at [], the op gives 4",
        "output 1 as R: rank 0 makes 3 at [], the op gives 4",
    )
    assert same_kind(second, second) and not same_kind(first, second)


def test_a_shrink_does_not_slip_to_another_bug():
    shows = example(sample("cumsum.default", X, 0), "S(0) -> S(0)")
    shows._reason = "as S(0): rank 1 has shape (1,), the placement asks for (0,)"
    assert not shows(shows.start)


# Witnesses that speak in words.


def said(program):
    return "" if program.sample.size < 4 else "as R: rank 0 makes 3 at [], the op gives 4 (1 of 1)"


def test_any_example_that_gives_reasons_can_be_asked():
    start = Program(sample("relu.default", X), (2, 2), ((Shard(0), Replicate()),))
    shows = still_fails(said, said(start))
    assert element_count(shrink(start, shows).smallest) == 4 and shrink(start, shows).smallest.mesh == (2,)
    assert not still_fails(said, "hangs: rank 0 waits")(start)
    kept = still_fails(said, said(start), inputs=start.inputs)
    assert shrink(start, kept).smallest.inputs == start.inputs


@pytest.mark.parametrize("index", [INDEX + 3, INDEX[:0]], ids=["refused", "nothing comes out"])
def test_before_it_is_asked_the_op_must_take_the_call_and_give_something(index):
    asked = []
    start = Program(sample("index_select.default", X, 0, index), (2,), ((Shard(0),), (Replicate(),)))
    assert not still_fails(lambda p: asked.append(p) or "wrong", "wrong")(start)
    assert asked == []
