"""What torch takes apart before any op is dispatched: the index in `x[...]`, and lists that become tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from localtensor.errors import NotInLockstep


def differs(index: Any) -> bool:
    """Whether an index has ints among it that may differ between ranks."""
    kind = type(index)
    return kind is torch.SymInt or (kind is tuple and any(type(one) is torch.SymInt for one in index))


def picked(x: Tensor, index: Any) -> Tensor:
    """`x[index]`, where ints may differ between ranks: a view.  Raises `NotInLockstep` if tensors are among them.

    >>> picked(torch.arange(6).view(2, 3), (..., None, 1))
    tensor([[1],
            [4]])
    """
    parts = index if isinstance(index, tuple) else (index,)
    dim, left = 0, sum(one is not None and one is not Ellipsis for one in parts)
    for one in parts:
        if one is Ellipsis:
            dim = x.dim() - left
        elif one is None:
            x, dim = x.unsqueeze(dim), dim + 1
        elif isinstance(one, slice):
            place = (*[slice(None)] * dim, one)
            x, dim, left = x[place], dim + 1, left - 1
        elif isinstance(one, int | torch.SymInt) and not isinstance(one, bool):
            x, left = x.select(dim, one), left - 1
        else:
            why = f"an int of each rank stands beside a {type(one).__name__}: take one index after the other"
            raise NotInLockstep("x[...]", why)
    return x


def stacked(data: Any, kind: type[Tensor], plain: Callable[[Any], Tensor]) -> Tensor | None:
    """The tensor of nested lists with tensors of that kind among their items; None if there are none.

    >>> stacked([torch.tensor(1), 2.5], Tensor, torch.tensor)
    tensor([1.0000, 2.5000])
    """
    if isinstance(data, kind):
        return data.detach()
    if not isinstance(data, list | tuple):
        return None
    found = [stacked(one, kind, plain) for one in data]
    if all(one is None for one in found):
        return None
    return torch.stack([plain(given) if one is None else one for given, one in zip(data, found, strict=True)])
