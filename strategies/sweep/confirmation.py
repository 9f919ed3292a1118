"""Every suspected rule before real processes: what goes wrong there too is Unsound, what does not is cleared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from localtensor.errors import LocalTensorError
from strategies.model.oracle import REFUSALS
from strategies.model.rule import Program
from strategies.model.verdict import Crash, Finding, Verdict
from strategies.programs.repro.script import program_script, script, usable, writable
from strategies.programs.run.local_inputs import held_of
from strategies.programs.run.program_oracle import truth_of
from strategies.programs.run.real_run import RealRuns
from strategies.programs.run.verdict import Confirmation, picture, program_picture
from strategies.validation.finding import Candidate, Settled, case_of, of_suspect


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
