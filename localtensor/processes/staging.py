"""Collectives of tensors on a GPU over gloo, through memory of the host: so real processes can share one GPU.

Gloo itself serves all_reduce and broadcast of such tensors alone: it refuses to send them, and ends the process where they
are gathered.  NCCL wants a GPU for each rank.  Here an operator of c10d gets copies of its tensors in memory of the host,
where gloo serves it, and what it has written is copied back; computing stays on the GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Work
from torch.utils._pytree import tree_leaves, tree_map

from localtensor.collectives.c10d_table import RECV, SEND, argument_positions, replaced_kernels

# Private parts of torch: why each is needed.  Tried on torch 2.11.0 and 2.13.0.
PRIVATE = {
    "torch._C._ForceDispatchKeyGuard": "the operator is called again for the CPU, also where a call without tensors named the GPU; "
    "copies are made for each its own device",
    "torch._C._dispatch_tls_local_exclude_set": "what is excluded around the call stays so: autograd, kernels that see calls",
}


@functools.cache
def stage_gpu_tensors() -> None:
    """From now on gloo groups of this process serve tensors on a GPU.  Does nothing where torch is not built for CUDA."""
    if torch.backends.cuda.is_built():
        in_force = ExitStack()
        in_force.enter_context(replaced_kernels(staged_kernel, ("CUDA",)))
        _FOR_GOOD.append(in_force)


_FOR_GOOD: list[ExitStack] = []


def staged_kernel(name: str, schema: Any, previous: Callable[..., Any] | None) -> Callable[..., Any]:
    """The kernel of an operator of c10d for tensors on a GPU; groups of other backends have the `previous` one."""
    operator = getattr(torch.ops.c10d, name).default
    at, _, _ = argument_positions(name, schema)
    outputs = [i for i, a in enumerate(schema.arguments) if name != SEND and a.name.startswith(("output", "tensors"))]

    def kernel(*arguments: Any) -> object:
        if previous is not None and _backend(dist.ProcessGroup.unbox(arguments[at])) != "gloo":
            return previous(*arguments)
        copies: dict[int, Tensor] = {}
        with _any_device():
            on_host = tree_map(lambda x: _copy(x, copies), arguments)
        with torch._C._ForceDispatchKeyGuard(_CPU, torch._C._dispatch_tls_local_exclude_set()):
            result = operator(*on_host)
        written = [(x, copies[id(x)]) for x in tree_leaves([arguments[i] for i in outputs]) if id(x) in copies]
        originals = {id(copy): x for x, copy in written}
        result = tree_map(lambda x: originals.get(id(x), x) if isinstance(x, Tensor) else x, result)
        if name == SEND or result is None:
            return result
        if name == RECV:  # its peer may have to receive first
            return _Received(result, written).boxed()
        _work_of(result).wait()
        _copy_back(written)
        return result

    return kernel


_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_BACKEND_SELECT = torch._C.DispatchKeySet(torch._C.DispatchKey.BackendSelect)


def _any_device() -> AbstractContextManager[object]:
    """Inside it operators go to the kernels of the devices of their tensors and arguments, also where the call came with the
    kernels of one device in force (see `calls_seen`)."""
    excluded = torch._C._dispatch_tls_local_exclude_set() - _BACKEND_SELECT
    return torch._C._ForceDispatchKeyGuard(_BACKEND_SELECT, excluded)


def _backend(group: dist.ProcessGroup) -> str:
    return str(group._get_backend(torch.device("cuda")).name())


def _copy(x: object, copies: dict[int, Tensor]) -> object:
    """The argument, a tensor in memory of the host."""
    if not isinstance(x, Tensor):
        return x
    if id(x) not in copies:
        copies[id(x)] = x.detach().to("cpu", copy=True)
    return copies[id(x)]


def _copy_back(written: Sequence[tuple[Tensor, Tensor]]) -> None:
    with _any_device():
        for x, copy in written:
            x.detach().copy_(copy)


def _work_of(result: Any) -> Any:
    return result[-1] if isinstance(result, (tuple, list)) else result


class _Received(Work):
    """A message on its way; it is in the tensors after `wait`."""

    def __init__(self, work: Any, written: Sequence[tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self._work, self._written = work, list(written)
        _ON_THEIR_WAY.add(self)  # C++ holds no reference to an object of Python

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._work.wait()
        _copy_back(self._written)
        self._written = []
        _ON_THEIR_WAY.discard(self)
        return True


_ON_THEIR_WAY: set[_Received] = set()
