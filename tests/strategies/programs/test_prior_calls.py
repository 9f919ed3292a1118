import pytest
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSpec, OpStrategy, RuntimeSchemaInfo

from strategies.model.rule import overload
from strategies.programs import prior_calls
from strategies.programs.prior_calls import prior_call_programs
from strategies.programs.run.real_run import run_simulated_programs
from strategies.torch_api import dtensor
from tests.strategies.cases import numbers, sample
from tests.strategies.planted_ops import LIB

X = numbers(4, 6)


def thens(one):
    return [program.then for program in prior_call_programs(one, [], (2,), 0)]


@pytest.mark.parametrize(("one", "found"), [
    (sample("topk.default", X, 3), ["again(x0, 4)", "again(x0, 3, 0)"]),
    (sample("topk.default", X, 6), ["again(x0, 5)"]),
    (sample("sum.dim_IntList", X, [0]), ["again(x0, [1])", "again(x0, [0], True)", "again(x0, [0], dtype=torch.float32)"]),
    (sample("add.Tensor", X, X), []),
    (sample("neg.default", X), []),
    (sample("view.dtype", X, torch.float32), ["again(x0, torch.float64)"]),
    (sample("expand.default", X[:, :1], [4, 6]), ["again(x0, [4, 7])"]),
], ids=lambda value: str(value.arguments()) if hasattr(value, "arguments") else "")  # fmt: skip
def test_each_argument_that_changes_a_shape_or_a_dtype_is_another_call_before(one, found):
    assert thens(one) == found


def test_what_the_op_would_read_out_of_bounds_is_not_tried(monkeypatch):
    monkeypatch.setattr(prior_calls, "trusts_caller", lambda op: True)
    assert thens(sample("topk.default", X, 3)) == []


def test_placements_are_those_of_the_first_claim_or_replicas():
    one, cut = sample("expand.default", X[:, :1], [4, 6]), (Shard(0),)
    assert [program.inputs for program in prior_call_programs(one, [cut, (Shard(1),)], (2, 2), 0)] == [
        ((Replicate(), *cut),)
    ]
    assert [program.inputs for program in prior_call_programs(one, [], (2,), 0)] == [((Replicate(),),)]


def strategy(schema):
    spec = schema.args_schema[0].strategies[0].output_spec
    wanted = DTensorSpec(spec.mesh, (Shard(0),), tensor_meta=spec.tensor_meta)
    return OpStrategy([OpSpec(wanted, input_specs=(wanted,), redistribute_cost=[[0.0]])])


@pytest.mark.parametrize("named", [False, True], ids=["forgotten", "named"])
def test_an_argument_that_a_registration_does_not_name_is_found(named):
    name = f"columns_{'named' if named else 'forgotten'}"
    LIB.define(f"{name}(Tensor x, int n) -> Tensor")
    for kind in ("CPU", "Meta"):
        LIB.impl(name, lambda x, n: x[:, :n].clone(), kind)
    op = overload(f"planted.{name}.default")
    dtensor.propagator().register_op_strategy(op, strategy, RuntimeSchemaInfo(1) if named else None)
    programs = prior_call_programs(sample(f"planted.{name}.default", X, 3), [(Shard(0),)], (2,), 0)
    assert [program.then for program in programs] == ["again(x0, 4)"]
    [found] = run_simulated_programs(programs)
    assert found.refused.startswith("WrongPieceShape") is not named
