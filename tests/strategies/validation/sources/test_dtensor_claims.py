import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate

from localtensor.layout.spec import short, shorts
from strategies.model.oracle import run_oracle
from strategies.model.rule import overload
from strategies.model.verdict import Verdict
from strategies.torch_api.dtensor import PropagatorQuery
from strategies.validation.probe import check_claims
from strategies.validation.sources import dtensor as claim_sources
from strategies.validation.sources.dtensor import MOST_TUPLES, claims, input_tuples, placement_options
from tests.strategies.cases import numbers, sample
from tests.strategies.planted_ops import planted
from tests.torch_here import before_2_14

X = numbers(4, 6)


def claimed(one, ranks=2):
    return claims(one, ranks, run_oracle(one).raw)


def lines(found):
    return [str(claim.rule).partition(": ")[2] for claim in found]


def verdicts(one, ranks=2):
    """Each claim of DTensor's about this call, and what the probe says of it."""
    found = claimed(one, ranks)
    instances = check_claims(one, run_oracle(one), ranks, found, seed=0)
    return dict(zip(lines(found), (i.verdict for i in instances), strict=True))


# Each source.


def test_the_lines_of_a_single_dim_strategy_are_claims():
    found = claimed(sample("neg.default", X))
    assert {claim.source for claim in found} == {"single-dim strategy"}
    assert set(lines(found)) == {
        "R -> R", "S(0) -> S(0)", "S(1) -> S(1)",
        "P(sum) -> P(sum)", "P(avg) -> P(avg)", "P(max) -> P(min)", "P(min) -> P(max)",
    }  # fmt: skip


@before_2_14
def test_an_op_strategy_is_asked_for_each_placement():
    found = claimed(sample("sum.dim_IntList", X, [0]))
    assert {claim.source for claim in found} == {"op strategy"}
    assert lines(found) == ["R -> R", "S(0) -> P(sum)", "S(1) -> S(0)", "P(sum) -> P(sum)"]


def test_a_decomposition_makes_claims_for_each_output():
    found = claimed(sample("aminmax.default", X, dim=0))
    assert {claim.source for claim in found} == {"decomposition"}
    assert lines(found) == ["R -> R, R", "S(0) -> P(min), P(max)", "S(1) -> S(0), S(0)"]


def test_a_prop_rule_is_asked_for_each_placement(monkeypatch):
    from torch.distributed.tensor._op_schema import OutputSharding

    one = planted("approximate_floor", X)
    rules = DTensor._op_dispatcher.sharding_propagator.op_to_rules
    monkeypatch.setitem(rules, overload(one.op), lambda schema: OutputSharding(schema.args_spec[0]))
    found = claimed(one)
    assert {claim.source for claim in found} == {"rule"}
    kinds = ("sum", "avg", "min", "max", "product")
    assert lines(found) == [f"{p} -> {p}" for p in ("R", "S(0)", "S(1)", *(f"P({kind})" for kind in kinds))]


def test_a_users_registration_makes_claims():
    assert lines(claimed(planted("remembered", X))) == [
        "R -> R", "S(0) -> S(0)", "S(1) -> S(1)",
        "P(sum) -> P(sum)", "P(avg) -> P(avg)", "P(max) -> P(max)", "P(min) -> P(min)",
    ]  # fmt: skip


@pytest.mark.parametrize("one", [
    sample("_unique2.default", X), sample("arange.default", 4), planted("approximate_floor", X),
], ids=lambda one: one.op)  # fmt: skip
def test_without_a_source_or_a_tensor_there_are_no_claims(one):
    assert claimed(one) == []


def test_no_claim_is_made_twice():
    found = lines(claimed(sample("add.Tensor", X, X)))
    assert len(found) == len(set(found)) > 5


def test_a_strategy_that_refuses_every_input_raises_what_it_raises(monkeypatch):
    one = planted("forgotten", X)
    functions = DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs
    monkeypatch.setitem(functions, overload(one.op), lambda schema: int("no"))
    with pytest.raises(ValueError, match="invalid literal"):
        claimed(one)


# What DTensor claims is what it does.


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("one", [
    sample("view.default", numbers(6, 4), [6, 2, 2]),
    sample("view.default", numbers(6, 4), [24]),
    sample("expand.default", numbers(5, 1), [5, 3]),
    sample("expand.default", numbers(4, 1), [2, 4, 3]),
    sample("new_zeros.default", numbers(5, 6), [5, 6]),
    sample("new_zeros.default", numbers(4, 6), [3]),
    sample("squeeze.default", numbers(6, 1, 3)),
], ids=lambda one: f"{one.op}{one.arguments()}")  # fmt: skip
def test_rewritten_shape_arguments_are_followed(one, ranks):
    found = verdicts(one, ranks)
    special = {line for line in found if "SS(" in line}
    assert {found[line] for line in found.keys() - special} == {Verdict.SOUND}
    assert {found[line] for line in special} <= {Verdict.SUSPECT}
    assert any(line.startswith("S(0)") for line in found)


def test_without_following_them_the_same_claims_would_be_called_wrong():
    one = sample("expand.default", numbers(4, 1), [4, 3])
    (sharded,) = [claim for claim in claimed(one) if short(claim.rule.inputs[0]) == "S(0)"]
    assert len(sharded.local) == 2
    (instance,) = check_claims(one, run_oracle(one), 2, [type(sharded)(sharded.rule, "test")], seed=0)
    assert instance.verdict is Verdict.UNSOUND


def test_squeezing_a_dim_that_is_one_row_on_each_rank_keeps_it():
    found = claimed(sample("squeeze.default", numbers(2, 1, 3)))
    (sharded,) = [claim for claim in found if short(claim.rule.inputs[0]) == "S(0)"]
    assert [call.op for call in sharded.local] == ["aten.squeeze.dims"] * 2
    assert verdicts(sample("squeeze.default", numbers(2, 1, 3)))["S(0) -> S(0)"] is Verdict.SOUND


def test_an_op_whose_arguments_stay_runs_the_samples_own_call():
    assert {claim.local for claim in claimed(sample("sum.dim_IntList", X, [0]))} == {None}


def test_what_dtensor_would_redistribute_first_is_not_claimed():
    assert "S(0) -> S(0)" not in lines(claimed(sample("cumsum.default", X, 0)))


def test_what_dtensor_would_redistribute_on_some_rank_is_not_claimed(monkeypatch):
    one, asked = sample("expand.default", numbers(5, 1), [5, 3]), PropagatorQuery.propagate
    assert "S(0) -> S(0)" in lines(claimed(one))
    monkeypatch.setattr(PropagatorQuery, "propagate", lambda ask, row, rank=0: None if rank else asked(ask, row))
    assert "S(0) -> S(0)" not in lines(claimed(one))


@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="the rule is that of torch 2.13")
def test_a_known_wrong_rule_is_claimed():
    assert verdicts(sample("cumprod.default", X, -1)) == {
        "R -> R": Verdict.SOUND, "S(0) -> S(0)": Verdict.SOUND, "S(1) -> S(1)": Verdict.UNSOUND,
    }  # fmt: skip


# Sizes that do not fit.


@pytest.mark.parametrize(("one", "ranks"), [
    pytest.param(sample("cumsum.default", numbers(3, 8), 1), 4, marks=before_2_14),
    (sample("flip.default", numbers(3, 8), [1]), 4),
    (sample("absolute.default", numbers(3, 8)), 4),
], ids=lambda given: getattr(given, "op", None))  # fmt: skip
def test_a_dim_smaller_than_the_ranks_is_not_claimed(one, ranks):
    assert not any(line.startswith("S(0)") for line in lines(claimed(one, ranks)))
    assert any(line.startswith("S(0)") for line in lines(claimed(one, ranks - 1)))


def test_in_place_ops_keep_their_placement():
    assert all(
        claim.rule.inputs[0] == claim.rule.outputs[0]
        for op in ("add_.Tensor", "mul_.Tensor", "atan2_.default")
        for claim in claimed(sample(op, X, X))
    )
    assert "R, P(avg) -> P(avg)" in lines(claimed(sample("add.Tensor", X, X)))


# Where only the real dispatch can judge.


def test_an_op_with_a_handler_of_its_own_is_judged_end_to_end():
    assert {claim.whole for claim in claimed(sample("argmax.default", X, 0))} == {
        "DTensor has a handler of its own for this op"
    }


@pytest.mark.parametrize(("one", "line"), [
    (sample("linalg_vector_norm.default", X), "S(0) -> P(norm)"),
    (sample("embedding.default", X, torch.tensor([0, 3])), "S(0), P(mask) -> P(mask)"),
    (sample("view.default", X, [24]), "S(1) -> SS(0,4)"),
], ids=lambda given: given if isinstance(given, str) else given.op)  # fmt: skip
def test_a_placement_of_dtensors_own_is_no_sum_and_is_judged_end_to_end(one, line):
    found = dict(zip(lines(claimed(one)), claimed(one), strict=True))
    assert found[line].whole == "a placement of DTensor's own"
    assert found["R -> R" if ", " not in line else "R, R -> R"].whole == ""


# Several results.


def test_one_placement_that_stands_for_a_list_of_results_is_spread():
    assert lines(claimed(sample("split.Tensor", X, 2)))[:2] == ["R -> R, R", "S(1) -> S(1), S(1)"]


def test_one_placement_of_a_strategy_stands_for_each_of_several_results():
    assert lines(claimed(sample("var_mean.correction", X, [0]))) == ["R -> R, R", "S(1) -> S(0), S(0)"]


# out=, and results that are no tensors.


def test_an_out_comes_in_as_its_result_goes_out():
    found = verdicts(sample("add.out", X, X, out=X))
    assert found["S(0), S(0), S(0) -> S(0)"] is Verdict.SOUND
    assert found["P(sum), P(sum), P(sum) -> P(sum)"] is Verdict.SOUND
    assert "S(0), S(0), R -> S(0)" not in found


def test_what_would_redistribute_an_out_is_no_claim():
    exponent = numbers(4, 6, dtype=torch.int32)
    assert lines(claimed(sample("frexp.Tensor_out", X, mantissa=X, exponent=exponent))) == ["R, R, R -> R, R"]


@before_2_14
def test_an_op_strategy_says_nothing_of_out_and_it_comes_in_as_its_result():
    found = verdicts(sample("amin.out", X, [0], out=numbers(6)))
    assert found["S(0), P(min) -> P(min)"] is Verdict.SOUND
    assert found["S(1), S(0) -> S(0)"] is Verdict.SOUND


def test_one_placement_stands_for_each_of_several_outs():
    found = verdicts(sample("var_mean.correction_out", X, [0], out0=numbers(6), out1=numbers(6)))
    assert found == {"R, R, R -> R, R": Verdict.SOUND, "S(1), S(0), S(0) -> S(0), S(0)": Verdict.SOUND}


def test_a_line_without_inputs_is_for_inputs_that_come_as_the_output_goes():
    assert "S(0) -> S(0)" in lines(claimed(sample("slice_backward.default", X, [4, 9], 1, 0, 6, 1)))


@pytest.mark.parametrize("one", [
    sample("equal.default", X, X),
    sample("is_same_size.default", X, X),
    sample("_local_scalar_dense.default", torch.tensor(2.5)),
])  # fmt: skip
def test_a_result_that_is_no_tensor_is_for_the_dispatcher_to_make(one):
    found = claimed(one)
    assert any(placement == Replicate() for claim in found for placement in claim.rule.inputs)
    assert all(claim.whole and set(claim.rule.outputs) <= {None} for claim in found)


@before_2_14
def test_whatever_comes_in_is_asked_where_a_number_comes_out():
    assert "P(sum) -> -" in lines(claimed(sample("_local_scalar_dense.default", torch.tensor(2.5))))


def test_results_that_are_masked_off_have_no_placement():
    out, mean, rstd = torch.ops.aten.native_layer_norm.default(X, [6], None, None, 1e-5)
    one = sample("native_layer_norm_backward.default", out, X, [6], mean, rstd, None, None, [True, False, False])
    assert lines(claimed(one))[0] == "R, R, R, R -> R, -, -"


# Decompositions cost time.


def test_one_trace_serves_all_mesh_sizes(monkeypatch):
    one = sample("absolute.default", X)
    traced = []
    ask = PropagatorQuery.strategy_rows
    monkeypatch.setattr(
        PropagatorQuery, "strategy_rows", lambda self, seeds: traced.append(self.ranks) or ask(self, seeds)
    )
    alone = PropagatorQuery(one, 1, run_oracle(one).raw)
    found = [lines(claims(one, ranks, run_oracle(one).raw, alone)) for ranks in (2, 3, 5)]
    assert traced == [1]
    assert found == [["R -> R", "S(0) -> S(0)", "S(1) -> S(1)"]] * 2 + [["R -> R", "S(1) -> S(1)"]]


@pytest.mark.parametrize("asked", [True, False])
def test_partial_inputs_of_a_decomposition_are_traced_where_that_is_wanted(asked):
    one = sample("chunk.default", X, 2)
    alone = PropagatorQuery(one, 1, run_oracle(one).raw)
    alone.partials = asked
    found = lines(claims(one, 2, run_oracle(one).raw, alone))
    assert "S(1) -> S(1), S(1)" in found
    assert ("P(sum) -> P(sum), P(sum)" in found) is asked


def test_of_many_placement_tuples_of_a_decomposition_some_are_drawn_the_same_each_time(monkeypatch):
    one = sample("chunk.default", X, 2)
    every = lines(claimed(one))
    monkeypatch.setattr(claim_sources, "MOST_TRACES", 2)
    alone = PropagatorQuery(one, 1, run_oracle(one).raw)
    few = lines(claims(one, 2, run_oracle(one).raw, alone))
    assert alone.drawn == (2, 3) and "R -> R, R" in few
    assert set(few) < set(every) and lines(claimed(one)) == few


# What a search tries.


def test_a_tensor_may_be_replicated_sharded_or_partial():
    assert shorts(placement_options(numbers(4, 1, 6), 2)) == "R, S(0), S(2), P(sum), P(avg), P(min), P(max)"
    assert shorts(placement_options(torch.tensor(1.0), 2)) == "R, P(sum), P(avg), P(min), P(max)"


@pytest.mark.parametrize(("dtype", "kinds"), [
    (torch.bool, "R"), (torch.complex64, "R, P(sum), P(avg)"), (torch.int64, "R, P(sum), P(avg), P(min), P(max)"),
], ids=str)  # fmt: skip
def test_only_partials_that_mean_something_for_the_dtype_are_tried(dtype, kinds):
    assert shorts(placement_options(torch.zeros((), dtype=dtype), 2)) == kinds


def test_partial_booleans_are_asked_about_where_they_are_claimed():
    assert shorts(placement_options(torch.tensor(True), 2, ("sum", "avg", "min"))) == "R, P(sum), P(min)"


def test_all_tuples_are_tried_those_with_most_replicas_first():
    rows, every = input_tuples(sample("mul.Tensor", numbers(2), numbers(2)), 2)
    found = [shorts(row) for row in rows]
    assert len(found) == len(set(found)) == every == 36
    counts = [row.split(", ").count("R") for row in found]
    assert counts == sorted(counts, reverse=True)
    assert found[0] == "R, R"


def test_the_number_of_tuples_has_a_bound():
    many = sample("cat.default", [numbers(2, 2) for _ in range(8)])
    found, every = input_tuples(many, 2)
    assert (len(found), every) == (MOST_TUPLES, 7**8)
    assert found[0] == (Replicate(),) * 8
    assert len(set(found)) == MOST_TUPLES
    assert max(sum(p != Replicate() for p in row) for row in found) < 8
