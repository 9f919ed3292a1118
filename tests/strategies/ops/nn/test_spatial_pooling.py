"""Pooling and resizing: planes by themselves, with a batch and without one."""

import pytest
import torch
from torch.distributed.tensor import Shard

from strategies.model.rule import Call, Leaf, Sample
from strategies.ops.nn import spatial as pooling
from strategies.ops.validation.claims import own_claims, validate_rule
from tests.strategies.ops.held import assert_lines

ENTRY = {entry.op: entry for entry in (*pooling.RULES, *pooling.RULES)}


def made(op, args, *shapes, **kwargs):
    """A call on random tensors, one for each shape, then the other arguments."""
    tensors = tuple(torch.randn(shape, dtype=torch.float64) for shape in shapes)
    leaves = tuple(Leaf(i) for i in range(len(shapes)))
    return Sample(Call(f"aten.{op}", (*leaves, *args), tuple(kwargs.items())), tensors, "made here")


FORWARD = [
    made("max_pool2d_with_indices.default", ([2, 2],), (3, 4, 6, 6)),
    made("max_pool2d_with_indices.default", ([2, 2],), (4, 6, 6)),
    made("avg_pool2d.default", ([2, 2], [1, 1], [1, 1]), (5, 4, 6, 6)),
    made("_adaptive_avg_pool2d.default", ([3, 2],), (3, 4, 6, 6)),
    made("_adaptive_avg_pool2d.default", ([3, 2],), (4, 6, 6)),
    made("adaptive_max_pool2d.default", ([3, 3],), (3, 4, 6, 6)),
    made("upsample_nearest2d.default", ([8, 8],), (3, 4, 4, 4)),
    made("upsample_bilinear2d.default", ([8, 8], True), (3, 4, 4, 4)),
    made("upsample_bilinear2d_backward.default", ([8, 8], [3, 4, 4, 4], False), (3, 4, 8, 8)),
    made("upsample_nearest2d_backward.default", ([8, 8], [3, 4, 4, 4]), (3, 4, 8, 8)),
    made("_adaptive_avg_pool2d_backward.default", (), (3, 4, 2, 2), (3, 4, 6, 6)),
    made("_adaptive_avg_pool2d_backward.default", (), (4, 2, 2), (4, 6, 6)),
    made("grid_sampler_2d.default", (0, 0, False), (3, 4, 5, 5), (3, 4, 4, 2)),
    made("grid_sampler_2d_backward.default", (0, 0, False, [True, True]), (3, 4, 4, 4), (3, 4, 5, 5), (3, 4, 4, 2)),
    made("pixel_shuffle.default", (2,), (3, 16, 4, 4)),
    made("pixel_unshuffle.default", (2,), (3, 4, 8, 8)),
    made("im2col.default", ([2, 2], [1, 1], [0, 0], [1, 1]), (3, 4, 5, 5)),
    made("col2im.default", ([5, 5], [2, 2], [1, 1], [0, 0], [1, 1]), (3, 16, 16)),
]


@pytest.mark.few(8)
@pytest.mark.parametrize("sample", FORWARD, ids=lambda sample: f"{sample.op} {sample.arguments()[0]}")
def test_planes_go_by_themselves(sample):
    found = validate_rule(ENTRY[sample.op], ranks=(2, 3, 4), given=[sample])
    assert not found.wrong
    assert any("S(0)" in rule for rule in found.sound)


def test_blocks_of_pixels_go_by_any_batch_and_by_whole_blocks():
    batch, planes = ["S(0) -> S(0), filled", "S(1) -> S(1), filled"], [f"S({d}) -> S({d}), even" for d in (2, 3, 4)]
    one = made("pixel_shuffle.default", (2,), (3, 2, 8, 4, 4))
    assert_lines(pooling.RULES, one, *batch, *planes, "P(*) -> P(*)")


def test_a_points_gradient_sums_over_channels_and_an_images_over_points():
    one = made(
        "grid_sampler_2d_backward.default", (0, 0, False, [True, True]), (3, 4, 4, 4), (3, 4, 5, 5), (3, 4, 4, 2)
    )
    points = ["S(2), R, S(1) -> P(sum), S(1), filled", "S(3), R, S(2) -> P(sum), S(2), filled"]
    parts = [f"P({kind}), R, R -> P({kind}), P({kind})" for kind in ("sum", "avg")]
    batch, channels = "S(0), S(0), S(0) -> S(0), S(0)", "S(1), S(1), R -> S(1), P(sum), filled"
    assert_lines(pooling.RULES, one, batch, channels, *points, *parts)


@pytest.mark.parametrize("batch", [(3,), ()], ids=["batch", "no batch"])
def test_samples_of_a_fractional_pooling_have_a_batch_always(batch):
    tensors = (torch.randn(*batch, 4, 6, 6), torch.rand(*(batch or (1,)), 4, 2))
    one = Sample(
        Call("aten.fractional_max_pool2d.default", (Leaf(0), [2, 2], [3, 3], Leaf(1)), ()), tensors, "made here"
    )
    last = len(batch)
    lines = ["S(0), S(0) -> S(0), S(0)"] * last + [f"S({last}), S(1) -> S({last}), S({last}), filled"]
    assert_lines(pooling.RULES, one, *lines)


def test_without_a_batch_dim_zero_is_the_channels_and_dim_one_is_space():
    sample = made("_adaptive_avg_pool2d_backward.default", (), (4, 2, 2), (4, 6, 6))
    claimed = own_claims(ENTRY[sample.op], sample, 2, sample.call(sample.tensors))
    shards = {p.dim for claim in claimed for p in claim.rule.inputs if isinstance(p, Shard)}
    assert shards == {0}  # DTensor 2.13 cuts dim 1, too, and is wrong there


def test_each_rank_resizes_back_to_its_own_shape():
    sample = made("upsample_nearest2d_backward.default", ([8, 8], [3, 4, 4, 4]), (3, 4, 8, 8))
    claimed = own_claims(ENTRY[sample.op], sample, 2, sample.call(sample.tensors))
    (batch,) = [claim for claim in claimed if claim.rule.inputs == (Shard(0),)]
    assert [[*call.args[2]] for call in batch.local] == [[2, 4, 4, 4], [1, 4, 4, 4]]
