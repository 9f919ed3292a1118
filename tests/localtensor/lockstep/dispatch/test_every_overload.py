"""The aten overloads that OpInfos reach, in lockstep and by a plain loop: one plan of some here, all by `make overloads`."""

from dataclasses import replace

import pytest
import torch

from localtensor.lockstep.dispatch import batching_dims
from localtensor.lockstep.dispatch.batching import BATCHING_RULES
from localtensor.lockstep.dispatch.op_table import Execution, execution_of, list_ops, op_traits, overload
from tests.localtensor.lockstep.lockstep_reference import LockstepDifference
from tests.tools.overloads.__main__ import report
from tests.tools.overloads.capture import captured, tells
from tests.tools.overloads.excuses import MISREAD, OTHER_KERNEL, excused
from tests.tools.overloads.judge import Record, makes_sense, sweep
from tests.tools.overloads.plans import PLANS

FEWEST = 1250  # overloads that the OpInfos reach
EACH = 8  # one overload in so many is tested here
# Each in every plan: what models are made of.
HOT = [
    "add.Tensor", "mul.Tensor", "sub.Tensor", "div.Tensor", "addcmul", "where.self", "relu", "gelu", "gelu_backward",
    "threshold_backward", "mm", "bmm", "addmm", "baddbmm", "mv", "dot", "t", "transpose.int", "permute", "view",
    "_unsafe_view", "expand", "unsqueeze", "squeeze.dim", "slice.Tensor", "select.int", "split.Tensor", "unbind.int",
    "cat", "stack", "sum", "sum.dim_IntList", "mean.dim", "amax", "var.correction", "cumsum", "topk", "sort", "argmax",
    "max.dim", "_softmax", "_softmax_backward_data", "_log_softmax", "native_layer_norm", "native_layer_norm_backward",
    "embedding", "embedding_dense_backward", "index.Tensor", "index_put_", "index_select", "gather", "scatter_add_",
    "copy_", "_to_copy", "clone", "masked_fill.Scalar", "native_batch_norm", "convolution", "convolution_backward",
    "nonzero", "_foreach_add_.List", "_foreach_norm.Scalar", "_unique2", "as_strided", "as_strided_scatter", "add.out",
]  # fmt: skip

# Of these OpInfos, so many of them in every run.
OF = [
    "add", "mm", "cat", "sum", "softmax", "where", "cumsum", "index_put", "gather", "select_scatter",
    "nn.functional.embedding", "nn.functional.batch_norm",
]  # fmt: skip
OFTEN = [
    "add.Tensor", "mm", "cat", "sum.dim_IntList", "_softmax", "where.self", "index_put_", "gather", "embedding",
]  # fmt: skip


@pytest.fixture(scope="module")
def calls():
    torch.set_num_threads(1)
    return captured((torch.float32, torch.int64, torch.complex64), most=1, samples=6)


@pytest.fixture(scope="module")
def few_calls():
    torch.set_num_threads(1)
    return captured((torch.float32,), most=1, samples=6, of=OF)


@pytest.fixture(scope="module")
def records(calls):
    return {
        name: sweep(found[:1], Record(), plans=(plan_of(found[0], number),))
        for number, (name, found) in enumerate(calls.items())
        if number % EACH == 0
    }


def plan_of(call, number):
    """One of those that are another than "uniform" for this call, in turn; "uneven" needs a second call."""
    able = [plan for plan in PLANS if plan not in ("uniform", "uneven") and makes_sense(plan, call)]
    return able[number % len(able)] if able else "uniform"


@pytest.mark.slow
def test_nearly_all_calls_give_more_than_zeros(calls):
    zeros = [name for name, found in calls.items() if not found[0].telling]
    assert len(zeros) < len(calls) / 70, zeros
    for found in calls.values():
        assert [call.telling for call in found] == sorted((call.telling for call in found), reverse=True)
    assert not tells(torch.zeros(2)) and not tells((torch.full((2,), torch.nan), None)) and tells([0, torch.ones(1)])
    first = calls["aten::_cdist_backward"][0]  # that of torch 2.13 with p=0 came first before
    assert tells(first.op(*first.args, **first.kwargs))


@pytest.mark.slow
def test_all_are_what_they_are_alone(records):
    assert len(records) >= FEWEST / EACH
    assert {name: one.wrong for name, one in records.items() if one.wrong} == {}
    assert sum(one.calls for one in records.values()) > FEWEST / EACH


@pytest.mark.slow
def test_nearly_all_are_so_to_the_bit(records):
    near = [name for name, one in records.items() if one.near]
    assert len(near) < len(records) / 10, near


@pytest.mark.slow
@pytest.mark.parametrize("name", HOT)
def test_what_models_are_made_of_in_every_plan(calls, name):
    record = sweep(calls[f"aten::{name}"][:1], Record())
    assert record.wrong == [] and record.calls >= 3


@pytest.mark.parametrize("name", OFTEN)
def test_what_models_are_made_of_for_the_most_part(few_calls, name):
    record = sweep(few_calls[f"aten::{name}"][:1], Record())
    assert record.wrong == [] and record.calls >= 3


@pytest.mark.slow
def test_each_takes_the_way_that_the_table_says(records):
    ways, seen = dict(list_ops()), 0
    for name, record in records.items():
        known = op_traits(overload(name))
        taken = {way for way, times in record.ways.items() if times}
        allowed = {
            Execution.RANKS: {"rows"},
            Execution.VMAP: {"vmap", "rows"},
            Execution.STACK: {"stack", "vmap", "rows"},
        }
        if known.rewrite is None and not known.reshapes:  # these are done as other calls
            assert taken <= {"once", *allowed.get(ways[name], ())}, name
            seen += 1
    assert seen > 0.4 * len(records)


@pytest.mark.slow
def test_each_form_is_used_by_an_opinfo(calls):
    unused = {
        name
        for name in BATCHING_RULES
        if name not in calls and not name.startswith(("aten::_fused_", "aten::_foreach_"))
    }
    assert unused <= {"aten::_unsafe_view", "aten::argsort", "aten::glu", "aten::squeeze", "aten::lift_fresh"}
    assert len(BATCHING_RULES) > 200


def test_a_wrong_form_is_caught(few_calls, monkeypatch):
    def backwards(op, stacked, x, *rest, **named):
        return batching_dims._dim_by_schema(op, stacked, x, *rest, **named).flip(-1)

    from localtensor.lockstep.dispatch import op_table as ways

    monkeypatch.setitem(BATCHING_RULES, "aten::cumsum", backwards)
    monkeypatch.setattr(ways, "_properties", {})
    record = sweep(few_calls["aten::cumsum"], Record(), plans=("uniform", "alone"))
    assert record.equal == 1 and "alone, mixed: cumsum" in record.wrong[0] and "; envelope" in record.wrong[0]


def test_a_wrong_stride_and_a_lost_write_are_caught(few_calls, monkeypatch):
    from localtensor.lockstep.dispatch import execute as one_cell

    monkeypatch.setattr(one_cell, "_with_layout_of_op", lambda func, reader, args, kwargs, done: done)
    strided = sweep(few_calls["aten::select_scatter"], Record(), plans=("strided",))
    assert "stride" in strided.wrong[0]
    original = one_cell._under_vmap
    unsaid = lambda func, known, *rest: original(func, replace(known, writes=()), *rest)  # noqa: E731
    monkeypatch.setattr(one_cell, "_under_vmap", unsaid)
    lost = sweep(few_calls["aten::native_batch_norm"], Record(), plans=("alone", "slices"))
    assert "slices, mixed" in lost.wrong[0] and "argument 3: value" in lost.wrong[0]


def test_excuses_are_for_what_they_say():
    value, stride = (LockstepDifference(0, "result", what, None, None) for what in ("value", "stride"))
    assert excused("aten::empty_like", "alone", value) and not excused("aten::empty_like", "alone", stride)
    for name in MISREAD + OTHER_KERNEL:
        assert excused(name, "strided", value) and not excused(name, "alone", value)
    assert not excused("aten::add.Tensor", "strided", value)


def test_the_report_counts_and_tells_what_is_wrong():
    told = report({"aten::neg": Record(2, 0, 1, 0, ["alone: rank 0"]), "aten::abs": Record(3, 1, 2)}, 1.0)
    assert "exercised                      2   in 5 calls" in told and "equal to the bit               1" in told
    assert told.endswith("aten::neg: 1 of 2 calls, {}\n    alone: rank 0")
    assert execution_of(torch.ops.aten.neg.default) is Execution.STACK
