"""The report, from the lines of a journal alone: the same whether they were written just now, or by other machines."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from localtensor.errors import LocalTensorError
from strategies.base.atomic_files import write_lines
from strategies.base.journal import BadJournal, Line, Read, of_kind, read, unlike
from strategies.model.oracle import REFUSALS
from strategies.model.rule import Program
from strategies.model.verdict import Counts, Crash, Finding, Report, Unit, Verdict, mesh_kind, planned, read_unit
from strategies.programs.repro.script import program_script, script, usable, writable
from strategies.programs.run.local_inputs import held_of
from strategies.programs.run.program_oracle import truth_of
from strategies.programs.run.real_run import RealRuns
from strategies.programs.run.verdict import Confirmation, picture, program_picture
from strategies.validation import finding
from strategies.validation.finding import Candidate, Settled, TaskResult, case_of, of_suspect


def first_line(
    asked: Line, ops: Iterable[str], trials: Iterable[tuple[str, tuple[int, ...]]], ignored: Iterable[str]
) -> Line:
    """What a journal's first line says of a run: what was asked, the overloads to be tried, and by which trials, on which
    meshes; and the registrations that torch ignores."""
    kinds = [[kind, list(mesh)] for kind, mesh in trials]
    return {**asked, "ops": list(ops), "trials": kinds, "ignored": list(ignored)}


def plan(begin: Line) -> tuple[Unit, ...]:
    """Every unit of the run that a journal's first line speaks of, those of other shards included."""
    return planned(begin["ops"], [(kind, tuple(mesh)) for kind, mesh in begin["trials"]])


def report(begin: Line, lines: Sequence[Line], seconds: Sequence[tuple[str, float]] = ()) -> Report:
    """All that these lines say, in whatever order.  Of a rule that was settled twice the worst verdict counts."""
    heard = sorted((finding.read_task(line) for line in of_kind(lines, "unit")), key=lambda h: h.unit)
    settled = sorted((finding.read_settled(line) for line in of_kind(lines, "settled")), key=lambda s: s.name)
    found = _placed(_worst(settled), settled, heard) + _missing(heard)
    named = {f.name for f in found}
    cleared = {s.name for s in settled if s.finding is None}
    clean = {name for h in heard for name in h.sound} | {n for h in heard for n in h.whole if n in cleared}
    clean -= named
    untestable = {name: why for h in heard for name, why in h.untestable.items()}
    if begin["confirm"] == "none":
        untestable |= {
            name: f"{charges[0].instance.evidence.reason}: only a real run can judge it"
            for h in heard
            for name, charges in h.whole.items()
        }
    untestable = {name: why for name, why in untestable.items() if name not in named and name not in clean}
    crashed, refused = _captured(lines)
    crashed += [crash for h in heard for crash in h.crashed] + [s.crash for s in settled if s.crash]
    for h in heard:
        refused.update({f"{h.unit.op}: {why}": n for why, n in h.skipped.items()})
    done = {h.unit for h in heard}
    return Report(
        begin["torch"], begin["seed"], tuple(begin["ranks"]), begin["confirm"],
        _counts(heard, found, clean, untestable, crashed), tuple(_sorted(found)), tuple(crashed),
        tuple(sorted(untestable.items())), tuple(sorted(refused.items())), tuple(begin["ignored"]), tuple(seconds),
        sum(unit not in done for unit in plan(begin)),
    )  # fmt: skip


def _worst(settled: Iterable[Settled]) -> list[Finding]:
    worst: dict[str, Finding] = {}
    for s in settled:
        if s.finding is None:
            continue
        known = worst.get(s.finding.name)
        if known is None or _rank(s.finding) < _rank(known):
            worst[s.finding.name] = s.finding
    return list(worst.values())


def _placed(found: Iterable[Finding], settled: Iterable[Settled], heard: Iterable[TaskResult]) -> list[Finding]:
    """The findings with the kinds of all units that suspected them, under whatever name before they were made small."""
    called = {s.name: s.finding.name for s in settled if s.finding}
    called |= {s.name: called[s.same_as] for s in settled if s.same_as in called}
    kinds: dict[str, set[tuple[str, str]]] = defaultdict(set)
    for h in heard:
        for name in {*h.suspects, *h.whole} & called.keys():
            kinds[called[name]].add((h.unit.dtypes, mesh_kind(h.unit.mesh)))
    return [replace(f, kinds=tuple(sorted(kinds[f.name]))) for f in found]


_ORDER = {Verdict.UNSOUND: 0, Verdict.SUSPECT: 1, Verdict.MISSING: 2}


def _rank(f: Finding) -> tuple[int, int, int]:
    return _ORDER.get(f.verdict, 9), f.ranks, f.elements


def _missing(heard: Iterable[TaskResult]) -> list[Finding]:
    """Each missing rule once, by its smallest instance."""
    found: dict[str, Finding] = {}
    for instance in (i for h in heard for i in h.missing):
        one = finding.of_instance(instance, instance.evidence.reason)
        if one.name not in found or _rank(one) < _rank(found[one.name]):
            found[one.name] = one
    return list(found.values())


def _captured(lines: Sequence[Line]) -> tuple[list[Crash], Counter[str]]:
    """What crashed and what torch refused while samples were captured.  Each shard captures all: once is enough."""
    first = next(of_kind(lines, "captured"), None)
    if first is None:
        return [], Counter()
    return [Crash(*crash) for crash in first["crashed"]], Counter(first["refused"])


def _counts(
    heard: Sequence[TaskResult], found: Sequence[Finding], clean: set[str], untestable: dict[str, str],
    crashed: Sequence[Crash],
) -> Counts:  # fmt: skip
    tally = Counter(f.verdict for f in found)
    samples: Counter[tuple[str, str]] = Counter()
    for h in heard:  # the same samples go to each mesh
        key = h.unit.op, h.unit.dtypes
        samples[key] = max(samples[key], h.samples)
    return Counts(
        sound=len(clean), unsound=tally[Verdict.UNSOUND], missing=tally[Verdict.MISSING],
        suspect=tally[Verdict.SUSPECT], untestable=len(untestable), crashed=len(crashed),
        samples=sum(samples.values()), overloads=len({h.unit.op for h in heard if h.tried}),
        instances=sum(h.tried for h in heard), combinations=sum(h.combinations for h in heard),
        by_metadata=len({n for h in heard for n in h.by_metadata if n in clean}),
    )  # fmt: skip


def _sorted(found: Iterable[Finding]) -> list[Finding]:
    return sorted(found, key=lambda f: (_ORDER.get(f.verdict, 9), f.name))


# Journals of several shards as one, and the proof that together they hold every unit of the plan, once.

MERGES = "localtensor merge"


class Gap(BadJournal):
    """Units that no journal holds, or that two hold."""


def merged(paths: Sequence[Path]) -> tuple[Line, list[Line], list[str]]:
    """The first line of the run as a whole, all lines, and what is to be told of lines that were cut.

    Raises `BadJournal` for a file that is no journal or of another run, and `Gap` where a unit is missing or
    stands in two journals, or a suspected rule was not settled.
    """
    found = [(path, read(path, MERGES)) for path in paths]
    first = found[0][1].begin
    common = {name: value for name, value in first.items() if name != "shard"}
    for path, one in found[1:]:
        if problem := unlike(one.begin, common) or _other_plan(first, one.begin):
            raise BadJournal(path, f"it is of another run than {paths[0]}: {problem}", "Merge one run.", MERGES)
    _complete(first, found)
    lines = [line for _, one in found for line in one.lines]
    return {**common, "shard": None}, lines, [one.cut for _, one in found if one.cut]


def _other_plan(first: Line, other: Line) -> str:
    if first["ops"] == other["ops"]:
        return ""
    apart = sorted(set(first["ops"]) ^ set(other["ops"]))
    return f"{len(apart)} overloads are in one plan only ({apart[0]}, say)"


def _complete(begin: Line, found: Sequence[tuple[Path, Read]]) -> None:
    held: dict[Unit, Path] = {}
    for path, one in found:
        for line in of_kind(one.lines, "unit"):
            unit = read_unit(line["unit"])
            if unit in held:
                raise Gap(path, f"{unit} is in {held[unit]} as well", "Name each journal once.", MERGES)
            held[unit] = path
    missing = [unit for unit in plan(begin) if unit not in held]
    if missing:
        shards = _shards(begin, found)
        problem = f"{len(missing)} of {len(plan(begin))} units are in none of the journals ({missing[0]}, say{shards})"
        raise Gap(found[0][0], problem, "Run the other shards, or go on with those by --resume.", MERGES)
    for path, one in found:
        left = sorted(_suspected(one) - {line["rule"] for line in of_kind(one.lines, "settled")})
        if left:
            problem = f"{len(left)} suspected rules were not confirmed yet ({left[0]}, say)"
            raise Gap(path, problem, "Go on with it by --resume.", MERGES)


def _shards(begin: Line, found: Sequence[tuple[Path, Read]]) -> str:
    given = [one.begin["shard"] for _, one in found if one.begin["shard"]]
    if not given:
        return ""
    lacking = sorted(set(range(1, given[0][1] + 1)) - {number for number, _ in given})
    return f"; shard {', '.join(f'{number}/{given[0][1]}' for number in lacking)} is not among them" if lacking else ""


def _suspected(one: Read) -> set[str]:
    names: set[str] = set()
    for line in of_kind(one.lines, "unit"):
        names.update(line.get("suspects", {}))
        names.update(line.get("whole", {}) if one.begin["confirm"] != "none" else {})
    return names


def write(path: Path, begin: Line, lines: Sequence[Line]) -> None:
    """One journal of the whole run.  Raises `OSError`."""

    def rows() -> Iterator[str]:
        for line in (begin, *lines):
            yield json.dumps(line, separators=(",", ":"))

    write_lines(path, rows())


# Every suspected rule before real processes: what goes wrong there too is Unsound, what does not is cleared.


def unconfirmed(suspects: Mapping[str, Sequence[Candidate]]) -> Iterator[Settled]:
    """All of them Suspect, where no confirmation was asked for."""
    said = "not confirmed: --confirm none was asked for"
    for name, (first, *_) in suspects.items():
        reason = f"{first.instance.evidence.reason} ({said})"
        yield Settled(name, of_suspect(first, Verdict.SUSPECT, reason))


class Session:
    """Suspects before a court, those on few ranks first: another number of ranks means other processes.

    `doubted` are rules that the probe found wrong; the others could not be judged by it, so that a real run which
    is right clears them.
    """

    def __init__(self, court: RealRuns, backend: str, seed: int, module: str) -> None:
        self._court, self._backend, self._seed, self._module = court, backend, seed, module

    def settle(self, todo: Mapping[str, Sequence[Candidate]], doubted: set[str]) -> Iterator[Settled]:
        """What became of each rule, as soon as it is known: of the first of its cases that goes wrong, or of the last."""
        left = {name: list(charges) for name, charges in todo.items()}
        last: dict[str, tuple[Candidate, Confirmation]] = {}
        for ranks in sorted({s.instance.ranks for charges in todo.values() for s in charges}):
            for name in list(left):
                here = [s for s in left[name] if s.instance.ranks == ranks]
                for suspect in here:
                    last[name] = suspect, self._heard(suspect)
                    if last[name][1].wrong:
                        break
                left[name] = [s for s in left[name] if s.instance.ranks > ranks]
                if last.get(name) and (last[name][1].wrong or not left[name]):
                    del left[name]
                    yield self._settled(name, *last[name], doubted=name in doubted)

    def _heard(self, suspect: Candidate) -> Confirmation:
        if suspect.program is not None:
            try:
                truth_of(suspect.program)
                held_of(suspect.program)
            except (*REFUSALS, LocalTensorError) as error:  # it was suspected by another version of these rooms
                return Confirmation("", f"no such program: {error}")
            return self._court.confirm_program(suspect.program)
        return _same_refusal(suspect, self._court.confirm(case_of(suspect.instance, self._seed)))

    def _settled(self, name: str, suspect: Candidate, seen: Confirmation, *, doubted: bool) -> Settled:
        sample = suspect.instance.sample
        crash = None
        if seen.failed:
            crash = Crash(sample.op, f"{sample.op}({', '.join(sample.arguments())})", seen.note, seen.failed)
        if seen.wrong:
            return Settled(name, self._unsound(suspect, seen), crash)
        if not doubted:
            return Settled(name, None, crash)
        reason = f"{suspect.instance.evidence.reason} (not confirmed: {seen.note})"
        return Settled(name, of_suspect(suspect, Verdict.SUSPECT, reason), crash)

    def _unsound(self, suspect: Candidate, seen: Confirmation) -> Finding:
        found = of_suspect(suspect, Verdict.UNSOUND, seen.wrong)
        evidence = suspect.instance.evidence
        told = replace(found, confirmed_on=self._backend, got=seen.got or evidence.got, want=seen.want or evidence.want)
        if suspect.program is not None:
            return _shown(suspect.program, told, seen, self._module)
        case = case_of(suspect.instance, self._seed)
        text = script(case, seen.wrong, "{name}", self._module) if usable(case) else ""
        return replace(told, picture=picture(case, seen.heard), script=text)


def _shown(program: Program, told: Finding, seen: Confirmation, module: str) -> Finding:
    truth = truth_of(program)
    text = program_script(program, seen.wrong, "{name}", module, truth) if writable(program) else ""
    return replace(told, picture=program_picture(program, truth, seen.heard), script=text)


def _same_refusal(suspect: Candidate, seen: Confirmation) -> Confirmation:
    """A rule under which every rank raises what the probe saw raised is as wrong as one that gives wrong numbers."""
    if not seen.refused or seen.refused[:80] not in suspect.instance.evidence.reason:
        return seen
    return replace(seen, wrong=f"every rank raises {seen.refused}; the op takes the whole tensors")
