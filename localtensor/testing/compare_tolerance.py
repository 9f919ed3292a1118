"""What is kept of the other runs of a program: how far a right value may be away, whether two runs are equal, what ranks hold.

Each value is looked at when the run computes it, beside the one that the first run has kept, and is not kept itself: so the
memory of a comparison does not grow with the number of runs.  What the ranks hold is kept only where it is not the reference's.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from localtensor.layout.tolerance import DOUBLE_OF, MAX_JUMP_SHARE, is_inexact, max_abs, measured_slack, widen_slack
from localtensor.testing.compare.find_layout import (
    REPLICATED,
    AxisLayout,
    MeshLayout,
    equal_but_rounding,
    fits,
    layout_of_placements,
)
from localtensor.testing.compare.watch import AFTER, DROPOUT, Key, Watch

ROUNDINGS_OF_UPDATE = 8
"""Units in the last place of a parameter that a right update may be away by rounding."""
LEAST_TO_FREE = 32 * 2**20
"""Bytes that a run keeps from which on the memory of a run is given back before the next."""


def free_what_is_left(reference: Watch) -> None:
    """Gives the memory of a run that has ended back to the system, if runs are large."""
    if sum(one.value.nbytes for one in reference.seen.values()) < LEAST_TO_FREE:
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)


def doubling() -> Callable[[Tensor], Tensor]:
    """`in_double`, made as a `Noise` is."""
    return in_double


def in_double(x: Tensor) -> Tensor:
    """The tensor in double precision, if it rounds to less."""
    return x.to(DOUBLE_OF[x.dtype]) if x.dtype in DOUBLE_OF else x


class Noise(TorchDispatchMode):
    """Moves each element of a float tensor by one unit in the last place, up or down.

    While it is entered, so is what each op gives in 16 bits: a program may round to them between two values that are
    looked at.  A tensor of whole numbers stays: labels and masks are exact, and a program may ask whether they are equal to
    a number.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._rng = torch.Generator().manual_seed(seed)
        self.coarsest = 0.0  # one unit in the last place of the coarsest dtype so far

    def __call__(self, x: Tensor) -> Tensor:
        if not x.is_floating_point() or torch.equal(x, x.round()):
            return x
        drawn = torch.rand(x.shape, generator=self._rng, device=self._rng.device)  # whatever the default device is
        toward = torch.where(drawn < 0.5, -torch.inf, torch.inf).to(x.device, x.dtype)
        if x.dtype.itemsize > 2:
            return torch.nextafter(x, toward)
        return x + toward.sign() * x.abs() * torch.finfo(x.dtype).eps

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        done = func(*args, **(kwargs or {}))
        own = any(getattr(kind, "__torch_dispatch__", None) is not Tensor.__torch_dispatch__ for kind in types)
        return done if own or func.is_view or func._schema.is_mutable else tree_map(self._rounded, done)

    def _rounded(self, x: Any) -> Any:
        if not isinstance(x, Tensor) or x.dtype not in (torch.bfloat16, torch.float16):
            return x
        self.coarsest = max(self.coarsest, torch.finfo(x.dtype).eps)
        return self(x)


@dataclass
class Slacks:
    """How far a right value may be from that of the `reference`, by its key: `found`, from the runs that are varied."""

    reference: Watch
    found: dict[Key, Tensor] = field(default_factory=dict)

    @contextmanager
    def of_run(
        self, *, double: bool = False, noise: Noise | Watch | None = None
    ) -> Iterator[Callable[[Key, Tensor], None]]:
        """Gives what takes the values of one run; of several values of a key the last counts, as in a watch.

        `noise` knows the coarsest dtype that the run has computed in so far.

        Runs with noise of one unit in the last place come before that in double precision.
        """
        own: dict[Key, Tensor | float] = {}  # no small tensors: they would keep the memory around them from reuse

        def take(key: Key, value: Tensor) -> None:
            one = self.reference.seen.get(key)
            if one is None:
                return
            base = self.found.get(key, measured_slack(one.value, ())) if double else None
            coarse = 0.0 if noise is None else noise.coarsest
            start = self.reference.seen.get(Key(0, "parameter", key.name)) if key.kind == AFTER else None
            if double:
                slack = widen_slack(base, one.value, value)
            elif start is not None and start.value.shape == one.value.shape:
                slack = slack_of_update(start.value, one.value, value, coarse)
            else:
                slack = measured_slack(one.value, (value,), coarse)
            if slack is not None:
                own[key] = slack if slack.dim() else float(slack)

        yield take
        for key, one in own.items():
            slack = torch.as_tensor(one, dtype=torch.float64)
            before = None if double else self.found.get(key)
            self.found[key] = slack if before is None else torch.maximum(before, slack)

    def take(self, watch: Watch, *, double: bool = False) -> None:
        """Takes all values that a varied run has kept."""
        with self.of_run(double=double, noise=watch) as take:
            for key, one in watch.seen.items():
                take(key, one.value)


def slack_of_update(start: Tensor, value: Tensor, other: Tensor, coarse: float = 0.0) -> Tensor | None:
    """The slack of a parameter after a step: that of how far it has moved from `start`, and its own rounding.

    A share of the parameter would be more than the whole update if the learning rate is small.  `other` is the parameter of
    the run that started one unit in the last place away, which is no noise of the update.  All have one shape.

    >>> start = torch.ones(4)
    >>> float(slack_of_update(start, start - 1e-4, start - 1e-4)) < 1e-5 < float(measured_slack(start - 1e-4, ()))
    True
    """
    if not is_inexact(value):
        return measured_slack(value, (other,), coarse)
    eps = torch.finfo(value.dtype).eps
    noise = ((other - value).abs() - ROUNDINGS_OF_UPDATE * eps * value.abs()).clamp_min(0)
    moved = (value - start).abs()
    slack = measured_slack(moved, (moved + noise,), coarse)
    return None if slack is None else slack + ROUNDINGS_OF_UPDATE * eps * max_abs(value)


def is_noise(value: Tensor, slack: Tensor) -> bool:
    """Whether a value is rounding alone: more than half of its elements jump.  Zeros of a float that stay are not counted.

    Such a zero may be there for good, behind a ReLU, or by chance, in a gradient that is zero but for rounding.
    `slack` is that of `measured_slack`.

    >>> is_noise(torch.tensor([0.0, 0.0, 3e-9]), torch.tensor([0.0, 0.0, torch.inf]))
    True
    >>> is_noise(torch.tensor([1.0, 2.0, 0.5]), torch.tensor([0.0, 0.0, torch.inf]))
    False
    >>> is_noise(torch.tensor([0, 0, 1]), torch.tensor([0.0, 0.0, torch.inf]))
    False
    """
    jumps = slack.isinf()
    counted = int((jumps | (value != 0)).sum()) if is_inexact(value) else value.numel()
    return bool(jumps.all()) or int(jumps.sum()) > MAX_JUMP_SHARE * counted


@dataclass
class Repeated:
    """A second run of the `reference` from the same seed: `missing` are the keys without an equal value so far."""

    reference: Watch
    missing: dict[Key, None] = field(init=False)

    def __post_init__(self) -> None:
        self.missing = dict.fromkeys(self.reference.seen)

    def take(self, key: Key, value: Tensor) -> None:
        """Takes a value of the second run."""
        one = self.reference.seen.get(key)
        if one is not None and torch.equal(one.value.nan_to_num(), value.nan_to_num()):
            self.missing.pop(key, None)
        elif one is not None:
            self.missing[key] = None

    @property
    def other(self) -> Key | None:
        """The first value that differs; None if the runs are equal."""
        return next(iter(self.missing), None)


@dataclass
class Settled:
    """The ranks' values that are parts of those of the `reference` or equal to them, in the place of which its own are kept.

    `layouts` are theirs.  A value is looked at as soon as all ranks have it; what fits is kept as a view of the reference's,
    what does not fit, or is a pending sum, stays as it is.
    """

    reference: Watch
    slacks: Mapping[Key, Tensor]
    sizes: Sequence[int]
    layouts: dict[Key, MeshLayout] = field(default_factory=dict)
    pool: dict[Key, list[Tensor]] = field(default_factory=dict)  # the copies that are waiting, by all ranks
    _waiting: dict[Key, dict[int, Watch]] = field(default_factory=dict)

    def of_rank(self, rank: int) -> Callable[[Watch, Key], None]:
        """What takes the keys of this rank's values."""

        def take(watch: Watch, key: Key) -> None:
            waiting = self._waiting.setdefault(key, {})
            waiting[rank] = watch
            if len(waiting) == torch.Size(self.sizes).numel():
                del self._waiting[key]
                self._settle(key, [waiting[number] for number in range(len(waiting))])

        return take

    def _settle(self, key: Key, watches: Sequence[Watch]) -> None:
        self.layouts.pop(key, None)
        one, slack = self.reference.seen.get(key), self.slacks.get(key)
        if one is None or slack is None or key.kind == DROPOUT:
            return
        said = layout_of_placements(watches[0].seen[key], len(self.sizes))
        found = parts_of_whole([watch.seen[key].value for watch in watches], self.sizes, one.value, slack, said)
        if found is None:
            return
        self.layouts[key], parts = found
        self.pool.pop(key, None)
        for watch, part in zip(watches, parts, strict=True):
            watch.seen[key] = replace(watch.seen[key], value=part)


def parts_of_whole(
    held: Sequence[Tensor], sizes: Sequence[int], want: Tensor, slack: Tensor, first: Sequence[MeshLayout] = ()
) -> tuple[MeshLayout, list[Tensor]] | None:
    """The layout of whole tensors and shards that fits, and the part of `want` that each rank has, uncopied; None if none fits.

    `first` are tried before all others.  Where two axes cut one dim, the last may have cut first, as FSDP cuts what tensor
    parallelism has cut.

    >>> x = torch.arange(4.0)
    >>> layout, parts = parts_of_whole([x[:2].clone(), x[2:].clone()], [2], x, torch.zeros(()))
    >>> str(layout), parts[1], parts[1].data_ptr() == x[2:].data_ptr()
    ('S(0)', tensor([2., 3.]), True)
    """
    if any(x.dim() != want.dim() or x.dtype != want.dtype for x in held):
        return None
    dims = [dim for dim in range(want.dim()) if any(x.shape[dim] != want.shape[dim] for x in held)]
    kinds = [*(AxisLayout("S", dim) for dim in dims), REPLICATED]
    likely = [one.axes for one in first if all(axis in kinds for axis in one.axes)]
    for axes in [*likely, *itertools.product(*(kinds if size > 1 else [REPLICATED] for size in sizes))]:
        cuts = [axis.dim for axis in axes if axis.kind == "S"]
        if {*cuts} != {*dims}:
            continue
        for last_first in (False, True)[: 1 + (len(cuts) > len(dims))]:
            parts = _parts(want, held, sizes, axes, last_first)
            limits = (
                _parts(slack.expand_as(want), held, sizes, axes, last_first) if slack.dim() else [slack] * len(held)
            )
            each = list(zip(held, parts, limits, strict=True)) if parts else []
            if each and all(fits(*one) for one in each) and _replicas_agree(held, sizes, axes):
                return MeshLayout(_in_blocks(sizes, axes) if last_first else axes), parts
    return None


def _parts(
    whole: Tensor, held: Sequence[Tensor], sizes: Sequence[int], axes: Sequence[AxisLayout], last_first: bool
) -> list[Tensor]:
    """The parts of a tensor that ranks with tensors of these shapes have, cut by the first axis first, or by the last one."""
    order = list(range(len(sizes)))[:: -1 if last_first else 1]
    ranks = torch.arange(len(held)).reshape(tuple(sizes)).permute(order).reshape(-1).tolist()
    made = _cut(whole, [held[rank] for rank in ranks], [sizes[i] for i in order], [axes[i] for i in order])
    return [part for _, part in sorted(zip(ranks, made, strict=True), key=lambda one: one[0])] if made else []


def _cut(whole: Tensor, held: Sequence[Tensor], sizes: Sequence[int], axes: Sequence[AxisLayout]) -> list[Tensor]:
    if not axes:
        return [whole] if whole.shape == held[0].shape else []
    each = len(held) // sizes[0]
    groups = [held[i : i + each] for i in range(0, len(held), each)]
    pieces: Sequence[Tensor] = [whole] * sizes[0]
    if axes[0].kind == "S":
        lengths = [_length(one, sizes[1:], axes[1:], axes[0].dim) for one in groups]
        if sum(lengths) != whole.shape[axes[0].dim]:
            return []
        pieces = whole.split(lengths, axes[0].dim)
    made = [_cut(piece, group, sizes[1:], axes[1:]) for piece, group in zip(pieces, groups, strict=True)]
    return [part for one in made for part in one] if all(made) else []


def _length(held: Sequence[Tensor], sizes: Sequence[int], axes: Sequence[AxisLayout], dim: int) -> int:
    """How long the tensor is along a dim that these ranks have together."""
    if not axes:
        return held[0].shape[dim]
    each = len(held) // sizes[0]
    lengths = [_length(held[i : i + each], sizes[1:], axes[1:], dim) for i in range(0, len(held), each)]
    return sum(lengths) if axes[0] == AxisLayout("S", dim) else lengths[0]


def _in_blocks(sizes: Sequence[int], axes: Sequence[AxisLayout]) -> tuple[AxisLayout, ...]:
    """The layout whose last axes have cut first, as one whose first axes cut within the blocks of the later ones."""
    made = []
    for i, axis in enumerate(axes):
        later = [size for size, other in zip(sizes[i + 1 :], axes[i + 1 :], strict=True) if other == axis]
        made.append(AxisLayout("S", axis.dim, (1,) * torch.Size(later).numel()) if axis.kind == "S" else axis)
    return tuple(made)


def _replicas_agree(held: Sequence[Tensor], sizes: Sequence[int], axes: Sequence[AxisLayout]) -> bool:
    """Whether the ranks along axes without a cut have equal tensors, but for rounding."""
    ranks = torch.arange(len(held)).reshape(tuple(sizes))
    for axis in (i for i, one in enumerate(axes) if one.kind == "R" and sizes[i] > 1):
        for first, *others in ranks.movedim(axis, -1).reshape(-1, sizes[axis]).tolist():
            one = held[first]
            if not all(held[i] is one or torch.equal(held[i], one) or equal_but_rounding(held[i], one) for i in others):
                return False
    return True
