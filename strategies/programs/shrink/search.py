"""The search for the smallest program that fails as a large one does, and the smaller candidates of a suspected rule.

A failure has a kind: wrong values of an output, a wrong shape, a rank that raises.  A smaller program must fail in the
same kind, by the probe of a rule or by the reason of a run, or shrinking would change from one bug to another.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.distributed.tensor import Partial, Replicate
from torch.distributed.tensor.placement_types import Placement

from localtensor.layout import MAX_JUMP_SHARE, all_finite, is_standard
from strategies.base import shrink as base_shrink
from strategies.base.shrink import Shrunk
from strategies.model.kernels import REJECTIONS, kernels_on, run_call
from strategies.model.oracle import OracleResult, mutates, resizes_out, run_oracle
from strategies.model.rule import Claim, Program, Rule, Sample, flat_results, out_leaves
from strategies.model.verdict import Evidence, Instance, Verdict
from strategies.programs.run.real_run import run_simulated_programs
from strategies.programs.shrink.sizes import STAGES, Stage, unevenness
from strategies.torch_api import dtensor
from strategies.torch_api.code_places import no_return_place, refusal_text, without_numbers
from strategies.torch_api.rank_runs import shared_worlds
from strategies.torch_api.user_modules import import_rules
from strategies.validation.finding import Candidate, case_of
from strategies.validation.probe import Case, Probe
from strategies.validation.sources.dtensor import claims

MAX_TRIES = 200
"""The largest number of programs that are tried for one finding."""
MAX_SIMULATED_RUNS = 120
"""The largest number of simulated runs of DTensor for shrinking one program."""
MAX_SMALLER = 4
"""The largest number of smaller candidates that are returned beside the given ones."""
MESSAGE_CHARACTERS = 32
"""The number of characters by which error messages are compared."""
Inputs = tuple[tuple[Placement, ...], ...]
"""The placements of each tensor of a call, axis by axis."""
ClaimSource = Callable[[Sample, int, Any, "dtensor.PropagatorQuery | None"], Sequence[Claim]]
"""A function that returns the claims about a sample on so many ranks, as `sources.dtensor.claims`."""


@dataclass(frozen=True, slots=True)
class ShrinkTask:
    """The candidate findings about one rule, the smallest first; `judged` if the probe found them wrong."""

    name: str
    suspects: tuple[Candidate, ...]
    judged: bool
    seed: int
    home: tuple[str, str] = ("", "")
    device: str = "cpu"


def smaller_candidates(doubt: ShrinkTask, note: Callable[[int], None]) -> tuple[Candidate, ...]:
    """All candidates to confirm on real processes, the smallest first, the given ones last."""
    if doubt.home[0]:
        import_rules(*doubt.home)
    note(0)
    with shared_worlds():
        return (*_smaller(doubt), *doubt.suspects)


def _smaller(doubt: ShrinkTask) -> Iterator[Candidate]:
    first = doubt.suspects[0]
    if first.program is not None:
        for program in _smaller_programs(first.program, first.instance.evidence.reason):
            rule = Rule(program.sample.op, tuple(placements[-1] for placements in program.inputs), ())
            instance = replace(first.instance, rule=rule, ranks=program.ranks, sample=program.sample)
            yield Candidate(instance, program)
    elif doubt.judged:
        with kernels_on(doubt.device):
            smaller = smaller_instances(first.instance, doubt.seed)
        yield from map(Candidate, smaller)
    else:
        yield from _smaller_whole_claims(first, doubt.seed)


def smaller_instances(instance: Instance, seed: int = 0, *, budget: int = MAX_TRIES) -> list[Instance]:
    """Smaller instances of the same rule that the probe finds wrong in the same way, the smallest first.

    There may be several, since DTensor's own run may clear a small case that the probe finds wrong, and confirm a
    larger one.  There is none if the probe does not find this one wrong.
    """
    witness = RuleWitness(instance, case_of(instance, seed), seed=seed)
    tries = shrink(witness.start, witness, budget=budget).to_try(MAX_SMALLER)
    return [smaller for program in tries if (smaller := witness.failing_instance(program)) is not None]


def _smaller_whole_claims(first: Candidate, seed: int) -> Iterator[Candidate]:
    """Smaller candidates for a claim that only a run of DTensor can check, if a simulated run finds it wrong."""
    instance = first.instance
    inputs = tuple((p,) for p in instance.rule.inputs if p is not None and is_standard(p))
    if len(inputs) < len(instance.rule.inputs):
        return
    start = program_of(case_of(instance, seed), instance.evidence.draw, seed)
    for program in _smaller_programs(start, "", inputs):
        yield Candidate(replace(instance, ranks=program.ranks, sample=program.sample))


def _smaller_programs(start: Program, reason: str, inputs: Inputs | None = None) -> list[Program]:
    """Smaller programs whose simulated run is wrong or refused for this reason, by default for that of `start`.

    A refusal counts by its message alone at first: DTensor raises an error of a rule again as a RuntimeError.
    """

    def why(program: Program) -> str:
        found = run_simulated_programs([program])[0]
        return found.wrong or (refusal_text(found.refused) if found.refused else "")

    now = why(start)
    if not now or (reason and _said(now) != _said(reason) and not same_kind(reason, now)):
        return []
    shows = still_fails(lambda program: now if program is start else why(program), now, inputs=inputs)
    return shrink(start, shows, budget=MAX_SIMULATED_RUNS).to_try(MAX_SMALLER)


def _said(reason: str) -> str:
    """What a refusal says, without the class of the error."""
    return re.sub(r"^every rank raises \w+: ", "", reason)


def element_count(program: Program) -> int:
    """How many elements the program's tensors have."""
    return program.sample.size


def shrink(
    start: Program,
    shows: Callable[[Program], bool],
    *,
    budget: int = MAX_TRIES,
    stages: Sequence[tuple[str, Stage]] = STAGES,
) -> Shrunk[Program]:
    """The smallest program found that `shows` accepts; it must reject programs whose op refuses its arguments."""
    usable = [(name, functools.partial(_candidates, stage)) for name, stage in stages]
    return base_shrink.shrink(start, shows, budget=budget, stages=usable)


def _candidates(stage: Stage, program: Program) -> Iterator[Program]:
    """The candidates of a stage that are no larger and no less even, until torch refuses to compute one: some dtypes lack most ops."""
    elements, uneven = element_count(program), unevenness(program)
    with contextlib.suppress(*REJECTIONS):
        for candidate in fitting_out(program, stage(program)):
            if element_count(candidate) <= elements and unevenness(candidate) <= uneven:
                yield candidate


def fitting_out(program: Program, candidates: Iterable[Program]) -> Iterator[Program]:
    """The candidates without those for which torch resizes an `out=` tensor, which it does not for the program."""
    resizes = bool(out_leaves(program.sample.call)) and resizes_out(program.sample)
    for candidate in candidates:
        if resizes or not out_leaves(candidate.sample.call) or not resizes_out(candidate.sample):
            yield candidate


@dataclass(frozen=True, slots=True)
class FailureKind:
    """The kind of a failure: `what` happens, to which output, and whether NaN or infinity is involved."""

    what: str
    output: str = ""
    wild: bool = False


def failure_kind(reason: str) -> FailureKind:
    """The kind of a failure from its reason in words, of the probe or of a real run.

    >>> failure_kind("output 1 as R: rank 0 makes 3 at [0], the op gives 2 (1 of 2 elements differ)").output
    '1'
    """
    who_raises = r"\b(?:(ranks?|every rank) [\d, ]*raises?|on every rank:)"
    raised = re.search(rf"{who_raises} (\w+): (.*?)(; its peers|; the op takes|$)", reason)
    if raised:
        who = "a rank" if (raised[1] or "").startswith("rank") else "every rank"
        return FailureKind(f"{who} raises {raised[2]}: {without_numbers(raised[3])[:MESSAGE_CHARACTERS]}")
    if stays := no_return_place(reason):
        return FailureKind(f"no rank returns from {stays.name}")
    if ended := re.search(r"^hangs: |\bdies \(", reason):
        return FailureKind(ended[0].strip(" :("))
    output = (re.search(r"output (\d+)", reason) or ("", ""))[1]
    if re.search(r"(has|holds) shape|^shape |: shape ", reason):
        return FailureKind("shape", output)
    if re.search(r"torch\.\w+, (not|expected) torch\.\w+", reason):
        return FailureKind("dtype", output)
    numbers = re.search(r"makes? (\S+) at \[.*?\], the op gives (\S+)|got (\S+), expected (\S+)", reason)
    return FailureKind("values", output, bool(numbers and re.search("nan|inf", numbers[0])))


def same_kind(before: str, now: str) -> bool:
    """Whether two reasons are of the same kind; NaN and infinity may disappear, but not appear."""
    was, is_ = failure_kind(before), failure_kind(now)
    return (was.what, was.output) == (is_.what, is_.output) and (was.wild or not is_.wild)


def still_fails(
    why: Callable[[Program], str], reason: str, *, inputs: Inputs | None = None
) -> Callable[[Program], bool]:
    """A predicate for programs that still fail for a reason of the same kind as this one.

    `why` returns the reason why a program is wrong, or "".  The op must take the whole tensors, and no result may be empty.
    `inputs` are the placements that a program must have, for a finding about a rule.
    """

    def shows(program: Program) -> bool:
        if inputs is not None and program.inputs != inputs:
            return False
        try:
            oracle = run_oracle(program.sample, seed=program.seed)
            if oracle.unstable > MAX_JUMP_SHARE or _empty(oracle):
                return False
        except REJECTIONS:
            return False
        now = why(program)
        return bool(now) and same_kind(reason, now)

    return shows


class RuleWitness:
    """A predicate for programs that still show, by the probe, that one rule for one axis is wrong.

    `seed` is the probe's.  `source` returns the claims.  A program does not show it if it has other input placements, if
    the op refuses it, if the rule is not claimed for it, or if it is wrong in another way.
    """

    def __init__(self, instance: Instance, case: Case, *, seed: int = 0, source: ClaimSource = claims) -> None:
        self.rule, self.source_name, self.seed, self._source = instance.rule, instance.source, seed, source
        self.start = program_of(case, instance.evidence.draw, seed)
        self._questions: dict[str, dtensor.PropagatorQuery] = {}
        self._claimed: dict[str, Claim | None] = {}
        if instance.source == "decomposition":  # it rewrites no call, and another query would cost a trace
            self._claimed[_key(self.start, case.oracle)] = Claim(instance.rule, instance.source)
        self._rewritten = True
        self._reason = ""
        self._empty = _empty(case.oracle)
        found = self._found(self.start)
        if found is not None:
            self._rewritten = found[0].local is not None
            self._reason = found[1].reason

    def __call__(self, program: Program) -> bool:
        return bool(self._reason) and self._found(program) is not None

    def failing_instance(self, program: Program) -> Instance | None:
        """The program as an instance of the rule with its evidence, or None if it shows nothing."""
        found = self._found(program)
        if found is None:
            return None
        own = replace(found[1], variant="")  # the sample already has the variant's values
        return Instance(self.rule, program.ranks, program.sample, Verdict.UNSOUND, self.source_name, own)

    def _found(self, program: Program) -> tuple[Claim, Evidence] | None:
        if program.inputs != self.start.inputs or program.then:
            return None
        try:
            oracle = run_oracle(program.sample, seed=self.seed)
            if oracle.unstable > MAX_JUMP_SHARE or _empty(oracle) > self._empty:
                return None
            return self._probed(program, oracle)
        except (*REJECTIONS, AttributeError):  # DTensor's own rule may raise, too: then it has no claim
            return None

    def _probed(self, program: Program, oracle: OracleResult) -> tuple[Claim, Evidence] | None:
        wild = not all(map(all_finite, program.sample.tensors))
        probe = Probe(program.sample, oracle, program.ranks, seed=self.seed, variant="specials" if wild else "")
        if not self._rewritten and self._wrong(probe, Claim(self.rule, self.source_name)) is None:
            return None  # cheaper than a query whether DTensor claims it
        claim = self._claim(program, oracle)
        if claim is None or claim.whole:
            return None
        evidence = self._wrong(probe, claim)
        return None if evidence is None else (claim, evidence)

    def _wrong(self, probe: Probe, claim: Claim) -> Evidence | None:
        evidence = probe.judge(claim)
        if evidence is None:
            return None
        if _every_rank_raises(probe, claim, evidence):
            evidence = replace(evidence, reason=re.sub(r"^rank \d+", "every rank", evidence.reason))
        return evidence if not self._reason or same_kind(self._reason, evidence.reason) else None

    def _claim(self, program: Program, oracle: OracleResult) -> Claim | None:
        """The claim of the rule for this program, if there is one; queried once for the same shapes and scalars."""
        key = _key(program, oracle)
        if key not in self._claimed:
            alone = _key(replace(program, mesh=(1,)), oracle)
            if alone not in self._questions:
                self._questions[alone] = dtensor.PropagatorQuery(program.sample, 1, oracle.raw)
                self._questions[alone].partials = any(isinstance(p, Partial) for p in self.rule.inputs)
            found = self._source(program.sample, program.ranks, oracle.raw, self._questions[alone])
            self._claimed[key] = next((claim for claim in found if claim.rule == self.rule), None)
        return self._claimed[key]


def _key(program: Program, oracle: OracleResult) -> str:
    """All that a claim may depend on: scalars, and the shapes, strides and dtypes of tensors and results."""
    metas = [(tuple(x.shape), x.stride(), x.dtype) for x in flat_results(oracle.raw) if isinstance(x, Tensor)]
    strides = [x.stride() for x in program.sample.tensors]
    return repr((program.mesh, program.sample.arguments(), strides, metas))


def program_of(case: Case, draw: int, seed: int) -> Program:
    """The case of a rule for one axis as a program with the same values."""
    sample = Sample(case.sample.call, case.oracle.inputs, case.sample.origin)
    return Program(sample, (case.ranks,), tuple((p or Replicate(),) for p in case.rule.inputs), seed=seed, draw=draw)


def _empty(oracle: OracleResult) -> int:
    """The number of results without elements."""
    return sum(isinstance(x, Tensor) and not x.numel() for x in oracle.outputs)


def _every_rank_raises(probe: Probe, claim: Claim, evidence: Evidence) -> bool:
    if not re.match(r"rank \d+ raises", evidence.reason):
        return False
    for rank in range(probe.ranks):
        call = claim.local[rank] if claim.local else probe.sample.call
        pieces = [probe.held(i, p, evidence.draw)[rank] for i, p in enumerate(claim.rule.inputs)]
        try:
            run_call(call, pieces, mutates=mutates(call.op))
        except REJECTIONS:
            continue
        return False
    return True
