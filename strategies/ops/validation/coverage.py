"""Comparison of our rules with DTensor's on the most used overloads: does ours cover each sound placement rule of DTensor?

Ours covers one of DTensor's if it has the same, or one that applies wherever it does at no extra cost.  Since a replica
can be sharded or made partial without communication, ours may take a shard or a partial value where DTensor's takes a
replica, and may return a replica where DTensor's returns anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate
from torch.distributed.tensor.placement_types import Placement

from localtensor.layout import shorts
from strategies.base.worker_pool import TaskDone, TaskFailed, Workers
from strategies.inputs.variants import adversarial as adversarial_calls
from strategies.inputs.variants.all_variants import adverse
from strategies.model.kernels import REJECTIONS
from strategies.model.oracle import OracleResult, run_stable_oracle
from strategies.model.rule import Rule, Sample, flat_results
from strategies.model.verdict import Verdict
from strategies.ops.all_rules import OUR_RULES
from strategies.ops.lib.overload_variants import LONGEST_LIST_ONE_BY_ONE
from strategies.ops.semantics.rule_registry import OpRule, OptionalPlacements, overload_exists
from strategies.ops.validation.claims import own_claims
from strategies.torch_api import dtensor
from strategies.validation.probe import check_claims
from strategies.validation.sources.dtensor import claims

MOST_USED = Path(__file__).parents[2] / "ops" / "most_used.txt"


def most_used() -> list[str]:
    """The most used overloads that this version of torch has, most used first, as `tests/tools/bench/most_used.py` counts."""
    lines = [line for line in MOST_USED.read_text().splitlines() if line and not line.startswith("#")]
    return [op for op in (line.split()[0] for line in lines) if overload_exists(op)]


SECONDS = 120.0
"""Time limit of one overload."""
THOROUGH, VALUES = 2, 3
"""The number of first calls of an overload on which a placement rule of DTensor must hold for all other values to
count, and the number of other values on the remaining calls."""


@dataclass(frozen=True, slots=True)
class UncoveredRule:
    """A placement rule of DTensor that is right on a call and that ours does not cover."""

    rule: str
    ranks: int
    call: str
    excused: str = ""
    """The reason why ours omits it although it held on all tested calls; empty if it is a gap."""


@dataclass(frozen=True, slots=True)
class OverloadComparison:
    """The comparison of one overload: the number of DTensor's right placement rules, of equal and covered ones, and the rest.

    `lucky` are those that held on one call and failed on another.  `why` is the reason why nothing was compared, or empty.
    """

    op: str
    theirs: int = 0
    same: int = 0
    served: int = 0
    lacking: tuple[UncoveredRule, ...] = ()
    lucky: tuple[str, ...] = ()
    calls: int = 0
    why: str = ""

    @property
    def covered(self) -> bool:
        return all(one.excused for one in self.lacking)


def covers(ours: Rule, theirs: Rule, tensors: Sequence[bool]) -> bool:
    """Whether our placement rule covers DTensor's.  `tensors` tells which results are tensors."""
    inputs = all(a == b or isinstance(b, Replicate) for a, b in zip(ours.inputs, theirs.inputs, strict=True))
    mine, other = _of_tensors(ours.outputs, tensors), _of_tensors(theirs.outputs, tensors)
    pairs = zip(mine, other, strict=False)
    return inputs and len(mine) == len(other) and all(a == b or b is None or isinstance(a, Replicate) for a, b in pairs)


WRAPS = "integers wrap where they are large and are cut off where they are divided: P(avg), P(min), P(max) are not kept"
ONE_BY_ONE = "a long list has lines for all elements alike; to place each in its own way, query each element"
UNDERFLOWS = "numbers that are not zero may have a product that is: it underflows"
OVERFLOWS = "where a product of complex numbers overflows, it depends on the order whether it is infinite or NaN"
WEIGHED = "the average is divided by the weights of the classes that the targets name, which no rule sees"


def documented_exception(rule: Rule, sample: Sample, outputs: Sequence[Any] = ()) -> str:
    """The documented reason why a placement rule that was right on a call is not one of ours, or empty.

    `outputs` are the results of the call.
    """
    packet = sample.op.split(".")[1]
    held = [*zip(rule.inputs, sample.tensors, strict=True), *zip(rule.outputs, outputs, strict=False)]
    parts = [(p.reduce_op, x) for p, x in held if isinstance(p, Partial) and isinstance(x, Tensor)]
    ordered = [x.dtype for kind, x in parts if kind in ("avg", "min", "max")]
    if any(not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool) for dtype in ordered):
        return WRAPS
    longest = max((len(value) for value in sample.call.args if isinstance(value, (list, tuple))), default=0)
    if packet.startswith("_foreach_") and len({*rule.inputs}) > 1 and longest > LONGEST_LIST_ONE_BY_ONE:
        return ONE_BY_ONE
    if packet == "all" and any(kind == "product" and x.dtype != torch.bool for kind, x in parts):
        return UNDERFLOWS
    if packet == "prod" and any(kind == "product" and x.dtype.is_complex for kind, x in parts):
        return OVERFLOWS
    averages = packet.startswith("nll_loss") and packet.endswith("forward")
    return WEIGHED if averages and any(isinstance(p, Partial) and p.reduce_op == "avg" for p in rule.outputs) else ""


def _of_tensors(outputs: OptionalPlacements, tensors: Sequence[bool]) -> list[Placement | None]:
    return [p for p, is_tensor in zip(outputs, tensors, strict=False) if is_tensor]


def compare(
    op: str, entry: OpRule | None, calls: Iterable[Sample], *, ranks: Sequence[int] = (2, 3), seed: int = 0
) -> OverloadComparison:
    """The comparison of one overload on these calls."""
    found: dict[str, tuple[bool, bool, UncoveredRule]] = {}
    wrong: set[str] = set()
    tried = 0
    for number, sample in enumerate(calls):
        oracle = run_stable_oracle(sample, seed=seed)
        if oracle is None:
            continue
        tried += 1
        for size, rule, verdict in _theirs(sample, oracle, number, ranks, seed):
            name = str(rule)
            if verdict is not Verdict.SOUND:
                wrong.add(name)
                continue
            same, served = _ours(entry, sample, oracle, size, rule)
            excused = documented_exception(rule, sample, flat_results(oracle.raw))
            here = UncoveredRule(name, size, ", ".join(sample.arguments()), excused)
            before = found.get(name, (True, True, here))
            shown = before[2] if served or (not before[1] and not before[2].excused) else here
            found[name] = (before[0] and same, before[1] and served, shown)
    right = {name: seen for name, seen in found.items() if name not in wrong}
    lacking = tuple(seen[2] for seen in right.values() if not seen[1])
    same_count, served_count = sum(seen[0] for seen in right.values()), sum(seen[1] for seen in right.values())
    lucky = tuple(sorted(found.keys() & wrong))
    why = "" if right else "DTensor has no line for any call that was tried" if tried else "no call could be tried"
    return OverloadComparison(op, len(right), same_count, served_count - same_count, lacking, lucky, tried, why)


def _theirs(
    sample: Sample, oracle: OracleResult, number: int, ranks: Sequence[int], seed: int
) -> Iterator[tuple[int, Rule, Verdict]]:
    """Each plain placement rule of DTensor for this call, except the all-replicated one, with our verdict.

    Where DTensor has a custom dispatch (a convolution exchanges rows of an image), the rule is tested without it.
    """
    alone = dtensor.PropagatorQuery(sample, 1, oracle.raw)
    alone.partials = number < 2
    budget = len(adversarial_calls.VALUES) if number < THOROUGH else VALUES
    others = adverse(sample, oracle, number, seed=seed, budget=budget)
    for size in ranks:
        try:
            claimed = claims(sample, size, oracle.raw, alone)
        except (*REJECTIONS, AttributeError, ArithmeticError):
            continue
        plain = [replace(one, whole="") for one in claimed if one.rule.plain and not _replicated(one.rule)]
        for instance in check_claims(sample, oracle, size, plain, seed=seed, variants=others):
            if instance.verdict in (Verdict.SOUND, Verdict.UNSOUND):
                yield size, instance.rule, instance.verdict


def _replicated(rule: Rule) -> bool:
    return all(p is None or isinstance(p, Replicate) for p in (*rule.inputs, *rule.outputs))


def _ours(entry: OpRule | None, sample: Sample, oracle: OracleResult, ranks: int, theirs: Rule) -> tuple[bool, bool]:
    """Whether ours has the same placement rule, and whether ours covers it."""
    if entry is None:
        return False, False
    tensors = [isinstance(x, Tensor) for x in flat_results(oracle.raw)]
    mine = [claim.rule for claim in own_claims(entry, sample, ranks, oracle.raw)]
    key = shorts(theirs.inputs), shorts(_of_tensors(theirs.outputs, tensors))
    same = any(key == (shorts(one.inputs), shorts(_of_tensors(one.outputs, tensors))) for one in mine)
    return same, same or any(covers(one, theirs, tensors) for one in mine)


@dataclass(frozen=True, slots=True)
class _Task:
    op: str
    calls: tuple[Sample, ...]
    ranks: tuple[int, ...]
    seed: int


def _work(task: _Task, note: Callable[[int], None]) -> OverloadComparison:
    def noted() -> Iterator[Sample]:
        for number, call in enumerate(task.calls):
            note(number)
            yield call

    return compare(task.op, OUR_RULES.get(task.op), noted(), ranks=task.ranks, seed=task.seed)


def coverage(
    workers: Workers,
    calls: Mapping[str, Sequence[Sample]],
    *,
    ops: Sequence[str] | None = None,
    ranks: Sequence[int] = (2, 3),
    seed: int = 0,
    tick: Callable[[int], None] | None = None,
) -> list[OverloadComparison]:
    """The comparisons of these overloads, by default the most used ones, in their order.

    A call that kills its worker is left out, and the remaining calls of the overload are tested again.
    """
    names = most_used() if ops is None else list(ops)
    todo = [_Task(op, tuple(calls.get(op, ())), tuple(ranks), seed) for op in names]
    found: dict[str, OverloadComparison] = {}
    while todo:
        again: list[_Task] = []
        for task, answer in zip(todo, workers.run(_work, todo, limit=SECONDS, tick=tick), strict=True):
            if isinstance(answer, TaskDone):
                found[task.op] = answer.value
                continue
            why = answer.error if isinstance(answer, TaskFailed) else answer.why
            found[task.op] = OverloadComparison(task.op, why=why)
            if not isinstance(answer, TaskFailed) and len(task.calls) > 1:
                last = max(answer.noted, 0)
                again.append(replace(task, calls=task.calls[:last] + task.calls[last + 1 :]))
        todo, tick = again, None
    return [found[op] for op in names]
