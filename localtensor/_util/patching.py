"""An attribute of somebody else's module or class, replaced for a while."""

from __future__ import annotations

import functools
import io
import pickle
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed import distributed_c10d as c10d


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """While inside, `owner.name` is `value`; afterwards what it was, or nothing if it was not the owner's own.

    >>> from types import SimpleNamespace
    >>> box = SimpleNamespace(x=1)
    >>> with replaced(box, "x", 2), replaced(box, "y", 3):
    ...     box
    namespace(x=2, y=3)
    >>> box
    namespace(x=1)
    """
    missing = object()
    before = vars(owner).get(name, missing)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is missing:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


def wrapped(owner: Any, name: str, around: Callable[..., Any]) -> AbstractContextManager[None]:
    """While inside, who calls `owner.name(...)` calls `around(what it was, ...)`; functions and methods alike."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def ours(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    return replaced(owner, name, ours)


# torch.distributed's world - which groups there are - as an object of its own, where torch keeps it once per process.


class OwnWorld(c10d._World):
    """Its values belong to the object; torch's own class keeps most of them in its module."""

    def __init__(self) -> None:
        super().__init__()
        self.group_count = 0


def _own(name: str) -> property:
    def read(self: OwnWorld) -> Any:
        return self.__dict__.setdefault(f"_own_{name}", {})

    def write(self: OwnWorld, value: Any) -> None:
        self.__dict__[f"_own_{name}"] = value

    return property(read, write)


for _name, _value in vars(c10d._World).items():
    if isinstance(_value, property) and _name not in ("default_pg", "pg_coalesce_state", "comms", "pg_config_info"):
        setattr(OwnWorld, _name, _own(_name))


# Values on their way between our own processes: pickle, with tensors as plain bytes.
#
# torch's own pickling of a tensor goes through an archive format (about 20 times slower for small
# ones, and complex32 does not come back in 2.13); its multiprocessing form shares memory.  Only
# bytes that one of our own processes has just written are ever read: nothing comes from a disk.


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
