"""Batching rules: one call on whole stacks that gives, row by row, what the op gives on each row.

A rule takes the op, flags of the positional arguments that are stacked, and the arguments, with stacks in the place
of rows.  It returns a stack of results, a view where the op gives a view, or `NotImplemented` for a call that it does
not cover, which vmap then runs.  The flag of a list is the tuple of its items' flags, or False if none is a stack; the
flag of an argument that is no tensor is False.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._ops import OpOverload as Op

aten = torch.ops.aten
BatchingRule: TypeAlias = Callable[..., Any]
Stacked: TypeAlias = tuple[Any, ...]
BATCHING_RULES: dict[str, BatchingRule] = {}


def batching_rule(*names: str) -> Callable[[BatchingRule], BatchingRule]:
    """Register the decorated function as the batching rule of these overloads."""

    def register(rule: BatchingRule) -> BatchingRule:
        for name in names:
            BATCHING_RULES[f"aten::{name}"] = rule
        return rule

    return register


def add_dims(x: Tensor, dims: int) -> Tensor:
    """A stack with `dims` more dims of size 1, behind the dim of rows."""
    for _ in range(dims):
        x = x.unsqueeze(1)
    return x


@batching_rule("view", "_unsafe_view")
def _view(op: Op, stacked: Stacked, x: Tensor, size: Sequence[int]) -> object:
    return op(x, [x.shape[0], *_without_inferred_dim(size, x)])


def _without_inferred_dim(size: Sequence[int], x: Tensor) -> Sequence[int]:
    """The size with -1 replaced: on a stack, torch cannot infer it for empty tensors."""
    if -1 not in size:
        return size
    known = math.prod(number for number in size if number != -1)
    whole = x.numel() // x.shape[0]
    return [whole // known if number == -1 else number for number in size] if known else size


@batching_rule("t")
def _t(op: Op, stacked: Stacked, x: Tensor) -> Tensor:
    return x.transpose(1, 2) if x.dim() == 3 else aten.alias.default(x) if x.dim() < 3 else NotImplemented


@batching_rule("transpose.int")
def _transpose(op: Op, stacked: Stacked, x: Tensor, one: int, other: int) -> Tensor:
    n = x.dim() - 1
    return x.transpose(one % n + 1, other % n + 1) if are_row_dims(n, one, other) else NotImplemented


def are_row_dims(n: int, *dims: int) -> bool:
    """Whether all are dims of a row of `n` dims; if not, the op itself raises when it runs on the rows."""
    return n > 0 and all(-n <= dim < n for dim in dims)


@batching_rule("permute")
def _permute(op: Op, stacked: Stacked, x: Tensor, dims: Sequence[int]) -> Tensor:
    n = x.dim() - 1
    return x.permute(0, *(dim % n + 1 for dim in dims)) if are_row_dims(n, *dims) else NotImplemented


@batching_rule("detach", "alias", "clone", "_to_copy", "lift_fresh")
def _unchanged(op: Op, stacked: Stacked, x: Tensor, *rest: object, **options: object) -> object:
    given = options.get("memory_format")
    if given not in (None, torch.preserve_format, torch.contiguous_format):
        return NotImplemented  # channels_last of a row is no format of a stack
    return op(x, *rest, **options)


@batching_rule("unsqueeze")
def _unsqueeze(op: Op, stacked: Stacked, x: Tensor, dim: int) -> Tensor:
    n = x.dim()
    return x.unsqueeze(dim % n + 1) if -n <= dim < n else NotImplemented


@batching_rule("squeeze.dim", "squeeze.dims")
def _squeeze(op: Op, stacked: Stacked, x: Tensor, dims: int | Sequence[int]) -> Tensor:
    n = x.dim() - 1
    wanted = (dims,) if isinstance(dims, int) else tuple(dims)
    return x.squeeze([dim % n + 1 for dim in wanted]) if wanted and are_row_dims(n, *wanted) else NotImplemented


@batching_rule("expand")
def _expand(op: Op, stacked: Stacked, x: Tensor, size: Sequence[int], *, implicit: bool = False) -> object:
    n, new = x.dim() - 1, len(size)
    if new < n:
        return NotImplemented
    return add_dims(x, new - n).expand(x.shape[0], *size)


@batching_rule("slice.Tensor", "unbind.int")
def _dim_second(op: Op, stacked: Stacked, x: Tensor, dim: int = 0, *rest: object, **named: object) -> Tensor:
    """Ops whose second argument is the dim, 0 by default."""
    n = x.dim() - 1
    return op(x, dim % n + 1, *rest, **named) if are_row_dims(n, dim) else NotImplemented


@batching_rule("select.int")
def _select(op: Op, stacked: Stacked, x: Tensor, dim: int, index: int) -> Tensor:
    n = x.dim() - 1
    return x.select(dim % n + 1, index) if are_row_dims(n, dim) else NotImplemented


@batching_rule("split.Tensor", "split_with_sizes")
def _split(op: Op, stacked: Stacked, x: Tensor, sizes: int | Sequence[int], dim: int = 0) -> Tensor:
    n = x.dim() - 1
    return op(x, sizes, dim % n + 1) if are_row_dims(n, dim) else NotImplemented


@batching_rule("squeeze")
def _squeeze_all(op: Op, stacked: Stacked, x: Tensor) -> Tensor:
    return x.squeeze()  # the dim of rows stays: a stack has several


@batching_rule("as_strided")
def _as_strided(
    op: Op, stacked: Stacked, x: Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None
) -> Tensor:
    start = x.storage_offset() if offset is None else offset
    return x.as_strided((x.shape[0], *size), (x.stride(0), *stride), start)


@batching_rule("mm")
def _mm(op: Op, stacked: Stacked, a: Tensor, b: Tensor) -> Tensor:
    """A product of matrices for each row.  With a shared second factor it is one product of larger matrices."""
    if stacked[0] and stacked[1]:
        return torch.bmm(a, b)
    if stacked[0]:
        rows, m, _ = a.shape
        return torch.mm(a.reshape(rows * m, -1) if a.numel() else a.flatten(0, 1), b).view(rows, m, b.shape[1])
    rows, p, n = b.shape
    if n == 0 or n >= _NARROW or rows < _NARROW:
        return torch.bmm(a.expand(rows, *a.shape), b)
    columns = torch.mm(b.transpose(1, 2).reshape(rows * n, p), a.t())
    return columns.view(rows, n, a.shape[0]).transpose(1, 2).contiguous()


_NARROW = 8  # columns; torch.bmm takes half a microsecond for each product, however narrow


def expand_rows(rows: int, x: Tensor, is_stacked: bool) -> Tensor:
    """A stack of `rows` rows: a tensor that is not stacked is expanded."""
    return x if is_stacked else x.expand(rows, *x.shape)


@batching_rule("addmm")
def _addmm(op: Op, stacked: Stacked, bias: Tensor, a: Tensor, b: Tensor, **scales: Any) -> Tensor:
    rows = next(x.shape[0] for x, is_stacked in zip((bias, a, b), stacked, strict=True) if is_stacked)
    lifted = bias[:, None] if stacked[0] and bias.dim() == 2 else bias
    return torch.baddbmm(lifted, expand_rows(rows, a, stacked[1]), expand_rows(rows, b, stacked[2]), **scales)


@batching_rule(
    "sum.dim_IntList", "mean.dim", "amax", "amin",
    "var.correction", "std.correction", "var_mean.correction", "std_mean.correction",
)  # fmt: skip
def _reduce(
    op: Op, stacked: Stacked, x: Tensor, dims: Sequence[int] | None = None, *rest: object, **named: object
) -> Tensor:
    over = reduced_dims(x, dims)
    return op(x, over, *rest, **named) if over else NotImplemented


def reduced_dims(x: Tensor, dims: Sequence[int] | None) -> list[int]:
    """The dims of a stack for these dims of a row, all if there are none; empty if a row has no such dim."""
    n = x.dim() - 1
    if not dims:
        return list(range(1, n + 1))
    return [dim % n + 1 for dim in dims] if are_row_dims(n, *dims) else []


@batching_rule("sum", "mean")
def _sum_or_mean(op: Op, stacked: Stacked, x: Tensor, **named: object) -> Tensor:
    over = aten.sum.dim_IntList if op is aten.sum.default else aten.mean.dim
    return over(x, list(range(1, x.dim())), **named) if x.dim() > 1 else NotImplemented


# Ops on lists of tensors: foreach ops and fused optimizers, which work element by element.

_REDUCING = ("_foreach_norm", "_foreach_powsum", "_foreach_max.", "_foreach_mm")


def _pointwise(op: Op, stacked: Stacked, *args: Any, **named: object) -> object:
    """The tensors at one place of the lists broadcast, with the dim of rows before all others."""
    length = len(args[0])
    lists = [isinstance(value, list) and len(value) == length and isinstance(value[0], Tensor) for value in args]
    if any(has_rows and not own for has_rows, own in zip(stacked, lists, strict=True)):
        return NotImplemented  # a tensor of scalars, with a row for each
    given = [list(value) if own else value for value, own in zip(args, lists, strict=True)]
    for place in range(length):
        here = [
            (number, value[place], bool(flags and flags[place]))
            for number, (value, flags, own) in enumerate(zip(given, stacked, lists, strict=True))
            if own
        ]
        dims = [x.dim() - has_rows for _, x, has_rows in here]
        if len({x.dtype for _, x, _ in here}) > 1 and len({dim == 0 for dim in dims}) > 1:
            return NotImplemented  # a scalar in a stack is no scalar: it would take part in type promotion
        for (number, x, has_rows), dim in zip(here, dims, strict=True):
            if has_rows and dim < max(dims):
                given[number][place] = add_dims(x, max(dims) - dim)
    return op(*given, **named)


def _norm(op: Op, stacked: Stacked, xs: Sequence[Tensor], order: float = 2, dtype: torch.dtype | None = None) -> object:
    norm = aten.linalg_vector_norm.default
    return [
        norm(_flatten_rows(x), order, [1], dtype=dtype) if has_rows else norm(x, order, None, dtype=dtype)
        for x, has_rows in _with_flags(stacked, xs)
    ]


def _flatten_rows(x: Tensor) -> Tensor:
    return x.flatten(1) if x.dim() > 1 else x.unsqueeze(1)


def _with_flags(stacked: Stacked, xs: Sequence[Tensor]) -> Iterator[tuple[Tensor, bool]]:
    return zip(xs, stacked[0] or (False,) * len(xs), strict=True)


def _max(op: Op, stacked: Stacked, xs: Sequence[Tensor]) -> object:
    if any(not x.numel() for x in xs):
        return NotImplemented
    return [_flatten_rows(x).amax(1) if has_rows else x.max() for x, has_rows in _with_flags(stacked, xs)]


def _fused(op: Op, stacked: Stacked, *lists: Any, **named: object) -> object:
    """An optimizer step, element by element, on contiguous tensors; `state_steps` must be shared by all ranks."""
    for argument, values, flags in zip(op._schema.arguments, lists, stacked, strict=False):
        is_step = argument.name == "state_steps"
        if bool(flags) is is_step and values:
            return NotImplemented
        if not is_step and not all(
            has_rows and x.is_contiguous() for x, has_rows in zip(values, flags or (), strict=True)
        ):
            return NotImplemented
    return op(*lists, **named)


for _name in torch._C._dispatch_get_all_op_names():
    _is_out = "out" in _name.partition(".")[2]
    if _name.startswith("aten::_foreach_") and not _is_out and not f"{_name[6:]}.".startswith(_REDUCING):
        BATCHING_RULES[_name] = _pointwise
    elif _name.startswith("aten::_fused_") and _name.partition(".")[0].endswith(
        ("adam_", "adamw_", "sgd_", "adagrad_")
    ):
        BATCHING_RULES[_name] = _fused
BATCHING_RULES["aten::_foreach_norm.Scalar"] = _norm
BATCHING_RULES["aten::_foreach_max"] = _max
