"""Samples of the overloads that OpInfo does not reach: from those of their siblings, else from their schema.

Those of a user's overloads come from the `samples` function of the rules module, else from the schema.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from strategies.base import worker_pool
from strategies.base.worker_pool import TaskDone, TaskLost, Workers
from strategies.inputs import typed_values
from strategies.inputs.opinfo_samples import evenly
from strategies.inputs.schema_binding import BoundCall, Unbound, bind_to_sibling, prefer_finite
from strategies.inputs.typed_values import FIRST_DTYPES, draw_calls
from strategies.model.kernels import kernels_on
from strategies.model.rule import Sample, overload
from strategies.model.settings import Settings, torch_dtype
from strategies.model.verdict import Crash
from strategies.torch_api.user_modules import import_rules, missing_kernel_reason

MOST_SIBLINGS, MOST_OF_ONE, MOST = 2, 28, 24
"""Siblings whose samples are used, samples of each, and samples made of one overload."""
_NEAR = 0.7
"""The least ratio of the lengths of two similar names."""
MOST_ALONE = 12
"""Samples of an overload that are tested one per task, after one of them killed its worker."""
SECONDS = 60.0
"""Time limit of one overload."""


@dataclass(frozen=True, slots=True)
class DerivationTask:
    """A worker's task: one overload without samples, and the samples of its nearest siblings."""

    op: str
    siblings: tuple[Sample, ...]
    seed: int = 0
    dtypes: tuple[str, ...] = FIRST_DTYPES
    device: str = "cpu"
    draws: bool = True
    """Whether calls are drawn from the schema if no sibling's sample fits."""


def lacking(
    by_op: Mapping[str, Sequence[Sample]], wanted: Sequence[str], seed: int = 0, device: str = "cpu"
) -> list[DerivationTask]:
    """A task for each wanted overload without samples, sorted by overload."""
    have = sorted(op for op, found in by_op.items() if found)
    return [
        DerivationTask(op, _samples_of(siblings(op, have), by_op), seed, device=device)
        for op in sorted(set(wanted))
        if not by_op.get(op)
    ]


def _samples_of(ops: Sequence[str], by_op: Mapping[str, Sequence[Sample]]) -> tuple[Sample, ...]:
    return tuple(sample for op in ops for sample in evenly(by_op[op], MOST_OF_ONE))


def siblings(op: str, have: Sequence[str]) -> list[str]:
    """The overloads with the most similar names, most similar first: of the same op, then of similar ones."""
    near = sorted((d, name) for name in have for d in [_distance(op, name)] if d is not None)
    return [name for _, name in near[:MOST_SIBLINGS]]


def _distance(op: str, other: str) -> float | None:
    ours, theirs = _root(op), _root(other)
    if ours == theirs:
        return 0.0 if op.split(".")[1] == other.split(".")[1] else 0.1
    return _name_distance(ours, theirs)


@functools.cache
def _name_distance(ours: str, theirs: str) -> float | None:
    long, short = sorted((ours, theirs), key=len, reverse=True)
    if ("backward" in ours) != ("backward" in theirs) or not set(short.split("_")) <= set(long.split("_")):
        return None
    share = len(short) / len(long)
    return 2.0 - share if share >= _NEAR else None


@functools.cache
def _root(op: str) -> str:
    """The name that an op shares with its variants: `index_put` of `_index_put_impl_`, `view` of `view_copy`."""
    packet = op.split(".")[1].strip("_")
    for ending in ("_functional", "_copy", "_impl"):
        packet = packet.removesuffix(ending)
    return packet


def make(task: DerivationTask, note: Callable[[int], None]) -> tuple[list[Sample], str]:
    """Run by a worker: samples of one overload, or the reason why there are none.

    `note` receives the number of the sibling's sample in use, since an op may crash the process on invalid arguments.
    """
    why = missing_kernel_reason(task.op, task.device)
    if why:
        return [], why
    with kernels_on(task.device):
        return _derived(task, note)


def _derived(task: DerivationTask, note: Callable[[int], None]) -> tuple[list[Sample], str]:
    made: dict[str, BoundCall] = {}
    refused: Counter[str] = Counter()
    for number, sample in enumerate(task.siblings):
        note(number)
        try:
            bound = bind_to_sibling(sample, task.op)
        except Unbound as no:
            refused[str(no)] += 1
            continue
        made.setdefault(str(bound.sample.arguments()), bound)
        if len(made) >= MOST:
            break
    if made:
        return prefer_finite(made.values()), ""
    if not task.draws:
        return [], max(refused, key=lambda why: refused[why], default="")
    try:
        return draw_calls(task.op, task.dtypes, task.seed), ""
    except Unbound as no:
        return [], str(no)


def gather(
    workers: Workers,
    by_op: Mapping[str, Sequence[Sample]],
    wanted: Sequence[str],
    seed: int = 0,
    tick: Callable[[int], None] | None = None,
    device: str = "cpu",
) -> tuple[dict[str, list[Sample]], dict[str, str]]:
    """Samples for the wanted overloads that have none, and the reasons for those that still have none.

    The result is determined by the seed.  If an op kills its worker on one sample, the remaining ones are tested one by one.
    """
    made: dict[str, list[Sample]] = {}
    reasons: dict[str, str] = {}
    todo = lacking(by_op, wanted, seed, device)
    while todo:
        again: list[DerivationTask] = []
        for task, answer in zip(todo, workers.run(make, todo, limit=SECONDS, tick=tick), strict=True):
            if isinstance(answer, TaskDone):
                found, why = answer.value
                made.setdefault(task.op, []).extend(found)
            else:
                why = answer.why if isinstance(answer, TaskLost) else answer.error
                again += _apart(task, answer.noted) if isinstance(answer, TaskLost) else []
            reasons.update({task.op: why} if why else {})
        todo = again
    made = {op: found for op, found in sorted(made.items()) if found}
    return made, {op: why for op, why in sorted(reasons.items()) if op not in made}


def _apart(task: DerivationTask, killer: int) -> list[DerivationTask]:
    """The task without the sample that killed its worker: the samples before it together, each one after it alone."""
    if len(task.siblings) <= 1 or killer < 0:
        return []
    behind = [replace(task, siblings=(s,), draws=False) for s in task.siblings[killer + 1 :][:MOST_ALONE]]
    return [replace(task, siblings=task.siblings[:killer], draws=True), *behind]


def user_op_draws(
    workers: Workers, settings: Settings, ops: Sequence[str]
) -> tuple[dict[str, list[Sample]], dict[str, str | Crash]]:
    """The samples of a user's overloads, and for those without any the reason or the crash."""
    own = [UserOpTask(op, settings.dtypes, settings.seed, settings.rules, settings.folder) for op in ops]
    found: dict[str, list[Sample]] = {}
    without: dict[str, str | Crash] = {}
    if not ops:
        return found, without
    for unknown, answer in zip(own, workers.run(user_op_samples, own, limit=SECONDS), strict=True):
        if not isinstance(answer, worker_pool.TaskDone):
            without[unknown.op] = capture_crash(unknown.op, answer)
        elif answer.value[0]:
            found[unknown.op] = answer.value[0]
        else:
            without[unknown.op] = answer.value[1]
    return found, without


def capture_crash(name: str, answer: worker_pool.TaskFailed | worker_pool.TaskLost) -> Crash:
    if isinstance(answer, worker_pool.TaskFailed):
        return Crash(name, "its samples", answer.error, answer.trace)
    return Crash(name, "its samples", answer.why)


@dataclass(frozen=True, slots=True)
class UserOpTask:
    """A worker's task: an overload without an OpInfo, and the rules module that registered it."""

    op: str
    dtypes: tuple[str, ...]
    seed: int
    module: str
    folder: str


def user_op_samples(unknown: UserOpTask, note: Callable[[int], None]) -> tuple[list[Sample], str]:
    """Run by a worker: the samples of the module's `samples` function, else calls drawn from the schema; or why there are
    none.  A function that yields no call of this op is one that was written for others."""
    import_rules(unknown.module, unknown.folder)
    hook = getattr(sys.modules[unknown.module], "samples", None)
    target = overload(unknown.op)
    if made := typed_values.user_samples(target, hook(target) or () if hook else ()):
        return made, ""
    made = typed_values.schema_calls(target, [torch_dtype(d) for d in unknown.dtypes], unknown.seed)
    if made:
        return made, ""
    try:
        return typed_values.draw_calls(unknown.op, unknown.dtypes, unknown.seed), ""
    except Unbound as no:
        return [], str(no)
