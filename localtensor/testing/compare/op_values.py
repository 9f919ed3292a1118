"""What of one device each value of the ranks' op streams is: the layout under which it assembles to a value of the reference."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from localtensor.layout.tolerance import is_inexact, measured_slack
from localtensor.testing.compare.divergence import Sides
from localtensor.testing.compare.explain import windows
from localtensor.testing.compare.find_layout import MeshLayout, find_layout, fits
from localtensor.testing.compare.op_stream import Op, OpStream
from localtensor.testing.compare.watch import BACKWARD, Key, region_of

MOST_STEPS = 400  # ops that are followed back from a wrong value
SAME_ELEMENTS = (
    "view", "_unsafe_view", "reshape", "t", "transpose", "permute", "unsqueeze", "squeeze", "clone", "alias", "detach",
    "as_strided", "copy_", "_reshape_alias", "wait_tensor", "expand",
)  # fmt: skip
"""Ops that give the elements that they read, in another shape or place."""
CONSTANT = ("zeros", "zeros_like", "new_zeros", "ones", "ones_like", "new_ones", "full", "full_like", "new_full")
"""Ops that give one number everywhere."""
Values = tuple[int, ...]  # of each rank, the index of its value
Step = tuple[int, Op, list[Values]]  # the place of an op in the stream, the op, and what it reads


@dataclass(frozen=True, slots=True)
class Match:
    """What of one device a value is: the layout, None if each rank has another part of it; the key of a stale one.

    `reshaped` if the dims of the layout are those of what it was before a change of its shape.
    """

    layout: MeshLayout | None
    stale: Key | None = None
    reshaped: bool = False

    @property
    def times(self) -> float:
        """How often too large it is."""
        return 1.0 if self.layout is None else self.layout.factor

    def pending(self, means: Container[int]) -> list[int]:
        """The axes along which a sum is pending, or a mean of these axes."""
        axes = enumerate(self.layout.axes if self.layout is not None else ())
        return [i for i, one in axes if one.kind == "P" and (one.op == "sum" or i in means)]


@dataclass
class OpValues:
    """The values of the ranks' op streams, in the region in which `key` goes wrong; `wanted` are those of the reference.

    Each of `wanted` has the key if it is one of an earlier step, the sum of its elements, and the sum of their sizes.
    """

    sides: Sides
    key: Key
    streams: list[OpStream]
    wanted: list[tuple[Tensor, Key | None, float, float]]
    matches: dict[Values, Match | None] = field(default_factory=dict)
    own: dict[Values, Match | None] = field(default_factory=dict)

    @property
    def in_backward(self) -> bool:
        return region_of(self.key, {}).phase == BACKWARD

    @property
    def means(self) -> list[int]:
        """The axes along which a mean is pending where a sum could be.

        A mean over rows of their own is what ranks should have; in a backward pass it makes of a pending sum a mean.
        """
        return [i for i, name in enumerate(self.sides.mesh) if self.in_backward or name not in self.sides.batch_axes]

    def made(self, values: Values) -> Step | None:
        """The op of the first rank that made a value, its place in the stream, and what all ranks read there."""
        ops = [stream.made_by.get(value) for stream, value in zip(self.streams, values, strict=True)]
        if ops[0] is None:
            return None
        each = [None if at is None else stream.ops[at] for stream, at in zip(self.streams, ops, strict=True)]
        first = each[0]
        if first is None or any(one is None or len(one.reads) != len(first.reads) for one in each):
            return None if first is None else (ops[0], first, [])
        return ops[0], first, list(zip(*(one.reads for one in each if one is not None), strict=True))

    def held(self, values: Values) -> list[Tensor]:
        """What each rank has."""
        return [stream.values[value] for stream, value in zip(self.streams, values, strict=True)]

    def match(self, values: Values) -> Match | None:
        """What of one device the value is; None if it is nothing of it."""
        if values not in self.matches:
            self.matches[values] = None  # a value that an op both reads and writes
            self.matches[values] = self.own_match(values) or self._match_of_read(values)
        return self.matches[values]

    def own_match(self, values: Values) -> Match | None:
        if values not in self.own:
            self.own[values] = self._match(self.held(values))
        return self.own[values]

    def _match_of_read(self, values: Values) -> Match | None:
        made = self.made(values)
        if made is not None and made[1].name in CONSTANT:
            return Match(None)
        if made is not None and made[2] and self.is_cut_up(made[1], made[2][0]):
            return Match(None)
        if made is None or made[1].name not in SAME_ELEMENTS or not made[2]:
            return None
        before = made[2][-1 if made[1].name == "copy_" else 0]
        match = self.match(before)
        return match and replace(match, reshaped=self.held(before)[0].shape != self.held(values)[0].shape)

    def is_cut_up(self, op: Op, values: Values) -> bool:
        """Whether an op cuts a value that is whole along a dim into parts that are all read, as one after the other in a ring."""
        if len(op.gives) < 2 or not {*op.gives} <= {x for one in self.streams[0].ops for x in one.reads}:
            return False
        match, dims = self.match(values), self.held(values)[0].dim()
        if match is None or match.layout is None or match.reshaped:
            return False
        at = {dim % max(dims, 1) for dim in op.dims or (0,)}
        return not any(one.kind == "S" and one.dim in at for one in match.layout.axes)

    def _match(self, held: list[Tensor]) -> Match | None:
        total = sum(float(_numbers(x).sum()) for x in held)
        factors = {1}
        for size in self.sides.sizes:
            factors |= {size * one for one in factors}
        times = [float(one) for one in sorted(factors)] if self.in_backward else [1.0]
        totals = {count * int(by) for count in factors for by in times}
        for want, stale, amount, sizes in self.wanted:
            likely = any(abs(total - by * amount) <= 0.01 * by * sizes + 1e-6 for by in totals)
            if not likely or not _may_be(held[0], want):
                continue
            cast = [x.to(want.dtype) for x in held] if want.is_floating_point() else held
            layout = find_layout(cast, self.sides.sizes, want, slack_of(want), factors=times)
            if layout is not None:
                return Match(layout, stale)
        each = (any(not stale and self._is_part(x, want) for want, stale, *_ in self.wanted) for x in held)
        return Match(None) if all(each) else None

    def _is_part(self, x: Tensor, want: Tensor) -> bool:
        """Whether it is the whole value, or some of its rows where ranks have rows of their own."""
        if fits(x, want, slack_of(want)):
            return True
        return bool(self.sides.batch_axes) and windows(x, want, slack_of(want), (0,)) is not None

    def is_pending(self, values: Values) -> bool:
        match = self.match(values)
        return match is not None and bool(match.pending(range(len(self.sides.sizes))))

    def agree(self, values: Values, axes: Sequence[int]) -> bool:
        held, ranks = self.held(values), torch.arange(len(values)).reshape(self.sides.sizes)
        pairs = [
            (ranks.select(axis, 0), ranks.select(axis, at)) for axis in axes for at in range(1, self.sides.sizes[axis])
        ]
        return all(
            equal_tensors(held[int(a)], held[int(b)])
            for x, y in pairs
            for a, b in zip(x.flatten(), y.flatten(), strict=True)
        )

    def given(self, op: Op) -> list[Tensor] | None:
        """What each rank has from its op of this name and number."""
        same = [
            next((one for one in stream.ops if (one.name, one.number) == (op.name, op.number)), None)
            for stream in self.streams
        ]
        if any(one is None or not one.gives for one in same):
            return None
        return [stream.values[one.gives[0]] for stream, one in zip(self.streams, same, strict=True) if one is not None]

    def likely_layout(self, values: Values) -> MeshLayout | None:
        """The layout of a value, or that of what it is computed from, element by element."""
        for _ in range(MOST_STEPS):
            match, made = self.match(values), self.made(values)
            if match is not None:
                return None if match.reshaped else match.layout
            shape = self.held(values)[0].shape
            alike = [
                one
                for one in (made[2] if made is not None else [])
                if self.held(one)[0].shape == shape and one != values
            ]
            if not alike:
                return None
            values = alike[0]
        return None

    def is_reduced(self, op: Op) -> bool:
        """Whether a collective reads what the op gives, perhaps as a copy."""
        stream, values = self.streams[0], set(op.gives)
        for one in stream.ops:
            if values & set(one.reads):
                if one.group is not None:
                    return True
                values |= set(one.gives) if one.name in SAME_ELEMENTS else set()
        return False

    def axes_of(self, group: Sequence[int]) -> set[int]:
        """The mesh axes along which the ranks of a group differ."""
        ranks = torch.arange(len(self.sides.ranks)).reshape(self.sides.sizes)
        numbers = self.sides.numbers or tuple(range(len(self.sides.ranks)))
        places = torch.stack([(ranks == numbers.index(rank)).nonzero()[0] for rank in group if rank in numbers])
        return {axis for axis in range(ranks.dim()) if len(places[:, axis].unique()) > 1}


def values_of(sides: Sides, key: Key) -> OpValues | None:
    """The values of a second run that recorded the region of `key`; None if it has not recorded it on each side."""
    reference, streams = sides.reference.ops, [rank.ops for rank in sides.ranks if rank.ops is not None]
    if reference is None or len(streams) < len(sides.ranks):
        return None
    seen = [(k, one.value) for k, one in sides.reference.seen.items() if k.step <= key.step]
    current = [*reference.values, *(x for k, x in seen if not _is_stale(k, key))]
    every = [*((x, None) for x in current), *((x, k) for k, x in seen if _is_stale(k, key))]
    numbers = [(x, stale, _numbers(x)) for x, stale in every if x.numel()]
    wanted = [(x, stale, float(all_of.sum()), float(all_of.abs().sum())) for x, stale, all_of in numbers]
    return OpValues(sides, key, streams, wanted)


def _numbers(x: Tensor) -> Tensor:
    """The elements in double precision; of complex ones both parts."""
    return (torch.view_as_real(x.resolve_conj()) if x.is_complex() else x).double()


def _is_stale(key: Key, now: Key) -> bool:
    """Whether an observation is of an earlier step; parameters are those after the step before."""
    if key.kind == "parameter after the step":
        return key.step < now.step - 1
    return key.step < now.step and not (key.kind == "buffer" or (key.kind == "parameter" and now.step == 0))


def _may_be(x: Tensor, want: Tensor) -> bool:
    """Whether the shapes allow that `x` is a part of `want`, and the dtypes that they are equal."""
    if x.dim() != want.dim() or x.is_floating_point() != want.is_floating_point():
        return False
    return all(a <= b for a, b in zip(x.shape, want.shape, strict=True)) and (is_inexact(x) or x.dtype == want.dtype)


def slack_of(want: Tensor) -> Tensor:
    """How far an equal value may be away by its dtype alone, see `measured_slack`."""
    slack = measured_slack(want, ())
    return torch.zeros(()) if slack is None else slack


def equal_tensors(x: Tensor, y: Tensor) -> bool:
    return x.shape == y.shape and x.dtype == y.dtype and torch.equal(x, y)
