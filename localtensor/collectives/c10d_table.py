"""c10d's ops, one entry each: what a rank brings to it, what it gets back, and which collective that is.

The names are those of the dispatcher's ops in torch/csrc/distributed/c10d/Ops.cpp; they have not changed from
torch 2.11 to 2.15, while the methods of ProcessGroup above them have.
"""

import functools
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from localtensor._util.ambient import running
from localtensor.collectives import reference
from localtensor.collectives.rendezvous import Contribution, Group
from localtensor.errors import NotServed
from localtensor.layout.reductions import PremulSum


@dataclass(slots=True)
class Brought:
    """What one rank's call of a c10d op says: tensors that it reads and writes, and the arguments that count.

    `reads` is a tensor, a list, or a list of lists, as the collective wants it; `root`, `peer` are group ranks.
    """

    reads: Any
    writes: list[Tensor]
    op: Any = None
    root: int | None = None
    peer: int | None = None
    tag: int | None = None
    input_splits: list[int] | None = None
    output_splits: list[int] | None = None


@dataclass(frozen=True, slots=True)
class Served:
    """One op: `read` sorts its arguments (without the process group), `compute` gives each rank what it writes.

    `alike` says what of the tensors must be the same on all ranks; `returns` what the op gives back besides
    its Work: the index of the argument, or None.  `by_output`: ranks are compared by what they write;
    `in_place`: a backend goes through memory as it lies, so that the ranks' strides must be alike, too.

    `alone` is the op that it is on the wire if it brings one tensor: functional collectives call coalesced ops for
    one tensor too, and meet ranks that call the plain ones.
    """

    kind: str
    read: Callable[..., Brought]
    compute: Callable[[Sequence[Contribution]], Sequence[Sequence[Tensor]]]
    alike: str = "shapes"
    returns: int | None = 0
    by_output: bool = False
    in_place: bool = False
    alone: str | None = None

    def brings(self, arguments: Sequence[Any]) -> "tuple[Served, Brought]":
        """What a rank's call says, and the op that the calls of its peers have to fit."""
        brought = self.read(*arguments)
        if self.alone is None or len(brought.reads) != 1:
            return self, brought
        return SERVED[self.alone], replace(brought, reads=brought.reads[0])


def _held(parts: Sequence[Contribution]) -> list[Any]:
    return [part.inputs for part in parts]


def _root(parts: Sequence[Contribution]) -> int:
    return parts[0].group.ranks.index(parts[0].root) if parts[0].root is not None else 0


def _singly(results: Sequence[Tensor]) -> list[list[Tensor]]:
    return [[x] for x in results]


def _splits(parts: Sequence[Contribution], name: str) -> list[list[int] | None]:
    return [getattr(part, name) for part in parts]


def _all_to_all_single(parts: Sequence[Contribution]) -> list[list[Tensor]]:
    sent, got = _splits(parts, "input_splits"), _splits(parts, "output_splits")
    return _singly(reference.all_to_all_single(_held(parts), input_splits=sent, output_splits=got))


def _nothing(parts: Sequence[Contribution]) -> list[list[Tensor]]:
    return [[] for _ in parts]


def _coalesced(one: Callable[[list[Tensor]], list[Tensor]]) -> Callable[[Sequence[Contribution]], list[list[Tensor]]]:
    return lambda parts: reference.coalesced(_held(parts), one)


def _scattered(parts: Sequence[Contribution]) -> list[list[Tensor]]:
    return _singly(reference.scatter(_held(parts), _root(parts)))


def _gathered(held: list[Tensor]) -> list[Tensor]:
    """Scalars are gathered as one row each, as c10d does."""
    return reference.all_gather_into_tensor([x.reshape(1) if x.dim() == 0 else x for x in held])


def _by_source(lists: list[list[Tensor]]) -> list[list[Tensor]]:
    """Each rank's copy of all ranks' lists, one after the other."""
    columns = reference.coalesced(lists, reference.all_gather)
    return [[column[source] for source in range(len(lists)) for column in mine] for mine in columns]


SERVED: dict[str, Served] = {
    "allreduce_": Served(
        "all_reduce",
        lambda tensors, op, sparse: Brought(tensors[0], tensors, op=op),
        lambda parts: _singly(reference.all_reduce(_held(parts), parts[0].op)),
        in_place=True,
    ),
    "allreduce_coalesced_": Served(
        "all_reduce_coalesced",
        lambda tensors, op: Brought(list(tensors), tensors, op=op),
        lambda parts: reference.all_reduce_coalesced(_held(parts), parts[0].op),
        returns=None,
        alone="allreduce_",
    ),
    "reduce_": Served(
        "reduce",
        lambda tensors, op, root, index: Brought(tensors[0], tensors, op=op, root=root),
        lambda parts: _singly(reference.reduce(_held(parts), parts[0].op, root=_root(parts))),
        returns=None,
        in_place=True,
    ),
    "broadcast_": Served(
        "broadcast",
        lambda tensors, root, index: Brought(tensors[0], tensors, root=root),
        lambda parts: _singly(reference.broadcast(_held(parts), _root(parts))),
        in_place=True,
    ),
    "allgather_": Served(
        "all_gather",
        lambda outputs, inputs: Brought(inputs[0], outputs[0]),
        lambda parts: reference.all_gather(_held(parts)),
    ),
    "_allgather_base_": Served(
        "all_gather_into_tensor",
        lambda output, source: Brought(source, [output]),
        lambda parts: _singly(_gathered(_held(parts))),
    ),
    "allgather_into_tensor_coalesced_": Served(
        "all_gather_into_tensor_coalesced",
        lambda outputs, inputs: Brought(list(inputs), outputs),
        _coalesced(_gathered),
        returns=None,
        alone="_allgather_base_",
    ),
    "allgather_coalesced_": Served(
        "all_gather_coalesced",
        lambda outputs, inputs: Brought(list(inputs), [x for output in outputs for x in output]),
        lambda parts: _by_source(_held(parts)),
        returns=None,
        alone="allgather_",
    ),
    "gather_": Served(
        "gather",
        lambda outputs, inputs, root: Brought(inputs[0], [x for output in outputs for x in output], root=root),
        lambda parts: reference.gather(_held(parts), _root(parts)),
        returns=None,
    ),
    "scatter_": Served(
        "scatter",
        lambda outputs, inputs, root: Brought([x for each in inputs for x in each], outputs, root=root),
        _scattered,
        by_output=True,
    ),
    "reduce_scatter_": Served(
        "reduce_scatter",
        lambda outputs, inputs, op: Brought(inputs[0], outputs, op=op),
        lambda parts: _singly(reference.reduce_scatter(_held(parts), parts[0].op)),
    ),
    "_reduce_scatter_base_": Served(
        "reduce_scatter_tensor",
        lambda output, source, op: Brought(source, [output], op=op),
        lambda parts: _singly(reference.reduce_scatter_tensor(_held(parts), parts[0].op)),
    ),
    "reduce_scatter_tensor_coalesced_": Served(
        "reduce_scatter_tensor_coalesced",
        lambda outputs, inputs, op: Brought(list(inputs), outputs, op=op),
        lambda parts: _coalesced(lambda held: reference.reduce_scatter_tensor(held, parts[0].op))(parts),
        returns=None,
        alone="_reduce_scatter_base_",
    ),
    "alltoall_base_": Served(
        "all_to_all_single",
        lambda output, source, got, sent: Brought(
            source, [output], input_splits=list(sent) or None, output_splits=list(got) or None
        ),
        _all_to_all_single,
        alike="dtype",
        returns=None,
    ),
    "alltoall_": Served(
        "all_to_all",
        lambda outputs, inputs: Brought(list(inputs), outputs),
        lambda parts: reference.all_to_all(_held(parts)),
        alike="dtype",
    ),
    "barrier": Served("barrier", lambda tensor, devices: Brought([], []), _nothing, returns=None),
    "monitored_barrier_": Served(
        "monitored_barrier", lambda tensor, devices, timeout, everyone: Brought([], []), _nothing, returns=None
    ),
}

# Messages meet in pairs, so they have no `compute`.
SEND, RECV, RECV_FROM_ANYONE = "send", "recv_", "recv_any_source_"


# c10d's ops in the dispatcher: while a simulation runs, ours stand there.
#
# Every API of torch.distributed, in Python or C++, ends in an op of the dispatcher (`c10d::allreduce_`) with a
# process group in it.  Groups of other backends pass through to what was there before.  So dispatch modes and
# `CommDebugMode` see what they would see on a real backend, and no name that torch gives a method matters.

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
