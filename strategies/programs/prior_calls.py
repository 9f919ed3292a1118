"""The same op called before with one other argument: what DTensor has kept of that call must not serve this one.

DTensor keeps what it propagates by the specs of the tensors and by those arguments that a rule's registration names
(`RuntimeSchemaInfo`, torch/distributed/tensor/_op_schema.py).  An argument that it forgets to name may change the shape of a result,
which then has that of the call before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.placement_types import Placement

from strategies.inputs.variants.undrawn import FIXED_VALUES, KEPT_ARGUMENTS
from strategies.model.arguments import argument_kind, argument_values, call_with, schema_arguments, trusts_caller
from strategies.model.call_signature import prior_call_text
from strategies.model.kernels import REJECTIONS, run_call
from strategies.model.oracle import mutates
from strategies.model.rule import Program, Sample, overload

Metadata = tuple[tuple[torch.Size, torch.dtype] | None, ...]


def prior_call_programs(
    sample: Sample, inputs: Sequence[tuple[Placement, ...]], mesh: tuple[int, ...], seed: int
) -> list[Program]:
    """The call after one with another value of an argument, for each argument that changes the shapes or dtypes of the results.

    `inputs` are the placements of the tensors along the last axis, of which the first are taken; replicas where there are none.
    """
    taken = inputs[0] if inputs else (Replicate(),) * len(sample.tensors)
    layouts = tuple((*(Replicate(),) * (len(mesh) - 1), p) for p in taken)
    return [Program(sample, mesh, layouts, then, seed) for then in _prior_calls(sample)]


def _prior_calls(sample: Sample) -> Iterator[str]:
    mine = _metadata(sample)
    if mine is None or trusts_caller(sample.op):
        return
    given = argument_values(sample)
    for a, schema in zip(schema_arguments(sample.op), overload(sample.op)._schema.arguments, strict=True):
        if a.name in KEPT_ARGUMENTS or schema.is_out:
            continue
        for value in _others(given.get(a.name), argument_kind(schema)):
            other = call_with(sample, given | {a.name: value}, "")
            found = _metadata(other)
            if found is not None and found != mine:
                yield prior_call_text(other.call)
                break


def _others(value: object, kind: str) -> tuple[Any, ...]:
    """Other values of an argument of that kind."""
    if isinstance(value, bool):
        return (not value,)
    if isinstance(value, int):
        return value + 1, value - 1, 1
    if isinstance(value, (list, tuple)) and value and all(type(item) is int for item in value):
        return tuple([*value[:i], item + 1, *value[i + 1 :]] for i, item in enumerate(value))
    return tuple(FIXED_VALUES.get(kind, ())) if value is None or isinstance(value, torch.dtype) else ()


def _metadata(sample: Sample) -> Metadata | None:
    """The shapes and dtypes of the results on whole tensors; None if the op refuses the call."""
    try:
        with torch.no_grad():
            _, outs = run_call(sample.call, [x.clone() for x in sample.tensors], mutates=mutates(sample.op))
    except REJECTIONS:
        return None
    return tuple((x.shape, x.dtype) if isinstance(x, Tensor) else None for x in outs)
