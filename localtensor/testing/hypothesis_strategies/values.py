"""A tensor as four small things: shape, dtype, pattern, seed.

Every number of an exact pattern is a multiple of `unit(dtype)`, and at most `bound(dtype)`: so small that sums over
eight ranks and more, in any order, are exact.  A property can so compare to the last bit, whatever the dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from localtensor.testing.hypothesis_strategies.checks import BadDraw, check_dtype, check_names, check_shape

Make = Callable[[tuple[int, ...], torch.dtype, torch.Generator], Tensor]


def unit(dtype: torch.dtype) -> float:
    """What every number of an exact pattern is a multiple of.

    >>> unit(torch.float32), unit(torch.bfloat16), unit(torch.int8)
    (0.0009765625, 0.5, 1.0)
    """
    if not (dtype.is_floating_point or dtype.is_complex):
        return 1.0
    return {torch.bfloat16: 0.5, torch.float16: 0.25}.get(dtype, 2.0**-10)


def bound(dtype: torch.dtype) -> int:
    """The largest number of an exact pattern; the product with the ranks of a mesh still has room beside it.

    >>> bound(torch.float32), bound(torch.bfloat16), bound(torch.uint8)
    (1024, 8, 64)
    """
    if dtype == torch.bool:
        return 1
    return {torch.bfloat16: 8, torch.float16: 16, torch.int8: 64, torch.uint8: 64}.get(dtype, 1024)


def _signed(dtype: torch.dtype) -> bool:
    return dtype not in (torch.bool, torch.uint8)


def _small(shape: tuple[int, ...], dtype: torch.dtype, rng: torch.Generator) -> Tensor:
    low, high = (-4, 5) if _signed(dtype) else (0, 2 if dtype == torch.bool else 5)
    return torch.randint(low, high, shape, generator=rng)


def _arange(shape: tuple[int, ...], dtype: torch.dtype, rng: torch.Generator) -> Tensor:
    return (torch.arange(torch.Size(shape).numel()) % (bound(dtype) + 1)).reshape(shape)


def _alternating(shape: tuple[int, ...], dtype: torch.dtype, rng: torch.Generator) -> Tensor:
    place = torch.arange(torch.Size(shape).numel()).reshape(shape)
    size = torch.randint(1, 2 if dtype == torch.bool else 5, shape, generator=rng)
    return torch.where(place % 2 == 0, size, -size if _signed(dtype) else 0)


def _ties(shape: tuple[int, ...], dtype: torch.dtype, rng: torch.Generator) -> Tensor:
    low, high = (-1, 2) if _signed(dtype) else (0, 1 if dtype == torch.bool else 3)
    return torch.where(torch.rand(shape, generator=rng) < 0.5, low, high)


def _normal(shape: tuple[int, ...], dtype: torch.dtype, rng: torch.Generator) -> Tensor:
    step = unit(dtype)
    drawn = torch.randn(shape, generator=rng, dtype=torch.float64).clamp(-4, 4)
    if step == 1.0:
        return drawn.mul(2).round().abs().long() if not _signed(dtype) else drawn.mul(2).round().long()
    return (drawn / step).round() * step


def _one_big(shape: tuple[int, ...], dtype: torch.dtype, rng: torch.Generator) -> Tensor:
    made = _small(shape, dtype, rng)
    if made.numel():
        sign = 1 - 2 * int(torch.randint(0, 2, (), generator=rng)) if _signed(dtype) else 1
        made.view(-1)[int(torch.randint(0, made.numel(), (), generator=rng))] = sign * bound(dtype)
    return made


def _extremes(shape: tuple[int, ...], dtype: torch.dtype, rng: torch.Generator) -> Tensor:
    """The ends of the dtype, the least that is not zero, and the small numbers around zero."""
    if dtype == torch.bool:
        return _small(shape, dtype, rng)
    ends = _ends(dtype)
    return torch.tensor(ends, dtype=real_dtype(dtype))[torch.randint(0, len(ends), shape, generator=rng)]


def _ends(dtype: torch.dtype) -> list[float]:
    if not (dtype.is_floating_point or dtype.is_complex):
        limits = torch.iinfo(dtype)
        return [0, 1, limits.max, limits.min, limits.max - 1, limits.min + 1]
    info = torch.finfo(dtype)
    return [0.0, 1.0, -1.0, info.max, info.min, info.tiny, -info.tiny, info.eps, -0.0]


def _rough(shape: tuple[int, ...], dtype: torch.dtype, rng: torch.Generator) -> Tensor:
    if not (dtype.is_floating_point or dtype.is_complex):
        return _small(shape, dtype, rng)
    return torch.randn(shape, generator=rng, dtype=torch.float64)


def _sprinkled(*specials: float) -> Make:
    def make(shape: tuple[int, ...], dtype: torch.dtype, rng: torch.Generator) -> Tensor:
        made = _normal(shape, dtype, rng)
        if not made.is_floating_point():
            return made
        special = torch.tensor(specials, dtype=made.dtype)[torch.randint(0, len(specials), shape, generator=rng)]
        here = torch.rand(shape, generator=rng) < 0.25
        if here.numel():
            here.view(-1)[int(torch.randint(0, here.numel(), (), generator=rng))] = True
        return torch.where(here, special, made)

    return make


PATTERNS: dict[str, Make] = {
    "zeros": lambda shape, dtype, rng: torch.zeros(shape),
    "ones": lambda shape, dtype, rng: torch.ones(shape),
    "arange": _arange,
    "small": _small,
    "alternating": _alternating,
    "ties": _ties,
    "normal": _normal,
    "one_big": _one_big,
    "extremes": _extremes,
    "rough": _rough,
    "nan": _sprinkled(float("nan")),
    "inf": _sprinkled(float("inf"), float("-inf")),
}
"""The values that a tensor can have, the simplest first; `nan` and `inf` are `normal` for dtypes that have neither."""
USUAL = tuple(name for name in PATTERNS if name not in ("rough", "nan", "inf"))
"""The patterns that are drawn if nobody asks for others."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """A tensor as it was drawn: its print is short, can be executed, and makes the same tensor again.

    `tensor()` is a fresh one each time.  Raises `BadDraw` for what makes no tensor.

    >>> Drawn((2, 3), torch.int64, "arange").tensor()
    tensor([[0, 1, 2],
            [3, 4, 5]])
    >>> Drawn((2, 3), torch.float32, "normal", 7)
    Drawn((2, 3), torch.float32, 'normal', 7)
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    pattern: str
    seed: int = 0
    requires_grad: bool = False

    def __post_init__(self) -> None:
        check_shape("Drawn", self.shape if self.shape is not None else "None")
        check_dtype("Drawn", self.dtype if self.dtype is not None else "None")
        check_names("Drawn", "pattern", (self.pattern,), tuple(PATTERNS))
        if self.requires_grad and not (self.dtype.is_floating_point or self.dtype.is_complex):
            no_gradient("Drawn", self.dtype)
        object.__setattr__(self, "shape", tuple(self.shape))

    def tensor(self) -> Tensor:
        """The tensor: fresh, contiguous, on the CPU."""
        rng = torch.Generator().manual_seed(self.seed)
        if not self.dtype.is_complex:
            return PATTERNS[self.pattern](self.shape, self.dtype, rng).to(self.dtype).requires_grad_(self.requires_grad)
        if self.pattern == "ones":
            return torch.ones(self.shape, dtype=self.dtype, requires_grad=self.requires_grad)
        both = PATTERNS[self.pattern]((*self.shape, 2), self.dtype, rng).to(real_dtype(self.dtype))
        return torch.view_as_complex(both).requires_grad_(self.requires_grad)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Hypothesis would else print the fields."""
        printer.text(repr(self))

    def __repr__(self) -> str:
        grad = ", requires_grad=True" if self.requires_grad else ""
        return f"Drawn({self.shape}, {self.dtype}, {self.pattern!r}, {self.seed}{grad})"


def no_gradient(call: str, dtype: torch.dtype) -> NoReturn:
    problem = f"a tensor of {dtype} has no gradient"
    raise BadDraw(call, "requires_grad", True, problem, "Pass a floating or complex dtype, or requires_grad=False.")


def real_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of the parts of a complex number; any other dtype itself."""
    return {torch.complex64: torch.float32, torch.complex128: torch.float64}.get(dtype, dtype)
