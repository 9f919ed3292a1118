"""Calls with other arguments that are no tensors, or with a tensor left out or put in: scalars, flags, weights, masks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from strategies.inputs.variants.variant import Form
from strategies.model.arguments import DIMS, called, is_index, names, repeats_sizes, schema, trusts, values
from strategies.model.rule import Sample

NUMBERS: tuple[float, ...] = (0, 1, -1, 2, 2.5)
_KEPT = frozenset({"keepdim", "dtype", "reduction", "ignore_index", "layout", "device", "memory_format", "pin_memory"})
"""Arguments that have a form of their own, and codes, which schemas call ints."""
_MODES = "_mode"
"""How the names of arguments end whose numbers are names.

2.13: for a mode that there is not `grid_sampler_3d` writes nothing: what comes out is left-over memory, another in each run.
"""


def other_scalars(sample: Sample) -> Iterator[Sample]:
    """Each number in turn as 0, 1, -1, 2, 2.5, and as None where it may be left out.

    Ops that trust their caller keep what may speak of sizes, integers and scales; others refuse what they cannot take.
    """
    given = values(sample)
    for a in schema(sample.op):
        whole = "int" in a.kind and "number" not in a.kind
        speaks = whole or repeats_sizes(a.name)
        if a.name not in given or a.name in DIMS | _KEPT or "List" in a.kind or (speaks and trusts(sample.op)):
            continue
        if not any(word in a.kind for word in ("number", "float", "int")) or _is_code(given[a.name]):
            continue
        for number in (*NUMBERS, *([None] if a.optional else [])):
            named = number is None or not a.name.endswith(_MODES) or number >= 0
            fits = named and (number is None or not whole or type(number) is int)
            value = float(number) if number is not None and "float" in a.kind else number
            if fits and value != given[a.name]:
                yield called(sample, given | {a.name: value}, f"{a.name}={value}")


def _is_code(value: Any) -> bool:
    """Whether it is a dtype, a layout or the like, which schemas call an int."""
    return isinstance(value, (torch.dtype, torch.layout, torch.memory_format, torch.device, str))


def other_flags(sample: Sample) -> Iterator[Sample]:
    """Each flag in turn as its opposite."""
    given = values(sample)
    for a in () if trusts(sample.op) else schema(sample.op):
        if a.kind == "bool" and isinstance(given.get(a.name), bool) and a.name not in _KEPT:
            yield called(sample, given | {a.name: not given[a.name]}, f"{a.name}={not given[a.name]}")


def other_dtypes(sample: Sample) -> Iterator[Sample]:
    """The result in another dtype, and in none that is named."""
    given = values(sample)
    if "dtype" not in given or trusts(sample.op):
        return
    for dtype in (torch.float64, torch.float32, torch.int64, None):
        if dtype != given["dtype"]:
            yield called(sample, given | {"dtype": dtype}, f"dtype={dtype}")


def other_reductions(sample: Sample) -> Iterator[Sample]:
    """A loss as it is, as a mean and as a sum."""
    given = values(sample)
    if type(given.get("reduction")) is int and not trusts(sample.op):
        for reduction in (1, 2, 0):
            if reduction != given["reduction"]:
                yield called(sample, given | {"reduction": reduction}, f"reduction={reduction}")


def ignored(sample: Sample) -> Iterator[Sample]:
    """The class of the first target, then of the last, ignored, so that ranks count differently many rows."""
    given = values(sample)
    if "ignore_index" not in given or trusts(sample.op):
        return
    targets = [x for x, name in zip(sample.tensors, names(sample), strict=True) if is_index(name) and x.numel()]
    for x in targets:
        for place in dict.fromkeys((int(x.flatten()[0]), int(x.flatten()[-1]))):
            if place != given["ignore_index"]:
                yield called(sample, given | {"ignore_index": place}, f"ignore_index={place}")


def weighted(sample: Sample) -> Iterator[Sample]:
    """A weight that differs by class, or by element, where there was none.  The op says which shape it takes."""
    given = values(sample)
    first = sample.tensors[0] if sample.tensors else None
    if first is None or not first.dtype.is_floating_point or given.get("weight", ...) is not None or trusts(sample.op):
        return
    shapes: list[tuple[int, ...]] = [(size,) for size in dict.fromkeys(first.shape[1:2] + first.shape[-1:])]
    for shape in dict.fromkeys([*shapes, tuple(first.shape)]):
        weight = torch.arange(1, 1 + torch.Size(shape).numel(), dtype=first.dtype, device=first.device).view(shape)
        yield called(sample, given | {"weight": weight / 4}, f"weights of shape {shape}")


def left_out(sample: Sample) -> Iterator[Sample]:
    """Each tensor in turn that may be left out."""
    given = values(sample)
    for a in () if trusts(sample.op) else schema(sample.op):
        if a.optional and isinstance(given.get(a.name), Tensor) and not a.keyword:
            yield called(sample, given | {a.name: None}, f"{a.name}=None")


def one_output(sample: Sample) -> Iterator[Sample]:
    """Of several results that are asked for by a mask, each alone."""
    given = values(sample)
    for a in schema(sample.op):
        mask = given.get(a.name)
        if "List[bool]" in a.kind and isinstance(mask, (list, tuple)) and len(mask) > 1:
            for only in range(len(mask)):
                chosen = [i == only for i in range(len(mask))]
                if chosen != list(mask):
                    yield called(sample, given | {a.name: chosen}, f"only result {only} asked for")


SCALARS = (
    Form("other scalars", "many rules hold for one sign, or for 0 or 1, of a number only", other_scalars, weight=3),
    Form("other flags", "a flag that no sample sets changes what a rank may do alone", other_flags),
    Form("other dtypes", "a cast before or after the parts are summed is not the same", other_dtypes),
    Form("other reductions", "a mean has a denominator, a sum has none", other_reductions),
    Form("ignored class", "ranks ignore differently many rows, so a mean of their means is none", ignored),
    Form("weights", "ranks have different weights, so a mean of their means is none", weighted),
    Form("left out", "a rule may count on an argument that need not be there", left_out),
    Form("one output", "of several results some are not there, and the placements must not move up", one_output),
)  # fmt: skip
