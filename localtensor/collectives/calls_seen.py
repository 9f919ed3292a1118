"""The calls that a process makes on real backends, for a recording beside that of rank threads."""

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from localtensor._util.call_sites import place_of_frame
from localtensor._util.events import Call
from localtensor.collectives.c10d_table import (
    COLLECTIVE_OPS,
    SEND,
    argument_positions,
    plain_argument,
    replaced_kernels,
)

# Private part of torch: why it is needed.  Tried on torch 2.11.0, 2.13.0 and 2.15.0.
SEEN_PRIVATE = {
    "torch._C._ForceDispatchKeyGuard": "the operator is called again below the key at which its calls are seen, and calls without "
    "a tensor, as barrier, have the key of their device from it",
    "torch._C._dispatch_tls_local_include_set": "what is included around the call stays so",
    "torch._C._dispatch_tls_local_exclude_set": "what is excluded around the call stays so",
    "torch._C._AutoDispatchBelowAutograd": "what is seen lies below autograd, as the operator that it hands on to",
}


@contextmanager
def calls_seen() -> Iterator[list[Call]]:
    """Gives a list that gets the calls of this process's collectives and messages on real backends, inside the block.

    They are seen before the backend's kernel, which is called as an operator: called as a kernel it keeps the interpreter's
    lock, for which a thread of gloo waits that has the lock of the queue, into which that kernel puts the call.
    """
    calls: list[Call] = []
    seeing, numbers = (
        [calls],
        Counter[str](),
    )  # the first is emptied at the end: torch may keep the kernels of the last run

    def made(name: str, schema: torch.FunctionSchema, previous: Callable[..., Any] | None) -> Callable[..., Any]:
        at, _, count = argument_positions(name, schema)
        operator = getattr(torch.ops.c10d, name).default

        def kernel(*arguments: Any) -> object:
            for into in seeing:
                group = dist.ProcessGroup.unbox(arguments[at])
                ranks = tuple(dist.get_process_group_ranks(group))
                rest = [plain_argument(x) for x in (*arguments[:at], *arguments[at + 1 :])][:count]
                kind, op = ("send" if name == SEND else "recv"), None
                if name in COLLECTIVE_OPS:
                    served, given = COLLECTIVE_OPS[name].read_call(rest)
                    kind, op = served.kind, None if given.op is None else str(given.op)
                number, place = numbers[group.group_name], place_of_frame(sys._getframe(1))
                into.append(Call(dist.get_rank(), kind, group.group_name, ranks, number, op=op, place=place))
                numbers[group.group_name] += 1
            with _below_backend_select(arguments):
                return operator(*arguments)

        return kernel

    try:
        with replaced_kernels(made, ("BackendSelect",)):
            yield calls
    finally:
        seeing.clear()


def _below_backend_select(arguments: Sequence[object]) -> AbstractContextManager[object]:
    """Inside it, operators go to the kernels of the device of these arguments, as do calls that have no tensor."""
    keys = torch._C.DispatchKey
    return kernels_of_device(
        keys.CUDA if any(isinstance(x, Tensor) and x.is_cuda for x in tree_leaves(arguments)) else keys.CPU
    )


@contextmanager
def kernels_of_device(device: Any) -> Iterator[None]:
    """Inside the block, operators go to the kernels of this device, given by its dispatch key, below autograd.

    All keys in force before are so again at the end: a guard that includes one key alone leaves a device's in force on torch 2.11.
    """
    included, excluded = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    skipped = torch._C.DispatchKeySet(torch._C.DispatchKey.BackendSelect)
    with (
        torch._C._ForceDispatchKeyGuard(included | torch._C.DispatchKeySet(device), excluded | skipped),
        torch._C._AutoDispatchBelowAutograd(),
    ):
        yield
