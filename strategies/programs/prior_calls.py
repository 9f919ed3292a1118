"""The same op called before with one other argument: what DTensor has kept of that call must not serve this one.

DTensor keeps what it propagates by the specs of the tensors and by those arguments that a rule's registration names
(`RuntimeSchemaInfo`, torch/distributed/tensor/_op_schema.py).  An argument that it forgets to name may change the shape of a result, or
its strides, which are then those of the call before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.placement_types import Placement

from strategies.inputs.variants.undrawn import FIXED_VALUES, KEPT_ARGUMENTS
from strategies.model.arguments import (
    argument_kind,
    argument_values,
    call_with,
    schema_arguments,
    trusts_caller,
    with_tensors,
)
from strategies.model.call_signature import prior_call_text
from strategies.model.kernels import REJECTIONS, run_call
from strategies.model.oracle import mutates
from strategies.model.rule import Program, Sample, dtype_class, overload, split_prior_call
from strategies.programs.run.follow_ups import CHAIN_SIGN, STRIDES

Metadata = tuple[tuple[torch.Size, torch.dtype] | None, ...]
Strides = tuple[tuple[int, ...] | None, ...]
OPTIONS = ("ScalarType", "MemoryFormat")
"""Kinds of arguments that say how a result is held: an op that trusts its caller takes any of them."""


def prior_call_programs(
    sample: Sample, inputs: Sequence[tuple[Placement, ...]], mesh: tuple[int, ...], seed: int
) -> list[Program]:
    """The call after one with another value of an argument, for each argument that changes the metadata of the results.

    Where it changes strides alone, the program reads these: `strides | again(x0, ...)`.  `inputs` are the placements of the tensors along
    the last axis, of which the first are taken; replicas where there are none.
    """
    taken = inputs[0] if inputs else (Replicate(),) * len(sample.tensors)
    layouts = tuple((*(Replicate(),) * (len(mesh) - 1), p) for p in taken)
    return [Program(one, mesh, layouts, then, seed) for one, then in _prior_calls(sample)]


def _prior_calls(sample: Sample) -> Iterator[tuple[Sample, str]]:
    for a, schema in zip(schema_arguments(sample.op), overload(sample.op)._schema.arguments, strict=True):
        kind = argument_kind(schema)
        if a.name in KEPT_ARGUMENTS or schema.is_out or (trusts_caller(sample.op) and kind not in OPTIONS):
            continue
        one = _of_images(sample) if kind == "MemoryFormat" else sample
        if then := _prior_call(one, a.name, kind):
            yield one, then


def _of_images(sample: Sample) -> Sample:
    """The call on tensors of four dims, which have more than one memory format."""
    sizes = (4, 3, 2, 2)
    made = {i: torch.arange(48).reshape(sizes).to(x.dtype) for i, x in enumerate(sample.tensors)}
    return with_tensors(sample, made, "images")


def _prior_call(sample: Sample, name: str, kind: str) -> str:
    """The step of a call before with another value of that argument; "" if none changes the metadata."""
    given, mine = argument_values(sample), _metadata(sample)
    if mine is None:
        return ""
    others = [call_with(sample, given | {name: value}, "") for value in _others(given.get(name), kind)]
    found = [(other, _metadata(other)) for other in others]
    for part, steps in ((0, ""), (1, f"{STRIDES}{CHAIN_SIGN}")):
        for other, theirs in found:
            if theirs is not None and mine[part] != theirs[part]:
                return steps + prior_call_text(other.call)
    return ""


def _others(value: object, kind: str) -> tuple[Any, ...]:
    """Other values of an argument of that kind."""
    if isinstance(value, bool):
        return (not value,)
    if isinstance(value, int):
        return value + 1, value - 1, 1
    if isinstance(value, (list, tuple)) and value and all(type(item) is int for item in value):
        return tuple([*value[:i], item + 1, *value[i + 1 :]] for i, item in enumerate(value))
    return tuple(FIXED_VALUES.get(kind, ())) if value is None or isinstance(value, torch.dtype) else ()


def _metadata(sample: Sample) -> tuple[Metadata, Strides] | None:
    """Shapes and dtypes of the results on whole tensors, and strides of dims of more than one element; None if the op refuses the call."""
    try:
        with torch.no_grad():
            _, outs = run_call(sample.call, [x.clone() for x in sample.tensors], mutates=mutates(sample.op))
    except REJECTIONS:
        return None
    shapes = tuple((x.shape, x.dtype) if isinstance(x, Tensor) else None for x in outs)
    steps = tuple(
        tuple(s for s, n in zip(x.stride(), x.shape, strict=True) if n > 1) if isinstance(x, Tensor) else None
        for x in outs
    )
    return shapes, steps


def steps_alone(program: Program) -> str:
    """The steps that must be right for the program to be a finding: those beside a prior call, or none, which leaves the op alone."""
    steps, prior = split_prior_call(program.then)
    return steps if prior else ""


def first_of_two_dims(samples: Sequence[Sample], kind: str) -> Sample:
    """The first sample of this class of dtypes with a tensor of two dims or more, on which more arguments have an effect; else the first."""
    own = [one for one in samples if dtype_class(one) == kind]
    return next((one for one in own if any(x.ndim > 1 and x.numel() for x in one.tensors)), own[0])
