"""Which other forms and other values of its samples a validation tries; what else it does is tested in test_overload.py."""

from dataclasses import replace

import pytest
import torch

from strategies.inputs.variants.all_variants import FORMS, PER_SAMPLE, VALUES, variations
from strategies.model.oracle import run_oracle, same_results
from strategies.model.verdict import WorkUnit
from strategies.validation import overload
from strategies.validation.sources import dtensor as claim_sources
from tests.strategies.cases import numbers, sample
from tests.strategies.planted_ops import planted
from tests.strategies.validation.test_overload import by_unit, case, validated
from tests.strategies.wrong_here import if_cumprod_has_a_rule, if_cumprod_is_wrong

X = numbers(4, 6)


@pytest.fixture
def tried(monkeypatch):
    """Each call that is judged, in order, and the names of its other values."""
    asked = []

    def noted(one, oracle, ranks, claimed, *, seed, variants, by_dtensor):
        asked.append((one, tuple(variants)))
        return []

    monkeypatch.setattr(overload, "check_claims", noted)
    return asked


@pytest.fixture
def all_drawn(monkeypatch):
    """No argument and no dtype counts as left out by the samples."""
    monkeypatch.setattr(overload.Undrawn, "calls", lambda *_: iter(()))


# Other forms.


@if_cumprod_is_wrong
def test_the_negative_dim_is_tried_though_the_sample_came_with_a_positive_one():
    charges = validated(sample("cumprod.default", X, 1)).suspects["aten.cumprod.default: S(1) -> S(1)"]
    assert {charge.instance.sample.call.args[1] for charge in charges} == {-1}
    assert charges[0].instance.sample.origin == "test, dims respelled"


def test_only_a_spelling_that_gives_the_same_is_tried(tried):
    """Of three dims the last is -1; -2 is another call, as unsqueeze counts the new dim."""
    one = sample("unsqueeze.default", numbers(3, 3), 2)
    validated(one)
    respelled = [other for other, _ in tried if other.origin == "test, dims respelled"]
    assert [other.call.args[1] for other in respelled] == [-1]
    assert same_results(run_oracle(one), run_oracle(respelled[0]))


@if_cumprod_has_a_rule
@pytest.mark.usefixtures("all_drawn")
def test_each_form_counts_as_a_sample_with_all_its_claims():
    one = sample("cumprod.default", X, 1)
    forms = [form for form, *_ in variations(one, run_oracle(one), 0, seed=0, traced=False)]
    unit_result = validated(one)
    assert (unit_result.samples, unit_result.crashed, unit_result.skipped) == (len(forms), [], {})
    assert (
        unit_result.tried
        == sum(len(claim_sources.claims(form, 2, run_oracle(form).raw)) for form in forms)
        > len(forms)
        > 1
    )


def test_an_operand_of_another_length_is_tried_where_the_op_takes_that(tried):
    index = torch.zeros(4, 6, dtype=torch.int64)
    assert_clean(validated(sample("gather.default", X, 0, index)))
    shorter = [other for other, _ in tried if other.origin.endswith("shortened")]
    assert [[tuple(x.shape) for x in other.tensors] for other in shorter] == [[(4, 6), (3, 6)]]
    tried.clear()
    assert_clean(validated(sample("add.Tensor", X, X)))
    assert tried and not any(other.origin.endswith("shortened") for other, _ in tried)


def assert_clean(unit_result):
    """What an op refuses of a form is no sample, and nothing to be told."""
    assert (unit_result.crashed, unit_result.skipped) == ([], {})


def test_a_users_own_samples_are_tried_in_forms_of_the_same_call_only(tried):
    given = sample("gather.default", X, 0, torch.zeros(4, 6, dtype=torch.int64))
    own = replace(given, origin="samples() of mine")
    validated(own)
    calls = [other.arguments() for other, _ in tried]
    assert len(calls) > 1 and all(same_results(run_oracle(own), run_oracle(other)) for other, _ in tried)
    tried.clear()
    validated(given)
    assert not all(same_results(run_oracle(given), run_oracle(other)) for other, _ in tried)


@if_cumprod_has_a_rule
@pytest.mark.usefixtures("all_drawn")
def test_forms_take_turns_over_the_samples_of_one_class(tried):
    def origins(count):
        tried.clear()
        validated(*(sample("cumprod.default", numbers(4, 6, seed=n), 1) for n in range(count)))
        return [other.origin for other, _ in tried]

    always = sum(form.always > 0 for form in FORMS)
    assert len(origins(1)) <= 1 + PER_SAMPLE + always
    assert len(set(origins(8))) > 2 * len(set(origins(1)))


def test_turns_are_those_of_one_class_so_that_a_class_alone_tries_the_same(tried):
    real = [sample("cumprod.default", numbers(4, 6, seed=n), 1) for n in range(4)]
    other = [sample("cumprod.default", numbers(4, 6, dtype=torch.complex64, seed=n), 1) for n in range(4)]
    mixed = [one for both in zip(real, other, strict=True) for one in both]
    by_unit(*mixed)
    every = shown(tried)
    for dtypes in ("real", "complex"):
        tried.clear()
        by_unit(*mixed, only=frozenset([WorkUnit("aten.cumprod.default", "alone", dtypes, (2,))]))
        assert shown(tried) == [line for line in every if ("['c" in line[0]) == (dtypes == "complex")]
    assert len(every) > 2 * len(mixed) and any(variants for *_, variants in every)


def shown(tried):
    return [(str(one.arguments()), one.origin, variants) for one, variants in tried]


# Other values.


def test_a_rule_that_is_wrong_for_not_a_number_is_suspected_with_the_name_of_the_values():
    one = planted("patched", numbers(4, 4))
    charges = validated(one, seed=3).suspects["planted.patched.default: S(0) -> S(0)"]
    assert {charge.instance.evidence.variant for charge in charges} <= {"specials", "holes"}
    (charge,) = [c for c in charges if c.instance.sample is one]
    assert not charge.instance.sample.tensors[0].isnan().any()
    shown = case(charge, seed=3)
    assert shown.oracle.inputs[0].isnan().any()
    assert torch.equal(torch.cat(shown.held[0]).isnan(), shown.oracle.inputs[0].isnan())


def test_other_values_take_turns_over_the_samples(tried):
    validated(*(sample("neg.default", numbers(4, 6, seed=n)) for n in range(7)))
    assert all(len(variants) <= overload.VALUES_PER_SAMPLE for _, variants in tried)
    assert all(len(variants) <= overload.VALUES_PER_FORM for one, variants in tried if one.origin != "test")
    assert any(variants for one, variants in tried if one.origin != "test")
    names = [name for _, variants in tried for name in variants]
    assert {"specials", "holes", "ascending", "ties", "zeros", "negative"} <= set(names)


# What was left out.


def left_out(*samples, **task):
    """What each unit records as left out, by unit; units without anything are not there."""
    return {str(h.unit): h.left_out for h in by_unit(*samples, **task) if h.left_out}


def test_each_form_and_each_kind_of_values_was_tried_or_is_recorded_as_left_out(tried, monkeypatch):
    met = set()

    def noted(*given, **more):
        for made in variations(*given, **more):
            met.add(made[2])
            yield made

    monkeypatch.setattr(overload, "variations", noted)
    one = sample("cumprod.default", X, 1)
    (unit,) = found = left_out(one, ranks=(2, 3))
    assert unit == "aten.cumprod.default alone real 2", "once for all meshes"
    forms = {n for what, names in found[unit].items() if what.startswith("forms") for n in names}
    values = {n for what, names in found[unit].items() if what.startswith("values") for n in names}
    assert forms == {form.name for form in FORMS} - met and 0 < len(forms) < len(FORMS)
    assert values == {kind.name for kind in VALUES} - {name for _, names in tried for name in names}


@if_cumprod_has_a_rule
def test_what_a_sample_refuses_is_distinguished_from_what_had_no_turn(tried):
    one = sample("cumprod.default", X, 1)
    few = left_out(one)["aten.cumprod.default alone real 2"]
    assert "keepdim" in few["forms that do not apply"], "cumprod has no such argument"
    assert "uneven" not in few["forms without a turn"] and "transposed" in few["forms without a turn"], (
        "two forms of a sample are tried, and there is one sample"
    )
    many = left_out(*[sample("cumprod.default", numbers(4 + i, 6), 1) for i in range(14)])
    assert "keepdim" in many["aten.cumprod.default alone real 2"]["forms that do not apply"]
    assert "forms without a turn" not in many["aten.cumprod.default alone real 2"]


def test_uneven_sizes_are_tried_on_the_first_sample_of_each_class_of_dtypes(tried):
    validated(*(sample("neg.default", x) for x in (X, X, numbers(4, 6).long(), numbers(4, 6).to(torch.complex64))))
    uneven = [one for one, _ in tried if "sizes {4: 5" in one.origin]
    assert {x.dtype for one in uneven for x in one.tensors} >= {torch.float64, torch.int64, torch.complex64}


def test_a_dtype_that_the_op_does_not_take_is_left_out_and_one_that_it_takes_is_not(tried):
    found = left_out(sample("cumprod.default", X, 1), sample("cumprod.default", X, 0))[
        "aten.cumprod.default alone real 2"
    ]
    assert found["dtypes that do not apply"] == ["float8_e4m3fn"] and "dtypes without a turn" not in found
    assert any(x.dtype == torch.bfloat16 for other, _ in tried for x in other.tensors)


def test_placement_tuples_of_a_decomposition_that_were_not_drawn_are_counted(monkeypatch):
    from strategies.validation.sources import dtensor as sources

    one = sample("mse_loss.default", X, X)
    if overload.dtensor.registry_of(torch.ops.aten.mse_loss.default) != "decomposition":
        pytest.skip("this torch has a rule for it")
    every = left_out(one)["aten.mse_loss.default alone real 2"]
    assert "placement tuples" not in every
    monkeypatch.setattr(sources, "MOST_TRACES", 5)
    (told,) = left_out(one)["aten.mse_loss.default alone real 2"]["placement tuples"]
    drawn, of = told.removesuffix(" not drawn").split(" of ")
    assert int(of) - int(drawn) == 5


def test_a_journal_keeps_what_was_left_out():
    from strategies.validation.finding import read_task, task_line

    (result,) = [h for h in by_unit(sample("cumprod.default", X, 1)) if h.left_out]
    assert read_task(task_line(result, 0.0)).left_out == result.left_out
