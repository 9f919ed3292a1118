"""Samples for overloads that no database reaches: bound from their siblings' samples, else drawn from the schema."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from strategies.base.worker_pool import Done, Lost
from strategies.inputs.schema_binding import Bound, Unbound, bind, calm
from strategies.inputs.typed_values import FIRST, draw_for
from strategies.model.rule import Sample
from strategies.sweep.executors import Hands
from strategies.torch_api.cpu_kernels import lacks_kernel

MOST_SIBLINGS, MOST_OF_ONE, MOST = 2, 28, 24
"""Siblings that are asked for samples, samples of each, and samples made of one overload."""
_NEAR = 0.7
"""How much of the longer name the shorter one must be, if it has no other words."""
MOST_ALONE = 12
"""Samples of an overload that are tried one at a time, in a worker each, after one of them killed its worker."""
SECONDS = 60.0
"""Time limit of one overload."""


@dataclass(frozen=True, slots=True)
class Lacking:
    """One overload without samples, and the samples of its nearest siblings: what a worker needs."""

    op: str
    siblings: tuple[Sample, ...]
    seed: int = 0
    dtypes: tuple[str, ...] = FIRST
    draws: bool = True
    """Whether calls are drawn from the schema where no sibling's sample fits."""


def lacking(by_op: Mapping[str, Sequence[Sample]], wanted: Sequence[str], seed: int = 0) -> list[Lacking]:
    """The units of work: each wanted overload that has no sample yet, in the order of their names."""
    have = sorted(op for op, found in by_op.items() if found)
    return [
        Lacking(op, tuple(s for name in siblings(op, have) for s in _spread(by_op[name])), seed)
        for op in sorted(set(wanted))
        if not by_op.get(op)
    ]


def siblings(op: str, have: Sequence[str]) -> list[str]:
    """The overloads nearest to this one in name, nearest first: of the same op, in place or not, alike in name."""
    near = sorted((d, name) for name in have for d in [_distance(op, name)] if d is not None)
    return [name for _, name in near[:MOST_SIBLINGS]]


def _distance(op: str, other: str) -> float | None:
    ours, theirs = _root(op), _root(other)
    if ours == theirs:
        same = op.split(".")[1] == other.split(".")[1]
        return 0.0 if same else 0.1
    return _between(ours, theirs)


@functools.cache
def _between(ours: str, theirs: str) -> float | None:
    long, short = sorted((ours, theirs), key=len, reverse=True)
    if ("backward" in ours) != ("backward" in theirs) or not set(short.split("_")) <= set(long.split("_")):
        return None
    share = len(short) / len(long)
    return 2.0 - share if share >= _NEAR else None


@functools.cache
def _root(op: str) -> str:
    """The name that an op shares with its variants: `_index_put_impl_` and `index_put`, `view_copy` and `view`."""
    packet = op.split(".")[1].strip("_")
    for ending in ("_functional", "_copy", "_impl"):
        packet = packet.removesuffix(ending)
    return packet


def _spread(found: Sequence[Sample]) -> list[Sample]:
    """At most `MOST_OF_ONE` samples from all over them: like stands next to like."""
    step = max(1.0, len(found) / MOST_OF_ONE)
    return [found[int(i * step)] for i in range(min(MOST_OF_ONE, len(found)))]


def make(task: Lacking, note: Callable[[int], None]) -> tuple[list[Sample], str]:
    """A worker's part: samples of one overload, or why there are none.  `note` hears which sibling is tried.

    An op that crashes on what it should refuse takes this process with it.
    """
    why = lacks_kernel(task.op)
    if why:
        return [], why
    made: dict[str, Bound] = {}
    refused: Counter[str] = Counter()
    for number, sample in enumerate(task.siblings):
        note(number)
        try:
            bound = bind(sample, task.op)
        except Unbound as no:
            refused[str(no)] += 1
            continue
        made.setdefault(str(bound.sample.arguments()), bound)
        if len(made) >= MOST:
            break
    if made:
        return calm(made.values()), ""
    if not task.draws:
        return [], max(refused, key=lambda why: refused[why], default="")
    try:
        return draw_for(task.op, task.dtypes, task.seed), ""
    except Unbound as no:
        return [], str(no)


def gather(
    crew: Hands,
    by_op: Mapping[str, Sequence[Sample]],
    wanted: Sequence[str],
    seed: int = 0,
    tick: Callable[[int], None] | None = None,
) -> tuple[dict[str, list[Sample]], dict[str, str]]:
    """Samples for the wanted overloads that have none, and the reason for those which still have none.

    The same for the same seed.  Of an op that kills its process on one sample the rest are tried alone.
    """
    made: dict[str, list[Sample]] = {}
    reasons: dict[str, str] = {}
    todo = lacking(by_op, wanted, seed)
    while todo:
        again: list[Lacking] = []
        for task, answer in zip(todo, crew.run(make, todo, limit=SECONDS, tick=tick), strict=True):
            if isinstance(answer, Done):
                found, why = answer.value
                made.setdefault(task.op, []).extend(found)
            else:
                why = answer.why if isinstance(answer, Lost) else answer.error
                again += _apart(task, answer.noted) if isinstance(answer, Lost) else []
            reasons.update({task.op: why} if why else {})
        todo = again
    made = {op: found for op, found in sorted(made.items()) if found}
    return made, {op: why for op, why in sorted(reasons.items()) if op not in made}


def _apart(task: Lacking, killer: int) -> list[Lacking]:
    """The task without the sample that killed its worker: those before it together, those behind it each alone."""
    if len(task.siblings) <= 1 or killer < 0:
        return []
    behind = [replace(task, siblings=(s,), draws=False) for s in task.siblings[killer + 1 :][:MOST_ALONE]]
    return [replace(task, siblings=task.siblings[:killer], draws=True), *behind]
