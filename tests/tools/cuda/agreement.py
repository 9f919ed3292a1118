"""Simulation against reality: how often the probe and DTensor on real processes say the same of one case."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from strategies.base.worker_pool import TaskDone, WorkerPool
from strategies.model.kernels import REJECTIONS, kernels_on
from strategies.model.oracle import run_oracle
from strategies.model.rule import Sample
from strategies.model.verdict import Instance, Verdict
from strategies.programs.run.real_run import ProgramRealRuns
from strategies.validation import finding
from strategies.validation.probe import Case, check_claims
from strategies.validation.sources import dtensor as claim_sources


@dataclass(frozen=True, slots=True)
class Agreement:
    """`apart` are the cases on which the two disagree, each in one line."""

    cases: int
    apart: tuple[str, ...]

    @property
    def share(self) -> float:
        """Per cent of the cases on which they disagree."""
        return 100 * len(self.apart) / self.cases if self.cases else 0.0


def agreement(
    samples: Mapping[str, Sequence[Sample]],
    *,
    device: str,
    backend: str,
    most: int,
    ranks: int = 2,
    seed: int = 0,
    until: float = math.inf,
) -> Agreement:
    """At most `most` cases, one of each overload, that the probe calls sound or wrong, run for real.

    No case begins after the time `until` of `time.monotonic`.  A case that the real run refuses on every rank, or that DTensor does not follow, is no disagreement.
    """
    apart, cases = [], 0
    step = max(1, len(samples) // most)
    tasks = [_Task(samples[op][0], ranks, seed, device) for op in sorted(samples)[::step][:most] if samples[op]]
    with WorkerPool(WORKERS, cuda=device == "cuda") as workers, ProgramRealRuns(backend, device) as real_runs:
        for answer in workers.run(judged, tasks, limit=SECONDS):
            if time.monotonic() > until:
                break
            if not isinstance(answer, TaskDone) or answer.value is None:
                continue
            instance, case = answer.value
            cases += 1
            seen = real_runs.confirm(case)
            wrong = instance.verdict is Verdict.UNSOUND
            if bool(seen.wrong) != wrong and not seen.note.startswith("DTensor"):
                said = seen.wrong or seen.note or "right"
                apart.append(f"{instance.rule}: the probe says {instance.verdict.value}, the real run: {said}")
    return Agreement(cases, tuple(apart))


WORKERS = 4
SECONDS = 30.0
"""Time limit of the probe of one sample."""


@dataclass(frozen=True, slots=True)
class _Task:
    sample: Sample
    ranks: int
    seed: int
    device: str


def judged(task: _Task, note: Callable[[int], None]) -> tuple[Instance, Case] | None:
    """Run by a worker, which may lose its GPU: the last rule of the sample that the probe judges, and its case."""
    note(0)
    with kernels_on(task.device):
        try:
            oracle = run_oracle(task.sample, seed=task.seed)
            claimed = claim_sources.claims(task.sample, task.ranks, oracle.raw)
        except (*REJECTIONS, AttributeError):
            return None
        found = [i for i in check_claims(task.sample, oracle, task.ranks, claimed, seed=task.seed) if _says(i)]
        return (found[-1], finding.case_of(found[-1], task.seed)) if found else None


def _says(instance: Instance) -> bool:
    """Whether the probe judged it, and not the trivial rule that leaves everything replicated."""
    trivial = set(map(str, instance.rule.inputs)) <= {"Replicate()", "R"}
    return instance.verdict in (Verdict.SOUND, Verdict.UNSOUND) and not trivial
