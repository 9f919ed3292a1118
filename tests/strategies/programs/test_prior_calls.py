import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSpec, OpStrategy, RuntimeSchemaInfo

from strategies.model.rule import overload
from strategies.programs import prior_calls
from strategies.programs.chained import wrong_programs
from strategies.programs.prior_calls import prior_call_programs
from strategies.programs.run import follow_ups
from strategies.programs.run.real_run import run_simulated_programs
from strategies.torch_api import dtensor
from tests.strategies.cases import numbers, sample
from tests.strategies.planted_ops import LIB

X = numbers(4, 6)


def thens(one):
    return list(dict.fromkeys(program.then for program in prior_call_programs(one, [], (2,), 0)))


@pytest.mark.parametrize(("one", "found"), [
    (sample("topk.default", X, 3), ["again(x0, 4)", "again(x0, 3, 0)", "again(x0, 3, -1, False)", "again(x0, 3, -1, True, False)"]),
    (sample("topk.default", X, 6), ["again(x0, 5)", "again(x0, 6, -1, False)", "again(x0, 6, -1, True, False)"]),
    (sample("permute_copy.default", X, [1, 0]), ["again(x0, [0, 1])"]),
    (sample("flip.default", X, [0]), ["again(x0, [1])"]),
    (sample("sum.dim_IntList", X, [0], True), ["again(x0, [1], True)", "again(x0, [0])", "again(x0, [0], True, dtype=torch.float32)"]),
    (sample("dropout.default", X, 0.5, True), []),
    (sample("sum.dim_IntList", X, [0]), ["again(x0, [1])", "again(x0, [0], True)", "again(x0, [0], dtype=torch.float32)"]),
    (sample("add.Tensor", X, X), []),
    (sample("neg.default", X), []),
    (sample("clone.default", X), ["strides | again(x0, memory_format=torch.channels_last)"]),
    (sample("_to_copy.default", X, dtype=torch.float64), [
        "again(x0, dtype=torch.float32)", "strides | again(x0, dtype=torch.float64, memory_format=torch.channels_last)",
    ]),
    (sample("view.dtype", X, torch.float32), ["again(x0, torch.float64)"]),
    (sample("expand.default", X[:, :1], [4, 6]), ["again(x0, [4, 7])"]),
], ids=lambda value: str(value.arguments()) if hasattr(value, "arguments") else "")  # fmt: skip
def test_each_argument_that_changes_metadata_is_another_call_before(one, found):
    assert thens(one) == found


def test_what_the_op_would_read_out_of_bounds_is_not_tried(monkeypatch):
    monkeypatch.setattr(prior_calls, "trusts_caller", lambda op: True)
    assert thens(sample("topk.default", X, 3)) == []
    assert thens(sample("sum.dim_IntList", X, [0])) == ["again(x0, [0], dtype=torch.float32)"]  # never out of bounds


def test_placements_are_those_of_the_first_claim_or_replicas():
    one, cut = sample("expand.default", X[:, :1], [4, 6]), (Shard(0),)
    assert [program.inputs for program in prior_call_programs(one, [cut, (Shard(1),)], (2, 2), 0)] == [
        ((Replicate(), *cut),)
    ]
    assert [program.inputs for program in prior_call_programs(one, [], (2,), 0)] == [((Replicate(),),)]


def planted(name, arguments, run, strategy, info):
    """The name of a new op with this kernel, and this strategy, of which the registration names what `info` says."""
    LIB.define(f"{name}({arguments}) -> Tensor")
    for kind in ("CPU", "Meta"):
        LIB.impl(name, run, kind)
    dtensor.propagator().register_op_strategy(overload(f"planted.{name}.default"), strategy, info)
    return f"planted.{name}.default"


def rows(schema):
    spec = schema.args_schema[0].strategies[0].output_spec
    return one_line(DTensorSpec(spec.mesh, (Shard(0),), tensor_meta=spec.tensor_meta))


def as_it_is(schema):
    return one_line(schema.args_schema[0].strategies[0].output_spec)


def one_line(spec):
    return OpStrategy([OpSpec(spec, input_specs=(spec,), redistribute_cost=[[0.0]])])


@pytest.mark.parametrize("named", [False, True], ids=["forgotten", "named"])
def test_an_argument_that_a_registration_does_not_name_is_found(named):
    info = RuntimeSchemaInfo(1) if named else None
    op = planted(f"columns_{named}", "Tensor x, int n", lambda x, n: x[:, :n].clone(), rows, info)
    programs = prior_call_programs(sample(op, X, 3), [(Shard(0),)], (2,), 0)
    assert [program.then for program in programs] == ["again(x0, 4)"]
    [found] = run_simulated_programs(programs)
    assert found.refused.startswith("WrongPieceShape") is not named


def columns_alone(schema):
    """Rows that are turned about must be whole."""
    x, dim = schema.args_schema
    spec = x.strategies[0].output_spec
    taken = Replicate() if dim == 0 else Shard(0)
    return one_line(DTensorSpec(spec.mesh, (taken,), tensor_meta=spec.tensor_meta))


@pytest.mark.parametrize("named", [False, True], ids=["forgotten", "named"])
def test_an_argument_that_changes_values_alone_is_found_if_a_registration_does_not_name_it(named):
    info = RuntimeSchemaInfo(1) if named else None
    op = planted(f"turned_{named}", "Tensor x, int dim", lambda x, dim: x.flip(dim), columns_alone, info)
    programs = prior_call_programs(sample(op, X, 0), [(Shard(1),), (Shard(0),), (Replicate(),), (Shard(1),)], (2,), 0)
    assert [(program.then, program.inputs) for program in programs] == [
        ("again(x0, 1)", ((placement,),)) for placement in (Shard(1), Shard(0), Replicate())
    ]
    assert [bool(found.wrong) for found in run_simulated_programs(programs)] == [not named] * 3


def signed(schema):
    """A maximum stays one under a positive factor; one that is made smaller is a minimum afterwards."""
    x, factor = schema.args_schema
    spec = x.strategies[0].output_spec
    taken, made = (Partial("max"), Partial("max" if factor > 0 else "min"))
    lines = [(Replicate(), Replicate()), (taken, made)]
    specs = [[DTensorSpec(spec.mesh, (p,), tensor_meta=spec.tensor_meta) for p in line] for line in lines]
    costs = [[[float(p != spec.placements[0])]] for p, _ in lines]
    return OpStrategy(
        [OpSpec(out, input_specs=(it,), redistribute_cost=c) for (it, out), c in zip(specs, costs, strict=True)]
    )


@pytest.mark.parametrize("named", [False, True], ids=["forgotten", "named"])
def test_a_number_for_which_an_op_has_another_rule_is_found_if_a_registration_does_not_name_it(named):
    info = RuntimeSchemaInfo(1) if named else None
    op = planted(f"times_{named}", "Tensor x, float by", lambda x, by: x * by, signed, info)
    programs = prior_call_programs(sample(op, X, 2.0), [(Replicate(),)], (2,), 0)
    assert [(program.then, program.inputs) for program in programs] == [("again(x0, -2.0)", ((Partial("max"),),))]
    assert [bool(found.wrong) for found in run_simulated_programs(programs)] == [not named]


def test_a_number_that_no_rule_asks_for_is_no_other_call():
    assert prior_call_programs(sample("leaky_relu.default", X, 0.5), [(Replicate(),)], (2,), 0) == []


def test_placements_are_those_of_the_call_before_too():
    programs = prior_call_programs(sample("flip.default", X, [0]), [(Shard(1),)], (2,), 0)
    assert [(program.then, program.inputs) for program in programs] == [
        ("again(x0, [1])", ((Shard(1),),)), ("again(x0, [1])", ((Shard(0),),)),
    ]  # fmt: skip


def laid(x, memory_format=None):
    return x.clone(memory_format=memory_format or torch.preserve_format)


@pytest.mark.parametrize("named", [False, True], ids=["forgotten", "named"])
def test_a_memory_format_that_a_registration_does_not_name_is_found_by_the_strides(named):
    info = RuntimeSchemaInfo(static_kwargkey=["memory_format"]) if named else None
    op = planted(f"laid_{named}", "Tensor x, *, MemoryFormat? memory_format=None", laid, as_it_is, info)
    programs = prior_call_programs(sample(op, X), [(Shard(0),)], (2,), 0)
    assert [program.then for program in programs] == ["strides | again(x0, memory_format=torch.channels_last)"]
    found = wrong_programs(programs)
    assert [program.then for program, _ in found] == [program.then for program in programs if not named]
    assert all("x.stride() is (12, 1, 6, 3)" in shown.wrong for _, shown in found)


def test_strides_that_are_wrong_without_the_call_before_are_not_its_fault(monkeypatch):
    one = sample("ones_like.default", X, dtype=torch.float64)
    (program,) = (p for p in prior_call_programs(one, [], (2,), 0) if p.then.startswith("strides"))
    monkeypatch.setitem(follow_ups.RESULT_STEPS, "strides", "'a DTensor' if hasattr(x, 'device_mesh') else 'a tensor'")
    assert run_simulated_programs([program])[0].wrong
    assert wrong_programs([program]) == []
