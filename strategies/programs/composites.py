"""Functions that torch computes by other ops before DTensor is asked, such as `torch.matmul`, called as torch's OpInfo calls them.

DTensor has no rule for them: it sees the ops that they call, of which one may give the next what is wrong, or what it refuses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from localtensor._util import drawn_samples
from localtensor.layout import is_inexact
from strategies.inputs.opinfo_samples import database, evenly, opinfo_sizes, seed_all
from strategies.inputs.typed_values import accepts
from strategies.model.arguments import argument_kind
from strategies.model.call_signature import diverse_subset
from strategies.model.kernels import REJECTIONS
from strategies.model.oracle import run_stable_oracle
from strategies.model.rule import Program, Sample, call_of
from strategies.programs.mesh_validation import one_sharded
from strategies.programs.run.real_run import run_simulated_programs
from strategies.programs.run.verdict import Confirmation, is_claimed
from strategies.torch_api import dtensor
from strategies.torch_api.code_places import without_numbers

DRAWN, KEPT, MOST_NUMEL = 24, 10, 512
"""Calls of one OpInfo that are looked at, calls that are kept of an overload, and the most elements of a tensor."""
LAYOUTS = 4
GRADIENT = "grad"


def composite_programs(mesh: tuple[int, ...], *, seed: int, share: int = 0, shares: int = 1) -> list[Program]:
    """Calls of overloads that torch computes by others, in several layouts of their tensors on a mesh of one axis.

    Of `shares` equal parts of the OpInfos that of number `share` is used.
    """
    return [
        Program(sample, mesh, layout, "", seed)
        for sample in composite_samples(seed, share, shares)
        for layout in _layouts(sample, mesh, seed)
    ]


def composite_samples(seed: int, share: int = 0, shares: int = 1) -> tuple[Sample, ...]:
    """Few different calls of each of these overloads, of float32 and even sizes."""
    registered = dtensor.registered_overloads()
    found: dict[str, list[Sample]] = {}
    for info in database()[share::shares]:
        packet = getattr(torch.ops.aten, info.aten_name or info.name, None)
        names = packet.overloads() if packet is not None and torch.float32 in info.supported_dtypes("cpu") else ()
        ops = [getattr(packet, name) for name in names]
        ops = [op for op in ops if op not in registered and not op._schema.is_mutable and dtensor.is_composite(op)]
        for sample in _calls(info, ops, seed) if ops else ():
            found.setdefault(sample.op, []).append(sample)
    kept = [sample for calls in found.values() for sample in diverse_subset(calls, KEPT)]
    return tuple(sample for sample in kept if run_stable_oracle(sample, seed=seed) is not None)


def _calls(info: Any, ops: Sequence[torch._ops.OpOverload], seed: int) -> Iterator[Sample]:
    """The calls of the OpInfo, each by the first of the overloads that takes it."""
    seed_all(seed, info.formatted_name, "composite")
    with opinfo_sizes("even"), drawn_samples(info, "cpu", torch.float32) as drawn:
        try:
            few = evenly(list(drawn), DRAWN)
        except REJECTIONS:
            return
    for one in few:
        for op in ops:
            call, tensors = call_of(op, (one.input, *one.args), one.kwargs)
            sample = Sample(call, tuple(tensors), f"{info.formatted_name}, composite")
            if _is_small(tensors) and _takes(op, (one.input, *one.args), one.kwargs) and accepts(sample):
                yield sample
                break


def _takes(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether each tensor is given for a tensor: torch takes a plain one for a list of numbers, too, and a DTensor not."""
    kinds = {a.name: argument_kind(a) for a in op._schema.arguments}
    given = {**dict(zip(kinds, args, strict=False)), **kwargs}
    return all(kinds.get(name) == "Tensor" for name, value in given.items() if isinstance(value, Tensor))


def _is_small(tensors: Sequence[Tensor]) -> bool:
    plain = all(x.layout == torch.strided and 0 < x.numel() <= MOST_NUMEL for x in tensors)
    return plain and any(x.ndim and is_inexact(x) for x in tensors)


def _layouts(sample: Sample, mesh: tuple[int, ...], seed: int) -> list[tuple[tuple[Placement, ...], ...]]:
    """All tensors whole; their first dims sharded; one of them sharded."""
    rows = tuple((Shard(0) if x.ndim and len(x) >= mesh[0] else Replicate(),) for x in sample.tensors)
    single = [program.inputs for program in one_sharded(sample, mesh, seed)]
    return list(dict.fromkeys([((Replicate(),),) * len(rows), rows, *single]))[:LAYOUTS]


def wrong_composites(programs: Sequence[Program]) -> list[tuple[Program, Confirmation]]:
    """The calls that are wrong or refused on simulated ranks, and the gradients of those that are right: one of each overload and failure."""
    played = _played(programs)
    right = [p for p, found in played if not found.wrong and not found.refused]
    played += _played([replace(p, then=GRADIENT) for p in right])
    made: dict[tuple[str, str, str], tuple[Program, Confirmation]] = {}
    for program, found in played:
        if found.wrong or (found.refused and is_claimed(found.refused)):
            failure = "" if found.wrong else without_numbers(found.refused)
            made.setdefault((program.sample.op, program.then, failure), (program, found))
    return list(made.values())


def _played(programs: Sequence[Program]) -> list[tuple[Program, Confirmation]]:
    return list(zip(programs, run_simulated_programs(programs), strict=True))
