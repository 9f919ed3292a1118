"""Checkpoints: what some ranks save, other numbers of ranks load; the last good one survives a death half way."""

import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor, zeros
from torch.distributed.tensor.placement_types import Placement

import localtensor as lt
from tests.device import MESH

BATCH, METADATA = 8, ".metadata"


class DiskFull(OSError):
    """What befalls the rank that dies."""


class FullDisk(dcp.FileSystemWriter):
    """A disk that is full when this rank's bytes are on it, though not yet what completes the checkpoint."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        super().write_data(plan, planner).wait()
        raise DiskFull("no space left")


def model() -> nn.Module:
    """Ten rows: three ranks of four have 3 and one has 1; of eight ranks, five have 2 and three have none."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3)).double()


def data(step: int) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(step)
    x, y = (torch.randn(BATCH, width, generator=source, device="cpu").double().to(MESH) for width in (6, 3))
    return x, y


def optimizer_of(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=0.1)


def loss_of(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (net(x) - y).square().mean()


def one_step(net: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
    """The loss of the whole batch, of which this rank has its part."""
    part = slice(dist.get_rank(), None, dist.get_world_size())
    x, y = data(step)
    loss = loss_of(net, x[part], y[part])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    total = loss.detach()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def whole(net: nn.Module) -> dict[str, Tensor]:
    return {name: weight.full_tensor().detach() for name, weight in net.named_parameters()}


class Resumable(dcp.stateful.Stateful):
    """Model and optimizer as one entry of a checkpoint."""

    def __init__(self, net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.net, self.optimizer = net, optimizer

    def state_dict(self) -> dict[str, Any]:
        weights, state = get_state_dict(self.net, self.optimizer)
        return {"weights": weights, "state": state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_state_dict(
            self.net, self.optimizer, model_state_dict=state_dict["weights"], optim_state_dict=state_dict["state"]
        )


def complete(folder: str) -> list[int]:
    """The steps whose checkpoint was finished, in order."""
    return sorted(int(file.parent.name) for file in Path(folder).glob(f"*/{METADATA}"))


def train(
    folder: str,
    steps: int,
    keep: int = 9,
    dies_at: int | None = None,
    gracefully: bool = True,
    background: bool = False,
) -> dict[str, object]:
    """A checkpoint after every step, the first included, of which the last `keep` stay.

    At step `dies_at` the last rank finds the disk full, or stops before it saves.
    """
    net = fully_shard(model())
    optimizer = optimizer_of(net)
    last_rank = dist.get_rank() == dist.get_world_size() - 1
    losses, failures = [], []
    for step in range(1, steps + 1):
        losses.append(one_step(net, optimizer, step))
        state, path = {"train": Resumable(net, optimizer), "step": step}, f"{folder}/{step}"
        dying = dies_at == step
        if dying and last_rank and not gracefully:
            raise DiskFull("no space left")
        writer = FullDisk(path) if dying and last_rank else dcp.FileSystemWriter(path, thread_count=2)
        try:
            if background:
                dcp.async_save(state, storage_writer=writer).result()
            else:
                dcp.save(state, storage_writer=writer)
        except dcp.CheckpointException as error:
            failures.append(sorted((rank, type(why[0]).__name__) for rank, why in error.failures.items()))
        else:
            _forget(folder, keep)
    return {"losses": losses, "failures": failures, "weights": whole(net)}


def _forget(folder: str, keep: int) -> None:
    if dist.get_rank() == 0:
        for step in complete(folder)[:-keep]:
            shutil.rmtree(f"{folder}/{step}")
    dist.barrier()


def resume(folder: str, steps: int) -> dict[str, object]:
    """From the last checkpoint that is complete, on to step `steps`."""
    net = fully_shard(model())
    for weight in net.parameters():
        nn.init.zeros_(weight)
    optimizer = optimizer_of(net)
    found = complete(folder)[-1]
    state = {"train": Resumable(net, optimizer), "step": -1}
    dcp.load(state, checkpoint_id=f"{folder}/{found}")
    rows = [weight.to_local().shape[0] for weight in net.parameters()]
    losses = [one_step(net, optimizer, step) for step in range(found + 1, steps + 1)]
    return {"from": state["step"], "rows": rows, "losses": losses, "weights": whole(net)}


def on_one_device(steps: int) -> dict[str, object]:
    net = model()
    optimizer = optimizer_of(net)
    losses = []
    for step in range(1, steps + 1):
        loss = loss_of(net, *data(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "weights": {name: weight.detach() for name, weight in net.named_parameters()}}


# -- tensors of many kinds, from one mesh to another


def tensors() -> dict[str, Tensor]:
    torch.manual_seed(2)
    return {
        "even": torch.randn(8, 4),
        "uneven": torch.randn(7, 5, dtype=torch.float64),
        "fewer rows than ranks": torch.randn(2, 3),
        "complex": torch.randn(5, 3, dtype=torch.complex64),
        "half": torch.randn(6, 3).bfloat16(),
        "small numbers": torch.arange(15, dtype=torch.int16).reshape(5, 3),
        "boolean": torch.arange(15).reshape(5, 3) % 2 == 0,
    }


def save_tensors(folder: str, mesh_shape: Sequence[int], placed: str) -> list[str]:
    mesh = init_device_mesh(MESH, tuple(mesh_shape))
    placements = _placements(placed)
    state: dict[str, Any] = {
        name: distribute_tensor(x, mesh, placements, src_data_rank=None) for name, x in tensors().items()
    }
    dcp.save({**state, "plain": torch.arange(3), "note": ("step", 3)}, checkpoint_id=folder)
    return sorted(file.name for file in Path(folder).iterdir())


def load_tensors(folder: str, layouts: Sequence[tuple[Sequence[int], str]]) -> list[dict[str, object]]:
    """For each layout, a shape of the mesh and placements: what this rank has of each tensor afterwards."""
    return [_loaded(folder, tuple(mesh_shape), _placements(placed)) for mesh_shape, placed in layouts]


def _loaded(folder: str, mesh_shape: tuple[int, ...], placements: list[Placement]) -> dict[str, object]:
    mesh = init_device_mesh(MESH, mesh_shape)
    state: dict[str, Any] = {
        name: zeros(x.shape, dtype=x.dtype, device_mesh=mesh, placements=placements) for name, x in tensors().items()
    }
    state |= {"plain": torch.zeros(3, dtype=torch.int64), "note": None}
    dcp.load(state, checkpoint_id=folder)
    return {name: x.to_local() if isinstance(x, DTensor) else x for name, x in state.items()}


def _placements(placed: str) -> list[Placement]:
    return [lt.parse(text) for text in placed.split(", ")]


def tensors_on_ranks(mesh_shape: Sequence[int], placed: str) -> list[dict[str, Tensor]]:
    """What each rank should have, by plain arithmetic."""
    pieces: list[dict[str, Tensor]] = [{} for _ in range(math.prod(mesh_shape))]
    for name, x in tensors().items():
        spec = lt.Spec(lt.Mesh.of(*mesh_shape), tuple(_placements(placed)), tuple(x.shape), x.dtype)
        for rank, piece in enumerate(lt.split(x, spec)):
            pieces[rank][name] = piece
    return pieces
