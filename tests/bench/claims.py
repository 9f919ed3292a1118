"""What a planted op is: a function of torch, letters that name its dims, and the claims about it that are right.

`Base("matmul", "ab,bc", "ac", torch.matmul, along="ac", folds={"b": "sum"})` says: cut a dim called `a` or
`c` wherever it occurs, and the result is cut there too; cut `b`, and the ranks hold addends.  These rows are
right because the letters say which elements an element of the result is made of, and `because` holds what
else is right, each row with its mathematical reason.  Nothing here was ever decided by asking a validator.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from localtensor.placement import parse, shorts

SIZES: tuple[dict[str, int], ...] = (
    {"a": 7, "b": 8, "c": 10, "d": 11},
    {"a": 12, "b": 10, "c": 8, "d": 7},
    {"a": 8, "b": 8, "c": 8, "d": 8},
)
"""Odd and even, square and not; each leaves every one of 2, 3 or 4 ranks with a row."""
EVEN: tuple[dict[str, int], ...] = ({"a": 12, "b": 12, "c": 24, "d": 12}, {"a": 24, "b": 12, "c": 12, "d": 24})
"""Sizes that 2, 3 and 4 ranks divide."""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a rule: a placement for each tensor argument, and one for each result."""

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]

    def __str__(self) -> str:
        return f"{shorts(self.inputs)} -> {shorts(self.outputs)}"


def row(text: str) -> Row:
    """`S(0), R -> P(sum)` as a row."""
    inputs, outputs = text.split("->")
    return Row(tuple(map(parse, inputs.split(","))), tuple(map(parse, outputs.split(","))))


@dataclass(frozen=True)
class Base:
    """An op and what is right about it.

    `tensors` names the dims of each argument: a letter is a size, a digit is itself; `?ab` is a boolean
    tensor, `ab<c` one of indices below the size of c.  `along` are the letters that the op treats one by
    one; `folds` the letters that it reduces, and how (one word for each result).  `partials` become rules
    too; `because` only says what else is right, so that no mutant is taken for wrong.
    """

    name: str
    tensors: str
    outs: str
    func: Callable[..., Any]
    scalars: str = ""
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    along: str = ""
    folds: Mapping[str, str] = field(default_factory=dict)
    partials: tuple[str, ...] = ()
    because: tuple[tuple[str, tuple[str, ...]], ...] = ()
    listed: bool = False
    integers: bool = True
    sizes: tuple[dict[str, int], ...] = SIZES

    @property
    def dims(self) -> list[str]:
        """The letters of each argument: `["ab", "b"]`."""
        return [t.split("<")[0].lstrip("?") for t in self.tensors.split(",")]

    @property
    def results(self) -> list[str]:
        return self.outs.split(",")

    @property
    def reals(self) -> list[bool]:
        """Which arguments are numbers, and can be partial: neither indices nor booleans."""
        return ["?" not in t and "<" not in t for t in self.tensors.split(",")]

    @property
    def boolean(self) -> bool:
        return all("?" in t for t in self.tensors.split(","))

    def schema(self) -> str:
        given = ", ".join(f"Tensor x{i}" for i in range(len(self.dims)))
        given = "Tensor[] xs" if self.listed else given
        returned = ", ".join(["Tensor"] * len(self.results))
        return f"({given}{', ' if self.scalars else ''}{self.scalars}) -> {f'({returned})' if ',' in returned else returned}"

    def cut(self, letter: str) -> Row:
        """Every dim of this name cut: what is right if the op treats the letter element by element."""
        return Row(_at(letter, self.dims), _at(letter, self.results))

    def rows(self) -> list[Row]:
        """The right rows that become rules of their own."""
        cut = [self.cut(letter) for letter in self.along]
        reduced = [Row(_at(letter, self.dims), _kinds(how, len(self.results))) for letter, how in self.folds.items()]
        return [*cut, *reduced, *map(row, self.partials)]

    def reasons(self) -> dict[str, str]:
        """Every right row with why it is right."""
        found = {str(self.cut(letter)): f"the op treats {letter} element by element" for letter in self.along}
        for letter, how in self.folds.items():
            found[str(Row(_at(letter, self.dims), _kinds(how, len(self.results))))] = f"{letter} is reduced by {how}"
        found |= {str(row(text)): "stated as a rule of its own" for text in self.partials}
        for why, texts in self.because:
            found |= {str(row(text)): why for text in texts}
        return found

    def calls(self) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
        """Arguments on whole tensors: each choice of sizes in float64, the first one in int64 too."""
        for number, sizes in enumerate(self.sizes):
            for dtype in (torch.float64, torch.int64) if self.integers and not number else (torch.float64,):
                rng = torch.Generator().manual_seed(zlib.crc32(f"{self.name} {number} {dtype}".encode()))
                drawn = tuple(_draw(text, sizes, dtype, rng) for text in self.tensors.split(","))
                tensors = ([*drawn],) if self.listed else drawn
                yield (*tensors, *self.args), dict(self.kwargs)


def _at(letter: str, dims: list[str]) -> tuple[Placement, ...]:
    return tuple(Shard(d.index(letter)) if letter in d else Replicate() for d in dims)


def _kinds(how: str, results: int) -> tuple[Placement, ...]:
    kinds = how.split(",")
    return tuple(Partial(kind) for kind in (kinds if len(kinds) == results else kinds * results))


def _draw(text: str, sizes: Mapping[str, int], dtype: torch.dtype, rng: torch.Generator) -> Tensor:
    """Distinct numbers of both signs, no zero among the real ones: no ties, and nothing to divide by zero."""
    text, _, below = text.partition("<")
    shape = [sizes.get(d) or int(d) for d in text.lstrip("?")]
    if below:
        return torch.randint(0, sizes.get(below) or int(below), shape, generator=rng)
    if text.startswith("?"):
        return torch.randint(0, 4, shape, generator=rng) == 0
    if dtype == torch.int64:
        count = torch.Size(shape).numel()
        return (torch.randperm(count, generator=rng) - count // 2).reshape(shape)
    x = torch.randn(shape, generator=rng, dtype=dtype)
    return x + 0.4 * x.sign()
