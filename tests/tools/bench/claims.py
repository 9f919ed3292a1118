"""What a planted op is: a function of torch, letters that name its dims, and the claims about it that are right.

`Base("matmul", "ab,bc", "ac", torch.matmul, along="ac", folds={"b": "sum"})` says: cut a dim called `a` or
`c` wherever it occurs, and the result is cut there too; cut `b`, and the ranks hold addends.  These rows are
right because the letters say which elements an element of the result is made of, and `because` holds what
else is right, each row with its mathematical reason.  Nothing here was ever decided by asking a validator.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from localtensor.layout.spec import parse, shorts

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
    too; `because` only says what else is right, so that no mutant is taken for wrong; `wrongs` are typical
    mistakes that no change of a right row makes.

    `lists` are the lengths of the lists that the arguments begin with, and `listed` puts all of them into one;
    `many` says that the results come as a list.  `style` is empty, or says that results are written to the first
    arguments (`inplace` returns them, too, `void` does not) or to a keyword `out`.  Of a `random` op only the
    shapes can be right or wrong.
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
    wrongs: tuple[str, ...] = ()
    lists: tuple[int, ...] = ()
    many: bool = False
    style: str = ""
    random: bool = False

    @property
    def dims(self) -> list[str]:
        """The letters of each argument: `["ab", "b"]`."""
        return [t.split("<")[0].lstrip("?+^!") for t in self.tensors.split(",")]

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

    @property
    def groups(self) -> tuple[int, ...]:
        """How many tensors each list holds, the lists that the arguments begin with."""
        return (len(self.dims),) if self.listed else self.lists

    @property
    def spots(self) -> int:
        """How many arguments hold tensors."""
        return len(self.groups) + len(self.dims) - sum(self.groups)

    def nest(self, tensors: Sequence[Tensor]) -> list[Any]:
        """The tensors as the op takes them: lists first, then those that stand alone."""
        rest = [*tensors]
        return [[rest.pop(0) for _ in range(count)] for count in self.groups] + rest

    def flat(self, args: Sequence[Any]) -> list[Tensor]:
        """The tensors among the arguments of a call, lists opened."""
        return [x for a in args[: self.spots] for x in (a if isinstance(a, list) else [a])]

    def schema(self) -> str:
        count = self._written() if self.style in ("inplace", "void") else 0
        names = [f"Tensor[] xs{i}" for i in range(len(self.groups))]
        names += [f"Tensor x{i}" for i in range(self.spots - len(self.groups))]
        marks = [f"(a{i}!)" if i < count else "" for i in range(len(names))]
        given = [n.replace("Tensor", f"Tensor{mark}", 1) for n, mark in zip(names, marks, strict=True)]
        given += [self.scalars] * bool(self.scalars) + ["*, Tensor(a0!) out"] * (self.style == "out")
        returned = ", ".join(["Tensor"] * len(self.results))
        returned = f"({returned})" if "," in returned else returned
        written = {"void": "()", "inplace": "Tensor(a0!)", "out": "Tensor(a0!)"}
        return f"({', '.join(given)}) -> {'Tensor[]' if self.many else written.get(self.style, returned)}"

    def _written(self) -> int:
        """How many of the arguments, a list being one, the results are written to."""
        left, count = len(self.results), 0
        for size in (*self.groups, *([1] * (self.spots - len(self.groups)))):
            count += left > 0
            left -= size
        return count

    def fits(self, row: Row) -> bool:
        """Whether DTensor would follow the row: what is written to keeps its placement, and a dim of one element is
        not cut."""
        cut = [d[p.dim] for p, d in zip(row.inputs, self.dims, strict=True) if isinstance(p, Shard) and p.dim < len(d)]
        kept = self.style not in ("inplace", "void") or row.inputs[: len(row.outputs)] == row.outputs
        return kept and "1" not in cut

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
                yield self.call(sizes, dtype, f"{number} {dtype}")

    def call(self, sizes: Mapping[str, int], dtype: torch.dtype, name: str, values: str = "") -> Any:
        """One call's arguments; the name fixes the values, of which `values` says what is special."""
        rng = torch.Generator().manual_seed(zlib.crc32(f"{self.name} {name}".encode()))
        drawn = [_draw(text, sizes, dtype, rng, values) for text in self.tensors.split(",")]
        return (*self.nest(drawn), *self.args), dict(self.kwargs)


def _at(letter: str, dims: list[str]) -> tuple[Placement, ...]:
    return tuple(Shard(d.index(letter)) if letter in d else Replicate() for d in dims)


def _kinds(how: str, results: int) -> tuple[Placement, ...]:
    kinds = how.split(",")
    return tuple(Partial(kind) for kind in (kinds if len(kinds) == results else kinds * results))


def _draw(text: str, sizes: Mapping[str, int], dtype: torch.dtype, rng: torch.Generator, values: str = "") -> Tensor:
    """Distinct numbers of both signs, no zero among the real ones: no ties, and nothing to divide by zero.

    `ties` draws small whole numbers instead, zeros among them but for `!ab`; `large` ones are up to a million times
    larger, and some of the `not finite` ones are NaN or infinite.  `^ab` are symmetric and positive definite
    matrices, `+ab` positive numbers.
    """
    text, _, below = text.partition("<")
    kind, shape = text[:1], [sizes.get(d) or int(d) for d in text.lstrip("?+^!")]
    if below:
        return torch.randint(0, sizes.get(below) or int(below), shape, generator=rng)
    if kind == "?":
        return torch.randint(0, 4, shape, generator=rng) == 0
    if values == "ties" and kind != "^":
        small = torch.randint(1 if kind == "+" else -2, 4, shape, generator=rng).to(dtype)
        return torch.where(small == 0, 1, small) if kind == "!" else small
    if dtype == torch.int64:
        count = torch.Size(shape).numel()
        return (torch.randperm(count, generator=rng) - (0 if kind == "+" else count // 2)).reshape(shape)
    x = torch.randn(shape, generator=rng, dtype=dtype)
    if kind == "^":
        return x @ x.mT + torch.eye(shape[-1], dtype=dtype)
    x = x.abs() + 0.4 if kind == "+" else x + 0.4 * x.sign()
    if values == "large":
        return x * 10.0 ** torch.randint(0, 7, shape, generator=rng)
    spots = torch.randint(0, 40, shape, generator=rng) if values == "not finite" else torch.ones(())
    return x.where(spots != 0, torch.nan).where(spots != 39, torch.inf)
