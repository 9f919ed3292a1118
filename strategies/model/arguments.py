"""The arguments of a call by name and by place, and calls made from them.

`call_with` makes the normal form of torch's dispatcher.  A rule sees only that form, however the user wrote the call:
arguments by position except keyword-only ones, without trailing defaults and without keywords that equal their default.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from strategies.model.rule import Call, Leaf, Sample, call_of, leaf_numbers, overload

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


Path = tuple[int | str, ...]
"""The path to a value: the position or the keyword of its argument, then positions in nested lists."""
Change = Callable[[str, Any], Any]
"""From an argument's name and a value in it, neither tensor nor list, to another value."""


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


def _is_default(value: object, argument: SchemaArgument) -> bool:
    if isinstance(value, Tensor) or argument.default is ...:
        return value is argument.default
    return type(value) is type(argument.default) and bool(value == argument.default)


def with_tensors(sample: Sample, changed: Mapping[int, Tensor], what: str) -> Sample:
    """The same call with some tensors replaced, by leaf number; `what` is appended to its origin."""
    return replace(sample, tensors=changed_tensors(sample, changed), origin=f"{sample.origin}, {what}")


def changed_tensors(sample: Sample, changed: Mapping[int, Tensor]) -> tuple[Tensor, ...]:
    """The tensors of the call, some of them replaced, by leaf number: sorted where the op requires it."""
    names = argument_names(sample)
    return tuple(_ordered(changed[i], names[i]) if i in changed else x for i, x in enumerate(sample.tensors))


def _ordered(x: Tensor, name: str) -> Tensor:
    if name not in SORTED_ARGUMENTS or x.is_complex():
        return x
    wide = x.float() if x.is_floating_point() and x.element_size() == 1 else x  # torch sorts no float8
    rows = wide.sort(-1).values
    return x if torch.equal(rows, wide) else rows.to(x.dtype)  # a view stays one


def argument_names(sample: Sample) -> tuple[str, ...]:
    """For each tensor of the call, by leaf number, the name of its argument."""
    found = {leaf: name for name, value in sample.call.named().items() for leaf in leaf_numbers(value)}
    return tuple([found.get(i, "") for i in range(len(sample.tensors))])


@dataclass(frozen=True, slots=True)
class ScalarArgument:
    """One value of a call that is neither tensor nor list, with its path and the name of its argument."""

    path: Path
    name: str
    value: Any


def counts_dims(name: str) -> bool:
    """Whether an argument of that name holds dims rather than sizes."""
    return name in ("axis", "axes") or name.startswith("dim") or name.endswith(("_dim", "_dims"))


def named_arguments(call: Call) -> list[tuple[int | str, str, Any]]:
    """Every given argument: its position or keyword, its name in the schema, its value."""
    schema = overload(call.op)._schema.arguments
    return [(i, schema[i].name, value) for i, value in enumerate(call.args)] + [(n, n, v) for n, v in call.kwargs]


def scalar_arguments(call: Call) -> list[ScalarArgument]:
    """Every value that is neither tensor nor list, in the order of the call."""

    def within(path: Path, name: str, value: object) -> Iterator[ScalarArgument]:
        if isinstance(value, (list, tuple)):
            for i, v in enumerate(value):
                yield from within((*path, i), name, v)
        elif not isinstance(value, Leaf):
            yield ScalarArgument(path, name, value)

    return [spot for where, name, value in named_arguments(call) for spot in within((where,), name, value)]


def with_scalars_changed(call: Call, change: Change) -> Call:
    """The call with every value that is neither tensor nor list changed."""

    def walk(name: str, value: object) -> object:
        if isinstance(value, (list, tuple)):
            return type(value)([walk(name, v) for v in value])
        return value if isinstance(value, Leaf) else change(name, value)

    return with_arguments_changed(call, walk)


def with_arguments_changed(call: Call, change: Change) -> Call:
    """The call with every argument changed, lists as a whole."""
    made = {where: change(name, value) for where, name, value in named_arguments(call)}
    return Call(call.op, tuple(made[i] for i in range(len(call.args))), tuple((n, made[n]) for n, _ in call.kwargs))


def with_value_at(call: Call, path: Path, value: object) -> Call:
    """The call with this value at that path."""

    def within(old: Any, rest: Path) -> object:
        if not rest:
            return value
        return type(old)([within(v, rest[1:]) if i == rest[0] else v for i, v in enumerate(old)])

    args = tuple(within(v, path[1:]) if i == path[0] else v for i, v in enumerate(call.args))
    return Call(call.op, args, tuple((n, within(v, path[1:]) if n == path[0] else v) for n, v in call.kwargs))


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
    of another matrix.  The operators of Python, `__rshift__`, are no inner ops.
    """
    packet = op.split(".")[1]
    inner = re.match("_(?!_)|native_", packet) is not None or "backward" in packet
    return inner or any(word in a.name for a in schema_arguments(op) for word in _UNCHECKED)


def argument_kind(argument: torch._C.Argument) -> str:
    """The argument's type as one word, without `Optional`: Tensor, Tensors, number, numbers, int, ints, bool ..."""
    text = str(argument.real_type)
    while text.startswith("Optional["):
        text = text[len("Optional[") : -1]
    words = {
        "number": "number", "Scalar": "number", "SymInt": "int", "List[number]": "numbers", "List[int]": "ints",
        "List[SymInt]": "ints", "List[float]": "floats", "List[bool]": "bools", "List[Tensor]": "Tensors",
        "List[Optional[Tensor]]": "Tensors",
    }  # fmt: skip
    return words.get(text, text)
