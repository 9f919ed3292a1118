"""One rank's part in one step, as a generator that yields collectives and receives their results.

The same generator runs on torch.distributed (`process_groups`) and on pure functions of all ranks' tensors
(`lockstep`). It does not know the groups: it yields a `StepCollective` and is sent the tensor that results.

Values that collectives do not reduce as defined (`legal_steps.reduces`) are exchanged, and each rank reduces its own
part. An average is a sum that is divided afterwards, since gloo has no averages.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import Partial

from localtensor.layout import GLOO_DTYPES, Spec
from localtensor.layout import fold as reduced
from localtensor.layout import fold_partials as fold
from strategies.planner.execute import rows
from strategies.planner.steps.legal_steps import collectives_reduce
from strategies.planner.steps.plan import RedistributionStep


@dataclass(frozen=True, slots=True, eq=False)
class StepCollective:
    """A collective of the group: the tensor of this rank, flat and contiguous, and how it is split or reduced."""

    kind: str
    """all_gather, reduce_scatter, all_reduce or all_to_all."""
    x: Tensor
    op: str = "sum"
    sent: tuple[int, ...] = ()
    """Elements sent to each member in an all_to_all; `got` are those received from each."""
    got: tuple[int, ...] = ()
    """-"""


RankPart = Generator[StepCollective, Tensor, Tensor]
"""Yields collectives, receives their results, returns the new local tensor, which shares no memory with the old."""


@dataclass(frozen=True, slots=True)
class GroupStep:
    """The data flow of one step within one group, in integers."""

    kind: str
    shape: tuple[int, ...]
    """Of the block that the members hold together."""
    was: tuple[rows.BlockPiece | None, ...]
    """Each member's piece of it before; None for the whole block. `now` are the pieces after."""
    now: tuple[rows.BlockPiece | None, ...]
    """-"""
    pending: str
    """The reduction that is pending along these axes before or after the step; empty if none."""
    divisor: int
    """The divisor of a sum: the number of ranks along those of the axes that average."""


@functools.lru_cache(maxsize=16384)
def group_step(step: RedistributionStep, members: tuple[int, ...]) -> GroupStep:
    """The data flow of one group; `members` are its ranks in the mesh, in the group's order.

    Raises `NotInnermost` for a step that is not legal.
    """
    was, now = (tuple(rows.piece_of_rank(spec, step.axes, rank) for rank in members) for spec in (step.was, step.now))
    before = [_pending_reduction(step.was, axis) for axis in step.axes]
    divisor = math.prod(step.was.mesh.sizes[axis] for axis, op in zip(step.axes, before, strict=True) if op == "avg")
    kind = "local" if len(members) == 1 else step.kind
    pending = max(before) or _pending_reduction(step.now, step.axes[0])  # a sum of averages is a sum that is divided
    return GroupStep(kind, rows.block_shape(step.was, step.axes, members[0]), was, now, pending, divisor)


def _pending_reduction(spec: Spec, axis: int) -> str:
    held = spec.placements[axis]
    return held.reduce_op if isinstance(held, Partial) else ""


def plain_values(x: Tensor) -> Tensor:
    """x detached, with lazy conjugation and negation applied: a collective would ignore these flags."""
    return x.detach().resolve_conj().resolve_neg()


def rank_part(x: Tensor, todo: GroupStep, me: int, *, ours: bool = False) -> RankPart:
    """The part of member `me` in a step. x is written to only if it is `ours`: contiguous, and not used elsewhere."""
    return _PARTS[todo.kind](x, todo, me, ours)


def _all_gather(x: Tensor, todo: GroupStep, me: int, ours: bool) -> RankPart:
    found = rows.transfers(todo.shape, None, _without_none(todo.was))
    slot_rows = max(part.rows for part in found)
    wire = yield from _move_values("all_gather", rows.pad_rows(x, found[0].dim, slot_rows))
    return rows.unpack(wire, found, todo.shape, slot_rows)


def _all_to_all(x: Tensor, todo: GroupStep, me: int, ours: bool) -> RankPart:
    was, now = _without_none(todo.was), _without_none(todo.now)
    out, back = rows.transfers(todo.shape, was[me], now), rows.transfers(todo.shape, now[me], was)
    wire = yield from _move_values("all_to_all", rows.pack(x, out), rows.element_counts(out), rows.element_counts(back))
    return rows.unpack(wire, back, rows.resized(todo.shape, now[me].dim, now[me].rows))


def _all_reduce(x: Tensor, todo: GroupStep, me: int, ours: bool) -> RankPart:
    if not collectives_reduce(todo.pending, x.dtype):
        every = -(-x.numel() // len(todo.was))
        ends = [min(every * place, x.numel()) for place in range(len(todo.was) + 1)]
        sent = [end - start for start, end in itertools.pairwise(ends)]
        mine = yield from _exchange_and_reduce(rows.flattened(x), sent, todo, me)
        mine = rows.pad_rows(mine, 0, every)
        wire = yield from _move_values("all_gather", mine)
        del mine
        return wire[: x.numel()].clone().view(x.shape) if wire.numel() > x.numel() else wire.view(x.shape)
    total = x if ours else _copy(x)
    total = yield StepCollective("all_reduce", _to_wire(total.view(-1)), op=_wire_reduction(todo.pending, x.dtype))
    return _from_wire(total, x.dtype, todo).view(x.shape)


def _reduce_scatter(x: Tensor, todo: GroupStep, me: int, ours: bool) -> RankPart:
    now = _without_none(todo.now)
    out, mine = rows.transfers(todo.shape, None, now), now[me]
    if not collectives_reduce(todo.pending, x.dtype):
        found = yield from _exchange_and_reduce(rows.pack(x, out), rows.element_counts(out), todo, me)
        return found.view(out[me].shape)
    slot_rows = max(part.rows for part in out)
    wire = _to_wire(rows.pack(x, out, slot_rows))
    wire = yield StepCollective("reduce_scatter", wire, op=_wire_reduction(todo.pending, x.dtype))
    wire = _from_wire(wire, x.dtype, todo)
    if mine.rows == slot_rows:
        return wire.view(out[me].shape)
    return rows.take_rows(wire.view(rows.resized(todo.shape, mine.dim, slot_rows)), mine.dim, rows.all_rows(mine.rows))


def _exchange_and_reduce(wire: Tensor, sent: list[int], todo: GroupStep, me: int) -> RankPart:
    """The reduction of all members' tensors, of it the part of this rank: exchanged first, then reduced here."""
    count = len(sent)
    got = yield from _move_values("all_to_all", wire, sent, [sent[me]] * count)
    return fold(got.view(count, -1), todo.pending)


def _move_values(kind: str, wire: Tensor, sent: Sequence[int] = (), got: Sequence[int] = ()) -> RankPart:
    """A collective that moves values without changing them; as bytes, where collectives do not carry the dtype."""
    if wire.dtype in GLOO_DTYPES:
        return (yield StepCollective(kind, wire, sent=tuple(sent), got=tuple(got)))
    sent, got = (tuple(wire.dtype.itemsize * n for n in counts) for counts in (sent, got))
    found = yield StepCollective(kind, wire.view(torch.uint8), sent=sent, got=got)
    return found.view(wire.dtype)


def _local(x: Tensor, todo: GroupStep, me: int, ours: bool) -> RankPart:
    yield from ()
    was, now = todo.was[me], todo.now[me]
    if len(todo.was) == 1:
        return x if ours else _copy(x)
    if now is not None:
        return rows.take_rows(x, now.dim, now.runs)
    if was is not None:
        found = x.new_full(todo.shape, rows.neutral_element(todo.pending, x.dtype))
        rows.copy_rows_to(x, was.dim, was.runs, found)
        return found
    if me == 0 or todo.pending in ("min", "max", "avg"):
        return x if ours else _copy(x)
    return torch.full_like(x, rows.neutral_element(todo.pending, x.dtype), memory_format=torch.contiguous_format)


_PARTS = {
    "local": _local, "all_gather": _all_gather, "all_to_all": _all_to_all, "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
}  # fmt: skip


def run_group(held: Sequence[Tensor], todo: GroupStep) -> list[Tensor]:
    """The results of all members of a step that communicates, computed at once: the block is assembled, then cut.

    It needs a few ops for each member, and not for each pair of members. Members that hold the whole block share one
    tensor.
    """
    if todo.was[0] is None:
        block = _reduced_block(held, todo)
    else:
        block = held[0].new_empty(todo.shape)
        for x, was in zip(held, _without_none(todo.was), strict=True):
            rows.copy_rows_to(x, was.dim, was.runs, block)
    return [block if now is None else rows.take_rows(block, now.dim, now.runs) for now in todo.now]


def _reduced_block(held: Sequence[Tensor], todo: GroupStep) -> Tensor:
    if not collectives_reduce(todo.pending, held[0].dtype):
        return fold(torch.stack(list(held)), todo.pending)
    total = reduced([_to_wire(x) for x in held], _wire_reduction(todo.pending, held[0].dtype))
    return _from_wire(total, held[0].dtype, todo)


def _without_none(found: Sequence[rows.BlockPiece | None]) -> list[rows.BlockPiece]:
    return [one for one in found if one is not None]


def _wire_reduction(kind: str, dtype: torch.dtype) -> str:
    """The reduction of the collective: booleans travel as bytes, and an average as a sum."""
    if dtype == torch.bool:
        return "min" if kind in ("min", "product") else "max"
    return "sum" if kind == "avg" else kind


def _copy(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def _to_wire(x: Tensor) -> Tensor:
    return x.view(torch.uint8) if x.dtype == torch.bool else x


def _from_wire(x: Tensor, dtype: torch.dtype, todo: GroupStep) -> Tensor:
    if dtype == torch.bool:
        return x.view(torch.bool)
    if todo.divisor > 1:  # a complex number divided by a real one, in torch, is not always what its two parts would be
        (torch.view_as_real(x) if x.is_complex() else x).div_(todo.divisor)
    return x
