"""Layers on whole stacks: normalisation and embedding."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from localtensor.lockstep.dispatch.batching import FORMS, Stacked, behind_rows, each_row_of, form

aten = torch.ops.aten


@form("native_layer_norm")
def _layer_norm(op: Any, stacked: Stacked, x: Tensor, shape: Sequence[int], weight: Any, bias: Any, eps: float) -> Any:
    if not stacked[0]:
        return NotImplemented
    if not stacked[2] and not stacked[3]:
        return op(x, shape, weight, bias, eps)
    if _mixed(x, weight, bias):
        return NotImplemented
    out, mean, rstd = op(x, shape, None, None, eps)
    for fn, y, has_rows in ((torch.mul, weight, stacked[2]), (torch.add, bias, stacked[3])):
        if y is not None:
            out = fn(out, behind_rows(y, x.dim() - y.dim()) if has_rows else y)
    return out, mean, rstd


def _mixed(x: Tensor, *others: Tensor | None) -> bool:
    """Half-precision data with single-precision weights: the op computes in the latter, its parts would promote."""
    return any(other is not None and other.dtype is not x.dtype for other in others)


@form("native_layer_norm_backward")
def _layer_norm_back(
    op: Any, stacked: Stacked, grad: Tensor, x: Tensor, shape: Sequence[int], mean: Tensor, rstd: Tensor,
    weight: Any, bias: Any, wanted: Sequence[bool],
) -> Any:  # fmt: skip
    if not (stacked[0] and stacked[1] and stacked[3] and stacked[4]) or _mixed(x, grad, mean, rstd, weight):
        return NotImplemented
    scaled, mean, rstd = grad, mean.contiguous(), rstd.contiguous()  # the kernel takes them as dense
    if stacked[5]:
        scaled, weight = grad * behind_rows(weight, x.dim() - weight.dim()), None
    by_x = op(scaled, x, shape, mean, rstd, weight, None, [True, False, False])[0] if wanted[0] else None
    over = list(range(1, x.dim() - len(shape)))
    by_weight = grad * ((x - mean) * rstd) if wanted[1] else None
    by_bias = grad if wanted[2] else None
    if over:
        by_weight = None if by_weight is None else by_weight.sum(over)
        by_bias = None if by_bias is None else by_bias.sum(over)
    return by_x, _dense(by_weight), _dense(by_bias)


def _dense(x: Tensor | None) -> Tensor | None:
    """A copy: the sum over no dims is the tensor itself."""
    return None if x is None else x.clone(memory_format=torch.contiguous_format)


@form("embedding")
def _embedding(op: Any, stacked: Stacked, weight: Tensor, index: Tensor, *rest: Any) -> Any:
    if not stacked[0]:
        return op(weight, index, *rest)
    if not stacked[1]:
        found: Any = weight.index_select(1, index.reshape(-1))
        return found.reshape(weight.shape[0], *index.shape, weight.shape[2])
    return op(weight.flatten(0, 1), _offset(index, weight.shape[1]))


def _offset(index: Tensor, size: int) -> Tensor:
    """The places in a table of all rows' tables.  Raises IndexError for one that is in no table of its own row."""
    if index.numel() and (int(index.max()) >= size or int(index.min()) < 0):
        raise IndexError("index out of range in self")
    first = torch.arange(index.shape[0], device=index.device) * size
    return index + behind_rows(first, index.dim() - 1)


@form("embedding_dense_backward")
def _embedding_back(
    op: Any, stacked: Stacked, grad: Tensor, index: Tensor, size: int, padding: int, by_count: bool
) -> Any:
    if by_count:
        return NotImplemented
    rows = grad.shape[0] if stacked[0] else index.shape[0]
    grad, index = each_row_of(rows, grad, stacked[0]), each_row_of(rows, index, stacked[1])
    if padding >= 0:
        grad = grad.masked_fill((index == padding).unsqueeze(-1), 0)
    width = grad.shape[-1]
    done = op(grad.reshape(-1, width), _offset(index, size).reshape(-1), rows * size, -1, False)
    return done.view(rows, size, width)


__all__ = ["FORMS"]
