"""Gated halves: every dim but the halved one."""

import pytest
import torch
from torch.distributed.tensor import Shard

from strategies.model.rule import Call, Leaf, Sample
from strategies.ops.nn.attention import RULES
from strategies.ops.validation.claims import own_claims, validate_rule

ENTRY = {entry.op: entry for entry in RULES}


def made(op, dim, *shapes):
    leaves = tuple(Leaf(i) for i in range(len(shapes)))
    tensors = tuple(torch.randn(shape, dtype=torch.float64) for shape in shapes)
    return Sample(Call(op, (*leaves, dim)), tensors, "made here")


CALLS = [
    made("aten.glu.default", 1, (5, 6)),
    made("aten.glu.default", -2, (4, 6, 3)),
    made("aten.glu_backward.default", -1, (5, 3), (5, 6)),
]


@pytest.mark.parametrize("sample", CALLS, ids=lambda sample: str(sample.arguments()))
def test_every_line_is_right(sample):
    found = validate_rule(ENTRY[sample.op], ranks=(2, 3), given=[sample])
    assert not found.wrong and found.sound


def test_the_halved_dim_is_never_cut():
    sample = made("aten.glu.default", -2, (4, 6, 3))
    claimed = own_claims(ENTRY[sample.op], sample, 2, sample.call(sample.tensors))
    assert {p for claim in claimed for p in claim.rule.inputs} == {Shard(0), Shard(2)}
