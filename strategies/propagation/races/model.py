"""What a look for races comes to: parts that were tried, findings, and what each kind of finding means."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from localtensor.concurrency.results import Failure

MEANINGS: Mapping[str, str] = MappingProxyType({
    "computed once per thread": "DTensor's cache of propagation belongs to a thread: each thread computes every key again, "
    "and a thread that ends takes its answers along.",
    "answer of another rank": "The key holds no rank, and the local shapes in the answer depend on it. A thread that serves a "
    "second rank (a pool, a simulator) hands the op the first rank's shape. One rank per process is safe.",
    "plan of another rank": "`_gen_transform_infos` and the planners are kept once per process, by a mesh that is equal on "
    "all ranks, and hold shapes of the rank that was first. One rank per process is safe; rank threads are not, unless "
    "their backend is called \"threaded\" and both caches are cleared between simulations.",
    "plan of no rank": "A plan that no rank would make alone: the planner was used by two threads at once.",
    "wrong numbers, in silence": "The redistribution went by another rank's shapes, and no rank noticed.",
    "other answer": "Under many threads the propagator answers otherwise than alone.",
    "exception": "What works alone raised under several threads.",
    "stale after a clear": "Clearing the cache clears that of the thread that asks for it. Other threads go on with answers "
    "of rules that are no longer there.",
    "setting of another thread": "The switch is one variable of the process: a thread that enters it changes what all "
    "threads do. Ranks that plan other collectives than their peers wait for each other for ever.",
    "setting not in the key": "The plan that was made under the setting is kept, and found again when the setting is over.",
    "key without the argument": "Python takes 1, 1.0 and True for one key, and the answers differ, in dtype for one: the "
    "second call is answered with the first one's. This is the propagator's Python cache; mul, pow and add through "
    "DTensor's native one gave right dtypes.",
    "time-out": "It did not end in time: the stacks say where each thread stood.",
    "crash": "The process ended without a word of its own.",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Tried:
    """A program of ours: how many schedules were run, and the first failure, with what its yield points were."""

    name: str
    promise: str
    schedules: int
    seconds: float
    failure: Failure | None
    yields: str = "marked"


@dataclass(frozen=True, slots=True)
class Finding:
    """kind: a word for it.  count: how often.  example: the first.  script: a Python file that does it again."""

    part: str
    kind: str
    count: int
    example: str
    script: str

    @property
    def meaning(self) -> str:
        return MEANINGS.get(self.kind, "")


@dataclass(frozen=True, slots=True)
class Part:
    """One program or script.  tried: how many schedules or calls; 0 with `trouble` where nothing was run."""

    name: str
    asks: str
    tried: int
    seconds: float
    findings: tuple[Finding, ...] = ()
    figures: Mapping[str, int] = field(default_factory=dict)
    trouble: str = ""
