"""The table of c10d's collective ops, and the kernels that replace them in the dispatcher while a simulation runs.

The names are those of the dispatcher's ops in torch/csrc/distributed/c10d/Ops.cpp; they have not changed from
torch 2.11 to 2.15, while the methods of ProcessGroup above them have.

Every API of torch.distributed, in Python or C++, ends in such an op (`c10d::allreduce_`) with a process group among its
arguments.  Calls on groups of other backends pass through to the previous kernel.  So dispatch modes and
`CommDebugMode` see what they would see on a real backend, and the names of ProcessGroup's methods do not matter.
"""

import functools
import itertools
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from localtensor.collectives import reference
from localtensor.collectives.argument_checks import (
    PREMUL_SUM,
    REDUCTION_NAMES,
    SPARSE_ALL_REDUCE,
    check_held,
    flat_tensors,
    reduction_name,
)
from localtensor.collectives.rendezvous import Contribution, Group
from localtensor.errors import NotServed
from localtensor.layout.reductions import PremulSum, ReductionOp, fold


@dataclass(slots=True)
class CallArguments:
    """The arguments of one rank's call of a c10d op: the tensors that it reads and writes, and the other arguments.

    `reads` is a tensor, a list, or a list of lists, as the collective takes it; `root` is a group rank.
    """

    reads: Any
    writes: list[Tensor]
    op: Any = None
    root: int | None = None
    input_splits: list[int] | None = None
    output_splits: list[int] | None = None
    timeout: timedelta | None = None  # of a monitored barrier
    everyone: bool = False  # its wait_all_ranks
    lists: int = 1  # of outputs, in `writes` one after the other; 0 before there are any


@dataclass(frozen=True, slots=True)
class CollectiveOp:
    """One c10d op.

    `read` makes a `CallArguments` of its arguments (without the process group); `compute` returns what each rank
    writes.  `must_match` is what the tensors of all ranks must have in common: "shapes", "dtypes" or "dtype"; with
    `compares_outputs` the written tensors are compared instead of the read ones.  `in_place`: backends work on memory
    as it lies, so the ranks' strides must match, too.  `returns` is the index of the argument that the op returns
    beside its Work, or None.

    `single` is the op that a call with one tensor stands for: functional collectives call coalesced ops for one tensor,
    and must match ranks that call the plain op.
    """

    kind: str
    read: Callable[..., CallArguments]
    compute: Callable[[Sequence[Contribution]], Sequence[Sequence[Tensor]]]
    must_match: str = "shapes"
    returns: int | None = 0
    compares_outputs: bool = False
    in_place: bool = False
    single: str | None = None

    def read_call(self, arguments: Sequence[Any]) -> "tuple[CollectiveOp, CallArguments]":
        """The op that the calls of the peers must match, and what this call brings to it."""
        call = self.read(*arguments)
        if self.kind == "all_reduce":
            first = call.reads if isinstance(call.reads, Tensor) else flat_tensors(call.reads)[0]
            if first.layout == torch.sparse_coo:
                return _SPARSE_ALL_REDUCE, call
        if self.single is None or len(call.reads) != 1:
            return self, call
        return COLLECTIVE_OPS[self.single], replace(call, reads=call.reads[0])


def _inputs(parts: Sequence[Contribution]) -> list[Any]:
    return [part.inputs for part in parts]


def _one_or_all(tensors: Sequence[Tensor]) -> Any:
    return tensors[0] if len(tensors) == 1 else list(tensors)


def _of_all_tensors(parts: Sequence[Contribution], compute: Callable[[list[Tensor]], Sequence[Any]]) -> list[Any]:
    """The result of each rank; each of a rank's several tensors counts as that of one more rank."""
    held = [flat_tensors(part.inputs) for part in parts]
    results = compute([x for mine in held for x in mine])
    firsts = itertools.accumulate((len(mine) for mine in held[:-1]), initial=0)
    return [results[first] for first in firsts]


def _one_total(held: list[Tensor], op: ReductionOp) -> list[Tensor]:
    """As `reference.all_reduce`, with one tensor for all ranks, each of which copies it."""
    check_held("all_reduce", held, op)
    return [fold(held, op)] * len(held)


def _root(parts: Sequence[Contribution]) -> int:
    return parts[0].group.ranks.index(parts[0].root) if parts[0].root is not None else 0


def _one_each(results: Sequence[Tensor]) -> list[list[Tensor]]:
    return [[x] for x in results]


def _all_to_all_single(parts: Sequence[Contribution]) -> list[list[Tensor]]:
    sent, got = [part.input_splits for part in parts], [part.output_splits for part in parts]
    return _one_each(reference.all_to_all_single(_inputs(parts), input_splits=sent, output_splits=got))


def _no_results(parts: Sequence[Contribution]) -> list[list[Tensor]]:
    return [[] for _ in parts]


def _gather_rows(held: list[Tensor]) -> list[Tensor]:
    """Scalars are gathered as one row each, as in c10d."""
    return reference.all_gather_into_tensor([x.reshape(1) if x.dim() == 0 else x for x in held])


def _all_gather_coalesced(lists: list[list[Tensor]]) -> list[list[Tensor]]:
    """Each rank gets all ranks' lists, one after the other."""
    columns = reference.coalesced(lists, reference.all_gather)
    return [[column[source] for source in range(len(lists)) for column in mine] for mine in columns]


COLLECTIVE_OPS: dict[str, CollectiveOp] = {
    "allreduce_": CollectiveOp(
        "all_reduce",
        lambda tensors, op, sparse: CallArguments(_one_or_all(tensors), tensors, op=op),
        lambda parts: _one_each(_of_all_tensors(parts, lambda held: _one_total(held, parts[0].op))),
        in_place=True,
    ),
    "allreduce_coalesced_": CollectiveOp(
        "all_reduce_coalesced",
        lambda tensors, op: CallArguments(list(tensors), tensors, op=op),
        lambda parts: reference.all_reduce_coalesced(_inputs(parts), parts[0].op),
        returns=None,
        single="allreduce_",
    ),
    "reduce_": CollectiveOp(
        "reduce",
        lambda tensors, op, root, index: CallArguments(tensors[0], tensors, op=op, root=root),
        lambda parts: _one_each(reference.reduce(_inputs(parts), parts[0].op, root=_root(parts))),
        returns=None,
        in_place=True,
    ),
    "broadcast_": CollectiveOp(
        "broadcast",
        lambda tensors, root, index: CallArguments(tensors[index], tensors, root=root),
        lambda parts: _one_each(reference.broadcast(_inputs(parts), _root(parts))),
        in_place=True,
    ),
    "allgather_": CollectiveOp(
        "all_gather",
        lambda outputs, inputs: CallArguments(
            _one_or_all(inputs), [x for output in outputs for x in output], lists=len(outputs)
        ),
        lambda parts: _of_all_tensors(parts, reference.all_gather),
    ),
    "_allgather_base_": CollectiveOp(
        "all_gather_into_tensor",
        lambda output, source: CallArguments(source, [output]),
        lambda parts: _one_each(_gather_rows(_inputs(parts))),
    ),
    "allgather_into_tensor_coalesced_": CollectiveOp(
        "all_gather_into_tensor_coalesced",
        lambda outputs, inputs: CallArguments(list(inputs), outputs),
        lambda parts: reference.coalesced(_inputs(parts), _gather_rows),
        returns=None,
        single="_allgather_base_",
    ),
    "allgather_coalesced_": CollectiveOp(
        "all_gather_coalesced",
        lambda outputs, inputs: CallArguments(list(inputs), [x for output in outputs for x in output]),
        lambda parts: _all_gather_coalesced(_inputs(parts)),
        returns=None,
        single="allgather_",
    ),
    "gather_": CollectiveOp(
        "gather",
        lambda outputs, inputs, root: CallArguments(inputs[0], [x for output in outputs for x in output], root=root),
        lambda parts: reference.gather(_inputs(parts), _root(parts)),
        returns=None,
    ),
    "scatter_": CollectiveOp(
        "scatter",
        lambda outputs, inputs, root: CallArguments([x for each in inputs for x in each], outputs, root=root),
        lambda parts: _one_each(reference.scatter(_inputs(parts), _root(parts))),
        compares_outputs=True,
    ),
    "reduce_scatter_": CollectiveOp(
        "reduce_scatter",
        lambda outputs, inputs, op: CallArguments(inputs[0], outputs, op=op),
        lambda parts: _one_each(reference.reduce_scatter(_inputs(parts), parts[0].op)),
    ),
    "_reduce_scatter_base_": CollectiveOp(
        "reduce_scatter_tensor",
        lambda output, source, op: CallArguments(source, [output], op=op),
        lambda parts: _one_each(reference.reduce_scatter_tensor(_inputs(parts), parts[0].op)),
    ),
    "reduce_scatter_tensor_coalesced_": CollectiveOp(
        "reduce_scatter_tensor_coalesced",
        lambda outputs, inputs, op: CallArguments(list(inputs), outputs, op=op),
        lambda parts: reference.coalesced(_inputs(parts), lambda x: reference.reduce_scatter_tensor(x, parts[0].op)),
        returns=None,
        single="_reduce_scatter_base_",
    ),
    "alltoall_base_": CollectiveOp(
        "all_to_all_single",
        lambda output, source, got, sent: CallArguments(
            source, [output], input_splits=list(sent) or None, output_splits=list(got) or None
        ),
        _all_to_all_single,
        must_match="dtype",
        returns=None,
    ),
    "alltoall_": CollectiveOp(
        "all_to_all",
        lambda outputs, inputs: CallArguments(list(inputs), outputs),
        lambda parts: reference.all_to_all(_inputs(parts)),
        must_match="dtype",
    ),
    "barrier": CollectiveOp("barrier", lambda tensor, devices: CallArguments([], []), _no_results, returns=None),
    "monitored_barrier_": CollectiveOp(
        "monitored_barrier",
        lambda tensor, devices, timeout, everyone: CallArguments(
            [], [], timeout=timedelta(milliseconds=timeout), everyone=everyone
        ),
        _no_results,
        returns=None,
    ),
}


_SPARSE_ALL_REDUCE = CollectiveOp(
    SPARSE_ALL_REDUCE,
    COLLECTIVE_OPS["allreduce_"].read,
    lambda parts: _one_each(_of_all_tensors(parts, reference.sparse_all_reduce)),
)


@functools.cache
def completed_work() -> object:
    """A completed Work, boxed for the dispatcher."""
    future: torch.futures.Future[None] = torch.futures.Future()
    future.set_result(None)
    cpp: Any = torch._C._distributed_c10d
    return cpp._create_work_from_future(future).boxed()


# Sends and receives are matched in pairs, so they have no `compute`.
SEND, RECV, RECV_FROM_ANY = "send", "recv_", "recv_any_source_"
WAITS = ("wait_tensor", "wait_tensors")
"""The functional ops that wait: for one tensor, or for all of a list, which torch 2.15 has."""


def _kernel(
    serving: list[Any], name: str, schema: torch.FunctionSchema, previous: Callable[..., Any] | None
) -> Callable[..., Any]:
    """The kernel of one c10d op while a simulation runs."""
    at, when, count = argument_positions(name, schema)
    op = COLLECTIVE_OPS.get(name)

    def kernel(*arguments: Any) -> object:
        groups: dict[Any, Group] = getattr(c10d._world, "groups", {}) if serving else {}
        group = groups.get(dist.ProcessGroup.unbox(arguments[at]))  # None if it is of another backend
        if group is None:
            if previous is None:
                raise NotServed(f"c10d::{name}", "the group is of another backend, and this torch cannot hand it on")
            return previous(*arguments)
        (kernels,) = serving
        rest = [plain_argument(a) for a in (*arguments[:at], *arguments[at + 1 :])][:count]
        with torch._C.DisableTorchFunction():  # the user's modes and default device must not apply here
            if op is not None:
                asynchronous = when is None or len(arguments) <= when or bool(arguments[when])
                return kernels.collective(op, group, rest, asynchronous=asynchronous and name != "monitored_barrier_")
            if name in (SEND, RECV):
                return kernels.message(name, group, rest[0], rest[1], rest[2])
            if name == RECV_FROM_ANY:
                return kernels.message(name, group, rest[0], None, rest[1])
        raise NotServed(f"c10d::{name}", "no simulated collective of this name exists", gloo_has_it=False)

    return kernel


def argument_positions(name: str, schema: torch.FunctionSchema) -> tuple[int, int | None, int]:
    """The positions of a c10d op's group and async_op (None without one), and how many other arguments it has."""
    names = [argument.name for argument in schema.arguments]
    when = names.index("async_op") if "async_op" in names else None
    count = len([one for one in names if one not in ("process_group", "async_op", "timeout")])
    # A monitored barrier takes its timeout as an ordinary argument.
    return names.index("process_group"), when, count + (name == "monitored_barrier_")


@contextmanager
def kernels_in_place(kernels: object) -> Iterator[None]:
    """Inside the block, `kernels` serves every c10d op that takes a process group."""
    serving = [kernels]  # emptied at the end: torch may keep the kernels of the last run
    try:
        with replaced_kernels(functools.partial(_kernel, serving)):
            yield
    finally:
        serving.clear()


@contextmanager
def replaced_kernels(
    made: Callable[[str, Any, Callable[..., Any] | None], Callable[..., Any]], keys: Sequence[str] = ()
) -> Iterator[None]:
    """Inside the block, every c10d op has the kernel that is `made` of its name, its schema and its previous kernel, for
    these dispatch keys; by default for those of all devices, and of sparse tensors where the op takes them."""
    library = torch.library.Library("c10d", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "(?s).*previously registered kernel", UserWarning)  # intended
            for name, schema in _collective_ops():
                full = f"c10d::{name}"
                for key in keys or _device_keys(full):
                    library.impl(name, made(name, schema, _previous_kernel(full, key)), key, allow_override=True)
        yield
    finally:
        library._destroy()


def _device_keys(full: str) -> Iterator[str]:
    devices = ("CPU", "CUDA") if torch.backends.cuda.is_built() else ("CPU",)
    yield from devices
    yield from (key for d in devices if torch._C._dispatch_has_kernel_for_dispatch_key(full, key := f"Sparse{d}"))


@functools.cache
def _collective_ops() -> tuple[tuple[str, Any], ...]:
    """c10d's ops that take a process group, each with its schema."""
    found = []
    for full in torch._C._dispatch_get_all_op_names():
        if full.startswith("c10d::"):
            name = full.removeprefix("c10d::")
            schema = getattr(torch.ops.c10d, name).default._schema
            if any(argument.name == "process_group" for argument in schema.arguments):
                found.append((name, schema))
    return tuple(found)


def _previous_kernel(full: str, key: str) -> Callable[..., Any] | None:
    """The kernel that serves groups of other backends."""
    if not torch._C._dispatch_has_kernel_for_dispatch_key(full, key):
        return None
    kernel = torch.library.get_kernel(full, key)
    return functools.partial(kernel.call_boxed, torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key)))


def plain_argument(argument: object) -> object:
    """An argument as `COLLECTIVE_OPS` takes it: a boxed reduction by its name, anything else unchanged."""
    if not isinstance(argument, torch.ScriptObject):
        return argument
    number = int(argument.op())  # type: ignore[attr-defined]
    return _premul_sum_of_caller() if number == PREMUL_SUM else REDUCTION_NAMES.get(number, f"reduce op {number}")


def _premul_sum_of_caller() -> PremulSum:
    """The reduction of the caller: its factor stays in C++, so its Python object is looked up on the stack."""
    frame = sys._getframe(3)
    while frame is not None:
        for value in frame.f_locals.values():
            op = getattr(value, "reduceOp", value) if type(value).__name__.endswith("Options") else value
            if isinstance(op, dist.ReduceOp) and isinstance(reduction := reduction_name(op), PremulSum):
                return reduction
        frame = frame.f_back  # type: ignore[assignment]
    raise NotServed("PREMUL_SUM", "the factor was not found: pass the op straight to a function of torch.distributed")
