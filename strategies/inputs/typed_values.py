"""Calls of an op drawn from its schema: each argument by its type and its name.

This is for overloads without samples from OpInfo or a sibling.  The draws depend on the overload, the dtype and the
seed alone.  An op may crash on arguments that it should reject, so values are moderate, and the draws run in a worker.

`schema_calls` tests combinations of a few shapes and a few values for each argument, and drops those that the op
rejects.  A rules module can define better ones in a function `samples(op)` that yields (args, kwargs).
"""

from __future__ import annotations

import itertools
import math
import random
import zlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from localtensor.layout import is_float8
from strategies.inputs.schema_binding import ABSENT, BoundCall, Unbound, complete_call, prefer_finite
from strategies.model.arguments import SORTED_ARGUMENTS, argument_kind, is_index
from strategies.model.kernels import REJECTIONS, run_call
from strategies.model.rule import Sample, call_of, overload

FIRST_DTYPES = ("float64", "int64", "bool", "complex64")
FALLBACK_DTYPES = ("float32", "bfloat16", "int32", "float16", "float8_e4m3fn", "uint8")
"""Dtypes that are drawn, and those that are drawn if the op accepts none of them."""
ATTEMPTS, MOST = 24, 6
"""Draws of one dtype, and the most that are kept."""

_PLAIN = ((8, 4), (6, 5), (4, 4), (12,), (4, 6, 8), (5, 3), (4, 8, 8), (2, 4, 6, 6))
_BY_DIMS = {"1d": ((2, 4, 9), (4, 6, 8)), "2d": ((2, 4, 8, 6), (4, 2, 6, 9)), "3d": ((2, 4, 6, 4, 6), (2, 2, 4, 6, 5))}
"""Shapes of tensors; an op with 2d in its name has two spatial dims after the batch and the channels."""
_LISTS = (((8, 4), (5,)), ((6, 5), (4, 4), (3,)), ((4, 4), (6, 6)), ((6, 4),))
"""Shapes of the tensors in a list: of different sizes, square, and a single one."""
_EIGHT_BITS = ((16, 16), (32, 32))
"""Kernels for eight-bit floats require multiples of 16."""
_CHANNELS = ("weight", "bias", "running_mean", "running_var", "save_mean", "save_invstd", "mean", "rstd")
_SCALARS = ("lr", "scale", "found_inf", "step", "offs")
_POSITIVE = ("var", "sq", "std", "scale", "step", "noise", "lr")


def draw_calls(op: str, dtypes: Sequence[str] = FIRST_DTYPES, seed: int = 0) -> list[Sample]:
    """At most `MOST` calls for each dtype that the op accepts; if there are none, calls of other dtypes (`FALLBACK_DTYPES`).

    Raises `Unbound` with the most frequent error if the op rejects all.
    """
    refused: dict[str, int] = {}
    found: list[Sample] = []
    number = 0
    for dtype in (*dtypes, *(d for d in FALLBACK_DTYPES if d not in dtypes)):
        if found and dtype not in dtypes:
            break
        kept: dict[str, BoundCall] = {}
        rng = random.Random(zlib.crc32(f"{seed} {op} {dtype}".encode()))
        for _ in range(ATTEMPTS):
            number += 1
            try:
                bound = _drawn(op, getattr(torch, dtype), rng, number)
            except Unbound as no:
                refused[str(no)] = refused.get(str(no), 0) + 1
                continue
            kept.setdefault(str(bound.sample.arguments()), bound)
            if sum(b.finite for b in kept.values()) == MOST:
                break
        found += prefer_finite(kept.values())[:MOST]
    if not found:
        raise Unbound(f"it refuses all {number} calls drawn for it: {max(refused, key=lambda why: refused[why])}")
    return found


def _drawn(op: str, dtype: torch.dtype, rng: random.Random, number: int) -> BoundCall:
    arguments = [a for a in overload(op)._schema.arguments if not a.is_out]
    shapes = next((s for word, s in _BY_DIMS.items() if word in op), _PLAIN)
    if is_float8(dtype):
        shapes = _EIGHT_BITS
    draw = _Draw(rng.choice(shapes), rng.choice(_LISTS), dtype, rng)
    draw.backward = "backward" in op
    draw.on_lists = any(argument_kind(a) == "Tensors" for a in arguments)
    values = [draw.value(a) for a in arguments]
    return complete_call(op, values, f"drawn from the schema, attempt {number}")


class _Draw:
    """One attempt: a shape for tensors, shapes for lists of tensors, and a dtype.

    The method `_<type>` draws a value for an argument of that type (see `schema_binding.kind`) and name.
    """

    def __init__(
        self, shape: tuple[int, ...], lists: tuple[tuple[int, ...], ...], dtype: torch.dtype, rng: random.Random
    ) -> None:
        self.shape, self.lists, self.dtype, self.rng = shape, lists, dtype, rng
        self.numbers = torch.Generator().manual_seed(rng.getrandbits(48))
        self.first: tuple[int, ...] = ()
        self.positive = rng.random() < 0.5
        self.on_lists = self.backward = False

    def value(self, argument: torch._C.Argument) -> object:
        """A value for the argument, or `ABSENT`."""
        what, optional = argument_kind(argument), str(argument.type).startswith("Optional")
        factory = argument.kwarg_only and what in ("Layout", "Device", "MemoryFormat", "bool")
        if what == "Generator" or (factory and optional):
            return ABSENT
        if (optional or argument.has_default_value()) and self.rng.random() < 0.5:
            return ABSENT if argument.has_default_value() else None
        made = getattr(self, f"_{what.lower()}", None)
        return made(argument.name) if made is not None else ABSENT

    def _tensor(self, name: str) -> Tensor:
        if any(word in name for word in _SCALARS):
            return self._numbers_in((), name)
        if self.on_lists:  # a tensor beside lists is a number for all of them, or has a number for each
            return self._numbers_in(self.rng.choice([(), (len(self.lists),)]), name)
        if name in _CHANNELS and len(self.shape) > 1:
            return self._numbers_in((self.shape[1],), name)
        if is_index(name):
            return torch.randint(0, min(self.shape), self.shape[:1], generator=self.numbers)
        shape = self.shape
        if self.first and self.rng.random() < 0.25:
            shape = self.first[-2:][::-1] if self.rng.random() < 0.5 else self.first[-1:]
        self.first = self.first or shape
        made = self._numbers_in(shape, name)
        return made.t() if name == "mat2" and made.ndim == 2 and self.dtype.itemsize == 1 else made

    def _tensors(self, name: str) -> list[Tensor]:
        if any(word in name for word in _SCALARS):
            return [self._numbers_in((), name) for _ in self.lists]
        return [self._numbers_in(shape, name) for shape in self.lists]

    def _numbers_in(self, shape: tuple[int, ...], name: str) -> Tensor:
        if self.dtype == torch.bool:
            return torch.randint(0, 2, shape, generator=self.numbers).bool()
        if not (self.dtype.is_floating_point or self.dtype.is_complex):
            drawn = torch.randint(1, 10, shape, generator=self.numbers)  # no zero: the op may divide by it
            signs = 1 if self.positive or "step" in name else torch.randint(0, 2, shape, generator=self.numbers) * 2 - 1
            return (drawn * signs).to(self.dtype)
        drawn = torch.randn(shape, generator=self.numbers, dtype=torch.float64) * 2
        if self.positive or any(word in name for word in _POSITIVE):
            drawn = drawn.abs() + 0.5
        if name == "found_inf":
            drawn = torch.zeros(shape, dtype=torch.float64)
        if self.dtype.is_complex:
            drawn = torch.complex(drawn, torch.randn(shape, generator=self.numbers, dtype=torch.float64))
        small = self.dtype.itemsize == 1 and any(word in name for word in _SCALARS)
        return drawn.to(torch.float32 if small else self.dtype)  # scales of eight-bit floats are float32

    def _number(self, name: str) -> bool | int | float:
        if self.dtype == torch.bool:
            return self.rng.choice([True, False])
        return self.rng.choice([0.5, 2.0, 1, -1.5] if self.dtype.is_floating_point else [2, 1, 3, -1])

    def _numbers(self, name: str) -> list[Any]:
        return [self._number(name) for _ in self.lists]

    def _float(self, name: str) -> float:
        fraction = name in ("p", "beta1", "beta2", "lr", "eps", "dropout_p")
        return self.rng.choice([0.5, 0.25, 0.125] if fraction else [0.5, 2.0])

    def _floats(self, name: str) -> list[float]:
        return [2.0] * self._spatial()

    def _bool(self, name: str) -> bool:
        return self.rng.random() < 0.5

    def _bools(self, name: str) -> list[bool]:
        return [True] * self.rng.choice([2, 3, 4])

    def _int(self, name: str) -> int:
        if "dim" in name or name == "axis":
            return self.rng.choice([0, 1, -1])
        return self.rng.choice([1, 2, 0, 3])

    def _scalartype(self, name: str) -> torch.dtype:
        same = [d for d in (torch.float32, torch.int64, torch.float64) if d.itemsize == self.dtype.itemsize]
        return self.rng.choice([torch.float32, torch.int64, *same])

    def _str(self, name: str) -> str | None:
        return {"rounding_mode": "floor", "approximate": self.rng.choice(["none", "tanh"])}.get(name, "mean")

    def _spatial(self) -> int:
        return max(len(self.shape) - 2, 1)

    def _ints(self, name: str) -> list[int]:
        n = self._spatial()
        if "dim" in name:
            return [self.rng.choice([0, 1, -1])]
        by_name = {
            "padding": [0] * n, "output_padding": [0] * n, "dilation": [1] * n, "stride": [self.rng.choice([1, 2])] * n,
            "kernel_size": [2] * n, "output_size": [self.rng.choice([2, 3, 4])] * n, "input_size": list(self.shape),
            "normalized_shape": list(self.shape[-1:]),
        }  # fmt: skip
        if name in by_name:
            grad_of_all = name == "output_size" and self.backward
            return list(self.shape[2:]) if grad_of_all else by_name[name]
        if "shape" in name or name == "size":
            return self.rng.choice([[math.prod(self.shape)], list(self.shape[::-1]), [-1]])
        return [self.rng.choice([1, 2])] * len(self.shape)


SHAPES: tuple[tuple[tuple[int, ...], ...], ...] = (
    ((8, 4), (8, 4)), ((4, 4), (4, 4)), ((6, 5), (6, 5)), ((12,), (12,)), ((4, 6, 8), (4, 6, 8)), ((5, 3), (5, 3)),
    ((8, 4), (4, 8)), ((5, 4), (4, 6)), ((8, 4), (4,)), ((8, 4), (8,)), ((4, 8, 6), (4, 6, 8)),
    ((2, 4, 6, 8), (2, 4, 6, 8)),
)  # fmt: skip
"""The first tensor's shape, and that of all others."""
MOST_DRAWN = 48
"""Calls of one dtype."""
TRIES = 4
"""Draws for each value that is wanted, at most, since some are duplicates or None."""
T = TypeVar("T")
V = TypeVar("V", bound=Hashable)


def schema_calls(op: torch._ops.OpOverload, dtypes: Iterable[torch.dtype], seed: int) -> list[Sample]:
    """At most `MOST_DRAWN` calls that the op accepts, for each dtype; determined by the seed."""
    rng = torch.Generator().manual_seed(seed)
    found: list[Sample] = []
    for dtype in dtypes:
        accepted = (s for s in _draws(op, dtype, rng) if accepts(s))
        found += itertools.islice(accepted, MOST_DRAWN)
    return found


def user_samples(op: torch._ops.OpOverload, drawn: Iterable[tuple[tuple[Any, ...], dict[str, Any]]]) -> list[Sample]:
    """The samples of a rules module, which yields (args, kwargs)."""
    made = [(call_of(op, args, kwargs), number) for number, (args, kwargs) in enumerate(drawn)]
    return [Sample(call, tuple(t.detach() for t in tensors), f"samples() #{n}") for (call, tensors), n in made]


def _draws(op: torch._ops.OpOverload, dtype: torch.dtype, rng: torch.Generator) -> Iterator[Sample]:
    schema = [a for a in op._schema.arguments if not (a.kwarg_only and a.has_default_value())]
    for number, shapes in enumerate(SHAPES):
        for values in itertools.islice(itertools.product(*(_choices(a) for a in schema)), 16):
            filled = _with_tensors(schema, values, shapes, dtype, rng)
            args = [v for a, v in zip(schema, filled, strict=True) if not a.kwarg_only]
            kwargs = {a.name: v for a, v in zip(schema, filled, strict=True) if a.kwarg_only}
            call, taken = call_of(op, args, kwargs)
            yield Sample(call, tuple(taken), f"drawn from the schema, shapes #{number}")


def _with_tensors(
    schema: Sequence[Any],
    values: Sequence[Any],
    shapes: Sequence[tuple[int, ...]],
    dtype: torch.dtype,
    rng: torch.Generator,
) -> list[Any]:
    """The values with tensors of these shapes in place: the first shape for the first tensor."""
    left = itertools.chain(shapes[:1], itertools.repeat(shapes[-1]))
    smallest = min(size for shape in shapes for size in shape)  # an index below it is valid in every dim

    def made(name: str) -> torch.Tensor:
        shape = next(left)
        if is_index(name):
            return torch.randint(0, smallest, shape, generator=rng)
        drawn = _tensor(shape, dtype, rng)
        return drawn.sort(-1).values if name in SORTED_ARGUMENTS and not dtype.is_complex else drawn

    filled: list[Any] = []
    for argument, value in zip(schema, values, strict=True):
        if value is _TENSORS:
            filled.append([made(argument.name) for _ in range(2)])
        else:
            filled.append(made(argument.name) if value is _TENSOR else value)
    return filled


_TENSOR, _TENSORS = object(), object()


def _choices(argument: torch._C.Argument) -> list[Any]:
    kind = str(argument.type)
    if "Tensor" in kind:
        return [_TENSORS if "List" in kind else _TENSOR]
    optional = [None] if kind.startswith("Optional") else []
    if "List[int]" in kind:
        return [[0], [1], [-1], *optional]
    if "int" in kind or "SymInt" in kind:
        return ([0, 1, -1] if "dim" in argument.name or argument.name == "axis" else [1, 2]) + optional
    if "bool" in kind:
        return [False, True]
    if "float" in kind or "number" in kind or "Scalar" in kind:
        return [0.5, 2.0, *optional]
    return [argument.default_value] if argument.has_default_value() else [None]


def _tensor(shape: tuple[int, ...], dtype: torch.dtype, rng: torch.Generator) -> torch.Tensor:
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=rng).bool()
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.randint(-9, 10, shape, generator=rng).to(dtype)
    return (torch.randn(shape, generator=rng, dtype=torch.float64) * 2).to(dtype)


def accepts(sample: Sample) -> bool:
    """Whether the op accepts the call."""
    try:
        run_call(sample.call, sample.tensors, mutates=True)
    except REJECTIONS:
        return False
    return True


class Picker(Protocol):
    """A function that returns one of the options, each with a positive probability."""

    def __call__(self, options: Sequence[T], /) -> T: ...


def drawn(make: Callable[[Picker], V | None], *, seed: int, budget: int) -> list[V]:
    """At most `budget` different values of `make`, without None, in the order of the draws.

    `make` must not raise, and must depend on nothing but its picks and the number of its calls: then the values are determined by
    the seed.
    """
    pick: Picker = random.Random(seed).choice
    found: dict[V, None] = {}
    for _ in range(TRIES * budget):
        if len(found) == budget:
            break
        value = make(pick)
        if value is not None:
            found[value] = None
    return list(found)
