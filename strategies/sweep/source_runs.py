"""A sweep over the claims of a source other than DTensor: its samples, and scripts that confirm its wrong claims.

A claim is called Unsound only where its script, which imports torch and the source's own package alone, shows the wrong
number on real processes.
"""

from __future__ import annotations

import contextlib
import fnmatch
import io
import math
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from localtensor._util import pickling
from localtensor.errors import error_in_one_line
from strategies.base.progress import Progress
from strategies.base.time_limit import DoesNotReturn
from strategies.inputs.gathering import CapturedSamples, SamplesByOp
from strategies.model import codec
from strategies.model.rule import Sample
from strategies.model.settings import BadSource, Settings, UnknownOp
from strategies.model.verdict import Verdict
from strategies.torch_api.code_places import no_return_error, rule_limit
from strategies.torch_api.rank_runs import RankProcesses, first_rank_failure, returned_values
from strategies.validation.finding import Candidate, RuleOutcome, case_of, finding_of_candidate
from strategies.validation.overload import SOURCE_SECONDS
from strategies.validation.sources.protocol import FunctionSource

SECONDS = 60.0
"""Time limit of one script on real processes: the first imports the source's package."""
MOST_SAMPLES = 24
"""Samples of one op in a sweep."""


def source_samples(source: Any, settings: Settings) -> CapturedSamples:
    """The samples of a source by op, and the reason for each function that has none.  Raises `UnknownOp`, `BadSource`."""
    if not isinstance(source, FunctionSource):
        problem = f"{type(source).__name__} is no FunctionSource"
        raise BadSource(settings.source, problem, "Subclass localtensor.testing.FunctionSource.")
    labels = source.labels
    known = sorted({name for label in labels.values() for name in (label, *source.names(label))})
    names: list[str] = []
    for pattern in settings.patterns:
        found = fnmatch.filter(known, pattern)
        if not found:
            raise UnknownOp(pattern, known)
        names += found
    by_op: dict[str, list[Sample]] = defaultdict(list)
    refused: Counter[str] = Counter()
    for sample in source.samples(names, settings.seed):
        if len(by_op[sample.op]) < MOST_SAMPLES and codec.is_encodable(sample):
            by_op[sample.op].append(sample)
    shelf: SamplesByOp = {op: (found, "") for op, found in by_op.items()}
    for packet, label in labels.items():
        if not settings.patterns and f"{packet}.default" not in shelf:
            shelf[f"{packet}.default"] = ((), source.without(label))
    return CapturedSamples(dict(sorted(shelf.items())), (), refused)


def confirm_claims(
    source: Any, suspected: Mapping[str, Sequence[Candidate]], known: set[str], settings: Settings, progress: Progress
) -> Iterator[RuleOutcome]:
    """The outcome of each suspected rule: Unsound where a script shows it on real processes, else Suspect.

    The rules are run in the order of their ranks: another number of ranks needs other processes.
    """
    todo = {name: found for name, found in suspected.items() if name not in known}
    if not source.labels:  # asking for them registers the functions as ops, which a resumed sweep has not done yet
        return
    progress.phase("confirming on real processes", len(todo))
    with RankProcesses(settings.confirm, SECONDS) as processes:
        for name, found in sorted(todo.items(), key=lambda item: (item[1][0].instance.ranks, item[0])):
            progress.now(name)
            yield _confirmed(source, name, found, settings, processes)
            progress.tick()


def _confirmed(
    source: Any, name: str, found: Sequence[Candidate], settings: Settings, processes: RankProcesses
) -> RuleOutcome:
    note = "it has no script"
    for candidate in found:
        instance = candidate.instance
        if instance.verdict is Verdict.REFUSED:
            note = "the source does not answer about it, so that there is no script"
            continue
        words = f"{instance.evidence.reason} (claimed as {instance.source})"
        case = case_of(instance, settings.seed)
        try:
            with rule_limit(SOURCE_SECONDS).applied():
                text = source.script(case, words)
        except DoesNotReturn as stuck:
            note = f"it has no script: {no_return_error(stuck)}"
            continue
        if not text:
            continue
        mesh = source.mesh(case)
        outcomes = processes.run(run_script, [text.replace("{name}", "wrong.py")] * math.prod(mesh))
        failure = first_rank_failure(outcomes)
        values = returned_values(outcomes)
        wrong = failure is None and all(value[0] for value in values)
        if wrong:
            finding = finding_of_candidate(candidate, Verdict.UNSOUND, words)
            finding = replace(finding, mesh=mesh if len(mesh) > 1 else ())
            picture = "\n".join(line for value in values for line in value[1].splitlines())
            return RuleOutcome(name, replace(finding, confirmed_on=settings.confirm, script=text, picture=picture))
        note = failure.text if failure is not None else "real processes give the right numbers"
    first = found[0]
    reason = f"{first.instance.evidence.reason} (claimed as {first.instance.source}; not confirmed: {note})"
    return RuleOutcome(name, finding_of_candidate(first, Verdict.SUSPECT, reason))


def run_script(sent: bytes) -> bytes:
    """Run by each real process: the `main` of a script; whether it found the claim wrong, and what it printed, pickled."""
    text: str = pickling.loads(sent)
    printed = io.StringIO()
    scope: dict[str, Any] = {"__name__": "confirmation"}
    with warnings.catch_warnings(), contextlib.redirect_stdout(printed):
        warnings.simplefilter("ignore")
        exec(compile(text, "<script of a finding>", "exec"), scope)  # noqa: S102 (we wrote it)
        try:
            wrong = bool(scope["main"]())
        except SystemExit as stop:
            raise RuntimeError(error_in_one_line(stop)) from None
    return pickling.dumps((wrong, printed.getvalue()))
