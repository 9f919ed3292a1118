"""Partial values: tensors that only together make the truth, and what they make together.

`fold(parts(x, kind, n, rng), kind) == x`: exactly for integers, bools, min and max; up to
rounding for sums, averages and products of floats.

The parts are adversaries.  An honest split such as x/n on each rank lets wrong rules pass, so
sums cancel, change sign, and are non-zero where the total is zero; in every second split half of
them are zero where the total is not.  Minima and maxima have another owner for each element and
element-wise random distances, with ties in every second split.  Where the total is NaN or infinite,
one part is, and the others are numbers, unless that makes another total.
"""

from __future__ import annotations

import torch
from torch import Tensor

from localtensor.errors import NotReducible
from localtensor.layout.reductions import divided


def reducible(kind: str, dtype: torch.dtype) -> bool:
    """Whether a partial value of this dtype means anything under this reduction.

    Booleans add and multiply as "or" and "and", as gloo and nccl reduce them.
    """
    if dtype == torch.bool:
        return kind != "avg"
    if dtype == torch.complex32 or (dtype.is_floating_point and dtype.itemsize == 1):
        return False  # torch itself cannot add these on a CPU
    if kind == "avg" and dtype in (torch.uint8, torch.int8, torch.int16):
        return False  # their sums wrap, and a wrapped sum divided is no average
    return not (dtype.is_complex and kind in ("min", "max"))


def agreed(kind: str, dtype: torch.dtype) -> bool:
    """Whether everybody means the same by it: as `reducible`, but for averages of integers, which round somehow."""
    return reducible(kind, dtype) and (kind != "avg" or _divides(dtype))


def fold(held: Tensor, kind: str) -> Tensor:
    """The value that ranks hold together: `held` is [ranks, *shape], the result has `shape`.

    min and max let NaN through, as torch.minimum and torch.maximum do.  An average of integers
    comes back in float64, so that a sum that does not divide is not taken for one that does.
    Raises `NotReducible` where the reduction has no meaning for the dtype.
    """
    if not reducible(kind, held.dtype):
        raise NotReducible("partials.fold", kind, held.dtype)
    if held.dtype == torch.bool:
        return held.all(0) if kind in _ALL else held.any(0)
    if kind in ("min", "max"):
        return held.amin(0) if kind == "min" else held.amax(0)
    if kind == "product":
        return held.prod(0, dtype=held.dtype)
    total = held.sum(0, dtype=held.dtype)
    return total if kind == "sum" else divided(total if _divides(held.dtype) else total.double(), held.shape[0])


def parts(x: Tensor, kind: str, ranks: int, rng: torch.Generator, *, sparse: bool = False, far: bool = False) -> Tensor:
    """`ranks` partial values of x, stacked as [ranks, *x.shape], of x's dtype.

    `sparse` asks for the second form: zeros of the parts that are not zeros of the total (sum,
    avg), ties (min, max), ones (product).  `far` asks for parts about a thousand times as large as the total,
    or as far from it; integers of fewer than 32 bits have no room for that, and stay as they are without it.
    Raises `NotReducible` as `fold` does.
    """
    if not reducible(kind, x.dtype):
        raise NotReducible("partials.parts", kind, x.dtype)
    make = {"sum": _addends, "avg": _averages, "min": _extremes, "max": _extremes, "product": _factors}[kind]
    if x.dtype == torch.bool:
        return _deal(_truths(x, kind, ranks, rng), rng)
    return _deal(make(x, kind, ranks, rng, sparse, FAR if far and _has_room(x.dtype) else 1), rng)


FAR = 1024
"""How many times larger than usual the parts are that are asked to be far; a power of two costs no digits."""


def _has_room(dtype: torch.dtype) -> bool:
    return torch.iinfo(dtype).bits >= 32 if not _divides(dtype) else torch.finfo(dtype).max > 1e6


_ALL = ("min", "product")
"""The reductions of booleans that are "and"; the others are "or"."""


def _divides(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _noise(x: Tensor, count: int, rng: torch.Generator, far: int) -> Tensor:
    """Random values of the size of x itself, or so many times that, of both signs where the dtype has signs, never zero."""
    shape = (count, *x.shape)
    if not _divides(x.dtype):
        size = torch.randint(1, 10, shape, generator=rng, device=rng.device).to(x.device) * far
        sign = torch.randint(0, 2, shape, generator=rng, device=rng.device).to(x.device) * 2 - 1
        return (size * sign).to(x.dtype) if x.dtype.is_signed else size.to(x.dtype)
    finite = x.detach().abs().nan_to_num(0.0, 0.0, 0.0)
    scale = (finite.amax() * 0.7 + 0.6) * far if x.numel() else 1.0
    real = torch.rand(shape, generator=rng, device=rng.device, dtype=torch.float64).to(x.device)
    real = (real + 0.1) * torch.where(real * 1e4 % 2 < 1, -1.0, 1.0)
    return (real * scale).to(x.dtype)


def _coin(shape: tuple[int, ...], rng: torch.Generator, device: torch.device, chance: float) -> Tensor:
    return (torch.rand(shape, generator=rng, device=rng.device) < chance).to(device)


def _addends(x: Tensor, kind: str, ranks: int, rng: torch.Generator, sparse: bool, far: int) -> Tensor:
    noise = _noise(x, ranks - 1, rng, far)
    if sparse:
        noise = noise * _coin(tuple(noise.shape), rng, x.device, 0.5)
    # Where the total is infinite or NaN one rank alone holds that; inf - inf would make it NaN.
    last = x - noise.sum(0, dtype=x.dtype)
    return torch.cat([noise, last[None]])


def _averages(x: Tensor, kind: str, ranks: int, rng: torch.Generator, sparse: bool, far: int) -> Tensor:
    return _addends(x * ranks, "sum", ranks, rng, sparse, far)


def _factors(x: Tensor, kind: str, ranks: int, rng: torch.Generator, sparse: bool, far: int) -> Tensor:
    shape = (ranks - 1, *x.shape)
    sign = torch.where(_coin(shape, rng, x.device, 0.5), 1, -1 if x.dtype.is_signed else 1)
    if not _divides(x.dtype) or sparse:
        others = sign.to(x.dtype)
        return torch.cat([others, (x * others.prod(0, dtype=x.dtype))[None]])
    others = sign * torch.where(_coin(shape, rng, x.device, 0.5), 2.0 * far, 0.5 / far)
    return torch.cat([others.to(x.dtype), (x / others.prod(0)).to(x.dtype)[None]])


def _truths(x: Tensor, kind: str, ranks: int, rng: torch.Generator) -> Tensor:
    apart = _coin((ranks - 1, *x.shape), rng, x.device, 0.5)
    return torch.cat([x | apart if kind in _ALL else x & apart, x[None]])


def _extremes(x: Tensor, kind: str, ranks: int, rng: torch.Generator, sparse: bool, far: int) -> Tensor:
    noise = _noise(x, ranks - 1, rng, far)
    distance = noise.abs() if x.dtype.is_signed else noise
    # Far enough, at half of the elements, for a part to be larger in size than the total: |P(max)| is no maximum.
    distance = torch.where(_coin(tuple(distance.shape), rng, x.device, 0.5), distance * 8, distance)
    if sparse:
        distance = distance.masked_fill(_coin(tuple(distance.shape), rng, x.device, 0.4), 0)  # inf * 0 would be NaN
    others = _moved(x, distance, noise, down=kind == "max")
    return torch.cat([others, x[None]])


def _moved(x: Tensor, distance: Tensor, noise: Tensor, *, down: bool) -> Tensor:
    """x shifted by a distance, never past the ends of an integer dtype.

    Where x is NaN, or infinite on the other side, any number will do: noise, some above zero and some below, since what
    makes a number of NaN may make any.
    """
    if _divides(x.dtype):
        free = x.isnan() | (x == (torch.inf if down else -torch.inf))
        return torch.where(free, noise, x - distance if down else x + distance)
    ends = torch.iinfo(x.dtype)
    if down:
        return torch.where(x < ends.min + distance, x, x - distance)
    return torch.where(x > ends.max - distance, x, x + distance)


def _deal(stack: Tensor, rng: torch.Generator) -> Tensor:
    """The same parts with another order of the ranks at each element, so that no rank is special."""
    order = torch.rand(stack.shape, generator=rng, device=rng.device).argsort(0)
    return stack.gather(0, order.to(stack.device))
