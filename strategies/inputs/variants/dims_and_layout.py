"""The type of all input forms, and forms of a call with its dims, indices or memory layout given otherwise.

Dims are counted from the other end, replaced, left out, kept or dropped.  Indices are counted from the end.  Tensors
are transposed in memory, have gaps, or are expanded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from strategies.model import arguments
from strategies.model.kernels import kernel_device
from strategies.model.oracle import strided
from strategies.model.rule import Sample


@dataclass(frozen=True, slots=True)
class InputForm:
    """A named way to make other calls from a sample; `why` is the reason for which it may expose a wrong rule.

    `same` promises equal results, which the caller must check.  Otherwise the op may reject the new call.
    """

    name: str
    why: str
    make: Callable[[Sample], Iterable[Sample]]
    same: bool = False
    weight: int = 1
    """Turns while another form has one: more for forms that make many calls or find much."""
    always: int = 0
    """The number of first samples of an overload on which it is tested in addition to the budget."""


def with_dims_respelled(sample: Sample) -> list[Sample]:
    """The same call with its dims spelled the other way: 1 as -1 of two dims, -1 as 1.

    For unsqueeze and stack -1 counts one dim more, so there are two candidates, and the caller must check which has the
    same results.  Ops that trust their caller keep their dims.
    """
    if not sample.tensors or arguments.trusts_caller(sample.op):
        return []
    ndim = sample.tensors[0].ndim
    candidates = (_dims_changed(sample, partial(_respelled, ndim=n), "dims respelled") for n in (ndim, ndim + 1))
    return [other for found in candidates for other in found]


def _respelled(dim: int, ndim: int) -> int:
    return dim - ndim if dim >= 0 else dim + ndim


def _advanced(dim: int, step: int, ndim: int) -> int:
    return (dim + step) % ndim


def other_dims(sample: Sample) -> Iterator[Sample]:
    """The same call for every other dim in turn; all dims in a list advance by the same step."""
    if not sample.tensors or arguments.trusts_caller(sample.op):
        return
    ndim = sample.tensors[0].ndim
    for step in range(1, ndim):
        yield from _dims_changed(sample, partial(_advanced, step=step, ndim=ndim), f"dims moved on by {step}")


def with_no_dims(sample: Sample) -> Iterator[Sample]:
    """The same call with an empty list of dims, with None, and with all dims listed."""
    if arguments.trusts_caller(sample.op) or not sample.tensors:
        return
    given, ndim = arguments.argument_values(sample), sample.tensors[0].ndim
    for a in arguments.schema_arguments(sample.op):
        if a.name not in arguments.DIMS or a.name not in given:
            continue
        if a.optional:
            yield arguments.call_with(sample, given | {a.name: None}, f"{a.name}=None")
        if "List[int]" in a.kind:
            yield arguments.call_with(sample, given | {a.name: []}, f"{a.name}=[]")
            yield arguments.call_with(sample, given | {a.name: list(range(ndim))}, f"{a.name} is all dims")


def with_keepdim_negated(sample: Sample) -> Iterator[Sample]:
    """The same reduction with `with_keepdim_negated` negated."""
    given = arguments.argument_values(sample)
    if isinstance(given.get("keepdim"), bool) and not arguments.trusts_caller(sample.op):
        yield arguments.call_with(sample, given | {"keepdim": not given["keepdim"]}, f"keepdim={not given['keepdim']}")


def _dims_changed(sample: Sample, change: Callable[[int], int], what: str) -> Iterator[Sample]:
    def changed(value: object) -> object:
        if isinstance(value, (list, tuple)):
            return type(value)(map(changed, value))
        return change(value) if type(value) is int else value

    given = arguments.argument_values(sample)
    spots = [
        a.name
        for a in arguments.schema_arguments(sample.op)
        if a.name in arguments.DIMS and "int" in a.kind and given.get(a.name) is not None
    ]
    other = {name: changed(given[name]) for name in spots}
    if any(other[name] != given[name] for name in spots):
        yield arguments.call_with(sample, given | other, what)


DIMENSIONS = (
    InputForm("dims respelled", "a rule that compares a dim with a shard dim is often right in one spelling only",
         with_dims_respelled, same=True, weight=2, always=8),
    InputForm("other dims", "a rule tried with the first dim only may mix up dim and shard dim", other_dims, weight=2),
    InputForm("no dims", "an empty list, None and all dims mean the same to some ops, and not to others", with_no_dims),
    InputForm("keepdim", "a kept dim moves the shard dims behind it by one less", with_keepdim_negated),
)  # fmt: skip


def with_negative_indices(sample: Sample) -> Iterator[Sample]:
    """Every second index counted from the end, for each size of the first tensor in turn.

    Only one of the sizes is right: the caller must check which has the same results.  On a GPU there are none, since an
    index out of range kills the process.
    """
    if arguments.trusts_caller(sample.op) or not sample.tensors or kernel_device() != "cpu":
        return
    first = sample.tensors[0]
    for size in dict.fromkeys([*first.shape, first.numel()]):
        changed = {}
        for i, (x, name) in enumerate(zip(sample.tensors, arguments.argument_names(sample), strict=True)):
            if arguments.is_index(name) and arguments.is_index_dtype(x) and x.numel():
                places = torch.arange(x.numel(), device=x.device).view(x.shape)
                changed[i] = torch.where((places % 2 == 0) & (x >= 0), x - size, x)
        if changed:
            yield arguments.with_tensors(sample, changed, f"indices counted from {size}")


INDEXED = (
    InputForm("negative indices", "an index below zero is in no shard's range of rows",
              with_negative_indices, same=True),
)  # fmt: skip


def with_transposed_memory(sample: Sample) -> Iterator[Sample]:
    """Every tensor of two dims or more with its last dim first in memory."""
    large = {i: x for i, x in enumerate(sample.tensors) if x.ndim > 1 and min(x.shape[0], x.shape[-1]) > 1}
    if large:
        laid = {i: x.transpose(0, -1).contiguous().transpose(0, -1) for i, x in large.items()}
        yield arguments.with_tensors(sample, laid, "last dim first in memory")


def with_gaps(sample: Sample) -> Iterator[Sample]:
    """Every tensor with a gap after each element."""
    laid = {i: strided(x) for i, x in enumerate(sample.tensors) if x.ndim and x.numel() > 1}
    if laid:
        yield arguments.with_tensors(sample, laid, "with gaps")


def with_expanded_tensors(sample: Sample) -> Iterator[Sample]:
    """Each tensor in turn with its first slice along a dim expanded over that dim."""
    for i, x in enumerate(sample.tensors):
        for dim in range(x.ndim):
            if x.shape[dim] > 1:
                row = x.narrow(dim, 0, 1)
                yield arguments.with_tensors(sample, {i: row.expand(x.shape)}, f"operand {i} expanded in dim {dim}")


LAYOUTS = (
    InputForm("transposed", "rules that look at strides are tried with dense tensors only", with_transposed_memory),
    InputForm("gaps", "torch's kernels for data with gaps are others", with_gaps),
    InputForm("expanded", "a stride of zero: a rank's rows are all the same memory", with_expanded_tensors),
)  # fmt: skip
