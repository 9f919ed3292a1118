"""The tables of one search, in integers: the placements of an axis, the legal transitions, the cost of each step.

A layout is one integer with a field for each axis: its placement and, if it shards a dim, its position in that dim's
stack of cuts (see `strategies.planner.steps.legal_steps`). Axes of one rank have no field: they neither shard nor
reduce.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from localtensor.errors import Refusal
from localtensor.layout import Spec, StridedShard, strided_chunk_bounds
from strategies.planner.steps.alpha_beta import REPLICATE, partials_commute
from strategies.planner.steps.legal_steps import LEGAL, collectives_reduce, why_not_made
from strategies.planner.steps.plan import Move, Price
from strategies.planner.steps.prices import round_up

STEP_PAIRS = {f"{row.was}>{row.now}": (row.kind, row.was, row.now, False) for row in LEGAL if row.kind}
STEP_PAIRS |= {
    pair.replace("P", "X"): (kind, was, now, was == "P")
    for pair, (kind, was, now, _) in STEP_PAIRS.items()
    if "P" in pair
}
"""Each legal step along one axis by a pair of letters: its kind, both for a price, and whether parts are exchanged.
`X` is a P whose parts are exchanged where it is reduced."""
STEP_BITS = 20
"""The low bits of a cost, which count the steps: of equally cheap plans the shortest has the least cost."""
PlacementKey = tuple[str, int, int, str]
"""What identifies a placement: its letter, the dim that it shards, its split factor, its reduction."""


class BadPrice(Refusal, call="plan", argument="price"):
    """A price that is negative or no whole number."""

    PROBLEM = "it returns {got!r} for {move}, and a price is a whole number of 0 or more"
    REMEDY = "Round it up, to picoseconds or bytes."


REPLICATED: PlacementKey = "R", -1, 0, ""


def placement_key(placement: Placement) -> PlacementKey:
    """The key of a placement. Placements are not used as keys themselves: torch compares some of its classes as equal.

    >>> placement_key(Shard(1)), placement_key(Partial("max"))
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


def placement_of_key(one: PlacementKey) -> Placement:
    """The placement with this key."""
    letter, dim, factor, reduction = one
    if letter == "SS":
        return StridedShard(dim, split_factor=factor)
    return Shard(dim) if letter == "S" else Partial(reduction) if reduction else REPLICATE


class StepKind:
    """A kind of step along some axes: the collective, the letters before and after, and its costs so far computed."""

    __slots__ = (
        "axes", "costs", "exchanged", "factor", "group", "kind", "multiple", "now", "price_of_bytes", "priced_after",
        "ranks", "relaxed_costs", "was",
    )  # fmt: skip

    def __init__(self, pair: str, group: tuple[int, ...], axes: tuple[int, ...], ranks: int, itemsize: int) -> None:
        self.group, self.axes, self.ranks = group, axes, ranks
        self.kind, self.was, self.now, self.exchanged = STEP_PAIRS[pair]
        scatters = self.kind == "reduce_scatter"
        self.priced_after = scatters or self.kind == "local"  # the bytes that count are those of a piece afterwards
        self.factor = ranks if scatters or self.kind == "all_gather" else 1  # and those of all ranks
        self.multiple = ranks * itemsize if self.exchanged and not scatters else 0  # in equal parts
        self.costs: dict[int, int] = {}
        self.relaxed_costs: dict[int, int] = {}
        """Those of the bound: with even pieces, by the axes that cut afterwards."""
        self.price_of_bytes: Callable[[int], int] | None = None
        """The price by the bytes, where nothing else matters."""

    def nbytes(self, before: int, after: int) -> int:
        """The bytes that are priced, given the largest pieces before and after."""
        if self.multiple:
            return round_up(before, self.multiple)
        return (after if self.priced_after else before) * self.factor


class PlacementTable:
    """The part of a table that is independent of sizes and price: the placements, and the transitions between them."""

    def __init__(self, offered: tuple[PlacementKey, ...], held: tuple[PlacementKey, ...], dtype: torch.dtype) -> None:
        known = dict.fromkeys((*offered, *held))
        self.offered = tuple(range(len(offered)))
        self.index = {one: p for p, one in enumerate(known)}
        self.placements = tuple(map(placement_of_key, known))
        letters, self.dims, self.factors, self.reductions = zip(*known, strict=True)
        self.letters = tuple(
            [
                "X" if one == "P" and not collectives_reduce(op, dtype) else one
                for one, op in zip(letters, self.reductions, strict=True)
            ]
        )
        self.held = tuple([self.index[one] for one in held])
        self.clashes = self._clashes(dtype)
        self.follows = tuple([self._follows(p, dtype) for p in range(len(known))])

    def _follows(self, p: int, dtype: torch.dtype) -> tuple[tuple[int, str], ...]:
        """The placements an axis may change to from placement `p`, each with its pair of letters."""
        found = []
        for q in self.offered:
            pair = f"{self.letters[p]}>{self.letters[q]}"
            reduction = self.reductions[q]
            if q == p or pair not in STEP_PAIRS:
                continue
            if not reduction or not why_not_made(reduction, dtype, self.dims[p] >= 0):
                found.append((q, pair))
        return tuple(found)

    def _clashes(self, dtype: torch.dtype) -> tuple[frozenset[int], ...]:
        """For each placement, those that no other axis may hold while an axis becomes partial in this way."""
        partial = [p for p, reduction in enumerate(self.reductions) if reduction]
        found = [frozenset[int]()] * len(self.placements)
        for p in partial:
            one = self.placements[p]
            found[p] = frozenset(q for q in partial if not partials_commute(one, self.placements[q], dtype))
        return tuple(found)


placement_table = functools.lru_cache(maxsize=1024)(PlacementTable)
"""The frame for these arguments: immutable and shared."""


class StateTable:
    """The layouts that a search may visit: all those built of `offered` and of the source's placements."""

    def __init__(
        self, src: Spec, offered: Sequence[Placement], flattened: Sequence[Sequence[int]], price: Price
    ) -> None:
        self.src, self.price, self.shape = src, price, src.shape
        self.grows = bool(getattr(price, "grows", False))
        # Only the class's own `along` counts: a subclass that overrides `__call__` alone inherits another price's.
        self.along = price.along if "along" in vars(type(price)) else None  # type: ignore[attr-defined]
        sizes = src.mesh.sizes
        self.axes = tuple([axis for axis, size in enumerate(sizes) if size > 1])
        self.sizes = tuple([sizes[axis] for axis in self.axes])
        self.count, self.itemsize = len(self.axes), src.dtype.itemsize
        first = dict.fromkeys([REPLICATED, *map(placement_key, offered)])
        held = tuple([placement_key(src.placements[axis]) for axis in self.axes])
        frame = placement_table(tuple(first), held, src.dtype)
        self.offered, self.index, self.placements, self.held = frame.offered, frame.index, frame.placements, frame.held
        self.letters, self.dims, self.factors = frame.letters, frame.dims, frame.factors
        self.clashes, self.follows = frame.clashes, frame.follows
        self.turns = max(self.count - 1, 1).bit_length()
        self.width = self.turns + len(self.placements).bit_length()
        self.shifts = tuple([self.width * i for i in range(self.count)])
        self.mask = (1 << self.width) - 1
        self.groups = self._groups(flattened) if flattened else ()
        self.cutting = [1]
        for size in self.sizes:
            self.cutting += [size * others for others in self.cutting]
        self.nbytes = math.prod(src.shape) * self.itemsize
        items = -(-self.nbytes // self.itemsize)
        self.even = [-(-items // ranks) * self.itemsize for ranks in self.cutting]
        self.singles: tuple[dict[str, StepKind], ...] = tuple([{} for _ in self.axes])
        """The sorts of step of each axis, as far as they are made, by their pairs of letters."""
        self._sorts: dict[tuple[tuple[int, ...], str], StepKind] = {}
        self._costs: dict[tuple[str, tuple[int, ...], bool], tuple[dict[int, int], Callable[[int], int]]] = {}

    def _groups(self, flattened: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
        place = {axis: i for i, axis in enumerate(self.axes)}
        sets = [tuple(sorted(place[axis] for axis in axes if axis in place)) for axes in flattened]
        return tuple(dict.fromkeys(group for group in sets if len(group) > 1))

    def state(self, spec: Spec) -> int:
        """The integer of a layout."""
        found, turns = 0, [0] * len(self.shape)
        for axis in spec.sequence:
            if axis in self.axes:
                p = self.index[placement_key(spec.placements[axis])]
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
        """The placement number and the position of an axis."""
        field = state >> self.shifts[i] & self.mask
        return field >> self.turns, field & (1 << self.turns) - 1

    def piece(self, state: int) -> int:
        """The bytes of the largest piece of a layout: that of the rank with coordinate 0 on every axis."""
        lengths, fields = list(self.shape), [(*self.field(state, i), i) for i in range(self.count)]
        for turn in range(self.count):
            for p, its, i in fields:
                if its == turn and self.dims[p] >= 0:
                    lengths[self.dims[p]] = self.cut(lengths[self.dims[p]], self.factors[p], self.sizes[i])
        return math.prod(lengths) * self.itemsize

    def cut(self, length: int, factor: int, ranks: int) -> int:
        """The size that the first of `ranks` ranks keeps of one dim."""
        if factor == 1:
            return -(-length // ranks)
        return sum([chunk[0][1] for chunk in strided_chunk_bounds(length, factor, ranks)])

    def sort(self, group: tuple[int, ...], pair: str) -> StepKind:
        """The one kind of step along these axes for a letter pair, with its costs."""
        found = self._sorts.get((group, pair))
        if found is None:
            axes, ranks = tuple([self.axes[i] for i in group]), math.prod([self.sizes[i] for i in group])
            found = self._sorts[group, pair] = StepKind(pair, group, axes, ranks, self.itemsize)
            if self.along is not None:
                key = found.kind, axes, found.exchanged
                known = self._costs.get(key)
                if known is None:
                    known = self._costs[key] = {}, self.along(found.kind, axes, ranks, found.exchanged)
                found.costs, found.price_of_bytes = known
            if len(group) == 1:
                self.singles[group[0]][pair] = found
        return found

    def cost(self, sort: StepKind, cutting: int, before: int, after: int) -> int:
        """The cost of a step; the axes `cutting` shard before it, `before` and `after` are bytes of the largest pieces.

        Raises `BadPrice`.
        """
        nbytes = sort.nbytes(before, after) if sort.multiple else (after if sort.priced_after else before) * sort.factor
        if sort.price_of_bytes is not None:
            found = sort.costs.get(nbytes)
            if found is None:
                found = sort.costs[nbytes] = (sort.price_of_bytes(nbytes) << STEP_BITS) + 1
            return found
        key = nbytes << self.count | cutting
        found = sort.costs.get(key)
        if found is None:
            move = self.move(sort, cutting, nbytes)
            got = self.price(move)
            whole = got if type(got) is int and got >= 0 else self._checked_price(got, move)
            found = sort.costs[key] = (whole << STEP_BITS) + 1
        return found

    def move(self, sort: StepKind, cutting: int, nbytes: int) -> Move:
        """The move that `prices.move_of` would build."""
        even = self.nbytes / self.cutting[cutting]
        return Move(sort.kind, sort.axes, sort.ranks, nbytes, even, sort.was, sort.now, sort.exchanged)

    def _checked_price(self, got: object, move: Move) -> int:
        """Another integer type as an int. Raises `BadPrice` for anything else."""
        try:
            cost = operator.index(got)  # type: ignore[arg-type]  # what is no number is refused here
        except TypeError:
            cost = -1
        if cost < 0:
            raise BadPrice(price_name(self.price), got, move)
        return cost


def price_name(price: Price) -> str:
    """The name of a price, or of a function that has no `name`."""
    return str(getattr(price, "name", "") or getattr(price, "__name__", type(price).__name__))
