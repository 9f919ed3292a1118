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
from localtensor.collectives.argument_checks import AnyOp, reduction_name
from localtensor.collectives.c10d_table import COLLECTIVE_OPS, CallArguments
from localtensor.errors import AnotherMode
from localtensor.lockstep.comms import c10d_kernels, collectives
from localtensor.lockstep.comms.collectives import StackedValue
from localtensor.lockstep.comms.process_groups import Groups, resolve_group
from localtensor.lockstep.comms.stacked_collectives import GroupFamily
from localtensor.lockstep.dispatch.dispatcher import plain_dispatch
from localtensor.lockstep.values.local_tensor import LocalTensor, Mode, wrap
from localtensor.lockstep.values.partition import Array

ValueFunction = Callable[[StackedValue], StackedValue]
ListsFunction = Callable[[list[StackedValue]], list[StackedValue]]


class CollectiveCall:
    """One call of a collective: its groups, reduction and root."""

    def __init__(self, mode: Mode, name: str, group: Groups, op: AnyOp | None = None, root: int | None = None) -> None:
        self.mode, self.name, self.root = mode, name, root
        self.family: GroupFamily = group if isinstance(group, GroupFamily) else resolve_group(mode, group).family
        self.op: Any = reduction_name(op)

    def over(self, family: GroupFamily) -> CollectiveCall:
        """The same call in other groups."""
        return CollectiveCall(self.mode, self.name, family, self.op, self.root)

    def check(self, tensors: Sequence[Tensor]) -> None:
        """Check each tensor by itself: its shape, that it is of this mode (`AnotherMode`) and is not being written."""
        for x in tensors:
            if isinstance(x, LocalTensor) and x._mode is not self.mode:
                raise AnotherMode(self.name, origin(sys._getframe(1)).place)
            if self.mode.in_flight:
                self.mode.check_read(x, self.name)
        arguments = CallArguments(list(tensors), [], op=self.op, root=self.root, lists=0)  # the outputs are made later
        collectives.check_arguments(self.name, arguments, self.family)

    def value(self, x: Tensor) -> StackedValue:
        """The stacked value of a tensor."""
        return collectives.stacked_value(self.mode, x)

    def wrapped(self, value: StackedValue) -> LocalTensor:
        """The LocalTensor of these cells."""
        return wrap(value.cells, value.held, self.mode)

    def wants_gradient(self, x: Tensor) -> bool:
        """Whether autograd records what is done with a tensor."""
        return torch.is_grad_enabled() and x.requires_grad

    def as_ranks_do(self, name: str, tensors: Sequence[Tensor]) -> list[StackedValue]:
        """The result by the function that serves rank threads, which also raises the errors."""
        arguments = CallArguments(list(tensors), list(tensors), op=self.op, root=self.root)
        return c10d_kernels.run_rank_by_rank(self.mode, COLLECTIVE_OPS[name], arguments, self.family)


def apply_linear(call: CollectiveCall, x: Tensor, linear: ValueFunction, adjoint: ValueFunction) -> LocalTensor:
    """The linear function `linear` of all ranks' tensors; `adjoint` is its adjoint."""
    if not call.wants_gradient(x):
        with plain_dispatch():
            return call.wrapped(linear(call.value(x)))
    found: LocalTensor = _Linear.apply(call, linear, adjoint, x)
    return found


def _fill_missing_gradients(value: StackedValue, like: StackedValue) -> StackedValue:
    """A gradient with zeros for the ranks that hold an input and get no gradient for it."""
    number = np.where(like.held.row_of < 0, -1, np.where(value.held.row_of < 0, 1, 0))
    return collectives.select([value, like], number) if (number != 0).any() else value


class _Linear(Function):
    @staticmethod
    def forward(
        ctx: Any, call: CollectiveCall, linear: ValueFunction, adjoint: ValueFunction, x: Tensor
    ) -> LocalTensor:
        ctx.described = call, linear, adjoint
        with plain_dispatch():
            ctx.like = collectives.zeros_like(call.value(x))
            return call.wrapped(linear(call.value(x)))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> object:
        call, linear, adjoint = ctx.described
        like = ctx.like
        back = apply_linear(call, grad, lambda value: _fill_missing_gradients(adjoint(value), like), linear)
        return None, None, None, back


def select_tensors(
    call: CollectiveCall, tensors: Sequence[Tensor], number: Array, source: Array | None = None
) -> LocalTensor:
    """Rank r gets the `tensors[number[r]]` of rank `source[r]` (r itself if None); nothing for a negative number."""
    if not any(call.wants_gradient(x) for x in tensors):
        return _select_without_gradient(call, tensors, number, source)
    found: LocalTensor = _SelectTensors.apply(call, number, source, *tensors)
    return found


def _select_without_gradient(
    call: CollectiveCall, tensors: Sequence[Tensor], number: Array, source: Array | None
) -> LocalTensor:
    with plain_dispatch():
        return call.wrapped(collectives.select([call.value(x) for x in tensors], number, source))


class _SelectTensors(Function):
    @staticmethod
    def forward(ctx: Any, call: CollectiveCall, number: Array, source: Array | None, *tensors: Tensor) -> LocalTensor:
        ctx.described = call, number, source
        with plain_dispatch():
            ctx.likes = [collectives.zeros_like(call.value(x)) for x in tensors]
        return _select_without_gradient(call, tensors, number, source)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> object:
        """Each tensor gets the gradients of the ranks that selected it, at their source ranks."""
        call, number, source = ctx.described
        ranks = np.arange(len(number))
        back = []
        for index, like in enumerate(ctx.likes):
            taken = number == index
            came = np.full(len(number), -1)
            came[ranks[taken] if source is None else source[taken]] = ranks[taken]
            zeros = call.wrapped(like)
            which = np.where(like.held.row_of < 0, -1, np.where(came >= 0, 0, 1))
            back.append(select_tensors(call, [grad, zeros], which, np.where(came >= 0, came, ranks)))
        return None, None, None, *back


def apply_linear_to_lists(call: CollectiveCall, tensors: Sequence[Tensor], linear: ListsFunction) -> list[LocalTensor]:
    """The linear function `linear` of lists of tensors, which is its own adjoint."""
    if not any(call.wants_gradient(x) for x in tensors):
        with plain_dispatch():
            return [call.wrapped(value) for value in linear([call.value(x) for x in tensors])]
    return list(_LinearLists.apply(call, linear, *tensors))


class _LinearLists(Function):
    @staticmethod
    def forward(ctx: Any, call: CollectiveCall, linear: ListsFunction, *tensors: Tensor) -> tuple[LocalTensor, ...]:
        ctx.described = call, linear
        with plain_dispatch():
            ctx.likes = [collectives.zeros_like(call.value(x)) for x in tensors]
            return tuple(call.wrapped(value) for value in linear([call.value(x) for x in tensors]))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> object:
        call, linear = ctx.described
        likes = ctx.likes

        def filled(values: list[StackedValue]) -> list[StackedValue]:
            return [_fill_missing_gradients(value, like) for value, like in zip(linear(values), likes, strict=True)]

        return None, None, *apply_linear_to_lists(call, grads, filled)
