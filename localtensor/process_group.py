"""torch.distributed, served to rank threads: the kernels of c10d's ops.

Every API of torch.distributed, in Python or C++, ends in an op of the dispatcher (`c10d::allreduce_`) with a
process group in it.  While a simulation runs, our kernels stand there; groups of others pass through to what
was there before.  So dispatch modes and `CommDebugMode` see what they would see on a real backend, and no name
that torch gives a method matters.
"""

import functools
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from localtensor._context import running
from localtensor.errors import CollectiveFailed, NotServed
from localtensor.frames import origin
from localtensor.kernels import RECV, RECV_FROM_ANYONE, SEND, SERVED, Brought, Served
from localtensor.meetings import Group, Part, key_of
from localtensor.reductions import PremulSum
from localtensor.simulation import Simulation
from localtensor.works import RankWork, Watch

c10d_cpp: Any = torch._C._distributed_c10d  # its stubs lag behind
_ReduceOp: Any = dist.ReduceOp
_REDUCTIONS = {
    int(getattr(_ReduceOp.RedOpType, name)): name.lower()
    for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
}
_PREMUL = int(_ReduceOp.RedOpType.PREMUL_SUM)


def _over() -> Any:
    """A Work that is over, as the dispatcher carries it."""
    future: torch.futures.Future[None] = torch.futures.Future()
    future.set_result(None)
    return c10d_cpp._create_work_from_future(future).boxed()


# -- kernels


class Kernels:
    """The kernels of one simulation."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.watches = [Watch(simulation) for _ in range(simulation.ranks)]
        self.kept: list[dict[RankWork, None]] = [
            {} for _ in range(simulation.ranks)
        ]  # C++ does not keep the Python side of a Work alive
        self.over = _over()

    def part(self, served: Served, brought: Brought, rank: int, group: Group) -> tuple[Part, bool]:
        """The rank's part in a collective, and whether its Work goes to the user."""
        line, hands_out = origin(sys._getframe(2))
        compared = brought.writes if served.by_output else _flat(brought.reads)
        tensors = tuple([(x.dtype, x.shape) for x in compared])
        device = compared[0].device if compared else None
        root = None if brought.root is None else group.ranks[brought.root]
        key = key_of(served.kind, tensors, device, brought.op, root, served.alike)
        part = Part(
            rank,
            served.kind,
            group,
            brought.reads,
            tensors,
            device,
            key,
            op=brought.op,
            root=root,
            input_splits=brought.input_splits,
            output_splits=brought.output_splits,
            line=line,
        )
        return part, hands_out

    def collective(self, name: str, served: Served, group: Group, arguments: Sequence[Any], *, later: bool) -> Any:
        """What the op returns, with its Work."""
        simulation = self.simulation
        rank = simulation.rank()
        brought = served.read(*[_reduction(a) if _is_reduction(a) else a for a in arguments])
        part, hands_out = self.part(served, brought, rank, group)
        hands_out = hands_out and later
        read = _flat(brought.reads) if hands_out else ()
        if hands_out:  # the user may write it before the others have come
            part.inputs = _copied(brought.reads)

        def deliver(results: Sequence[Tensor]) -> None:
            self.write(part, brought.writes, results)

        with torch._C._DisableAutocast(), torch.no_grad():
            ticket = simulation.meet(part, served.compute, deliver, hands_out=hands_out)
        if not later:
            simulation.wait(ticket)
            return self.answer(served, arguments, self.over)
        work = self.work(rank, ticket, brought.writes, read if hands_out else None)
        simulation.baton.pause(rank)
        return self.answer(served, arguments, work.boxed())

    def work(self, rank: int, ticket: Any, writes: Sequence[Tensor], read: Sequence[Tensor] | None) -> RankWork:
        """The Work of this part; if `read` is not None, its buffers are watched until it is waited for."""
        work = RankWork(self.simulation, ticket, writes)
        self.kept[rank][work] = None
        watch = self.watches[rank]
        if read is not None:
            written = {id(x) for x in writes}
            watch.begin(ticket, [x for x in read if id(x) not in written], writes)

        def settled() -> None:
            watch.end(ticket)
            self.kept[rank].pop(work, None)

        work.settled = settled
        return work

    def leave(self, rank: int) -> None:
        """The rank has ended: nothing of it is left in torch's registry of functional collectives to be waited for."""
        self.watches[rank].close()
        for work in list(self.kept[rank]):
            work.abandoned = True
            for output in work.outputs:
                torch.ops._c10d_functional.wait_tensor(output)
        self.kept[rank].clear()

    def write(self, part: Part, buffers: Sequence[Tensor], results: Sequence[Tensor]) -> None:
        """The buffers hold the results; autograd does not notice, as it would not on a real backend."""
        with torch._C._AutoDispatchBelowADInplaceOrView():
            for buffer, result in zip(buffers, results):
                if buffer.numel() != result.numel() or buffer.dtype != result.dtype:
                    got, want = f"{tuple(buffer.shape)} of {buffer.dtype}", f"{tuple(result.shape)} of {result.dtype}"
                    detail = f"rank {part.rank} offers a buffer of shape {got} for a result of shape {want}"
                    self.simulation.fail(CollectiveFailed([part.call()], detail))
                buffer.copy_(result if buffer.shape == result.shape else result.view(buffer.shape))

    def answer(self, served: Served, arguments: Sequence[Any], work: Any) -> Any:
        if served.kind == "monitored_barrier":
            return None
        return work if served.returns is None else (arguments[served.returns], work)

    def message(self, name: str, group: Group, tensors: list[Tensor], peer: int | None, tag: int) -> Any:
        """A send or receive is posted: its Work."""
        simulation = self.simulation
        rank = simulation.rank()
        line, hands_out = origin(sys._getframe(2))
        sends = name == SEND
        inputs = [x.detach().clone() for x in tensors] if sends else None
        signature = tuple([(x.dtype, x.shape) for x in tensors])
        part = Part(rank, "send" if sends else "recv", group, inputs, signature, tensors[0].device, line=line, tag=tag)
        part.peer = None if peer is None else group.ranks[peer]
        if sends:
            ticket = simulation.send(part)
        else:
            ticket = simulation.recv(part, lambda results: self.write(part, tensors, results))
        work = self.work(rank, ticket, [] if sends else tensors, (tensors if sends else []) if hands_out else None)
        simulation.baton.pause(rank)
        return work.boxed()


def _flat(reads: Any) -> list[Tensor]:
    return [reads] if isinstance(reads, Tensor) else [x for each in reads for x in _flat(each)]


def _copied(reads: Any) -> Any:
    return reads.detach().clone() if isinstance(reads, Tensor) else [_copied(each) for each in reads]


def _is_reduction(argument: Any) -> bool:
    return isinstance(argument, torch.ScriptObject)


def _reduction(boxed: Any) -> Any:
    """The name of a reduction.  The factor of PREMUL_SUM stays in C++; its Python object is on the caller's stack."""
    number = int(boxed.op())
    return _premul_sum() if number == _PREMUL else _REDUCTIONS.get(number, f"reduce op {number}")


def _premul_sum() -> PremulSum:
    frame = sys._getframe(2)
    while frame is not None:
        for value in frame.f_locals.values():
            op = getattr(value, "reduceOp", value) if type(value).__name__.endswith("Options") else value
            if isinstance(op, _ReduceOp) and int(op.op) == _PREMUL:
                return PremulSum(float(op.__getstate__()[1]))
        frame = frame.f_back  # type: ignore[assignment]
    raise NotServed("PREMUL_SUM", "the factor was not found: pass the op straight to a function of torch.distributed")


def _kernel(name: str, schema: Any, previous: Callable[..., Any] | None) -> Callable[..., Any]:
    """What stands at a c10d op while a simulation runs."""
    names = [argument.name for argument in schema.arguments]
    at = names.index("process_group")
    when = names.index("async_op") if "async_op" in names else None
    count = len([one for one in names if one not in ("process_group", "async_op", "timeout")])
    if name == "monitored_barrier_":
        count += 1  # its time limit is an argument like any other
    served = SERVED.get(name)

    def kernel(*arguments: Any) -> Any:
        kernels: Kernels | None = getattr(running(), "kernels", None)
        group = kernels and _group_of(arguments[at])
        if not kernels or not group:
            if previous is None:
                raise NotServed(f"c10d::{name}", "the group is of another backend, and this torch cannot hand it on")
            return previous(*arguments)
        rest = [*arguments[:at], *arguments[at + 1 :]][:count]
        if served is not None:
            later = when is None or len(arguments) <= when or bool(arguments[when])
            return kernels.collective(name, served, group, rest, later=later and name not in _AT_ONCE)
        if name in (SEND, RECV):
            return kernels.message(name, group, rest[0], rest[1], rest[2])
        if name == RECV_FROM_ANYONE:
            return kernels.message(name, group, rest[0], None, rest[1])
        raise NotServed(f"c10d::{name}", "no simulated collective of this name exists")

    return kernel


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
                for key in ("CPU", "CUDA"):
                    kernel = _kernel(name, schema, _previous(f"c10d::{name}", key))
                    library.impl(name, kernel, key, allow_override=True)
        yield
    finally:
        library._destroy()


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
    return get_kernel(full, key) if get_kernel and torch._C._dispatch_has_kernel_for_dispatch_key(full, key) else None
