"""The arguments of a call by name, and calls made from them in the normal form of torch's dispatcher.

A rule sees only that form, however the user wrote the call: arguments by position except keyword-only ones, without
trailing defaults and without keywords that equal their default.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from strategies.model.rule import Sample, call_of, leaf_numbers, overload

DIMS = frozenset({"dim", "dims", "dim0", "dim1", "dim2", "start_dim", "end_dim", "axis"})
"""Names of arguments that hold dims."""
INDICES = ("index", "indices", "idx", "target")
"""Parts of the names of arguments whose integers are positions in another tensor."""
OPERANDS = frozenset({
    "self", "other", "input", "tensors", "tensor1", "tensor2", "mat2", "batch1", "batch2", "vec2", "value", "values",
    "source", "src", "x",
})  # fmt: skip
"""Names of arguments whose integers are operands of arithmetic: no positions, lengths, counts or pivots."""
SORTED_ARGUMENTS = frozenset({"sorted_sequence", "boundaries"})
"""Names of arguments whose values must be sorted: the result of a search in an unsorted tensor is undefined."""


@dataclass(frozen=True, slots=True)
class SchemaArgument:
    """One argument of a schema; `kind` is its type as torch prints it."""

    name: str
    kind: str
    keyword: bool
    optional: bool
    default: Any
    """The schema's default; `...` for an argument without one."""


@functools.cache
def schema_arguments(op: str) -> tuple[SchemaArgument, ...]:
    """The arguments of an overload, in order."""
    return tuple(
        SchemaArgument(
            name=a.name,
            kind=str(a.type),
            keyword=a.kwarg_only,
            optional=str(a.type).startswith("Optional"),
            default=a.default_value if a.has_default_value() else ...,
        )
        for a in overload(op)._schema.arguments
    )


def argument_values(sample: Sample) -> dict[str, Any]:
    """Every argument by name, defaults included, with tensors in place.  A keyword that the schema lacks is kept."""
    known, (args, kwargs) = schema_arguments(sample.op), sample.call.filled(sample.tensors)
    defaults = {a.name: a.default for a in known if a.default is not ...}
    return defaults | {a.name: v for a, v in zip(known, args, strict=False)} | kwargs


def call_with(sample: Sample, given: Mapping[str, Any], what: str) -> Sample:
    """The same op with these arguments, in the dispatcher's form; `what` is appended to its origin."""
    known = schema_arguments(sample.op)
    args = [given[a.name] for a in known if not a.keyword and a.name in given]
    positional = [a for a in known if not a.keyword][: len(args)]
    while args and _is_default(args[-1], positional[len(args) - 1]):
        args.pop()
    named = {a.name: given[a.name] for a in known if a.keyword and a.name in given}
    kwargs = {a.name: v for a in known if a.keyword and not _is_default(v := named.get(a.name, a.default), a)}
    call, tensors = call_of(overload(sample.op), args, kwargs)
    return Sample(call, tuple(tensors), f"{sample.origin}, {what}")


def _is_default(value: Any, argument: SchemaArgument) -> bool:
    if isinstance(value, Tensor) or argument.default is ...:
        return value is argument.default
    return type(value) is type(argument.default) and bool(value == argument.default)


def with_tensors(sample: Sample, changed: Mapping[int, Tensor], what: str) -> Sample:
    """The same call with some tensors replaced, by leaf number; `what` is appended to its origin."""
    tensors = tuple(changed.get(i, x) for i, x in enumerate(sample.tensors))
    return replace(sample, tensors=tensors, origin=f"{sample.origin}, {what}")


def argument_names(sample: Sample) -> tuple[str, ...]:
    """For each tensor of the call, by leaf number, the name of its argument."""
    found = {leaf: name for name, value in sample.call.named().items() for leaf in leaf_numbers(value)}
    return tuple(found.get(i, "") for i in range(len(sample.tensors)))


def is_index(name: str) -> bool:
    """Whether the integers of an argument of that name are positions in another tensor."""
    return any(word in name for word in INDICES)


def is_index_dtype(x: Tensor) -> bool:
    """Whether these may be positions in another tensor, by their dtype."""
    return x.dtype in (torch.int64, torch.int32)


def repeats_sizes(name: str) -> bool:
    """Whether an argument of that name repeats the sizes as ratios.

    torch 2.13: where scales and sizes disagree, `_upsample_bilinear2d_aa` reads out of bounds and returns uninitialised
    memory, different in each run.
    """
    return name.startswith("scales")


_UNCHECKED = ("lengths", "offsets", "pivots", "cum_seq")
"""Parts of the names of arguments that determine where an op reads in memory and that it does not check."""


@functools.cache
def trusts_caller(op: str) -> bool:
    """Whether the op does not check its sizes, dims and counts.

    With values that its usual caller would not pass, such an op reads out of bounds and may crash the process.  torch
    2.13: `_fft_r2c` with a negative dim, `segment_reduce` with lengths beyond its data, `linalg_ldl_solve` with pivots
    of another matrix.
    """
    packet = op.split(".")[1]
    inner = packet.startswith(("_", "native_")) or "backward" in packet
    return inner or any(word in a.name for a in schema_arguments(op) for word in _UNCHECKED)
