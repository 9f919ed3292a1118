"""Ops on a whole stack: the arguments that make an op on stacks do, row by row, what the op does on each row.

Each form takes the op, which of its positional arguments are stacked, and its arguments, with stacks in the place of
rows; it answers with a stack of results, a view where the op gives a view, or `NotImplemented` where only vmap knows.
In `stacked`, a list is the tuple of what is said of its items, or False if none of them is a stack; an argument that
is no tensor is not stacked.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

aten = torch.ops.aten
Form: TypeAlias = Callable[..., Any]
Stacked: TypeAlias = tuple[Any, ...]
FORMS: dict[str, Form] = {}


def form(*names: str) -> Callable[[Form], Form]:
    """The function below is the form of these overloads."""

    def keep(form: Form) -> Form:
        for name in names:
            FORMS[f"aten::{name}"] = form
        return form

    return keep


def behind_rows(x: Tensor, dims: int) -> Tensor:
    """A stack, with so many dims of size 1 more, behind the dim of rows."""
    for _ in range(dims):
        x = x.unsqueeze(1)
    return x


@form("view", "_unsafe_view")
def _view(op: Any, stacked: Stacked, x: Tensor, size: Sequence[int]) -> Any:
    return op(x, [x.shape[0], *_without_guess(size, x)])


def _without_guess(size: Sequence[int], x: Tensor) -> Sequence[int]:
    """The size with a number for -1: with a row more, torch could not tell for empty tensors."""
    if -1 not in size:
        return size
    known = 1
    for number in size:
        if number != -1:
            known *= number
    whole = x.numel() // x.shape[0]
    return [whole // known if number == -1 else number for number in size] if known else size


@form("t")
def _t(op: Any, stacked: Stacked, x: Tensor) -> Any:
    return x.transpose(1, 2) if x.dim() == 3 else aten.alias.default(x) if x.dim() < 3 else NotImplemented


@form("transpose.int")
def _transpose(op: Any, stacked: Stacked, x: Tensor, one: int, other: int) -> Any:
    n = x.dim() - 1
    return x.transpose(one % n + 1, other % n + 1) if inside(n, one, other) else NotImplemented


def inside(n: int, *dims: int) -> bool:
    """Whether all of them are dims of a row; if not, the op says so itself, elsewhere."""
    return n > 0 and all(-n <= dim < n for dim in dims)


@form("permute")
def _permute(op: Any, stacked: Stacked, x: Tensor, dims: Sequence[int]) -> Any:
    n = x.dim() - 1
    return x.permute(0, *(dim % n + 1 for dim in dims)) if inside(n, *dims) else NotImplemented


@form("detach", "alias", "clone", "_to_copy", "lift_fresh")
def _as_it_is(op: Any, stacked: Stacked, x: Tensor, *rest: Any, **options: Any) -> Any:
    given = options.get("memory_format")
    if given not in (None, torch.preserve_format, torch.contiguous_format):
        return NotImplemented  # channels_last of a row is no format of a stack
    return op(x, *rest, **options)


@form("unsqueeze")
def _unsqueeze(op: Any, stacked: Stacked, x: Tensor, dim: int) -> Any:
    n = x.dim()
    return x.unsqueeze(dim % n + 1) if -n <= dim < n else NotImplemented


@form("squeeze.dim", "squeeze.dims")
def _squeeze(op: Any, stacked: Stacked, x: Tensor, dims: Any) -> Any:
    n = x.dim() - 1
    wanted = (dims,) if isinstance(dims, int) else tuple(dims)
    return x.squeeze([dim % n + 1 for dim in wanted]) if wanted and inside(n, *wanted) else NotImplemented


@form("expand")
def _expand(op: Any, stacked: Stacked, x: Tensor, size: Sequence[int], *, implicit: bool = False) -> Any:
    n, new = x.dim() - 1, len(size)
    if new < n:
        return NotImplemented
    return behind_rows(x, new - n).expand(x.shape[0], *size)


@form("slice.Tensor")
def _slice(op: Any, stacked: Stacked, x: Tensor, dim: int = 0, *bounds: Any, **named: Any) -> Any:
    n = x.dim() - 1
    return op(x, dim % n + 1, *bounds, **named) if inside(n, dim) else NotImplemented


@form("select.int")
def _select(op: Any, stacked: Stacked, x: Tensor, dim: int, index: int) -> Any:
    n = x.dim() - 1
    return x.select(dim % n + 1, index) if inside(n, dim) else NotImplemented


@form("unbind.int")
def _unbind(op: Any, stacked: Stacked, x: Tensor, dim: int = 0) -> Any:
    n = x.dim() - 1
    return op(x, dim % n + 1) if inside(n, dim) else NotImplemented


@form("split.Tensor", "split_with_sizes")
def _split(op: Any, stacked: Stacked, x: Tensor, sizes: Any, dim: int = 0) -> Any:
    n = x.dim() - 1
    return op(x, sizes, dim % n + 1) if inside(n, dim) else NotImplemented


@form("squeeze")
def _squeeze_all(op: Any, stacked: Stacked, x: Tensor) -> Any:
    return x.squeeze()  # a stack has more rows than one


@form("as_strided")
def _as_strided(
    op: Any, stacked: Stacked, x: Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None
) -> Any:
    start = x.storage_offset() if offset is None else offset
    return x.as_strided((x.shape[0], *size), (x.stride(0), *stride), start)


@form("mm")
def _mm(op: Any, stacked: Stacked, a: Tensor, b: Tensor) -> Any:
    """A product of matrices for each row.  With a factor that all share it is one product of larger matrices."""
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


def each_row_of(rows: int, x: Tensor, is_stacked: bool) -> Tensor:
    """A stack of so many rows; of what has one value, views of it."""
    return x if is_stacked else x.expand(rows, *x.shape)


@form("addmm")
def _addmm(op: Any, stacked: Stacked, bias: Tensor, a: Tensor, b: Tensor, **scales: Any) -> Any:
    rows = next(x.shape[0] for x, is_stacked in zip((bias, a, b), stacked, strict=True) if is_stacked)
    lifted = bias[:, None] if stacked[0] and bias.dim() == 2 else bias
    return torch.baddbmm(lifted, each_row_of(rows, a, stacked[1]), each_row_of(rows, b, stacked[2]), **scales)


@form("sum.dim_IntList", "mean.dim", "amax", "amin")
def _reduce(op: Any, stacked: Stacked, x: Tensor, dims: Sequence[int] | None = (), *rest: Any, **named: Any) -> Any:
    n = x.dim() - 1
    if not n or (dims and not inside(n, *dims)):
        return NotImplemented
    return op(x, [dim % n + 1 for dim in dims] if dims else list(range(1, n + 1)), *rest, **named)


@form("sum")
def _sum(op: Any, stacked: Stacked, x: Tensor, **named: Any) -> Any:
    return aten.sum.dim_IntList(x, list(range(1, x.dim())), **named) if x.dim() > 1 else NotImplemented


@form("mean")
def _mean(op: Any, stacked: Stacked, x: Tensor, **named: Any) -> Any:
    return aten.mean.dim(x, list(range(1, x.dim())), **named) if x.dim() > 1 else NotImplemented


# Ops on lists of tensors, on whole stacks: the foreach ops and the fused optimizers, element by element as they are.

_REDUCING = ("_foreach_norm", "_foreach_powsum", "_foreach_max.", "_foreach_mm")


def _pointwise(op: Any, stacked: Stacked, *args: Any, **named: Any) -> Any:
    """What stands at one place of the lists broadcasts, with the dim of rows before all others."""
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
            return NotImplemented  # a scalar in a stack is no scalar: it would count when dtypes are promoted
        for (number, x, has_rows), dim in zip(here, dims, strict=True):
            if has_rows and dim < max(dims):
                given[number][place] = behind_rows(x, max(dims) - dim)
    return op(*given, **named)


def _norm(op: Any, stacked: Stacked, xs: Sequence[Tensor], order: Any = 2, dtype: Any = None) -> Any:
    norm = aten.linalg_vector_norm.default
    return [
        norm(_flat(x), order, [1], dtype=dtype) if has_rows else norm(x, order, None, dtype=dtype)
        for x, has_rows in _each(stacked, xs)
    ]


def _flat(x: Tensor) -> Tensor:
    return x.flatten(1) if x.dim() > 1 else x.unsqueeze(1)


def _each(stacked: Stacked, xs: Sequence[Tensor]) -> Iterator[tuple[Tensor, bool]]:
    return zip(xs, stacked[0] or (False,) * len(xs), strict=True)


def _max(op: Any, stacked: Stacked, xs: Sequence[Tensor]) -> Any:
    if any(not x.numel() for x in xs):
        return NotImplemented
    return [_flat(x).amax(1) if has_rows else x.max() for x, has_rows in _each(stacked, xs)]


def _fused(op: Any, stacked: Stacked, *lists: Any, **named: Any) -> Any:
    """A step of an optimizer, element by element, on tensors that lie without gaps; the numbers of steps are shared."""
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
        FORMS[_name] = _pointwise
    elif _name.startswith("aten::_fused_") and _name.partition(".")[0].endswith(
        ("adam_", "adamw_", "sgd_", "adagrad_")
    ):
        FORMS[_name] = _fused
FORMS["aten::_foreach_norm.Scalar"] = _norm
FORMS["aten::_foreach_max"] = _max

__all__ = ["FORMS"]
