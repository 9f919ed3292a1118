"""Forms of a call with other sizes (uneven, square, too short for all ranks, empty, no dims) and other scalar arguments.

Equal sizes change together, in all tensors and in the arguments that repeat them.  The op may reject the new call; ops that
trust their caller are left out.  The scalar forms change numbers and flags, and add or remove tensors such as weights.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from strategies.inputs.variants.dims_and_layout import InputForm
from strategies.model.arguments import (
    DIMS,
    argument_names,
    argument_values,
    call_with,
    is_index,
    is_index_dtype,
    repeats_sizes,
    schema_arguments,
    trusts_caller,
    with_tensors,
)
from strategies.model.rule import Sample

LARGEST = 4096
"""The most elements of a resized tensor."""
EVEN, SHORT, FEW = 12, 11, 3
"""Rows: divisible by 2, 3 and 4 ranks; one less; too few for 4 ranks."""


def with_operand_of_another_length(sample: Sample) -> list[Sample]:
    """The call with one operand shorter than the first along one dim, or longer, as gather and scatter allow."""
    if trusts_caller(sample.op) or not sample.tensors:
        return []
    first, made = sample.tensors[0], []
    for i, other in enumerate(sample.tensors[1:], 1):
        for dim in range(other.ndim if other.ndim == first.ndim else 0):
            if other.shape[dim] == first.shape[dim] and other.shape[dim] >= 4:
                short = other.narrow(dim, 0, other.shape[dim] // 2 + 1).clone()
                for operand, what in (short, "shortened"), (torch.cat([other, short], dim), "lengthened"):
                    made.append(with_tensors(sample, {i: operand}, f"operand {i} {what}"))
    return made


def with_sizes(sample: Sample, new: Callable[[int], int]) -> Iterator[Sample]:
    """The call with its sizes changed by `new`: all at once, then each alone.

    Each comes first with equal numbers in list arguments changed alike, then with those as they are.
    """
    if trusts_caller(sample.op):
        return
    sizes = list(dict.fromkeys(size for x in sample.tensors for size in x.shape if size > 1))
    for chosen in [sizes, *([size] for size in sizes if len(sizes) > 1)]:
        to = {size: new(size) for size in chosen if new(size) != size}
        if not to:
            continue
        tensors = {i: resize(x, [to.get(size, size) for size in x.shape]) for i, x in enumerate(sample.tensors)}
        tensors = _in_range(sample, tensors)
        if any(x.numel() > LARGEST for x in tensors.values()):
            continue
        other = with_tensors(sample, tensors, f"sizes {to}")
        given = argument_values(other)
        also = {name: _renamed(v, to) for name, v in given.items() if name not in DIMS}
        if any(isinstance(v, (list, tuple)) and v != given[name] for name, v in also.items() if not _has_tensor(v)):
            yield call_with(sample, given | also, f"sizes {to}")
        yield other


with_even_sizes = partial(with_sizes, new=lambda _: EVEN)
with_one_row_less = partial(with_sizes, new=lambda _: SHORT)
with_uneven_sizes = partial(with_sizes, new=lambda size: size + 1 if size % 2 == 0 else size + 2)
with_few_rows = partial(with_sizes, new=lambda _: FEW)
with_no_rows = partial(with_sizes, new=lambda _: 0)
with_one_row = partial(with_sizes, new=lambda _: 1)


def _in_range(sample: Sample, tensors: dict[int, Tensor]) -> dict[int, Tensor]:
    """The tensors with indices below the smallest size, which are valid in every dim.

    On a GPU an index out of range kills the process.
    """
    sizes = [size for x in tensors.values() if not is_index_dtype(x) for size in x.shape]
    least = min(sizes, default=0)
    spots = [i for i, name in enumerate(argument_names(sample)) if is_index(name) and is_index_dtype(tensors[i])]
    return tensors | {i: torch.where(tensors[i] >= least, tensors[i] % least, tensors[i]) for i in spots if least}


def _has_tensor(value: object) -> bool:
    return isinstance(value, Tensor) or (isinstance(value, (list, tuple)) and any(map(_has_tensor, value)))


def _renamed(value: object, to: dict[int, int]) -> object:
    """A list of sizes with the new sizes; other values as they are, since a number alone is rarely a size."""
    if isinstance(value, (list, tuple)) and not _has_tensor(value):
        return type(value)(to.get(v, v) if type(v) is int else v for v in value)
    return value


def resize(x: Tensor, shape: list[int]) -> Tensor:
    """The tensor cut or repeated to that shape; repeated floats are scaled up."""
    for dim, size in enumerate(shape):
        if size == x.shape[dim]:
            continue
        rows = torch.arange(size, device=x.device)
        again = rows // x.shape[dim]
        x = x.index_select(dim, rows % x.shape[dim])
        if x.dtype.is_floating_point or x.dtype.is_complex:
            x = x * (1 + 0.17 * again.view(-1, *[1] * (x.ndim - dim - 1))).to(x.dtype)
    return x


def with_oblong_sizes(sample: Sample) -> Iterator[Sample]:
    """The call on square tensors with the last dim, then the first, made longer in all of them."""
    if trusts_caller(sample.op) or not any(len(set(x.shape)) < x.ndim for x in sample.tensors):
        return
    most = max(x.ndim for x in sample.tensors)
    for dim in (-1, 0):
        large = {i: x for i, x in enumerate(sample.tensors) if x.ndim == most and x.shape[dim] > 1}
        longer = {i: resize(x, [s + 2 * (d == dim % most) for d, s in enumerate(x.shape)]) for i, x in large.items()}
        if longer:
            yield with_tensors(sample, longer, f"dim {dim} longer by 2")


_NO_BROADCAST = ("binary_cross_entropy",)
"""Ops whose operands must have one shape, which torch checks in Python only: the overload resizes its result, which is
deprecated (torch 2.13)."""


def with_broadcast_operands(sample: Sample) -> Iterator[Sample]:
    """Each operand in turn with one row along a dim, and without its first dim, so that the op broadcasts it."""
    if trusts_caller(sample.op) or len(sample.tensors) < 2 or sample.op.split(".")[1].startswith(_NO_BROADCAST):
        return
    for i, x in enumerate(sample.tensors):
        for dim in range(x.ndim):
            if x.shape[dim] > 1:
                yield with_tensors(sample, {i: x.narrow(dim, 0, 1).clone()}, f"one row in dim {dim} of operand {i}")
        if x.ndim > 1 and x.shape[0]:
            yield with_tensors(sample, {i: x[0].clone()}, f"operand {i} without its first dim")


def with_operand_of_more_dims(sample: Sample) -> Iterator[Sample]:
    """Each operand in turn with one more dim of the same size before its first, so that the op broadcasts the others.

    The last operands come first, since the results of many ops have the dims of the first one.
    """
    if trusts_caller(sample.op) or len(sample.tensors) < 2 or sample.op.split(".")[1].startswith(_NO_BROADCAST):
        return
    for i, x in reversed([*enumerate(sample.tensors)]):
        if x.ndim and len(x) > 1:
            yield with_tensors(sample, {i: torch.stack([x] * len(x))}, f"operand {i} with one more dim")


def without_dims(sample: Sample) -> Iterator[Sample]:
    """Tensors without dims: all, then each operand in turn."""
    if trusts_caller(sample.op) or any(not x.numel() for x in sample.tensors):
        return
    points = {i: x.flatten()[0].clone() for i, x in enumerate(sample.tensors) if x.ndim}
    if points:
        yield with_tensors(sample, points, "without dims")
    alone = len(sample.tensors) > 1 and not sample.op.split(".")[1].startswith(_NO_BROADCAST)
    for i, x in points.items() if alone else ():
        yield with_tensors(sample, {i: x}, f"operand {i} without dims")


SIZES = (
    InputForm("operand of another length", "rules that pair the shards of two operands take them to be equally long",
              with_operand_of_another_length, weight=2, always=4),
    InputForm("even", "what divides among 2, 3 and 4 ranks is not refused for being uneven", with_even_sizes),
    InputForm("one row short", "the last rank has one row less: means, offsets and paddings show", with_one_row_less),
    InputForm("uneven", "sizes that differ by rank break what is computed from the first rank's",
              with_uneven_sizes, always=1),
    InputForm("square", "rows and columns of one number hide nothing and confuse what is told apart by size",
              with_few_rows),
    InputForm("oblong", "in a square tensor the wrong dim has the right size", with_oblong_sizes),
    InputForm("no rows", "a reduction of nothing has a value of its own, or none", with_no_rows),
    InputForm("one row", "a dim of size one cannot be split, and may be dropped or broadcast", with_one_row),
    InputForm("broadcast", "a dim of size one, or none, is not where the other operand is sharded",
              with_broadcast_operands, weight=2),
    InputForm("operand of more dims", "the first dims of two operands are not the same dim of the result",
              with_operand_of_more_dims),
    InputForm("without dims", "a tensor without dims has no dim to shard, and promotes types otherwise", without_dims),
)  # fmt: skip


NUMBERS: tuple[float, ...] = (0, 1, -1, 2, 2.5)
CODES = (torch.dtype, torch.layout, torch.memory_format, torch.device, str)
"""Types of values that schemas declare as int."""
_KEPT = frozenset({"keepdim", "dtype", "reduction", "ignore_index", "layout", "device", "memory_format", "pin_memory"})
"""Arguments with a form of their own, and enumerations, which schemas declare as int."""
_MODES = "_mode"
"""Suffix of the names of arguments whose integers enumerate modes.

torch 2.13: for an unknown mode `grid_sampler_3d` returns uninitialised memory, different in each run.
"""


def other_scalars(sample: Sample) -> Iterator[Sample]:
    """Each number in turn as 0, 1, -1, 2, 2.5, and as None where it is optional.

    Ops that trust their caller keep integers and scales, which may describe sizes.
    """
    given = argument_values(sample)
    for a in schema_arguments(sample.op):
        whole = "int" in a.kind and "number" not in a.kind
        speaks = whole or repeats_sizes(a.name)
        if a.name not in given or a.name in DIMS | _KEPT or "List" in a.kind or (speaks and trusts_caller(sample.op)):
            continue
        if not any(word in a.kind for word in ("number", "float", "int")) or isinstance(given[a.name], CODES):
            continue
        for number in (*NUMBERS, *([None] if a.optional else [])):
            named = number is None or not a.name.endswith(_MODES) or number >= 0
            fits = named and (number is None or not whole or type(number) is int)
            value = float(number) if number is not None and "float" in a.kind else number
            if fits and value != given[a.name]:
                yield call_with(sample, given | {a.name: value}, f"{a.name}={value}")


def equal_numbers(sample: Sample) -> Iterator[Sample]:
    """Each number in turn as a number of its type that comes before it in the call: the ends of a range, two factors."""
    given = argument_values(sample)
    names = [a.name for a in schema_arguments(sample.op) if type(given.get(a.name)) in (int, float)]
    free = [name for name in names if name not in DIMS | _KEPT and not name.endswith(_MODES)]
    for first, second in () if trusts_caller(sample.op) else reversed([*itertools.combinations(free, 2)]):
        one, other = given[first], given[second]
        if type(one) is type(other) and one != other:
            yield call_with(sample, given | {second: one}, f"{second}={one}")


def other_flags(sample: Sample) -> Iterator[Sample]:
    """Each flag in turn negated."""
    given = argument_values(sample)
    for a in () if trusts_caller(sample.op) else schema_arguments(sample.op):
        if a.kind == "bool" and isinstance(given.get(a.name), bool) and a.name not in _KEPT:
            yield call_with(sample, given | {a.name: not given[a.name]}, f"{a.name}={not given[a.name]}")


WRAPS = 97
"""A factor that takes small integers beyond the ends of int8."""


def _numbers_of(given: Mapping[str, object]) -> list[object]:
    """The arguments from which an op may compute where it reads: none of a cast, which takes options alone."""
    return [v for v in given.values() if not isinstance(v, (bool, Tensor, *CODES)) and v is not None]


def other_dtypes(sample: Sample) -> Iterator[Sample]:
    """The call with another `dtype`, and without one; on larger integers also with one in which they wrap around.

    What a float makes of an integer that is too narrow for it is not defined.
    """
    given = argument_values(sample)
    only_options = len(sample.tensors) == 1 and not _numbers_of(given)
    if "dtype" not in given or (trusts_caller(sample.op) and not only_options):
        return
    large = {i: x * WRAPS for i, x in enumerate(sample.tensors) if x.dtype in (torch.int32, torch.int64)}
    if large and len(large) == len(sample.tensors):
        yield with_tensors(
            call_with(sample, given | {"dtype": torch.int8}, "dtype=torch.int8"), large, f"times {WRAPS}"
        )
    for dtype in (torch.float64, torch.float32, torch.int64, None):
        if dtype != given["dtype"]:
            yield call_with(sample, given | {"dtype": dtype}, f"dtype={dtype}")


def with_sizes_of_a_tensor(sample: Sample) -> Iterator[Sample]:
    """The call with the sizes of each of its tensors in turn as the `size` of the result."""
    given = argument_values(sample)
    if not isinstance(given.get("size"), (list, tuple)) or trusts_caller(sample.op):
        return
    for size in dict.fromkeys(tuple(x.shape) for x in sample.tensors if x.numel()):
        if size != tuple(given["size"]):
            yield call_with(sample, given | {"size": list(size)}, f"size={list(size)}")


def other_reductions(sample: Sample) -> Iterator[Sample]:
    """A loss unreduced, as a mean and as a sum."""
    given = argument_values(sample)
    if type(given.get("reduction")) is int and not trusts_caller(sample.op):
        for reduction in (1, 2, 0):
            if reduction != given["reduction"]:
                yield call_with(sample, given | {"reduction": reduction}, f"reduction={reduction}")


def with_ignored_class(sample: Sample) -> Iterator[Sample]:
    """The class of the first target, then of the last, ignored, so that ranks count different numbers of rows."""
    given = argument_values(sample)
    if "ignore_index" not in given or trusts_caller(sample.op):
        return
    named = zip(sample.tensors, argument_names(sample), strict=True)
    for x in [x for x, name in named if is_index(name) and x.numel()]:
        for place in dict.fromkeys((int(x.flatten()[0]), int(x.flatten()[-1]))):
            if place != given["ignore_index"]:
                yield call_with(sample, given | {"ignore_index": place}, f"ignore_index={place}")


def with_weights(sample: Sample) -> Iterator[Sample]:
    """A weight by class, or by element, where there was none; the op rejects those of a wrong shape."""
    given = argument_values(sample)
    first = sample.tensors[0] if sample.tensors else None
    if first is None or not first.dtype.is_floating_point or trusts_caller(sample.op):
        return
    if given.get("weight", ...) is not None:
        return
    shapes: list[tuple[int, ...]] = [(size,) for size in dict.fromkeys(first.shape[1:2] + first.shape[-1:])]
    for shape in dict.fromkeys([*shapes, tuple(first.shape)]):
        weight = torch.arange(1, 1 + torch.Size(shape).numel(), dtype=first.dtype, device=first.device).view(shape)
        yield call_with(sample, given | {"weight": weight / 4}, f"weights of shape {shape}")


def without_optional_tensors(sample: Sample) -> Iterator[Sample]:
    """Each optional tensor in turn left out."""
    given = argument_values(sample)
    for a in () if trusts_caller(sample.op) else schema_arguments(sample.op):
        if a.optional and isinstance(given.get(a.name), Tensor) and not a.keyword:
            yield call_with(sample, given | {a.name: None}, f"{a.name}=None")


def with_one_result(sample: Sample) -> Iterator[Sample]:
    """Each result alone, of several that a mask selects."""
    given = argument_values(sample)
    for a in schema_arguments(sample.op):
        mask = given.get(a.name)
        if "List[bool]" in a.kind and isinstance(mask, (list, tuple)) and len(mask) > 1:
            for only in range(len(mask)):
                chosen = [i == only for i in range(len(mask))]
                if chosen != list(mask):
                    yield call_with(sample, given | {a.name: chosen}, f"only result {only} asked for")


SCALARS = (
    InputForm("other scalars", "many rules hold for one sign, or for 0 or 1, of a number only",
              other_scalars, weight=3),
    InputForm("equal numbers", "a range without a width is that of the tensor, of which a rank has a part", equal_numbers),
    InputForm("other flags", "a flag that no sample sets changes what a rank may do alone", other_flags),
    InputForm("other dtypes", "a cast before or after the parts are summed is not the same", other_dtypes),
    InputForm("own sizes", "a result as large as a tensor is not therefore sharded, or partial, as that is",
              with_sizes_of_a_tensor),
    InputForm("other reductions", "a mean has a denominator, a sum has none", other_reductions),
    InputForm("ignored class", "ranks ignore differently many rows, so a mean of their means is none",
              with_ignored_class),
    InputForm("weights", "ranks have different weights, so a mean of their means is none", with_weights),
    InputForm("left out", "a rule may count on an argument that need not be there", without_optional_tensors),
    InputForm("one output", "of several results some are not there, and the placements must not move up",
              with_one_result),
)  # fmt: skip
