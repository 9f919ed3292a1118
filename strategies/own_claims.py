"""What a rule of our own claims about one sample on one axis, in the form in which every source's claims are judged."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.distributed.tensor import Partial
from torch.distributed.tensor.placement_types import Placement

from localtensor.partials import reducible
from localtensor.placement import cuts
from localtensor.shards import local_shape
from strategies.adverse import adverse
from strategies.book import Ask, Entry, Line, Meta, ask_of
from strategies.discover import samples_of
from strategies.forms import variations
from strategies.probe import try_claims
from strategies.rules import Call, Claim, Rule, Sample, overload
from strategies.trial import Turns
from strategies.truth import REFUSALS, UNSTABLE, tell
from strategies.verdicts import Instance, Verdict


def ask_about(sample: Sample, raw: Any) -> Ask:
    """The question that a rule is asked about a sample; `raw` is the op's own result."""
    metas = [Meta(tuple(x.shape), x.dtype) for x in sample.tensors]
    return ask_of(sample.op, sample.call.args, dict(sample.call.kwargs), metas, raw)


def own_claims(entry: Entry, sample: Sample, ranks: int, raw: Any) -> list[Claim]:
    """Each line that can be had on that many ranks, with what each rank calls if that is not the sample's own call."""
    ask = ask_about(sample, raw)
    found = []
    for line in dict.fromkeys(entry.lines(ask)):
        if fits(line, ask, ranks):
            rule = Rule(sample.op, line.inputs, line.outputs)
            found.append(Claim(rule, "our own", local_calls(entry, sample.call, ask, line, ranks)))
    return found


def fits(line: Line, ask: Ask, ranks: int) -> bool:
    """Whether what the line says of sizes and of reductions is so on an axis of this many ranks."""
    pairs = [*zip(line.inputs, ask.tensors, strict=True), *zip(line.outputs, ask.outputs, strict=True)]
    return all(_fits(p, meta, line.cut, ranks) for p, meta in pairs if p is not None and meta is not None)


def _fits(placement: Placement, meta: Meta, cut: str, ranks: int) -> bool:
    if isinstance(placement, Partial):
        return reducible(placement.reduce_op, meta.dtype)
    cutting = cuts(placement)
    if cutting is None or cut == "any":
        return True
    size = meta.shape[cutting[0]]
    return size % ranks == 0 and size > 0 if cut == "even" else -(-size // ranks) * (ranks - 1) < size


def local_calls(entry: Entry, call: Call, ask: Ask, line: Line, ranks: int) -> tuple[Call, ...] | None:
    """Each rank's own call where arguments are shapes of a result that is cut; else None."""
    (first, meta), shapes = (line.outputs[:1] or (None,), ask.outputs[:1]), entry.shapes
    if not shapes or first[0] is None or not meta or meta[0] is None or cuts(first[0]) is None:
        return None
    return tuple(with_shape(call, shapes, local_shape(meta[0].shape, first[0], ranks, rank)) for rank in range(ranks))


def with_shape(call: Call, names: Sequence[str], shape: Sequence[int]) -> Call:
    """The same call with this shape as the arguments of these names."""
    spots = {a.name: i for i, a in enumerate(overload(call.op)._schema.arguments)}
    args = list(call.args)
    for name in names:
        if spots[name] < len(args):
            args[spots[name]] = list(shape)
    kwargs = tuple((name, list(shape) if name in names else value) for name, value in call.kwargs)
    return replace(call, args=tuple(args), kwargs=kwargs)


@dataclass(frozen=True, slots=True)
class Judged:
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
) -> Judged:
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
    return Judged(entry, tuple(wrong), sound, count)


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
