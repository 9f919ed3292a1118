"""A drawn tensor as shape, dtype, pattern and seed, and the checks of the arguments of strategies.

Every number of an exact pattern is a multiple of `exact_unit(dtype)`, and at most `exact_bound(dtype)`: so small that
sums over eight ranks and more, in any order, are exact.  So a property can compare bit for bit in every dtype.

Each argument of a strategy is checked when the strategy is made, before anything is drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from localtensor.errors.base import Refusal
from localtensor.layout.mesh import Mesh, Printer
from localtensor.layout.spec import PARTIAL_KINDS as REDUCTIONS

DTYPES = (
    torch.float32, torch.float64, torch.int64, torch.bool, torch.bfloat16, torch.float16, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.complex64, torch.complex128,
)  # fmt: skip
"""The dtypes that can be drawn; a counterexample shrinks towards the first."""
KINDS = ("R", "S", "SS", "P", *(f"P({reduction})" for reduction in REDUCTIONS))
"""The kinds of placement that can be requested: `P` stands for each of the five that follow it."""


class BadDraw(Refusal, call="draws.{call}", values="{argument}={value!r}"):
    """An invalid argument of a strategy."""


def print_repr(value: object, printer: Printer, cycle: bool) -> None:
    """Prints the repr of a failing example, where Hypothesis would print the fields: a class's `_repr_pretty_`."""
    printer.text(repr(value))


def check_count(call: str, argument: str, value: object, least: int) -> None:
    """Raises `BadDraw` unless it is an int of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        remedy = f"Pass a whole number from {least} up."
        raise BadDraw(call, argument, value, f"it is no whole number of at least {least}", remedy)


def check_range(call: str, low: str, least: int, high: str, most: int) -> None:
    """Raises `BadDraw` if nothing is between the least and the most."""
    if least > most:
        problem = f"it is more than {high}={most}, so nothing is between them"
        raise BadDraw(call, low, least, problem, f"Pass {low} <= {high}.")


def check_dtype(call: str, value: object) -> None:
    """Raises `BadDraw` unless it is one of `DTYPES`, or None."""
    if value is not None and value not in DTYPES:
        what = "it is not drawn here" if isinstance(value, torch.dtype) else "it is no torch.dtype"
        raise BadDraw(call, "dtype", value, what, f"Pass one of {', '.join(map(str, DTYPES))}, or None for any.")


def check_dtypes(call: str, values: Sequence[object]) -> None:
    if not isinstance(values, list | tuple) or not values:
        raise BadDraw(call, "dtypes", values, "it names no dtype", "Pass a tuple such as (torch.float32,).")
    for value in values:
        check_dtype(call, value if value is not None else "None")


def check_shape(call: str, value: object) -> None:
    """Raises `BadDraw` unless it is a list or tuple of sizes, or None."""
    if value is None:
        return
    whole = isinstance(value, list | tuple) and all(isinstance(n, int) and not isinstance(n, bool) for n in value)
    if not whole or any(n < 0 for n in value):  # type: ignore[attr-defined]  # whole: it is a list or a tuple
        problem = "it is no tuple of sizes of 0 or more"
        raise BadDraw(call, "shape", value, problem, "Pass a tuple such as (5, 3), () for a scalar, or None for any.")


def check_names(call: str, argument: str, values: object, known: Sequence[str]) -> None:
    """Raises unless there is a name at least, and all are known."""
    if not isinstance(values, list | tuple) or not values:
        shown = ", ".join(map(repr, known))
        raise BadDraw(call, argument, values, "it is no tuple of names", f"Pass some of {shown}, in a tuple.")
    for value in values:
        if value not in known:
            problem = f"there is no {value!r}"
            raise BadDraw(call, argument, values, problem, f"Pass some of {', '.join(map(repr, known))}.")


def check_words(call: str, argument: str, values: object) -> None:
    if not isinstance(values, list | tuple) or not values or not all(isinstance(value, str) for value in values):
        raise BadDraw(call, argument, values, "it is no tuple of names", "Pass names in a tuple, such as ('add',).")


def check_mesh(call: str, value: object) -> None:
    if not isinstance(value, Mesh):
        raise BadDraw(call, "mesh", value, "it is no Mesh", "Pass one such as Mesh.of(dp=2, tp=4).")


def check_axis_names(call: str, names: object, most: int) -> None:
    """Raises `BadDraw` unless these are different identifiers, at least `most` of them."""
    fine = isinstance(names, list | tuple) and all(isinstance(name, str) and name.isidentifier() for name in names)
    if not fine or len(set(names)) < most or len(set(names)) < len(names):  # type: ignore[call-overload,arg-type]  # fine: it is a list or a tuple
        problem = f"these are not {most} different names"
        raise BadDraw(call, "names", names, problem, "Pass a name for each axis, such as ('dp', 'tp').")


PatternMaker = Callable[[tuple[int, ...], torch.dtype, torch.Generator], Tensor]


def exact_unit(dtype: torch.dtype) -> float:
    """The unit of which every number of an exact pattern is a multiple.

    >>> exact_unit(torch.float32), exact_unit(torch.bfloat16), exact_unit(torch.int8)
    (0.0009765625, 0.5, 1.0)
    """
    if not (dtype.is_floating_point or dtype.is_complex):
        return 1.0
    return {torch.bfloat16: 0.5, torch.float16: 0.25}.get(dtype, 2.0**-10)


def exact_bound(dtype: torch.dtype) -> int:
    """The largest number of an exact pattern; its sum over the ranks of a mesh is exact, too.

    >>> exact_bound(torch.float32), exact_bound(torch.bfloat16), exact_bound(torch.uint8)
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
    return (torch.arange(torch.Size(shape).numel()) % (exact_bound(dtype) + 1)).reshape(shape)


def _alternating(shape: tuple[int, ...], dtype: torch.dtype, rng: torch.Generator) -> Tensor:
    place = torch.arange(torch.Size(shape).numel()).reshape(shape)
    size = torch.randint(1, 2 if dtype == torch.bool else 5, shape, generator=rng)
    return torch.where(place % 2 == 0, size, -size if _signed(dtype) else 0)


def _ties(shape: tuple[int, ...], dtype: torch.dtype, rng: torch.Generator) -> Tensor:
    low, high = (-1, 2) if _signed(dtype) else (0, 1 if dtype == torch.bool else 3)
    return torch.where(torch.rand(shape, generator=rng) < 0.5, low, high)


def _normal(shape: tuple[int, ...], dtype: torch.dtype, rng: torch.Generator) -> Tensor:
    step = exact_unit(dtype)
    drawn = torch.randn(shape, generator=rng, dtype=torch.float64).clamp(-4, 4)
    if step == 1.0:
        return drawn.mul(2).round().abs().long() if not _signed(dtype) else drawn.mul(2).round().long()
    return (drawn / step).round() * step


def _one_big(shape: tuple[int, ...], dtype: torch.dtype, rng: torch.Generator) -> Tensor:
    made = _small(shape, dtype, rng)
    if made.numel():
        sign = 1 - 2 * int(torch.randint(0, 2, (), generator=rng)) if _signed(dtype) else 1
        made.view(-1)[int(torch.randint(0, made.numel(), (), generator=rng))] = sign * exact_bound(dtype)
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


def _sprinkled(*specials: float) -> PatternMaker:
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


PATTERNS: dict[str, PatternMaker] = {
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
"""The patterns of values, the simplest first; `nan` and `inf` are `normal` for dtypes that have neither."""
USUAL = tuple(name for name in PATTERNS if name not in ("rough", "nan", "inf"))
"""The patterns that are drawn by default."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """A drawn tensor: its repr is short, can be executed, and makes the same tensor again.

    `tensor()` returns a fresh one each time.  Raises `BadDraw` for invalid fields.

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

    _repr_pretty_ = print_repr

    def __repr__(self) -> str:
        grad = ", requires_grad=True" if self.requires_grad else ""
        return f"Drawn({self.shape}, {self.dtype}, {self.pattern!r}, {self.seed}{grad})"


def no_gradient(call: str, dtype: torch.dtype) -> NoReturn:
    """Raises `BadDraw`: no tensor of this dtype has a gradient."""
    problem = f"a tensor of {dtype} has no gradient"
    raise BadDraw(call, "requires_grad", True, problem, "Pass a floating or complex dtype, or requires_grad=False.")


def real_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the parts of a complex dtype; any other dtype itself."""
    return {torch.complex64: torch.float32, torch.complex128: torch.float64}.get(dtype, dtype)
