"""Calls with their dims given otherwise: counted from the other end, other dims, none at all, and kept or dropped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from strategies.inputs.variants.variant import Form
from strategies.model.arguments import DIMS, called, schema, trusts, values
from strategies.model.rule import Sample


def respelled(sample: Sample) -> list[Sample]:
    """The same call with its dims spelled the other way: 1 as -1 of two dims, -1 as 1.

    For unsqueeze and stack -1 counts one dim more, which is why there are two candidates: the caller must
    check which gives the same.  Ops that trust their caller keep the dims that they came with.
    """
    if not sample.tensors or trusts(sample.op):
        return []
    ndim = sample.tensors[0].ndim
    return [other for n in (ndim, ndim + 1) for other in _dims_changed(sample, _from_the_end(n), "dims respelled")]


def _from_the_end(ndim: int) -> Callable[[int], int]:
    return lambda dim: dim - ndim if dim >= 0 else dim + ndim


def _onwards(step: int, ndim: int) -> Callable[[int], int]:
    return lambda dim: (dim + step) % ndim


def other_dims(sample: Sample) -> Iterator[Sample]:
    """The same call for every other dim in turn; dims in a list all move on by as many."""
    if not sample.tensors or trusts(sample.op):
        return
    ndim = sample.tensors[0].ndim
    for step in range(1, ndim):
        yield from _dims_changed(sample, _onwards(step, ndim), f"dims moved on by {step}")


def no_dims(sample: Sample) -> Iterator[Sample]:
    """The same call with an empty list of dims, with None for them, and with all dims by name."""
    if trusts(sample.op) or not sample.tensors:
        return
    given, ndim = values(sample), sample.tensors[0].ndim
    for a in schema(sample.op):
        if a.name not in DIMS or a.name not in given:
            continue
        if a.optional:
            yield called(sample, given | {a.name: None}, f"{a.name}=None")
        if "List[int]" in a.kind:
            yield called(sample, given | {a.name: []}, f"{a.name}=[]")
            yield called(sample, given | {a.name: list(range(ndim))}, f"{a.name} is all dims")


def keepdim(sample: Sample) -> Iterator[Sample]:
    """The same reduction with its dims kept, or dropped.

    By position or by keyword makes no difference to a rule: the dispatcher hands both on as one call.
    """
    given = values(sample)
    if isinstance(given.get("keepdim"), bool) and not trusts(sample.op):
        yield called(sample, given | {"keepdim": not given["keepdim"]}, f"keepdim={not given['keepdim']}")


def _dims_changed(sample: Sample, change: Callable[[int], int], what: str) -> Iterator[Sample]:
    def changed(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(map(changed, value))
        return change(value) if type(value) is int else value

    given = values(sample)
    spots = [a.name for a in schema(sample.op) if a.name in DIMS and "int" in a.kind and given.get(a.name) is not None]
    other = {name: changed(given[name]) for name in spots}
    if any(other[name] != given[name] for name in spots):
        yield called(sample, given | other, what)


DIMENSIONS = (
    Form("dims respelled", "a rule that compares a dim with a shard dim is often right in one spelling only",
         respelled, same=True, weight=2, always=8),
    Form("other dims", "a rule tried with the first dim only may mix up dim and shard dim", other_dims, weight=2),
    Form("no dims", "an empty list, None and all dims mean the same to some ops, and not to others", no_dims),
    Form("keepdim", "a kept dim moves the shard dims behind it by one less", keepdim),
)  # fmt: skip
