import pytest
import torch

from strategies.inputs.variants.adversarial import number_tensors
from strategies.validation.missing_rules import RuleEvidence, gather_evidence, has_distinct_elements
from tests.strategies.cases import numbers as drawn
from tests.strategies.cases import rule, sample
from tests.strategies.planted_ops import planted

X = drawn(4, 6)


def weighed(one, text, ranks=(2, 3), seed=0):
    (backing,) = gather_evidence([one], [rule(one, text)], ranks, number_tensors([one]), seed).values()
    return backing


def test_what_holds_is_borne_out_by_calls_shapes_uneven_shards_and_mesh_sizes():
    found = weighed(planted("forgotten", X), "S(0) -> S(0)")
    assert found.enough
    assert (len(found.samples), found.shapes, found.uneven, found.ranks) == (6, 2, True, (2, 3))


def test_two_and_three_ranks_are_always_asked_and_others_too():
    assert weighed(planted("forgotten", X), "P(sum) -> P(sum)", ranks=(4,)).ranks == (2, 3, 4)


@pytest.mark.parametrize(
    ("backing", "enough"),
    [
        (RuleEvidence(("a", "b", "c"), 2, True, (2, 3)), True),
        (RuleEvidence(("a", "b"), 2, True, (2, 3)), False),
        (RuleEvidence(("a", "b", "c"), 1, True, (2, 3)), False),
        (RuleEvidence(("a", "b", "c"), 2, False, (2, 3)), False),
        (RuleEvidence(("a", "b", "c"), 2, True, (2,)), False),
        (RuleEvidence(("a", "b", "c"), 2, True, (2, 3), "it fails"), False),
    ],
)
def test_a_rule_needs_three_samples_two_shapes_one_uneven_and_two_mesh_sizes(backing, enough):
    assert backing.enough is enough


@pytest.mark.parametrize(
    ("one", "text"),
    [
        (sample("add.Tensor", X[0, :4], X[0, :4]), "P(max), P(min) -> P(avg)"),
        (sample("add.Tensor", X, X, alpha=-3), "R, P(max) -> P(max)"),
        (sample("mul.Tensor", X, torch.tensor(2.0)), "P(max), R -> P(max)"),
        (sample("maximum.default", X, torch.tensor(-99.0)), "R, P(max) -> R"),
        (sample("relu.default", X.abs()), "P(sum) -> P(sum)"),
        (sample("pow.Tensor_Scalar", X.abs(), 3), "P(min) -> P(min)"),
        (sample("expm1.default", drawn(12, 12, dtype=torch.int64)), "P(avg) -> P(min)"),
        (planted("averaged", X), "S(0) -> P(avg)"),
        (sample("add.Tensor", X, X[:1]), "S(0), R -> S(0)"),
        (sample("amax.default", X, [0]), "S(0) -> P(max)"),
    ],
    ids=lambda x: x if isinstance(x, str) else x.op,
)
def test_what_holds_by_chance_or_for_some_values_or_sizes_is_spoken_against(one, text):
    found = weighed(one, text)
    assert found.against and not found.enough


def test_a_coincidence_of_two_ranks_is_not_one_of_three():
    """At two ranks the middle of a maximum and a minimum may be the average; at three there are others."""
    assert "P" not in weighed(planted("forgotten", X), "P(max) -> P(max)").against
    assert weighed(planted("forgotten", X), "P(max) -> P(avg)").against


def test_what_is_claimed_for_other_sizes_is_not_missing():
    found = weighed(sample("neg.default", X), "S(0) -> S(0)")
    assert found.against.startswith("claimed for")


def test_results_that_are_all_alike_bear_nothing_out():
    found = weighed(planted("alive", X), "S(0) -> S(0)")
    assert not found.enough and not found.samples


def test_one_number_counts_by_its_value():
    assert weighed(sample("sum.default", X), "P(avg) -> P(avg)").enough
    assert has_distinct_elements(X) and not has_distinct_elements(X[0, 0]) and not has_distinct_elements(X * 0)


def test_another_seed_makes_other_calls_and_the_same_verdict():
    first, second = (weighed(planted("forgotten", X), "P(min) -> P(min)", seed=seed) for seed in (0, 1))
    assert first.enough and second.enough


def test_a_call_that_has_no_other_shape_leaves_a_rule_unproven():
    found = weighed(planted("forgotten", torch.tensor(2.0)), "P(sum) -> P(sum)")
    assert (found.shapes, found.against, found.enough) == (1, "", False)
