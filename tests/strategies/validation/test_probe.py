import math

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from localtensor.layout.shards import assemble_axis
from localtensor.layout.spec import PARTIAL_KINDS, parse, short
from strategies.inputs.variants.all_variants import oracle_with_values
from strategies.model.oracle import run_oracle
from strategies.model.rule import Call, Claim, Leaf, overload
from strategies.model.verdict import Verdict
from strategies.validation.difference import folding_error
from strategies.validation.probe import DRAWS, Probe, check_claims
from tests.strategies.cases import assert_sound, assert_wrong, judged, numbers, probe, rule, sample
from tests.strategies.planted_ops import CALLS, planted

X = numbers(4, 6)
ROWS = numbers(5, 3)
FLAGS = torch.tensor([[True, False, True], [False, False, True], [True, True, False], [False, True, False]])


# Right rules stand.


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize(("one", "text"), [
    (sample("relu.default", X), "R -> R"),
    (sample("relu.default", X), "S(1) -> S(1)"),
    (sample("relu.default", X), "P(max) -> P(max)"),
    (sample("exp.default", X), "P(max) -> P(max)"),
    (sample("exp.default", X), "P(min) -> P(min)"),
    (sample("neg.default", X), "P(max) -> P(min)"),
    (sample("neg.default", X), "P(sum) -> P(sum)"),
    (sample("neg.default", X), "P(avg) -> P(avg)"),
    (sample("neg.default", X), "R -> P(avg)"),
    (sample("neg.default", X), "R -> P(max)"),
    (sample("sum.dim_IntList", ROWS, [0]), "S(0) -> P(sum)"),
    (sample("sum.dim_IntList", ROWS, [0]), "S(1) -> S(0)"),
    (sample("amax.default", numbers(4, 8), [1]), "S(1) -> P(max)"),
    (sample("mul.Tensor", X, X + 1), "P(sum), R -> P(sum)"),
    (sample("mm.default", X, numbers(6, 2)), "S(1), S(0) -> P(sum)"),
    (sample("mm.default", X, numbers(6, 2)), "S(0), R -> S(0)"),
    (sample("abs.default", X), "P(product) -> P(product)"),
    (sample("max.dim", X, 0), "S(1) -> S(0), S(0)"),
    (sample("add_.Tensor", X, X), "S(0), S(0) -> S(0)"),
    (sample("cumsum.default", X, 1), "S(0) -> S(0)"),
    (sample("bitwise_not.default", numbers(4, 6, dtype=torch.int64)), "P(max) -> P(min)"),
], ids=lambda given: given if isinstance(given, str) else given.op)  # fmt: skip
def test_right_rules_stand(one, text, ranks):
    assert_sound(one, text, ranks=ranks, extremes=True)


# Wrong rules do not.


@pytest.mark.parametrize(("one", "text", "because"), [
    (sample("relu.default", X), "P(sum) -> P(sum)", "the parts make"),
    (sample("neg.default", X), "P(max) -> P(max)", "the parts make"),
    (sample("neg.default", X), "R -> P(sum)", "the parts make"),
    (sample("mul.Tensor", X, X + 1), "P(sum), P(sum) -> P(sum)", "the parts make"),
    (sample("add.Tensor", X, X), "P(sum), R -> P(sum)", "the parts make"),
    (sample("sum.dim_IntList", X, [0]), "S(0) -> P(avg)", "the parts make"),
    (sample("amax.default", X, [0]), "S(0) -> P(sum)", "the parts make"),
    (sample("neg.default", X), "P(sum) -> R", "rank 0 make"),
    (sample("_softmax.default", X, 0, False), "S(0) -> S(0)", "the shards make"),
    (sample("cumprod.default", X, 1), "S(1) -> S(1)", "the shards make"),
    (sample("mm.default", X, numbers(6, 2)), "S(1), S(0) -> R", "rank 0 make"),
    (sample("relu.default", X), "S(0) -> R", "rank 0 has shape (2, 6), the placement asks for (4, 6)"),
    (sample("relu.default", X), "S(0) -> S(1)", "rank 0 has shape (2, 6), the placement asks for (4, 3)"),
    (sample("relu.default", X), "R -> S(0)", "rank 0 has shape (4, 6), the placement asks for (2, 6)"),
    (sample("sum.default", X), "S(0) -> S(0)", "the placement asks for None"),
    (sample("view.default", X, [24]), "S(0) -> S(0)", "rank 0 raises RuntimeError: shape '[24]' is invalid"),
], ids=lambda given: given if isinstance(given, str) else given.op)  # fmt: skip
def test_wrong_rules_do_not(one, text, because):
    assert_wrong(one, text, because)


def test_a_shard_kept_through_the_reduction_of_its_dim_is_wrong_on_the_rank_that_should_be_empty():
    one = sample("sum.dim_IntList", X, [0], True)
    assert_wrong(one, "S(0) -> S(0)", "rank 1 has shape (1, 6), the placement asks for (0, 6)")


def shared_out(starts_and_ends):
    """Rank by rank, the rows from start to end of a replicated tensor: one call for each."""
    return tuple(Call("aten.slice.Tensor", (Leaf(0), 0, start, end)) for start, end in starts_and_ends)


def test_the_right_values_in_the_wrong_local_shapes_are_wrong():
    one = sample("slice.Tensor", X, 0, 0, 4)
    assert_sound(one, "R -> S(0)", local=shared_out([(0, 2), (2, 4)]))
    assert_wrong(one, "R -> S(0)", "rank 0 has shape (3, 6)", local=shared_out([(0, 3), (3, 4)]))


def test_the_right_shapes_with_the_wrong_values_are_wrong():
    one = sample("slice.Tensor", X, 0, 0, 4)
    assert_wrong(one, "R -> S(0)", "the shards make", local=shared_out([(2, 4), (0, 2)]))


def test_the_right_values_in_another_dtype_are_wrong():
    one = sample("_to_copy.default", X, dtype=torch.float64)
    other = Call("aten._to_copy.default", (Leaf(0),), (("dtype", torch.float32),))
    assert_wrong(one, "S(0) -> S(0)", "rank 0 has torch.float32, not torch.float64", local=(other, other))


def test_a_replica_that_is_wrong_on_one_rank_only_is_wrong():
    one = sample("clone.default", X)
    right, other = one.call, Call("aten.neg.default", (Leaf(0),))
    assert_sound(one, "R -> R", local=(right, right))
    assert_wrong(one, "R -> R", "rank 1 make", local=(right, other))


def test_one_wrong_output_of_several_is_found_and_named():
    one = sample("aminmax.default", X, dim=0)
    assert_sound(one, "S(0) -> P(min), P(max)")
    assert_wrong(one, "S(0) -> P(min), P(min)", "output 1 as P(min): the parts make")
    assert_wrong(one, "S(0) -> P(max), P(max)", "output 0 as P(max): the parts make")


def test_an_output_that_is_masked_off_is_not_judged():
    assert_sound(sample("aminmax.default", X, dim=0), "S(0) -> P(min), -")


def test_the_evidence_shows_what_is_got_and_what_is_wanted():
    found = judged(sample("sum.default", torch.arange(4)), "S(0) -> P(max)")
    assert found.evidence.reason == "as P(max): the parts make 5 at [], the op gives 6 (1 of 1 elements differ)"
    assert (found.evidence.got, found.evidence.want) == ("[5] of shape ()", "[6] of shape ()")


# Uneven and empty shards.


def test_a_mean_over_uneven_shards_is_no_average_of_means():
    assert_sound(sample("mean.dim", numbers(4, 3), [0]), "S(0) -> P(avg)")
    assert_wrong(sample("mean.dim", ROWS, [0]), "S(0) -> P(avg)", "the parts make")


def test_uneven_shards_have_the_shapes_that_chunks_have():
    assert_sound(sample("relu.default", ROWS), "S(0) -> S(0)", ranks=4)
    even = tuple(Call("aten.slice.Tensor", (Leaf(0), 0, 0, 2)) for _ in range(2))
    assert_wrong(sample("relu.default", ROWS), "S(0) -> S(0)", "rank 0 has shape (2, 3)", local=even)


def test_a_sum_with_an_empty_shard_is_right_and_a_maximum_of_nothing_raises():
    four = numbers(4, 3)
    assert_sound(sample("sum.dim_IntList", four, [0]), "S(0) -> P(sum)", ranks=3)
    assert_sound(sample("relu.default", four), "S(0) -> S(0)", ranks=3)
    assert_wrong(sample("amax.default", four, [0]), "S(0) -> P(max)", "rank 2 raises IndexError: amax()", ranks=3)


def test_a_mean_of_nothing_is_not_a_number():
    assert_wrong(sample("mean.dim", numbers(4, 3), [0]), "S(0) -> P(avg)", "the parts make nan", ranks=3)


# NaN and infinities.


def test_a_rule_that_fails_for_not_a_number_only_is_found_when_it_is_asked():
    one = planted("patched", numbers(4, 3))
    assert_sound(one, "S(0) -> S(0)")
    assert_wrong(one, "S(0) -> S(0)", "the shards make", extremes=True)
    assert judged(one, "S(0) -> S(0)", extremes=True).evidence.variant == "specials"


def test_a_rule_that_fails_for_ordinary_values_too_is_shown_with_those():
    assert judged(sample("cumsum.default", X, 0), "S(0) -> S(0)", extremes=True).evidence.variant == ""


def test_not_a_number_does_not_count_against_a_cast_to_integers():
    assert_wrong(planted("patched", X), "S(0) -> S(0)", "the shards make", extremes=True)
    assert_sound(planted("patched_floor", X), "S(0) -> S(0)", extremes=True)


def test_an_op_that_refuses_infinities_is_judged_by_its_own_values():
    assert_sound(planted("fussy", numbers(4, 3).clamp(max=1.0)), "S(0) -> S(0)", extremes=True)


# A rank that raises.


def test_the_rank_that_raises_is_named_with_what_it_raises():
    found = judged(planted("fussy", torch.tensor([0.0, 0.5, 1.0, 1.0])), "P(sum) -> P(sum)")
    assert found.evidence.reason == "rank 0 raises ValueError: every element must be at most 1"
    assert (found.evidence.got, found.evidence.want) == ("", "")


def test_what_no_op_should_raise_is_a_crash_and_not_a_verdict():
    one = planted("trips", numbers(6))
    with pytest.raises(ZeroDivisionError):
        judged(one, "S(0) -> S(0)")


# How often the op is run.


@pytest.mark.parametrize(("text", "runs"), [
    ("R -> R", 1), ("S(0) -> S(0)", 4), ("P(avg) -> P(avg)", 4 * DRAWS),
])  # fmt: skip
def test_ranks_that_hold_the_same_run_the_op_once(text, runs):
    one = planted("counted", X)
    case = probe(one, ranks=4)
    CALLS.clear()
    assert case.judge(Claim(rule(one, text), "test")) is None
    assert CALLS["counted"] == runs


def test_all_output_placements_are_judged_from_the_same_runs():
    one = planted("counted", X)
    case = probe(one, ranks=2)
    CALLS.clear()
    found = case.placements([Partial("sum")], 0, case.draws([Partial("sum")]))
    assert [short(p) for p in found] == ["P(sum)"]
    assert CALLS["counted"] == 2 * DRAWS


def test_two_claims_about_the_same_inputs_share_their_runs():
    one = planted("counted", X)
    case = probe(one, ranks=2)
    CALLS.clear()
    assert case.against(case.local([Shard(0)], 0), [Shard(0)]) is None
    assert case.against(case.local([Shard(0)], 0), [Replicate()]) is not None
    assert CALLS["counted"] == 2


def test_only_partial_inputs_are_drawn_several_times():
    case = probe(sample("add.Tensor", X, X))
    assert len(case.draws([Shard(0), Replicate()])) == 1
    assert len(case.draws([Replicate(), Partial("max")])) == DRAWS >= 2


def test_each_draw_is_another_decomposition():
    case = probe(sample("neg.default", X))
    first, second = case.held(0, Partial("sum"), 0), case.held(0, Partial("sum"), 1)
    assert not torch.equal(first[0], second[0])
    assert torch.allclose(first[0] + first[1], X) and torch.allclose(second[0] + second[1], X)


def test_a_rule_that_only_the_sparse_draw_refutes_is_refuted():
    found = judged(sample("ne.Scalar", X, 0.0), "P(sum) -> R")
    assert found.verdict is Verdict.UNSOUND
    assert found.evidence.draw == 1


# The same seed gives the same evidence.


def test_the_same_seed_gives_the_same_evidence_and_another_seed_another():
    one = sample("relu.default", X)
    same = [judged(one, "P(sum) -> P(sum)", seed=seed).evidence for seed in (5, 5, 6)]
    assert same[0] == same[1] != same[2]


def test_evidence_does_not_depend_on_what_was_asked_before():
    one = sample("mul.Tensor", X, X)
    claims = [Claim(rule(one, text), "test") for text in ("P(sum), P(sum) -> P(sum)", "P(max), R -> P(max)")]
    forth = check_claims(one, run_oracle(one), 2, claims, seed=1)
    back = check_claims(one, run_oracle(one), 2, claims[::-1], seed=1)
    assert [i.evidence for i in forth] == [i.evidence for i in back[::-1]]


def test_the_random_state_of_torch_has_no_say():
    one = sample("relu.default", X)
    torch.manual_seed(1)
    first = judged(one, "P(sum) -> P(sum)").evidence
    torch.manual_seed(2)
    assert judged(one, "P(sum) -> P(sum)").evidence == first


def test_two_arguments_of_one_value_are_decomposed_independently():
    case = probe(sample("mul.Tensor", X, X))
    assert not torch.equal(case.held(0, Partial("sum"), 0)[0], case.held(1, Partial("sum"), 0)[0])


# Partials of booleans, integers and complex numbers.


def test_partial_booleans_are_or_and_and():
    one = sample("logical_not.default", FLAGS)
    assert_sound(one, "P(max) -> P(min)")
    assert_sound(one, "P(sum) -> P(product)")
    assert_wrong(one, "P(max) -> P(max)", "the parts make")
    assert_sound(sample("any.dim", FLAGS, 0), "S(0) -> P(sum)")
    assert_sound(sample("any.dim", FLAGS, 0), "S(0) -> P(max)")
    assert_sound(sample("all.dim", FLAGS, 0), "S(0) -> P(min)")
    assert_wrong(sample("all.dim", FLAGS, 0), "S(0) -> P(sum)", "the parts make")


def test_an_average_of_booleans_cannot_be_tested():
    found = judged(sample("logical_not.default", FLAGS), "P(avg) -> P(avg)")
    assert (found.verdict, found.evidence.reason) == (Verdict.UNTESTABLE, "P(avg) means nothing for this dtype")


def test_a_result_that_cannot_be_reduced_like_that_is_wrong():
    assert_wrong(sample("gt.Scalar", X, 0.0), "S(0) -> P(avg)", "avg of torch.bool is not defined")


def test_a_maximum_of_complex_numbers_cannot_be_tested():
    found = judged(sample("neg.default", numbers(4, dtype=torch.complex64)), "P(max) -> P(min)")
    assert found.verdict is Verdict.UNTESTABLE


def test_integer_sums_are_exact():
    one = sample("mul.Scalar", numbers(4, 3, dtype=torch.int64), 3)
    assert_sound(one, "P(sum) -> P(sum)")
    halved = sample("floor_divide.default", numbers(4, 3, dtype=torch.int64), torch.tensor(2))
    assert_wrong(halved, "P(sum), R -> P(sum)", "the parts make")


def test_parts_much_larger_than_their_sum_are_given_room_for_rounding():
    held = [torch.tensor([1e12], dtype=torch.float64), torch.tensor([-1e12 + 1], dtype=torch.float64)]
    assert 1e-4 < folding_error(held) < 1.0
    assert folding_error([torch.tensor([10**12])]) == 0.0
    assert folding_error([torch.empty(0), torch.tensor([math.nan])]) == 0.0
    assert_sound(sample("neg.default", numbers(4, 6).float() * 1e-6), "P(sum) -> P(sum)")


def test_what_splitting_loses_in_few_digits_is_not_held_against_a_cast_to_more():
    held = [torch.tensor([3e3], dtype=torch.float64), torch.tensor([-3e3 + 1], dtype=torch.float64)]
    single, half = torch.finfo(torch.float32).eps, torch.finfo(torch.bfloat16).eps
    assert (
        folding_error(held) < 3e3 * single < folding_error(held, single) < 0.1 < 0.25 * 3e3 <= folding_error(held, half)
    )
    for source in (torch.float32, torch.complex64):
        one = sample("_to_copy.default", X.to(source), dtype=torch.float64)
        for kind in ("sum", "avg"):
            assert with_variants(one, f"P({kind}) -> P({kind})", "cancelling").verdict is Verdict.SOUND
        assert with_variants(one, "P(sum) -> P(avg)", "cancelling").verdict is Verdict.UNSOUND
        assert_wrong(one, "P(sum) -> P(avg)", "the parts make")
        assert_wrong(one, "P(sum) -> R", "rank 0 make")


# Where only metadata can be compared.


@pytest.mark.parametrize("op", ["rand_like.default", "empty_like.default"])
def test_random_and_uninitialised_results_are_judged_by_metadata_and_say_so(op):
    one = sample(op, X)
    found = judged(one, "S(0) -> S(0)")
    assert found.verdict is Verdict.SOUND
    assert found.evidence.reason.endswith("judged by metadata only")
    assert_wrong(one, "S(0) -> R", "rank 0 has shape (2, 6)")


# Where torch's own kernels disagree.


@pytest.mark.parametrize("name", ["by_lanes", "by_lanes_"])
def test_a_difference_between_torchs_kernels_is_not_the_rules_fault(name):
    narrow = numbers(3, 4).abs()  # the shards of dim 1 have gaps, the whole has none
    assert_sound(planted(name, narrow), "S(1) -> S(1)")


@pytest.mark.parametrize("name", ["far_by_lanes", "far_by_lanes_"])
def test_a_difference_between_kernels_that_only_parts_show_is_not_the_rules_fault(name):
    x = numbers(4, 6).clamp(-1, 1) * 45
    assert_wrong(planted("far", x), "P(sum) -> P(sum)", "the parts make")
    assert_sound(planted(name, x), "P(sum) -> P(sum)")


# Ops that write.


def test_ops_that_write_find_their_inputs_as_they_were():
    one = sample("add_.Tensor", X, X)
    case = probe(one)
    before = {p: [t.clone() for t in case.held(0, parse(p), 0)] for p in ("R", "S(0)", "P(sum)")}
    for text in ("R, R -> R", "S(0), S(0) -> S(0)", "P(sum), P(sum) -> P(sum)") * 2:
        assert case.judge(Claim(rule(one, text), "test")) is None
    for p, held in before.items():
        assert all(torch.equal(a, b) for a, b in zip(case.held(0, parse(p), 0), held, strict=True))


def test_an_argument_that_is_written_to_and_not_returned_keeps_its_placement():
    one = planted("noted", X, torch.zeros(6, dtype=torch.float64))
    assert_sound(one, "S(0), P(sum) -> S(0)")
    assert_sound(one, "S(1), S(0) -> S(1)")
    assert_wrong(one, "S(0), R -> S(0)", "output 1 as R: rank 0 make")
    assert_wrong(one, "S(0), P(avg) -> S(0)", "output 1 as P(avg): the parts make")


def test_a_number_that_differs_from_rank_to_rank_is_wrong():
    other = X.clone()
    other[0] += 1
    one = sample("equal.default", X, other)
    assert_sound(one, "R, R -> R")
    assert_wrong(one, "S(0), S(0) -> R", "output 0 is True on rank 1, the op gives False")


# Every placement that holds.


@pytest.mark.parametrize(("one", "inputs", "want"), [
    (sample("relu.default", X), "S(0)", ["S(0)"]),
    (sample("relu.default", X), "P(max)", ["P(max)"]),
    (sample("relu.default", X), "P(sum)", []),
    (sample("relu.default", X), "R", ["R"]),
    (sample("sum.dim_IntList", X, [0]), "S(0)", ["P(sum)"]),
    (sample("sum.dim_IntList", X, [0]), "S(1)", ["S(0)"]),
    (sample("sum.default", X), "S(1)", ["P(sum)"]),
    (sample("view.default", X, [24]), "S(0)", []),
    (sample("any.dim", FLAGS, 0), "S(0)", []),  # "or" of few booleans holds by chance: a search does not ask
    (sample("any.dim", FLAGS, 0), "S(1)", ["S(0)"]),
    (sample("new_zeros.default", X, [3]), "S(0)", ["R"]),
], ids=lambda given: given if isinstance(given, str) else getattr(given, "op", None))  # fmt: skip
def test_a_search_finds_every_placement_that_holds(one, inputs, want):
    case, given = probe(one), [parse(inputs)]
    assert [short(p) for p in case.placements(given, 0, case.draws(given))] == want


def test_what_holds_in_one_draw_only_does_not_hold():
    signs = probe(planted("alive", X))
    dense, sparse = ([short(p) for p in signs.placements([Partial("sum")], 0, [draw])] for draw in (0, 1))
    assert (dense, sparse) == (["R"], ["P(max)"])
    for draws in ([0, 1], [1, 0]):
        assert [short(p) for p in signs.placements([Partial("sum")], 0, draws)] == ["P(max)"]


@pytest.mark.parametrize("inputs", ["S(0)", "S(1)", "P(sum)", "P(avg)", "P(min)", "P(max)"])
@pytest.mark.parametrize("one", [
    sample("relu.default", X), sample("neg.default", X), sample("sum.dim_IntList", X, [1]),
    sample("amax.default", X, [0]), sample("cumsum.default", X, 0), sample("sum.default", X),
], ids=lambda one: one.op)  # fmt: skip
def test_a_search_and_a_validation_agree(one, inputs):
    case, given, ndim = probe(one), [parse(inputs)], run_oracle(one).outputs[0].ndim
    found = [short(p) for p in case.placements(given, 0, case.draws(given))]
    every = ["R", *(f"S({d})" for d in range(ndim)), *(f"P({k})" for k in PARTIAL_KINDS if k != "product")]
    holds = [p for p in every if case.judge(Claim(rule(one, f"{inputs} -> {p}"), "test")) is None]
    assert found == (["R"] if "R" in holds else holds)


# What is sent on to real processes.


def test_a_case_holds_what_each_rank_was_given():
    one = sample("mm.default", X, numbers(6, 2))
    case = probe(one).case(rule(one, "S(1), P(avg) -> P(sum)"), draw=1)
    assert (case.ranks, case.sample, len(case.held)) == (2, one, 2)
    for held, placement, whole in zip(case.held, case.rule.inputs, one.tensors, strict=True):
        torch.testing.assert_close(assemble_axis(held, placement), whole)
    again = probe(one).case(rule(one, "S(1), P(avg) -> P(sum)"), draw=1)
    assert torch.equal(case.held[1][0], again.held[1][0])


def test_a_claim_that_only_the_sources_own_dispatch_can_judge_is_suspect():
    found = judged(sample("relu.default", X), "S(0) -> S(0)", whole="it has a handler")
    assert (found.verdict, found.evidence.reason) == (Verdict.SUSPECT, "it has a handler")


def test_an_instance_says_what_was_tried():
    one = sample("relu.default", X)
    claim = Claim(rule(one, "S(0) -> S(0)"), "op strategy")
    (found,) = check_claims(one, run_oracle(one), 3, [claim], seed=0)
    assert (found.rule, found.ranks, found.sample, found.source) == (claim.rule, 3, one, "op strategy")


def test_lists_of_results_are_judged_one_by_one():
    one = sample("split.Tensor", X, 2)
    assert_sound(one, "S(1) -> S(1), S(1)")
    assert_wrong(one, "S(0) -> S(0), S(0)", "rank 0")


def test_tensors_in_a_list_have_placements_of_their_own():
    call = Call("aten.cat.default", ([Leaf(0), Leaf(1)], 0))
    assert overload(call.op) is torch.ops.aten.cat.default
    one = sample("cat.default", [X, X], 0)
    assert one.call == call
    assert_sound(one, "S(1), S(1) -> S(1)")
    assert_wrong(one, "S(0), S(0) -> S(0)", "the shards make")


# Other values, by name.


def with_variants(one, text, *names, ranks=2):
    oracle = run_oracle(one)
    told = {name: oracle_with_values(one, oracle, name, 3) for name in names}
    (found,) = check_claims(one, oracle, ranks, [Claim(rule(one, text), "test")], seed=3, variants=told)
    return found


def test_the_evidence_names_the_values_that_repeat_it():
    one = sample("any.dim", X + 9, 1)
    found = with_variants(one, "P(sum) -> P(sum)", "ascending", "zeros")
    assert (found.verdict, found.evidence.variant, found.evidence.draw) == (Verdict.UNSOUND, "zeros", 0)
    again = Probe(one, oracle_with_values(one, run_oracle(one), "zeros", 3), 2, seed=3, variant="zeros")
    assert again.judge(Claim(found.rule, "test")) == found.evidence
    assert [x.sum().item() for x in again.case(found.rule, 0).oracle.inputs] == [0.0]


def test_values_are_asked_only_of_the_rules_that_they_are_for():
    one = sample("nan_to_num.default", X)
    assert with_variants(one, "P(sum) -> P(sum)", "specials").verdict is Verdict.SOUND
    assert with_variants(one, "P(sum) -> P(sum)", "holes").verdict is Verdict.UNSOUND
    assert with_variants(planted("patched", X), "S(0) -> S(0)", "cancelling").verdict is Verdict.SOUND
    assert with_variants(planted("patched", X), "S(0) -> S(0)", "holes").verdict is Verdict.UNSOUND


@pytest.mark.parametrize("op", ["sign.default", "nan_to_num.default", "tanh.default"])
@pytest.mark.parametrize("kind", ["min", "max"])
def test_what_makes_a_number_of_nan_is_no_fault_of_a_minimum_which_backends_reduce_differently(op, kind):
    """gloo keeps a NaN or drops it by the order of the ranks: what the rule has to give is defined where all have it."""
    assert with_variants(sample(op, X), f"P({kind}) -> P({kind})", "holes").verdict is Verdict.SOUND
    assert with_variants(planted("has_nan", X), f"P({kind}) -> P(sum)", "holes").verdict is Verdict.UNSOUND


def test_a_count_of_nan_is_found_where_several_ranks_have_one():
    one = planted("has_nan", X)
    assert_sound(one, "S(0) -> P(sum)", ranks=3)
    assert with_variants(one, "S(0) -> P(sum)", "specials", ranks=3).verdict is Verdict.SOUND
    assert with_variants(one, "S(0) -> P(sum)", "holes", ranks=3).verdict is Verdict.UNSOUND
    assert with_variants(one, "S(0) -> P(max)", "holes", ranks=3).verdict is Verdict.SOUND


def test_far_parts_are_parts_of_the_same_values_and_far():
    one = sample("neg.default", X)
    near, far = (
        Probe(one, run_oracle(one), 3, seed=0, variant=name).held(0, Partial("sum"), 0) for name in ("", "cancelling")
    )
    assert torch.allclose(sum(far), X) and torch.allclose(sum(near), X)
    assert max(x.abs().max() for x in far) > 100 * max(x.abs().max() for x in near)
    assert len(Probe(one, run_oracle(one), 3, seed=0, variant="cancelling").draws([Partial("sum")])) == 1


@pytest.mark.parametrize("op", ["div.Tensor", "mul.Tensor", "lerp.Scalar"])
def test_a_singularity_that_parts_meet_is_not_the_rules_fault(op):
    """1 / 0 is infinite, and its parts, of both signs, make NaN."""
    one = sample(op, X, X, *([0.5] if "lerp" in op else []))
    text = "P(sum), P(sum) -> P(sum)" if "lerp" in op else "P(sum), R -> P(sum)"
    assert with_variants(one, text, "ties", "zeros", "holes", "cancelling", "negative").verdict is Verdict.SOUND


def test_an_exponential_of_far_parts_that_overflows_is_not_the_rules_fault():
    """exp of a sum is the product of exps; of 1000 and -999 it is infinity times zero."""
    one = sample("exp.default", X)
    names = ("holes", "infinity", "minus infinity", "cancelling", "ties", "zeros")
    assert with_variants(one, "P(sum) -> P(product)", *names).verdict is Verdict.SOUND
    assert with_variants(one, "P(sum) -> P(sum)", "cancelling").verdict is Verdict.UNSOUND


def test_nan_that_parts_make_of_a_number_is_the_rules_fault():
    """0 times the logarithm of 0 is defined as 0, and the parts of 0 make inf - inf."""
    one = sample("special_xlog1py.default", X, X)
    assert_sound(one, "P(sum), R -> P(sum)")
    assert with_variants(one, "P(sum), R -> P(sum)", "ties").verdict is Verdict.UNSOUND
    assert with_variants(one, "S(0), S(0) -> S(0)", "ties").verdict is Verdict.SOUND


@pytest.mark.parametrize("text", ["P(sum) -> P(sum)", "P(avg) -> P(avg)"])
def test_a_result_that_is_singular_for_the_samples_own_values_is_not_compared_either(text):
    assert_sound(sample("div.Scalar", X, 0), text, ranks=3)
    assert_wrong(sample("log.default", X.abs()), text, "the parts make")
    assert_wrong(sample("nan_to_num.default", X * math.inf), "P(sum) -> P(avg)", "the parts make")


def test_an_op_that_refuses_the_parts_of_other_values_says_nothing():
    small = planted("fussy", torch.full((4,), 1e-3, dtype=torch.float64))
    assert (
        max(
            x.max() for x in Probe(small, run_oracle(small), 2, seed=3, variant="cancelling").held(0, Partial("sum"), 0)
        )
        > 1
    )
    assert with_variants(small, "P(sum) -> P(sum)", "cancelling").verdict is Verdict.SOUND


def test_an_average_of_integers_near_their_ends_is_not_asked():
    one = sample("neg.default", torch.arange(12))
    assert with_variants(one, "R -> P(avg)", "limits").verdict is Verdict.SOUND
    assert with_variants(one, "R -> P(sum)", "limits").verdict is Verdict.UNSOUND


def test_a_shard_of_a_dim_that_a_tensor_has_not_cannot_be_tested():
    one = sample("cat.default", [torch.zeros(0, dtype=torch.float64), X], 1)
    found = judged(one, "S(1), S(1) -> S(1)")
    assert (found.verdict, found.evidence.reason) == (Verdict.UNTESTABLE, "S(1) of a tensor that has no such dim")


def test_a_probe_may_be_given_other_values_than_the_samples():
    one = sample("relu.default", X)
    other = run_oracle(one, [torch.full_like(X, math.nan)])
    assert Probe(one, other, 2, seed=0, variant="nan").held(0, Shard(0), 0)[0].isnan().all()
