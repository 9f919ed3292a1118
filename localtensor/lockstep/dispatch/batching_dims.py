"""Batching rules of ops with a dim, of products, and of layers: the dim of rows comes before the others."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload as Op

from localtensor.lockstep.dispatch.batching import (
    Stacked,
    add_dims,
    are_row_dims,
    batching_rule,
    expand_rows,
    reduced_dims,
)
from localtensor.lockstep.values.stacks import as_blocks

aten = torch.ops.aten


@functools.cache
def _dim_position(op: Op) -> int:
    """The position of the argument `dim` or `dims` after the first one."""
    return next(i for i, a in enumerate(op._schema.arguments) if a.name in ("dim", "dims")) - 1


@batching_rule(
    "cumsum", "cumprod", "logcumsumexp", "flip", "cummax", "cummin", "max.dim", "min.dim", "any.dim", "all.dim",
    "_softmax", "_log_softmax", "index_fill.int_Scalar", "kthvalue", "mode", "median.dim", "glu", "sort", "topk",
    "argsort",
)  # fmt: skip
def _dim_by_schema(op: Op, stacked: Stacked, x: Tensor, *rest: Any, **named: object) -> object:
    """Ops with an argument `dim` or `dims`, wherever the schema has it."""
    place = _dim_position(op)
    if not stacked[0] or any(stacked[1:]):
        return NotImplemented
    n, given = x.dim() - 1, list(rest)
    if place >= len(given):
        given += [a.default_value for a in op._schema.arguments[len(given) + 1 : place + 2]]
    dims = given[place] if isinstance(given[place], list) else [given[place]]
    if not are_row_dims(n, *dims):
        return NotImplemented
    moved = [dim % n + 1 for dim in dims]
    given[place] = moved if isinstance(given[place], list) else moved[0]
    return op(x, *given, **named)


@batching_rule("index_select")
def _index_select(op: Op, stacked: Stacked, x: Tensor, dim: int, index: Tensor) -> Tensor:
    n = x.dim() - 1
    return op(x, dim % n + 1, index) if not stacked[2] and are_row_dims(n, dim) else NotImplemented


@batching_rule("sort.stable")
def _sorted(
    op: Op, stacked: Stacked, x: Tensor, *, stable: bool | None, dim: int = -1, descending: bool = False
) -> Tensor:
    n = x.dim() - 1
    return op(x, stable=stable, dim=dim % n + 1, descending=descending) if are_row_dims(n, dim) else NotImplemented


@batching_rule("argmax", "argmin")
def _argmax(op: Op, stacked: Stacked, x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    n = x.dim() - 1
    if dim is None:
        return NotImplemented if keepdim or not n or not x.numel() else op(x.flatten(1), 1)
    return op(x, dim % n + 1, keepdim) if are_row_dims(n, dim) else NotImplemented


@batching_rule("max", "min")
def _max(op: Op, stacked: Stacked, x: Tensor) -> Tensor:
    whole = aten.amax if op is aten.max.default else aten.amin
    return whole(x.flatten(1), [1]) if x.dim() > 1 and x.numel() else NotImplemented


@batching_rule("any", "all")
def _any(op: Op, stacked: Stacked, x: Tensor) -> Tensor:
    return (aten.any if op is aten.any.default else aten.all).dim(x.flatten(1), 1) if x.dim() > 1 else NotImplemented


@batching_rule("linalg_vector_norm")
def _norm(
    op: Op, stacked: Stacked, x: Tensor, order: float = 2, dims: Sequence[int] | None = None,
    *rest: object, **named: object,
) -> Tensor:  # fmt: skip
    over = reduced_dims(x, dims)
    return op(x, order, over, *rest, **named) if over else NotImplemented


@batching_rule("_softmax_backward_data", "_log_softmax_backward_data")
def _softmax_back(op: Op, stacked: Stacked, grad: Tensor, out: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    n = out.dim() - 1
    return op(grad, out, dim % n + 1, dtype) if all(stacked[:2]) and are_row_dims(n, dim) else NotImplemented


@batching_rule("cat", "stack")
def _cat(op: Op, stacked: Stacked, xs: Sequence[Tensor], dim: int = 0) -> object:
    dims = {x.dim() - has_rows for x, has_rows in zip(xs, stacked[0], strict=True)}
    n = dims.pop() + (op is aten.stack.default)
    if dims or not are_row_dims(n, dim) or not all(x.is_contiguous() for x in xs):
        return NotImplemented  # rows of three dims in another order would look like channels_last in a stack
    rows = next(x.shape[0] for x, has_rows in zip(xs, stacked[0], strict=True) if has_rows)
    return op([expand_rows(rows, x, has_rows) for x, has_rows in zip(xs, stacked[0], strict=True)], dim % n + 1)


@batching_rule(
    "gather", "scatter.src", "scatter.value", "scatter_add", "scatter_.src", "scatter_.value", "scatter_add_"
)
def _gather_or_scatter(
    op: Op, stacked: Stacked, x: Tensor, dim: int, index: Tensor, *rest: object, **named: object
) -> object:
    rows = x.shape[0] if stacked[0] else index.shape[0] if stacked[2] else 0
    if not rows:
        return NotImplemented
    x, index = expand_rows(rows, x, stacked[0]), expand_rows(rows, index, stacked[2])
    values = [
        expand_rows(rows, one, flag) if isinstance(one, Tensor) else one
        for one, flag in zip(rest, stacked[3:], strict=True)
    ]
    n = x.dim() - 1
    if not are_row_dims(n, dim) or index.dim() != x.dim():
        return NotImplemented
    return op(x, dim % n + 1, index, *values, **named)


@batching_rule("index.Tensor")
def _index(op: Op, stacked: Stacked, x: Tensor, indices: Sequence[Tensor | None]) -> object:
    """Indexing with adjacent index tensors, whose result dims take their place."""
    places = [place for place, index in enumerate(indices) if index is not None]
    if any(index.dtype in (torch.bool, torch.uint8) for index in indices if index is not None):
        return NotImplemented
    if not places or places[-1] - places[0] >= len(places) or (stacked[1] and places[0]):
        return NotImplemented
    if not stacked[1]:
        return op(x, [None, *indices])
    dims = [index.dim() - has_rows for index, has_rows in zip(indices, stacked[1], strict=True) if index is not None]
    lifted = [  # with dims added so that they broadcast row by row
        add_dims(index, max(dims) - index.dim() + 1) if index is not None and has_rows else index
        for index, has_rows in zip(indices, stacked[1], strict=True)
    ]
    if not stacked[0]:
        return op(x, lifted)
    rows = torch.arange(x.shape[0], device=x.device)
    most = max(index.dim() for index in lifted if index is not None)
    return op(x, [rows.view(-1, *[1] * (most - 1)), *lifted])


@batching_rule("constant_pad_nd")
def _pad(op: Op, stacked: Stacked, x: Tensor, pad: Sequence[int], *value: object) -> Tensor:
    return op(x, pad, *value) if len(pad) // 2 < x.dim() else NotImplemented


@batching_rule("repeat")
def _repeat(op: Op, stacked: Stacked, x: Tensor, times: Sequence[int]) -> Tensor:
    new = len(times) - (x.dim() - 1)
    return op(add_dims(x, new), [1, *times]) if new >= 0 else NotImplemented


@batching_rule("tril", "triu")
def _triangle(op: Op, stacked: Stacked, x: Tensor, *diagonal: int) -> Tensor:
    return op(x, *diagonal) if x.dim() > 2 else NotImplemented


@batching_rule("as_strided_scatter")
def _as_strided_scatter(
    op: Op, stacked: Stacked, x: Tensor, source: Tensor, size: Sequence[int], stride: Sequence[int],
    offset: int | None = None,
) -> object:  # fmt: skip
    if not stacked[0]:
        return NotImplemented
    x = as_blocks(x, x.shape[0])
    start = x.storage_offset() if offset is None else offset
    whole = x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0).clone()
    whole.as_strided((x.shape[0], *size), (x.stride(0), *stride), start).copy_(source)
    return whole.as_strided(x.shape, x.stride(), x.storage_offset())


# -- products


@batching_rule("bmm")
def _bmm(op: Op, stacked: Stacked, a: Tensor, b: Tensor) -> object:
    rows = a.shape[0] if stacked[0] else b.shape[0]
    a, b = expand_rows(rows, a, stacked[0]), expand_rows(rows, b, stacked[1])
    if a.dim() != 4 or b.dim() != 4:
        return NotImplemented
    return op(a.flatten(0, 1), b.flatten(0, 1)).unflatten(0, (rows, a.shape[1]))


@batching_rule("baddbmm")
def _baddbmm(op: Op, stacked: Stacked, bias: Tensor, a: Tensor, b: Tensor, **scales: object) -> object:
    if not (stacked[1] and stacked[2]) or a.dim() != 4 or b.dim() != 4 or bias.dim() != 3 + stacked[0]:
        return NotImplemented
    shape = (*a.shape[:3], b.shape[3])
    lifted = bias.expand(shape).flatten(0, 1)
    return op(lifted, a.flatten(0, 1), b.flatten(0, 1), **scales).unflatten(0, shape[:2])


@batching_rule("mv")
def _mv(op: Op, stacked: Stacked, a: Tensor, x: Tensor) -> Tensor:
    rows = a.shape[0] if stacked[0] else x.shape[0]
    return torch.bmm(expand_rows(rows, a, stacked[0]), expand_rows(rows, x, stacked[1]).unsqueeze(2)).squeeze(2)


@batching_rule("dot")
def _dot(op: Op, stacked: Stacked, a: Tensor, b: Tensor) -> Tensor:
    rows = a.shape[0] if stacked[0] else b.shape[0]
    a, b = expand_rows(rows, a, stacked[0]), expand_rows(rows, b, stacked[1])
    return torch.bmm(a.unsqueeze(1), b.unsqueeze(2)).view(rows) if a.shape == b.shape else NotImplemented


# -- layers


@batching_rule("native_layer_norm")
def _layer_norm(
    op: Op, stacked: Stacked, x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> object:
    if not stacked[0]:
        return NotImplemented
    if not stacked[2] and not stacked[3]:
        return op(x, shape, weight, bias, eps)
    if _mixed(x, weight, bias):
        return NotImplemented
    out, mean, rstd = op(x, shape, None, None, eps)
    for fn, y, has_rows in ((torch.mul, weight, stacked[2]), (torch.add, bias, stacked[3])):
        if y is not None:
            out = fn(out, add_dims(y, x.dim() - y.dim()) if has_rows else y)
    return out, mean, rstd


def _mixed(x: Tensor, *others: Tensor | None) -> bool:
    """Whether dtypes differ, as of half-precision data with float32 weights: the op computes in float32, its parts promote."""
    return any(other is not None and other.dtype is not x.dtype for other in others)


@batching_rule("native_layer_norm_backward")
def _layer_norm_back(
    op: Op, stacked: Stacked, grad: Tensor, x: Tensor, shape: Sequence[int], mean: Tensor, rstd: Tensor,
    weight: Any, bias: Tensor | None, wanted: Sequence[bool],
) -> object:  # fmt: skip
    if not (stacked[0] and stacked[1] and stacked[3] and stacked[4]) or _mixed(x, grad, mean, rstd, weight):
        return NotImplemented
    scaled, mean, rstd = grad, mean.contiguous(), rstd.contiguous()  # the kernel reads them as dense
    if stacked[5]:
        scaled, weight = grad * add_dims(weight, x.dim() - weight.dim()), None
    by_x = op(scaled, x, shape, mean, rstd, weight, None, [True, False, False])[0] if wanted[0] else None
    over = list(range(1, x.dim() - len(shape)))
    by_weight = grad * ((x - mean) * rstd) if wanted[1] else None
    by_bias = grad if wanted[2] else None
    if over:
        by_weight = None if by_weight is None else by_weight.sum(over)
        by_bias = None if by_bias is None else by_bias.sum(over)
    return by_x, _dense_copy(by_weight), _dense_copy(by_bias)


def _dense_copy(x: Tensor | None) -> Tensor | None:
    """A dense copy: the sum over no dims would be the tensor itself."""
    return None if x is None else x.clone(memory_format=torch.contiguous_format)


@batching_rule("embedding")
def _embedding(op: Op, stacked: Stacked, weight: Tensor, index: Tensor, *rest: object) -> object:
    if not stacked[0]:
        return op(weight, index, *rest)
    if not stacked[1]:
        found: Any = weight.index_select(1, index.reshape(-1))
        return found.reshape(weight.shape[0], *index.shape, weight.shape[2])
    return op(weight.flatten(0, 1), _offset(index, weight.shape[1]))


def _offset(index: Tensor, size: int) -> Tensor:
    """Indices into all rows' tables stacked as one.  Raises IndexError for an index outside of its own row's table."""
    if index.numel() and (int(index.max()) >= size or int(index.min()) < 0):
        raise IndexError("index out of range in self")
    first = torch.arange(index.shape[0], device=index.device) * size
    return index + add_dims(first, index.dim() - 1)


@batching_rule("embedding_dense_backward")
def _embedding_back(
    op: Op, stacked: Stacked, grad: Tensor, index: Tensor, size: int, padding: int, by_count: bool
) -> object:
    if by_count:
        return NotImplemented
    rows = grad.shape[0] if stacked[0] else index.shape[0]
    grad, index = expand_rows(rows, grad, stacked[0]), expand_rows(rows, index, stacked[1])
    if padding >= 0:
        grad = grad.masked_fill((index == padding).unsqueeze(-1), 0)
    width = grad.shape[-1]
    done = op(grad.reshape(-1, width), _offset(index, size).reshape(-1), rows * size, -1, False)
    return done.view(rows, size, width)
