"""The words of a check by hand: a program of plain torch, run on plain tensors and on DTensors of the same values.

Imports torch alone, nothing of what it checks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

R, S0, S1, S2, S3 = Replicate(), Shard(0), Shard(1), Shard(2), Shard(3)
SUM, AVG, MIN, MAX, PRODUCT = (Partial(kind) for kind in ("sum", "avg", "min", "max", "product"))
BUG, RIGHT, FALSE = "bug", "right", "false alarm"


@dataclass(frozen=True)
class Check:
    """One program and what was thought of it; `judged` is `BUG`, `FALSE`, `RIGHT` (a control), or why it is arguable."""

    name: str
    program: Callable[[Given], Any]
    mesh: tuple[int, ...]
    judged: str
    finding: str = ""
    """The rule of the finding, as the journal names it."""
    hangs: bool = False
    """Whether what is wrong is that no rank returns."""

    @property
    def ranks(self) -> int:
        return torch.Size(self.mesh).numel()


CHECKS: dict[str, Check] = {}


def check(finding: str, mesh: tuple[int, ...] = (2,), judged: str = BUG, hangs: bool = False) -> Callable[[Any], Any]:
    """Decorates the program of a check, which is called after it."""

    def enter(program: Callable[[Given], Any]) -> Callable[[Given], Any]:
        name = program.__name__.replace("_", " ").strip()
        if name in CHECKS:
            raise ValueError(f"two checks are called {name!r}")
        CHECKS[name] = Check(name, program, mesh, judged, finding, hangs)
        return program

    return enter


def right(mesh: tuple[int, ...] = (2,)) -> Callable[[Any], Any]:
    """Decorates the program of a control, in which DTensor is right."""
    return check("", mesh, RIGHT)


class Given:
    """What makes the tensors of a program: plain ones where `mesh` is None, else DTensors on the mesh."""

    def __init__(self, mesh: DeviceMesh | None) -> None:
        self.mesh = mesh

    def __call__(self, values: Any, *placements: Placement, grad: bool = False, dtype: Any = None) -> Any:
        """A tensor of these values, replicated where no placement is given; floats are float32."""
        whole = values.clone() if isinstance(values, Tensor) else torch.tensor(values)
        whole = whole if dtype is None else whole.to(dtype)
        if self.mesh is None:
            return whole.requires_grad_(grad)
        placements = placements or (R,) * self.mesh.ndim
        partial = [axis for axis, placement in enumerate(placements) if placement.is_partial()]
        if partial:
            others = [R if placement.is_partial() else placement for placement in placements]
            local = distribute_tensor(whole, self.mesh, others, src_data_rank=None).to_local()
            for axis in partial:
                local = _share(local, placements[axis].reduce_op, self.mesh.size(axis), self.mesh.get_local_rank(axis))
            made = DTensor.from_local(
                local, self.mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
            )
        else:
            made = distribute_tensor(whole, self.mesh, placements, src_data_rank=None)
        return made.detach().requires_grad_(grad)

    def pieces(self, placement: Partial, *held: Any) -> Any:
        """A partial tensor of which rank i holds `held[i]`."""
        pieces = [piece if isinstance(piece, Tensor) else torch.tensor(piece) for piece in held]
        if self.mesh is not None:
            return DTensor.from_local(pieces[self.mesh.get_local_rank()], self.mesh, [placement], run_check=False)
        return _together(placement.reduce_op, pieces)

    @property
    def rank(self) -> int:
        return 0 if self.mesh is None else self.mesh.get_rank()


def count(*shape: int) -> Tensor:
    """1, 2, 3, ... in this shape, as float32."""
    return torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape)


def _share(whole: Tensor, kind: str, ranks: int, rank: int) -> Tensor:
    """What this rank holds of a partial value: small whole numbers beside it, no share equal to the value itself."""
    owner = torch.arange(whole.numel()).reshape(whole.shape) % ranks == rank
    if whole.dtype == torch.bool:
        return whole
    if kind == "sum":
        return whole - sum(range(1, ranks)) if rank == 0 else torch.full_like(whole, rank)
    if kind == "avg":
        return whole - sum(range(1, ranks)) if rank == 0 else whole + rank
    if kind == "product":
        signs = (-1) ** (ranks - 1)
        return whole * signs if rank == 0 else torch.full_like(whole, -1)
    away = whole + 1 + rank if kind == "min" else whole - 1 - rank
    return torch.where(owner, whole, away)


def _together(kind: str, pieces: Sequence[Tensor]) -> Tensor:
    stacked = torch.stack(list(pieces))
    if kind == "sum":
        return stacked.sum(0).to(stacked.dtype)
    if kind == "avg":
        return stacked.sum(0) / len(pieces)
    if kind == "product":
        return stacked.prod(0).to(stacked.dtype)
    return stacked.amin(0) if kind == "min" else stacked.amax(0)


def leaves(results: Any) -> list[Any]:
    if isinstance(results, (tuple, list)):
        return [leaf for one in results for leaf in leaves(one)]
    return [results]


def difference(got: Any, want: Any) -> str:
    """What is wrong with one result on this rank, or "" if nothing is.  All ranks call it together."""
    if not isinstance(got, DTensor):
        return _apart(got, want)
    whole = got.full_tensor()
    if wrong := _apart(whole, want):
        return f"full_tensor() of {got.placements} {wrong}"
    layout = [R if placement.is_partial() else placement for placement in got.placements]
    if any(type(placement) not in (Replicate, Shard) for placement in layout):
        return ""
    held, piece = got.to_local(), distribute_tensor(want, got.device_mesh, layout, src_data_rank=None).to_local()
    return (
        "" if held.shape == piece.shape else f"holds {tuple(held.shape)} of {got.placements}, not {tuple(piece.shape)}"
    )


def _apart(got: Any, want: Any) -> str:
    if isinstance(got, Tensor) != isinstance(want, Tensor):
        return f"is a {type(got).__name__}, not a {type(want).__name__}"
    if not isinstance(want, Tensor):
        same = got == want or (isinstance(want, float) and abs(got - want) <= 1e-5 * max(1.0, abs(want)))
        return "" if same else f"is {got}, not {want}"
    if (got.shape, got.dtype) != (want.shape, want.dtype):
        return f"is {got.dtype} {tuple(got.shape)}, not {want.dtype} {tuple(want.shape)}"
    if want.dtype.itemsize == 1 and want.is_floating_point():  # float8 compares by no op
        got, want = got.float(), want.float()
    if torch.allclose(got, want, rtol=1e-4, atol=1e-5, equal_nan=True):
        return ""
    return f"is {_short(got)}, not {_short(want)}"


def _short(values: Tensor) -> str:
    text = str(values.tolist())
    return text if len(text) < 150 else f"{text[:150]}..."
