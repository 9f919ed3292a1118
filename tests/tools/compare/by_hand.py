"""Both sides of a program by hand, without the tool: is it right, or does it compute something else?

    python -m tests.tools.compare.by_hand [NAME ...]

The mean of the ranks' losses is compared with the loss on one device, over at least four steps.  Functions have none.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import localtensor as lt
from tests.tools.compare.cases import Case, cases

DATA = ("dp", "fsdp", "data")


def rows_of(batch: Any, mesh: Any, axes: tuple[str, ...]) -> Any:
    index, count = 0, 1
    for axis in axes:
        index, count = index * mesh[axis].size() + mesh[axis].get_local_rank(), count * mesh[axis].size()
    if isinstance(batch, Tensor):
        return batch.chunk(count)[index]
    if isinstance(batch, tuple):
        return tuple(rows_of(one, mesh, axes) for one in batch)
    return {name: rows_of(one, mesh, axes) for name, one in batch.items()}


def train_stages(schedule: Any, given: dict[str, Any], batches: list[Any]) -> list[float]:
    """A rank's share of the losses: that of the last stage, as many times as there are ranks."""
    stages = schedule._stages if hasattr(schedule, "_stages") else [schedule._stage]
    optimizer = given["optimizer"]([one for stage in stages for one in stage.submod.parameters()])
    last, losses = any(stage.is_last for stage in stages), []
    for batch in batches:
        optimizer.zero_grad()
        got: list[Tensor] = []
        first = any(stage.is_first for stage in stages)
        schedule.step(*([batch] if first else []), **({"target": batch, "losses": got} if last else {}))
        optimizer.step()
        total = float(sum(one.detach() for one in got))
        losses.append(dist.get_world_size() * total / (len(got) if schedule.scale_grads else 1) if last else 0.0)
    return losses


def train(model: Any, given: dict[str, Any], batches: list[Any]) -> list[float]:
    if not hasattr(model, "parameters"):
        return train_stages(model, given, batches)
    optimizer = given.get("optimizer", lambda p: torch.optim.SGD(p, lr=0.1))(model.parameters())
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        arguments = batch if isinstance(batch, tuple) else (batch,)
        loss = given["loss"](model(**batch) if isinstance(batch, dict) else model(*arguments))
        losses.append(float(loss.detach()))
        loss.backward()
        optimizer.step()
    return losses


def losses_of(given: dict[str, Any]) -> tuple[list[float], list[float]]:
    """The losses on one device, and the mean of the ranks' ones, step by step."""
    batches = []
    for step in range(max(4, given.get("steps", 1))):
        torch.manual_seed(100 + step)
        batches.append(given["batch"]())
    torch.manual_seed(0)
    with no_group():
        alone = train(given["build"](), given, batches)
    sizes = given["mesh"]
    axes = given.get("batch_axes") or tuple(axis for axis in sizes if axis in DATA)

    def rank() -> list[float]:
        mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        torch.manual_seed(0)
        model = given["build"]()
        model = given["parallelize"](model, mesh) or model
        return train(model, given, [rows_of(batch, mesh, axes) for batch in batches])

    world = 1
    for size in sizes.values():
        world *= size
    values = lt.run(rank, ranks=world).values
    return alone, [sum(step) / world for step in zip(*values, strict=True)]


@contextmanager
def no_group() -> Iterator[None]:
    if dist.is_initialized():
        raise RuntimeError("by_hand: a default process group exists already")
    yield


def difference(case: Case) -> float:
    """The largest relative difference of the losses."""
    alone, ranks = losses_of(case.program())
    return max(abs(a - b) / max(abs(a), 1e-6) for a, b in zip(alone, ranks, strict=True))


def main(names: list[str]) -> None:
    for case in cases():
        if names and case.name not in names and case.file.stem not in names:
            continue
        if "loss" not in case.program():
            print(f"NO LOSS          {case.name}", flush=True)
            continue
        try:
            print(f"{'faulty' if case.kind else 'right '} {difference(case):9.2e}  {case.name}", flush=True)
        except Exception as error:  # why: a program of ours that fails is listed, and the others go on
            text = " ".join(str(error).split())[:600]
            print(f"ERROR  {type(error).__name__} {case.name}: {text}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
