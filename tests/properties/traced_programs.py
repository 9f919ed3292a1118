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
        return any(step[0] == "rank" for step in self.steps)

    def inputs(self, start: float) -> list[Tensor]:
        """Two new inputs; other numbers for another start."""
        made = []
        for place, kind in enumerate(self.kinds):

            def own(rank: int, place: int = place, kind: str = kind) -> Tensor:
                number = {"same": 0, "pairs": rank // 2, "own": rank}[kind]
                rows = rank + 1 if self.uneven else SIDE
                values = torch.arange(rows * SIDE, dtype=torch.float64).view(rows, SIDE)
                return (values * (place + 2) + 3 * number + start).remainder(7)

            made.append(rank_map(own).requires_grad_(self.backward))
        return made

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
        if name in WRITES:
            target = x.clone() if second % 2 else x
            WRITES[name](
                target if self.uneven or detail == "world" else target[1],
                y if detail == "world" or self.uneven else y[0],
            )
            return target
        if name == "matmul":
            return (x @ y).remainder(7)
        if name == "rank":
            return x * dist.get_rank()
        return communicated(name, x, detail)


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
    part = torch.ops._c10d_functional.wait_tensor(
        torch.ops._c10d_functional.reduce_scatter_tensor(x.contiguous(), "sum", size, group.group_name)
    )
    return part.repeat(size, 1).remainder(7)


PAIRS: dict[str, Any] = {}
"""The groups of a mode other than that of all ranks, made before a program runs in it."""


def make_groups() -> None:
    """Make the groups that programs name, in the mode that is entered."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pairs", "halves"))
    PAIRS.update({name: mesh.get_group(name) for name in ("pairs", "halves")})


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Programs with few steps; one in ten has an int of each rank, and one in five uneven inputs."""
    uneven, backward = draw(st.integers(0, 4)) == 4, draw(st.booleans())
    names = [*PAIRED, *SINGLE, *([] if backward else WRITES)]
    if not uneven:
        names += [*SQUARE, "matmul", "all_reduce", "all_gather", "reduce_scatter"]
    if backward:
        names = [name for name in names if name not in ("all_gather", "reduce_scatter", "all_reduce")]
    step = st.tuples(st.sampled_from(names), st.integers(0, 9), st.integers(0, 9), st.sampled_from(GROUPS))
    steps = draw(st.lists(step, min_size=1, max_size=MOST_STEPS))
    if draw(st.integers(0, 9)) == 7:
        steps.insert(draw(st.integers(0, len(steps))), ("rank", draw(st.integers(0, 9)), 0, "world"))
    kinds = draw(st.tuples(st.sampled_from(KINDS), st.sampled_from(KINDS)))
    return Program(kinds, tuple(steps), backward, uneven)
