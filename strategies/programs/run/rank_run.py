"""One rank's run of a case: DTensors from its pieces, the op, the gathered results.

The workers of `localtensor.processes.pool` import this module; it must not import OpInfo.
"""

from __future__ import annotations

import functools
import logging
import multiprocessing
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from localtensor._util import pickling
from localtensor.errors import NoSuchDim, error_in_one_line
from localtensor.layout import is_standard, local_shapes_on, short, shorts
from strategies.base.time_limit import DoesNotReturn
from strategies.model.rule import Call, flat_results, written_leaves
from strategies.programs.run.follow_ups import CallWithFollowUp
from strategies.torch_api.code_places import no_return_error, rule_limit
from strategies.torch_api.mesh_and_caches import clear_dtensor_caches, number_in_mesh, world_mesh
from strategies.torch_api.rank_runs import CALL_SECONDS
from strategies.torch_api.user_modules import import_rules


@dataclass(frozen=True, slots=True)
class ProgramRankTask:
    """One rank's share of a case: its pieces, and the whole tensors' shapes and strides.

    `placements` has for each tensor one placement for each axis of `mesh`; an empty mesh is one axis of all ranks.
    """

    call: Call
    placements: tuple[tuple[Placement, ...], ...]
    pieces: tuple[Any, ...]
    shapes: tuple[tuple[int, ...], ...]
    strides: tuple[tuple[int, ...], ...]
    device: str
    home: tuple[str, str] = ("", "")
    """The user's rules module, which is imported before the run, and its folder."""
    mesh: tuple[int, ...] = ()
    flattened: bool = False
    seconds: float = CALL_SECONDS
    """Processor time after which the call is taken not to return."""


@dataclass(frozen=True, slots=True)
class ProgramRankResult:
    """The result of one rank.

    `failed` is the stage in which a rank raised ("op" or "full_tensor"), `errors` the message of each rank, by rank;
    `pieces` are the local results, `whole` the gathered ones.  A placement is `S(0)` on one axis, `(S(0), R)` on two,
    and `-` for a result that is no DTensor.
    """

    failed: str
    errors: tuple[str, ...]
    placements: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...] | None, ...] = ()
    pieces: tuple[Any, ...] = ()
    whole: tuple[Any, ...] = ()
    trace: str = ""


class WrongPieceShape(Exception):
    """A rank's piece does not have the shape of its placement, so that the pieces cannot be gathered."""


_mesh = functools.cache(world_mesh)


@functools.cache
def drop_native_messages(pid: int) -> None:
    """Drop what native code writes to stderr in this process of that number, if it is a worker: Python's own messages stay.

    gloo ends a process whose peers send a piece of another size, and writes several lines.  That the rank died is a result here, and
    is reported as one.
    """
    if multiprocessing.parent_process() is None:
        return
    sys.stderr.flush()
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1, encoding="utf-8", errors="backslashreplace")
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)


def run_pickled_task(sent: bytes) -> bytes:
    """Run a pickled `ProgramRankTask` and return the pickled `ProgramRankResult`.  All ranks return together, even if one raises."""
    drop_native_messages(os.getpid())
    part: ProgramRankTask = pickling.loads(sent)
    if part.home[0]:
        import_rules(*part.home)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if torch.device(part.device).type == "cuda":  # else DeviceMesh wants a GPU for each rank
            torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
        logging.disable()  # permanently: torch logs the traceback of every refusal, which is a result here
        mesh = _mesh(part.device, part.mesh or (dist.get_world_size(),), part.flattened)
        clear_dtensor_caches()
        return pickling.dumps(run_task(part, mesh))


def run_task(part: ProgramRankTask, mesh: DeviceMesh) -> ProgramRankResult:
    """Run one rank's task on a mesh of all ranks of the default group, which run theirs at the same time."""
    outs, errors, trace = _run(part, mesh)
    if any(errors):
        return ProgramRankResult("op", errors, trace=trace)
    placements = tuple(map(placement_text, outs))
    pieces = tuple(_local(o) for o in outs)
    shapes = tuple(tuple(p.shape) if isinstance(p, Tensor) else None for p in pieces)
    whole, errors, trace = _synchronised(functools.partial(_check_shapes, outs))
    if not errors:  # gloo ends the process if the sizes of the ranks' pieces do not match
        whole, errors, trace = _synchronised(lambda: tuple(_whole(o) for o in outs))
    failed = "full_tensor" if any(errors) else ""
    return ProgramRankResult(failed, errors, placements, shapes, pieces, () if errors else whole, trace)


def _run(part: ProgramRankTask, mesh: DeviceMesh) -> tuple[Any, tuple[str, ...], str]:
    """All results to be compared.  Ranks report an exception of the op before their peers go on to the next step."""
    call = part.call
    alone = call.alone if isinstance(call, CallWithFollowUp) else None
    if alone is None or not isinstance(call, CallWithFollowUp):
        return _synchronised(lambda: call_results(part, mesh), part.seconds)
    tensors = inputs_as_dtensors(part, mesh)
    outs, errors, trace = _synchronised(lambda: flat_results(alone(tensors)), part.seconds)
    if any(errors):
        return outs, errors, trace
    return _synchronised(lambda: [*call.after(outs), *(tensors[leaf] for leaf in written_leaves(call))])


def call_results(part: ProgramRankTask, mesh: DeviceMesh) -> list[Any]:
    """The results of the call on DTensors made from the pieces, and the arguments that it writes to."""
    tensors = inputs_as_dtensors(part, mesh)
    out = part.call(tensors)
    return [*flat_results(out), *(tensors[leaf] for leaf in written_leaves(part.call))]


def inputs_as_dtensors(part: ProgramRankTask, mesh: DeviceMesh) -> list[DTensor]:
    given = zip(part.pieces, part.placements, part.shapes, part.strides, strict=True)
    make = functools.partial(DTensor.from_local, device_mesh=mesh, run_check=False)
    return [
        make(piece.to(part.device), placements=placements, shape=torch.Size(shape), stride=stride)
        for piece, placements, shape, stride in given
    ]


def placement_text(out: object) -> str:
    if not isinstance(out, DTensor):
        return "-"
    return short(out.placements[0]) if len(out.placements) == 1 else f"({shorts(out.placements)})"


def _check_shapes(outs: Sequence[Any]) -> None:
    for out in outs:
        number = number_in_mesh(out.device_mesh) if isinstance(out, DTensor) else None
        if number is not None and (wrong := misfit(out, tuple(out.to_local().shape), number)):
            raise wrong


def misfit(out: DTensor, got: tuple[int, ...], rank: int) -> WrongPieceShape | None:
    """The error for a rank's piece of that shape, where the shape and the placement of the DTensor ask for another one."""
    if not all(map(is_standard, out.placements)):
        return None
    try:
        want = local_shapes_on(out.shape, out.placements, tuple(out.device_mesh.shape))[rank]
    except NoSuchDim:
        text = f"{placement_text(out)} names a dim that a tensor of shape {tuple(out.shape)} does not have"
        return WrongPieceShape(f"its piece has shape {got}, and {text}")
    text = f"its piece has shape {got}, {placement_text(out)} of {tuple(out.shape)} is {want}"
    return WrongPieceShape(text) if got != want else None


def _local(out: object) -> object:
    return out.to_local().detach().cpu().clone() if isinstance(out, DTensor) else out


def _whole(out: object) -> object:
    if not isinstance(out, DTensor):
        return out.detach().cpu() if isinstance(out, Tensor) else out
    return out.full_tensor().detach().cpu()


def _synchronised(work: Callable[[], Any], seconds: float = CALL_SECONDS) -> tuple[Any, tuple[str, ...], str]:
    """Run the function on every rank and exchange the errors, so that no rank waits for one that raised.

    Returns the value, the message of each rank if one raised, and this rank's traceback.
    """
    value, error, trace = None, "", ""
    try:
        with rule_limit(seconds).applied():
            value = work()
    except DoesNotReturn as stuck:
        error = no_return_error(stuck)
    except Exception as raised:  # why: any exception is this rank's result, reported with its traceback
        error, trace = error_in_one_line(raised), traceback.format_exc()
        __raised__ = error  # noqa: F841  # what is said of this rank if a peer waits in the op, and does not come here
    flag = torch.tensor([float(bool(error))])
    dist.all_reduce(flag)
    if not flag.item():
        return value, (), ""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, error)
    return value, tuple(every), trace
