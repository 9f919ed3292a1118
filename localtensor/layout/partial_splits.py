"""Splits of a tensor into partial values, one for each rank.

Partial values satisfy `fold_partials(partial_values(x, kind, n, rng), kind) == x`: exactly for integers, bools, min and max; up
to rounding for sums, averages and products of floats.  They are adversarial, since a plain split such as x/n on each
rank lets wrong rules pass.  Addends cancel, change sign, and are non-zero where the total is zero; in `sparse` splits
half of them are zero where the total is not.  Minima and maxima have another owner for each element and random
distances, with ties in `sparse` splits.  Where the total is infinite, one part is, and the others are numbers, unless
that makes another total.  Where a sum, an average or a product is NaN, one part is, in `sparse` splits several; where a minimum or a
maximum is, all parts are, since it depends on the backend what they make of a number and a NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from localtensor.errors import NotReducible
from localtensor.layout.reductions import AND_KINDS, is_reducible
from localtensor.layout.tolerance import is_inexact

FAR_SCALE = 1024
"""The scale of `far` parts; a power of two, which loses no digits."""
TABLE = 1 << 15
"""The length of a table of random numbers; what needs more than half of it draws its own."""
TABLE_RANKS = 16  # for more, orders of ranks are drawn each time: their tables would be large
_SMALL_UNSIGNED = (torch.uint8, torch.uint16)


def _uniform(count: int, rng: torch.Generator) -> Tensor:
    return torch.rand(count, generator=rng, dtype=torch.float64)


def _real_noise(count: int, rng: torch.Generator) -> Tensor:
    """Non-zero numbers of both signs, 0.1 to 1.1 in size."""
    sign = torch.where(_uniform(count, rng) < 0.5, 1.0, -1.0)
    return (_uniform(count, rng) + 0.1) * sign


def _complex_noise(count: int, rng: torch.Generator) -> Tensor:
    """Numbers of those sizes in all directions: parts that are real alone would leave the imaginary part to one rank."""
    return torch.polar(_real_noise(count, rng).abs(), _uniform(count, rng) * 6.0)


def _whole_noise(count: int, rng: torch.Generator) -> Tensor:
    """Whole numbers of both signs, 1 to 9 in size."""
    sign = torch.randint(0, 2, (count,), generator=rng) * 2 - 1
    return torch.randint(1, 10, (count,), generator=rng) * sign


@lru_cache(maxsize=16)
def _table(numbers: Callable[[int, torch.Generator], Tensor]) -> Tensor:
    return numbers(TABLE, torch.Generator().manual_seed(0))


@lru_cache(maxsize=TABLE_RANKS)
def _orders(ranks: int) -> Tensor:
    """Random orders of the ranks, in columns."""
    return _uniform(ranks * TABLE, torch.Generator().manual_seed(0)).view(ranks, TABLE).argsort(0)


class RandomNumbers:
    """Random numbers that a seed determines: stretches of tables, from a place that the seed and the calls before it give.

    A stretch takes a few microseconds, where a generator that is seeded for each split and what it draws took most of the time of a split.
    """

    def __init__(self, seed: int) -> None:
        self._state = seed

    @classmethod
    def of(cls, rng: torch.Generator) -> RandomNumbers:
        """Those that a generator's next number determines."""
        return cls(int(torch.randint(1 << 62, (), generator=rng, device=rng.device)))

    def _next(self) -> int:
        """Steps of a linear congruential generator (Knuth, The Art of Computer Programming, volume 2, 3.3.4, MMIX)."""
        self._state = (self._state * 6364136223846793005 + 1442695040888963407) % (1 << 64)
        return self._state >> 33

    def take(
        self, numbers: Callable[[int, torch.Generator], Tensor], shape: tuple[int, ...], device: torch.device
    ) -> Tensor:
        """Numbers of this kind; not to be written to."""
        count, at = math.prod(shape), self._next()
        if count > TABLE // 2:
            found = numbers(count, torch.Generator().manual_seed(at))
        else:
            found = _table(numbers).narrow(0, at % (TABLE - count), count)
        return found.view(shape).to(device)

    def coin(self, shape: tuple[int, ...], device: torch.device, chance: float) -> Tensor:
        """True with this chance at each element."""
        return self.take(_uniform, shape, device) < chance

    def order(self, ranks: int, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """A random order of the ranks at each element: [ranks, *shape]."""
        count, at = math.prod(shape), self._next()
        if count > TABLE // 2 or ranks > TABLE_RANKS:
            found = _uniform(ranks * count, torch.Generator().manual_seed(at)).view(ranks, count).argsort(0)
        else:
            found = _orders(ranks).narrow(1, at % (TABLE - count), count)
        return found.reshape(ranks, *shape).to(device)


def partial_values(
    x: Tensor, kind: str, ranks: int, rng: torch.Generator | RandomNumbers, *, sparse: bool = False, far: bool = False
) -> Tensor:
    """`ranks` partial values of x, stacked as [ranks, *x.shape], of x's dtype.

    `sparse` makes zeros among the parts where the total is not zero (sum, avg), ties (min, max), or ones (product).
    `far` makes parts about a thousand times as large as the total, or as far from it; it has no effect on integers of
    fewer than 32 bits.  Raises `NotReducible` unless `is_reducible`.
    """
    if not is_reducible(kind, x.dtype):
        raise NotReducible("partial_values", kind, x.dtype)
    random = rng if isinstance(rng, RandomNumbers) else RandomNumbers.of(rng)
    make = {"sum": _addends, "avg": _addends, "min": _extremes, "max": _extremes, "product": _factors}[kind]
    if x.dtype == torch.bool:
        apart = random.coin((ranks - 1, *x.shape), x.device, 0.5)
        stack = torch.cat([x | apart if kind in AND_KINDS else x & apart, x[None]])
    else:
        has_range = torch.finfo(x.dtype).max > 1e6 if is_inexact(x) else torch.iinfo(x.dtype).bits >= 32
        stack = make(x, kind, ranks, random, sparse, FAR_SCALE if far and has_range else 1)
    # The ranks are put in a random order at each element, so that no rank is special.
    return stack.gather(0, random.order(ranks, tuple(x.shape), x.device))


def _peak(x: Tensor) -> tuple[float, bool]:
    """The largest finite absolute value of floats or complex numbers, and whether all are finite."""
    if not x.numel():
        return 0.0, True
    size = x.detach().abs()
    peak = float(size.amax())
    if math.isfinite(peak):
        return peak, True
    return float(size.nan_to_num(0.0, 0.0, 0.0).amax()), False


def _noise(x: Tensor, count: int, random: RandomNumbers, far: int) -> tuple[Tensor, bool]:
    """Random non-zero values, about `far` times as large as x, of both signs where the dtype has signs; whether x is finite."""
    shape = (count, *x.shape)
    if not is_inexact(x):
        noise = random.take(_whole_noise, shape, x.device) * far
        return (noise if x.dtype.is_signed else noise.abs()).to(x.dtype), True
    peak, finite = _peak(x)
    noise = random.take(_complex_noise if x.dtype.is_complex else _real_noise, shape, x.device)
    return (noise * ((peak * 0.7 + 0.6) * far)).to(x.dtype), finite


def _addends(x: Tensor, kind: str, ranks: int, random: RandomNumbers, sparse: bool, far: int) -> Tensor:
    if kind == "avg":
        x = x * ranks
    noise, finite = _noise(x, ranks - 1, random, far)
    if sparse:
        noise = noise * random.coin(tuple(noise.shape), x.device, 0.5)
    if x.dtype in _SMALL_UNSIGNED:  # parts larger than the total would wrap, and so would what an op makes of them
        cuts = random.take(_uniform, tuple(noise.shape), x.device).sort(0).values
        noise = (cuts * x).floor().diff(dim=0, prepend=torch.zeros_like(x, dtype=cuts.dtype)[None]).to(x.dtype)
    # Where the total is infinite, one rank holds that; inf - inf would make it NaN.
    last = x - (noise.sum(0, dtype=x.dtype) if ranks != 2 else noise[0])
    return torch.cat([noise if finite else _with_nans_of(x, noise, random, sparse), last[None]])


def _with_nans_of(x: Tensor, others: Tensor, random: RandomNumbers, sparse: bool) -> Tensor:
    """The parts of the other ranks; if `sparse`, with NaN in about half of those of an element that is NaN.

    One NaN is enough for a sum, an average or a product, and several make it, too: what counts NaN must not rely on one.
    """
    return torch.where(x.isnan() & random.coin(tuple(others.shape), x.device, 0.5), x, others) if sparse else others


def _factors(x: Tensor, kind: str, ranks: int, random: RandomNumbers, sparse: bool, far: int) -> Tensor:
    shape = (ranks - 1, *x.shape)
    sign = torch.where(random.coin(shape, x.device, 0.5), 1, -1 if x.dtype.is_signed else 1)
    if not is_inexact(x) or sparse:
        others = sign.to(x.dtype)
        last = x * others.prod(0, dtype=x.dtype)
    else:
        others = sign * torch.where(random.coin(shape, x.device, 0.5), 2.0 * far, 0.5 / far)
        if x.dtype.is_complex:
            others = others * torch.where(random.coin(shape, x.device, 0.5), 1j, 1.0)
        others, last = others.to(x.dtype), (x / others.prod(0)).to(x.dtype)
    if is_inexact(x) and bool(x.isnan().any()):
        others = _with_nans_of(x, others, random, sparse)
    return torch.cat([others, last[None]])


def _extremes(x: Tensor, kind: str, ranks: int, random: RandomNumbers, sparse: bool, far: int) -> Tensor:
    noise, finite = _noise(x, ranks - 1, random, far)
    distance = noise.abs() if x.dtype.is_signed else noise
    # Far enough, at half of the elements, for a part to be larger in size than the total: |P(max)| is no maximum.
    distance = torch.where(random.coin(tuple(distance.shape), x.device, 0.5), distance * 8, distance)
    if sparse:
        distance = distance.masked_fill(random.coin(tuple(distance.shape), x.device, 0.4), 0)  # inf * 0 would be NaN
    down = kind == "max"
    if is_inexact(x) and finite:
        others = x - distance if down else x + distance
    else:
        others = _shift(x, distance, noise, down=down)
    return torch.cat([others, x[None]])


def _shift(x: Tensor, distance: Tensor, noise: Tensor, *, down: bool) -> Tensor:
    """x shifted by a distance, never past the ends of an integer dtype.

    Where x is infinite on the other side, the result is the noise, of both signs: any number is valid there.  Where x
    is NaN, it is NaN: of a number and a NaN, gloo's minimum and maximum are the one or the other, by the order of ranks.
    """
    if is_inexact(x):
        free = x == (torch.inf if down else -torch.inf)
        return torch.where(free, noise, x - distance if down else x + distance)
    ends = torch.iinfo(x.dtype)
    if down:
        return torch.where(x < ends.min + distance, x, x - distance)
    return torch.where(x > ends.max - distance, x, x + distance)
