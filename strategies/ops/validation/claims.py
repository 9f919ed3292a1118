"""What a rule of our own claims about one sample on one axis, in the form in which every source's claims are judged."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from localtensor.layout.tolerance import UNSTABLE
from strategies.inputs.variants.all_variants import variations
from strategies.inputs.variants.value_variants import adverse
from strategies.model.oracle import REFUSALS, tell
from strategies.model.rule import Call, Claim, Rule, Sample
from strategies.model.verdict import Instance, Verdict
from strategies.ops.semantics.local_call import Piece, piece_at, unfit
from strategies.ops.semantics.rule_checks import checked_own, made_instead
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
