"""Other calls like a given one, made to prove a rule wrong: other sizes, other values, each from a seed.

A rule that holds on one call may hold by chance: because two sizes are equal, all values positive, or no
two elements tied.  Sizes only grow, so that an index stays one; and only numbers that the op computes with
change their sign.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from strategies.model.arguments import trusts
from strategies.model.call_signature import scalars
from strategies.model.rule import Call, Sample, overload

ODD = (5, 7, 9, 11, 13)
"""Sizes for the first, second ... distinct size of a call: none is a multiple of 2 ranks, 5 and 7 none of 3."""
PLACED = (7, 5, 4, 6, 8)
"""Sizes by place, from the last dim: 4 on 3 ranks leaves the third without a row."""
LARGEST = 40
"""Sizes above this stay."""
WHOLE = 0.0
"""Stands for the factor that makes 2 of a positive number: what holds for 0.5 and 1.5 may not hold for it."""
Values = Callable[[Tensor, torch.Generator], Tensor]


@dataclass(frozen=True, slots=True)
class Adversary:
    """A sample, whether it is of other sizes than the call it was made from, and whether what holds on it counts in
    favour of a rule: equal values only count against."""

    sample: Sample
    name: str
    resized: bool
    counts: bool = True


def numbers(samples: Iterable[Sample]) -> frozenset[tuple[int, int]]:
    """(how many tensors, which of them) for each tensor that the op takes as real numbers in one of these calls."""
    return frozenset((len(s.tensors), i) for s in samples for i, t in enumerate(s.tensors) if _real(t))


def adversaries(base: Sample, free: frozenset[tuple[int, int]], seed: int) -> Iterator[Adversary]:
    """Those of one call, the most telling first.  `free` are the tensors whose values may be any number."""
    open_ = frozenset(i for n, i in free if n == len(base.tensors))

    def drawn(sample: Sample, name: str, values: Values, factor: float = 1, *, counts: bool = True) -> Adversary:
        rng = torch.Generator().manual_seed(zlib.crc32(f"{seed} {base.op} {base.origin} {name}".encode()))
        tensors = tuple(values(t, rng) if i in open_ else fresh(t, rng) for i, t in enumerate(sample.tensors))
        made = Sample(_rescaled(sample, factor), tensors, f"{base.origin}, {name}")
        return Adversary(made, name, sample is not base, counts)

    sized = [base] if keeps_sizes(base) else [placed(base), grown(base)]
    yield drawn(sized[-1], "both signs", both_signs)
    yield drawn(base, "negative", lambda x, rng: -both_signs(x, rng).abs(), 3)
    yield drawn(sized[0], "apart", apart, WHOLE)
    yield drawn(sized[-1], "drawn again", fresh, 3)
    yield drawn(base, "positive", lambda x, rng: both_signs(x, rng).abs())
    yield drawn(base, "ties", ties, WHOLE)
    yield drawn(base, "all equal", lambda x, rng: torch.full_like(x, 2), counts=False)


def keeps_sizes(sample: Sample) -> bool:
    """Whether the op might read past the end if sizes grew: it trusts its caller, who gives it integers beside numbers."""
    return trusts(sample.op) and len({_real(t) for t in sample.tensors}) > 1


def grown(base: Sample) -> Sample:
    """Equal sizes grow together, to odd ones; a size of one stays."""
    sizes = sorted({size for t in base.tensors for size in t.shape if 1 < size <= LARGEST})
    new: dict[int, int] = {}
    for size in sizes:
        new[size] = next((o for o in ODD if o >= size and o not in new.values()), size)
    return _sized(base, [tuple(new.get(size, size) for size in t.shape) for t in base.tensors])


def placed(base: Sample) -> Sample:
    """Each dim grows by its place, counted from the last, and a size of one becomes what stands beside it."""

    def size(at: int, old: int) -> int:
        return max(PLACED[min(at, len(PLACED) - 1)], old) if old <= LARGEST else old

    shapes = [tuple(size(t.ndim - 1 - d, old) for d, old in enumerate(t.shape)) for t in base.tensors]
    return _sized(base, shapes)


def _sized(base: Sample, shapes: Sequence[tuple[int, ...]]) -> Sample:
    """The values are repeated until the new shape is full."""

    def fill(x: Tensor, shape: tuple[int, ...]) -> Tensor:
        many = torch.Size(shape).numel()
        return x if x.shape == shape or not x.numel() else x.flatten().repeat(-(-many // x.numel()))[:many].view(shape)

    return replace(base, tensors=tuple(fill(t, s) for t, s in zip(base.tensors, shapes, strict=True)))


def _rescaled(sample: Sample, factor: float) -> Call:
    """The call with other numbers of the same sign where the op computes with them; of WHOLE, with 2 or -2."""
    if factor == 1:
        return sample.call

    def put(value: Any) -> Any:
        return type(value)(math.copysign(2, value)) if factor == WHOLE and value else value * factor

    new = {name: put(value) for name, value, computes in scalars(sample) if computes}
    names = (a.name for a in overload(sample.op)._schema.arguments)
    args = tuple(new.get(name, value) for name, value in zip(names, sample.call.args, strict=False))
    return replace(sample.call, args=args, kwargs=tuple((n, new.get(n, v)) for n, v in sample.call.kwargs))


# -- values


def fresh(x: Tensor, rng: torch.Generator) -> Tensor:
    """Other values between the least and the largest of the tensor; the same where that says nothing."""
    if x.dtype == torch.bool:
        return torch.rand(x.shape, generator=rng).lt(0.5).to(x.device)
    if x.dtype.is_complex:
        return torch.view_as_complex(fresh(torch.view_as_real(x), rng))
    if not x.numel():
        return x
    if not _real(x):
        low, high = int(x.min()), int(x.max())
        return torch.randint(low, high + 1, x.shape, generator=rng).to(x)
    calm = x.double().nan_to_num(0.0, 0.0, 0.0)
    low_f, high_f = float(calm.min()), float(calm.max())
    return (low_f + (high_f - low_f) * torch.rand(x.shape, generator=rng, dtype=torch.float64)).to(x)


def both_signs(x: Tensor, rng: torch.Generator) -> Tensor:
    """Numbers of both signs, none of them near zero, as large as those that are there."""
    if x.dtype == torch.bool:
        return fresh(x, rng)
    size = torch.rand(x.shape, generator=rng, dtype=torch.float64) * 0.9 + 0.1
    sign = torch.randint(0, 2, x.shape, generator=rng) * 2 - 1
    largest = float(x.abs().double().nan_to_num(0.0, 0.0, 0.0).amax()) if x.numel() else 1.0
    scaled = size * sign * min(max(largest, 1.0), 9.0)
    if x.dtype.is_complex:
        turned = torch.complex(scaled, scaled.flip(0) if scaled.ndim else scaled * 0.5)
        return turned.to(x)
    return scaled.to(x) if _real(x) else (scaled * 1.5).round().to(x)


def ties(x: Tensor, rng: torch.Generator) -> Tensor:
    """Few different values."""
    return (torch.randint(0, 2, x.shape, generator=rng) * 3 - 1).to(x)


def apart(x: Tensor, rng: torch.Generator) -> Tensor:
    """One element a hundred times as large as the others, of either sign."""
    out = both_signs(x, rng)
    if out.numel():
        spot = int(torch.randint(0, out.numel(), (1,), generator=rng))
        flat = out.flatten()
        flat[spot] = flat[spot] * (100 if _real(x) else 9)
        out = flat.view(out.shape)
    return out


def _real(x: Tensor) -> bool:
    return x.dtype.is_floating_point or x.dtype.is_complex
