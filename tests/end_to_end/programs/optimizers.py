"""Optimizers over DTensor parameters, clipped gradients included."""

import inspect
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

import localtensor as lt
from tests.device import MESH, normal

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "Adam": {"lr": 0.1, "amsgrad": True},
    "AdamW": {"lr": 0.1, "weight_decay": 0.1},
    "Adagrad": {"lr": 0.1, "lr_decay": 0.1},
    "RMSprop": {"lr": 0.1, "momentum": 0.5, "centered": True},
    "NAdam": {"lr": 0.1},
    "RAdam": {"lr": 0.1},
    "Adamax": {"lr": 0.1},
    "Adadelta": {"lr": 1.0},
    "ASGD": {"lr": 0.1, "t0": 1},
}
WAYS = ("one by one", "foreach", "fused")
NOT_FUSED = {"SGD": "sgd", "Adagrad": "adagrad"}  # DTensor has no rule for their fused kernels
SHAPES = ((5, 3), (3, 7), (4, 5), (6, 6))  # DTensor changes nothing in place where a dim is shorter than its ranks


def start(index: int) -> tuple[Tensor, Tensor]:
    """The first value of a parameter, and what it should become."""
    value, goal = normal(2, *SHAPES[index], seed=index)
    return value, goal


def accepts(name: str, how: str) -> bool:
    """Whether torch has this optimizer in this way, and DTensor takes it."""
    if how == "fused" and name in NOT_FUSED:
        return False
    return how == "one by one" or how in inspect.signature(getattr(torch.optim, name)).parameters


def optimized(name: str, how: str, parameters: list[nn.Parameter], goals: list[Tensor], steps: int) -> list[Any]:
    """The gradient norms on the way; the parameters have moved."""
    foreach = {"foreach": False} if accepts(name, "foreach") else {}
    ways = {"one by one": foreach, "foreach": {"foreach": True}, "fused": {"fused": True}}
    optimizer = getattr(torch.optim, name)(parameters, **OPTIMIZERS[name], **ways[how])
    norms = []
    for _ in range(steps):
        loss = sum(((parameter - goal) ** 2).sum().square() for parameter, goal in zip(parameters, goals))
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(parameters, 1.0, foreach=how != "one by one"))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def train(names: Sequence[str], mesh_shape: Sequence[int], placed: Sequence[str], steps: int) -> dict[str, Any]:
    """For each optimizer in each of its ways: this rank's pieces, the whole parameters, and the norms."""
    mesh = init_device_mesh(MESH, tuple(mesh_shape))
    placements = [[lt.parse(part) for part in text.split(", ")] for text in placed]
    results = {}
    for name, how in ((name, how) for name in names for how in WAYS if accepts(name, how)):
        pairs = [
            [distribute_tensor(x, mesh, where, src_data_rank=None) for x in start(index)]
            for index, where in enumerate(placements)
        ]
        parameters, goals = [nn.Parameter(value) for value, _ in pairs], [goal for _, goal in pairs]
        norms = optimized(name, how, parameters, goals, steps)
        results[f"{name}, {how}"] = {
            "local": [parameter.to_local().detach() for parameter in parameters],
            "whole": [parameter.full_tensor().detach() for parameter in parameters],
            "norms": [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms],
        }
    return results


def on_one_device(name: str, count: int, steps: int) -> dict[str, Any]:
    pairs = [start(index) for index in range(count)]
    parameters = [nn.Parameter(value) for value, _ in pairs]
    norms = optimized(name, "one by one", parameters, [goal for _, goal in pairs], steps)
    return {"whole": [parameter.detach() for parameter in parameters], "norms": norms}


def refused(name: str, how: str) -> str:
    """Why DTensor does not take this optimizer in this way."""
    mesh = init_device_mesh(MESH, (2,))
    value, goal = (distribute_tensor(x, mesh, [lt.parse("S(0)")], src_data_rank=None) for x in start(0))
    try:
        optimized(name, how, [nn.Parameter(value)], [goal], 1)
    except NotImplementedError as error:
        return str(error)
    return f"no refusal, and it moved: {not math.isnan(value.to_local().sum().item())}"
