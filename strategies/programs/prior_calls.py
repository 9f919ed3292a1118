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

from localtensor.layout import is_standard
from strategies.inputs.variants.undrawn import FIXED_VALUES, KEPT_ARGUMENTS, strings_of
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
from strategies.model.rule import Claim, Program, Sample, dtype_class, overload, split_prior_call
from strategies.programs import mesh_validation
from strategies.programs.chains import is_drawn
from strategies.programs.run.follow_ups import CHAIN_SIGN, STRIDES

Results = tuple[tuple[object, ...], tuple[object, ...], tuple[object, ...]]
"""Of the results: shapes and dtypes, strides, values."""
OPTIONS = ("ScalarType", "MemoryFormat")
"""Kinds of arguments that say how a result is held: an op that trusts its caller takes any of them."""
CHOICES, NUMBERS = ("int", "ints", "bool", "bools", "str"), ("float", "number")
"""Kinds of arguments that select what is computed, and values to compute with."""
VALUES = 2
"""The part of the results that holds their values."""
Layout = tuple[Placement, ...]
Line = tuple[Layout, tuple[Placement | None, ...]]
LINES = 3
"""The most layouts in which a call is tried after one that has other values alone."""


def prior_call_programs(sample: Sample, inputs: Sequence[Layout], mesh: tuple[int, ...], seed: int) -> list[Program]:
    """The call after one with another value of an argument, for each argument that changes the results.

    Where it changes strides alone, the program reads these: `strides | again(x0, ...)`.  `inputs` are the placements of the tensors along
    the last axis, of which the first are taken; the first three where values alone change; replicas where there are none.  Where values
    alone change, those for which the call before has a rule that this one has not are taken, too: of a number to compute with, these alone.
    """
    lines = inputs or [(Replicate(),) * len(sample.tensors)]
    made = []
    for one, other, part, kind in _prior_calls(sample):
        then = (f"{STRIDES}{CHAIN_SIGN}" if part == 1 else "") + prior_call_text(other.call)
        rows = list(lines[:1])
        if part == VALUES:
            rows = [*(lines[:LINES] if kind in CHOICES else ()), *_rules_of_its_own(other, one, mesh, seed)]
        layouts = [tuple((*(Replicate(),) * (len(mesh) - 1), p) for p in row) for row in dict.fromkeys(rows)]
        made += [Program(one, mesh, layout, then, seed) for layout in layouts]
    return made


def _rules_of_its_own(sample: Sample, than: Sample, mesh: tuple[int, ...], seed: int) -> list[Layout]:
    """The first inputs for which that call has a rule along the last axis that the other call has not; none of costly calls."""
    if mesh_validation.is_costly(sample):
        return []
    found = [mesh_validation.oracle_and_claims(one, mesh[-1:], seed) for one in (sample, than)]
    mine, theirs = ({} if isinstance(one, str) else dict(lines_of(sample, one[1][mesh[-1]])) for one in found)
    return [inputs for inputs, outputs in mine.items() if theirs.get(inputs) != outputs][:LINES] if theirs else []


def lines_of(sample: Sample, claims: Sequence[Claim]) -> list[Line]:
    """The different inputs among the claims, with their outputs.

    An input with a placement of DTensor's own, which an op gives and no user makes, is replicated: DTensor then makes it itself.
    """
    found: dict[Layout, Line] = {}
    for claim in claims:
        inputs = tuple(p if p is not None and is_standard(p) else Replicate() for p in claim.rule.inputs)
        if len(inputs) == len(sample.tensors) and all(map(is_drawn, inputs, sample.tensors)):
            found.setdefault(inputs, (inputs, claim.rule.outputs))
    return sorted(found.values(), key=lambda line: all(isinstance(p, Replicate) for p in line[0]))


def _prior_calls(sample: Sample) -> Iterator[tuple[Sample, Sample, int, str]]:
    """The call, the call before, the first part of its results that changes, and the kind of the argument that does it."""
    for a, schema in zip(schema_arguments(sample.op), overload(sample.op)._schema.arguments, strict=True):
        kind = argument_kind(schema)
        if a.name in KEPT_ARGUMENTS or schema.is_out or (trusts_caller(sample.op) and kind not in OPTIONS):
            continue
        one = _of_images(sample) if kind == "MemoryFormat" else sample
        if found := _prior_call(one, a.name, kind):
            yield one, *found, kind


def _of_images(sample: Sample) -> Sample:
    """The call on tensors of four dims, which have more than one memory format."""
    sizes = (4, 3, 2, 2)
    made = {i: torch.arange(48).reshape(sizes).to(x.dtype) for i, x in enumerate(sample.tensors)}
    return with_tensors(sample, made, "images")


def _prior_call(sample: Sample, name: str, kind: str) -> tuple[Sample, int] | None:
    """A call before with another value of that argument, and the first part of its results that changes; None if none does."""
    given, mine = argument_values(sample), _results(sample)
    if mine is None:
        return None
    others = [call_with(sample, given | {name: value}, "") for value in _others(sample, name, kind)]
    found = [(other, _results(other)) for other in others]
    is_random = torch.Tag.nondeterministic_seeded in overload(sample.op).tags
    parts = (0, 1, VALUES) if kind in (*CHOICES, *NUMBERS) and not is_random else (0, 1)
    for part in parts:
        for other, theirs in found:
            if theirs is not None and mine[part] != theirs[part]:
                return other, part
    return None


def _others(sample: Sample, name: str, kind: str) -> tuple[Any, ...]:
    """Other values of an argument of that kind."""
    value = argument_values(sample).get(name)
    if isinstance(value, bool):
        return (not value,)
    if isinstance(value, int):
        return value + 1, value - 1, 1
    if isinstance(value, float):
        return (-value,)
    if isinstance(value, str):
        return tuple(word for word in strings_of(sample, name) if word != value)
    if isinstance(value, (list, tuple)) and value and kind in ("ints", "bools"):
        return tuple(_other_lists([*value]))
    return tuple(FIXED_VALUES.get(kind, ())) if value is None or isinstance(value, torch.dtype) else ()


def _other_lists(items: list[int]) -> Iterator[list[int]]:
    """Each number one more, or each flag turned; then two neighbours in the place of each other: a permutation stays one."""
    for i, item in enumerate(items):
        yield [*items[:i], not item if isinstance(item, bool) else item + 1, *items[i + 1 :]]
    for i in range(len(items) - 1):
        yield [*items[:i], items[i + 1], items[i], *items[i + 2 :]]


def _results(sample: Sample) -> Results | None:
    """What the op gives on whole tensors, with the strides of dims of more than one element; None if it refuses the call."""
    try:
        with torch.no_grad():
            _, outs = run_call(sample.call, [x.clone() for x in sample.tensors], mutates=mutates(sample.op))
    except REJECTIONS:
        return None
    tensors = [x if isinstance(x, Tensor) else None for x in outs]
    shapes = tuple(None if x is None else (x.shape, x.dtype) for x in tensors)
    steps = tuple(
        None if x is None else tuple(s for s, n in zip(x.stride(), x.shape, strict=True) if n > 1) for x in tensors
    )
    return shapes, steps, tuple(None if x is None else str(x.tolist()) for x in tensors)


def steps_alone(program: Program) -> str:
    """The steps that must be right for the program to be a finding: those beside a prior call, or none, which leaves the op alone."""
    steps, prior = split_prior_call(program.then)
    return steps if prior else ""


def first_of_two_dims(samples: Sequence[Sample], kind: str) -> Sample:
    """The first sample of this class of dtypes with a tensor of two dims or more, on which more arguments have an effect; else the first."""
    own = [one for one in samples if dtype_class(one) == kind]
    return next((one for one in own if any(x.ndim > 1 and x.numel() for x in one.tensors)), own[0])
