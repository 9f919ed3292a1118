"""Values of some ranks and of all, with gradients: what a statement that runs for some ranks gets, and what becomes of it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import FrameType
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
    if type(value) in (list, tuple, JoinedList):
        return (tuple if type(value) is tuple else list)(narrowed(mode, one, kind) for one in value)
    if isinstance(value, LocalTensor) and not (value._partition.row_of[kind.row_of != NOWHERE] != NOWHERE).any():
        if value.shape_elsewhere is not None:
            return torch.zeros(value.shape_elsewhere, dtype=value.dtype, device=value.device)
        raise NotHeld("if", np.flatnonzero(kind.row_of != NOWHERE).tolist(), value.ranks)
    if type(value) in (Tensor, LocalTensor, Parameter) and value.requires_grad and torch.is_grad_enabled():
        found = _Narrow.apply(value, mode, kind)
    else:
        found = narrow_value(mode, value, kind)
    if isinstance(found, Tensor) and found is not value:
        mode.joined.narrowed(found, value)
    return found


class Variables(dict[str, Any]):
    """The variables of a frame, as they are now."""

    def __init__(self, frame: FrameType) -> None:
        super().__init__(frame.f_locals)
        self.frame = frame
        changeable = [name for name, value in self.items() if _can_change(value)]
        self.shared = frozenset(name for name in changeable if sys.getrefcount(self[name]) > _REFERENCES)
        """Containers that others have, too: another variable, an object, a caller."""

    def shares(self, name: str, found: dict[str, Any]) -> bool:
        """Whether something else has the container that this variable is in `found`, the variables after a statement."""
        if not _can_change(found.get(name)):
            return False
        if found is self:
            return name in self.shared
        mine = self.frame.f_locals.get(name) is found[name]
        return sys.getrefcount(found[name]) > (_REFERENCES if mine else 2)


def _can_change(value: object) -> bool:
    """Whether a value can become another one without a new object: a container, or what compares by contents."""
    return not isinstance(value, Tensor) and type(value).__hash__ is None


def _references() -> int:
    alone: list[Any] = []  # noqa: F841  # counted by way of the frame
    found = dict(sys._getframe().f_locals)
    return sys.getrefcount(found["alone"])


class JoinedList(list[Any]):
    """A list that is another one on each rank; the ranks would see there what is changed here, so it cannot be changed."""

    def _refuse(self, *_: object, **__: object) -> Any:
        problem = (
            "the list is on each rank another one of several, which would not see the change; `list(it)` is a new one"
        )
        raise NotInLockstep("a list that is changed", problem)

    append = extend = insert = pop = remove = clear = sort = reverse = _refuse
    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse


class _Unset:
    """A variable that the frame does not have."""


UNSET = _Unset()
_REFERENCES = _references()
"""To a list that only a local variable has, where it is counted: its frame's, those of two dicts of variables, and the count's own."""


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


def joined_with_gradients(mode: Any, found: Sequence[Any], groups: Partition, shared: bool = False) -> Any:
    """One value of the values of each kind of rank, whose gradients go back to each.

    `shared` tells that something else has the lists, too.
    """
    if all(type(one) in (list, tuple) for one in found) and len({len(one) for one in found}) == 1:
        columns = [joined_with_gradients(mode, column, groups, shared) for column in zip(*found, strict=True)]
        return tuple(columns) if type(found[0]) is tuple else JoinedList(columns) if shared else columns
    if torch.is_grad_enabled() and any(isinstance(one, Tensor) and one.requires_grad for one in found):
        for row, one in enumerate(found):
            _check_leaves(one, groups.row_of == row)
        joined = _Join.apply(mode, groups, *map(wait_for, found))
    else:
        joined = join_rank_groups(mode, found, groups)
    if shared and _can_change(joined) and any(one is not joined for one in found):
        problem = f"a {type(joined).__name__} is assigned on some ranks, others have an equal one, and something else has one of them"
        raise NotInLockstep("if", problem)
    if isinstance(joined, Tensor):
        mode.joined.joined(joined, found)
    return joined


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
