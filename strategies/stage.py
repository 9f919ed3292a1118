"""What one real rank does to confirm a case: DTensors from its pieces, the op, the whole results.

This file is imported by the workers of `localtensor.processes`; it must not need OpInfo.
"""

from __future__ import annotations

import functools
import importlib
import logging
import sys
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.placement_types import Placement

from localtensor import wire
from localtensor.partials import fold
from localtensor.placement import is_plain, short
from localtensor.shards import local_shape
from strategies.rules import Call, results, written


@dataclass(frozen=True, slots=True)
class Part:
    """One rank's share of a case: its pieces, and the whole tensors' shapes and strides."""

    call: Call
    placements: tuple[Placement, ...]
    pieces: tuple[Tensor, ...]
    shapes: tuple[tuple[int, ...], ...]
    strides: tuple[tuple[int, ...], ...]
    device: str
    home: tuple[str, str] = ("", "")
    """The user's rules module, to be imported before it plays, and the folder where it is found."""


@dataclass(frozen=True, slots=True)
class Heard:
    """What one rank saw.  `failed` is the stage that raised somewhere ("op" or "full_tensor"), `errors`
    the sentence of each rank that raised, by rank; `whole` are the results as full_tensor gives them."""

    failed: str
    errors: tuple[str, ...]
    placements: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...] | None, ...] = ()
    pieces: tuple[Any, ...] = ()
    whole: tuple[Any, ...] = ()
    trace: str = ""


class Misshapen(Exception):
    """A rank's piece has not the shape that its placement asks for, so that the pieces cannot be put together."""


@functools.cache
def _mesh(device: str) -> DeviceMesh:
    return init_device_mesh(device, (dist.get_world_size(),))


def play(sent: bytes) -> bytes:
    """Runs one part and sends back what was `Heard`.  All ranks leave together, whoever raised."""
    part: Part = wire.loads(sent)
    at_home(*part.home)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable()  # for good: torch logs the traceback of every refusal, which is an answer here
        return wire.dumps(_played(part))


@functools.cache
def at_home(module: str, folder: str) -> None:
    """The user's rules module is imported in this process, too."""
    if module:
        sys.path.insert(0, folder)
        importlib.import_module(module)


def _played(part: Part) -> Heard:
    outs, errors, trace = _together(lambda: _run(part))
    if any(errors):
        return Heard("op", errors, trace=trace)
    placements = tuple(short(o.placements[0]) if isinstance(o, DTensor) else "-" for o in outs)
    pieces = tuple(_local(o) for o in outs)
    shapes = tuple(tuple(p.shape) if isinstance(p, Tensor) else None for p in pieces)
    whole, errors, trace = _together(functools.partial(_check_shapes, outs))
    if not errors:  # gloo ends the process where ranks bring pieces of sizes that do not match
        whole, errors, trace = _together(lambda: tuple(_whole(o) for o in outs))
    return Heard(
        "full_tensor" if any(errors) else "", errors, placements, shapes, pieces, () if errors else whole, trace
    )


def _run(part: Part) -> list[Any]:
    mesh = _mesh(part.device)
    given = zip(part.pieces, part.placements, part.shapes, part.strides, strict=True)
    tensors = [
        DTensor.from_local(
            piece.to(part.device), mesh, [placement], run_check=False, shape=torch.Size(shape), stride=stride
        )
        for piece, placement, shape, stride in given
    ]
    out = part.call(tensors)
    return [*results(out), *(tensors[leaf] for leaf in written(part.call))]


def _check_shapes(outs: Sequence[Any]) -> None:
    for out in outs:
        if isinstance(out, DTensor) and is_plain(out.placements[0]):
            held = tuple(out.to_local().shape)
            asked = local_shape(out.shape, out.placements[0], dist.get_world_size(), dist.get_rank())
            if held != asked:
                said = f"its piece has shape {held}, {short(out.placements[0])} of {tuple(out.shape)} is {asked}"
                raise Misshapen(said)


def _local(out: Any) -> Any:
    return out.to_local().detach().cpu().clone() if isinstance(out, DTensor) else out


def _whole(out: Any) -> Any:
    if not isinstance(out, DTensor):
        return out.detach().cpu() if isinstance(out, Tensor) else out
    placement = out.placements[0]
    if type(placement) is Partial and placement.reduce_op == "avg" and out.dtype.is_complex is False:
        return _averaged(out)
    return out.full_tensor().detach().cpu()


def _averaged(out: DTensor) -> Tensor:
    """gloo has no average; on other backends this is what full_tensor does."""
    if dist.get_backend() != "gloo":
        return out.full_tensor().detach().cpu()
    local = out.to_local().contiguous()
    held = [torch.empty_like(local) for _ in range(dist.get_world_size())]
    dist.all_gather(held, local)
    return fold(torch.stack(held), "avg").to(local.dtype).cpu()


def _together(work: Any) -> tuple[Any, tuple[str, ...], str]:
    """Run it on every rank, then tell each other who raised: nobody is left waiting for a rank that is gone."""
    value, error, trace = None, "", ""
    try:
        value = work()
    except Exception as raised:  # why: whatever DTensor raises is the answer that this rank was asked for
        error = f"{type(raised).__name__}: {(str(raised) or '-').splitlines()[0][:200]}"
        trace = traceback.format_exc()
    flag = torch.tensor([float(bool(error))])
    dist.all_reduce(flag)
    if not flag.item():
        return value, (), ""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, error)
    return value, tuple(every), trace
