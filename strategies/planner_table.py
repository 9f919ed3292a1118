"""One search as tables of integers: what an axis may be, what may follow what, and what each step costs.

A layout is one integer.  Each axis has a field of it: which placement it has and, if it cuts a dim, its turn in the
stack of cuts of that dim (see `strategies.steps`).  Axes of one rank have no field: they neither cut nor add up.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from localtensor.errors.base import LocalTensorError, refusal
from localtensor.partials import agreed
from localtensor.placement import Spec, StridedShard
from localtensor.shards import strided_bounds
from strategies.cost import commute
from strategies.plans import Move, Price
from strategies.steps import LEGAL, REPLICATE

KIND = {(row.was, row.now): row.kind for row in LEGAL}
STEPS = 20
"""A cost is a price and, in this many bits below it, a number of steps: of equally cheap plans the shortest is least."""
Facts = tuple[str, int, int, str]
"""All that tells one placement from another: its letter, the dim that it cuts, its split factor, its reduction."""


class BadPrice(LocalTensorError):
    """A price that is no whole number, or less than nothing."""

    def __init__(self, name: str, move: Move, got: object) -> None:
        problem = f"it asks {got!r} for {move}, and a price is a whole number of 0 or more"
        super().__init__(refusal("plan", "price", name, problem, "Round it up, to picoseconds or bytes."))


def facts(placement: Placement) -> Facts:
    """The facts of a placement that is defined: torch holds some classes equal to each other.

    >>> from torch.distributed.tensor import Partial
    >>> facts(Shard(1)), facts(Partial("max"))
    (('S', 1, 1, ''), ('P', -1, 0, 'max'))
    """
    kind = type(placement)
    if kind is Shard:
        return "S", placement.dim, 1, ""  # type: ignore[attr-defined]
    if kind is Replicate:
        return "R", -1, 0, ""
    if kind is StridedShard:
        return "SS", placement.dim, int(placement.split_factor), ""  # type: ignore[attr-defined]
    return "P", -1, 0, placement.reduce_op  # type: ignore[attr-defined]


class Sort:
    """A sort of step: its kind, its axes, their letters before and after, and its costs as far as they are known."""

    __slots__ = ("axes", "costs", "group", "kind", "late", "now", "ranks", "times", "was")

    def __init__(
        self, kind: str, group: tuple[int, ...], axes: tuple[int, ...], ranks: int, was: str, now: str
    ) -> None:
        self.kind, self.group, self.axes, self.ranks, self.was, self.now = kind, group, axes, ranks, was, now
        self.late = kind in ("reduce_scatter", "local")  # the bytes that count are those of a piece afterwards
        self.times = ranks if kind in ("all_gather", "reduce_scatter") else 1  # and those of all ranks
        self.costs: dict[int, int] = {}


class Table:
    """The layouts that a search may look at: all those of `offered`, and of its source."""

    def __init__(
        self, src: Spec, offered: Sequence[Placement], flattened: Sequence[Sequence[int]], price: Price
    ) -> None:  # fmt: skip
        self.src, self.price, self.shape = src, price, src.shape
        self.grows = bool(getattr(price, "grows", False))
        self.axes = tuple([axis for axis, size in enumerate(src.mesh.sizes) if size > 1])
        self.sizes = tuple([src.mesh.sizes[axis] for axis in self.axes])
        self.count, self.itemsize = len(self.axes), src.dtype.itemsize
        known = {facts(p): p for p in (REPLICATE, *offered)}
        self.offered = tuple(range(len(known)))
        held: list[tuple[Facts, Placement]] = [
            (facts(src.placements[axis]), src.placements[axis]) for axis in self.axes
        ]
        known.update(held)
        self.index = {one: p for p, one in enumerate(known)}
        self.placements = tuple(known.values())
        self.letters, self.dims, self.factors, self.reductions = zip(*known, strict=True)
        self.held = [self.index[one] for one, _ in held]
        self.turns = max(self.count - 1, 1).bit_length()
        self.width = self.turns + len(known).bit_length()
        self.shifts = tuple([self.width * i for i in range(self.count)])
        self.mask = (1 << self.width) - 1
        place = {axis: i for i, axis in enumerate(self.axes)}
        sets = [tuple(sorted(place[axis] for axis in axes if axis in place)) for axes in flattened]
        self.groups = tuple(dict.fromkeys(group for group in sets if len(group) > 1))
        self.clashes = self._clashes()
        self.cutting = [1]
        for size in self.sizes:
            self.cutting += [size * others for others in self.cutting]
        self.nbytes = math.prod(src.shape) * self.itemsize
        self.even = [-(-self.nbytes // self.itemsize // ranks) * self.itemsize for ranks in self.cutting]
        self._sorts: dict[tuple[str, tuple[int, ...], str, str], Sort] = {}

    # -- layouts

    def state(self, spec: Spec) -> int:
        """The integer of a layout."""
        found, turns = 0, [0] * len(self.shape)
        for axis in spec.sequence:
            if axis in self.axes:
                p = self.index[facts(spec.placements[axis])]
                turn, dim = 0, self.dims[p]
                if dim >= 0:
                    turn = turns[dim]
                    turns[dim] += 1
                found += (p << self.turns | turn) << self.shifts[self.axes.index(axis)]
        return found

    def spec(self, state: int) -> Spec:
        """The layout of an integer; axes of one rank are replicated."""
        placements: list[Placement] = [REPLICATE] * len(self.src.placements)
        stacks: dict[int, dict[int, int]] = {}
        for i, axis in enumerate(self.axes):
            p, turn = self.field(state, i)
            placements[axis] = self.placements[p]
            if self.dims[p] >= 0:
                stacks.setdefault(self.dims[p], {})[turn] = axis
        orders = [(dim, tuple([axes[turn] for turn in range(len(axes))])) for dim, axes in stacks.items()]
        others = tuple([(dim, axes) for dim, axes in orders if list(axes) != sorted(axes)])
        return Spec(self.src.mesh, tuple(placements), self.shape, self.src.dtype, others)

    def field(self, state: int, i: int) -> tuple[int, int]:
        """The placement and the turn of an axis, by their numbers here."""
        field = state >> self.shifts[i] & self.mask
        return field >> self.turns, field & (1 << self.turns) - 1

    def piece(self, state: int) -> int:
        """The bytes of the largest piece of a layout: that of the rank which is first on every axis."""
        lengths, fields = list(self.shape), [(*self.field(state, i), i) for i in range(self.count)]
        for turn in range(self.count):
            for p, its, i in fields:
                if its == turn and self.dims[p] >= 0:
                    lengths[self.dims[p]] = self.cut(lengths[self.dims[p]], self.factors[p], self.sizes[i])
        return math.prod(lengths) * self.itemsize

    # -- steps

    def cut(self, length: int, factor: int, ranks: int) -> int:
        """What the first of so many ranks has of one dim."""
        if factor == 1:
            return -(-length // ranks)
        return sum([chunk[0][1] for chunk in strided_bounds(length, factor, ranks)])

    def follows(self, i: int, p: int) -> list[tuple[int, Sort]]:
        """What an axis may become from a placement if nothing stands in its way, and by which sort of step."""
        found, was = [], self.letters[p]
        for q in self.offered:
            now = self.letters[q]
            kind = KIND.get((was, now), "") if q != p else ""
            if kind and (now != "P" or self._may_be(self.reductions[q], self.dims[p])):
                found.append((q, self.sort(kind, (i,), was, now)))
        return found

    def _may_be(self, reduction: str, cut: int) -> bool:
        """Whether there are such partial values, and whether they can be made of what a cut has left."""
        return agreed(reduction, self.src.dtype) and not (reduction == "avg" and cut >= 0)

    def _clashes(self) -> list[frozenset[int]]:
        """For each placement those that no other axis may have beside it, while that becomes partial."""
        partial = [p for p, letter in enumerate(self.letters) if letter == "P"]
        found = [frozenset[int]()] * len(self.placements)
        if len(partial) > 1:
            for p in partial:
                one, dtype = self.placements[p], self.src.dtype
                found[p] = frozenset(q for q in partial if not commute(one, self.placements[q], dtype))
        return found

    # -- prices

    def sort(self, kind: str, group: tuple[int, ...], was: str, now: str) -> Sort:
        """The one sort of these, with its costs."""
        found = self._sorts.get((kind, group, was, now))
        if found is None:
            axes, ranks = tuple([self.axes[i] for i in group]), math.prod([self.sizes[i] for i in group])
            found = self._sorts[kind, group, was, now] = Sort(kind, group, axes, ranks, was, now)
        return found

    def cost(self, sort: Sort, cutting: int, before: int, after: int) -> int:
        """What a step costs where these axes cut before it, and the largest pieces have so many bytes before and after.

        Raises `BadPrice`.
        """
        nbytes = (after if sort.late else before) * sort.times
        key = nbytes << self.count | cutting
        found = sort.costs.get(key)
        if found is None:
            move = self.move(sort, cutting, nbytes)
            got = self.price(move)
            found = sort.costs[key] = ((got if type(got) is int and got >= 0 else self._whole(got, move)) << STEPS) + 1
        return found

    def move(self, sort: Sort, cutting: int, nbytes: int) -> Move:
        """The move that `pricing.move_of` would make."""
        even = self.nbytes / self.cutting[cutting]
        return Move(sort.kind, sort.axes, sort.ranks, nbytes, even, sort.was, sort.now)

    def _whole(self, got: object, move: Move) -> int:
        """A price of another type that is a whole number."""
        try:
            cost = operator.index(got)  # type: ignore[arg-type]  # what is no number is refused here
        except TypeError:
            cost = -1
        if cost < 0:
            raise BadPrice(name_of(self.price), move, got)
        return cost


def name_of(price: Price) -> str:
    """The name of a price, or of a function that has none."""
    return str(getattr(price, "name", "") or getattr(price, "__name__", type(price).__name__))
