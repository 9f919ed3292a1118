"""Programs of ordinary DTensor code as data, drawn by Hypothesis, and how a rank, or all ranks in lockstep, runs them.

Numbers are small integers in float64 wherever sums can be of another order, so that equal means to the last bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, empty, ones, zeros
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.nn import functional

Step = tuple[Any, ...]
Texts = tuple[str, ...]

MESHES: dict[str, tuple[tuple[int, ...], Texts | None]] = {
    "row": ((4,), None),
    "three": ((3,), ("dp",)),
    "grid": ((2, 2), ("dp", "tp")),
    "oblong": ((2, 3), ("dp", "tp")),
    "cube": ((2, 2, 2), ("dp", "cp", "tp")),
}
SIZES = (4, 8, 3, 5, 7, 1, 6)  # no 0: of an empty tensor, DTensor looks for a view for ever (view_groups, torch 2.13)
PARTS = ("whole", "dp", "tp", "flat")  # of a mesh of two axes or more


@dataclass(frozen=True)
class Program:
    """A mesh, or a part of one, a tensor and where it lies, and what is done with it."""

    mesh: str
    part: str
    shape: tuple[int, ...]
    placed: Texts
    source: str
    steps: tuple[Step, ...]
    backward: bool

    @property
    def ranks(self) -> int:
        return math.prod(MESHES[self.mesh][0])

    @property
    def exact(self) -> bool:
        """Whether every sum is: products of matrices may add in another order, and a third is rounded."""
        return not {"matmul", "linear"} & {step[0] for step in self.steps} and 3 not in MESHES[self.mesh][0]


def axes_of(mesh: str, part: str) -> int:
    return len(MESHES[mesh][0]) if part == "whole" else 1


def mesh_of(program: Program) -> DeviceMesh:
    shape, names = MESHES[program.mesh]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    if program.part == "flat":
        return mesh._flatten()
    return mesh if program.part == "whole" else mesh[program.part]


def placement(text: str) -> Placement:
    if text.startswith("SS"):
        dim, _, factor = text[2:].partition(",")
        return _StridedShard(int(dim), split_factor=int(factor))
    if text.startswith("S"):
        return Shard(int(text[1:]))
    return Replicate() if text == "R" else Partial(text.removeprefix("P") or "sum")


def placements(texts: Texts) -> list[Placement]:
    return [placement(text) for text in texts]


# -- drawing


@st.composite
def programs(draw: Any) -> Program:
    mesh = draw(st.sampled_from(list(MESHES)))
    part = draw(st.sampled_from(PARTS)) if len(MESHES[mesh][0]) > 1 else "whole"
    shape = tuple(draw(st.lists(st.sampled_from(SIZES), max_size=3)))
    axes = axes_of(mesh, part)
    placed = draw(layouts(axes, len(shape), strided=True))
    source = draw(st.sampled_from(["distributed", "distributed", "alone", "from local", "factory"]))
    backward = draw(st.booleans())
    steps: list[Step] = []
    dims = len(shape)
    if placed[0].startswith("SS"):  # DTensor plans for half a minute how to multiply these: not without a step before
        steps.append(("redistribute", 0, draw(layouts(axes, dims)), False, 0))
    for _ in range(draw(st.integers(1, 4))):
        step, dims = draw(one_step(dims, axes))
        steps.append(step)
    return Program(mesh, part, shape, placed, source, tuple(steps), backward)


def layouts(axes: int, dims: int, *, strided: bool = False) -> Any:
    """Placements for each axis; or those that FSDP over tensor parallelism makes: a strided shard, then shards."""
    texts = ["R", *(f"S{dim}" for dim in range(dims))]
    plain = st.tuples(*[st.sampled_from(texts)] * axes)
    if not strided or axes != 2 or not dims:
        return plain
    return plain | st.integers(0, dims - 1).map(lambda dim: (f"SS{dim},2", f"S{dim}"))


@st.composite
def one_step(draw: Any, dims: int, axes: int) -> tuple[Step, int]:
    """A step that a tensor of so many dims bears, and how many it has afterwards."""
    names = ["in place", *"redistribute redistribute pointwise binary total clone again draw where".split()]
    if dims:
        names += ["to partial", *"reduce reduce softmax cat narrow pick unsqueeze norm scan index".split()]
    if dims >= 2:
        names += ["transpose", "flatten", *(["embedding"] if dims == 2 else [])]
    if dims >= 2 and (axes < 3 or dims == 2):  # else DTensor plans for half a minute
        names += ["matmul", "matmul", "linear"]
    name = draw(st.sampled_from(names))
    dim = draw(st.integers(0, max(dims - 1, 0)))
    layout = draw(layouts(axes, dims))
    kept = draw(st.booleans())
    which = draw(st.integers(0, 7))
    after = {
        "total": 0, "reduce": dims if kept else dims - 1, "unsqueeze": dims + 1, "flatten": dims - 1, "to partial": dims,
    }.get(name, dims)  # fmt: skip
    return (name, dim, layout, kept, which), after


# -- running


def numbers(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    count = math.prod(shape)
    return ((torch.arange(count, dtype=torch.float64) * 5 + seed * 3) % 7 - 3).reshape(shape)


def play(program: Program) -> list[Any]:
    """What this rank has after each step, and the gradient in the end."""
    torch.manual_seed(5)
    mesh = mesh_of(program)
    x = start = source(program, mesh)
    if program.backward and x.is_leaf:
        start.requires_grad_()
    seen: list[Any] = [seen_of(x)]
    for step in program.steps:
        x = STEPS[step[0]](x, *step[1:])
        seen.append(seen_of(x))
    if x.requires_grad and x.dtype.is_floating_point:
        (x * x).sum().backward()
        seen.append(None if start.grad is None else [start.grad.to_local(), str(start.grad.placements)])
    seen.append(x.full_tensor() if isinstance(x, DTensor) else x)
    return seen


def seen_of(x: Any) -> Any:
    if not isinstance(x, DTensor):
        return x
    return [x.to_local(), tuple(x.shape), x.stride(), str(x.placements), x.dtype]


def source(program: Program, mesh: DeviceMesh) -> DTensor:
    where, shape = placements(program.placed), program.shape
    if program.source == "distributed":
        return distribute_tensor(numbers(shape), mesh, where)
    if program.source == "alone":
        return distribute_tensor(numbers(shape, seed=1), mesh, where, src_data_rank=None)
    if program.source == "factory":
        return (zeros, ones, empty)[len(shape) % 3](
            shape, device_mesh=mesh, placements=where, dtype=torch.float64
        ).fill_(2)
    local = distribute_tensor(numbers(shape), mesh, where).to_local() * 2
    return DTensor.from_local(
        local, mesh, where, run_check=False, shape=torch.Size(shape), stride=numbers(shape).stride()
    )


def _pointwise(x: DTensor, dim: int, layout: Texts, kept: bool, which: int) -> Any:
    do = (torch.neg, torch.relu, torch.abs, lambda x: x * 2, lambda x: 1 - x, torch.sign, torch.square, lambda x: x / 4)
    return do[which](x)


def _other(x: DTensor, layout: Texts, seed: int = 2) -> DTensor:
    return distribute_tensor(numbers(tuple(x.shape), seed), x.device_mesh, placements(layout))


def _binary(x: DTensor, dim: int, layout: Texts, kept: bool, which: int) -> Any:
    do = (torch.add, torch.sub, torch.mul, torch.maximum)[which % 4]
    return do(x, _other(x, layout)) if kept else do(_other(x, layout), x)


def _reduce(x: DTensor, dim: int, layout: Texts, kept: bool, which: int) -> Any:
    do = (torch.sum, torch.mean, torch.amax, torch.amin)[which % 4]
    return do(x, dim=dim, keepdim=kept)


def _matmul(x: DTensor, dim: int, layout: Texts, kept: bool, which: int) -> Any:
    columns = which + 1
    other = numbers((x.shape[-1], columns), seed=3)
    fits = tuple(text if text in ("R", "S0", "S1") else "R" for text in layout)
    return x @ distribute_tensor(other, x.device_mesh, placements(fits))


def _linear(x: DTensor, dim: int, layout: Texts, kept: bool, which: int) -> Any:
    weight, bias = numbers((which + 1, x.shape[-1]), seed=3), numbers((which + 1,), seed=4)
    fits = tuple(text if text in ("R", "S0", "S1") else "R" for text in layout)
    mesh = x.device_mesh
    ends = tuple("S0" if text == "S0" else "R" for text in fits)
    parts = distribute_tensor(weight, mesh, placements(fits)), distribute_tensor(bias, mesh, placements(ends))
    return functional.linear(x, *(parts if kept else parts[:1]))


def _again(x: DTensor, dim: int, layout: Texts, kept: bool, which: int) -> Any:
    """To what this rank holds and back."""
    grad = [Partial() if p.is_replicate() and which == 0 else p for p in x.placements]
    grad = [Replicate() if p.is_partial() else p for p in grad]
    local = x.to_local(grad_placements=grad) if kept else x.to_local()
    return DTensor.from_local(local, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride())


def _to_partial(x: DTensor, dim: int, layout: Texts, kept: bool, which: int) -> Any:
    """What all ranks have is a part of something from now on."""
    to = [Partial(("sum", "avg", "max")[which % 3]) if p.is_replicate() else p for p in x.placements]
    return DTensor.from_local(x.to_local(), x.device_mesh, to, run_check=False, shape=x.shape, stride=x.stride())


def _draw(x: DTensor, dim: int, layout: Texts, kept: bool, which: int) -> Any:
    if which % 4 == 0:
        torch.manual_seed(dist.get_rank())
    if which < 3:
        return functional.dropout(x, 0.5)
    return (torch.rand_like(x) if kept else torch.zeros_like(x).uniform_(-1, 1)).mul(8).round() * x


def _norm(x: DTensor, dim: int, layout: Texts, kept: bool, which: int) -> Any:
    return functional.layer_norm(x, x.shape[-1:])


def _embedding(x: DTensor, dim: int, layout: Texts, kept: bool, which: int) -> Any:
    """Its rows are looked up, by places that all ranks have, or that are cut."""
    places = torch.arange(6).reshape(2, 3) * (which + 1) % x.shape[0]
    where = [Shard(which % 2) if text == "S0" and kept else Replicate() for text in layout]
    found = functional.embedding(distribute_tensor(places, x.device_mesh, where), x)
    return found.redistribute(placements=[Replicate()] * len(layout))[which % 2]


def _index(x: DTensor, dim: int, layout: Texts, kept: bool, which: int) -> Any:
    return x[which % x.shape[0]][None] if kept else x[:: which % 3 + 1]


STEPS: dict[str, Any] = {
    "redistribute": lambda x, dim, layout, kept, which: x.redistribute(placements=placements(layout)),
    "pointwise": _pointwise,
    "binary": _binary,
    "total": lambda x, dim, layout, kept, which: (torch.sum, torch.amax, torch.mean)[which % 3](x),
    "clone": lambda x, dim, layout, kept, which: x.detach().clone() if kept else x.clone(),
    "in place": lambda x, dim, layout, kept, which: (x * 1).add_(_other(x, layout) if kept else 2),
    "again": _again,
    "draw": _draw,
    "where": lambda x, dim, layout, kept, which: torch.where(x > 0, x, _other(x, layout)),
    "reduce": _reduce,
    "softmax": lambda x, dim, layout, kept, which: torch.softmax(x, dim),
    "cat": lambda x, dim, layout, kept, which: torch.cat([x, _other(x, layout)], dim),
    "embedding": _embedding,
    "index": _index,
    "narrow": lambda x, dim, layout, kept, which: x.narrow(dim, 0, (x.shape[dim] + 1) // 2),
    "pick": lambda x, dim, layout, kept, which: torch.index_select(x, dim, torch.tensor([0, x.shape[dim] - 1])),
    "unsqueeze": lambda x, dim, layout, kept, which: x.unsqueeze(dim),
    "norm": _norm,
    "to partial": _to_partial,
    "scan": lambda x, dim, layout, kept, which: torch.cumsum(x, dim) if kept else torch.argmax(x, dim, keepdim=True),
    "matmul": _matmul,
    "transpose": lambda x, dim, layout, kept, which: x.transpose(dim, -1),
    "flatten": lambda x, dim, layout, kept, which: x.flatten(0, 1) if kept else x.reshape(-1, *x.shape[2:]),
    "linear": _linear,
}
