"""Planes made larger or smaller, sampled, and their pixels rearranged."""

from __future__ import annotations

from collections.abc import Iterator

from torch.distributed.tensor import Partial

from localtensor.layout.spec import KINDS
from strategies.ops.lib.overload_variants import with_variants
from strategies.ops.lib.shared_dims import LINEAR, along, parts_of
from strategies.ops.nn.pooling import planes
from strategies.ops.semantics.rulebook import Ask, Entry, Line, rules

SIZES = ("linear1d", "bilinear2d", "trilinear3d", "bicubic2d", "nearest1d", "nearest2d", "nearest3d")
SMOOTHED = ("_bilinear2d_aa", "_bicubic2d_aa", "_lanczos2d_aa")
EXACT = ("_nearest_exact1d", "_nearest_exact2d", "_nearest_exact3d")
RESIZED = [f"upsample_{name}" for name in SIZES] + [f"_upsample{name}" for name in (*SMOOTHED, *EXACT)]


def resized(ask: Ask) -> Iterator[Line]:
    """Nearest ones take elements as they are, the others weigh them: linear either way."""
    yield from planes(ask, "input" if ask.leaf("self") is None else "self")
    yield from parts_of(ask, ["input" if ask.leaf("self") is None else "self"], kinds=_kinds(ask))


def _kinds(ask: Ask) -> tuple[str, ...]:
    return KINDS if "nearest" in ask.op else LINEAR


def resized_backward(ask: Ask) -> Iterator[Line]:
    """`input_size` is the result's shape: each rank has its own (DTensor 2.13 passes that of the whole)."""
    yield from planes(ask, "grad_output")
    yield from parts_of(ask, ["grad_output"])


def sampled(ask: Ask) -> Iterator[Line]:
    """Each point of the grid is looked up in every channel of its image; linear in the image."""
    yield along(ask, {"input": 0, "grid": 0}, [0])
    yield along(ask, {"input": 1}, [1], "filled")
    for dim in range(1, ask.meta("grid").ndim - 1):
        yield along(ask, {"grid": dim}, [dim + 1], "filled")
    yield from parts_of(ask, ["input"])


def sampled_backward(ask: Ask) -> Iterator[Line]:
    """A point's gradient sums over channels; an image's, over points."""
    total = Partial("sum")
    yield along(ask, {"grad_output": 0, "input": 0, "grid": 0}, [0, 0])
    yield along(ask, {"grad_output": 1, "input": 1}, [1, total], "filled")
    for dim in range(1, ask.meta("grid").ndim - 1):
        yield along(ask, {"grad_output": dim + 1, "grid": dim}, [total, dim], "filled")
    yield from parts_of(ask, ["grad_output"])


def shuffled(ask: Ask) -> Iterator[Line]:
    """Channels and the two dims of the plane become each other in blocks: cut where all ranks have whole ones."""
    ndim = ask.meta("self").ndim
    for dim in range(ndim):
        yield along(ask, {"self": dim}, [dim], "filled" if dim < ndim - 3 else "even")
    yield from parts_of(ask, ["self"], kinds=KINDS)


def regrouped(ask: Ask) -> Iterator[Line]:
    """Channels change places: every other dim stays where it is."""
    for dim in range(ask.meta("self").ndim):
        if dim != 1:
            yield along(ask, {"self": dim}, [dim], "any" if dim == 0 else "filled")
    yield from parts_of(ask, ["self"], kinds=KINDS)


def columns(ask: Ask) -> Iterator[Line]:
    """Patches of an image as columns, and back: a channel is a block of rows, cut where all ranks have whole ones."""
    last = 1 if "im2col" in ask.op else 0
    batched = ask.meta("self").ndim - (3 + last) + 1
    if batched:
        yield along(ask, {"self": 0}, [0])
    yield along(ask, {"self": batched}, [batched], "even")
    yield from parts_of(ask, ["self"])


RULES: tuple[Entry, ...] = with_variants((
    *rules("resizing", "each plane by itself, and each of its points a weighted sum", [
        *(f"aten.{name}.default" for name in RESIZED), *(f"aten.{name}.vec" for name in RESIZED),
    ], resized),
    *rules("resizing", "each plane by itself, with each rank's own shape", [
        f"aten.{name}_backward.default" for name in RESIZED
    ], resized_backward, shapes=["input_size"]),
    *rules("resizing", "a point reads its own image", [
        "aten.grid_sampler_2d.default", "aten.grid_sampler_3d.default",
    ], sampled),
    *rules("resizing", "a point's gradient goes to its own image", [
        "aten.grid_sampler_2d_backward.default", "aten.grid_sampler_3d_backward.default",
    ], sampled_backward),
    *rules("resizing", "blocks of pixels change places", [
        "aten.pixel_shuffle.default", "aten.pixel_unshuffle.default",
    ], shuffled),
    *rules("resizing", "whole channels change places", [
        "aten.channel_shuffle.default", "aten.native_channel_shuffle.default",
    ], regrouped),
    *rules("resizing", "each patch is of one image and one channel", [
        "aten.im2col.default", "aten.col2im.default",
    ], columns),
))  # fmt: skip
