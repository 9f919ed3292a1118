"""Confirmation of suspected rules on real processes: by DTensor itself, or by the scripts of another source of claims.

A claim of another source is called Unsound only where its script, which imports torch and the source's own package alone, shows the
wrong number on real processes.  The samples of such a source are here, too.
"""

from __future__ import annotations

import contextlib
import contextvars
import fnmatch
import io
import math
import shlex
import threading
import traceback
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Any

import torch

from localtensor._util import pickling
from localtensor.errors import LocalTensorError, error_in_one_line
from strategies.base.progress import Progress
from strategies.base.time_limit import DoesNotReturn
from strategies.inputs.gathering import CapturedSamples, SamplesByOp
from strategies.model import codec
from strategies.model.kernels import REJECTIONS, kernels_on
from strategies.model.rule import Program, Rule, Sample
from strategies.model.settings import BadSetting, BadSource, Settings, UnknownOp
from strategies.model.verdict import Crash, Finding, Verdict
from strategies.programs.run.program_oracle import oracle_of_program
from strategies.programs.run.real_run import ProgramRealRuns, RulesModule
from strategies.programs.run.step_functions import local_inputs_of
from strategies.programs.run.verdict import (
    Confirmation,
    local_refusal,
    meta_difference,
    program_rank_diagram,
    rank_diagram,
    with_refusal,
)
from strategies.programs.script import case_script, is_writable_case, is_writable_program, program_script
from strategies.torch_api.code_places import no_return_error, rule_limit
from strategies.torch_api.rank_runs import RankProcesses, first_rank_failure, returned_values
from strategies.validation.finding import Candidate, RuleOutcome, case_of, case_text, finding_of_candidate, repeated
from strategies.validation.overload import SOURCE_SECONDS
from strategies.validation.probe import Case
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
    samples: SamplesByOp = {op: (found, "") for op, found in by_op.items()}
    for packet, label in labels.items():
        if not settings.patterns and f"{packet}.default" not in samples:
            samples[f"{packet}.default"] = ((), source.without(label))
    return CapturedSamples(dict(sorted(samples.items())), (), refused)


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


def merge_equal(
    tried: Mapping[str, Sequence[Candidate]], rules: set[str]
) -> tuple[dict[str, Sequence[Candidate]], list[RuleOutcome]]:
    """The candidates to confirm, and those that are settled as the same as another finding.

    Of programs that shrank to the same one only the first is confirmed.  One that shrank to one op on one axis is the same
    as a suspected rule of that op with those inputs, if there is one among `rules`.
    """
    left: dict[str, Sequence[Candidate]] = {}
    first: dict[str, str] = {}
    same: list[RuleOutcome] = []
    for name, found in tried.items():
        smallest = found[0]
        rule = rule_prefix(smallest)
        other = next((r for r in sorted(rules) if rule and r.startswith(rule)), "") or first.get(smallest.key, "")
        if other and smallest.program is not None:
            same.append(RuleOutcome(name, None, same_as=other))
            continue
        first[smallest.key] = name
        left[name] = found
    return left, same


def rule_prefix(suspect: Candidate) -> str:
    """The prefix of the names of an op's own rules, if a program has shrunk to that op on one axis; else empty.

    Such a fault is reported as that rule's.
    """
    program = suspect.program
    if program is None or program.then or program.flattened or len(program.mesh) > 1:
        return ""
    return str(Rule(program.sample.op, suspect.instance.rule.inputs, ()))


def leave_unconfirmed(suspects: Mapping[str, Sequence[Candidate]]) -> Iterator[RuleOutcome]:
    """The outcome of each rule under --confirm none: all of them stay Suspect."""
    for name, (first, *_) in suspects.items():
        reason = f"{first.instance.evidence.reason} (not confirmed: --confirm none was asked for)"
        yield RuleOutcome(name, finding_of_candidate(first, Verdict.SUSPECT, reason))


NOT_MADE = (*REJECTIONS, LocalTensorError, AttributeError)
"""What `made_here` raises on the case of a journal that is none here: unknown ops, and calls that plain torch does not take."""


def made_here(candidate: Candidate, seed: int) -> Case | Program:
    """The case or the program of a candidate, which may come from a file.  Raises one of `NOT_MADE`."""
    if candidate.program is None:
        return case_of(candidate.instance, seed)
    oracle_of_program(candidate.program)
    local_inputs_of(candidate.program)
    return candidate.program


def check_case(candidate: Candidate, seed: int, device: str) -> None:
    """Raises `BadSetting` for a case of `--case` that is none here."""
    try:
        with kernels_on(device):
            made_here(candidate, seed)
    except NOT_MADE as error:
        problem = f"there is no such case under this torch and these rules ({error_in_one_line(error, 90)})"
        remedy = "Copy the whole command that stands beside the finding, under the same version."
        raise BadSetting("--case", candidate.name, problem, remedy) from None


LANES = 2
"""Rules that are run on real processes at one time: with one, both cores are idle while its ranks wait for each other."""


@contextlib.contextmanager
def real_confirmation(settings: Settings, home: RulesModule) -> Iterator[RealConfirmation]:
    """The processes that confirm what a sweep suspects; rules that would share a GPU are run one at a time."""
    count = LANES if (settings.device, settings.confirm) == ("cpu", "gloo") else 1
    made = [ProgramRealRuns(settings.confirm, settings.device, home) for _ in range(count)]
    with contextlib.ExitStack() as stack:
        lanes = [stack.enter_context(one) for one in made]
        yield RealConfirmation(lanes, settings.confirm, settings.seed, home[0])


class RealConfirmation:
    """Confirms candidates on real processes, in order of their ranks: another number of ranks needs other processes.

    A rule that is wrong there too is Unsound, one for which every rank raises in fresh processes is Refused.  A rule that is right
    there is cleared, if the probe could not judge it.

    Each of `lanes` runs every so many-th rule on processes of its own, in a thread, so that the processor has work while ranks wait
    for each other or for their end.  Threads take turns: one at a time computes here, and only real runs go on beside it.
    """

    def __init__(self, lanes: Sequence[ProgramRealRuns], backend: str, seed: int, rules: str) -> None:
        self._lanes, self._backend, self._seed, self._rules = lanes, backend, seed, rules
        self._turn = threading.Lock()
        for lane in lanes:
            lane.turn = self._turn
        self.note: Callable[[str], None] = lambda name: None  # is called with the rule that is run next

    def settle(self, todo: Mapping[str, Sequence[Candidate]], suspected: set[str]) -> Generator[RuleOutcome]:
        """The outcome of each rule as soon as it is known, by the first of its cases that goes wrong, or by the last.

        `suspected` are the rules that the probe found wrong; it could not judge the others.
        """
        left = {name: list(candidates) for name, candidates in todo.items()}
        last: dict[str, tuple[Candidate, Confirmation]] = {}
        for ranks in sorted({s.instance.ranks for candidates in todo.values() for s in candidates}):
            here = {name: [s for s in found if s.instance.ranks == ranks] for name, found in left.items()}
            with contextlib.closing(self._tried(here, suspected)) as found:
                for name, tried in found:
                    left[name] = [s for s in left[name] if s.instance.ranks > ranks]
                    if tried is not None:
                        last[name] = tried
                    if name in last and (last[name][1].wrong or not left[name]):
                        del left[name]
                        with self._turn:
                            result = self._result(name, *last[name], suspected=name in suspected)
                        yield result

    def _tried(
        self, todo: Mapping[str, Sequence[Candidate]], suspected: set[str]
    ) -> Generator[tuple[str, tuple[Candidate, Confirmation] | None]]:
        """For each rule, in their order, the first candidate that goes wrong, or the last, and what real processes make of it."""
        threads = [
            ThreadPoolExecutor(1, "confirmation", torch.set_num_threads, (torch.get_num_threads(),))
            for _ in self._lanes
        ]
        tasks: dict[str, Future[tuple[Candidate, Confirmation] | None]] = {}
        try:
            for number, (name, found) in enumerate(todo.items()):
                lane = number % len(self._lanes)  # always the same one: DTensor keeps something from call to call
                run, mine = contextvars.copy_context().run, self._lanes[lane]
                tasks[name] = threads[lane].submit(run, self._first_wrong, mine, name, found, name in suspected)
            for name, task in tasks.items():
                yield name, task.result()
        except BaseException:  # why: whatever it is, Ctrl-C too, no real run goes on; it is raised again
            for task in tasks.values():
                task.cancel()
            while wait(tasks.values(), timeout=0.1).not_done:
                for real_runs in self._lanes:
                    real_runs.stop()
            raise
        finally:
            for thread in threads:
                thread.shutdown()

    def _first_wrong(
        self, lane: ProgramRealRuns, name: str, candidates: Sequence[Candidate], suspected: bool
    ) -> tuple[Candidate, Confirmation] | None:
        found = None
        with self._turn:
            self.note(name)
            for candidate in candidates:
                found = self._confirmed(lane, candidate, suspected)
                if found[1].wrong:
                    break
        return found

    def _confirmed(
        self, lane: ProgramRealRuns, candidate: Candidate, suspected: bool
    ) -> tuple[Candidate, Confirmation]:
        """The candidate and what real processes make of it; if only a second call raises there, the program of both."""
        outcome = with_refusal(candidate, self._run_for_real(lane, candidate), suspected)
        if outcome.after_others and (twice := repeated(candidate)) is not None:
            again = with_refusal(twice, self._run_for_real(lane, twice), True)
            if again.refused:
                return twice, again
        return candidate, outcome

    def _run_for_real(self, lane: ProgramRealRuns, candidate: Candidate) -> Confirmation:
        reason = candidate.instance.evidence.reason
        try:
            made = made_here(candidate, self._seed)
        except NOT_MADE as error:
            if candidate.program is not None:  # the journal was written by another version of this tool
                return Confirmation("", f"no such program: {error}")
            return Confirmation("", f"no such case: {error_in_one_line(error)}", failed=traceback.format_exc())
        if isinstance(made, Program):
            return lane.confirm_program(made, expected=reason)
        return lane.confirm(made, expected=reason)

    def _result(self, name: str, candidate: Candidate, outcome: Confirmation, *, suspected: bool) -> RuleOutcome:
        sample = candidate.instance.sample
        op, call = sample.op, f"{sample.op}({', '.join(sample.arguments())})"
        try:
            found = self._finding(candidate, outcome, suspected)
        except Exception as error:  # why: hours of work must not end with one case; it is listed with its traceback
            return RuleOutcome(name, None, Crash(op, call, f"{type(error).__name__}: {error}", traceback.format_exc()))
        return RuleOutcome(name, found, Crash(op, call, outcome.note, outcome.failed) if outcome.failed else None)

    def _finding(self, candidate: Candidate, outcome: Confirmation, suspected: bool) -> Finding | None:
        if outcome.wrong:
            return self._fault(candidate, outcome)
        if not suspected or candidate.instance.verdict is Verdict.REFUSED:
            return None
        why = f"{candidate.instance.evidence.reason} (not confirmed: {outcome.note})"
        return finding_of_candidate(candidate, Verdict.SUSPECT, why)

    def _fault(self, candidate: Candidate, outcome: Confirmation) -> Finding:
        verdict = Verdict.REFUSED if outcome.refused else Verdict.UNSOUND
        reason = outcome.wrong + meta_difference(candidate.instance.sample)
        found = finding_of_candidate(candidate, verdict, reason)
        evidence = candidate.instance.evidence
        got, want = outcome.got or evidence.got, outcome.want or evidence.want
        command = self._command(candidate)
        confirmed = replace(found, confirmed_on=self._backend, got=got, want=want, command=command)
        program, text = candidate.program, ""
        if program is not None:
            oracle = oracle_of_program(program)
            if is_writable_program(program):
                text = program_script(program, outcome.wrong, "{name}", self._rules, oracle)
            return replace(confirmed, picture=program_rank_diagram(program, oracle, outcome.rank_results), script=text)
        case = case_of(candidate.instance, self._seed)
        text = case_script(case, outcome.wrong, "{name}", self._rules) if is_writable_case(case) else ""
        reason += local_refusal(case) if " raises " in outcome.wrong else ""
        return replace(confirmed, reason=reason, picture=rank_diagram(case, outcome.rank_results), script=text)

    def _command(self, candidate: Candidate) -> str:
        how = f" --rules {shlex.quote(self._rules)}" if self._rules else ""
        how += f" --confirm {self._backend}" if self._backend != "gloo" else ""
        try:
            return f"localtensor validate{how} --case {case_text(candidate, self._seed)}"
        except codec.NotEncodable:
            return ""
