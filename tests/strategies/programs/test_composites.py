"""Functions that torch computes by other ops: the calls that are drawn, and what is found in them."""

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSpec, OpStrategy

from strategies.model.rule import Program, overload
from strategies.programs import composites
from strategies.programs.composites import composite_programs, composite_samples, wrong_composites
from strategies.torch_api import dtensor
from tests.strategies.cases import numbers, sample
from tests.strategies.planted_ops import LIB

R, ROWS = Replicate(), Shard(0)


@pytest.fixture
def few_infos(monkeypatch):
    """torch's OpInfos of five functions: one is an op of its own, one is composite and has a rule, one has a name that aten has not."""
    found = [
        i
        for i in composites.database()
        if i.name in ("matmul", "tensor_split", "mul", "square", "nn.functional.softmin")
    ]
    monkeypatch.setattr(composites, "database", lambda: found)


def test_calls_are_of_overloads_that_torch_composes_and_that_have_no_rule(few_infos):
    drawn = composite_samples(0)
    assert {one.op for one in drawn} == {
        "aten.matmul.default", "aten.tensor_split.sections", "aten.tensor_split.indices",
        "aten.tensor_split.tensor_indices_or_sections",
    }  # fmt: skip
    assert not {overload(one.op) for one in drawn} & dtensor.registered_overloads()
    assert all(x.numel() <= composites.MOST_NUMEL for one in drawn for x in one.tensors)
    shapes = [[x.ndim for x in one.tensors] for one in drawn if one.op == "aten.matmul.default"]
    assert [1, 2] in shapes and 2 < len(shapes) <= composites.KEPT


def test_a_tensor_is_given_for_a_tensor_alone(few_infos):
    assert all(
        len(one.tensors) == 1 + one.op.endswith("tensor_indices_or_sections")
        for one in composite_samples(0)
        if "split" in one.op
    )


def test_shares_are_parts_of_the_whole(few_infos):
    whole = [str(program) for program in composite_programs((2,), seed=0)]
    parts = [[str(p) for p in composite_programs((2,), seed=0, share=i, shares=2)] for i in range(2)]
    assert all(parts) and sorted(parts[0] + parts[1]) == sorted(whole)


def test_layouts_are_all_whole_rows_and_one_sharded(few_infos):
    layouts = [p.inputs for p in composite_programs((2,), seed=0) if [x.ndim for x in p.sample.tensors] == [1, 2]]
    assert {((R,), (R,)), ((ROWS,), (ROWS,)), ((ROWS,), (R,))} <= set(layouts)


def planted_rule(name, run):
    """An op of the test's whose rule says that rows are computed each by themselves."""
    LIB.define(f"{name}(Tensor x) -> Tensor")
    for kind in ("CPU", "Meta"):
        LIB.impl(name, run, kind)

    def rows(schema):
        spec = schema.args_schema[0].strategies[0].output_spec
        line = DTensorSpec(spec.mesh, (ROWS,), tensor_meta=spec.tensor_meta)
        return OpStrategy([OpSpec(line, input_specs=(line,), redistribute_cost=[[0.0]])])

    op = overload(f"planted.{name}.default")
    dtensor.propagator().register_op_strategy(op, rows)
    return op


def composed(name, run):
    LIB.define(f"{name}(Tensor x) -> Tensor")
    LIB.impl(name, run, "CompositeImplicitAutograd")
    return f"planted.{name}.default"


def programs_of(op):
    return [Program(sample(op, numbers(4, 6)), (2,), ((p,),)) for p in (R, ROWS)]


def test_what_an_op_inside_makes_wrong_is_found_and_named_by_the_function():
    scan = planted_rule("rows_scan", lambda x: x.cumsum(0))
    wrong, right = composed("by_scan", lambda x: scan(x) + 1), composed("by_double", lambda x: x * 2 + 1)
    assert dtensor.is_composite(overload(wrong))
    (found,) = wrong_composites(programs_of(wrong) + programs_of(right))
    assert found[0].sample.op == wrong and found[0].then == "" and "differs" in found[1].wrong


class Scanned(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):  # noqa: ARG004
        return x * 1

    @staticmethod
    def backward(ctx, grad):  # noqa: ARG004
        return torch.ops.planted.rows_scan_back(grad * 1)


def test_a_gradient_is_tried_where_the_call_is_right():
    planted_rule("rows_scan_back", lambda x: x.cumsum(0))
    op = composed("scanned_back", Scanned.apply)
    (found,) = wrong_composites(programs_of(op))
    assert found[0].then == "grad" and "differs" in found[1].wrong


def test_a_refusal_of_tensors_of_any_shape_is_one():
    def takes_plain_tensors(x):
        if isinstance(x, DTensor):
            raise TypeError(f"no tensor of shape {tuple(x.shape)}")
        return x * 1

    op = composed("of_plain_tensors", takes_plain_tensors)
    programs = [Program(sample(op, numbers(*shape)), (2,), ((R,),)) for shape in ((4,), (4, 6), (2, 4, 6))]
    (found,) = wrong_composites(programs)
    assert found[0] == programs[0] and "no tensor of shape (4,)" in found[1].refused


def test_what_torch_does_not_support_is_no_finding():
    op = composed("strided_view", lambda x: x.as_strided((2,), (1,)) + 1)
    assert wrong_composites(programs_of(op)) == []
