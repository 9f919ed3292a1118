"""Which users a fault meets, and how the call is spelled that they write."""

import math
from dataclasses import replace

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from strategies.model.rule import PUBLIC, Call, Leaf, Sample
from strategies.programs.public_api.table import public_steps
from strategies.sweep.causes.reach import Reach, Severity, call_text, forward_programs, most_ordinary, reach, severity
from strategies.sweep.causes.spelling import is_private, spelled
from tests.strategies.sweep.causes.programs import CUMPROD, program

X = torch.arange(1.0, 5.0)
ROWS = ((Shard(0),),)
CASES = [
    (Reach.EVERYDAY, CUMPROD),
    (Reach.UNEVEN, program(CUMPROD.sample.call, torch.arange(1.0, 4.0), inputs=ROWS)),
    (Reach.ARGUMENTS, program(Call("aten.amax.default", (Leaf(0), [0], True)), X, inputs=ROWS)),
    (Reach.NOT_FINITE, program(Call("aten.sign.default", (Leaf(0),)), X * math.nan, inputs=ROWS)),
    (Reach.OTHER_DTYPES, program(Call("aten.__lshift__.Scalar", (Leaf(0), 1)), X.long(), inputs=ROWS)),
    (Reach.OTHER_DTYPES, program(Call("aten.sign.default", (Leaf(0),)), X.to(torch.float8_e4m3fn), inputs=ROWS)),
    (Reach.PRIVATE, program(Call("aten._foreach_sign.default", ([Leaf(0)],)), X, inputs=ROWS)),
    (Reach.OUT, program(Call("aten.sign.out", (Leaf(0),), (("out", Leaf(1)),)), X, X, inputs=ROWS * 2)),
    (Reach.EMPTY, program(Call("aten.sign.default", (Leaf(0),)), torch.ones(1), inputs=ROWS)),
]


@pytest.mark.parametrize(("level", "given"), CASES, ids=lambda value: str(value)[:20])
def test_each_reach_has_a_case(level, given):
    assert reach(given) is level


@pytest.mark.parametrize(("raises", "reason", "text"), [
    (True, "rank 2 raises RuntimeError: Expected input to have non-zero size, but has sizes [2, 0, 1, 6]; ", "raises, empty shards"),
    (True, "rank 1 raises RuntimeError: output with shape [1] doesn't match the broadcast shape [0]; ", "raises, empty shards"),
    (True, "rank 2 raises RuntimeError: sizes [2, 10, 1, 6]", "raises, everyday"),
    (False, "rank 0: result gathered from S(1) differs at [0, 1]: got 2, expected 3", "silent, everyday"),
])  # fmt: skip
def test_a_piece_that_the_error_calls_empty_counts_as_an_empty_shard(raises, reason, text):
    assert str(severity(CUMPROD, raises, reason)) == text


def test_the_order_of_severity():
    silent = [severity(given, raises=False) for _, given in CASES]
    loud = [severity(given, raises=True) for _, given in CASES]
    assert sorted([*loud, *reversed(silent)]) == [*silent, *loud]
    partial = program(CASES[3][1].sample.call, X, inputs=((Partial(),),))
    assert severity(CUMPROD, raises=False) < severity(partial, raises=False) < Severity(False, Reach.UNEVEN)


@pytest.mark.parametrize(
    ("name", "level"),
    [("tensor.distribute_tensor", Reach.EVERYDAY), ("tensor.distribute_tensor, strides", Reach.ARGUMENTS)],
)
def test_a_further_use_of_a_public_call_comes_after_the_call(name, level):
    call = Call("aten.clone.default", (Leaf(0),))
    given = replace(program(call, X, inputs=ROWS), then=PUBLIC + public_steps(name, 1)[0].call)
    assert reach(given) is level


@pytest.mark.parametrize(
    ("call", "tensors", "text"),
    [
        (Call("aten.cumprod.default", (Leaf(0), -1)), (X,), "torch.cumprod(x0, -1)"),
        (Call("aten.__lshift__.Scalar", (Leaf(0), 1)), (X.long(),), "x0 << 1"),
        (Call("aten.mse_loss.default", (Leaf(0), Leaf(1))), (X, X + 1), "F.mse_loss(x0, x1)"),
        (Call("aten.mse_loss.default", (Leaf(0), Leaf(1), 2)), (X, X + 1), "F.mse_loss(x0, x1, reduction='sum')"),
        (Call("aten._foreach_sign.default", ([Leaf(0)],)), (X,), "torch.ops.aten._foreach_sign.default([x0])"),
        (Call("aten.slice.Tensor", (Leaf(0), 0, 1)), (X,), "x0[1:]"),
        (Call("aten.slice.Tensor", (Leaf(0), -1, 0, 2**63 - 1, 2)), (X,), "x0[..., 0::2]"),
        (Call("aten.alias.default", (Leaf(0),)), (X,), "x0[...]"),
    ],
)
def test_a_call_is_spelled_as_users_write_it(call, tensors, text):
    assert spelled(program(call, *tensors, inputs=ROWS * len(tensors)).sample) == text


LOGITS, CLASSES = torch.tensor([[1.0, 3.0], [2.0, 1.0]]), torch.tensor([0, 1])


@pytest.mark.parametrize(("call", "tensors", "origin", "text"), [
    (
        Call("aten.nll_loss_forward.default", (Leaf(0), Leaf(1), None, 1, 1)), (LOGITS, CLASSES), "by name",
        "F.nll_loss(input=x0, target=x1, reduction='mean', ignore_index=1)",
    ),
    (Call("aten._softmax.default", (Leaf(0), 1, False)), (LOGITS,), "by name", "F.softmax(input=x0, dim=1)"),
    (Call("aten._local_scalar_dense.default", (Leaf(0),)), (X[0],), "item[float32,even] #0 forward", "x0.item()"),
    (  # the logarithms of its softmax are another tensor
        Call("aten.nll_loss_forward.default", (Leaf(0), Leaf(1), None, 1, -100)), (LOGITS, CLASSES),
        "nn.functional.cross_entropy[float32,even] #0 forward", "F.nll_loss(input=x0, target=x1, reduction='mean', ignore_index=-100)",
    ),
    (Call("aten._local_scalar_dense.default", (Leaf(0),)), (X[0],), "tolist[float32,even] #0", "torch.ops.aten._local_scalar_dense.default(x0)"),
    (Call("aten._local_scalar_dense.default", (Leaf(0),)), (X[0],), "by name", "torch.ops.aten._local_scalar_dense.default(x0)"),
])  # fmt: skip
def test_a_private_overload_is_spelled_as_the_public_function_that_makes_its_call(call, tensors, origin, text):
    sample = Sample(call, tensors, origin)
    assert spelled(sample) == text and is_private(sample) is text.startswith("torch.ops")


def test_the_most_ordinary_case_is_in_float32_on_two_ranks_and_even_shards():
    strange = torch.rand(6, 5, dtype=torch.float64)
    start = program(Call("aten.cumprod.default", (Leaf(0), -1)), strange, inputs=ROWS)
    found = most_ordinary(start, lambda one: one.sample.tensors[0].shape[0] >= 2)
    x = found.sample.tensors[0]
    assert (x.dtype, x.ndim, x.shape[0] % 2, x.flatten().tolist()[:2]) == (torch.float32, 1, 0, [1.0, 2.0])


@pytest.mark.parametrize(("call", "tensors", "shows", "want"), [
    (Call("aten.__rshift__.Scalar", (Leaf(0), -1)), (X.long(),), lambda call: call.args[1] != 0, (1,)),
    (Call("aten.__rshift__.Scalar", (Leaf(0), -1)), (X.long(),), lambda call: call.args[1] not in (0, 1), (2,)),
    (Call("aten.fill_.Scalar", (Leaf(0), -8.694485629462793)), (X,), lambda call: call.args[1] not in (0, 1), (2.0,)),
    (Call("aten.linalg_vector_norm.default", (Leaf(0), -math.inf)), (X,), lambda call: call.args[1:] == (-math.inf,), (-math.inf,)),
    (Call("aten.cumprod.default", (Leaf(0), -1)), (X,), lambda call: True, (-1,)),  # a dim may count from the back
])  # fmt: skip
def test_the_most_ordinary_number_is_not_negative_and_has_few_digits(call, tensors, shows, want):
    found = most_ordinary(program(call, *tensors, inputs=ROWS), lambda one: shows(one.sample.call))
    assert found.sample.call.args[1:] == want


@pytest.mark.parametrize(("shape", "inputs", "want"), [
    ((1,), ROWS, (2,)), ((3, 1), ROWS, (4, 2)), ((1, 6), ((Replicate(),),), (2, 4)),
], ids=str)  # fmt: skip
def test_the_most_ordinary_sizes_are_even_and_larger_than_one(shape, inputs, want):
    start = program(Call("aten.sign.default", (Leaf(0),)), torch.rand(shape), inputs=inputs)
    found = most_ordinary(start, lambda one: one.sample.tensors[0].ndim == len(shape))
    assert found.sample.tensors[0].shape == want and reach(found) is Reach.EVERYDAY


def test_a_size_of_one_stays_where_the_fault_needs_it_and_of_an_op_that_trusts_its_caller():
    one = program(Call("aten.sign.default", (Leaf(0),)), torch.rand(1, 4), inputs=((Replicate(),),))
    assert most_ordinary(one, lambda found: found.sample.tensors[0].shape[:-1] == (1,)).sample.tensors[0].shape == (
        1,
        4,
    )
    trusts = program(
        Call("aten._fft_c2r.default", (Leaf(0), [0], 0, 1)), torch.ones(1, dtype=torch.complex64), inputs=ROWS
    )
    sizes = {found.sample.tensors[0].shape for found in _tried(trusts)}
    assert sizes == {(1,)}


def _tried(start):
    tried = []
    most_ordinary(start, lambda one: not tried.append(one) and one is start)
    return tried


def test_a_case_of_float8_is_spelled_and_made_ordinary():
    """torch has no kernels that compare or round float8, or look for NaN in it."""
    tiny = torch.tensor([0.5, 2.5, 3.0, math.nan]).to(torch.float8_e4m3fn)
    start = program(Call("aten.unsqueeze.default", (Leaf(0), 0)), tiny, inputs=ROWS)
    assert spelled(start.sample) == "torch.unsqueeze(x0, 0)"
    kept = most_ordinary(start, lambda one: one.sample.tensors[0].dtype == torch.float8_e4m3fn)
    assert kept.sample.tensors[0].float().tolist()[:2] == [1.0, 2.0]


def test_a_backward_overload_is_met_through_its_forward():
    call = Call("aten.mse_loss_backward.default", (Leaf(0), Leaf(1), Leaf(2), 1))
    given = program(call, torch.tensor(1.0), X, X + 1, inputs=(((Shard(0),),) * 3))
    first = next(forward_programs(given))
    assert (first.sample.op, first.then, len(first.sample.tensors)) == ("aten.mse_loss.default", "grad", 2)
    assert list(forward_programs(CUMPROD)) == []


@pytest.mark.parametrize(("size", "level"), [(4, Reach.EVERYDAY), (3, Reach.UNEVEN), (1, Reach.EMPTY)])
def test_a_public_call_may_shard_any_dim_of_its_tensor(size, level):
    call = Call("aten.clone.default", (Leaf(0),))
    given = program(call, torch.ones(size, 2), inputs=((Replicate(),),))
    assert reach(given) is Reach.EVERYDAY
    assert reach(replace(given, then=PUBLIC + public_steps("tensor.distribute_tensor", 1)[0].call)) is level


ALIAS, CLONE = Call("aten.alias.default", (Leaf(0),)), Call("aten.clone.default", (Leaf(0),))


@pytest.mark.parametrize(("call", "then", "text"), [
    (Call("aten.cumprod.default", (Leaf(0), -1)), "", "torch.cumprod(f32[4] S(0), -1)"),
    (Call("aten.__rshift__.Scalar", (Leaf(0), 1)), "", "(i64[4] S(0)) >> 1"),
    (ALIAS, "root | grad S(0)", "(f32[4] S(0))[...], then x.abs().sqrt(), then the gradient, which comes in as S(0)"),
    (CLONE, "v = x[::2], x.mul_(-2)", "torch.clone(f32[4] S(0)), then v = x[::2], x.mul_(-2)"),
    (Call("aten.topk.default", (Leaf(0), 2)), "again(x0, 3)", "torch.topk(f32[4] S(0), 2), after a call with (x0, 3)"),
    (ALIAS, PUBLIC + "x.data = y, y in [Replicate()]", "x.data = y, y in [Replicate()], where x is f32[4] S(0), beside f32[4] R"),
])  # fmt: skip
def test_a_case_names_its_tensors_and_its_steps_in_their_order(call, then, text):
    x = X.long() if "shift" in call.op else X
    assert call_text(replace(program(call, x, inputs=ROWS), then=then)) == text
