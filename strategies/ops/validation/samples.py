"""Calls for every overload that has a rule of our own: one pass over OpInfo for all of them, then their relatives'."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from strategies.inputs import opinfo_samples as samples
from strategies.inputs.diverse_subset import choose
from strategies.inputs.selection import pick_overloads
from strategies.inputs.sibling_samples import gather
from strategies.model.arguments import values
from strategies.model.rule import Call, Leaf, Sample
from strategies.model.settings import DTYPES as SAMPLE_DTYPES
from strategies.sweep.executors import Hands

LOOKUP, GRADIENT = "aten.embedding.default", "aten.embedding_dense_backward.default"
"""No database has calls of the second.  It does not check its indices: calls drawn from its schema write where they should
not (torch 2.13), and another call dies of it, so its calls are those that belong to calls of the first."""
DTYPES = ("float64", "int64", "complex64")
"""Real numbers, integers, and where there is no order."""


@dataclass(frozen=True, slots=True)
class Calls:
    """The calls of each overload, the most different ones first, and why an overload has none."""

    of: Mapping[str, tuple[Sample, ...]]
    without: Mapping[str, str] = field(default_factory=dict)


def calls(
    crew: Hands,
    wanted: Collection[str],
    *,
    seed: int = 0,
    most: int = 24,
    dtypes: Sequence[str] = DTYPES,
    sizes: Sequence[str] = tuple(samples.SIZES),
    tick: Callable[[int], None] = lambda _: None,
    near: bool = False,
) -> Calls:
    """At most so many calls of each wanted overload, the same for the same seed.

    Each OpInfo runs once for all of them, here; with `near` those first that bear a wanted overload's name, and the others
    only if that leaves one without calls.  An overload that none reaches has calls made from a relative's, or drawn from
    its schema, by the crew: some ops end their process where they should refuse.  `tick` is told after each OpInfo.
    """
    names = frozenset(wanted) | ({LOOKUP} if GRADIENT in wanted else set())
    met: dict[str, list[Sample]] = defaultdict(list)
    is_wanted = functools.cache(lambda func: str(func) in names)

    def run(infos: Iterable[int]) -> tuple[dict[str, list[Sample]], dict[str, str]]:
        for number in infos:
            for sample in _captured(samples.database()[number], dtypes, sizes, seed, is_wanted):
                met[sample.op].append(sample)
            tick(1)
        if GRADIENT in wanted:
            met[GRADIENT] = gradients(met[LOOKUP], seed)
        return gather(crew, met, sorted(names), seed)

    every = range(len(samples.database()))
    first = pick_overloads(names, samples.database()).infos if near else every
    made, without = run(first)
    if without and len(first) < len(every):
        made, without = run(sorted(set(every) - set(first)))
    found = {op: tuple(choose(of, most)) for op, of in sorted({**met, **made}.items()) if op in wanted}
    return Calls(found, {op: why for op, why in without.items() if op in wanted})


def gradients(lookups: Iterable[Sample], seed: int = 0) -> list[Sample]:
    """The call of `embedding_dense_backward` that belongs to each call of `embedding`."""
    rng = torch.Generator().manual_seed(seed)
    return [_gradient(values(one), one.origin, rng) for one in lookups if one.tensors[0].dtype.is_floating_point]


def _gradient(given: Mapping[str, Any], origin: str, rng: torch.Generator) -> Sample:
    table, places = given["weight"], given["indices"]
    grad = torch.randn((*places.shape, table.shape[1]), generator=rng, dtype=table.dtype)
    call = Call(GRADIENT, (Leaf(0), Leaf(1), table.shape[0], given["padding_idx"], given["scale_grad_by_freq"]))
    return Sample(call, (grad, places), f"{origin}, backward")


def _captured(
    info: Any, dtypes: Sequence[str], sizes: Sequence[str], seed: int, wanted: Callable[[Any], bool]
) -> Iterator[Sample]:
    for dtype in dtypes:
        if SAMPLE_DTYPES[dtype] in info.supported_dtypes("cpu"):
            for which in sizes:
                yield from samples.capture(info, SAMPLE_DTYPES[dtype], which, device="cpu", seed=seed, wanted=wanted)[0]
