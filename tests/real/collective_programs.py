"""One call of a collective, asked of us and of real processes.

What a process runs has our function's name: `mine` is what its rank brings, `into` what it receives in.  It is the
plain call of torch.distributed, or of functional collectives where only those can say it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, product
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.tensor  # registers shard_dim_alltoall
from torch import Tensor

import localtensor.collectives.reference as c
from localtensor._util.events import Died, Outcome, Raised, Returned, Waiting
from localtensor.layout.reductions import GLOO_DTYPES, PAIRS, PremulSum
from localtensor.processes.pool import Pool


def world() -> Any:
    return dist.group.WORLD


def reduction(op: str | PremulSum) -> Any:
    return dist.ReduceOp.PREMUL_SUM(op.factor) if isinstance(op, PremulSum) else getattr(dist.ReduceOp, op.upper())


def waited(x: Tensor) -> Tensor:
    return x.wait() if hasattr(x, "wait") else x


def newest(module: Any, *names: str) -> Any:
    """The first of these that this torch has: 2.13 renames some, and warns of the old names."""
    return next(getattr(module, name) for name in names if hasattr(module, name))


def all_reduce(mine: Tensor, into: Tensor, op: str | PremulSum = "sum") -> Tensor:
    dist.all_reduce(mine, reduction(op))
    return mine


def reduce(mine: Tensor, into: Tensor, root: int, op: str | PremulSum = "sum") -> Tensor:
    brought = mine.clone()
    dist.reduce(mine, root, reduction(op))
    return mine if dist.get_rank() == root else brought  # torch promises nothing of the others


def reduce_as_left(mine: Tensor, into: Tensor, root: int) -> Tensor:
    dist.reduce(mine, root)
    return mine


def broadcast(mine: Tensor, into: Tensor, root: int) -> Tensor:
    dist.broadcast(mine, root)
    return mine


def all_gather(mine: Tensor, into: list[Tensor]) -> list[Tensor]:
    dist.all_gather(into, mine)
    return into


def all_gather_into_tensor(mine: Tensor, into: Tensor, dim: int = 0) -> Tensor:
    if dim:
        return waited(newest(functional, "all_gather_single", "all_gather_tensor")(mine, dim, world()))
    newest(dist, "all_gather_single", "all_gather_into_tensor")(into, mine)
    return into


def gather(mine: Tensor, into: list[Tensor], root: int) -> list[Tensor]:
    dist.gather(mine, into or None, root)
    return into


def scatter(mine: list[Tensor], into: Tensor, root: int) -> Tensor:
    dist.scatter(into, mine or None, root)
    return into


def reduce_scatter(mine: list[Tensor], into: Tensor, op: str | PremulSum = "sum") -> Tensor:
    dist.reduce_scatter(into, mine, reduction(op))
    return into


def reduce_scatter_tensor(mine: Tensor, into: Tensor, op: str = "sum", dim: int = 0) -> Tensor:
    if dim:
        return waited(newest(functional, "reduce_scatter_single", "reduce_scatter_tensor")(mine, op, dim, world()))
    newest(dist, "reduce_scatter_single", "reduce_scatter_tensor")(into, mine, reduction(op))
    return into


def all_to_all(mine: list[Tensor], into: list[Tensor]) -> list[Tensor]:
    dist.all_to_all(into, mine)
    return into


def all_to_all_single(mine: Tensor, into: Tensor, input_splits: Any = None, output_splits: Any = None) -> Tensor:
    sent, received = (splits and splits[dist.get_rank()] for splits in (input_splits, output_splits))
    dist.all_to_all_single(into, mine, received, sent)
    return into


def functional_all_to_all_single(mine: Tensor, into: Tensor) -> Tensor:
    return waited(functional.all_to_all_single(mine, None, None, world()))


def shard_dim_alltoall(mine: Tensor, into: Tensor, gather_dim: int, shard_dim: int) -> Tensor:
    name = world().group_name
    return waited(functional.wait_tensor(torch.ops._dtensor.shard_dim_alltoall(mine, gather_dim, shard_dim, name)))


def permute(mine: Tensor, into: Tensor, destinations: list[int]) -> Tensor:
    return waited(functional.permute_tensor(mine, destinations, world()))


def send_recv(mine: Tensor, into: Tensor, pairs: list[tuple[int, int]]) -> Tensor:
    me = dist.get_rank()
    sends = [dist.P2POp(dist.isend, mine, receiver) for sender, receiver in pairs if sender == me]
    receipts = [dist.P2POp(dist.irecv, into, sender) for sender, receiver in pairs if receiver == me]
    if sends or receipts:
        for work in dist.batch_isend_irecv(sends + receipts):
            work.wait()
    return into if receipts else mine


def all_reduce_coalesced(mine: list[Tensor], into: list[Tensor], op: str = "sum") -> list[Tensor]:
    dist.all_reduce_coalesced(mine, reduction(op))
    return mine


def all_gather_coalesced(mine: list[Tensor], into: list[Tensor]) -> list[Tensor]:
    return [
        waited(x)
        for x in newest(functional, "all_gather_single_coalesced", "all_gather_into_tensor_coalesced")(mine, world())
    ]


def real(program: str, mine: Any, into: Any, options: dict[str, Any]) -> Any:
    return globals()[program](mine, into, **options)


# -- many calls in one job: what gloo refuses in these, it refuses on all ranks before anything moves


def numbers(dtype: torch.dtype, rank: int) -> Tensor:
    """Values that round, wrap around and cancel, as far as the dtype lets them."""
    return torch.tensor([[0.1, 100, -3, 1, 0], [1 / 3, 100, 3, 0, 0]][rank]).to(dtype)


def each_reduction() -> dict[tuple[str, torch.dtype], Tensor | str]:
    """What all_reduce gives for each reduction and dtype, or how gloo refuses."""
    said: dict[tuple[str, torch.dtype], Tensor | str] = {}
    for op, dtype in product(PAIRS, DTYPES):
        mine = numbers(dtype, dist.get_rank())
        try:
            said[op, dtype] = all_reduce(mine, mine, op)
        except (RuntimeError, ValueError) as error:
            said[op, dtype] = str(error)
    return said


def addends(ranks: int, elements: int, dtype: torch.dtype) -> list[Tensor]:
    """What each rank brings: values whose sum and product depend on the order, in each rounding."""
    rng = torch.Generator().manual_seed(elements)
    return [torch.randn(elements, generator=rng, dtype=torch.float64).to(dtype) for _ in range(ranks)]


def each_order(sizes: list[int], dtypes: list[torch.dtype]) -> dict[Any, Any]:
    """What the collectives that add floats give on this rank, by collective, number of elements and dtype."""
    ranks, rank, said = dist.get_world_size(), dist.get_rank(), {}
    for elements, dtype in product(sizes, dtypes):
        held = addends(ranks, elements * ranks, dtype)
        whole, part = held[rank], held[rank][:elements]
        for op in ("sum", "avg", "product") if not dtype.is_complex else ("sum", "avg"):
            said["all_reduce", elements, dtype, op] = all_reduce(whole.clone(), whole, op)
        said["reduce", elements, dtype, "sum"] = reduce(whole.clone(), whole, root=0)
        said["reduce_scatter_tensor", elements, dtype, "sum"] = reduce_scatter_tensor(whole, part.clone())
        said["reduce_scatter", elements, dtype, "sum"] = reduce_scatter(list(whole.split(elements)), part.clone())
    return said


def carriage(program: str, dtype: torch.dtype) -> tuple[list[Any], list[Any], dict[str, Any]]:
    """What two ranks bring, what they receive in, and the options, of a call that fits in all but the dtype."""
    held, into, options = CARRIAGES[program]
    return zeros(held, dtype), zeros(into, dtype), options


def zeros(sizes: Any, dtype: torch.dtype) -> Any:
    return torch.zeros(sizes, dtype=dtype) if isinstance(sizes, int) else [zeros(size, dtype) for size in sizes]


def each_carriage() -> dict[tuple[str, torch.dtype], str]:
    """For each collective that only moves and each dtype, how gloo refuses, or "" if it does not."""
    said = {}
    for program, dtype in product(CARRIAGES, DTYPES):
        held, into, options = carriage(program, dtype)
        try:
            real(program, held[dist.get_rank()], into[dist.get_rank()], options)
            said[program, dtype] = ""
        except (RuntimeError, ValueError) as error:
            said[program, dtype] = str(error)
    return said


REFUSED = (torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2)
DTYPES = (*sorted(GLOO_DTYPES, key=str), *REFUSED)
CARRIAGES: dict[str, tuple[list[Any], list[Any], dict[str, Any]]] = {
    "broadcast": ([2, 2], [2, 2], {"root": 0}),
    "all_gather": ([2, 2], [[2, 2], [2, 2]], {}),
    "all_gather_into_tensor": ([2, 2], [4, 4], {}),
    "gather": ([2, 2], [[2, 2], []], {"root": 0}),
    "scatter": ([[2, 2], []], [2, 2], {"root": 0}),
    "reduce": ([2, 2], [2, 2], {"root": 0}),
    "reduce_scatter": ([[2, 2], [2, 2]], [2, 2], {}),
    "reduce_scatter_tensor": ([2, 2], [1, 1], {}),
    "all_to_all": ([[2, 2], [2, 2]], [[2, 2], [2, 2]], {}),
    "all_to_all_single": ([2, 2], [2, 2], {}),
    "shard_dim_alltoall": ([2, 2], [2, 2], {"gather_dim": 0, "shard_dim": 0}),
    "all_reduce_coalesced": ([[2, 2], [2, 2]], [[2, 2], [2, 2]], {}),
}


# -- the same call, asked of us and of gloo


@dataclass(frozen=True)
class Call:
    """One collective on all ranks; `into` where the buffers matter, `program` where it is not the namesake."""

    name: str
    held: Sequence[Any]
    options: dict[str, Any] = field(default_factory=dict)
    into: Sequence[Any] | None = None
    program: str = ""

    def ours(self) -> Any:
        return getattr(c, self.name)(self.held, **self.options)

    def on_gloo(self, pool: Pool, into: Sequence[Any], seconds: float = 10.0) -> list[Outcome]:
        jobs = [(self.program or self.name, mine, blank(buffer), self.options) for mine, buffer in zip(self.held, into)]
        return pool.call(real, jobs, timeout=seconds)


def flat(nested: object) -> Iterator[Tensor]:
    yield from [nested] if isinstance(nested, Tensor) else chain.from_iterable(map(flat, nested))


def blank(nested: Any) -> Any:
    return torch.zeros_like(nested) if isinstance(nested, Tensor) else [blank(item) for item in nested]


def plain(nested: Any) -> Any:
    return nested.tolist() if isinstance(nested, Tensor) else [plain(item) for item in nested]


def t(*values: float, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def count(*shape: int, start: float = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.arange(torch.Size(shape).numel()) + start).reshape(shape).to(dtype)


def values(outcomes: list[Outcome]) -> list[Any]:
    assert [type(outcome) for outcome in outcomes] == [Returned] * len(outcomes), outcomes
    return [outcome.value for outcome in outcomes]


def what_gloo_does(outcomes: list[Outcome]) -> str:
    """The worst of it: a process dies, a rank raises, a rank waits, or all return."""
    kinds = {type(outcome) for outcome in outcomes}
    words = {Died: "dies", Raised: "refuses", Waiting: "hangs", Returned: "answers"}
    return next(word for kind, word in words.items() if kind in kinds)
