"""A test whether a cost of redistribution is a metric, apart from symmetry.

A cost `d` from one spec to another is consistent with the possible paths only if, for all specs,

* `d(a, a) == 0` and `d(a, b) >= 0`: doing nothing is free, and no communication is paid for;
* `d(a, c) <= d(a, b) + d(b, c)`, the triangle inequality: a direct path costs no more than a detour.

Symmetry is not required: from R to a shard is a copy, and the way back is an all-gather. So a cost is a quasi-metric.
`d(a, b)` may be 0 for different specs if the cost ignores what lies between them, as bytes sent ignore a copy.

The price of the cheapest plan is a quasi-metric by construction: it is the distance in a graph with the legal steps as
edges and nonnegative prices as lengths. That requires that every layout on a path to or from any b is available to
every plan: see `strategies.planner.steps.legal_steps.usable_placements`. Strided shards other than those of the
destination are not, so a price must not charge less for these than for plain shards, as torch's own does. It also holds
under a memory limit, with infinity where no plan stays within it: the limit applies to each step, so two plans concatenate.
"""

from __future__ import annotations

import inspect
import itertools
import math
import numbers
import reprlib
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from localtensor._util.units import bytes_text
from localtensor.errors import Refusal
from localtensor.layout import Mesh, Spec, shape_text, short
from strategies.base.progress import Progress
from strategies.planner.search.api import plan
from strategies.planner.steps.legal_steps import legal_changes, usable_placements
from strategies.planner.steps.plan import PICO, Move, axes_text, placements_text
from strategies.planner.steps.prices import move_of


@dataclass(frozen=True, slots=True)
class Violation:
    """A violation of the triangle inequality: the path by the second spec costs less than the direct one."""

    src: Spec
    via: Spec
    dst: Spec
    direct: float
    first: float
    second: float

    @property
    def saved(self) -> float:
        return self.direct - (self.first + self.second)

    def text(self, unit: str) -> str:
        direct, around = amount_text(self.direct, unit), amount_text(self.first + self.second, unit)
        return f"{placements_text(self.src)} -> {placements_text(self.dst)} costs {direct}; by way of {placements_text(self.via)} {around}"


@dataclass(frozen=True, slots=True)
class InvalidAnswer:
    """One answer that no cost may give."""

    what: str
    where: str
    """The pair of specs, or the move."""
    got: float

    def text(self, unit: str) -> str:
        return f"{self.where} costs {amount_text(self.got, unit)}: {self.what}"


@dataclass(frozen=True, slots=True)
class MetricReport:
    """The result for all triples of these specs.

    A cost need not be symmetric: R to S(0) is a copy, and the way back is an all-gather.
    """

    cost: str
    unit: str
    """`s`, `ps`, `bytes`, or empty for any other."""
    specs: tuple[Spec, ...]
    triples: int
    """0 if the answers were such that no plan could be searched by them."""
    broken: int
    """Triples that violate the triangle inequality."""
    walls: int
    """Of these, those with an infinite direct cost, though there is a path."""
    worst: tuple[Violation, ...]
    odd: tuple[InvalidAnswer, ...]
    free: int
    """Pairs of different specs that cost nothing: no fault, if the cost ignores what lies between them."""

    @property
    def holds(self) -> bool:
        return self.broken == 0 and not self.odd

    def lines(self, most: int = 5) -> list[str]:
        """The report, the worst first, at most so many of each kind."""
        one = self.specs[0]
        about = f"{len(self.specs)} specs of {shape_text(one.shape, one.dtype)} on {one.mesh}"
        if not self.triples:
            found = [f"{self.cost}: not tried on triples, since no plan can be searched by such prices ({about})"]
        else:
            share = f"{self.broken:,} of {self.triples:,} triples break the triangle inequality"
            walls = f", {self.walls:,} of them where it knows of no way, and of two that make one" if self.walls else ""
            found = [f"{self.cost}: {share}{walls} ({about})"]
        found += [f"  {detour.text(self.unit)}" for detour in self.worst[:most]]
        for what, count in Counter(odd.what for odd in self.odd).items():
            found.append(f"{count:,} answers: {what}")
            found += [f"  {odd.text(self.unit)}" for odd in self.odd if odd.what == what][:most]
        if self.free:
            found.append(f"{self.free:,} pairs of different specs cost nothing, which is no fault")
        return [*found, "It is a metric on these, but for symmetry." if self.holds else "It is no metric."]

    def as_json(self, most: int = 5) -> dict[str, Any]:
        """The result as JSON; infinite and undefined numbers as text."""
        one = self.specs[0]
        worst = [
            {
                "src": placements_text(d.src), "via": placements_text(d.via), "dst": placements_text(d.dst),
                "direct": json_number(d.direct), "around": json_number(d.first + d.second),
            }
            for d in self.worst[:most]
        ]  # fmt: skip
        return {
            "cost": self.cost, "unit": self.unit, "mesh": list(one.mesh.sizes), "shape": list(one.shape),
            "dtype": str(one.dtype).removeprefix("torch."), "specs": len(self.specs), "triples": self.triples,
            "broken": self.broken, "walls": self.walls, "worst": worst,
            "odd": [{"what": o.what, "where": o.where, "got": json_number(o.got)} for o in self.odd[:most]],
            "odd_count": len(self.odd), "free": self.free, "holds": self.holds,
        }  # fmt: skip


def amount_text(value: float, unit: str) -> str:
    """A number in its unit.

    >>> amount_text(12.3e-6, "s"), amount_text(8_100_000, "ps"), amount_text(96, "bytes"), amount_text(7, ""), amount_text(math.inf, "s")
    ('12.3 us', '8.1 us', '96 B', '7', 'infinitely much')
    """
    if math.isinf(value):
        return "infinitely much" if value > 0 else "minus infinitely much"
    if unit in ("s", "ps"):
        return f"{value * 1e6 if unit == 's' else value * 1e6 / PICO:.6g} us"
    return bytes_text(value) if unit == "bytes" and value >= 0 else f"{value:.12g}"


def json_number(value: float) -> float | str:
    """A number as JSON represents it.

    >>> json_number(1.5), json_number(math.inf), json_number(math.nan)
    (1.5, 'inf', 'nan')
    """
    return value if math.isfinite(value) else str(value)


SCALES = (2, 1000, 1_000_000)
"""The factors by which the bytes of a move are scaled: the same move must not cost less."""
NOT_MONOTONE = "the same step with fewer bytes costs more"


@dataclass(frozen=True, slots=True)
class UserPrice:
    """A user's function as a price: integers as they are, seconds as picoseconds, rounded up."""

    name: str
    grows: bool
    seconds: bool
    answer: Callable[[Move], float]

    def __call__(self, move: Move) -> int:
        got = self.answer(move)
        return math.ceil(got * PICO) if self.seconds else int(got)


@dataclass(frozen=True, slots=True)
class PriceProbe:
    """The answers of a price of single steps: its faults, and whether plans can be searched by it."""

    answer: Callable[[Move], float]
    odd: tuple[InvalidAnswer, ...]
    seconds: bool
    """Whether some answer was a float: then all are seconds."""

    @property
    def unit(self) -> str:
        return "s" if self.seconds else ""

    @property
    def searchable(self) -> bool:
        return all(odd.what == NOT_MONOTONE for odd in self.odd)

    def price(self, name: str) -> UserPrice:
        """As a price for the planner. The plan cache does not mix it with others: `answer` equals only itself."""
        return UserPrice(name, not self.odd, self.seconds, self.answer)


def probe_price(price: Callable[[Move], object], specs: Sequence[Spec], call_price: Callable[..., float]) -> PriceProbe:
    """The answers for every step between these specs, with their own bytes and with more."""
    odd: list[InvalidAnswer] = []
    seconds = False
    for move in _all_moves(specs):
        larger = [replace(move, nbytes=times * move.nbytes, even=times * move.even) for times in SCALES]
        answers = [call_price(price, each) for each in (move, *larger)]
        along = axes_text(specs[0], move.axes)
        where = f"{along}: {move.kind} {move.was} -> {move.now} of {move.nbytes} bytes"
        seconds = seconds or any(isinstance(got, float) for got in answers)
        odd += _step_faults(where, answers, call_price(price, move))
    return PriceProbe(lambda move: call_price(price, move), tuple(odd), seconds)


def _all_moves(specs: Sequence[Spec]) -> Iterator[Move]:
    """Every move from one of these specs to another, each once, always in the same order."""
    seen: dict[Move, None] = {}
    for spec in specs:
        for offered in dict.fromkeys(usable_placements(spec, dst) for dst in specs):
            for change in legal_changes(spec, offered):
                seen[move_of(change.kind, change.axes, spec, change.now)] = None
    return iter(seen)


def _step_faults(where: str, answers: list[float], again: float) -> Iterator[InvalidAnswer]:
    first = answers[0]
    for got in answers:
        fault = "this is no number" if math.isnan(got) else "a price is never negative" if got < 0 else ""
        if math.isinf(got):
            fault = "the price of a step is finite; a step that there is not is no step"
        if fault:
            yield InvalidAnswer(fault, where, got)
            return
    if again != first:
        yield InvalidAnswer("a second call returns something else", where, again)
    if answers != sorted(answers):
        yield InvalidAnswer(NOT_MONOTONE, where, first)


PairCost = Callable[[Spec, Spec], float]
"""Seconds from one spec to another; infinite where there is no path."""
StepPrice = Callable[[Move], float]
"""The price of one step: seconds as a float, or an integer in any unit."""
TOLERANCE = 1e-9
"""The relative tolerance for sums of floats."""
LARGEST = 1e30
"""The largest finite cost that is accepted; larger ones might overflow in sums."""
MOST_SPECS = 128
"""The most specs; their triples are two million."""
MOST_VIOLATIONS = 100
"""Violations that are kept, the worst first; those with an infinite direct cost come last, as they say least."""


class BadCost(Refusal, call="localtensor cost check"):
    """A cost function that cannot be called, or has no valid result."""


def check_metric(
    cost: PairCost | StepPrice, mesh: Mesh, shape: Sequence[int] = (8, 8), dtype: torch.dtype = torch.float32,
    placements: Sequence[Placement] | None = None, *, orders: bool = False, name: str = "", unit: str = "", progress: Progress | None = None,
) -> MetricReport:  # fmt: skip
    """The result of a cost function for all triples of all specs with these placements: R, a shard of each dim, P(sum).

    A function of two specs is called for each pair. A function of one `Move` is called for single steps and, if its
    answers are valid prices, the cheapest plans by it are searched. `orders` adds specs whose dims are sharded in other
    orders. Raises `BadCost` for an invalid function, one that raises, or one that returns no number.

    >>> def cost(src: Spec, dst: Spec) -> float:  # by size alone: to shrink costs nothing, to grow costs too much
    ...     return max(0.0, float(ways(dst) - ways(src))) ** 2
    >>> def ways(spec: Spec) -> int:
    ...     return 4 // math.prod(2 for p in spec.placements if p.is_shard())
    >>> for line in check_metric(cost, Mesh.of(2, 2), (8,), placements=(Replicate(), Shard(0)), unit="bytes").lines(1):
    ...     print(line)
    cost: 2 of 64 triples break the triangle inequality (4 specs of f32[8] on Mesh(a=2, b=2))
      S(0),S(0) -> R,R costs 9 B; by way of R,S(0) 5 B
    7 pairs of different specs cost nothing, which is no fault
    It is no metric.
    """
    name = name or str(getattr(cost, "__name__", "") or getattr(cost, "name", type(cost).__name__))
    specs, progress = specs_of(mesh, tuple(shape), dtype, placements, orders), progress or Progress()
    call_price = _number_caller(name)
    if _parameter_count(cost, name) == 2:
        pair = cast(PairCost, cost)
        table = [[call_price(pair, src, dst) for dst in specs] for src in progress.each(f"calling {name}", specs)]
        again = [[call_price(pair, src, dst) for dst in specs] for src in progress.each("again", specs)]
        return _triangle_report(name, unit or "s", specs, table, _pair_faults(specs, table, again))
    tried = probe_price(cast(StepPrice, cost), specs, call_price)
    unit = unit or tried.unit
    if not tried.searchable:
        return MetricReport(name, unit, specs, 0, 0, 0, (), tried.odd, 0)
    price = tried.price(name)
    prices = [[plan(src, dst, price).price for dst in specs] for src in progress.each(f"planning by {name}", specs)]
    table = [[cost / PICO if tried.seconds else cost for cost in row] for row in prices]
    return _triangle_report(name, unit, specs, table, tried.odd)


def specs_of(
    mesh: Mesh, shape: tuple[int, ...], dtype: torch.dtype, placements: Sequence[Placement] | None, orders: bool = False
) -> tuple[Spec, ...]:
    """All specs of one tensor on a mesh with these placements. Raises `BadCost` where they are too many."""
    if placements is None:
        placements = (Replicate(), *map(Shard, range(len(shape))), Partial())
    count = len(placements) ** len(mesh.sizes)
    if not 0 < count <= MOST_SPECS:
        problem = f"they make {count} specs, and all triples of at most {MOST_SPECS} are tried"
        remedy = "Take fewer axes, dims or placements: --mesh 2,2 --shape 8,8."
        raise BadCost("placements", f"{' '.join(map(short, placements))} on {mesh}", problem, remedy)
    plain = [Spec(mesh, each, shape, dtype) for each in itertools.product(placements, repeat=len(mesh.sizes))]
    if not orders:
        return tuple(plain)
    return tuple(spec for one in plain for spec in _shard_orders(one))


def _shard_orders(spec: Spec) -> list[Spec]:
    dims = [dim for dim in range(len(spec.shape)) if len(spec.cut_by(dim)) > 1]
    ways = itertools.product(*(itertools.permutations(spec.cut_by(dim)) for dim in dims))
    return [replace(spec, shard_order=tuple(zip(dims, orders, strict=True))) for orders in ways]


def _triangle_report(
    name: str, unit: str, specs: tuple[Spec, ...], table: list[list[float]], odd: tuple[InvalidAnswer, ...]
) -> MetricReport:
    detours = []
    for i, row in enumerate(table):
        for j, first in enumerate(row):
            onward = table[j]
            for k, direct in enumerate(row):
                around = first + onward[k]
                if direct > around and not math.isclose(direct, around, rel_tol=TOLERANCE):
                    detours.append((direct - around, i, j, k))
    worst = sorted(detours, key=lambda found: (math.isinf(found[0]), -found[0], found[1:]))
    most = worst[:MOST_VIOLATIONS]
    shown = [Violation(specs[i], specs[j], specs[k], table[i][k], table[i][j], table[j][k]) for _, i, j, k in most]
    free = sum(cost == 0 for i, row in enumerate(table) for k, cost in enumerate(row) if i != k)
    walls = sum(math.isinf(saved) for saved, *_ in worst)
    return MetricReport(name, unit, specs, len(specs) ** 3, len(worst), walls, tuple(shown), odd, free)


def _pair_faults(
    specs: Sequence[Spec], table: list[list[float]], again: list[list[float]]
) -> tuple[InvalidAnswer, ...]:
    found = []
    for i, src in enumerate(specs):
        for k, dst in enumerate(specs):
            got, later, where = table[i][k], again[i][k], f"{placements_text(src)} -> {placements_text(dst)}"
            if math.isnan(got):
                found.append(InvalidAnswer("this is no number", where, got))
            elif got < 0:
                found.append(InvalidAnswer("a cost is never negative", where, got))
            elif i == k and got != 0:
                found.append(InvalidAnswer("there is nothing to do", where, got))
            if got != later and not (math.isnan(got) and math.isnan(later)):
                found.append(InvalidAnswer("a second call returns something else", where, later))
    return tuple(found)


def _parameter_count(cost: object, name: str) -> int:
    """The number of required positional parameters: 2 for a cost of pairs, 1 for a price of steps."""
    remedy = "Write def cost(src, dst), which returns seconds, or def price(move)."
    if not callable(cost) or isinstance(cost, type):
        raise BadCost("cost", name, "it is no function", remedy)
    try:
        parameters = inspect.signature(cost).parameters.values()
    except (TypeError, ValueError):
        raise BadCost("cost", name, "its parameters cannot be inspected", remedy) from None
    places = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    needed = [p for p in places if p.default is p.empty]
    named = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    if len(needed) not in (1, 2) or named:
        listed = ", ".join([p.name for p in needed] + named) or "nothing"
        raise BadCost("cost", name, f"it takes {listed}, and not two specs or one move", remedy)
    return len(needed)


def _number_caller(name: str) -> Callable[..., float]:
    """A call of the user's function that returns a number or raises `BadCost`."""

    def call_price(cost: Callable[..., object], *arguments: object) -> float:
        where = " -> ".join(map(str, arguments))
        try:
            got = cost(*arguments)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # why: the user's function may raise anything, SystemExit included
            frame = traceback.extract_tb(error.__traceback__)[-1]
            what = f"it raises {type(error).__name__}: {str(error).partition(chr(10))[0]} ({frame.filename}, line {frame.lineno})"
            raise BadCost("cost", name, f"{what} for {where}", "Fix that first.") from error
        if isinstance(got, bool) or not isinstance(got, numbers.Real):
            remedy = "Return an int or a float."
            raise BadCost("cost", name, f"it returns {got!r:.60} for {where}, which is no number", remedy)
        size: Any = abs(got)
        if LARGEST < size < math.inf:
            problem = f"it returns {reprlib.repr(got)} for {where}, which is beyond {LARGEST:g}"
            raise BadCost("cost", name, problem, "Return seconds, and infinity where there is no way.")
        return int(got) if isinstance(got, numbers.Integral) else float(got)

    return call_price
