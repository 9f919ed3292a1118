"""One call that DTensor has made, as a program recorded it: whether DTensor is wrong for it, and which function of torch is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor.placement_types import Placement

from localtensor.errors import LocalTensorError
from strategies.model.kernels import REJECTIONS
from strategies.model.rule import Program, Sample, call_of, placements_text
from strategies.programs.run.real_run import run_simulated_programs
from strategies.sweep.causes.attribution import Attributor, program_work


def wrong_call(
    op: torch._ops.OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    layouts: Sequence[Sequence[Placement]],
    mesh: Sequence[int],
) -> str:
    """What is wrong with a call on DTensors, and the function of torch that is the cause; empty if the call is right.

    `args` and `kwargs` hold whole tensors; `layouts` has for each of them, in their order, one placement for each axis of the mesh.
    The call runs through DTensor on simulated ranks, and its results are compared with those on whole tensors.

    >>> from torch.distributed.tensor import Shard
    >>> wrong_call(torch.ops.aten.neg.default, [torch.arange(4.0)], {}, [[Shard(0)]], [2])
    ''
    """
    call, tensors = call_of(op, args, dict(kwargs))
    sample = Sample(call, tuple(x.detach() for x in tensors), "a call of the program")
    program = Program(sample, tuple(mesh), tuple(map(tuple, layouts)))
    found = run_simulated_programs([program])[0]
    if not found.wrong:
        return ""
    try:
        cause = Attributor(program_work(program), judged=False, program=program).cause()
    except (*REJECTIONS, LocalTensorError):
        cause = None
    where = f", from {cause.place}" if cause is not None and cause.place is not None else ""
    held = ", ".join(map(placements_text, program.inputs))
    return f"DTensor is wrong for {call.op} of {held}{where}: {found.wrong}"
