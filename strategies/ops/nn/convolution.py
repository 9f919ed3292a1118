"""Convolutions: by image, by channel of the result, and by channel of the input, whose products are summed.

Spatial dims need their neighbours' rows and have no line.  With groups, the channels of a rank are those of another
number of groups than the call says: only images can be dealt out.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch.distributed.tensor import Partial

from strategies.ops.lib.overload_variants import with_variants
from strategies.ops.lib.shared_dims import along, parts_of
from strategies.ops.semantics.rulebook import Ask, Entry, Line, rules


def _batched(ask: Ask) -> bool:
    return ask.meta("input").ndim == ask.meta("weight").ndim


def _by_channel(ask: Ask) -> bool:
    """Whether each channel of the result is made of all channels of the input."""
    return int(ask["groups"]) == 1


def _weight_dims(ask: Ask) -> tuple[int, int]:
    """The weight's dim of the result's channels, and of the input's."""
    return (1, 0) if ask["transposed"] else (0, 1)


def convolution(ask: Ask) -> Iterator[Line]:
    """Linear in input and weight, each alone: the bias is added once, in the sum of its own parts."""
    if not _batched(ask):
        return
    bias = ask.leaf("bias") is not None
    yield along(ask, {"input": 0}, [0])
    if _by_channel(ask):
        made, summed = _weight_dims(ask)
        yield along(ask, {"weight": made, "bias": 0}, [1], "filled")
        if not bias:
            yield along(ask, {"input": 1, "weight": summed}, [Partial("sum")], "filled")
    for name in ("input", "weight"):
        yield from parts_of(ask, [name, "bias"] if bias else [name])
        if bias:
            yield from parts_of(ask, [name], kinds=["avg"])
    if bias:
        yield from parts_of(ask, ["bias"], kinds=["avg"])


def convolution_backward(ask: Ask) -> Iterator[Line]:
    """Gradients of input, weight and bias: each sums over what the other two keep apart."""
    if not _batched(ask):
        return
    total = Partial("sum")
    yield along(
        ask, {"grad_output": 0, "input": 0}, [0, total, total], "filled"
    )  # of no images torch forgets a gradient
    if _by_channel(ask):
        made, summed = _weight_dims(ask)
        yield along(ask, {"grad_output": 1, "weight": made}, [total, made, 0], "filled")
        yield along(ask, {"input": 1, "weight": summed}, [1, summed, None], "filled")
    yield from parts_of(ask, ["grad_output"])
    yield from parts_of(ask, ["input"], [False, True, False])
    yield from parts_of(ask, ["weight"], [True, False, False])


RULES: tuple[Entry, ...] = with_variants((
    *rules(
        "convolution", "an image by itself; a channel of the result is a sum over the input's channels",
        ["aten.convolution.default"], convolution,
    ),
    *rules(
        "convolution", "the gradient of a sum over images or channels is that of each term",
        ["aten.convolution_backward.default"], convolution_backward,
    ),
))  # fmt: skip
