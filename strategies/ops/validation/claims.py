"""Validation of one rule of our own: its claims about samples, tested like those of any source; and the calls for it."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from strategies.base.worker_pool import Workers
from strategies.inputs import opinfo_samples
from strategies.inputs.opinfo_samples import gather
from strategies.inputs.selection import select_overloads
from strategies.inputs.variants.all_variants import adverse, variations
from strategies.model.arguments import argument_values
from strategies.model.call_signature import diverse_subset
from strategies.model.oracle import run_stable_oracle
from strategies.model.rule import Call, Claim, Leaf, Rule, Sample
from strategies.model.settings import DTYPES as SAMPLE_DTYPES
from strategies.model.verdict import Instance, Verdict
from strategies.ops.semantics import local_call
from strategies.ops.semantics.rule_registry import Meta, OpRule, RuleQuery, query_of
from strategies.validation.discovery.discover import samples_of
from strategies.validation.overload import VariantCounts
from strategies.validation.probe import check_claims

if TYPE_CHECKING:
    from torch.testing._internal.opinfo.core import OpInfo


def query_of_sample(sample: Sample, raw: object) -> RuleQuery:
    """The rule query of a sample; `raw` is the result of the op."""
    metas = [Meta(tuple(x.shape), x.dtype) for x in sample.tensors]
    return query_of(sample.op, sample.call.args, dict(sample.call.kwargs), metas, raw)


def own_claims(entry: OpRule, sample: Sample, ranks: int, raw: object) -> list[Claim]:
    """A claim for each placement rule that applies to that many ranks, with the local calls if they differ from the sample's."""
    query, call = local_call.replacement_call(entry, query_of_sample(sample, raw), sample.call)
    whole, own = local_call.LocalCall(query, call), local_call.own_arguments_function(entry)
    found = []
    for line in dict.fromkeys(entry.lines(query)):
        if not local_call.why_inapplicable(line, query, ranks):
            local = tuple(local_call.local_call_at(whole, line, ranks, rank, own).call for rank in range(ranks))
            rule = Rule(sample.op, line.inputs, line.outputs)
            found.append(Claim(rule, "our own", None if all(one is sample.call for one in local) else local))
    return found


@dataclass(frozen=True, slots=True)
class OpRuleResult:
    """The result of validating a rule: the wrong instances, the number of sound ones by placement rule, and of samples."""

    entry: OpRule
    wrong: tuple[Instance, ...]
    sound: dict[str, int]
    samples: int


def validate_rule(
    entry: OpRule,
    *,
    ranks: Sequence[int] = (2, 3, 4),
    seed: int = 0,
    budget: int = 2,
    given: Iterable[Sample] | None = None,
) -> OpRuleResult:
    """Validates a rule on samples of its overload, their other forms and other values, along one mesh axis.

    Without `given`, the samples come from OpInfo or the schema.
    """
    turns, wrong, sound, count = VariantCounts(), [], dict[str, int](), 0
    for number, sample in enumerate(samples_of(entry.op, seed) if given is None else given):
        for instance in _tried(entry, sample, number, ranks, seed, budget, turns):
            if instance is None:
                count += 1
            elif instance.verdict is Verdict.SOUND:
                sound[str(instance.rule)] = sound.get(str(instance.rule), 0) + 1
            else:
                wrong.append(instance)
    return OpRuleResult(entry, tuple(wrong), sound, count)


def _tried(
    entry: OpRule, sample: Sample, number: int, ranks: Sequence[int], seed: int, budget: int, turns: VariantCounts
) -> Iterator[Instance | None]:
    """None for each sample and form that is tested, followed by its instances."""
    truth = run_stable_oracle(sample, seed=seed)
    if truth is None:
        return
    for form, oracle, name in variations(sample, truth, number, seed=seed, traced=False, turns=turns.forms):
        yield None
        others = adverse(form, oracle, number, seed=seed, budget=1 if name else budget, turns=turns.values)
        for size in ranks:
            claimed = own_claims(entry, form, size, oracle.raw)
            yield from check_claims(form, oracle, size, claimed, seed=seed, variants=others)


LOOKUP, GRADIENT = "aten.embedding.default", "aten.embedding_dense_backward.default"
"""The calls of the second are made from calls of the first: OpInfo has none, and it does not check its indices, so
calls drawn from its schema write out of bounds (torch 2.13), and a later call crashes."""
DTYPES = ("float64", "int64", "complex64")
"""Floats, integers, and numbers without an order."""


@dataclass(frozen=True, slots=True)
class Calls:
    """A diverse set of calls of each overload, and the reasons for overloads without calls."""

    of: Mapping[str, tuple[Sample, ...]]
    without: Mapping[str, str] = field(default_factory=dict)


def calls_of_overloads(
    workers: Workers,
    wanted: Collection[str],
    *,
    seed: int = 0,
    most: int = 24,
    dtypes: Sequence[str] = DTYPES,
    sizes: Sequence[str] = tuple(opinfo_samples.SIZES),
    tick: Callable[[int], None] = lambda _: None,
    near: bool = False,
) -> Calls:
    """At most `most` calls of each wanted overload, determined by the seed.

    Each OpInfo runs once for all of them, in this process; with `near` those with the name of a wanted overload first,
    and the others only if an overload is left without calls.  Overloads without an OpInfo get calls made from a
    sibling's, or drawn from the schema, in the workers, since some ops crash on invalid arguments.  `tick` is called
    after each OpInfo.
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
            met[GRADIENT] = embedding_gradients(met[LOOKUP], seed)
        return gather(workers, met, sorted(names), seed)

    every = range(len(opinfo_samples.database()))
    first = select_overloads(names, opinfo_samples.database()).infos if near else every
    made, without = run(first)
    if without and len(first) < len(every):
        made, without = run(sorted(set(every) - set(first)))
    found = {op: tuple(diverse_subset(of, most)) for op, of in sorted({**met, **made}.items()) if op in wanted}
    return Calls(found, {op: why for op, why in without.items() if op in wanted})


def embedding_gradients(lookups: Iterable[Sample], seed: int = 0) -> list[Sample]:
    """The call of `embedding_dense_backward` for each call of `embedding`."""
    rng = torch.Generator().manual_seed(seed)
    made = []
    for lookup in lookups:
        given = argument_values(lookup)
        table, places = given["weight"], given["indices"]
        if lookup.tensors[0].dtype.is_floating_point:
            grad = torch.randn((*places.shape, table.shape[1]), generator=rng, dtype=table.dtype)
            call = Call(GRADIENT, (Leaf(0), Leaf(1), table.shape[0], given["padding_idx"], given["scale_grad_by_freq"]))
            made.append(Sample(call, (grad, places), f"{lookup.origin}, backward"))
    return made


def _captured(
    info: OpInfo, dtypes: Sequence[str], sizes: Sequence[str], seed: int, wanted: opinfo_samples.Wanted
) -> Iterator[Sample]:
    for dtype in dtypes:
        if SAMPLE_DTYPES[dtype] in info.supported_dtypes("cpu"):
            for which in sizes:
                kind = SAMPLE_DTYPES[dtype]
                yield from opinfo_samples.capture_calls(info, kind, which, device="cpu", seed=seed, wanted=wanted)[0]
