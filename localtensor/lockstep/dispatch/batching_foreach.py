"""Ops on lists of tensors, on whole stacks: the foreach ops and the fused optimizers, element by element as they are."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from localtensor.lockstep.dispatch.batching import FORMS, Stacked, behind_rows

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
