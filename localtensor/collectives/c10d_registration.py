"""c10d's ops in the dispatcher: while a simulation runs, ours stand there.

Every API of torch.distributed, in Python or C++, ends in an op of the dispatcher (`c10d::allreduce_`) with a
process group in it.  Groups of other backends pass through to what was there before.  So dispatch modes and
`CommDebugMode` see what they would see on a real backend, and no name that torch gives a method matters.
"""

import functools
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from localtensor._util.ambient import running
from localtensor.collectives.c10d_table import RECV, RECV_FROM_ANYONE, SEND, SERVED
from localtensor.collectives.rendezvous import Group
from localtensor.errors import NotServed
from localtensor.layout.reductions import PremulSum

_ReduceOp: Any = dist.ReduceOp
_REDUCTIONS = {
    int(getattr(_ReduceOp.RedOpType, name)): name.lower()
    for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
}
_PREMUL = int(_ReduceOp.RedOpType.PREMUL_SUM)


def _kernel(name: str, schema: Any, previous: Callable[..., Any] | None) -> Callable[..., Any]:
    """What stands at a c10d op while a simulation runs."""
    at, when, count = positions(name, schema)
    served = SERVED.get(name)

    def kernel(*arguments: Any) -> Any:
        kernels: Any = getattr(running(), "kernels", None)
        group = kernels and _group_of(arguments[at])
        if not kernels or not group:
            if previous is None:
                raise NotServed(f"c10d::{name}", "the group is of another backend, and this torch cannot hand it on")
            return previous(*arguments)
        rest = [plain(a) for a in (*arguments[:at], *arguments[at + 1 :])][:count]
        with torch._C.DisableTorchFunction():  # a mode of the user's, or a default device, is not for what we do
            if served is not None:
                later = when is None or len(arguments) <= when or bool(arguments[when])
                return kernels.collective(served, group, rest, later=later and name not in _AT_ONCE)
            if name in (SEND, RECV):
                return kernels.message(name, group, rest[0], rest[1], rest[2])
            if name == RECV_FROM_ANYONE:
                return kernels.message(name, group, rest[0], None, rest[1])
        raise NotServed(f"c10d::{name}", "no simulated collective of this name exists", gloo_has_it=False)

    return kernel


def positions(name: str, schema: Any) -> tuple[int, int | None, int]:
    """Of a c10d op: where its group and its async_op (None: it has none) stand, and how many other arguments count."""
    names = [argument.name for argument in schema.arguments]
    when = names.index("async_op") if "async_op" in names else None
    count = len([one for one in names if one not in ("process_group", "async_op", "timeout")])
    # The time limit of a monitored barrier is an argument like any other.
    return names.index("process_group"), when, count + (name == "monitored_barrier_")


_AT_ONCE = ("monitored_barrier_",)


def _group_of(boxed: Any) -> Group | None:
    """Our group behind a process group, or None if it is of another backend."""
    groups: dict[Any, Group] = getattr(c10d._world, "groups", {})
    return groups.get(dist.ProcessGroup.unbox(boxed))


@contextmanager
def kernels_in_place() -> Iterator[None]:
    """Our kernels stand at every c10d op that has a process group."""
    library = torch.library.Library("c10d", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "(?s).*previously registered kernel", UserWarning)  # that is the purpose
            for name, schema in _collective_ops():
                for key in _keys(f"c10d::{name}"):
                    kernel = _kernel(name, schema, _previous(f"c10d::{name}", key))
                    library.impl(name, kernel, key, allow_override=True)
        yield
    finally:
        library._destroy()


def _keys(full: str) -> list[str]:
    """The kinds of tensors that the op takes; sparse ones too where it does, so that we refuse them."""
    sparse = [key for key in ("SparseCPU", "SparseCUDA") if torch._C._dispatch_has_kernel_for_dispatch_key(full, key)]
    return ["CPU", "CUDA", *sparse]


@functools.cache
def _collective_ops() -> tuple[tuple[str, Any], ...]:
    """c10d's ops that have a process group, each with its schema."""
    found = []
    for full in torch._C._dispatch_get_all_op_names():
        if full.startswith("c10d::"):
            name = full.removeprefix("c10d::")
            schema = getattr(torch.ops.c10d, name).default._schema
            if any(argument.name == "process_group" for argument in schema.arguments):
                found.append((name, schema))
    return tuple(found)


def _previous(full: str, key: str) -> Callable[..., Any] | None:
    """What serves the groups of other backends."""
    get_kernel = getattr(torch.library, "get_kernel", None)
    if get_kernel is None or not torch._C._dispatch_has_kernel_for_dispatch_key(full, key):
        return None
    return functools.partial(
        get_kernel(full, key).call_boxed, torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
    )


def plain(argument: Any) -> Any:
    """An argument as the tables of collectives/c10d_table.py want it: a reduction by its name."""
    return _reduction(argument) if isinstance(argument, torch.ScriptObject) else argument


def _reduction(boxed: Any) -> Any:
    """The name of a reduction.  The factor of PREMUL_SUM stays in C++; its Python object is on the caller's stack."""
    number = int(boxed.op())
    return _premul_sum() if number == _PREMUL else _REDUCTIONS.get(number, f"reduce op {number}")


def named_reduction(op: Any) -> Any:
    """A reduction by its name, if it comes as torch's ReduceOp; names in any case.

    >>> named_reduction(dist.ReduceOp.MAX), named_reduction("SUM")
    ('max', 'sum')
    """
    if isinstance(op, str):
        return op.lower()
    found = getattr(op, "op", op)
    if not isinstance(op, _ReduceOp | _ReduceOp.RedOpType):
        return op
    if int(found) == _PREMUL:
        return PremulSum(float(op.__getstate__()[1]))
    return _REDUCTIONS.get(int(found), f"reduce op {int(found)}")


def _premul_sum() -> PremulSum:
    frame = sys._getframe(3)
    while frame is not None:
        for value in frame.f_locals.values():
            op = getattr(value, "reduceOp", value) if type(value).__name__.endswith("Options") else value
            if isinstance(op, _ReduceOp) and int(op.op) == _PREMUL:
                return PremulSum(float(op.__getstate__()[1]))
        frame = frame.f_back  # type: ignore[assignment]
    raise NotServed("PREMUL_SUM", "the factor was not found: pass the op straight to a function of torch.distributed")
