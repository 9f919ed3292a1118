"""What a rule of our own claims about one sample on one axis, in the form in which every source's claims are judged."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from localtensor.layout import UNSTABLE
from strategies.base.worker_pool import Workers
from strategies.inputs import opinfo_samples
from strategies.inputs.opinfo_samples import gather
from strategies.inputs.selection import pick_overloads
from strategies.inputs.variants.all_variants import adverse, variations
from strategies.model.arguments import values
from strategies.model.call_signature import choose
from strategies.model.oracle import REFUSALS, tell
from strategies.model.rule import Call, Claim, Leaf, Rule, Sample
from strategies.model.settings import DTYPES as SAMPLE_DTYPES
from strategies.model.verdict import Instance, Verdict
from strategies.ops.semantics.local_call import Piece, checked_own, made_instead, piece_at, unfit
from strategies.ops.semantics.rulebook import Ask, Entry, Line, Meta, ask_of
from strategies.validation.discovery.discover import samples_of
from strategies.validation.overload import Turns
from strategies.validation.probe import try_claims


def ask_about(sample: Sample, raw: Any) -> Ask:
    """The question that a rule is asked about a sample; `raw` is the op's own result."""
    metas = [Meta(tuple(x.shape), x.dtype) for x in sample.tensors]
    return ask_of(sample.op, sample.call.args, dict(sample.call.kwargs), metas, raw)


def own_claims(entry: Entry, sample: Sample, ranks: int, raw: Any) -> list[Claim]:
    """Each line that can be had on that many ranks, with what each rank calls if that is not the sample's own call."""
    ask, call = made_instead(entry, ask_about(sample, raw), sample.call)
    found = []
    for line in dict.fromkeys(entry.lines(ask)):
        if not unfit(line, ask, ranks):
            local = local_calls(entry, call, ask, line, ranks)
            rule = Rule(sample.op, line.inputs, line.outputs)
            found.append(Claim(rule, "our own", None if all(one is sample.call for one in local) else local))
    return found


def local_calls(entry: Entry, call: Call, ask: Ask, line: Line, ranks: int) -> tuple[Call, ...]:
    """What each rank calls: this very call, or one with arguments of the rank's own."""
    whole, own = Piece(ask, call), checked_own(entry)
    return tuple(piece_at(whole, line, ranks, rank, own).call for rank in range(ranks))


@dataclass(frozen=True, slots=True)
class EntryResult:
    """What came of an entry's trial: the instances that are wrong, and how many were sound, by rule."""

    entry: Entry
    wrong: tuple[Instance, ...]
    sound: dict[str, int]
    samples: int


def judge(
    entry: Entry,
    *,
    ranks: Sequence[int] = (2, 3, 4),
    seed: int = 0,
    budget: int = 2,
    given: Iterable[Sample] | None = None,
) -> EntryResult:
    """The entry on trial, on samples of its overload, their other forms and other values, on one axis.

    `given` are calls of it, else they are taken from OpInfo or drawn.
    """
    turns, wrong, sound, count = Turns(), [], dict[str, int](), 0
    for number, sample in enumerate(samples_of(entry.op, seed) if given is None else given):
        for instance in _tried(entry, sample, number, ranks, seed, budget, turns):
            if instance is None:
                count += 1
            elif instance.verdict is Verdict.SOUND:
                sound[str(instance.rule)] = sound.get(str(instance.rule), 0) + 1
            else:
                wrong.append(instance)
    return EntryResult(entry, tuple(wrong), sound, count)


def _tried(
    entry: Entry, sample: Sample, number: int, ranks: Sequence[int], seed: int, budget: int, turns: Turns
) -> Iterator[Instance | None]:
    """None for each sample and form that is tried, and then its instances."""
    try:
        truth = tell(sample, seed=seed)
    except REFUSALS:
        return
    if truth.unstable > UNSTABLE:
        return
    for form, told, name in variations(sample, truth, number, seed=seed, traced=False, turns=turns.forms):
        yield None
        others = adverse(form, told, number, seed=seed, budget=1 if name else budget, turns=turns.values)
        for size in ranks:
            claimed = own_claims(entry, form, size, told.raw)
            yield from try_claims(form, told, size, claimed, seed=seed, variants=others)


# Calls for every overload that has a rule of our own: one pass over OpInfo for all of them, then their relatives'.

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
    crew: Workers,
    wanted: Collection[str],
    *,
    seed: int = 0,
    most: int = 24,
    dtypes: Sequence[str] = DTYPES,
    sizes: Sequence[str] = tuple(opinfo_samples.SIZES),
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
            for sample in _captured(opinfo_samples.database()[number], dtypes, sizes, seed, is_wanted):
                met[sample.op].append(sample)
            tick(1)
        if GRADIENT in wanted:
            met[GRADIENT] = gradients(met[LOOKUP], seed)
        return gather(crew, met, sorted(names), seed)

    every = range(len(opinfo_samples.database()))
    first = pick_overloads(names, opinfo_samples.database()).infos if near else every
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
                yield from opinfo_samples.capture(
                    info, SAMPLE_DTYPES[dtype], which, device="cpu", seed=seed, wanted=wanted
                )[0]
