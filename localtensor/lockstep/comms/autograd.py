"""What autograd sees of a collective in lockstep: one linear function of all ranks' tensors, and its adjoint."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function

from localtensor._util.call_sites import origin
from localtensor.collectives.argument_checks import named_reduction
from localtensor.collectives.c10d_table import SERVED, Brought
from localtensor.errors import AnotherMode
from localtensor.lockstep.comms import c10d_dispatch, c10d_kernels, collectives
from localtensor.lockstep.comms.collectives import Value
from localtensor.lockstep.comms.process_groups import group_of
from localtensor.lockstep.comms.stacked_collectives import Family
from localtensor.lockstep.dispatch.dispatcher import plainly
from localtensor.lockstep.values.local_tensor import LocalTensor, wrap

Done = Callable[[Value], Value]


class Meeting:
    """One call of a collective: which ranks meet, and what they agree on."""

    def __init__(self, mode: Any, call: str, group: Any, op: Any = None, root: int | None = None) -> None:
        self.mode, self.call, self.root = mode, call, root
        self.whole: Family = group if isinstance(group, Family) else group_of(mode, group).family
        self.op: Any = named_reduction(op)

    def over(self, whole: Family) -> Meeting:
        """The same in other groups."""
        return Meeting(self.mode, self.call, whole, self.op, self.root)

    def check(self, tensors: Sequence[Tensor]) -> None:
        """What is brought is fit by itself, and of this mode; nothing of it is in flight."""
        for x in tensors:
            if isinstance(x, LocalTensor) and x._mode is not self.mode:
                raise AnotherMode(self.call, origin(sys._getframe(1)).place)
            if self.mode.in_flight:
                self.mode.check_read(x, self.call)
        brought = Brought(list(tensors), [], op=self.op, root=self.root)
        c10d_dispatch.check_offers(self.call if self.call in _OFFERED else "", brought, self.whole)

    def value(self, x: Tensor) -> Value:
        """What every rank brings."""
        return collectives.value_of(self.mode, x)

    def wrapped(self, value: Value) -> LocalTensor:
        """The LocalTensor of these cells."""
        return wrap(value.cells, value.held, self.mode)

    def wants_gradient(self, x: Tensor) -> bool:
        """Whether autograd follows what is done with it."""
        return torch.is_grad_enabled() and x.requires_grad

    def zeros(self, like: Value) -> Value:
        """Zeros of the same shapes."""
        return Value(tuple(cell.new_zeros(()).expand(cell.shape) for cell in like.cells), like.held)

    def as_ranks_do(self, name: str, tensors: Sequence[Tensor]) -> list[Value]:
        """By the function that serves rank threads, which can do it, or says why not."""
        brought = Brought(list(tensors), list(tensors), op=self.op, root=self.root)
        return c10d_kernels.by_ranks(self.mode, SERVED[name], brought, self.whole)


_OFFERED = frozenset({"all_reduce", "reduce", "broadcast", "scatter", "reduce_scatter", "reduce_scatter_tensor"})


def linear(meeting: Meeting, x: Tensor, done: Done, undone: Done) -> LocalTensor:
    """What `done` makes of all ranks' tensors; `undone` is its adjoint."""
    if not meeting.wants_gradient(x):
        with plainly():
            return meeting.wrapped(done(meeting.value(x)))
    found: LocalTensor = _Linear.apply(meeting, done, undone, x)
    return found


def _like(meeting: Meeting, x: Tensor) -> Value:
    """Its shapes and who holds it, without its numbers."""
    return meeting.zeros(meeting.value(x))


def _filled(value: Value, like: Value) -> Value:
    """Zeros for those ranks that hold an input, and get no gradient for it."""
    number = np.where(like.held.row_of < 0, -1, np.where(value.held.row_of < 0, 1, 0))
    return collectives.combined([value, like], number) if (number != 0).any() else value


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, meeting: Meeting, done: Done, undone: Done, x: Tensor) -> LocalTensor:
        ctx.described = meeting, done, undone
        with plainly():
            ctx.like = _like(meeting, x)
            return meeting.wrapped(done(meeting.value(x)))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        meeting, done, undone = ctx.described
        like = ctx.like
        back = linear(meeting, grad, lambda value: _filled(undone(value), like), done)
        return None, None, None, back


def choose(meeting: Meeting, tensors: Sequence[Tensor], number: Any, source: Any = None) -> LocalTensor:
    """Each rank holds the tensor of its number, as it has it or as the rank `source` does; nothing if negative."""
    number = np.where(number >= 0, number, -1)
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
            ctx.likes = [_like(meeting, x) for x in tensors]
        return _chosen(meeting, tensors, number, source)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Each tensor gets the gradient of those ranks that have chosen it, at the rank that they had it from."""
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
    """What `done` makes of lists of tensors, and which is its own adjoint."""
    if not any(meeting.wants_gradient(x) for x in tensors):
        with plainly():
            return [meeting.wrapped(value) for value in done([meeting.value(x) for x in tensors])]
    return list(_LinearLists.apply(meeting, done, *tensors))


class _LinearLists(Function):
    @staticmethod
    def forward(ctx: Any, meeting: Meeting, done: Any, *tensors: Tensor) -> Any:
        ctx.described = meeting, done
        with plainly():
            ctx.likes = [_like(meeting, x) for x in tensors]
            return tuple(meeting.wrapped(value) for value in done([meeting.value(x) for x in tensors]))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        meeting, done = ctx.described
        likes = ctx.likes

        def filled(values: list[Value]) -> list[Value]:
            return [_filled(value, like) for value, like in zip(done(values), likes, strict=True)]

        return None, None, *linear_lists(meeting, grads, filled)
