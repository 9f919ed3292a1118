"""Other values for the same call: where extremes stand, ties, zeros, signs, magnitudes, repeated places, ends of dtypes.

All of them are adversaries of rules that hold for the sample's own values by chance.  Shapes and dtypes
stay, and so do the claims.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from strategies.inputs.variants.variant import Values
from strategies.model.arguments import PLAIN, SORTED, is_index, is_places, names, trusts, values
from strategies.model.rule import Sample, overload

Change = Callable[[Tensor, torch.Generator], Tensor]


def specials(sample: Sample, rng: torch.Generator) -> tuple[Tensor, ...] | None:
    """A NaN and both infinities sprinkled in; None if there is nothing to sprinkle on."""
    return _sprinkled(sample, rng, torch.tensor([torch.nan, torch.inf, -torch.inf]))


def holes(sample: Sample, rng: torch.Generator) -> tuple[Tensor, ...] | None:
    """NaN sprinkled in, on a third of the elements, at most eight.  Of a partial value one rank has the NaN, and the others
    have numbers, which are on the side that shows a wrong rule only at some of them."""
    return _sprinkled(sample, rng, torch.full((8,), torch.nan), share=3)


def _sprinkled(sample: Sample, rng: torch.Generator, special: Tensor, share: int = 1) -> tuple[Tensor, ...] | None:
    """torch's kernels for orthogonal polynomials give left-over numbers for NaN (2.13: `x = nan` gives
    125103.9 in one lane and 0 in another), and those of fused optimizers another result in the vectorised part
    than in the rest, so those are not asked."""
    if "polynomial" in sample.op or "._fused_" in sample.op:
        return None

    def sprinkle(x: Tensor, name: str) -> Tensor:
        if not _is_float(x) or x.numel() < 4 or x.ndim == 0 or name in SORTED:
            return x
        few = special[: max(2, x.numel() // share)]
        spots = torch.randperm(x.numel(), generator=rng)[: few.numel()].to(x.device)
        return x.flatten().index_copy(0, spots, few.to(x)).view(x.shape)

    return _changed(sample, tuple(map(sprinkle, sample.tensors, names(sample))))


def _is_float(x: Tensor) -> bool:
    """Those of one byte cannot be sorted, multiplied or written to."""
    return x.dtype.is_floating_point and x.dtype.itemsize > 1


def _changed(sample: Sample, made: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
    return made if any(a is not b for a, b in zip(made, sample.tensors, strict=True)) else None


def _floats(change: Change) -> Callable[[Sample, torch.Generator], tuple[Tensor, ...] | None]:
    """Every tensor of floats that has at least two elements, changed."""

    def make(sample: Sample, rng: torch.Generator) -> tuple[Tensor, ...] | None:
        def changed(x: Tensor, name: str) -> Tensor:
            able = _is_float(x) and x.numel() > 1 and name not in SORTED
            return change(x, rng) if able else x

        return _changed(sample, tuple(map(changed, sample.tensors, names(sample))))

    return make


def ascending(x: Tensor, rng: torch.Generator) -> Tensor:
    """The same numbers, larger and larger along every dim: the last rank has the maximum of each row and column."""
    for dim in range(x.ndim):
        x = x.sort(dim).values
    return x


def descending(x: Tensor, rng: torch.Generator) -> Tensor:
    return ascending(x, rng).flip(tuple(range(x.ndim)))


def in_the_middle(x: Tensor, rng: torch.Generator) -> Tensor:
    """The maximum of each row and column in its middle, the minimum right behind it."""
    return ascending(x, rng).roll([-(-size // 2) for size in x.shape], tuple(range(x.ndim)))


def fading(x: Tensor, rng: torch.Generator) -> Tensor:
    """Smaller and smaller along every dim, by a factor of a hundred in all; no number leaves the op's domain upwards."""
    for dim, size in enumerate(x.shape):
        factor = torch.logspace(0, -2, size, dtype=torch.float64, device=x.device).to(x.dtype)
        x = x * factor.view(-1, *[1] * (x.ndim - dim - 1))
    return x


def ties(x: Tensor, rng: torch.Generator) -> Tensor:
    return torch.randint(-1, 2, x.shape, generator=rng).to(x)


def uniform_random(x: Tensor, rng: torch.Generator) -> Tensor:
    return (torch.rand(x.shape, generator=rng, dtype=torch.float64) * 4 - 2).to(x)


def cotangents(sample: Sample, rng: torch.Generator) -> tuple[Tensor, ...] | None:
    """Gradients of the results that differ from element to element, where the sample's are all alike."""

    def varied(x: Tensor, name: str) -> Tensor:
        alike = _is_float(x) and x.numel() > 1 and bool((x == x.flatten()[0]).all())
        return uniform_random(x, rng) if alike and name.startswith("grad") else x

    return _changed(sample, tuple(map(varied, sample.tensors, names(sample))))


def flags(value: bool) -> Callable[[Sample, torch.Generator], tuple[Tensor, ...] | None]:
    """Every tensor of booleans all true, or all false."""

    def make(sample: Sample, rng: torch.Generator) -> tuple[Tensor, ...] | None:
        return _changed(
            sample, tuple(torch.full_like(x, value) if x.dtype == torch.bool else x for x in sample.tensors)
        )

    return make


_WRITES = ("index_put", "_index_put", "_unsafe_index_put", "index_copy", "put", "scatter", "_unsafe_masked")
_GATHERS = ("scatter_add", "scatter_reduce")


def repeated(sample: Sample, rng: torch.Generator) -> tuple[Tensor, ...] | None:
    """Indices of which half are the first, and half the last.

    Which of several values an index that is written twice ends with is open, so ops that write are asked
    only where they add up.
    """
    packet = sample.op.split(".")[1]
    adds = values(sample).get("accumulate") is True or packet.startswith(_GATHERS)
    if packet.startswith(_WRITES) and not adds:
        return None

    def again(x: Tensor, name: str) -> Tensor:
        if not is_index(name) or not is_places(x) or x.numel() < 3:
            return x
        ends = torch.stack([x.flatten()[0], x.flatten()[-1]])
        return ends[torch.randint(0, 2, x.shape, generator=rng).to(x.device)].to(x.dtype)

    return _changed(sample, tuple(map(again, sample.tensors, names(sample))))


def limits(sample: Sample, rng: torch.Generator) -> tuple[Tensor, ...] | None:
    """Integers near the ends of their dtype, which overflow.  Not the least one: its division by -1 kills the process."""
    if not _computes(sample):
        return None

    def near(x: Tensor, name: str) -> Tensor:
        if not _numbers(x, name):
            return x
        ends = torch.iinfo(x.dtype)
        choice = torch.tensor([ends.max, ends.max - 1, ends.min + 1, ends.min + 2, 1, 0], dtype=torch.int64)
        return choice[torch.randint(0, 6, x.shape, generator=rng)].to(x)

    return _changed(sample, tuple(map(near, sample.tensors, names(sample))))


def few_integers(sample: Sample, rng: torch.Generator) -> tuple[Tensor, ...] | None:
    """Integers of -1, 0 and 1: ties that no noise moves."""
    if not _computes(sample):
        return None
    draw = [
        torch.randint(-1 if x.dtype.is_signed else 0, 2, x.shape, generator=rng).to(x) if _numbers(x, name) else x
        for x, name in zip(sample.tensors, names(sample), strict=True)
    ]
    return _changed(sample, tuple(draw))


def _numbers(x: Tensor, name: str) -> bool:
    """Whether these integers are numbers to compute with."""
    whole = not (x.dtype.is_floating_point or x.dtype.is_complex or x.dtype == torch.bool)
    return whole and name in PLAIN and x.numel() > 1


def _computes(sample: Sample) -> bool:
    """Whether the op's integers may be any: they are no sizes of its result, no places, and it checks what it is given."""
    tags = {str(tag).rpartition(".")[2] for tag in overload(sample.op).tags}
    sizes = tags & {"dynamic_output_shape", "data_dependent_output"}
    return not sizes and not trusts(sample.op) and not sample.origin.startswith("samples()")


def own(sample: Sample, rng: torch.Generator) -> tuple[Tensor, ...] | None:
    """The sample's own values: what differs is how they are decomposed."""
    return sample.tensors


VALUES: tuple[Values, ...] = (
    Values("specials", "NaN and infinities spread, or are dropped, unlike numbers", specials, partial="never", wild=True),
    Values("holes", "one rank's part is NaN, and the others' are numbers", holes, partial="only", wild=True),
    Values("cancelling", "parts a thousand times larger than their total cross every threshold", own, partial="only",
           split="far"),
    Values("ascending", "the maximum of every row is on the last rank", _floats(ascending)),
    Values("descending", "the maximum of every row is on the first rank", _floats(descending)),
    Values("middle", "the maximum of every row is on neither the first nor the last rank", _floats(in_the_middle)),
    Values("ties", "equal numbers on several ranks: who is first, and how many are there", _floats(ties)),
    Values("few integers", "ties that no noise breaks", few_integers),
    Values("all equal", "a spread of nothing, and every element is a maximum", _floats(lambda x, _: torch.ones_like(x))),
    Values("zeros", "a total of zero whose parts are not", _floats(lambda x, _: torch.zeros_like(x))),
    Values("positive", "what is right for one sign only", _floats(lambda x, _: x.abs() + 0.1)),
    Values("negative", "what is right for one sign only", _floats(lambda x, _: -x.abs() - 0.1)),
    Values("fading", "ranks whose numbers are of another magnitude", _floats(fading)),
    Values("cotangents", "a gradient that is the same everywhere hides where it belongs", cotangents),
    Values("all true", "masks that let all through", flags(True)),
    Values("all false", "masks that let nothing through", flags(False)),
    Values("repeated indices", "a row that is asked for, or added to, several times", repeated),
    Values("limits", "integers near the ends of their dtype overflow", limits, partial="never"),
)  # fmt: skip
