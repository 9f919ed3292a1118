"""The same places named otherwise: counted from the end."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from strategies.inputs.variants.variant import Form
from strategies.model.arguments import is_index, is_places, names, trusts, with_tensors
from strategies.model.rule import Sample


def negative_indices(sample: Sample) -> Iterator[Sample]:
    """Every second index counted from the end, of each size of the first tensor in turn.

    Only one of the sizes is right: the caller must check which gives the same.  On a GPU the wrong ones, out
    of range, would cost the process, so it is not asked there.
    """
    if trusts(sample.op) or not sample.tensors or any(x.is_cuda for x in sample.tensors):
        return
    first = sample.tensors[0]
    for size in dict.fromkeys([*first.shape, first.numel()]):
        changed = {}
        for i, (x, name) in enumerate(zip(sample.tensors, names(sample), strict=True)):
            if is_index(name) and is_places(x) and x.numel():
                places = torch.arange(x.numel(), device=x.device).view(x.shape)
                changed[i] = torch.where((places % 2 == 0) & (x >= 0), x - size, x)
        if changed:
            yield with_tensors(sample, changed, f"indices counted from {size}")


INDEXED = (
    Form("negative indices", "an index below zero is in no shard's range of rows", negative_indices, same=True),
)  # fmt: skip
