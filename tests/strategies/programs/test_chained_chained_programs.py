"""Which programs are tried, and which of those that go wrong are findings about the pair."""

from collections import Counter

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from strategies.inputs.variants.adversarial import VALUES
from strategies.model.oracle import run_oracle
from strategies.model.rule import Claim, Rule, overload
from strategies.programs import chained, mesh_validation
from strategies.programs.chained import follow_up_programs, wrong_programs
from strategies.programs.run.follow_ups import CallWithFollowUp
from strategies.programs.run.real_run import run_simulated_programs
from strategies.programs.run.verdict import NOT_ASSEMBLED, Confirmation
from strategies.torch_api import dtensor
from strategies.validation.sources.dtensor import claims
from tests.strategies.cases import numbers, rule, sample
from tests.strategies.planted_ops import plant, planted
from tests.strategies.programs_of import on
from tests.strategies.users import undone
from tests.torch_here import before_2_14

X = numbers(4, 6)
R, S0, P = Replicate(), Shard(0), Partial()


def claimed(one, *lines):
    return [Claim(rule(one, line), "test") for line in lines]


def tried(one, *lines, mesh=(2,), **options):
    return follow_up_programs(one, claimed(one, *lines), mesh, **options)


def test_each_claim_gets_a_follower_and_those_that_move_nothing_come_last():
    one = sample("neg.default", X)
    found = tried(one, "R -> R", "S(0) -> S(0)", "P(sum) -> P(sum)", most=3)
    assert [p.inputs for p in found] == [((S0,),), ((P,),), ((R,),)]
    assert all(p.then for p in found)


def test_gradients_calls_before_and_single_outputs_are_among_them():
    one = sample("max.dim", X, 0)
    found = Counter(p.then for p in tried(one, "S(1) -> S(0), S(0)", before=[sample("max.dim", X, 1)]))
    assert {"again(x0, 1)"} < set(found)
    assert any(then.startswith("grad") for then in found) and any(then.startswith("only") for then in found)


@pytest.mark.parametrize(
    "one", [sample("split.Tensor", numbers(6, 4), 2), sample("unbind.int", X, 0)], ids=lambda one: one.op
)
def test_gradients_of_one_of_several_results_are_tried_and_dtensor_refuses_those_of_lists(one):
    """torch 2.13: their backward mixes plain zeros for the unused results with a DTensor."""
    found = [p for p in follow_up_programs(one, claims(one, 2, run_oracle(one).raw), (2,)) if "grad of" in p.then]
    assert found and all("mixed torch.Tensor and DTensor" in c.refused for c in run_simulated_programs(found))


def test_an_op_that_is_registered_for_devices_alone_has_no_gradient_to_compare():
    """Autograd differentiates what its kernel calls in plain torch, with a warning, and sees no call under DTensor."""
    one = planted("cubed", X)
    plant("cubed(Tensor x) -> Tensor", lambda x: x * x * x, "S")
    programs = tried(one, "S(0) -> S(0)", "R -> R")
    assert programs and not any("grad" in p.then for p in programs)
    with pytest.raises(RuntimeError, match=r"planted.cubed.default has no autograd kernel"):
        CallWithFollowUp(one.op, one.call.args, one.call.kwargs, "sgd")([X])


def test_an_op_that_writes_is_judged_by_its_base_first():
    assert tried(sample("mul_.Scalar", X, 2.0), "S(0) -> S(0)")[0].then == "base"


def test_integers_get_no_gradients():
    found = tried(sample("neg.default", numbers(4, dtype=torch.int64)), "S(0) -> S(0)")
    assert found and not any(p.then.startswith("grad") for p in found)


def test_the_placements_of_the_claim_are_on_the_last_axis():
    (program, *_) = tried(sample("neg.default", X), "S(0) -> S(0)", mesh=(2, 3))
    assert (program.mesh, program.inputs) == ((2, 3), ((R, S0),))


def test_an_input_with_a_placement_of_dtensors_own_is_replicated_since_no_user_makes_it():
    class Odd(Partial):
        pass

    one = sample("add.Tensor", X, X)
    found = follow_up_programs(one, [Claim(Rule(one.op, (S0, Odd()), (Odd(),)), "test")], (2,), most=2)
    assert [p.inputs for p in found] == [((S0,), (R,))] * 2


def test_results_with_a_placement_of_dtensors_own_are_gathered_twice_and_added_up():
    class Odd(Partial):
        pass

    one = sample("neg.default", X)
    found = follow_up_programs(one, [Claim(Rule(one.op, (S0,), (Odd(),)), "test")], (2,), most=3)
    assert [p.then for p in found] == ["full twice", "swapped", "sum"]


def test_no_more_than_the_budget_and_always_the_same():
    one = sample("add.Tensor", X, X)
    every = claims(one, 2, run_oracle(one).raw)
    assert len(follow_up_programs(one, every, (2,), most=7)) == 7
    assert follow_up_programs(one, every, (2,)) == follow_up_programs(one, list(every), (2,))


def test_every_follower_has_its_turn_among_samples():
    thens = {
        p.then for rows in range(2, 40) for p in tried(sample("neg.default", numbers(rows, 4)), "P(sum) -> P(sum)")
    }
    shown = {"R", "times -1", "full twice", "cast int64", "S(0)", "squared", "grad", "grad S(0)", "grad of ones"}
    assert shown <= thens


@pytest.mark.parametrize(("one", "line"), [
    (sample("neg.default", X), "P(max) -> P(min)"), (sample("mm.default", X, X.t().contiguous()), "S(1), S(0) -> P(sum)"),
    (sample("sum.dim_IntList", X, [0]), "S(0) -> P(sum)"), (sample("cat.default", [X, X]), "S(1), S(1) -> S(1)"),
], ids=str)  # fmt: skip
def test_right_rules_of_torch_give_no_suspects(one, line):
    found = tried(one, line)
    assert found and wrong_programs(found) == []


def test_what_goes_wrong_on_a_fresh_tensor_too_is_the_followers_own():
    with undone():
        minus = overload("aten.mul.Tensor")
        for table in ("op_single_dim_strategy_funcs", "op_to_schema_info_for_single_dim_strategy"):
            getattr(dtensor.propagator(), table).pop(minus, None)
        register_sharding(minus)(lambda x, y: [([Partial("max")], [Partial("max"), None])])
        ((program, found),) = wrong_programs([on(sample("amax.default", X, [0]), "S(0)", then="times -1")])
        assert str(program) == "aten.alias.default on (2,): P(max), then times -1"
        (x,) = program.sample.tensors
        assert torch.equal(x, X.amax(0)) and program.sample.origin == "the result of aten.amax.default"
        assert run_simulated_programs([program])[0].wrong == found.wrong != ""


def test_an_op_that_is_wrong_alone_is_no_suspect():
    one = sample("cumprod.default", torch.tensor([[1.0, 2.0, 3.0, 4.0]]), -1)
    assert wrong_programs([on(one, "S(1)", then="sum")]) == []


@before_2_14
def test_norms_that_are_added_up_as_if_they_were_sums_are_a_finding_about_the_pair():
    """torch 2.13 adds the norms of shards up, and takes the norm of those sums."""
    one = sample("linalg_vector_norm.default", X, 2, [1])
    ((program, found),) = wrong_programs([on(one, "S(1)", then="sum")])
    assert ", expected " in found.wrong and program.sample is one


def test_a_gradient_that_goes_wrong_is_a_finding_about_the_pair():
    index = torch.tensor([[0, 1, 2, 3], [3, 2, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]])
    one = sample("scatter_add.default", numbers(8, 4), 1, index, numbers(4, 4, seed=1))
    ((program, _),) = wrong_programs([on(one, "R, R, R", then="grad S(0)")])
    assert (program.sample.op, program.then) == (one.op, "grad S(0)")


@pytest.mark.parametrize(("wrong", "then"), [
    (("grad", "grad of input 1 alone"), "grad"), (("grad of input 1 alone",), "grad of input 1 alone"),
])  # fmt: skip
def test_a_gradient_of_one_input_alone_is_a_finding_only_where_that_of_all_inputs_is_right(monkeypatch, wrong, then):
    def played(programs):
        return [Confirmation("rank 0: result gathered" if p.then in wrong else "") for p in programs]

    monkeypatch.setattr(chained, "run_simulated_programs", played)
    one = on(sample("mul.Tensor", X, X), "S(0), S(0)", then="grad of input 1 alone")
    ((program, _),) = wrong_programs([one])
    assert program.then == then


def test_of_several_floats_each_has_its_turn_alone():
    thens = {
        p.then
        for rows in range(2, 40)
        for p in tried(sample("mul.Tensor", numbers(rows, 4), numbers(rows, 4)), "S(0), S(0) -> S(0)")
    }
    assert {"grad of input 0 alone", "grad of input 1 alone"} <= thens
    assert not any("alone" in p.then for p in tried(sample("neg.default", X), "S(0) -> S(0)"))


@pytest.mark.parametrize(
    ("then", "note", "kept"),
    [
        ("full twice", "DTensor refuses this call", True),
        ("swapped", f"{NOT_ASSEMBLED} on every rank", True),
        ("swapped", "DTensor refuses this call", False),
        ("grad", "DTensor refuses this call", True),
    ],
)
def test_a_step_that_is_refused_counts_where_it_only_reads_or_gives_what_cannot_be_read(then, note, kept, monkeypatch):
    one = on(sample("neg.default", X), "S(0)", then=then)
    refused = Confirmation("", note, refused="IndexError: no such row")
    monkeypatch.setattr(
        chained, "run_simulated_programs", lambda programs: [refused if p.then else Confirmation("") for p in programs]
    )
    assert [(p.then, seen.refused) for p, seen in wrong_programs([one])] == ([(then, refused.refused)] if kept else [])


def test_an_op_with_a_handler_is_tried_with_other_values_where_its_own_are_right(monkeypatch):
    one = sample("argmax.default", torch.arange(8).view(2, 4))
    asked = []

    def run(programs):
        asked.append(programs)
        return [Confirmation("wrong" if p.sample is one and p.inputs == ((S0,),) else "") for p in programs]

    monkeypatch.setattr(mesh_validation, "run_simulated_programs", run)
    found = mesh_validation.try_other_values(one, (2,), 0)
    assert [p.inputs for p in asked[0]] == [((S0,),), ((Shard(1),),)]
    assert {p.inputs for p, _ in found} == {((Shard(1),),)}
    kinds = {kind.name for kind in VALUES if not kind.wild}
    assert len(found) >= 3 and {p.sample.origin.removeprefix("test, ") for p, _ in found} <= kinds


def test_argmax_of_equal_numbers_is_the_first_of_all_ranks():
    one = sample("argmax.default", torch.arange(16).view(4, 4))
    wrong = [p.sample.tensors[0] for p, seen in mesh_validation.try_other_values(one, (2,), 0) if seen.wrong]
    if not wrong:
        pytest.skip("this torch looks for the first of all")
    assert all((x == x.max()).sum() > 1 for x in wrong)


def test_further_samples_have_gradients_first():
    one = sample("tanh.default", numbers(4, 4))
    lines = claims(one, 2, run_oracle(one).raw)
    few = follow_up_programs(one, lines, (2,), most=chained.FURTHER_PROGRAMS)
    assert few[0].then in chained.PLAIN_GRADS
    assert follow_up_programs(one, lines, (2,))[0].then not in chained.GRADS


def test_an_op_with_a_handler_is_tried_on_equal_maxima_which_nothing_perturbs():
    one = sample("argmax.default", numbers(3, 5))
    tried = [p.sample for p, _ in mesh_validation.try_other_values(one, (2,), 0)]
    ties = [other.tensors[0] for other in tried if other.origin.endswith("two maxima")]
    assert len(ties) == 2 * mesh_validation.TIES  # sharded along each dim
    assert all(x.dtype == torch.int64 and (x == x.max()).sum() == 2 for x in ties)
    norm = sample("linalg_vector_norm.default", numbers(4))  # of floats alone
    assert not any(p.sample.origin.endswith("maxima") for p, _ in mesh_validation.try_other_values(norm, (2,), 0))
