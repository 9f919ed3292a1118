"""The reach of a fault: the severity of a case, its public spelling, and the search for the most ordinary case.

The severity orders causes.  What is silently wrong comes before what raises; within either, in this order:

| reach          | the case                                                                                 |
|-----------------|------------------------------------------------------------------------------------------|
| everyday        | a public call on float tensors, even shards, arguments at their defaults                  |
| uneven shards   | a sharded dim is no multiple of the ranks                                                 |
| arguments       | an optional argument is given and is not its default; a further use of a public call      |
| not finite      | NaN or infinity among the values                                                          |
| other dtypes    | a tensor of integers, booleans, complex numbers or float8, other than positions in another |
| private op      | no public function makes this call                                                        |
| out=            | a tensor given as `out=`                                                                  |
| empty shards    | an empty tensor, or a rank without a row                                                  |

A case has the last of these that applies.  Of equal ones shards come before partial inputs, one mesh axis before several.
"""

from __future__ import annotations

import cmath
import contextlib
import enum
import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional
from torch import Tensor
from torch.distributed.tensor import Partial
from torch.utils import _pytree as pytree

from localtensor.layout import all_finite, is_float8, is_inexact, shape_text, shard_cut
from strategies.base import shrink as base_shrink
from strategies.model.arguments import (
    ScalarArgument,
    counts_dims,
    is_index,
    named_arguments,
    scalar_arguments,
    trusts_caller,
)
from strategies.model.kernels import REJECTIONS
from strategies.model.rule import (
    PUBLIC,
    Call,
    Program,
    leaf_numbers,
    out_leaves,
    overload,
    placements_text,
    split_prior_call,
    then_text,
)
from strategies.programs.public_api.table import is_further_use
from strategies.programs.run.follow_ups import in_words
from strategies.programs.run.program_oracle import tensors_made
from strategies.programs.shrink.search import fitting_out
from strategies.programs.shrink.sizes import fewer_axes, fewer_dims, fewer_operands, fewer_ranks, resized, unevenness
from strategies.programs.shrink.values import (
    DECIMAL,
    counted,
    digits,
    in_float32,
    simpler_scalars,
    with_tensors,
    without_tensors,
)
from strategies.sweep.causes.spelling import equal_tensors, is_private, spelled

MAX_RUNS = 120
"""Runs for the most ordinary case of one finding."""


class Reach(enum.IntEnum):
    EVERYDAY = 0
    UNEVEN = 1
    ARGUMENTS = 2
    NOT_FINITE = 3
    OTHER_DTYPES = 4
    PRIVATE = 5
    OUT = 6
    EMPTY = 7

    def __str__(self) -> str:
        return _NAMES[self]


_NAMES = ("everyday", "uneven shards", "arguments", "not finite", "other dtypes", "private op", "out=", "empty shards")


@dataclass(frozen=True, slots=True, order=True)
class Severity:
    """The severity of a case: the order of these, smallest first, is the order of causes."""

    raises: bool
    reach: Reach
    odd_placements: int = 0
    """0 for shards and replicas, 1 with a partial sum among the inputs, 2 with other placements."""
    axes: int = 1

    @property
    def order(self) -> tuple[bool, Reach, int, int]:
        return self.raises, self.reach, self.odd_placements, self.axes

    def __str__(self) -> str:
        return f"{'raises' if self.raises else 'silent'}, {self.reach}"


_EMPTY_PIECE = re.compile(r"\[(?:\d+, )*0(?:, \d+)*\]")
"""The shape of an empty piece in the text of an error."""


def severity(program: Program, raises: bool, reason: str = "") -> Severity:
    """The severity of a program that goes wrong: silently, or by an error on some rank, which may be one of a piece that DTensor
    has made empty."""
    placed = [p for layout in program.inputs for p in layout]
    odd = max((_oddness(p) for p in placed), default=0)
    reached = Reach.EMPTY if raises and _EMPTY_PIECE.search(reason) else reach(program)
    return Severity(raises, reached, odd, len(program.mesh) + program.flattened)


def _oddness(placement: object) -> int:
    if isinstance(placement, Partial):
        return 1 if placement.reduce_op == "sum" else 2
    cut = shard_cut(placement)  # type: ignore[arg-type]
    return 2 if cut is not None and cut[1] > 1 else 0


def reach(program: Program) -> Reach:
    """The reach of a program: the last line of the table that applies."""
    sample = program.sample
    integers = [leaf for name, value in sample.call.named().items() if is_index(name) for leaf in leaf_numbers(value)]
    dtypes = [x.dtype for i, x in enumerate(sample.tensors) if i not in integers]
    uneven = max(unevenness(program), _public_unevenness(program))
    applies = {
        Reach.UNEVEN: uneven > 0,
        Reach.ARGUMENTS: any(_special_arguments(sample.call)) or is_further_use(program.then),
        Reach.NOT_FINITE: not all(map(all_finite, sample.tensors)) or _scalars_not_finite(sample.call),
        Reach.OTHER_DTYPES: not all(d.is_floating_point and not is_float8(d) for d in dtypes)
        or "int64" in program.then,
        Reach.PRIVATE: is_private(sample),
        Reach.OUT: bool(out_leaves(sample.call)),
        Reach.EMPTY: uneven > 1,
    }
    return max((level for level, holds in applies.items() if holds), default=Reach.EVERYDAY)


def _public_unevenness(program: Program) -> int:
    """As `unevenness`, of a tensor that a public call may shard along any dim."""
    if not program.then.startswith(PUBLIC):
        return 0
    shape = program.sample.tensors[0].shape
    return max((1 + (size < program.ranks) for size in shape if size % program.ranks), default=0)


def _special_arguments(call: Call) -> Iterator[str]:
    schema = {a.name: a for a in overload(call.op)._schema.arguments}
    for _, name, value in named_arguments(call):
        argument = schema[name]
        dims = counts_dims(name) and value not in ([], ())
        if (argument.has_default_value() and not dims and not argument.is_out and value != argument.default_value) or (
            not argument.has_default_value() and counts_dims(name) and value in ([], ())
        ):
            yield name


def _scalars_not_finite(call: Call) -> bool:
    leaves = pytree.tree_leaves((call.args, dict(call.kwargs)))
    return any(isinstance(v, (float, complex)) and not math.isfinite(abs(v)) for v in leaves)


def most_ordinary(start: Program, shows: Callable[[Program], bool]) -> Program:
    """The most ordinary program found for which `shows` holds: each step has a severity that is no worse.

    Float32, even shards and 1, 2, 3 ... come first, then few ranks, no second op, few dims and short ones.
    """
    stages = [(name, _more_ordinary(stage)) for name, stage in _STAGES]
    return base_shrink.shrink(start, shows, budget=MAX_RUNS, stages=stages).smallest


def _rank(program: Program) -> tuple[Severity, tuple[int, ...]]:
    return severity(program, False), _strange(program)


def _strange(program: Program) -> tuple[int, ...]:
    """How far a program is from five ordinary lines: a second op, ranks, tensors, dtypes, dims, sizes, arguments, values."""
    numbers = scalar_arguments(program.sample.call)
    sample = program.sample
    other = sum(x.dtype != torch.float32 for x in sample.tensors)
    dims, unusual = sum(x.ndim for x in sample.tensors), sum(_unusual(spot) for spot in numbers)
    odd = sum(not _is_counted(x) for x in sample.tensors)
    few = (bool(program.then), program.ranks, len(sample.tensors), other, dims, _far_sizes(program))
    return (*few, len(numbers), unusual, odd)


def _far_sizes(program: Program) -> int:
    """How far the sizes of the tensors are from twice the ranks or less; a size of 1 is as far as one too many."""
    return sum(max(0, n - 2 * program.ranks, n == 1) for x in program.sample.tensors for n in x.shape)


def _unusual(spot: ScalarArgument) -> int:
    """How unusual a number is as an argument: 1 if it is negative, 2 with many digits, 3 if it is not finite."""
    value = spot.value
    if isinstance(value, (float, complex)) and digits(value) > DECIMAL:
        return 2 if cmath.isfinite(value) else 3
    return int(isinstance(value, (int, float)) and value < 0)


def _is_counted(x: Tensor) -> bool:
    return x.dtype == torch.bool or equal_tensors(counted(x), x)


def _round_values(program: Program) -> Iterator[Program]:
    """Values 1, 2, 3 ..., in all tensors or in one; then whole numbers, then one decimal."""
    tensors = program.sample.tensors
    yield with_tensors(program, {i: counted(x) for i, x in enumerate(tensors) if x.dtype != torch.bool})
    yield with_tensors(
        program,
        {i: counted(x).flip(0) if x.ndim else counted(x) for i, x in enumerate(tensors) if x.is_floating_point()},
    )
    for i, x in enumerate(tensors):
        if x.dtype != torch.bool:
            yield with_tensors(program, {i: counted(x)})
    for decimals in (0, 1):
        yield with_tensors(
            program,
            {i: x.round(decimals=decimals) for i, x in enumerate(tensors) if is_inexact(x) and not x.is_complex()},
        )


def _even_sizes(program: Program) -> Iterator[Program]:
    """Sizes of the ranks for dims of one row, and for those that are uneven; then of twice the ranks, of the ranks, and of one,
    for every dim of one size."""
    sizes = sorted({n for x in program.sample.tensors for n in x.shape}, reverse=True)
    ranks = program.ranks
    yield from _larger_sizes(program)
    for to in (2 * ranks, ranks, 1):
        yield from resized(program, {n: to for n in sizes if n > to}, None)
    for n, to in itertools.product(sizes, (2 * ranks, ranks, ranks + 1, 1)):
        if to < n:
            yield from resized(program, {n: to}, None)


def _larger_sizes(program: Program) -> Iterator[Program]:
    """Sizes of the ranks or twice as many in place of 1, and of those that the ranks do not divide: in all tensors, then dim by dim."""
    if trusts_caller(program.sample.op):
        return
    ranks, tensors = program.ranks, program.sample.tensors
    small = [(i, d, n) for i, x in enumerate(tensors) for d, n in enumerate(x.shape) if n == 1 or n % ranks]
    columns: dict[int, set[tuple[int, int]]] = {}
    for i, d, _ in small:
        columns.setdefault(d - tensors[i].ndim, set()).add((i, d))
    for to, places in itertools.product((ranks, 2 * ranks), (None, *map(frozenset, columns.values()))):
        grown = {n: to for *_, n in small if n < to}
        for one in reversed([*resized(program, grown, places)]):  # the call as it is comes last of these
            yield with_tensors(one, {i: counted(x) for i, x in enumerate(one.sample.tensors) if is_inexact(x)})
            yield one


def _contiguous(program: Program) -> Iterator[Program]:
    yield with_tensors(program, {i: x.contiguous() for i, x in enumerate(program.sample.tensors)})


_STAGES: Sequence[tuple[str, Callable[[Program], Iterator[Program]]]] = (
    ("dtypes", in_float32), ("ranks", fewer_ranks), ("axes", fewer_axes), ("operands", fewer_operands),
    ("dims", fewer_dims), ("sizes", _even_sizes), ("scalars", simpler_scalars), ("contiguous", _contiguous),
    ("values", _round_values),
)  # fmt: skip


def _more_ordinary(stage: Callable[[Program], Iterator[Program]]) -> Callable[[Program], Iterator[Program]]:
    """The candidates of a stage that are more ordinary than their program, until torch refuses to compute one."""

    def candidates(program: Program) -> Iterator[Program]:
        before = _rank(program)
        with contextlib.suppress(*REJECTIONS):
            for one in fitting_out(program, stage(program)):
                if _rank(one) < before:
                    yield one

    return candidates


def call_text(program: Program, spelling: str = "") -> str:
    """The call of a program, as it is spelled, with shapes and placements: `torch.cumprod(f32[4] S(0), -1)`."""

    def named(number: int) -> str:
        x = program.sample.tensors[number]
        return f"{shape_text(x.shape, x.dtype)} {placements_text(program.inputs[number])}"

    if program.public_call:
        beside = [f"{shape_text(x.shape, x.dtype)} {placements_text(layout)}" for _, x, layout in tensors_made(program)]
        return f"{program.public_call}, where x is {named(0)}" + (f", beside {', '.join(beside)}" if beside else "")
    text = spelling or spelled(program.sample)
    text = re.sub(
        r"\bx(\d+)(?=[.[ ])", lambda found: f"({named(int(found[1]))})", text
    )  # what a method or operator takes
    text = re.sub(r"\bx(\d+)\b", lambda found: named(int(found[1])), text)
    steps, prior = split_prior_call(program.then)
    return text + (f", then {in_words(steps)}" if steps else "") + then_text(prior)


def forward_programs(program: Program) -> Iterator[Program]:
    """For a call of a backward overload, `F.mse_loss(x, y)` and its gradient on the same tensors, where they suffice.

    The forward overload is the one of that name whose arguments the backward has by the same names.
    """
    namespace, packet, _ = program.sample.op.split(".")
    if not packet.endswith("_backward") or program.then:
        return
    given = program.sample.call.named()
    for name in dict.fromkeys((packet.removesuffix("_backward").lstrip("_"), packet.removesuffix("_backward"))):
        found = getattr(getattr(torch.ops, namespace), name, None)
        for which in found.overloads() if found is not None else ():
            schema = getattr(found, which)._schema.arguments
            if any((a.name not in given and not a.has_default_value()) or a.is_out for a in schema):
                continue
            args = [given[a.name] for a in schema if a.name in given and not a.kwarg_only]
            kwargs = {a.name: given[a.name] for a in schema if a.name in given and a.kwarg_only}
            tensors = program.sample.tensors
            leaves = [leaf for value in (*args, *kwargs.values()) for leaf in leaf_numbers(value)]
            call = Call(f"{namespace}.{name}.{which}", tuple(args), tuple(kwargs.items()))
            whole = replace(program, sample=replace(program.sample, call=call))
            gone = [i for i in range(len(tensors)) if i not in leaves]
            for then in ("grad", "grad S(0)"):
                yield replace(without_tensors(whole, call, gone), then=then)
