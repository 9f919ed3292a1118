"""Autograd of collectives in lockstep: a linear function of all ranks' tensors, and its adjoint."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function

from localtensor._util.call_sites import origin
from localtensor.collectives.c10d_table import SERVED, Brought, named_reduction
from localtensor.errors import AnotherMode
from localtensor.lockstep.comms import c10d_dispatch, c10d_kernels, collectives
from localtensor.lockstep.comms.collectives import Value
from localtensor.lockstep.comms.process_groups import group_of
from localtensor.lockstep.comms.stacked_collectives import Family
from localtensor.lockstep.dispatch.dispatcher import plainly
from localtensor.lockstep.values.local_tensor import LocalTensor, wrap

Done = Callable[[Value], Value]


class Meeting:
    """One call of a collective: its groups, reduction and root."""

    def __init__(self, mode: Any, call: str, group: Any, op: Any = None, root: int | None = None) -> None:
        self.mode, self.call, self.root = mode, call, root
        self.whole: Family = group if isinstance(group, Family) else group_of(mode, group).family
        self.op: Any = named_reduction(op)

    def over(self, whole: Family) -> Meeting:
        """The same call in other groups."""
        return Meeting(self.mode, self.call, whole, self.op, self.root)

    def check(self, tensors: Sequence[Tensor]) -> None:
        """Check each tensor by itself: its shape, that it is of this mode (`AnotherMode`) and is not being written."""
        for x in tensors:
            if isinstance(x, LocalTensor) and x._mode is not self.mode:
                raise AnotherMode(self.call, origin(sys._getframe(1)).place)
            if self.mode.in_flight:
                self.mode.check_read(x, self.call)
        brought = Brought(list(tensors), [], op=self.op, root=self.root)
        c10d_dispatch.check_offers(self.call if self.call in _OFFERED else "", brought, self.whole)

    def value(self, x: Tensor) -> Value:
        """The stacked value of a tensor."""
        return collectives.value_of(self.mode, x)

    def wrapped(self, value: Value) -> LocalTensor:
        """The LocalTensor of these cells."""
        return wrap(value.cells, value.held, self.mode)

    def wants_gradient(self, x: Tensor) -> bool:
        """Whether autograd records what is done with a tensor."""
        return torch.is_grad_enabled() and x.requires_grad

    def as_ranks_do(self, name: str, tensors: Sequence[Tensor]) -> list[Value]:
        """The result by the function that serves rank threads, which also raises the errors."""
        brought = Brought(list(tensors), list(tensors), op=self.op, root=self.root)
        return c10d_kernels.by_ranks(self.mode, SERVED[name], brought, self.whole)


_OFFERED = frozenset({"all_reduce", "reduce", "broadcast", "scatter", "reduce_scatter", "reduce_scatter_tensor"})


def linear(meeting: Meeting, x: Tensor, done: Done, undone: Done) -> LocalTensor:
    """The linear function `done` of all ranks' tensors; `undone` is its adjoint."""
    if not meeting.wants_gradient(x):
        with plainly():
            return meeting.wrapped(done(meeting.value(x)))
    found: LocalTensor = _Linear.apply(meeting, done, undone, x)
    return found


def _filled(value: Value, like: Value) -> Value:
    """A gradient with zeros for the ranks that hold an input and get no gradient for it."""
    number = np.where(like.held.row_of < 0, -1, np.where(value.held.row_of < 0, 1, 0))
    return collectives.combined([value, like], number) if (number != 0).any() else value


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, meeting: Meeting, done: Done, undone: Done, x: Tensor) -> LocalTensor:
        ctx.described = meeting, done, undone
        with plainly():
            ctx.like = collectives.zeros_like(meeting.value(x))
            return meeting.wrapped(done(meeting.value(x)))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        meeting, done, undone = ctx.described
        like = ctx.like
        back = linear(meeting, grad, lambda value: _filled(undone(value), like), done)
        return None, None, None, back


def choose(meeting: Meeting, tensors: Sequence[Tensor], number: Any, source: Any = None) -> LocalTensor:
    """Rank r holds what rank `source[r]` (r itself if None) has of `tensors[number[r]]`; nothing if that is negative."""
    if not any(meeting.wants_gradient(x) for x in tensors):
        return _chosen(meeting, tensors, number, source)
    found: LocalTensor = _Choose.apply(meeting, number, source, *tensors)
    return found


def _chosen(meeting: Meeting, tensors: Sequence[Tensor], number: Any, source: Any) -> LocalTensor:
    with plainly():
        return meeting.wrapped(collectives.combined([meeting.value(x) for x in tensors], number, source))


class _Choose(Function):
    @staticmethod
    def forward(ctx: Any, meeting: Meeting, number: Any, source: Any, *tensors: Tensor) -> LocalTensor:
        ctx.described = meeting, number, source
        with plainly():
            ctx.likes = [collectives.zeros_like(meeting.value(x)) for x in tensors]
        return _chosen(meeting, tensors, number, source)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Each tensor gets the gradients of the ranks that selected it, at their source ranks."""
        meeting, number, source = ctx.described
        ranks = np.arange(len(number))
        back = []
        for index, like in enumerate(ctx.likes):
            taken = number == index
            came = np.full(len(number), -1)
            came[ranks[taken] if source is None else source[taken]] = ranks[taken]
            zeros = meeting.wrapped(like)
            which = np.where(like.held.row_of < 0, -1, np.where(came >= 0, 0, 1))
            back.append(choose(meeting, [grad, zeros], which, np.where(came >= 0, came, ranks)))
        return None, None, None, *back


def linear_lists(meeting: Meeting, tensors: Sequence[Tensor], done: Any) -> list[LocalTensor]:
    """The function `done` of lists of tensors, which is its own adjoint."""
    if not any(meeting.wants_gradient(x) for x in tensors):
        with plainly():
            return [meeting.wrapped(value) for value in done([meeting.value(x) for x in tensors])]
    return list(_LinearLists.apply(meeting, done, *tensors))


class _LinearLists(Function):
    @staticmethod
    def forward(ctx: Any, meeting: Meeting, done: Any, *tensors: Tensor) -> Any:
        ctx.described = meeting, done
        with plainly():
            ctx.likes = [collectives.zeros_like(meeting.value(x)) for x in tensors]
            return tuple(meeting.wrapped(value) for value in done([meeting.value(x) for x in tensors]))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        meeting, done = ctx.described
        likes = ctx.likes

        def filled(values: list[Value]) -> list[Value]:
            return [_filled(value, like) for value, like in zip(done(values), likes, strict=True)]

        return None, None, *linear_lists(meeting, grads, filled)
