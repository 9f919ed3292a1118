"""Convolutions by image and by channel; what groups, a bias, and a stride over channels change."""

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from strategies.model.rule import Call, Leaf, Sample
from strategies.ops.nn.spatial import RULES
from strategies.ops.semantics.rule_registry import query_of
from strategies.ops.validation.claims import validate_rule

ENTRY = {entry.op: entry for entry in RULES}
FORWARD, BACKWARD = ENTRY["aten.convolution.default"], ENTRY["aten.convolution_backward.default"]


def forward(*, bias=False, transposed=False, groups=1):
    """8 channels to 4, groups or not; transposed weights are the other way round."""
    shape = (8, 4 // groups, 3, 3) if transposed else (4, 8 // groups, 3, 3)
    tensors = [torch.randn(6, 8, 5, 5, dtype=torch.float64), torch.randn(shape, dtype=torch.float64)]
    tensors += [torch.randn(4, dtype=torch.float64)] if bias else []
    args = (Leaf(0), Leaf(1), Leaf(2) if bias else None, [1, 1], [1, 1], [1, 1], transposed, [0, 0], groups)
    return Sample(Call("aten.convolution.default", args), tuple(tensors), "made here")


def backward(*, transposed=False, groups=1, mask=(True, True, True)):
    x = forward(transposed=transposed, groups=groups)
    y = x.call(x.tensors)
    args = (Leaf(0), Leaf(1), Leaf(2), [4], [1, 1], [1, 1], [1, 1], transposed, [0, 0], groups, list(mask))
    return Sample(Call("aten.convolution_backward.default", args), (torch.randn_like(y), *x.tensors), "made here")


def lines(entry, sample):
    metas = [type("M", (), {"shape": tuple(x.shape), "dtype": x.dtype, "ndim": x.ndim}) for x in sample.tensors]
    return list(entry.lines(query_of(sample.op, sample.call.args, {}, metas, sample.call(sample.tensors))))


@pytest.mark.few(5)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_forward_is_right_by_every_line(bias, transposed, groups):
    found = validate_rule(FORWARD, ranks=(2, 3), given=[forward(bias=bias, transposed=transposed, groups=groups)])
    assert not found.wrong and len(found.sound) >= 5


@pytest.mark.few(5)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("mask", [(True, True, True), (True, False, True), (False, True, False)])
def test_backward_is_right_by_every_line_whatever_is_masked(transposed, groups, mask):
    found = validate_rule(BACKWARD, ranks=(2, 3), given=[backward(transposed=transposed, groups=groups, mask=mask)])
    assert not found.wrong and len(found.sound) >= 3


def test_input_channels_are_summed_only_where_no_bias_is_added_on_each_rank():
    plain = [line for line in lines(FORWARD, forward()) if line.outputs == (Partial("sum"),)]
    assert (Shard(1), Shard(1)) in [line.inputs for line in plain]
    with_bias = [line for line in lines(FORWARD, forward(bias=True)) if line.outputs == (Partial("sum"),)]
    assert all(line.inputs[2] == Partial("sum") and Shard(1) not in line.inputs for line in with_bias)


def test_groups_leave_only_the_images_to_be_dealt_out():
    shards = [line for line in lines(FORWARD, forward(groups=2)) if any(isinstance(p, Shard) for p in line.inputs)]
    assert [line.inputs for line in shards] == [(Shard(0), Replicate())]


def test_no_line_cuts_a_dim_of_space():
    every = [p for s in (forward(), forward(transposed=True)) for line in lines(FORWARD, s) for p in line.inputs]
    assert every and not any(isinstance(p, Shard) and p.dim > 1 for p in every)
