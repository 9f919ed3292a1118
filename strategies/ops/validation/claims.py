"""Validation of one rule of our own: its claims about samples, tested like those of any source; and the calls for it.

All rules of our own are validated in worker processes: a call that kills its worker is left out.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import Partial

from localtensor.layout import is_unambiguous, short
from strategies.base.worker_pool import TaskDone, TaskFailed, TaskLost, Workers
from strategies.inputs import opinfo_samples
from strategies.inputs.derived_samples import gather
from strategies.inputs.gathering import select_overloads
from strategies.inputs.variants.all_variants import adverse, variations
from strategies.model.arguments import argument_values
from strategies.model.call_signature import diverse_subset
from strategies.model.oracle import OracleResult, run_stable_oracle
from strategies.model.rule import Call, Claim, Leaf, Rule, Sample
from strategies.model.settings import torch_dtype
from strategies.model.verdict import Instance, Verdict
from strategies.ops.all_rules import OUR_RULES
from strategies.ops.semantics import local_call
from strategies.ops.semantics.rule_registry import Meta, OpRule, PlacementRule, RuleQuery, query_of
from strategies.validation.discover import samples_of
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


class OwnRuleSource:
    """A rule of our own as a source of claims (see `strategies.validation.sources.protocol`)."""

    name, title, varied = "own rules", "our own rule", True

    def __init__(self, entry: OpRule) -> None:
        self.entry = entry

    def about(self, sample: Sample, oracle: OracleResult, number: int) -> OwnRuleClaims:
        return OwnRuleClaims(self.entry, sample, oracle)


@dataclass(frozen=True, slots=True)
class OwnRuleClaims:
    """What a rule of our own claims about one sample."""

    entry: OpRule
    sample: Sample
    oracle: OracleResult
    drawn: tuple[int, int] | None = None
    failures: Sequence[str] = ()

    def claims(self, ranks: int) -> list[Claim]:
        return own_claims(self.entry, self.sample, ranks, self.oracle.raw)


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
    oracle = run_stable_oracle(sample, seed=seed)
    if oracle is None:
        return
    for form, form_oracle, name in variations(sample, oracle, number, seed=seed, traced=False, turns=turns.forms):
        yield None
        others = adverse(form, form_oracle, number, seed=seed, budget=1 if name else budget, turns=turns.values)
        for size in ranks:
            claimed = OwnRuleSource(entry).about(form, form_oracle, number).claims(size)
            yield from check_claims(form, form_oracle, size, claimed, seed=seed, variants=others)


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
        if torch_dtype(dtype) in info.supported_dtypes("cpu"):
            for which in sizes:
                kind = torch_dtype(dtype)
                yield from opinfo_samples.capture_calls(info, kind, which, device="cpu", seed=seed, wanted=wanted)[0]


SECONDS = 60.0
"""Time limit of one call, its forms and values included."""
MOST_CRASHES = 12
"""Calls of one overload that may kill their worker before the rest is given up."""
Note = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class ValidationEffort:
    """The extent of the validation: mesh sizes, seed, and the number of other values for each call."""

    ranks: tuple[int, ...] = (2, 3, 4)
    seed: int = 0
    budget: int = 2


@dataclass(frozen=True, slots=True)
class RuleTask:
    """A worker's task: one rule and its calls, without those (`skip`) that killed a worker.

    `planted` is the rule itself if it is not in `OUR_RULES`.  Those are found by name, since their functions may be
    closures, which cannot be pickled.
    """

    op: str
    planted: OpRule | None
    calls: tuple[Sample, ...]
    terms: ValidationEffort
    skip: frozenset[int] = frozenset()

    @property
    def entry(self) -> OpRule:
        return self.planted or OUR_RULES.entries[self.op]


@dataclass(frozen=True, slots=True)
class RuleResult:
    """The result of one rule: the failures, the number of passes and of calls, and what could not be tested."""

    op: str
    family: str
    where: str
    wrong: tuple[str, ...] = ()
    lines: int = 0
    sound: int = 0
    calls: int = 0
    untried: tuple[str, ...] = ()

    @property
    def tested(self) -> bool:
        """Whether any placement rule was tested on any call."""
        return self.sound > 0 or bool(self.wrong)


def validate_task(task: RuleTask, note: Note) -> RuleResult:
    """Run by a worker: the validation of one rule."""

    def noted() -> Iterator[Sample]:
        for number, call in enumerate(task.calls):
            if number not in task.skip:
                note(number)
                yield call

    terms = task.terms
    undefined: dict[str, str] = {}
    entry = with_undefined_reductions(task.entry, undefined)
    found = validate_rule(entry, ranks=terms.ranks, seed=terms.seed, budget=terms.budget, given=noted())
    first = {str(one.rule): one for one in reversed(found.wrong)}
    wrong = (*undefined.values(), *map(_describe, reversed(first.values())))
    lines = len(found.sound.keys() | {str(one.rule) for one in found.wrong})
    untried = () if found.samples else ("none of its calls gives what could be compared",)
    sound, empty = sum(found.sound.values()), _empty_result(task.entry)
    return replace(empty, wrong=wrong, lines=lines, sound=sound, calls=found.samples, untried=untried)


def with_undefined_reductions(entry: OpRule, undefined: dict[str, str]) -> OpRule:
    """The rule, which adds to `undefined` each placement rule with a reduction that is not well defined for the dtype.

    The validation skips those on most calls, so no call would disprove them: minima of complex numbers, averages of integers.
    """

    def lines(query: RuleQuery) -> Iterator[PlacementRule]:
        for line in entry.lines(query):
            pairs = [*zip(line.inputs, query.tensors, strict=True), *zip(line.outputs, query.outputs, strict=True)]
            odd = [(p, meta) for p, meta in pairs if isinstance(p, Partial) and meta is not None]
            for placement, meta in odd:
                if not is_unambiguous(placement.reduce_op, meta.dtype):
                    undefined.setdefault(str(line), f"{entry.op}: {line}: {short(placement)} of {meta} is not defined")
            yield line

    return replace(entry, lines=lines)


def _empty_result(entry: OpRule) -> RuleResult:
    return RuleResult(entry.op, entry.family, entry.where)


def _describe(one: Instance) -> str:
    values = f" with {one.evidence.variant}" if one.evidence.variant else ""
    call = f"{one.sample.op.split('.', 1)[1]}({', '.join(one.sample.arguments())})"
    return f"{one.rule} on {one.ranks} ranks, {call}{values}: {one.evidence.reason}"


def validate_rules(
    workers: Workers,
    entries: Sequence[OpRule],
    calls: Mapping[str, Sequence[Sample]],
    without: Mapping[str, str],
    terms: ValidationEffort,
    tick: Callable[[int], None] | None = None,
) -> list[RuleResult]:
    """The result of each rule, in their order.  `without` has the reasons for overloads without calls."""
    found = {e.op: replace(_empty_result(e), untried=(without.get(e.op, "no call reaches it"),)) for e in entries}
    todo = [
        RuleTask(e.op, None if OUR_RULES.get(e.op) is e else e, tuple(calls[e.op]), terms)
        for e in entries
        if calls.get(e.op)
    ]
    lost: dict[str, list[str]] = {}
    while todo:
        again: list[RuleTask] = []
        for task, answer in zip(todo, workers.run(validate_task, todo, limit=SECONDS, tick=tick), strict=True):
            reasons = lost.setdefault(task.op, [])
            if isinstance(answer, TaskDone):
                found[task.op] = replace(answer.value, untried=(*reasons, *answer.value.untried))
            elif isinstance(answer, TaskFailed):
                found[task.op] = replace(_empty_result(task.entry), wrong=(f"the validation failed: {answer.error}",))
            else:
                known = 0 <= answer.noted < len(task.calls)
                call = ", ".join(task.calls[answer.noted].arguments()) if known else "its first call"
                reasons.append(f"{call}: {answer.why}")
                again += _without(task, answer)
                found[task.op] = replace(_empty_result(task.entry), untried=tuple(reasons))
        todo, tick = again, None
    return list(found.values())


def _without(task: RuleTask, answer: TaskLost) -> list[RuleTask]:
    """The task without the call that killed its worker; none if there is nothing left to test."""
    if answer.noted < 0 or len(task.skip) >= MOST_CRASHES or len(task.skip) + 1 >= len(task.calls):
        return []
    return [replace(task, skip=task.skip | {answer.noted})]
