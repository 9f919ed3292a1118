"""Simulation against reality: how often the probe and DTensor on real processes say the same of one case."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from strategies.model.oracle import REJECTIONS, kernels_on, run_oracle
from strategies.model.rule import Sample
from strategies.model.verdict import Instance, Verdict
from strategies.programs.run.real_run import ProgramRealRuns
from strategies.validation import claim_sources, finding
from strategies.validation.probe import check_claims


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
    with kernels_on(device), ProgramRealRuns(backend, device) as court:
        for instance in _spread(samples, ranks, seed, most):
            if time.monotonic() > until:
                break
            cases += 1
            seen = court.confirm(finding.case_of(instance, seed))
            wrong = instance.verdict is Verdict.UNSOUND
            if bool(seen.wrong) != wrong and not seen.note.startswith("DTensor"):
                said = seen.wrong or seen.note or "right"
                apart.append(f"{instance.rule}: the probe says {instance.verdict.value}, the real run: {said}")
    return Agreement(cases, tuple(apart))


def _spread(samples: Mapping[str, Sequence[Sample]], ranks: int, seed: int, most: int) -> Iterator[Instance]:
    step = max(1, len(samples) // most)
    for op in sorted(samples)[::step][:most]:
        for sample in samples[op][:1]:
            try:
                truth = run_oracle(sample, seed=seed)
                claimed = claim_sources.claims(sample, ranks, truth.raw)
            except (*REJECTIONS, AttributeError):
                continue
            judged = [i for i in check_claims(sample, truth, ranks, claimed, seed=seed) if _says(i)]
            yield from judged[-1:]


def _says(instance: Instance) -> bool:
    """Whether the probe judged it, and not the trivial rule that leaves everything replicated."""
    trivial = set(map(str, instance.rule.inputs)) <= {"Replicate()", "R"}
    return instance.verdict in (Verdict.SOUND, Verdict.UNSOUND) and not trivial
