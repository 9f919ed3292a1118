"""What one rank does to confirm a case: DTensors from its pieces, the op, the whole results.

This file is imported by the workers of `localtensor.processes.pool`; it must not need OpInfo.
"""

from __future__ import annotations

import functools
import logging
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from localtensor._util import pickling
from localtensor.errors import NoSuchDim, in_a_line
from localtensor.layout import is_plain, shapes_on, short, shorts
from strategies.model.rule import Call, results, written
from strategies.programs.run.follow_ups import Followed
from strategies.torch_api.mesh_and_caches import averages, forget, mesh_of
from strategies.torch_api.user_modules import at_home


@dataclass(frozen=True, slots=True)
class RankTask:
    """One rank's share of a case: its pieces, and the whole tensors' shapes and strides.

    `placements` has one placement for each axis of `mesh`, for each tensor; no mesh is one axis of all ranks.
    """

    call: Call
    placements: tuple[tuple[Placement, ...], ...]
    pieces: tuple[Any, ...]
    shapes: tuple[tuple[int, ...], ...]
    strides: tuple[tuple[int, ...], ...]
    device: str
    home: tuple[str, str] = ("", "")
    """The user's rules module, to be imported before it plays, and the folder where it is found."""
    mesh: tuple[int, ...] = ()
    flattened: bool = False

    def of(self, whole: Sequence[Tensor], pieces: tuple[Any, ...]) -> RankTask:
        """The same with these pieces of these whole tensors."""
        shapes = tuple(tuple(t.shape) for t in whole)
        return replace(self, pieces=pieces, shapes=shapes, strides=tuple(tuple(t.stride()) for t in whole))


@dataclass(frozen=True, slots=True)
class RankResult:
    """What one rank saw.  `failed` is the stage that raised somewhere ("op" or "full_tensor"), `errors`
    the sentence of each rank that raised, by rank; `whole` are the results as full_tensor gives them.
    A placement is `S(0)` on one axis, `(S(0), R)` on two, and `-` of what is no DTensor."""

    failed: str
    errors: tuple[str, ...]
    placements: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...] | None, ...] = ()
    pieces: tuple[Any, ...] = ()
    whole: tuple[Any, ...] = ()
    trace: str = ""


class Misshapen(Exception):
    """A rank's piece has not the shape that its placement asks for, so that the pieces cannot be put together."""


_mesh = functools.cache(mesh_of)


def play(sent: bytes) -> bytes:
    """Runs one part and sends back what was `RankResult`.  All ranks leave together, whoever raised."""
    part: RankTask = pickling.loads(sent)
    at_home(*part.home)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable()  # for good: torch logs the traceback of every refusal, which is an answer here
        mesh = _mesh(part.device, part.mesh or (dist.get_world_size(),), part.flattened)
        forget()
        with averages(dist.get_backend()):
            return pickling.dumps(played(part, mesh))


def played(part: RankTask, mesh: DeviceMesh) -> RankResult:
    """One rank's part, on a mesh of all ranks of the default group, which all play theirs."""
    outs, errors, trace = _run(part, mesh)
    if any(errors):
        return RankResult("op", errors, trace=trace)
    placements = tuple(map(placement_text, outs))
    pieces = tuple(_local(o) for o in outs)
    shapes = tuple(tuple(p.shape) if isinstance(p, Tensor) else None for p in pieces)
    whole, errors, trace = _together(functools.partial(_check_shapes, outs))
    if not errors:  # gloo ends the process where ranks bring pieces of sizes that do not match
        whole, errors, trace = _together(lambda: tuple(_whole(o) for o in outs))
    return RankResult(
        "full_tensor" if any(errors) else "", errors, placements, shapes, pieces, () if errors else whole, trace
    )


def _run(part: RankTask, mesh: DeviceMesh) -> tuple[Any, tuple[str, ...], str]:
    """All that is to be compared.  A rank that raises in the op is heard before its peers go on to what follows."""
    call = part.call
    alone = call.alone if isinstance(call, Followed) else None
    if alone is None or not isinstance(call, Followed):
        return _together(lambda: results_on(part, mesh))
    tensors = spread_out(part, mesh)
    outs, errors, trace = _together(lambda: results(alone(tensors)))
    if any(errors):
        return outs, errors, trace
    return _together(lambda: [*call.after(outs), *(tensors[leaf] for leaf in written(call))])


def results_on(part: RankTask, mesh: DeviceMesh) -> list[Any]:
    """All that the call gives, and the arguments that it writes to, on DTensors made from the pieces."""
    tensors = spread_out(part, mesh)
    out = part.call(tensors)
    return [*results(out), *(tensors[leaf] for leaf in written(part.call))]


def spread_out(part: RankTask, mesh: DeviceMesh) -> list[DTensor]:
    given = zip(part.pieces, part.placements, part.shapes, part.strides, strict=True)
    return [
        DTensor.from_local(
            piece.to(part.device), mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
        )
        for piece, placements, shape, stride in given
    ]


def placement_text(out: Any) -> str:
    if not isinstance(out, DTensor):
        return "-"
    return short(out.placements[0]) if len(out.placements) == 1 else f"({shorts(out.placements)})"


def _check_shapes(outs: Sequence[Any]) -> None:
    for out in outs:
        if isinstance(out, DTensor) and all(map(is_plain, out.placements)):
            held = tuple(out.to_local().shape)
            asked = _asked(out)
            if held != asked:
                said = f"its piece has shape {held}, {placement_text(out)} of {tuple(out.shape)} is {asked}"
                raise Misshapen(said)


def _asked(out: DTensor) -> tuple[int, ...]:
    try:
        return shapes_on(out.shape, out.placements, tuple(out.device_mesh.shape))[dist.get_rank()]
    except NoSuchDim as problem:
        raise Misshapen(str(problem)) from None


def _local(out: Any) -> Any:
    return out.to_local().detach().cpu().clone() if isinstance(out, DTensor) else out


def _whole(out: Any) -> Any:
    if not isinstance(out, DTensor):
        return out.detach().cpu() if isinstance(out, Tensor) else out
    return out.full_tensor().detach().cpu()


def _together(work: Callable[[], Any]) -> tuple[Any, tuple[str, ...], str]:
    """Run it on every rank, then tell each other who raised: nobody is left waiting for a rank that is gone."""
    value, error, trace = None, "", ""
    try:
        value = work()
    except Exception as raised:  # why: whatever DTensor raises is the answer that this rank was asked for
        error, trace = in_a_line(raised), traceback.format_exc()
    flag = torch.tensor([float(bool(error))])
    dist.all_reduce(flag)
    if not flag.item():
        return value, (), ""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, error)
    return value, tuple(every), trace
