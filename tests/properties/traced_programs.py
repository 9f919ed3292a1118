"""Functions of tensors as data, drawn by Hypothesis: what a rank computes and communicates, to be traced for all ranks at once.

Numbers are small integers in float64, so that equal means to the last bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from localtensor import rank_map

Step = tuple[Any, ...]
RANKS, SIDE, MOST_STEPS = 4, 4, 8
KINDS = ("same", "pairs", "own")
"""Of an input: on all ranks the same, on two ranks each, on each rank its own."""

PAIRED = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "maximum": torch.maximum,
    "where": lambda a, b: torch.where(a > b, a, b * 2),
}
SINGLE = {
    "neg": torch.neg,
    "relu": torch.relu,
    "clone": torch.clone,
    "ones": lambda x: x + torch.ones(SIDE, dtype=x.dtype),
}
SQUARE = {
    "view": lambda x: x.view(x.shape),
    "expand": lambda x: x.expand(2, *x.shape)[1],
    "transpose": lambda x: x.t(),
    "flip": lambda x: x.flip(0),
    "cumsum": lambda x: x.cumsum(1).remainder(7),
    "rows": lambda x: x[torch.tensor([2, 0, 3, 1])],
    "top": lambda x: torch.cat([x[:1], x[1:] * 2]),
    "diagonal": lambda x: x + torch.diag(x.diagonal()),
    # Dense: of a write to an expanded tensor, AOTAutograd makes another number, on any rank.
    "totals": lambda x: x.sum(0, keepdim=True).remainder(7).expand(SIDE, SIDE).contiguous(),
    "drawn": lambda x: x + torch.randint(0, 5, (SIDE, SIDE)).to(x.dtype),
    "triangle": lambda x: x.tril() + torch.arange(SIDE * 1.0, dtype=x.dtype),
}
WRITES = {
    "add_": lambda x, y: x.add_(y),
    "copy_": lambda x, y: x.copy_(y),
    "fill_": lambda x, y: x.fill_(3),
}
REDUCTIONS = {
    "sum of rows": lambda x: x.sum(0, keepdim=True) + x * 0,
    "largest": lambda x: x.amax(1, keepdim=True) - x,
    "mean of all": lambda x: (x.sum() / 4).floor() + x,
    "place of the largest": lambda x: x + x.argmax(1, keepdim=True),
    "norm": lambda x: x / x.abs().amax().clamp(min=1).log2().ceil().exp2(),
}
C10D = ("summed in place", "broadcast", "gathered into", "scattered into", "maximum of ranks")
DIFFERENTIABLE = ("gather with gradient", "scatter with gradient")
DTENSORS = ("rows of all", "columns times rows", "partial sums", "own rows of all")
BY_RANK = ("rank", "row of rank", "branch", "branch in a call")
GROUPS = ("world", "pairs", "halves")


@dataclass(frozen=True)
class Program:
    """What is done with two inputs: each step appends a value; `backward` takes gradients; `uneven` ranks have rows of their own."""

    kinds: tuple[str, str]
    steps: tuple[Step, ...]
    backward: bool
    uneven: bool

    @property
    def differs(self) -> bool:
        """Whether a step takes an int that differs between ranks, which no graph can hold."""
        return any(step[0] in BY_RANK for step in self.steps)

    def inputs(self, start: float) -> list[Tensor]:
        """Two new inputs; other numbers for another start."""
        made = [rank_map(lambda rank, place=place: self.input_of_rank(place, rank, start)) for place in (0, 1)]
        return [x.requires_grad_(self.backward) for x in made]

    def input_of_rank(self, place: int, rank: int, start: float) -> Tensor:
        """An input as one rank has it."""
        number = {"same": 0, "pairs": rank // 2, "own": rank}[self.kinds[place]]
        rows = rank + 1 if self.uneven else SIDE
        values = torch.arange(rows * SIDE, dtype=torch.float64).view(rows, SIDE)
        return (values * (place + 2) + 3 * number + start).remainder(7)

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """The last value and the first input, as it is then; a leaf is not written."""
        values = [x.clone() if self.backward else x for x in inputs]
        for step in self.steps:
            values.append(self.value(values, step))
        return values[-1], values[0]

    def value(self, values: list[Tensor], step: Step) -> Tensor:
        """What a step makes."""
        name, first, second, detail = step
        x, y = values[first % len(values)], values[second % len(values)]
        if name in PAIRED:
            return PAIRED[name](x, y).remainder(11)
        if name in SINGLE:
            return SINGLE[name](x)
        if name in SQUARE:
            return SQUARE[name](x)
        if name in REDUCTIONS:
            return REDUCTIONS[name](x)
        if name in C10D:
            return communicated_in_place(name, x.detach().clone(), detail)
        if name in DTENSORS:
            return of_dtensors(name, x)
        if name in WRITES:
            target = x.clone() if second % 2 else x
            # What torch reads while it writes there is refused, or depends on the order of the elements.
            y = y if y is x else y.clone()
            WRITES[name](
                target if self.uneven or detail == "world" else target[1],
                y if detail == "world" or self.uneven else y[0],
            )
            return target
        if name == "matmul":
            return (x @ y).remainder(7)
        if name in BY_RANK:
            return by_rank(name, x)
        return communicated(name, x, detail)


def by_rank(name: str, x: Tensor) -> Tensor:
    """What a rank does by its number."""
    rank = dist.get_rank()
    if name == "rank":
        return x * rank
    if name == "row of rank":
        return x + x[rank]
    if name == "branch in a call":
        return doubled_on_one(x + 1, rank)
    if rank > 1:
        x = x * 3 - 1
    return x


def doubled_on_one(x: Tensor, rank: Any) -> Tensor:
    if rank == 1:
        x = x * 2
    return x


def of_dtensors(name: str, x: Tensor) -> Tensor:
    """What ops of DTensors make of the value of each rank as its shard."""
    mesh = PAIRS["mesh"]
    if name == "rows of all":
        return DTensor.from_local(x, mesh, [Shard(0), Replicate()], run_check=False).full_tensor()[:SIDE]
    if name == "own rows of all":
        whole = DTensor.from_local(x, mesh, [Replicate(), Replicate()], run_check=False)
        return whole.redistribute(placements=[Shard(0), Replicate()]).to_local().repeat(2, 1)
    if name == "partial sums":
        parts = DTensor.from_local(x, mesh, [Partial(), Replicate()], run_check=False)
        return parts.redistribute(placements=[Replicate(), Replicate()]).to_local().remainder(7)
    columns = DTensor.from_local(x, mesh, [Replicate(), Shard(1)], run_check=False)
    rows = DTensor.from_local(x.t().contiguous(), mesh, [Replicate(), Shard(0)], run_check=False)
    return (columns @ rows).full_tensor().remainder(7)


def communicated_in_place(name: str, x: Tensor, detail: str) -> Tensor:
    """What a collective of torch.distributed brings, in the shape of the input, which it may write."""
    group: Any = dist.group.WORLD if detail == "world" else PAIRS[detail]
    size = RANKS if detail == "world" else 2
    x = x.contiguous()
    if name == "broadcast":
        dist.broadcast(x, group=group, group_src=1)
    elif name == "gathered into":
        whole = x.new_empty(size * SIDE, SIDE)
        dist.all_gather_into_tensor(whole, x, group=group)
        return whole.view(size, SIDE, SIDE).sum(0).remainder(7)
    elif name == "scattered into":
        part = x.new_empty(SIDE // size, SIDE)
        dist.reduce_scatter_tensor(part, x, group=group)
        return part.repeat(size, 1).remainder(7)
    else:
        dist.all_reduce(x, dist.ReduceOp.SUM if name == "summed in place" else dist.ReduceOp.MAX, group=group)
    return x.remainder(7)


def communicated(name: str, x: Tensor, detail: str) -> Tensor:
    """What a functional collective brings, in the shape of the input."""
    group: Any = {"world": dist.group.WORLD, "pairs": PAIRS.get("pairs"), "halves": PAIRS.get("halves")}[detail]
    size = RANKS if detail == "world" else 2
    if name == "all_reduce":
        return functional.all_reduce(x, "sum", group).remainder(7)
    if name == "all_gather":
        return torch.ops._c10d_functional.wait_tensor(
            torch.ops._c10d_functional.all_gather_into_tensor(x.contiguous(), size, group.group_name)
        ).view(size, SIDE, SIDE).sum(0).remainder(7)  # fmt: skip
    if name == "gather with gradient":
        whole = functional.all_gather_tensor_autograd(x.contiguous(), 0, group)
        return whole.reshape(size, SIDE, SIDE).sum(0).remainder(7)
    if name == "scatter with gradient":
        return functional.reduce_scatter_tensor_autograd(x.contiguous(), "sum", 0, group).repeat(size, 1).remainder(7)
    part = torch.ops._c10d_functional.wait_tensor(
        torch.ops._c10d_functional.reduce_scatter_tensor(x.contiguous(), "sum", size, group.group_name)
    )
    return part.repeat(size, 1).remainder(7)


PAIRS: dict[str, Any] = {}
"""The groups of a mode other than that of all ranks, made before a program runs in it."""


def make_groups() -> None:
    """Make the groups that programs name, in the mode that is entered."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pairs", "halves"))
    PAIRS.update({name: mesh.get_group(name) for name in ("pairs", "halves")}, mesh=mesh)


@st.composite
def programs(draw: st.DrawFn, wide: bool = False) -> Program:
    """Programs with few steps; one in ten has an int of each rank, and one in five uneven inputs.

    If `wide`, they have reductions, collectives in place and with gradients, ops of DTensors and branches, too.  A graph of `make_fx` has no
    gradients of its own, so that through those of DTensors none are compared.
    """
    uneven, backward = draw(st.integers(0, 4)) == 4, draw(st.booleans())
    names = [*PAIRED, *SINGLE, *([] if backward else WRITES)]
    if not uneven:
        names += [*SQUARE, "matmul", *([*REDUCTIONS, *C10D, *DTENSORS, *DIFFERENTIABLE] if wide else [])]
        names += [] if backward else ["all_reduce", "all_gather", "reduce_scatter"]
    step = st.tuples(st.sampled_from(names), st.integers(0, 9), st.integers(0, 9), st.sampled_from(GROUPS))
    steps = draw(st.lists(step, min_size=1, max_size=MOST_STEPS))
    if draw(st.integers(0, 9)) == 7:
        name = draw(st.sampled_from(BY_RANK if wide and not uneven else BY_RANK[:1]))
        steps.insert(draw(st.integers(0, len(steps))), (name, draw(st.integers(0, 9)), 0, "world"))
    kinds = draw(st.tuples(st.sampled_from(KINDS), st.sampled_from(KINDS)))
    return Program(kinds, tuple(steps), backward, uneven)
