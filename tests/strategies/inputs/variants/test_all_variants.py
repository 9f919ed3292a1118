import math
from collections import Counter
from dataclasses import replace

import pytest
import torch

from localtensor.layout.tolerance import MAX_JUMP_SHARE
from strategies.inputs.variants import all_variants
from strategies.inputs.variants.all_variants import (
    FOLLOWED_SAMPLES,
    FORMS,
    PER_SAMPLE,
    PER_TRACED,
    followed_samples,
    samples_for,
    variations,
    wild_values,
)
from strategies.inputs.variants.dims_and_layout import InputForm, with_dims_respelled
from strategies.inputs.variants.sizes import with_operand_of_another_length
from strategies.model.oracle import run_oracle, same_results
from strategies.model.verdict import ALONE, MESHES, PAIRS
from tests.strategies.cases import numbers, sample

# Dims spelled the other way.


@pytest.mark.parametrize(("one", "want"), [
    (sample("cumsum.default", numbers(2, 3), 1), [(-1,), (-2,)]),
    (sample("cumsum.default", numbers(2, 3), -2), [(0,), (1,)]),
    (sample("sum.dim_IntList", numbers(2, 3, 4), [0, -1], True), [([-3, 2], True), ([-4, 3], True)]),
    (sample("transpose.int", numbers(2, 3), 0, 1), [(-2, -1), (-3, -2)]),
], ids=lambda given: given.op if hasattr(given, "op") else None)  # fmt: skip
def test_dims_are_respelled_in_both_countings(one, want):
    assert [other.call.args[1:] for other in with_dims_respelled(one)] == want
    assert {other.origin for other in with_dims_respelled(one)} == {"test, dims respelled"}


def test_dims_among_the_keywords_are_respelled():
    assert with_dims_respelled(sample("aminmax.default", numbers(2, 3), dim=1))[0].call.kwargs == (("dim", -1),)


@pytest.mark.parametrize("one", [
    sample("relu.default", numbers(2, 3)),
    sample("mul.Scalar", numbers(2, 3), 1),
    sample("_softmax.default", numbers(2, 3), 1, False),
    sample("roll.default", numbers(2, 3), [1], []),
    sample("zeros.default", [2, 3]),
], ids=lambda one: one.op)  # fmt: skip
def test_calls_without_dims_and_ops_that_trust_their_caller_stay_as_they_are(one):
    assert with_dims_respelled(one) == []


@pytest.mark.parametrize(("one", "which"), [
    (sample("cumsum.default", numbers(3, 3), 1), 0),
    (sample("unsqueeze.default", numbers(3, 3), 2), 1),
    (sample("stack.default", [numbers(3, 3), numbers(3, 3)], 0), 1),
], ids=lambda given: getattr(given, "op", None))  # fmt: skip
def test_one_of_the_two_is_the_same_call(one, which):
    def gives_the_same(other):
        try:
            return same_results(run_oracle(one), run_oracle(other))
        except (IndexError, RuntimeError):
            return False

    assert [gives_the_same(other) for other in with_dims_respelled(one)] == [i == which for i in range(2)]


# Operands of another length.


def test_each_operand_after_the_first_is_shortened_and_lengthened_along_each_dim():
    one = sample("gather.default", numbers(4, 6), 0, torch.zeros(4, 6, dtype=torch.int64))
    found = with_operand_of_another_length(one)
    assert [other.arguments()[2] for other in found] == ["i64[3,6]", "i64[7,6]", "i64[4,4]", "i64[4,10]"]
    assert [other.origin for other in found] == ["test, operand 1 shortened", "test, operand 1 lengthened"] * 2
    assert all(other.tensors[0] is one.tensors[0] for other in found)
    assert torch.equal(found[0].call(found[0].tensors), one.call(one.tensors)[:3])


@pytest.mark.parametrize("one", [
    sample("relu.default", numbers(4, 6)),
    sample("zeros.default", [4]),
    sample("mul.Tensor", numbers(4, 6), numbers(6)),
    sample("mul.Tensor", numbers(3, 2), numbers(3, 2)),
    sample("mul.Tensor", numbers(4, 6), numbers(8, 9)),
    sample("tanh_backward.default", numbers(4), numbers(4)),
    sample("native_layer_norm.default", numbers(4, 6), [6], numbers(6), numbers(6), 1e-5),
    sample("_softmax_backward_data.default", numbers(4, 6), numbers(4, 6), 1, torch.float64),
], ids=lambda one: f"{one.op}{one.arguments()}")  # fmt: skip
def test_short_or_unequal_operands_and_ops_that_trust_their_caller_stay_as_they_are(one):
    assert with_operand_of_another_length(one) == []


# Which forms are tried on which sample.


def told(one, number=0, **options):
    return list(variations(one, run_oracle(one), number, seed=0, **({"traced": False} | options)))


def test_the_sample_itself_comes_first():
    one = sample("cumsum.default", numbers(4, 6), 1)
    (first, oracle, name), *others = told(one)
    assert first is one and name == "" and torch.equal(oracle.outputs[0], one.tensors[0].cumsum(1))
    assert len(others) == 2 + PER_SAMPLE and all(name for _, _, name in others)
    assert "uneven" in {name for *_, name in others} and len(told(one, 1)) == 2 + PER_SAMPLE


def test_every_form_is_a_call_that_the_op_takes_with_its_own_oracle():
    for one, oracle, _ in told(sample("gather.default", numbers(4, 4), 1, numbers(4, 4).gt(0).long()), budget=99):
        assert torch.equal(one.call(one.tensors).nan_to_num(7.0), oracle.outputs[0].nan_to_num(7.0))


def test_no_two_calls_are_the_same_to_a_rule():
    calls = [(str(one.arguments()), [x.stride() for x in one.tensors])
             for one, _, _ in told(sample("sum.dim_IntList", numbers(4, 6), [1]), budget=99)]  # fmt: skip
    assert all(call not in calls[:i] for i, call in enumerate(calls))


def test_two_forms_that_make_one_call_have_it_tried_once():
    one = sample("cumsum.default", numbers(3, 3), 1)
    first, second = (
        InputForm(name, "", lambda s: [sample("cumsum.default", s.tensors[0], 0)]) for name in ("first", "second")
    )
    assert [name for *_, name in told(one, forms=(first, second))] == ["", "first"]


def test_over_the_samples_of_one_overload_every_form_that_applies_has_its_turn():
    one = sample("sum.dim_IntList", numbers(4, 6), [1])
    able = {name for *_, name in told(one, budget=99)} - {""}
    turns = Counter()
    for number in range(16):
        assert len(told(one, number, turns=turns)) == 1 + PER_SAMPLE + (number < 8) + (number < 1)
    assert set(turns) == able
    assert turns["dims respelled"] > turns["no rows"] >= 1


def test_some_forms_are_always_tried_on_the_first_samples_besides_the_others():
    one = sample("cumsum.default", numbers(4, 4), 1)
    first, last = ([name for *_, name in told(one, number, turns=Counter({"dims respelled": 99}))] for number in (7, 8))
    assert first[1] == "dims respelled" and len(first) == 2 + PER_SAMPLE
    assert "dims respelled" not in last and len(last) == 1 + PER_SAMPLE


def test_a_form_that_makes_many_calls_begins_with_another_each_turn():
    one = sample("add.Tensor", numbers(4, 6), numbers(4, 6, seed=1), alpha=3)
    (form,) = (form for form in FORMS if form.name == "other scalars")
    turns = Counter()
    alphas = [told(one, n, turns=turns, budget=1, forms=(form,))[1][0].arguments()[2:] for n in range(4)]
    assert alphas == [["alpha=0"], [], ["alpha=-1"], ["alpha=2"]]


def test_the_same_number_and_turns_give_the_same_forms():
    one = sample("sum.dim_IntList", numbers(4, 6), [1])
    first, again, later = ([name for *_, name in told(one, number)] for number in (0, 0, 9))
    assert first == again != later


def test_a_form_that_promises_the_same_must_give_it():
    one = sample("cumsum.default", numbers(3, 3), 1)
    lies = InputForm("lies", "", lambda s: [sample("cumsum.default", s.tensors[0], 0)], same=True)
    other = InputForm("other", "", lambda s: [sample("cumsum.default", s.tensors[0], 0)])
    assert [name for *_, name in told(one, forms=(lies,))] == [""]
    assert [name for *_, name in told(one, forms=(other,))] == ["", "other"]


def test_calls_that_the_op_refuses_or_that_say_nothing_are_left_out():
    one = sample("mm.default", numbers(4, 4), numbers(4, 4))
    refused = InputForm("refused", "", lambda s: [sample("mm.default", numbers(4, 4), numbers(3, 4))])
    floors = sample("floor.default", torch.arange(4.0))
    steps = InputForm("steps", "", lambda s: [sample("floor.default", torch.arange(1.0, 9.0))])
    assert [name for *_, name in told(one, forms=(refused,))] == [""]
    assert run_oracle(sample("floor.default", torch.arange(1.0, 9.0))).unstable > MAX_JUMP_SHARE
    assert [name for *_, name in told(floors, forms=(steps,))] == [""]


def test_of_the_users_own_samples_and_of_decompositions_there_are_fewer():
    own = replace(sample("cumsum.default", numbers(4, 4), 1), origin="samples() #3")
    assert [name for *_, name in told(own, budget=9)] == ["", "dims respelled"]
    assert len(told(sample("cumsum.default", numbers(4, 4), 1), budget=9, traced=True)) == 1 + PER_TRACED


def norms(*orders):
    return [sample("linalg_vector_norm.default", numbers(4, size), order, [1]) for size, order in enumerate(orders, 2)]


def test_what_follows_an_op_is_tried_with_infinite_numbers_too_along_some_dims_and_over_all():
    finite = [2.0, 1.0, 3.0, 0.5, -1.0, 6.0, 7.0]
    chosen = followed_samples(norms(*finite, math.inf), 3, seed=0)
    assert [(one.call.args[1], one.call.args[2:]) for one in chosen[3:]] == [
        (math.inf, ([1],)), (math.inf, ([],)), (math.inf, ([0, 1],)),
    ]  # fmt: skip
    assert len(followed_samples(norms(*finite), 3, seed=0)) == 3


def test_of_the_samples_that_follow_some_have_the_maximum_on_the_first_rank_and_some_on_the_last():
    chosen = followed_samples(norms(*[2.0, 1.0, 3.0, 0.5, -1.0, 6.0]), 3, seed=0)
    assert [one.origin.rpartition(", ")[2] for one in chosen[1:]] == ["ascending", "descending"]
    (first, last) = (one.tensors[0] for one in chosen[1:])
    assert float(first[-1, -1]) == float(first.max()) and float(last[0, 0]) == float(last.max())
    own = [replace(one, origin="samples() #1") for one in norms(2.0, 1.0, 3.0)]
    assert all("cending" not in one.origin for one in followed_samples(own, 3, seed=0))


def test_an_order_that_the_op_refuses_is_not_taken(monkeypatch):
    monkeypatch.setattr(all_variants, "run_stable_oracle", lambda *given, **options: None)
    assert all("cending" not in one.origin for one in followed_samples(norms(2.0, 1.0, 3.0), 3, seed=0))


def test_infinite_numbers_that_are_chosen_anyway_come_once():
    chosen = followed_samples(norms(math.inf), 3, seed=0)
    assert len({id(one) for one in chosen}) == len(chosen)
    assert [one.call.args[2:] for one in chosen].count(([1],)) == 1


def test_names_and_reasons_are_there_once():
    assert len({form.name for form in FORMS}) == len(FORMS)
    assert all(form.why and form.weight >= 1 for form in FORMS)


@pytest.mark.parametrize("args", [(None, 0.5), (None, None, 2.0)], ids=str)
def test_a_call_that_is_given_an_optional_number_has_all_that_is_not_finite(args):
    one = sample("nan_to_num.default", numbers(4, 6), *args)
    assert wild_values(one, run_oracle(one), 0).keys() == {"specials", "holes", "infinity", "minus infinity"}
    without = sample("nan_to_num.default", numbers(4, 6))
    assert wild_values(without, run_oracle(without), 0) == {}


def test_a_flag_a_dim_and_a_number_that_is_always_given_are_no_optional_numbers():
    for one in (
        sample("argmax.default", numbers(4, 4), 1),
        sample("add.Tensor", numbers(4), numbers(4), alpha=2.0),
        sample("sum.dim_IntList", numbers(4, 4), [0], True),
    ):
        assert wild_values(one, run_oracle(one), 0) == {}


def test_with_what_follows_an_op_diverse_samples_are_tried_some_with_a_flag_toggled():
    weight, index = numbers(8, 4), torch.arange(4)
    plain = [sample("embedding.default", weight, index + n) for n in range(5)]
    padded = [sample("embedding.default", weight, index, 2)]
    chosen = samples_for(PAIRS, [*plain, *padded], 0)
    assert any(one is padded[0] for one in chosen)
    scaled = [one for one in chosen if "scale_grad_by_freq=True" in one.origin]
    assert scaled and {one.origin for one in chosen} > {"test"}
    assert all(one.tensors[1].unique().numel() < 4 for one in scaled), "only indices that come twice are scaled"
    assert samples_for(ALONE, plain, 0) == tuple(plain)
    rows = samples_for(PAIRS, [sample("argmax.default", weight, 1)], 0)
    assert [one.call.args[1:] for one in rows] == [(1,), ()], "the largest of all is not tried with a dim"


def test_on_several_axes_the_first_sample_is_tried_and_one_whose_result_is_as_large_as_its_tensor():
    x = numbers(4, 4)
    given = [sample("new_ones.default", x, [2, 3]), sample("new_ones.default", x, [2])]
    chosen = samples_for(MESHES, given, 0)
    assert chosen[0] is given[0] and len(chosen) == FOLLOWED_SAMPLES[MESHES]["real"]
    assert any(one.call.args[1] == [4, 4] for one in chosen[1:])
