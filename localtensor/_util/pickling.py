"""Pickling between our own processes, with tensors as plain bytes.

torch's own pickling of a tensor uses an archive format (about 20 times slower for small tensors; complex32 fails to
load in 2.13), and its multiprocessing form shares memory.  Only bytes that one of our own processes has just written
are ever read.  torch is imported with the first tensor: a process may have to set its environment before that.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class _Pickler(pickle.Pickler):
    views = False

    def reducer_override(self, value: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is None:
            return NotImplemented
        if isinstance(value, torch._ops.OpOverload):
            return _overload, (str(value),)
        functional = sys.modules.get("torch.distributed._functional_collectives")
        if functional is not None and type(value) is functional.AsyncCollectiveTensor:
            value.trigger_wait()  # torch pickles it as it is, perhaps before its numbers are there
        if type(value) is not torch.Tensor or not _is_plain(value):
            return NotImplemented
        if (self.views or value.requires_grad) and _is_view(value):
            return NotImplemented
        return rebuild_tensor, _tensor_fields(value)


def dumps(value: object, *, views: bool = False) -> bytes:
    """Bytes from which `loads` makes an equal value; dense tensors keep their strides.

    Tensors with other strides and lazy conjugates become dense tensors of the same values, except with `views` or
    where they require a gradient.

    >>> import torch
    >>> loads(dumps((torch.arange(3), "x")))
    (tensor([0, 1, 2]), 'x')
    """
    sink = io.BytesIO()
    pickler = _Pickler(sink, pickle.HIGHEST_PROTOCOL)
    pickler.views = views
    pickler.dump(value)
    return sink.getvalue()


loads: Callable[[bytes], Any] = pickle.loads
"""The value that `dumps` wrote."""


def _is_plain(x: torch.Tensor) -> bool:
    """Whether bytes, dtype, shape, strides and device describe the tensor completely."""
    odd = x.is_quantized or x.is_meta or x.__dict__ or x._backward_hooks
    return str(x.layout) == "torch.strided" and not odd


def _is_view(x: torch.Tensor) -> bool:
    return x.is_conj() or x.is_neg() or not x.is_contiguous()


def _tensor_fields(x: torch.Tensor) -> tuple[Any, ...]:
    import torch

    plain = x.detach().resolve_conj().resolve_neg()
    dense = x.is_contiguous() or torch.empty_like(plain, memory_format=torch.preserve_format).stride() == x.stride()
    strides = x.stride() if dense else torch.empty(x.shape, device="meta").stride()
    flat = torch.empty(x.numel(), dtype=x.dtype, device="cpu").copy_(
        plain.reshape(-1)
    )  # reshape alone keeps the stride of one dim
    data = flat.view(torch.uint8).numpy().tobytes() if x.numel() else b""
    return bytearray(data), x.dtype, tuple(x.shape), tuple(strides), str(x.device), x.requires_grad


def rebuild_tensor(
    data: bytearray, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], device: str, wants_grad: bool
) -> torch.Tensor:
    """The tensor of these fields, in memory that torch owns (a borrowed buffer could not be resized)."""
    import torch

    made = torch.empty(shape, dtype=dtype, device="cpu")
    if data:
        made.view(-1).view(torch.uint8).copy_(torch.frombuffer(data, dtype=torch.uint8))
    if made.stride() != strides:
        made = torch.empty_strided(shape, strides, dtype=dtype, device="cpu").copy_(made)
    return made.to(device).requires_grad_(wants_grad)


def _overload(name: str) -> object:
    import torch

    namespace, packet, which = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), which)
