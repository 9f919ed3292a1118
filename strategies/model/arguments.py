"""The arguments of a call by name, whole tensors in place, and calls made from them as torch's dispatcher hands them on.

Whatever a user writes, a rule sees one form: every argument by position but for those that the schema
wants by keyword, and neither trailing defaults nor keywords that have their default.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from strategies.model.rule import Leaf, Sample, call_of, overload

DIMS = frozenset({"dim", "dims", "dim0", "dim1", "dim2", "start_dim", "end_dim", "axis"})
"""Names of the arguments that hold dims."""
INDICES = ("index", "indices", "idx", "target")
"""What the names of arguments contain whose integers are places in another tensor."""
PLAIN = frozenset({"self", "other", "input", "tensors", "tensor1", "tensor2", "mat2", "batch1", "batch2", "vec2",
                   "value", "values", "source", "src", "x"})  # fmt: skip
"""Names of the arguments whose integers are numbers to compute with: no places, lengths, counts or pivots."""

SORTED = frozenset({"sorted_sequence", "boundaries"})
"""Names of the arguments whose values must stand in order: searched in any other way they give anything."""


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of a schema; `kind` is its type as torch writes it."""

    name: str
    kind: str
    keyword: bool
    optional: bool
    default: Any
    """What the schema gives it; `...` where it must be given."""


@functools.cache
def schema(op: str) -> tuple[Argument, ...]:
    """The arguments of an overload, in order."""

    def described(a: Any) -> Argument:
        kind = str(a.type)
        default = a.default_value if a.has_default_value() else ...
        return Argument(a.name, kind, a.kwarg_only, kind.startswith("Optional"), default)

    return tuple(map(described, overload(op)._schema.arguments))


def values(sample: Sample) -> dict[str, Any]:
    """Every argument by name, defaults included, with its tensors.  A keyword of no schema is kept as it is."""
    known, (args, kwargs) = schema(sample.op), sample.call.filled(sample.tensors)
    found = {a.name: a.default for a in known if a.default is not ...}
    return found | {a.name: v for a, v in zip(known, args, strict=False)} | kwargs


def called(sample: Sample, given: Mapping[str, Any], what: str) -> Sample:
    """The same op with these arguments, as the dispatcher would hand the call on; `what` is said of its origin."""
    known = schema(sample.op)
    args = [given[a.name] for a in known if not a.keyword and a.name in given]
    positional = [a for a in known if not a.keyword][: len(args)]
    while args and _is_default(args[-1], positional[len(args) - 1]):
        args.pop()
    named = {a.name: given[a.name] for a in known if a.keyword and a.name in given}
    kwargs = {a.name: v for a in known if a.keyword and not _is_default(v := named.get(a.name, a.default), a)}
    call, tensors = call_of(overload(sample.op), args, kwargs)
    return Sample(call, tuple(tensors), f"{sample.origin}, {what}")


def _is_default(value: Any, argument: Argument) -> bool:
    if isinstance(value, Tensor) or argument.default is ...:
        return value is argument.default
    return type(value) is type(argument.default) and bool(value == argument.default)


def with_tensors(sample: Sample, changed: Mapping[int, Tensor], what: str) -> Sample:
    """The same call on other tensors, by their number."""
    tensors = tuple(changed.get(i, x) for i, x in enumerate(sample.tensors))
    return replace(sample, tensors=tensors, origin=f"{sample.origin}, {what}")


def names(sample: Sample) -> tuple[str, ...]:
    """For each tensor of the call, by number, the argument that it stands in."""
    found: dict[int, str] = {}

    def walk(value: Any, name: str) -> None:
        if type(value) is Leaf:
            found[value.index] = name
        elif isinstance(value, (list, tuple)):
            for item in value:
                walk(item, name)

    for argument, value in zip(schema(sample.op), sample.call.args, strict=False):
        walk(value, argument.name)
    for name, value in sample.call.kwargs:
        walk(value, name)
    return tuple(found.get(i, "") for i in range(len(sample.tensors)))


def is_index(name: str) -> bool:
    return any(word in name for word in INDICES)


def is_places(x: Tensor) -> bool:
    """Whether these may be places in another tensor."""
    return x.dtype in (torch.int64, torch.int32)


def repeats_sizes(name: str) -> bool:
    """Whether an argument of that name says once more what the sizes say, as ratios.

    2.13: where its scales and its sizes do not agree, `_upsample_bilinear2d_aa` reads past the end, and gives left-over
    memory, another in each run.
    """
    return name.startswith("scales")


_UNCHECKED = ("lengths", "offsets", "pivots", "cum_seq")
"""What the names of arguments contain whose numbers say where in memory an op reads, and are not checked."""


@functools.cache
def trusts(op: str) -> bool:
    """Whether the op trusts its caller.

    Such ops do not check sizes, dims and counts: with others than their caller would give they read past the
    end, and the process dies.  2.13: `_fft_r2c` with a negative dim, `segment_reduce` with lengths that are
    longer than its data, `linalg_ldl_solve` with pivots of another matrix.
    """
    packet = op.split(".")[1]
    inner = packet.startswith(("_", "native_")) or "backward" in packet
    return inner or any(word in a.name for a in schema(op) for word in _UNCHECKED)
