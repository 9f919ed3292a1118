"""Fused attention by batch, head and query: masks that broadcast, fewer keys than queries, other kernels' results.
Gated halves: every dim but the halved one."""

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from strategies.model.oracle import OracleResult
from strategies.model.rule import Call, Leaf, Sample
from strategies.model.verdict import Verdict
from strategies.ops.nn.attention import RULES
from strategies.ops.semantics.rule_registry import Meta, query_of
from strategies.ops.validation.claims import own_claims, validate_rule
from strategies.validation.probe import check_claims

ENTRY = {entry.op: entry for entry in RULES}
CPU = "aten._scaled_dot_product_flash_attention_for_cpu"
MASKS = {"none": None, "pairs": (6, 6), "batch": (3, 1, 6, 6), "heads": (1, 4, 6, 6), "all": (3, 4, 6, 6), "queries": (1, 1, 6, 1)}  # fmt: skip


def forward(mask=None, *, causal=False, keys=4):
    torch.manual_seed(0)
    tensors = [torch.randn(3, heads, 6, 8, dtype=torch.float64) for heads in (4, keys, keys)]
    given = ()
    if mask is not None:
        tensors.append(torch.randn(mask, dtype=torch.float64))
        given = (("attn_mask", Leaf(3)),)
    return Sample(Call(f"{CPU}.default", (Leaf(0), Leaf(1), Leaf(2), 0.0, causal), given), tuple(tensors), "made here")


def backward(mask=None, *, causal=False):
    sample = forward(mask, causal=causal)
    out, total = sample.call(sample.tensors)
    tensors = (torch.randn_like(out), *sample.tensors[:3], out, total, *sample.tensors[3:])
    given = (("attn_mask", Leaf(6)),) if mask is not None else ()
    args = (*(Leaf(i) for i in range(6)), 0.0, causal)
    return Sample(Call(f"{CPU}_backward.default", args, given), tensors, "made here")


def judged(sample, ranks):
    """The verdict on each line, by rule.  No other layouts of the inputs: the CPU's backward kernel reads a tensor whose
    last dim has gaps as if it had none (torch 2.13), so that `judge` would have no oracle to go by."""
    raw = sample.call(sample.tensors)
    near = torch.tensor(1e-9, dtype=torch.float64)
    oracle = OracleResult(sample.tensors, tuple(raw), (near,) * len(raw), raw)
    claimed = own_claims(ENTRY[sample.op], sample, ranks, raw)
    return {str(one.rule): one.verdict for one in check_claims(sample, oracle, ranks, claimed, seed=0)}


def lines_on_meta(op, args, tensors):
    """The lines of a kernel that this machine does not have, asked with shapes alone."""
    return list(ENTRY[op].lines(query_of(op, args, {}, [Meta(shape, torch.float16) for shape in tensors])))


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("make", [forward, backward])
def test_a_mask_is_cut_where_it_has_the_dim_and_not_where_it_broadcasts(make, mask, ranks):
    sample = make(MASKS[mask])
    found = judged(sample, ranks)
    assert len(found) == {2: 3, 3: 2}[ranks]  # four heads are no whole groups for three ranks
    assert set(found.values()) == {Verdict.SOUND}


@pytest.mark.parametrize("make", [forward, backward])
def test_causal_attention_is_not_cut_by_query(make):
    sample = make(causal=True)
    found = judged(sample, 2)
    assert len(found) == 2 and set(found.values()) == {Verdict.SOUND}
    assert not any("S(2)" in rule for rule in found)


@pytest.mark.parametrize("op", ["flash_attention", "efficient_attention", "cudnn_attention"])
def test_kernels_of_gpus_are_cut_by_batch_and_head_and_keep_their_random_state(op):
    op = f"aten._scaled_dot_product_{op}.default"
    args = (Leaf(0), Leaf(1), Leaf(2)) if "flash" in op else (Leaf(0), Leaf(1), Leaf(2), None, True)
    found = lines_on_meta(op, args, [(2, 4, 8, 16)] * 3)
    assert [line.inputs for line in found] == [(Shard(0),) * 3, (Shard(1),) * 3]
    assert all(p in (None, Replicate()) for line in found for p in line.outputs[2:])


def test_fewer_heads_of_keys_than_of_queries_are_cut_in_whole_groups():
    op = "aten._scaled_dot_product_flash_attention.default"
    found = lines_on_meta(op, (Leaf(0), Leaf(1), Leaf(2)), [(2, 8, 8, 16), (2, 4, 8, 16), (2, 4, 8, 16)])
    assert [(line.inputs[1], line.cut) for line in found] == [(Shard(0), "filled"), (Shard(1), "even")]


def test_the_gradient_of_a_bias_that_all_share_is_summed():
    op = "aten._scaled_dot_product_efficient_attention_backward.default"
    q = (2, 4, 32, 16)
    args = (*(Leaf(i) for i in range(9)), 0.0, [True] * 4)
    found = lines_on_meta(op, args, [q, q, q, q, (1, 4, 32, 32), q, (2, 4, 32), (), ()])
    assert [line.outputs[3] for line in found] == [Partial("sum"), Shard(1)]


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
