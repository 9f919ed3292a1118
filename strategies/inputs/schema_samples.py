"""Calls of an op drawn from its schema, and Hypothesis as a source of choices.

`schema_calls` tests combinations of a few shapes and a few values for each argument, and drops those that the op
rejects.  A rules module can define better ones in a function `samples(op)` that yields (args, kwargs).

`drawn` makes every choice from Hypothesis' coin flips alone.  Its strategies for integers, floats and texts also try constants
from the source of loaded modules, so that the same seed would draw other values in another process, and store them on disk.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import torch
from hypothesis import HealthCheck, Phase, Verbosity, seed, settings
from hypothesis import given as hypothesis_given
from hypothesis import strategies as st

from strategies.model.arguments import SORTED_ARGUMENTS, is_index
from strategies.model.oracle import REJECTIONS
from strategies.model.rule import Sample, call_of

SHAPES: tuple[tuple[tuple[int, ...], ...], ...] = (
    ((8, 4), (8, 4)), ((4, 4), (4, 4)), ((6, 5), (6, 5)), ((12,), (12,)), ((4, 6, 8), (4, 6, 8)), ((5, 3), (5, 3)),
    ((8, 4), (4, 8)), ((5, 4), (4, 6)), ((8, 4), (4,)), ((8, 4), (8,)), ((4, 8, 6), (4, 6, 8)),
    ((2, 4, 6, 8), (2, 4, 6, 8)),
)  # fmt: skip
"""The first tensor's shape, and that of all others."""
MOST = 48
"""Calls of one dtype."""
SPARE = 2
"""Examples drawn beyond the budget, since some are duplicates or None."""
T = TypeVar("T")
V = TypeVar("V", bound=Hashable)


def schema_calls(op: torch._ops.OpOverload, dtypes: Iterable[torch.dtype], seed: int) -> list[Sample]:
    """At most `MOST` calls that the op accepts, for each dtype; determined by the seed."""
    rng = torch.Generator().manual_seed(seed)
    found: list[Sample] = []
    for dtype in dtypes:
        accepted = (s for s in _drawn(op, dtype, rng) if accepts(s))
        found += itertools.islice(accepted, MOST)
    return found


def user_samples(op: torch._ops.OpOverload, drawn: Iterable[tuple[tuple[Any, ...], dict[str, Any]]]) -> list[Sample]:
    """The samples of a rules module, which yields (args, kwargs)."""
    made = [(call_of(op, args, kwargs), number) for number, (args, kwargs) in enumerate(drawn)]
    return [Sample(call, tuple(t.detach() for t in tensors), f"samples() #{n}") for (call, tensors), n in made]


def _drawn(op: torch._ops.OpOverload, dtype: torch.dtype, rng: torch.Generator) -> Iterator[Sample]:
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
        sample.call([t.clone() for t in sample.tensors])
    except REJECTIONS:
        return False
    return True


class Picker(Protocol):
    """A function that returns one of the options, each with a positive probability."""

    def __call__(self, options: Sequence[T]) -> T: ...


def drawn(make: Callable[[Picker], V | None], *, seed: int, budget: int) -> list[V]:
    """At most `budget` different values of `make`, without None, in the order of the draws.

    `make` must not raise, and must depend on nothing but its picks: then the values are determined by the seed.
    """
    found = dict.fromkeys(_examples(make, seed, budget + SPARE)) if budget > 0 else {}
    return list(itertools.islice((value for value in found if value is not None), budget))


def _examples(make: Callable[[Picker], V | None], number: int, count: int) -> list[V | None]:
    values: list[V | None] = []
    flips = st.booleans()

    @st.composite
    def examples(draw: Callable[[st.SearchStrategy[bool]], bool]) -> V | None:
        def pick(options: Sequence[T]) -> T:
            bits = (len(options) - 1).bit_length()
            place = sum(draw(flips) << bit for bit in range(bits))
            return options[place * len(options) >> bits]

        return make(pick)

    @seed(number)
    @settings(
        database=None, phases=(Phase.generate,), max_examples=count, deadline=None, derandomize=False,
        suppress_health_check=list(HealthCheck), verbosity=Verbosity.quiet,
    )  # fmt: skip
    @hypothesis_given(examples())
    def collect(value: V | None) -> None:
        values.append(value)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        collect()
    return values
