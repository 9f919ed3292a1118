"""Other forms of a call that an op is really given: dims spelled the other way, operands of unequal length."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from strategies.rules import Call, Sample, overload

_DIM_NAMES = {"dim", "dims", "dim0", "dim1", "dim2", "start_dim", "end_dim", "axis"}


def respelled(sample: Sample) -> list[Sample]:
    """The same call with its dims spelled the other way: 1 as -1 of two dims, -1 as 1.

    A rule that compares `dim` with a shard dim is often wrong in just one of the spellings.  The
    caller must check that the op gives the same: for unsqueeze and stack -1 counts one dim more,
    which is why there are two candidates.  Ops whose name begins with an underscore trust their caller:
    `_fft_r2c` with a negative dim crashes the process (2.13), so they keep the dims that they came with.
    """
    if not sample.tensors or sample.op.split(".")[1].startswith("_"):
        return []
    schema = overload(sample.op)._schema.arguments
    spots = {a.name for a in schema if a.name in _DIM_NAMES and "int" in str(a.type)}
    made = []
    for ndim in (sample.tensors[0].ndim, sample.tensors[0].ndim + 1):
        args = tuple(_other(v, ndim) if a.name in spots else v for a, v in zip(schema, sample.call.args, strict=False))
        kwargs = tuple((name, _other(v, ndim) if name in spots else v) for name, v in sample.call.kwargs)
        if (args, kwargs) != (sample.call.args, sample.call.kwargs):
            made.append(replace(sample, call=Call(sample.op, args, kwargs), origin=f"{sample.origin}, dims respelled"))
    return made


def shortened(sample: Sample) -> list[Sample]:
    """The same call with one operand shorter than the first along one dim: what gather and scatter take.

    Rules that pair the shards of two operands often assume that they are equally long.  Ops that
    trust their caller (underscore, native_, backward) are not asked: they would read past the end.
    """
    packet = sample.op.split(".")[1]
    if packet.startswith(("_", "native_")) or "backward" in packet or not sample.tensors:
        return []
    first, made = sample.tensors[0], []
    for i, other in enumerate(sample.tensors[1:], 1):
        for dim in range(other.ndim if other.ndim == first.ndim else 0):
            if other.shape[dim] == first.shape[dim] and other.shape[dim] >= 4:
                short = other.narrow(dim, 0, other.shape[dim] // 2 + 1).clone()
                tensors = (*sample.tensors[:i], short, *sample.tensors[i + 1 :])
                made.append(replace(sample, tensors=tensors, origin=f"{sample.origin}, operand {i} shortened"))
    return made


def _other(value: Any, ndim: int) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_other(v, ndim) for v in value)
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    return value - ndim if value >= 0 else value + ndim
