"""Choices of arguments, and dtypes, that no sample of an overload has: each is tried on the first samples that take it.

A flag has two choices, a string those that the op's own error message lists, an optional argument is given or left out.
Where the op rejects a choice for the sizes of a sample, small sizes are searched for which it accepts the call.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from localtensor.layout import is_float8
from strategies.inputs.variants.dims_and_layout import InputForm
from strategies.inputs.variants.sizes import resize
from strategies.model.arguments import (
    DIMS,
    argument_kind,
    argument_names,
    argument_values,
    call_with,
    is_index,
    repeats_sizes,
    schema_arguments,
    trusts_caller,
    with_tensors,
)
from strategies.model.kernels import REJECTIONS, run_call
from strategies.model.oracle import STATISTICS, OracleResult, metadata_only_call, run_stable_oracle
from strategies.model.rule import Sample, dtype_class, overload

FURTHER_DTYPES = {
    "real": {torch.bfloat16: 2, torch.float16: 1, torch.float8_e4m3fn: 1},
    "integer": {torch.int32: 1, torch.uint8: 1, torch.int8: 1},
    "complex": {torch.complex128: 1},
    "bool": {},
}
"""Dtypes to which samples of a class are cast, and how many samples of an overload."""
PER_CHOICE = 2
"""Samples of an overload on which one choice is tried."""
MOST_REFUSED = 4
"""Samples that may reject a choice before it is given up."""
MOST_SOLVED, MOST_NUMEL = 600, 4096
"""Calls tried to find sizes that go with an argument, and the most elements of a tensor in them."""
COUNTS = (2, 3, 4, 1)
"""Other values of an integer that sizes may have to be divisible by, and of the integers of a list."""
SMALL = 64
"""How many times the largest number of a cast sample fits into float16: parts of a sum are larger than their total."""
NO_STRING = "no such choice"
KEPT_ARGUMENTS = frozenset({"pin_memory", "non_blocking", "generator", "layout", "device", "check_errors", "use_gpu"})
"""Arguments that change where a result is or how it is computed, and not which."""
FIXED_VALUES = {
    "float": (0.5, 2.0), "number": (0.5, 2), "int": (1, 2, 0), "bool": (True, False),
    "ScalarType": (torch.float32, torch.float64, torch.int64),
    "MemoryFormat": (torch.channels_last, torch.contiguous_format),
}  # fmt: skip
"""Values for an optional argument of that type that is left out."""
Choice = tuple[str, str]
"""The name of an argument, and a value of it as text; "given" for any value of an optional one."""


@dataclass(slots=True)
class Undrawn:
    """What the samples of an overload of one class of dtypes do not draw.  `left` counts the calls still wanted."""

    left: dict[Choice, int]
    refused: dict[Choice, int] = field(default_factory=dict)
    taken: set[Choice] = field(default_factory=set)

    @classmethod
    def of(cls, samples: Sequence[Sample], *, dtypes: bool = True) -> Undrawn:
        """For all samples of one class; with `dtypes` also the casts of `FURTHER_DTYPES`."""
        drawn: set[Choice] = set()
        every: dict[Choice, int] = {}
        for sample in samples:
            drawn |= drawn_choices(sample)
            every |= dict.fromkeys(_choices(sample), PER_CHOICE)
        if dtypes and samples:
            there = {str(x.dtype) for sample in samples for x in sample.tensors}
            further = FURTHER_DTYPES[dtype_class(samples[0])].items()
            every |= {("", str(dtype)): many for dtype, many in further if str(dtype) not in there}
        return cls({choice: many for choice, many in every.items() if choice not in drawn})

    def calls(self, sample: Sample, seed: int) -> Iterator[tuple[Sample, OracleResult, str]]:
        """The sample with each choice that is left and that the op takes, its oracle, and the choice as text."""
        if sample.origin.startswith("samples()") or not sample.tensors:
            return  # the user's own samples: other arguments may mean nothing to the op
        for choice in [choice for choice, many in self.left.items() if many]:
            found = next(_accepted(_made(sample, choice), seed, dtype_class(sample)), None)
            if found is not None:
                self.left[choice] -= 1
                self.taken.add(choice)
                yield (*found, f"{choice[0]}={choice[1]}" if choice[0] else choice[1])
            else:
                self.refused[choice] = self.refused.get(choice, 0) + 1
                if self.refused[choice] == MOST_REFUSED:
                    self.left[choice] = 0


def choice_text(choice: Choice) -> str:
    """`rounding_mode='floor'`, or the name of a dtype."""
    return f"{choice[0]}={choice[1]}" if choice[0] else choice[1].removeprefix("torch.")


def drawn_choices(sample: Sample) -> set[Choice]:
    """The choices that a call has made."""
    given = argument_values(sample)
    found: set[Choice] = set()
    for a in schema_arguments(sample.op):
        value = given.get(a.name)
        if isinstance(value, (bool, str)) or value is None:
            found.add((a.name, repr(value)))
        if a.optional and value is not None:
            found.add((a.name, "given"))
    return found


def _choices(sample: Sample) -> Iterator[Choice]:
    """The choices that the op has, as far as they can be known from this call.  Ops that trust their caller have few:
    a mask or a number that their caller would not give may be read out of bounds."""
    trusting = trusts_caller(sample.op)
    for a, schema in zip(schema_arguments(sample.op), overload(sample.op)._schema.arguments, strict=True):
        kind = argument_kind(schema)
        if a.name in KEPT_ARGUMENTS or schema.is_out:
            continue
        if kind == "str":
            yield from ((a.name, repr(word)) for word in strings_of(sample, a.name))
        elif trusting:
            continue
        elif kind == "bool" and not a.optional:
            yield from ((a.name, repr(flag)) for flag in (True, False))
        if a.optional and not trusting and (kind == "Tensor" or kind in FIXED_VALUES):
            yield a.name, "None"
            yield a.name, "given"


def strings_of(sample: Sample, name: str) -> list[str]:
    """The strings that the op accepts as this argument, among the words of its error message for another one.

    None for an argument that may be any string.
    """
    given = argument_values(sample)
    try:
        _run(call_with(sample, given | {name: NO_STRING}, ""))
    except REJECTIONS as error:
        words = re.findall(r"\w+", str(error).partition("Exception raised from")[0].replace(NO_STRING, ""))
    else:
        return []
    words += [a.default for a in schema_arguments(sample.op) if a.name == name and isinstance(a.default, str)]
    return [word for word in dict.fromkeys(words) if _runs(call_with(sample, given | {name: word}, ""))]


def _made(sample: Sample, choice: Choice) -> Iterator[Sample]:
    """Calls with this choice, those with the sizes of the sample first."""
    name, text = choice
    if not name:
        yield from as_dtype(sample, getattr(torch, text.removeprefix("torch.")))
        return
    given = argument_values(sample)
    if name not in given and text != "given":
        return
    for value in _values(sample, name, text):
        other = call_with(sample, given | {name: value}, f"{name}={text}")
        yield other
        if not isinstance(value, Tensor) and not trusts_caller(sample.op) and not _runs(other):
            yield from itertools.islice(with_sizes_that_fit(other, (2,)), 1)


def _values(sample: Sample, name: str, text: str) -> Iterable[Any]:
    if text != "given":
        return [{"None": None, "True": True, "False": False}.get(text, text.strip("'\""))]
    schema = next(a for a in overload(sample.op)._schema.arguments if a.name == name)
    kind = argument_kind(schema)
    return FIXED_VALUES[kind] if kind in FIXED_VALUES else _tensors(sample)


def _tensors(sample: Sample) -> Iterator[Tensor]:
    """Tensors that may be an optional argument: of the shape of another, of one of its sizes, or of no dims; of numbers
    of the same dtype, then booleans."""
    first = sample.tensors[0]
    sizes = [(size,) for size in dict.fromkeys(size for x in sample.tensors for size in x.shape)]
    shapes = dict.fromkeys([*sizes, *(tuple(x.shape) for x in sample.tensors), ()])
    for dtype in dict.fromkeys((first.dtype, torch.bool)):
        for shape in shapes:
            steps = torch.arange(torch.Size(shape).numel(), device=first.device).view(shape)
            yield steps % 3 > 0 if dtype == torch.bool else ((steps % 5 + 1) / 2).to(dtype)


def as_dtype(sample: Sample, dtype: torch.dtype) -> Iterator[Sample]:
    """The call with its numbers cast to the dtype: all of them, then all but the statistics that a forward saved.

    Positions in other tensors stay, and so do the integers of ops that trust their caller.
    """
    names = argument_names(sample)
    whole = not (dtype.is_floating_point or dtype.is_complex)
    if whole and trusts_caller(sample.op):
        return
    numbers = {
        i: x.to(dtype)
        for i, (x, name) in enumerate(zip(sample.tensors, names, strict=True))
        if _kind(x.dtype) == _kind(dtype) and not (whole and is_index(name)) and x.dtype != dtype
    }
    others = {i: x for i, x in numbers.items() if not names[i].startswith(STATISTICS)}
    for made in (numbers, others) if len(others) < len(numbers) else (numbers,):
        if made:
            yield with_tensors(sample, made, f"as {str(dtype).removeprefix('torch.')}")


def _kind(dtype: torch.dtype) -> str:
    if dtype == torch.bool:
        return "bool"
    return "complex" if dtype.is_complex else "real" if dtype.is_floating_point else "integer"


def _accepted(made: Iterable[Sample], seed: int, dtypes: str) -> Iterator[tuple[Sample, OracleResult]]:
    for other in made:
        oracle = run_stable_oracle(other, seed=seed) if dtype_class(other) == dtypes else None
        if (
            oracle is not None and oracle.metadata_only == metadata_only_call(other) and _is_sharp(oracle)
        ):  # not complex32
            yield other, oracle


def _is_sharp(oracle: OracleResult) -> bool:
    """Whether the numbers are far from the largest of their dtype, so that parts are, too; floats of eight bits only
    where the op moves them: CPU kernels that compute with them exist for some layouts and not for others."""
    outputs = [x for x in oracle.outputs if isinstance(x, Tensor)]
    for x in (*oracle.inputs, *outputs):
        if x.dtype == torch.float16 and x.numel() and float(x.abs().amax()) > torch.finfo(x.dtype).max / SMALL:
            return False
    small = [x.float().flatten() for x in oracle.inputs if is_float8(x.dtype)]
    if not small:
        return True
    there = torch.cat([*small, torch.zeros(1, device=small[0].device)])
    return all(x.dtype.itemsize != 1 or bool(torch.isin(x.float(), there).all()) for x in outputs) and all(
        x.dtype.itemsize == 1 or not x.dtype.is_floating_point for x in outputs
    )


def _run(sample: Sample) -> tuple[Any, list[Any]]:
    with torch.no_grad():
        return run_call(sample.call, [x.clone() for x in sample.tensors], mutates=False)


def _runs(sample: Sample) -> bool:
    try:
        _run(sample)
    except REJECTIONS:
        return False
    return True


def with_sizes_that_fit(sample: Sample, counts: Sequence[int]) -> Iterator[Sample]:
    """The call, which the op rejects, with one or two sizes changed so that the op accepts it.

    Candidates are other sizes of the call, for one size alone also multiples and fractions by `counts` and their squares.
    """
    spots = [(i, dim) for i, x in enumerate(sample.tensors) for dim in range(x.ndim) if x.numel()]
    sizes = sorted({size for x in sample.tensors for size in x.shape})
    left = MOST_SOLVED
    for many in (1, 2):
        for chosen in itertools.combinations(spots, many):
            options = [_sizes(sample.tensors[i].shape[dim], counts if many == 1 else (), sizes) for i, dim in chosen]
            for new in itertools.product(*options):
                changed = {i: list(sample.tensors[i].shape) for i, _ in chosen}
                for (i, dim), size in zip(chosen, new, strict=True):
                    changed[i][dim] = size
                if any(torch.Size(shape).numel() > MOST_NUMEL for shape in changed.values()):
                    continue
                left -= 1
                if left < 0:
                    return
                made = {i: resize(sample.tensors[i], shape) for i, shape in changed.items()}
                other = with_tensors(sample, made, f"sizes {list(changed.values())}")
                if _runs(other):
                    yield other


def _sizes(size: int, counts: Sequence[int], others: Sequence[int]) -> list[int]:
    made = [new for n in counts for new in (size // n, size * n, n, n * n, size * n * n)]
    return [new for new in dict.fromkeys([*made, *others]) if 0 < new <= 64 and new != size]


def other_counts(sample: Sample) -> Iterator[Sample]:
    """Each integer that sizes must be divisible by, as 2, 3, 4 and 1, with sizes that go with it."""
    if trusts_caller(sample.op):
        return
    given = argument_values(sample)
    for a in schema_arguments(sample.op):
        value = given.get(a.name)
        if (
            type(value) is not int
            or isinstance(value, bool)
            or a.name in DIMS
            or "mode" in a.name
            or "int" not in a.kind
        ):
            continue
        for count in COUNTS:
            other = call_with(sample, given | {a.name: count}, f"{a.name}={count}")
            if count != value and not _runs(other):
                yield from itertools.islice(with_sizes_that_fit(other, (count,)), 1)


def other_lists(sample: Sample) -> Iterator[Sample]:
    """Each list of integers but dims with all of them, then the last one, as 2, 3, 4, 1 and 0; sizes are changed where
    the op requires it."""
    if trusts_caller(sample.op):
        return
    given = argument_values(sample)
    for a in schema_arguments(sample.op):
        value = given.get(a.name)
        if a.name in DIMS or repeats_sizes(a.name) or not isinstance(value, (list, tuple)) or not value:
            continue
        if any(type(one) is not int for one in value):
            continue
        for number in (*COUNTS, 0):
            for new in dict.fromkeys([(number,) * len(value), (*value[:-1], number)]):
                other = call_with(sample, given | {a.name: list(new)}, f"{a.name}={list(new)}")
                if list(new) != list(value) and _gives_something(other):
                    yield other


def _gives_something(sample: Sample) -> bool:
    """Whether the op accepts the call and no result is empty: DTensor 2.13 searches for a view of nothing for ever."""
    try:
        _, outs = _run(sample)
    except REJECTIONS:
        return False
    return all(out.numel() for out in outs if isinstance(out, Tensor))


COUNTED = (
    InputForm("other counts", "a dim that is split into groups can be sharded between the groups only", other_counts),
    InputForm("other lists", "strides, paddings and repetitions move what a shard needs of its neighbours", other_lists),
)  # fmt: skip
