"""Rules of pooling, resizing, sampling, pixel rearrangement and convolutions.

* Planes are independent, with or without a batch; positions are relative to the plane.  A shard of the batch may be empty, one
  of the channels may not.  Three backward ops (adaptive_max_pool3d, fractional_max_pool2d and 3d) have no rule: torch 2.13
  writes out of bounds for invalid indices, so they cannot be validated safely.
* Convolutions are sharded by image, by channel of the result, and by channel of the input, whose products are summed.
  Spatial dims need rows of neighbouring ranks and have no placement rule.  With groups, the channels of a rank would have
  another number of groups than the argument, so only images are sharded.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch.distributed.tensor import Partial

from localtensor.layout import KINDS
from strategies.ops.lib.dim_maps import LINEAR, along, parts_of
from strategies.ops.lib.overload_variants import with_variants
from strategies.ops.semantics.rulebook import Ask, Cut, Entry, Line, rules

REASON = "each plane is pooled by itself"


def plane_dims(query: Ask) -> int:
    """The number of dims of a plane: the digit in the op's name."""
    return next(int(mark) for mark in query.op if mark in "123")


def planes(query: Ask, *names: str) -> Iterator[Line]:
    """Every dim before the plane, batch and channels, sharded in the named arguments and all results."""
    before = query.meta(names[0]).ndim - plane_dims(query)
    for dim in range(before):
        cut: Cut = "filled" if dim == before - 1 else "any"
        yield along(query, dict.fromkeys(names, dim), [dim] * len(query.outputs), cut)


def forward(query: Ask) -> Iterator[Line]:
    yield from planes(query, "self")


def average(query: Ask) -> Iterator[Line]:
    yield from planes(query, "self")
    yield from parts_of(query, ["self"])


def backward(query: Ask) -> Iterator[Line]:
    """The backward, linear in the gradient."""
    yield from planes(query, "grad_output", "self", "indices")
    yield from parts_of(query, ["grad_output"])


def unpooled(query: Ask) -> Iterator[Line]:
    yield from planes(query, "self", "indices")


def fractional(query: Ask) -> Iterator[Line]:
    """The samples are `(N, C, dims)`, with channels as dim 1 even without a batch."""
    last = query.meta("self").ndim - plane_dims(query) - 1
    if last == 1:
        yield along(query, {"self": 0, "random_samples": 0}, [0, 0])
    yield along(query, {"self": last, "random_samples": 1}, [last, last], "filled")


SIZES = ("linear1d", "bilinear2d", "trilinear3d", "bicubic2d", "nearest1d", "nearest2d", "nearest3d")
SMOOTHED = ("_bilinear2d_aa", "_bicubic2d_aa", "_lanczos2d_aa")
EXACT = ("_nearest_exact1d", "_nearest_exact2d", "_nearest_exact3d")
RESIZED = [f"upsample_{name}" for name in SIZES] + [f"_upsample{name}" for name in (*SMOOTHED, *EXACT)]


def resized(query: Ask) -> Iterator[Line]:
    """Linear; nearest neighbours are copied, which commutes with every reduction."""
    name = "input" if query.leaf("self") is None else "self"
    yield from planes(query, name)
    yield from parts_of(query, [name], kinds=KINDS if "nearest" in query.op else LINEAR)


def resized_backward(query: Ask) -> Iterator[Line]:
    """`input_size`, the result's shape, is local (DTensor 2.13 passes that of the whole)."""
    yield from planes(query, "grad_output")
    yield from parts_of(query, ["grad_output"])


def sampled(query: Ask) -> Iterator[Line]:
    """Each point of the grid reads every channel of its image; linear in the image."""
    yield along(query, {"input": 0, "grid": 0}, [0])
    yield along(query, {"input": 1}, [1], "filled")
    for dim in range(1, query.meta("grid").ndim - 1):
        yield along(query, {"grid": dim}, [dim + 1], "filled")
    yield from parts_of(query, ["input"])


def sampled_backward(query: Ask) -> Iterator[Line]:
    """The gradient of a point sums over channels, that of an image over points."""
    total = Partial("sum")
    yield along(query, {"grad_output": 0, "input": 0, "grid": 0}, [0, 0])
    yield along(query, {"grad_output": 1, "input": 1}, [1, total], "filled")
    for dim in range(1, query.meta("grid").ndim - 1):
        yield along(query, {"grad_output": dim + 1, "grid": dim}, [total, dim], "filled")
    yield from parts_of(query, ["grad_output"])


def shuffled(query: Ask) -> Iterator[Line]:
    """Blocks of pixels become channels, or back: sharded only evenly."""
    ndim = query.meta("self").ndim
    for dim in range(ndim):
        yield along(query, {"self": dim}, [dim], "filled" if dim < ndim - 3 else "even")
    yield from parts_of(query, ["self"], kinds=KINDS)


def regrouped(query: Ask) -> Iterator[Line]:
    """Channels are permuted: every other dim may be sharded."""
    for dim in range(query.meta("self").ndim):
        if dim != 1:
            yield along(query, {"self": dim}, [dim], "any" if dim == 0 else "filled")
    yield from parts_of(query, ["self"], kinds=KINDS)


def columns(query: Ask) -> Iterator[Line]:
    """Patches of an image as columns, or back: a channel is a block of rows, sharded only evenly."""
    last = 1 if "im2col" in query.op else 0
    batched = query.meta("self").ndim - (3 + last) + 1
    if batched:
        yield along(query, {"self": 0}, [0])
    yield along(query, {"self": batched}, [batched], "even")
    yield from parts_of(query, ["self"])


def _batched(query: Ask) -> bool:
    return query.meta("input").ndim == query.meta("weight").ndim


def _by_channel(query: Ask) -> bool:
    """Whether each channel of the result depends on all channels of the input."""
    return int(query["groups"]) == 1


def _weight_dims(query: Ask) -> tuple[int, int]:
    """The weight's dims for the channels of the result and of the input."""
    return (1, 0) if query["transposed"] else (0, 1)


def convolution(query: Ask) -> Iterator[Line]:
    """Linear in input and in weight; the bias must then be a partial sum, too, or it is added on each rank."""
    if not _batched(query):
        return
    bias = query.leaf("bias") is not None
    yield along(query, {"input": 0}, [0])
    if _by_channel(query):
        made, summed = _weight_dims(query)
        yield along(query, {"weight": made, "bias": 0}, [1], "filled")
        if not bias:
            yield along(query, {"input": 1, "weight": summed}, [Partial("sum")], "filled")
    for name in ("input", "weight"):
        yield from parts_of(query, [name, "bias"] if bias else [name])
        if bias:
            yield from parts_of(query, [name], kinds=["avg"])
    if bias:
        yield from parts_of(query, ["bias"], kinds=["avg"])


def convolution_backward(query: Ask) -> Iterator[Line]:
    """The gradients of input, weight and bias; each is a sum over a dim that the others have."""
    if not _batched(query):
        return
    total = Partial("sum")
    # torch omits a gradient for an empty batch
    yield along(query, {"grad_output": 0, "input": 0}, [0, total, total], "filled")
    if _by_channel(query):
        made, summed = _weight_dims(query)
        yield along(query, {"grad_output": 1, "weight": made}, [total, made, 0], "filled")
        yield along(query, {"input": 1, "weight": summed}, [1, summed, None], "filled")
    yield from parts_of(query, ["grad_output"])
    yield from parts_of(query, ["input"], [False, True, False])
    yield from parts_of(query, ["weight"], [True, False, False])


RULES: tuple[Entry, ...] = with_variants(
    rules("pooling", REASON, [
        "aten.max_pool1d_with_indices.default", "aten.max_pool2d_with_indices.default",
        "aten.max_pool3d_with_indices.default", "aten.adaptive_max_pool1d.default",
        "aten.adaptive_max_pool2d.default", "aten.adaptive_max_pool3d.default", "aten.max_pool1d.default",
        "aten.max_pool2d.default", "aten.max_pool3d.default",
    ], forward),
    rules("pooling", f"{REASON}, and a mean is linear", [
        "aten.avg_pool1d.default", "aten.avg_pool2d.default", "aten.avg_pool3d.default",
        "aten.adaptive_avg_pool1d.default", "aten._adaptive_avg_pool2d.default", "aten._adaptive_avg_pool3d.default",
        "aten.adaptive_avg_pool2d.default", "aten.adaptive_avg_pool3d.default",
    ], average),
    rules("pooling", f"{REASON}, and its gradient is linear", [
        "aten.avg_pool2d_backward.default", "aten.avg_pool3d_backward.default",
        "aten._adaptive_avg_pool2d_backward.default", "aten._adaptive_avg_pool3d_backward.default",
        "aten.max_pool2d_with_indices_backward.default", "aten.max_pool3d_with_indices_backward.default",
        "aten.adaptive_max_pool2d_backward.default",
    ], backward),
    rules("pooling", REASON, ["aten.max_unpool2d.default", "aten.max_unpool3d.default"], unpooled),
    rules("pooling", f"{REASON}, with samples of its own", [
        "aten.fractional_max_pool2d.default", "aten.fractional_max_pool3d.default",
    ], fractional),
    rules("resizing", "each plane by itself, and each of its points a weighted sum", [
        *(f"aten.{name}.default" for name in RESIZED), *(f"aten.{name}.vec" for name in RESIZED),
    ], resized),
    rules("resizing", "each plane by itself, with each rank's own shape", [
        f"aten.{name}_backward.default" for name in RESIZED
    ], resized_backward, shapes=["input_size"]),
    rules("resizing", "a point reads its own image", [
        "aten.grid_sampler_2d.default", "aten.grid_sampler_3d.default",
    ], sampled),
    rules("resizing", "a point's gradient goes to its own image", [
        "aten.grid_sampler_2d_backward.default", "aten.grid_sampler_3d_backward.default",
    ], sampled_backward),
    rules("resizing", "blocks of pixels change places", [
        "aten.pixel_shuffle.default", "aten.pixel_unshuffle.default",
    ], shuffled),
    rules("resizing", "whole channels change places", [
        "aten.channel_shuffle.default", "aten.native_channel_shuffle.default",
    ], regrouped),
    rules("resizing", "each patch is of one image and one channel", [
        "aten.im2col.default", "aten.col2im.default",
    ], columns),
    rules("convolution", "an image by itself; a channel of the result is a sum over the input's channels",
          ["aten.convolution.default"], convolution),
    rules("convolution", "the gradient of a sum over images or channels is that of each term",
          ["aten.convolution_backward.default"], convolution_backward),
)  # fmt: skip
