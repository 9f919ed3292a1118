"""Ops on lists of tensors, on whole stacks: the foreach ops and the fused optimizers, element by element as they are."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from localtensor.physical import FORMS, Stacked, behind_rows

aten = torch.ops.aten
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
    return [
        aten.linalg_vector_norm.default(x, order, _rows_kept(x) if has_rows else None, dtype=dtype)
        for x, has_rows in _each(stacked, xs)
    ]


def _rows_kept(x: Tensor) -> list[int]:
    return list(range(1, x.dim()))


def _each(stacked: Stacked, xs: Sequence[Tensor]) -> Iterator[tuple[Tensor, bool]]:
    return zip(xs, stacked[0] or (False,) * len(xs), strict=True)


def _max(op: Any, stacked: Stacked, xs: Sequence[Tensor]) -> Any:
    if any(not x.numel() for x in xs):
        return NotImplemented
    return [x.flatten(1).amax(1) if has_rows else x.max() for x, has_rows in _each(stacked, xs)]


for _name in torch._C._dispatch_get_all_op_names():
    if _name.startswith("aten::_foreach_") and "out" not in _name.partition(".")[2]:
        if not f"{_name}.".removeprefix("aten::").startswith(_REDUCING):
            FORMS[_name] = _pointwise
FORMS["aten::_foreach_norm.Scalar"] = _norm
FORMS["aten::_foreach_max"] = _max
