"""The same numbers laid out otherwise in memory: columns first, with gaps, and one row shown many times."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from strategies.inputs.variants.variant import Form
from strategies.model.arguments import with_tensors
from strategies.model.rule import Sample


def transposed(sample: Sample) -> Iterator[Sample]:
    """Every tensor of two dims or more, its last dim first in memory."""
    laid = {
        i: x.transpose(0, -1).contiguous().transpose(0, -1) for i, x in enumerate(sample.tensors) if min(_two(x)) > 1
    }
    if laid:
        yield with_tensors(sample, laid, "last dim first in memory")


def gapped(sample: Sample) -> Iterator[Sample]:
    """Every tensor with a gap after each element."""
    laid = {i: torch.stack([x, x], -1)[..., 0] for i, x in enumerate(sample.tensors) if x.ndim and x.numel() > 1}
    if laid:
        yield with_tensors(sample, laid, "with gaps")


def expanded(sample: Sample) -> Iterator[Sample]:
    """Each tensor in turn, its first row, then its first column, shown as often as there were rows or columns."""
    for i, x in enumerate(sample.tensors):
        for dim in range(x.ndim):
            if x.shape[dim] > 1:
                yield with_tensors(
                    sample, {i: x.narrow(dim, 0, 1).expand(x.shape)}, f"operand {i} expanded in dim {dim}"
                )


def _two(x: torch.Tensor) -> tuple[int, int]:
    return (x.shape[0], x.shape[-1]) if x.ndim > 1 else (0, 0)


LAYOUTS = (
    Form("transposed", "rules that look at strides are tried with dense tensors only", transposed),
    Form("gaps", "torch's kernels for data with gaps are others", gapped),
    Form("expanded", "a stride of zero: a rank's rows are all the same memory", expanded),
)  # fmt: skip
