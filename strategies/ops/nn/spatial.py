"""Rules of pooling, resizing, sampling, pixel rearrangement and convolutions.

* Planes are independent, with or without a batch; positions are relative to the plane.  A shard of the batch may be
  empty, one of the channels may not.  Three backward ops (adaptive_max_pool3d, fractional_max_pool2d and 3d) have no
  rule: torch 2.13 writes out of bounds for invalid indices, so they cannot be validated safely.
* Convolutions are sharded by image, by channel of the result, and by channel of the input, whose products are summed.
  Spatial dims need rows of neighbouring ranks and have no placement rule.  With groups, the channels of a rank would
  have another number of groups than the argument, so only images are sharded.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch.distributed.tensor import Partial

from localtensor.layout import PARTIAL_KINDS
from strategies.ops.lib.elementwise import LINEAR, linear_partial_rules, named_shard_rule
from strategies.ops.lib.overload_variants import overloads_of, with_variants
from strategies.ops.semantics.rule_registry import Cut, OpRule, PlacementRule, RuleQuery, rules

REASON = "each plane is pooled by itself"


def plane_dims(query: RuleQuery) -> int:
    """The number of dims of a plane: the digit in the op's name."""
    return next(int(mark) for mark in query.op if mark in "123")


def batch_and_channel_rules(query: RuleQuery, *names: str) -> Iterator[PlacementRule]:
    """Every dim before the plane, batch and channels, sharded in the named arguments and all results."""
    before = query.meta(names[0]).ndim - plane_dims(query)
    for dim in range(before):
        cut: Cut = "filled" if dim == before - 1 else "any"
        yield named_shard_rule(query, dict.fromkeys(names, dim), [dim] * len(query.outputs), cut)


def forward(query: RuleQuery) -> Iterator[PlacementRule]:
    yield from batch_and_channel_rules(query, "self")


def average_pool(query: RuleQuery) -> Iterator[PlacementRule]:
    yield from batch_and_channel_rules(query, "self")
    yield from linear_partial_rules(query, ["self"])


def backward(query: RuleQuery) -> Iterator[PlacementRule]:
    """The backward, linear in the gradient."""
    yield from batch_and_channel_rules(query, "grad_output", "self", "indices")
    yield from linear_partial_rules(query, ["grad_output"])


def max_unpool(query: RuleQuery) -> Iterator[PlacementRule]:
    yield from batch_and_channel_rules(query, "self", "indices")


def fractional_max_pool(query: RuleQuery) -> Iterator[PlacementRule]:
    """The samples are `(N, C, dims)`, with channels as dim 1 even without a batch."""
    last = query.meta("self").ndim - plane_dims(query) - 1
    if last == 1:
        yield named_shard_rule(query, {"self": 0, "random_samples": 0}, [0, 0])
    yield named_shard_rule(query, {"self": last, "random_samples": 1}, [last, last], "filled")


SIZES = ("linear1d", "bilinear2d", "trilinear3d", "bicubic2d", "nearest1d", "nearest2d", "nearest3d")
SMOOTHED_KERNELS = ("_bilinear2d_aa", "_bicubic2d_aa", "_lanczos2d_aa")
EXACT = ("_nearest_exact1d", "_nearest_exact2d", "_nearest_exact3d")
RESIZED = [f"upsample_{name}" for name in SIZES] + [f"_upsample{name}" for name in (*SMOOTHED_KERNELS, *EXACT)]


def upsample(query: RuleQuery) -> Iterator[PlacementRule]:
    """Linear; nearest neighbours are copied, which commutes with every reduction."""
    name = "input" if query.leaf("self") is None else "self"
    yield from batch_and_channel_rules(query, name)
    yield from linear_partial_rules(query, [name], kinds=PARTIAL_KINDS if "nearest" in query.op else LINEAR)


def upsample_backward(query: RuleQuery) -> Iterator[PlacementRule]:
    """`input_size`, the result's shape, is local (DTensor 2.13 passes that of the whole)."""
    yield from batch_and_channel_rules(query, "grad_output")
    yield from linear_partial_rules(query, ["grad_output"])


def grid_sample(query: RuleQuery) -> Iterator[PlacementRule]:
    """Each point of the grid reads every channel of its image; linear in the image."""
    yield named_shard_rule(query, {"input": 0, "grid": 0}, [0])
    yield named_shard_rule(query, {"input": 1}, [1], "filled")
    for dim in range(1, query.meta("grid").ndim - 1):
        yield named_shard_rule(query, {"grid": dim}, [dim + 1], "filled")
    yield from linear_partial_rules(query, ["input"])


def grid_sample_backward(query: RuleQuery) -> Iterator[PlacementRule]:
    """The gradient of a point sums over channels, that of an image over points."""
    total = Partial("sum")
    yield named_shard_rule(query, {"grad_output": 0, "input": 0, "grid": 0}, [0, 0])
    yield named_shard_rule(query, {"grad_output": 1, "input": 1}, [1, total], "filled")
    for dim in range(1, query.meta("grid").ndim - 1):
        yield named_shard_rule(query, {"grad_output": dim + 1, "grid": dim}, [total, dim], "filled")
    yield from linear_partial_rules(query, ["grad_output"])


def pixel_shuffle(query: RuleQuery) -> Iterator[PlacementRule]:
    """Blocks of pixels become channels, or back: sharded only evenly."""
    ndim = query.meta("self").ndim
    for dim in range(ndim):
        yield named_shard_rule(query, {"self": dim}, [dim], "filled" if dim < ndim - 3 else "even")
    yield from linear_partial_rules(query, ["self"], kinds=PARTIAL_KINDS)


def channel_shuffle(query: RuleQuery) -> Iterator[PlacementRule]:
    """Channels are permuted: every other dim may be sharded."""
    for dim in range(query.meta("self").ndim):
        if dim != 1:
            yield named_shard_rule(query, {"self": dim}, [dim], "any" if dim == 0 else "filled")
    yield from linear_partial_rules(query, ["self"], kinds=PARTIAL_KINDS)


def im2col_or_col2im(query: RuleQuery) -> Iterator[PlacementRule]:
    """Patches of an image as columns, or back: a channel is a block of rows, sharded only evenly."""
    last = 1 if "im2col" in query.op else 0
    batched = query.meta("self").ndim - (3 + last) + 1
    if batched:
        yield named_shard_rule(query, {"self": 0}, [0])
    yield named_shard_rule(query, {"self": batched}, [batched], "even")
    yield from linear_partial_rules(query, ["self"])


def _by_channel(query: RuleQuery) -> bool:
    """Whether each channel of the result depends on all channels of the input."""
    return int(query["groups"]) == 1


def _weight_dims(query: RuleQuery) -> tuple[int, int]:
    """The weight's dims for the channels of the result and of the input."""
    return (1, 0) if query["transposed"] else (0, 1)


def convolution(query: RuleQuery) -> Iterator[PlacementRule]:
    """Linear in input and in weight; the bias must then be a partial sum, too, or it is added on each rank."""
    if query.meta("input").ndim != query.meta("weight").ndim:
        return  # an image without a batch
    bias = query.leaf("bias") is not None
    yield named_shard_rule(query, {"input": 0}, [0])
    if _by_channel(query):
        made, summed = _weight_dims(query)
        yield named_shard_rule(query, {"weight": made, "bias": 0}, [1], "filled")
        if not bias:
            yield named_shard_rule(query, {"input": 1, "weight": summed}, [Partial("sum")], "filled")
    for name in ("input", "weight"):
        yield from linear_partial_rules(query, [name, "bias"] if bias else [name])
        if bias:
            yield from linear_partial_rules(query, [name], kinds=["avg"])
    if bias:
        yield from linear_partial_rules(query, ["bias"], kinds=["avg"])


def convolution_backward(query: RuleQuery) -> Iterator[PlacementRule]:
    """The gradients of input, weight and bias; each is a sum over a dim that the others have."""
    if query.meta("input").ndim != query.meta("weight").ndim:
        return  # an image without a batch
    total = Partial("sum")
    # torch omits a gradient for an empty batch
    yield named_shard_rule(query, {"grad_output": 0, "input": 0}, [0, total, total], "filled")
    if _by_channel(query):
        made, summed = _weight_dims(query)
        yield named_shard_rule(query, {"grad_output": 1, "weight": made}, [total, made, 0], "filled")
        yield named_shard_rule(query, {"input": 1, "weight": summed}, [1, summed, None], "filled")
    yield from linear_partial_rules(query, ["grad_output"])
    yield from linear_partial_rules(query, ["input"], [False, True, False])
    yield from linear_partial_rules(query, ["weight"], [True, False, False])


RULES: tuple[OpRule, ...] = with_variants(
    rules("pooling", REASON, overloads_of("""max_pool1d_with_indices max_pool2d_with_indices max_pool3d_with_indices
          adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d max_pool1d max_pool2d max_pool3d"""), forward),
    rules("pooling", f"{REASON}, and a mean is linear", overloads_of("""avg_pool1d avg_pool2d avg_pool3d
          adaptive_avg_pool1d _adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_avg_pool2d adaptive_avg_pool3d"""),
          average_pool),
    rules("pooling", f"{REASON}, and its gradient is linear", overloads_of("""avg_pool2d_backward avg_pool3d_backward
          _adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward max_pool2d_with_indices_backward
          max_pool3d_with_indices_backward adaptive_max_pool2d_backward"""), backward),
    rules("pooling", REASON, overloads_of("max_unpool2d max_unpool3d"), max_unpool),
    rules("pooling", f"{REASON}, with samples of its own", overloads_of("fractional_max_pool2d fractional_max_pool3d"),
          fractional_max_pool),
    rules("resizing", "each plane by itself, and each of its points a weighted sum",
          [f"aten.{name}.{which}" for which in ("default", "vec") for name in RESIZED], upsample),
    rules("resizing", "each plane by itself, with each rank's own shape",
          [f"aten.{name}_backward.default" for name in RESIZED], upsample_backward, shapes=["input_size"]),
    rules("resizing", "a point reads its own image", overloads_of("grid_sampler_2d grid_sampler_3d"), grid_sample),
    rules("resizing", "a point's gradient goes to its own image",
          overloads_of("grid_sampler_2d_backward grid_sampler_3d_backward"), grid_sample_backward),
    rules("resizing", "blocks of pixels change places", overloads_of("pixel_shuffle pixel_unshuffle"), pixel_shuffle),
    rules("resizing", "whole channels change places", overloads_of("channel_shuffle native_channel_shuffle"),
          channel_shuffle),
    rules("resizing", "each patch is of one image and one channel", overloads_of("im2col col2im"), im2col_or_col2im),
    rules("convolution", "an image by itself; a channel of the result is a sum over the input's channels",
          ["aten.convolution.default"], convolution),
    rules("convolution", "the gradient of a sum over images or channels is that of each term",
          ["aten.convolution_backward.default"], convolution_backward),
)  # fmt: skip
