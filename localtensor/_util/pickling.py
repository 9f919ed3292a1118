"""Values on their way between our own processes: pickle, with tensors as plain bytes.

torch's own pickling of a tensor goes through an archive format (about 20 times slower for small
ones, and complex32 does not come back in 2.13); its multiprocessing form shares memory.  Only
bytes that one of our own processes has just written are ever read: nothing comes from a disk.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if type(value) is Tensor and value.layout == torch.strided and not value.requires_grad:
            return _restored, _described(value)
        if isinstance(value, torch._ops.OpOverload):
            return _overload, (str(value),)
        return NotImplemented


def dumps(value: Any) -> bytes:
    """Bytes from which `loads` makes the same value again; dense tensors keep their strides.

    >>> loads(dumps((torch.arange(3), "x")))
    (tensor([0, 1, 2]), 'x')
    """
    sink = io.BytesIO()
    _Pickler(sink, pickle.HIGHEST_PROTOCOL).dump(value)
    return sink.getvalue()


loads: Callable[[bytes], Any] = pickle.loads
"""The value that `dumps` wrote, in another process of ours."""


def _described(x: Tensor) -> tuple[bytes, torch.dtype, tuple[int, ...], tuple[int, ...], str]:
    plain = x.resolve_conj().resolve_neg()
    dense = torch.empty_like(plain, memory_format=torch.preserve_format).stride() == x.stride()
    strides = x.stride() if dense else torch.empty(x.shape, device="meta").stride()
    raw = torch.empty(x.numel(), dtype=x.dtype).copy_(plain.detach().reshape(-1))
    data = raw.view(torch.uint8).numpy().tobytes() if raw.numel() else b""
    return data, x.dtype, tuple(x.shape), tuple(strides), str(x.device)


def _restored(data: bytes, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], device: str) -> Tensor:
    flat = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
    whole = flat.reshape(shape)
    if whole.stride() != strides:
        whole = torch.empty_strided(shape, strides, dtype=dtype).copy_(whole)
    return whole if device == "cpu" else whole.to(device)


def _overload(name: str) -> Any:
    namespace, packet, which = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), which)
