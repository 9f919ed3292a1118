"""Wrong rules made from right ones, by changes that do not know the op.

A change is left out if the row that it makes is right: for a reason stated in `claims` or `ops`, or because
`by_hand` cannot tell it from a right one on many calls (never because a validator said so).  It is left out, too,
if nobody could follow it (all inputs replicated: DTensor's own row for those comes first; an argument that is
written to and changes its placement).  What remains is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice, zip_longest
from typing import TypeVar

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from localtensor.layout.spec import short
from tests.tools.bench import by_hand
from tests.tools.bench.claims import Base, Row
from tests.tools.bench.claims import row as as_row

T = TypeVar("T")
Some = TypeVar("Some", bound=Placement)
R = Replicate()
KINDS = ("sum", "max", "min", "avg")
PER_BASE = 3
"""Mutants of one op, its typical mistakes not counted: many ops tell more than many mutants of one."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """A wrong row, the right one that it was made from, and what was done to it in words."""

    base: Base
    origin: Row
    row: Row
    change: str

    def __str__(self) -> str:
        return f"{self.change}: {self.origin} became {self.row}"


@dataclass(frozen=True, slots=True)
class Spared:
    """A change that makes a right row of a right row, and why it does."""

    base: Base
    row: Row
    reason: str


Changed = tuple[str, Row]
Change = Callable[[Base, Row], Iterator[Changed]]


def _put(placements: tuple[Placement, ...], at: int, new: Placement) -> tuple[Placement, ...]:
    return (*placements[:at], new, *placements[at + 1 :])


def _outputs(row: Row, kind: type[Some]) -> list[tuple[int, Some]]:
    return [(i, p) for i, p in enumerate(row.outputs) if isinstance(p, kind)]


def _inputs(row: Row, kind: type[Some]) -> list[tuple[int, Some]]:
    return [(i, p) for i, p in enumerate(row.inputs) if isinstance(p, kind)]


def drop_reduction(base: Base, row: Row) -> Iterator[Changed]:
    for i, _ in _outputs(row, Partial):
        yield "reduction dropped", replace(row, outputs=_put(row.outputs, i, R))


def other_reduction(base: Base, row: Row) -> Iterator[Changed]:
    for i, p in _outputs(row, Partial):
        for kind in KINDS:
            if kind != p.reduce_op:
                yield f"{kind} for {p.reduce_op}", replace(row, outputs=_put(row.outputs, i, Partial(kind)))


def shard_kept(base: Base, row: Row) -> Iterator[Changed]:
    """The result of a reduction over the cut dim, taken for a shard of the result."""
    dims = [p.dim for _, p in _inputs(row, Shard)]
    for i, _ in _outputs(row, Partial):
        if dims and base.results[i]:
            kept = Shard(min(dims[0], len(base.results[i]) - 1))
            yield "shard kept through a reduction", replace(row, outputs=_put(row.outputs, i, kept))


def other_result_dim(base: Base, row: Row) -> Iterator[Changed]:
    for i, p in _outputs(row, Shard):
        size = len(base.results[i])
        if size > 1:
            yield "another dim of the result", replace(row, outputs=_put(row.outputs, i, Shard((p.dim + 1) % size)))


def result_partial(base: Base, row: Row) -> Iterator[Changed]:
    for i, _ in _outputs(row, Shard):
        for kind in ("sum", "max"):
            yield f"shard taken for P({kind})", replace(row, outputs=_put(row.outputs, i, Partial(kind)))


def result_whole(base: Base, row: Row) -> Iterator[Changed]:
    for i, _ in _outputs(row, Shard):
        yield "shard taken for the whole", replace(row, outputs=_put(row.outputs, i, R))


def other_input_dim(base: Base, row: Row) -> Iterator[Changed]:
    for i, p in _inputs(row, Shard):
        size = len(base.dims[i])
        if size > 1:
            yield "another dim of an argument", replace(row, inputs=_put(row.inputs, i, Shard((p.dim + 1) % size)))


def turned(base: Base, row: Row) -> Iterator[Changed]:
    """Cut along the next dim on both sides: the shapes stay right, and what the op mixes does not."""

    def turn(placements: tuple[Placement, ...], dims: list[str]) -> tuple[Placement, ...]:
        pairs = zip(placements, dims, strict=True)
        return tuple(Shard((p.dim + 1) % len(d)) if isinstance(p, Shard) else p for p, d in pairs)

    if not _outputs(row, Partial):
        yield "shard dims turned", Row(turn(row.inputs, base.dims), turn(row.outputs, base.results))


def along_what_it_mixes(base: Base, row: Row) -> Iterator[Changed]:
    """Shard the first argument and the result along a letter that both have and that the op mixes."""
    for letter in dict.fromkeys(base.dims[0]):
        if letter not in base.along and all(letter in dims for dims in base.results):
            cut = base.cut(letter)
            yield f"cut along {letter}, which the op mixes", replace(cut, inputs=(cut.inputs[0], *row.inputs[1:]))
            yield f"cut along {letter} throughout, which the op mixes", cut


def replica_cut(base: Base, row: Row) -> Iterator[Changed]:
    for i, _ in _inputs(row, Replicate):
        if base.dims[i]:
            yield "replica taken for a shard", replace(row, inputs=_put(row.inputs, i, Shard(0)))


def shard_whole(base: Base, row: Row) -> Iterator[Changed]:
    for i, _ in _inputs(row, Shard):
        yield "shard taken for a replica", replace(row, inputs=_put(row.inputs, i, R))


def through(base: Base, row: Row) -> Iterator[Changed]:
    """Partial sums, maxima and minima let through an op as if it were linear or increasing."""
    if not any(isinstance(p, Shard) for p in row.inputs):
        return
    let_in = [isinstance(p, Shard) and real for p, real in zip(row.inputs, base.reals, strict=True)]
    for kind in KINDS:
        inputs = tuple(Partial(kind) if through else R for through in let_in)
        yield f"P({kind}) through an op that does not keep it", Row(inputs, (Partial(kind),) * len(row.outputs))


def partial_forgotten(base: Base, row: Row) -> Iterator[Changed]:
    found = _inputs(row, Partial)
    for i, p in found if len(found) > 1 else ():
        yield f"R beside P({p.reduce_op})", replace(row, inputs=_put(row.inputs, i, R))


def both_partial(base: Base, row: Row) -> Iterator[Changed]:
    for _, p in _inputs(row, Partial):
        for i, _ in _inputs(row, Replicate):
            if base.reals[i]:
                yield f"P({p.reduce_op}) on both", replace(row, inputs=_put(row.inputs, i, Partial(p.reduce_op)))


def other_input_partial(base: Base, row: Row) -> Iterator[Changed]:
    for i, p in _inputs(row, Partial):
        for kind in KINDS:
            if kind != p.reduce_op:
                yield f"P({kind}) taken for P({p.reduce_op})", replace(row, inputs=_put(row.inputs, i, Partial(kind)))


def results_swapped(base: Base, row: Row) -> Iterator[Changed]:
    if len(row.outputs) > 1:
        yield "results swapped", replace(row, outputs=row.outputs[::-1])


def written_otherwise(base: Base, row: Row) -> Iterator[Changed]:
    """Another placement for an argument that the op writes to, before and after."""
    for i, p in enumerate(row.outputs) if base.style in ("inplace", "void") else ():
        for new in (R, Partial("sum"), Partial("max")):
            if new != p and p == row.inputs[i]:
                changed = Row(_put(row.inputs, i, new), _put(row.outputs, i, new))
                yield f"what is written to taken for {short(new)}", changed


SUBTLE: tuple[Change, ...] = (
    written_otherwise, drop_reduction, other_reduction, other_result_dim, other_input_dim, turned, along_what_it_mixes, replica_cut, shard_whole,
    through, partial_forgotten, both_partial, other_input_partial, results_swapped,
)  # fmt: skip
COARSE: tuple[Change, ...] = (shard_kept, result_partial, result_whole)
"""Changes that give a result of the wrong shape."""


def typical(base: Base) -> list[Mutant]:
    """Mistakes that people make with this op; nothing need be right about it."""
    rows = [as_row(text) for text in base.wrongs]
    whole = [Row((R,) * len(row.inputs), (R,) * len(row.outputs)) for row in rows]
    return [Mutant(base, first, row, "a typical mistake") for first, row in zip(whole, rows, strict=True)]


def changed(base: Base) -> Iterator[tuple[str, Mutant | Spared]]:
    """Everything that the changes make of an op's right rows, with the name of the change; each row once."""
    right = base.reasons()
    return ((name, judged(mutant, right)) for name, mutant in _candidates(base))


def _candidates(base: Base) -> Iterator[tuple[str, Mutant]]:
    yield from ((typical.__name__, mutant) for mutant in typical(base))
    seen = {*base.wrongs}
    for change in (*SUBTLE, *COARSE):
        for origin in base.rows():
            for words, row in change(base, origin):
                hopeless = all(isinstance(p, Replicate) for p in row.inputs) or not base.fits(row)
                if str(row) not in seen and not hopeless:
                    seen.add(str(row))
                    yield change.__name__, Mutant(base, origin, row, words)


def judged(mutant: Mutant, right: Mapping[str, str]) -> Mutant | Spared:
    """The mutant, or why it is none."""
    base, row = mutant.base, mutant.row
    reason = right.get(str(row), "")
    if not reason and by_hand.undefined(base, row):
        reason = "an average of booleans means nothing, so that nothing is claimed of it"
    if not reason and not by_hand.wrong(base, row) and not by_hand.wrong_elsewhere(base, row):
        reason = "nothing tells it from a right row"
    return Spared(base, row, reason) if reason else mutant


def chosen(base: Base, turn: int) -> list[Mutant]:
    """A few mutants of one op: by changes of many kinds, those first that only the values betray.

    `turn` says with which kind to begin, and with which of its mutants.
    """
    kinds: dict[str, list[Mutant]] = {change.__name__: [] for change in (typical, *SUBTLE, *COARSE)}
    for name, made in _candidates(base):
        kinds[name].append(made)
    first = kinds.pop(typical.__name__)
    subtle = _rotated([_rotated(kinds[change.__name__], turn) for change in SUBTLE], turn)
    coarse = [kinds[change.__name__] for change in _rotated(list(COARSE), turn)]
    rounds = zip_longest(*subtle, *coarse)
    right = base.reasons()
    made = (judged(mutant, right) for mutant in (*first, *(mutant for row in rounds for mutant in row if mutant)))
    return list(islice((mutant for mutant in made if isinstance(mutant, Mutant)), PER_BASE + len(first)))


def _rotated(items: list[T], turn: int) -> list[T]:
    at = turn % len(items) if items else 0
    return items[at:] + items[:at]
