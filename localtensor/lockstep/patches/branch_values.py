"""Values of some ranks and of all, with gradients: what a statement that runs for some ranks gets, and what becomes of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from localtensor.errors import NotHeld, NotInLockstep
from localtensor.lockstep.comms.collectives import select, stacked_value
from localtensor.lockstep.dispatch.dispatcher import plain_dispatch
from localtensor.lockstep.patches.device_mesh import join_rank_groups, keep_ranks, narrow_value, ranks_of_row, wait_for
from localtensor.lockstep.values.local_tensor import LocalTensor, wrap
from localtensor.lockstep.values.partition import NOWHERE, Array, Partition


def narrowed(mode: Any, value: Any, kind: Partition) -> Any:
    """The value on these ranks; gradients of a tensor go back to these alone."""
    if type(value) in (list, tuple):
        return type(value)(narrowed(mode, one, kind) for one in value)
    if isinstance(value, LocalTensor) and not (value._partition.row_of[kind.row_of != NOWHERE] != NOWHERE).any():
        if value.shape_elsewhere is not None:
            return torch.zeros(value.shape_elsewhere, dtype=value.dtype, device=value.device)
        raise NotHeld("if", np.flatnonzero(kind.row_of != NOWHERE).tolist(), value.ranks)
    if type(value) in (Tensor, LocalTensor, Parameter) and value.requires_grad and torch.is_grad_enabled():
        return _Narrow.apply(value, mode, kind)
    return narrow_value(mode, value, kind)


class _Unset:
    """A variable that the frame does not have."""


UNSET = _Unset()


def variable_on(mode: Any, value: Any, kind: Partition, needed: bool = False) -> Any:
    """The value of a variable on these ranks.  It is unset where none of them holds one: it was assigned on others only.

    Raises `NotHeld` for one that is `needed`.
    """
    try:
        return narrowed(mode, value, kind)
    except NotHeld:
        if needed:
            raise
        return UNSET


def joined_with_gradients(mode: Any, found: Sequence[Any], groups: Partition) -> Any:
    """One value of the values of each kind of rank, whose gradients go back to each."""
    if all(type(one) in (list, tuple) for one in found) and len({len(one) for one in found}) == 1:
        return type(found[0])(joined_with_gradients(mode, column, groups) for column in zip(*found, strict=True))
    if torch.is_grad_enabled() and any(isinstance(one, Tensor) and one.requires_grad for one in found):
        for row, one in enumerate(found):
            _check_leaves(one, groups.row_of == row)
        return _Join.apply(mode, groups, *map(wait_for, found))
    return join_rank_groups(mode, found, groups)


def _check_leaves(x: object, here: Array) -> None:
    """Raises `NotInLockstep` if a tensor of these ranks gives gradients to one that other ranks have, too, but by its local variables."""
    left, seen = [getattr(x, "grad_fn", None)], set()
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and not (
            isinstance(leaf, LocalTensor) and (here | (leaf._partition.row_of == NOWHERE)).all()
        ):
            problem = "it gives a gradient on some ranks only to a tensor that all of them have; as a local variable of the function it can"
            raise NotInLockstep("if: requires_grad", problem)
        if node.name() != "_NarrowBackward":
            left.extend(each for each, _ in node.next_functions)


class _Narrow(torch.autograd.Function):
    """A tensor on some ranks; its gradient is zero on the others."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mode: Any, kind: Partition) -> Any:
        ctx.whole, ctx.mode, ctx.kind = x.detach(), mode, kind
        return narrow_value(mode, x, kind) if isinstance(x, LocalTensor) else keep_ranks(mode, x, kind)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        on_all = [stacked_value(ctx.mode, one) for one in (grads[0], torch.zeros_like(ctx.whole))]
        number = np.where(ctx.kind.row_of != NOWHERE, 0, np.where(on_all[1].held.row_of != NOWHERE, 1, NOWHERE))
        with plain_dispatch():
            return wrap(*select(on_all, number), ctx.mode), None, None


class _Join(torch.autograd.Function):
    """One tensor of those of each kind of rank."""

    @staticmethod
    def forward(ctx: Any, mode: Any, groups: Partition, *found: Tensor) -> Any:
        ctx.mode, ctx.groups = mode, groups
        return join_rank_groups(mode, found, groups)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        kinds = [ranks_of_row(ctx.groups, row) for row in range(ctx.groups.rows)]
        return None, None, *(narrow_value(ctx.mode, grads[0], kind) for kind in kinds)
