"""The whole validation: gather samples, hear every overload, confirm the suspects, report."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol

import torch

from strategies import modules, selection, workers
from strategies.confirm import Confirmation, Court
from strategies.picture import picture
from strategies.repro import script, usable
from strategies.rules import Sample
from strategies.settings import Settings
from strategies.trial import Charge, Docket, Hearing, hear
from strategies.verdicts import Counts, Crash, Finding, Instance, Report, Verdict

SECONDS = 120.0
"""Time limit of one overload's trial."""
RETRIES = 24
"""Samples of one overload that may kill a worker before the rest of that overload is given up."""


class Progress(Protocol):
    """Who is told how far the work is."""

    def phase(self, name: str, total: int) -> None: ...

    def tick(self, count: int = 1) -> None: ...


class Silent:
    """Nobody is told."""

    def phase(self, name: str, total: int) -> None:
        """A phase of `total` units begins."""

    def tick(self, count: int = 1) -> None:
        """So many units are done."""


def validate(settings: Settings, progress: Progress | None = None) -> Report:
    """Put the rules that the settings name on trial.

    Raises `UnknownOp`, `BadSetting` or `BadRules` before any work; a crash of one sample, native or
    ours, is in the report and does not stop the rest.
    """
    progress = progress or Silent()
    clock = _Clock()
    with clock("imports"):
        rules = modules.load(settings.rules, settings.folder) if settings.rules != "dtensor" else None
        picked = selection.pick(settings, rules)
    home = (settings.rules, settings.folder) if rules else ("", "")
    with workers.Crew(settings.workers, cuda=settings.device == "cuda") as crew:
        with clock("samples"):
            by_op, crashed, refused = _gathered(crew, picked, settings, rules, progress)
        dockets = [
            Docket(op, tuple(found), settings.ranks, settings.seed, settings.search, home=home)
            for op, found in selection.chosen(by_op, picked, settings)
        ]
        del by_op  # tens of thousands of samples, of which the dockets hold the chosen
        with clock("trials"):
            hearings, lost = _hear_all(crew, dockets, progress)
    with clock("confirmation"):
        findings, sound, failed = _confirm_all(hearings, settings, home, progress)
    return _report(settings, rules, hearings, findings, sound, [*crashed, *lost, *failed], refused, clock.seconds)


def _gathered(
    crew: workers.Crew, picked: selection.Pick, settings: Settings, rules: modules.Registered | None, progress: Progress
) -> tuple[dict[str, list[Sample]], list[Crash], Counter[str]]:
    """The samples of every overload; where the likely OpInfos do not reach one, those of all OpInfos."""

    def units(count: int) -> None:
        progress.phase("capturing samples", count)

    by_op, crashed, refused = selection.gather(crew, picked, settings, rules, progress.tick, units)
    more = selection.wider(picked, by_op)
    if more.infos:
        found, dead, no = selection.gather(crew, more, settings, None, progress.tick, units)
        by_op, crashed, refused = {**by_op, **found}, [*crashed, *dead], refused + no
    return by_op, crashed, refused


class _Clock:
    def __init__(self) -> None:
        self.seconds: list[tuple[str, float]] = []

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds.append((name, round(time.perf_counter() - start, 2)))


def _hear_all(crew: workers.Crew, dockets: Sequence[Docket], progress: Progress) -> tuple[list[Hearing], list[Crash]]:
    """Every overload's hearing, by name.  A sample that kills the process is left out the next time."""
    progress.phase("trying rules", len(dockets))
    hearings: dict[str, Hearing] = {}
    crashed: list[Crash] = []
    todo = list(dockets)
    for attempt in range(RETRIES + 1):
        answers = crew.run(hear, todo, limit=SECONDS, tick=progress.tick if not attempt else None)
        again: list[Docket] = []
        for docket, answer in zip(todo, answers, strict=True):
            if isinstance(answer, workers.Done):
                hearings[docket.op] = answer.value
                crashed += answer.value.crashed
            elif isinstance(answer, workers.Failed):
                crashed.append(Crash(docket.op, "the whole overload", answer.error, answer.trace))
            else:
                crashed.append(_death(docket, answer))
                if answer.noted >= 0 and attempt < RETRIES:
                    again.append(replace(docket, skip=docket.skip | {answer.noted}))
        todo = again
        if not todo:
            break
    return [hearings[op] for op in sorted(hearings)], crashed


def _death(docket: Docket, answer: workers.Lost) -> Crash:
    if answer.noted < 0:
        return Crash(docket.op, "before its first sample", answer.why)
    sample = docket.samples[answer.noted]
    return Crash(docket.op, f"{', '.join(sample.arguments())} from {sample.origin}", f"{answer.why} on a rank's piece")


def _confirm_all(
    hearings: Sequence[Hearing], settings: Settings, home: tuple[str, str], progress: Progress
) -> tuple[list[Finding], set[str], list[Crash]]:
    """Findings for every suspect, and the rules that only a real run could clear."""
    suspects = [(name, charges) for h in hearings for name, charges in sorted(h.suspects.items())]
    whole = [(name, charges) for h in hearings for name, charges in sorted(h.whole.items()) if name not in h.suspects]
    missing = [_of_instance(i, i.evidence.reason) for h in hearings for i in h.missing]
    if settings.confirm == "none":
        unconfirmed = "not confirmed: --confirm none was asked for"
        plain = [_of_charge(charges[0], Verdict.SUSPECT, f"{charges[0].instance.evidence.reason} ({unconfirmed})")
                 for _, charges in suspects]  # fmt: skip
        return [*plain, *missing], set(), []
    progress.phase("confirming on real processes", len(suspects) + len(whole))
    todo = dict(suspects + whole)
    with Court(settings.confirm, settings.device, home) as court:
        tried = _tried(court, todo, progress)
    found = {n: _outcome(c, s, settings.confirm, home[0]) for n, (c, s) in tried.items()}
    cleared = {name for name, _ in whole if not found[name].confirmed_on}
    failed = [Crash(c.case.rule.op, _describe(c.case.sample), s.note, s.failed) for c, s in tried.values() if s.failed]
    return [*(f for name, f in found.items() if name not in cleared), *missing], cleared, failed


def _tried(
    court: Court, todo: Mapping[str, Sequence[Charge]], progress: Progress
) -> dict[str, tuple[Charge, Confirmation]]:
    """For each rule the first of its cases that goes wrong for real, else the last one.

    All cases on two ranks come first, then those on three, and so on: another number of ranks means
    other processes.
    """
    tried: dict[str, tuple[Charge, Confirmation]] = {}
    for ranks in sorted({c.case.ranks for charges in todo.values() for c in charges}):
        for name, charges in todo.items():
            for charge in charges:
                done = name in tried and bool(tried[name][1].wrong)
                if charge.case.ranks == ranks and not done:
                    tried[name] = charge, _same_refusal(charge, court.confirm(charge.case))
            if ranks == charges[-1].case.ranks:
                progress.tick()
    return tried


def _outcome(charge: Charge, seen: Confirmation, backend: str, module: str) -> Finding:
    if seen.wrong:
        return _unsound(charge, seen, backend, module)
    reason = f"{charge.instance.evidence.reason} (not confirmed: {seen.note})"
    return _of_charge(charge, Verdict.SUSPECT, reason)


def _same_refusal(charge: Charge, seen: Confirmation) -> Confirmation:
    """A rule under which every rank raises what the probe saw raised is as wrong as one that gives wrong numbers."""
    if not seen.refused or seen.refused[:80] not in charge.instance.evidence.reason:
        return seen
    return replace(seen, wrong=f"every rank raises {seen.refused}; the op takes the whole tensors")


def _unsound(charge: Charge, seen: Confirmation, backend: str, module: str) -> Finding:
    found = _of_charge(charge, Verdict.UNSOUND, seen.wrong)
    evidence = charge.instance.evidence
    text = script(charge.case, seen.wrong, "{name}", module) if usable(charge.case) else ""
    return replace(
        found, confirmed_on=backend, got=seen.got or evidence.got, want=seen.want or evidence.want,
        picture=picture(charge.case, seen.heard), script=text,
    )  # fmt: skip


def _of_charge(charge: Charge, verdict: Verdict, reason: str) -> Finding:
    evidence = charge.instance.evidence
    return replace(_of_instance(charge.instance, reason), verdict=verdict, got=evidence.got, want=evidence.want)


def _of_instance(instance: Instance, reason: str) -> Finding:
    sample = instance.sample
    special = " (inputs with NaN and infinities)" if instance.evidence.variant else ""
    return Finding(
        instance.rule, instance.ranks, instance.verdict, reason, tuple(sample.arguments()), sample.origin + special
    )


def _describe(sample: Sample) -> str:
    return f"{sample.op}({', '.join(sample.arguments())})"


def _report(
    settings: Settings, rules: modules.Registered | None, hearings: Sequence[Hearing], findings: Sequence[Finding],
    sound: set[str], crashed: Sequence[Crash], refused: Counter[str], seconds: Sequence[tuple[str, float]],
) -> Report:  # fmt: skip
    worst = {str(f.rule): f.verdict for f in findings}
    clean = {name for h in hearings for name in h.sound if name not in worst}
    clean |= {name for name in sound if name not in worst}
    untestable = {
        name: why for h in hearings for name, why in h.untestable.items() if name not in worst and name not in clean
    }
    if settings.confirm == "none":
        for h in hearings:
            untestable |= {
                n: f"{c[0].instance.evidence.reason}: only a real run can judge it"
                for n, c in h.whole.items()
                if n not in clean
            }
    tally = Counter(worst.values())
    counts = Counts(
        sound=len(clean), unsound=tally[Verdict.UNSOUND], missing=tally[Verdict.MISSING], suspect=tally[Verdict.SUSPECT],
        untestable=len(untestable), crashed=len(crashed), samples=sum(h.samples for h in hearings),
        overloads=sum(1 for h in hearings if h.tried), instances=sum(h.tried for h in hearings),
        combinations=sum(h.combinations for h in hearings),
        by_metadata=len({n for h in hearings for n in h.by_metadata if n in clean}),
    )  # fmt: skip
    skipped = Counter(refused)
    for h in hearings:
        skipped.update({f"{h.op}: {why}": n for why, n in h.skipped.items()})
    return Report(
        torch.__version__.split("+")[0], settings.seed, settings.ranks, settings.confirm, counts,
        tuple(_sorted(findings)), tuple(crashed), tuple(sorted(untestable.items())), tuple(sorted(skipped.items())),
        rules.ignored if rules else (), tuple(seconds),
    )  # fmt: skip


def _sorted(findings: Iterable[Finding]) -> list[Finding]:
    order = {Verdict.UNSOUND: 0, Verdict.SUSPECT: 1, Verdict.MISSING: 2}
    return sorted(findings, key=lambda f: (order.get(f.verdict, 9), str(f.rule)))
