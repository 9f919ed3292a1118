"""The same question answered the slow way, in plain torch: cut, run, put together, compare.

Shares no line with the probe, so that the two cannot be wrong in the same way by accident.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Shard
from torch.distributed.tensor.placement_types import Placement

from tests.tools.bench.claims import Base, Row

RANKS = (2, 3, 4)
FORMS = ("", "ties", "large", "not finite")
"""Forms of values, as `claims.Base.call` knows them."""
TRIES = 24
"""Calls on which a row must hold that is taken for right because nothing tells it from a right one."""


def cut(x: Tensor, placement: Placement, ranks: int, rng: torch.Generator) -> list[Tensor]:
    """What each rank has of x."""
    if isinstance(placement, Shard):
        rows = -(-x.shape[placement.dim] // ranks)
        stops = [min(rows * rank, x.shape[placement.dim]) for rank in range(ranks + 1)]
        return [x[(slice(None),) * placement.dim + (slice(a, b),)] for a, b in pairwise(stops)]
    return shares(x, placement.reduce_op, ranks, rng) if isinstance(placement, Partial) else [x] * ranks


def shares(x: Tensor, kind: str, ranks: int, rng: torch.Generator) -> list[Tensor]:
    """Values of `ranks` ranks that this reduction makes x of: one loop over the ranks, one noise each."""
    whole = x * ranks if kind == "avg" else x
    held: list[Tensor] = []
    for _ in range(ranks - 1):
        far = torch.randint(-7, 8, x.shape, generator=rng).to(x.dtype)
        far = far * 0.375 * x.abs().clamp(min=1) if x.is_floating_point() else far
        if kind in ("sum", "avg"):
            held.append(far)
            whole = whole - far
        elif kind == "product":
            sign = torch.randint(0, 2, x.shape, generator=rng).to(x.dtype) * 2 - 1
            held.append(sign if x.dtype == torch.int64 else sign * 2.0)
            whole = whole * sign if x.dtype == torch.int64 else whole / (sign * 2.0)
        else:
            held.append(x + far.abs() if kind == "min" else x - far.abs())
    return _dealt(torch.stack([*held, whole]), torch.randint(0, ranks, x.shape, generator=rng))


def _dealt(held: Tensor, owner: Tensor) -> list[Tensor]:
    """Element by element the last rank changes places with the owner, so that no rank is special."""
    last = held.gather(0, owner[None])[0]
    return [*(torch.where(owner == rank, held[-1], held[rank]) for rank in range(len(held) - 1)), last]


def together(held: Sequence[Tensor], placement: Placement) -> list[Tensor]:
    """What the ranks make of their results: one tensor, or each rank's own if they should be equal."""
    if isinstance(placement, Shard):
        return [torch.cat(list(held), placement.dim)]
    if not isinstance(placement, Partial):
        return list(held)
    total = held[0].double() if placement.reduce_op == "avg" else held[0]
    for piece in held[1:]:
        if placement.reduce_op in ("sum", "avg"):
            total = total | piece if total.dtype == torch.bool else total + piece
        elif placement.reduce_op == "product":
            total = total * piece
        else:
            total = torch.minimum(total, piece) if placement.reduce_op == "min" else torch.maximum(total, piece)
    return [total / len(held) if placement.reduce_op == "avg" else total]


def shapes(want: Tensor, placement: Placement, ranks: int) -> list[tuple[int, ...]]:
    """The shape that each rank must have of a result."""
    pieces = cut(want, placement, ranks, torch.Generator()) if isinstance(placement, Shard) else [want] * ranks
    return [tuple(piece.shape) for piece in pieces]


def wrong(base: Base, row: Row, ranks: Sequence[int] = RANKS) -> str:
    """What is wrong with the row, or empty if it holds in every call of the op, on every number of ranks."""
    return _first(base, row, base.calls(), ranks)


def wrong_elsewhere(base: Base, row: Row, tries: int = TRIES) -> str:
    """The same on many calls that nobody else sees, with the `FORMS` of values in turn, whose name comes first."""
    partial = any(isinstance(p, Partial) for p in row.inputs)
    for turn in range(tries):
        form = FORMS[turn % len(FORMS)]
        if form == "not finite" and (partial or base.random):
            continue
        args, kwargs = base.call(base.sizes[turn % len(base.sizes)], torch.float64, f"elsewhere {turn}", form)
        try:
            whole = _listed(base.func(*args, **kwargs))
        except RuntimeError:  # the op itself does not take such values
            continue
        if form == "large" and not all(bool(x.isfinite().all()) for x in whole):
            continue  # an overflow is no question of placements
        found = _first(base, row, [(args, kwargs)], RANKS)
        if found:
            return f"{form or 'other values'}: {found}"
    return ""


def _first(base: Base, row: Row, calls: Iterable[Any], ranks: Sequence[int]) -> str:
    told = (_wrong(base, row, args, kwargs, count) for args, kwargs in calls for count in ranks)
    return next((found for found in told if found), "")


def undefined(base: Base, row: Row) -> bool:
    """Whether the row speaks of an average of booleans."""
    args, kwargs = next(base.calls())
    pairs = [
        *zip(base.flat(args), row.inputs, strict=True),
        *zip(_listed(base.func(*args, **kwargs)), row.outputs, strict=True),
    ]
    return any(x.dtype == torch.bool and p == Partial("avg") for x, p in pairs)


def refused(base: Base, row: Row) -> bool:
    """Whether the pieces do not fit each other: torch itself refuses the first call on one of two ranks."""
    args, kwargs = next(base.calls())
    return " refuses" in _wrong(base, row, args, kwargs, 2)


def _wrong(base: Base, row: Row, args: tuple[Any, ...], kwargs: dict[str, Any], ranks: int) -> str:
    tensors, scalars = base.flat(args), args[base.spots :]
    rng = torch.Generator().manual_seed(zlib.crc32(f"by hand {base.name} {row} {ranks}".encode()))
    columns = [cut(x, p, ranks, rng) for x, p in zip(tensors, row.inputs, strict=True)]
    want = _listed(base.func(*args, **kwargs))
    held: list[list[Tensor]] = []
    for rank in range(ranks):
        mine = [column[rank] for column in columns]
        try:
            held.append(_listed(base.func(*base.nest(mine), *scalars, **kwargs)))
        except (RuntimeError, IndexError, ValueError, TypeError) as error:
            return f"rank {rank} of {ranks} refuses: {str(error).splitlines()[0]}"
    for i, placement in enumerate(row.outputs):
        pieces = [out[i] for out in held]
        if isinstance(placement, Shard) and placement.dim >= want[i].ndim:
            return f"{placement} of a result of shape {tuple(want[i].shape)}"
        if [tuple(p.shape) for p in pieces] != shapes(want[i], placement, ranks):
            return f"shapes {[tuple(p.shape) for p in pieces]} on {ranks} ranks are not {placement} of {tuple(want[i].shape)}"
        for got in [] if base.random else together(pieces, placement):
            if not torch.allclose(got.double(), want[i].double(), rtol=1e-7, atol=_slack(pieces), equal_nan=True):
                return f"{ranks} ranks make other values than the op"
    return ""


def _slack(pieces: Sequence[Tensor]) -> float:
    """What adding up large shares may lose."""
    largest = max(
        (float(p.abs().nan_to_num(0, 0, 0).max()) for p in pieces if p.is_floating_point() and p.numel()), default=0.0
    )
    return 1e-7 + 1e-12 * largest


def _listed(out: Any) -> list[Tensor]:
    return [out] if isinstance(out, Tensor) else list(out)
