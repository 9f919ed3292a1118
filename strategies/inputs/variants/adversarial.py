"""Adversarial calls and values, drawn from a seed to disprove rules that hold for one call by chance.

A rule may hold only because two sizes are equal, all values are positive, or no elements tie.  `adversaries` makes
calls with other sizes and values: sizes only grow, so that indices stay valid, and only operands of arithmetic change
their sign.  `VALUES` are other values for the same call (positions of extremes, ties, zeros, signs, magnitudes,
repeated indices, ends of dtypes): shapes and dtypes stay, and so do the claims.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from localtensor.layout import is_float8
from strategies.model import arguments
from strategies.model.call_signature import non_tensor_arguments
from strategies.model.rule import Call, Sample, overload

ODD = (5, 7, 9, 11, 13)
"""Sizes for the first, second ... distinct size of a call: none is a multiple of 2; 5 and 7 are none of 3."""
SIZES_BY_POSITION = (7, 5, 4, 6, 8)
"""Sizes by position, from the last dim: 4 on 3 ranks leaves the third without a row."""
LARGEST = 40
"""Larger sizes stay."""
TWO = 0.0
"""The factor that turns numbers into 2 or -2: a rule may hold for 0.5 and 1.5 only."""
Draw = Callable[[Tensor, torch.Generator], Tensor]
"""From a tensor to one of the same shape and dtype with other values."""
Make = Callable[[Sample, torch.Generator], tuple[Tensor, ...] | None]
"""From a sample to other tensors; None if nothing would change."""


@dataclass(frozen=True, slots=True)
class Values:
    """Other values for the same call, or another decomposition of its partial inputs.

    `partial` selects the rules tested with them: those without a partial input ("never"), all ("also"), or those with one
    ("only").  `split` names the decomposition ("" for the default).  `wild` values contain NaN or infinities: then results
    that are not floats are not compared.
    """

    name: str
    why: str
    make: Callable[[Sample, torch.Generator], tuple[Tensor, ...] | None]
    partial: str = "also"
    split: str = ""
    wild: bool = False

    def asks(self, partial: bool) -> bool:
        """Whether a rule with, or without, a partial input is tested with these values."""
        return self.partial == "also" or partial == (self.partial == "only")


def values_generator(name: str, seed: int) -> torch.Generator:
    """The random generator of one kind of values, determined by its name and the seed."""
    return torch.Generator().manual_seed(zlib.crc32(f"{name} {seed}".encode()))


@dataclass(frozen=True, slots=True)
class Adversary:
    """A sample, whether its sizes differ from the original call, and whether a pass counts in favour of a rule.

    Equal values count only against it.
    """

    sample: Sample
    name: str
    resized: bool
    counts: bool = True


def number_tensors(samples: Iterable[Sample]) -> frozenset[tuple[int, int]]:
    """(number of tensors, leaf number) of each tensor that is real or complex in one of these calls."""
    return frozenset((len(s.tensors), i) for s in samples for i, t in enumerate(s.tensors) if _real(t))


def adversaries(base: Sample, free: frozenset[tuple[int, int]], seed: int) -> Iterator[Adversary]:
    """The adversaries of one call, the most effective first.  `free` are the tensors whose values may be any number."""
    open_ = frozenset(i for n, i in free if n == len(base.tensors))

    def drawn(sample: Sample, name: str, values: Draw, factor: float = 1, *, counts: bool = True) -> Adversary:
        rng = torch.Generator().manual_seed(zlib.crc32(f"{seed} {base.op} {base.origin} {name}".encode()))
        tensors = tuple(values(t, rng) if i in open_ else redrawn(t, rng) for i, t in enumerate(sample.tensors))
        made = Sample(_rescaled(sample, factor), tensors, f"{base.origin}, {name}")
        return Adversary(made, name, sample is not base, counts)

    sized = [base] if keeps_sizes(base) else [grown_by_position(base), grown_to_odd(base)]
    yield drawn(sized[-1], "both signs", both_signs)
    yield drawn(base, "negative", lambda x, rng: -both_signs(x, rng).abs(), 3)
    yield drawn(sized[0], "apart", with_outlier, TWO)
    yield drawn(sized[-1], "drawn again", redrawn, 3)
    yield drawn(base, "positive", lambda x, rng: both_signs(x, rng).abs())
    yield drawn(base, "ties", ties, TWO)
    yield drawn(base, "all equal", lambda x, rng: torch.full_like(x, 2), counts=False)


def keeps_sizes(sample: Sample) -> bool:
    """Whether larger sizes could make the op read out of bounds: it trusts its caller and takes integers beside numbers."""
    return arguments.trusts_caller(sample.op) and len({_real(t) for t in sample.tensors}) > 1


def grown_to_odd(base: Sample) -> Sample:
    """The call with equal sizes grown together to odd ones; a size of one stays."""
    sizes = sorted({size for t in base.tensors for size in t.shape if 1 < size <= LARGEST})
    new: dict[int, int] = {}
    for size in sizes:
        new[size] = next((o for o in ODD if o >= size and o not in new.values()), size)
    return _sized(base, [tuple(new.get(size, size) for size in t.shape) for t in base.tensors])


def grown_by_position(base: Sample) -> Sample:
    """The call with each dim grown by its position, counted from the last; a size of one grows, too."""

    def size(at: int, old: int) -> int:
        return max(SIZES_BY_POSITION[min(at, len(SIZES_BY_POSITION) - 1)], old) if old <= LARGEST else old

    shapes = [tuple(size(t.ndim - 1 - d, old) for d, old in enumerate(t.shape)) for t in base.tensors]
    return _sized(base, shapes)


def _sized(base: Sample, shapes: Sequence[tuple[int, ...]]) -> Sample:
    """The call with its tensors filled up to these shapes by repetition."""

    def fill(x: Tensor, shape: tuple[int, ...]) -> Tensor:
        many = torch.Size(shape).numel()
        return x if x.shape == shape or not x.numel() else x.flatten().repeat(-(-many // x.numel()))[:many].view(shape)

    return replace(base, tensors=tuple(fill(t, s) for t, s in zip(base.tensors, shapes, strict=True)))


def _rescaled(sample: Sample, factor: float) -> Call:
    """The call with its operands of arithmetic scaled by `factor`; with `TWO`, set to 2 or -2 by their sign."""
    if factor == 1:
        return sample.call

    def put(value: Any) -> Any:
        return type(value)(math.copysign(2, value)) if factor == TWO and value else value * factor

    new = {name: put(value) for name, value, computes in non_tensor_arguments(sample) if computes}
    names = (a.name for a in overload(sample.op)._schema.arguments)
    args = tuple(new.get(name, value) for name, value in zip(names, sample.call.args, strict=False))
    return replace(sample.call, args=args, kwargs=tuple((n, new.get(n, v)) for n, v in sample.call.kwargs))


def redrawn(x: Tensor, rng: torch.Generator) -> Tensor:
    """Random values between the minimum and the maximum of the tensor."""
    if x.dtype == torch.bool:
        return torch.rand(x.shape, generator=rng).lt(0.5).to(x.device)
    if x.dtype.is_complex:
        return torch.view_as_complex(redrawn(torch.view_as_real(x), rng))
    if not x.numel():
        return x
    if not _real(x):
        low, high = int(x.min()), int(x.max())
        return torch.randint(low, high + 1, x.shape, generator=rng).to(x)
    calm = x.double().nan_to_num(0.0, 0.0, 0.0)
    low_f, high_f = float(calm.min()), float(calm.max())
    return (low_f + (high_f - low_f) * torch.rand(x.shape, generator=rng, dtype=torch.float64)).to(x)


def both_signs(x: Tensor, rng: torch.Generator) -> Tensor:
    """Random values of both signs, none near zero, as large as the tensor's."""
    if x.dtype == torch.bool:
        return redrawn(x, rng)
    size = torch.rand(x.shape, generator=rng, dtype=torch.float64) * 0.9 + 0.1
    sign = torch.randint(0, 2, x.shape, generator=rng) * 2 - 1
    largest = float(x.abs().double().nan_to_num(0.0, 0.0, 0.0).amax()) if x.numel() else 1.0
    scaled = size * sign * min(max(largest, 1.0), 9.0)
    if x.dtype.is_complex:
        return torch.complex(scaled, scaled.flip(0) if scaled.ndim else scaled * 0.5).to(x)
    return scaled.to(x) if _real(x) else (scaled * 1.5).round().to(x)


def ties(x: Tensor, rng: torch.Generator) -> Tensor:
    """Random values of -1 and 2."""
    return (torch.randint(0, 2, x.shape, generator=rng) * 3 - 1).to(x)


def with_outlier(x: Tensor, rng: torch.Generator) -> Tensor:
    """Random values, one of them a hundred times as large as the others, of either sign."""
    out = both_signs(x, rng)
    if out.numel():
        spot = int(torch.randint(0, out.numel(), (1,), generator=rng))
        flat = out.flatten()
        flat[spot] = flat[spot] * (100 if _real(x) else 9)
        out = flat.view(out.shape)
    return out


def _real(x: Tensor) -> bool:
    return x.dtype.is_floating_point or x.dtype.is_complex


def with_nan_and_infinities(sample: Sample, rng: torch.Generator) -> tuple[Tensor, ...] | None:
    """A NaN and both infinities at random positions."""
    return _sprinkled(sample, rng, torch.tensor([torch.nan, torch.inf, -torch.inf]))


def with_infinity(number: float) -> Make:
    """Infinities of one sign at random positions: `nan_to_num` makes the other sign a number beside which all others round away."""
    return lambda sample, rng: _sprinkled(sample, rng, torch.full((2,), number))


def with_nans(sample: Sample, rng: torch.Generator) -> tuple[Tensor, ...] | None:
    """NaN at random positions, a third of the elements and at most eight: several ranks have some of them.

    Of a partial value one rank or several have it; of a minimum or maximum, all.
    """
    return _sprinkled(sample, rng, torch.full((8,), torch.nan), share=3)


def _sprinkled(sample: Sample, rng: torch.Generator, special: Tensor, share: int = 1) -> tuple[Tensor, ...] | None:
    """Special values at random positions of the float tensors.

    None for ops whose kernels are not deterministic for NaN: orthogonal polynomials (torch 2.13: `x = nan` gives
    125103.9 in one lane and 0 in another), and fused optimizers, whose vectorised part differs from the rest.
    """
    if "polynomial" in sample.op or "._fused_" in sample.op:
        return None

    def sprinkle(x: Tensor, name: str) -> Tensor:
        if not _is_float(x) or x.numel() < 4 or x.ndim == 0 or name in arguments.SORTED_ARGUMENTS:
            return x
        few = special[: max(2, x.numel() // share)]
        spots = torch.randperm(x.numel(), generator=rng)[: few.numel()].to(x.device)
        return x.flatten().index_copy(0, spots, few.to(x)).view(x.shape)

    return _changed(sample, sprinkle)


def _is_float(x: Tensor) -> bool:
    """Whether it is a float of at least two bytes: torch cannot sort, multiply or write to eight-bit floats."""
    return x.is_floating_point() and not is_float8(x.dtype)


def _changed(sample: Sample, change: Callable[[Tensor, str], Tensor]) -> tuple[Tensor, ...] | None:
    """The tensors of the sample changed, given the names of their arguments; None if none of them changed."""
    made = tuple(map(change, sample.tensors, arguments.argument_names(sample)))
    return made if any(a is not b for a, b in zip(made, sample.tensors, strict=True)) else None


def _floats(draw: Draw) -> Make:
    """Other values for every float tensor of at least two elements."""

    def make(sample: Sample, rng: torch.Generator) -> tuple[Tensor, ...] | None:
        def change(x: Tensor, name: str) -> Tensor:
            return draw(x, rng) if _is_float(x) and x.numel() > 1 and name not in arguments.SORTED_ARGUMENTS else x

        return _changed(sample, change)

    return make


def ascending(x: Tensor, rng: torch.Generator) -> Tensor:
    """The same numbers sorted along every dim: the last rank has the maximum of each row and column."""
    for dim in range(x.ndim):
        x = x.sort(dim).values
    return x


def descending(x: Tensor, rng: torch.Generator) -> Tensor:
    return ascending(x, rng).flip(tuple(range(x.ndim)))


def with_maxima_in_the_middle(x: Tensor, rng: torch.Generator) -> Tensor:
    """The same numbers with the maximum of each row and column in its middle, followed by the minimum."""
    return ascending(x, rng).roll([-(-size // 2) for size in x.shape], tuple(range(x.ndim)))


def with_fading_magnitude(x: Tensor, rng: torch.Generator) -> Tensor:
    """The same numbers scaled down along every dim, by a factor of a hundred in all."""
    for dim, size in enumerate(x.shape):
        factor = torch.logspace(0, -2, size, dtype=torch.float64, device=x.device).to(x.dtype)
        x = x * factor.view(-1, *[1] * (x.ndim - dim - 1))
    return x


def equal_maxima(x: Tensor, rng: torch.Generator) -> Tensor:
    return torch.randint(-1, 2, x.shape, generator=rng).to(x)


def two_maxima(x: Tensor, rng: torch.Generator) -> Tensor:
    """Different integers but for the two largest, which are equal, in a random order."""
    return torch.randperm(x.numel(), generator=rng).clamp(max=x.numel() - 2).view(x.shape).to(x.device)


def uniform_random(x: Tensor, rng: torch.Generator) -> Tensor:
    return (torch.rand(x.shape, generator=rng, dtype=torch.float64) * 4 - 2).to(x)


def random_output_gradients(sample: Sample, rng: torch.Generator) -> tuple[Tensor, ...] | None:
    """Random output gradients where those of the sample are constant."""

    def varied(x: Tensor, name: str) -> Tensor:
        alike = _is_float(x) and x.numel() > 1 and bool((x == x.flatten()[0]).all())
        return uniform_random(x, rng) if alike and name.startswith("grad") else x

    return _changed(sample, varied)


def constant_booleans(value: bool) -> Make:
    """Every boolean tensor all true, or all false."""
    return lambda sample, _: _changed(sample, lambda x, _: torch.full_like(x, value) if x.dtype == torch.bool else x)


_WRITES = ("index_put", "_index_put", "_unsafe_index_put", "index_copy", "put", "scatter", "_unsafe_masked")
_GATHERS = ("scatter_add", "scatter_reduce")


def with_repeated_indices(sample: Sample, rng: torch.Generator) -> tuple[Tensor, ...] | None:
    """Indices replaced by the first and the last one at random.

    The result of writing to an index twice is undefined, so ops that write have this form only where they accumulate.
    """
    packet = sample.op.split(".")[1]
    adds = arguments.argument_values(sample).get("accumulate") is True or packet.startswith(_GATHERS)
    if packet.startswith(_WRITES) and not adds:
        return None

    def again(x: Tensor, name: str) -> Tensor:
        if not arguments.is_index(name) or not arguments.is_index_dtype(x) or x.numel() < 3:
            return x
        ends = torch.stack([x.flatten()[0], x.flatten()[-1]])
        return ends[torch.randint(0, 2, x.shape, generator=rng).to(x.device)].to(x.dtype)

    return _changed(sample, again)


def near_dtype_limits(sample: Sample, rng: torch.Generator) -> tuple[Tensor, ...] | None:
    """Integers near the ends of their dtype, which overflow; not the minimum, whose division by -1 kills the process."""
    if not _takes_any_integers(sample):
        return None

    def near(x: Tensor, name: str) -> Tensor:
        if not _is_operand(x, name):
            return x
        most, least = torch.iinfo(x.dtype).max, torch.iinfo(x.dtype).min
        choice = torch.tensor([most, most - 1, least + 1, least + 2, 1, 0], dtype=torch.int64)
        return choice[torch.randint(0, 6, x.shape, generator=rng)].to(x)

    return _changed(sample, near)


def few_integers(sample: Sample, rng: torch.Generator) -> tuple[Tensor, ...] | None:
    """Integers of -1, 0 and 1: ties that noise does not break."""
    if not _takes_any_integers(sample):
        return None

    def few(x: Tensor, name: str) -> Tensor:
        least = -1 if x.dtype.is_signed else 0
        return torch.randint(least, 2, x.shape, generator=rng).to(x) if _is_operand(x, name) else x

    return _changed(sample, few)


def _is_operand(x: Tensor, name: str) -> bool:
    """Whether the tensor holds integers that are operands of arithmetic."""
    whole = not (_real(x) or x.dtype == torch.bool)
    return whole and name in arguments.OPERANDS and x.numel() > 1


def _takes_any_integers(sample: Sample) -> bool:
    """Whether the op accepts any integers: it checks its arguments, and they do not determine the result's size."""
    tags = {str(tag).rpartition(".")[2] for tag in overload(sample.op).tags}
    sizes = tags & {"dynamic_output_shape", "data_dependent_output"}
    return not sizes and not arguments.trusts_caller(sample.op) and not sample.origin.startswith("samples()")


VALUES: tuple[Values, ...] = (
    Values("specials", "NaN and infinities spread, or are dropped, unlike numbers",
           with_nan_and_infinities, partial="never", wild=True),
    Values("holes", "NaN on several ranks, in shards and in parts of a total", with_nans, wild=True),
    *(Values(name, "parts of which one is infinite", with_infinity(x), partial="only", wild=True)
      for name, x in (("infinity", torch.inf), ("minus infinity", -torch.inf))),
    Values("cancelling", "parts a thousand times larger than their total cross every threshold",
           lambda sample, _: sample.tensors, partial="only", split="far"),
    Values("ascending", "the maximum of every row is on the last rank", _floats(ascending)),
    Values("descending", "the maximum of every row is on the first rank", _floats(descending)),
    Values("middle", "the maximum of every row is on neither the first nor the last rank",
           _floats(with_maxima_in_the_middle)),
    Values("ties", "equal numbers on several ranks: which is first, and how many are there", _floats(equal_maxima)),
    Values("few integers", "ties that no noise breaks", few_integers),
    Values("all equal", "a spread of nothing, and every element is a maximum",
           _floats(lambda x, _: torch.ones_like(x))),
    Values("zeros", "a total of zero whose parts are not", _floats(lambda x, _: torch.zeros_like(x))),
    Values("positive", "what is right for one sign only", _floats(lambda x, _: x.abs() + 0.1)),
    Values("negative", "what is right for one sign only", _floats(lambda x, _: -x.abs() - 0.1)),
    Values("fading", "ranks whose numbers are of another magnitude", _floats(with_fading_magnitude)),
    Values("cotangents", "a gradient that is the same everywhere hides where it belongs", random_output_gradients),
    Values("all true", "masks that let all through", constant_booleans(True)),
    Values("all false", "masks that let nothing through", constant_booleans(False)),
    Values("repeated indices", "a row that is asked for, or added to, several times", with_repeated_indices),
    Values("limits", "integers near the ends of their dtype overflow", near_dtype_limits, partial="never"),
)  # fmt: skip
