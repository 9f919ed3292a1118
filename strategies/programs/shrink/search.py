"""The search for the smallest program that fails as a large one does, and the smaller candidates of a suspected rule."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from localtensor.layout import is_standard
from strategies.base import shrink as base_shrink
from strategies.base.shrink import Shrunk
from strategies.model.oracle import REJECTIONS
from strategies.model.rule import Program, Rule
from strategies.model.verdict import Instance
from strategies.programs.run.real_run import run_simulated_programs
from strategies.programs.shrink.sizes import STAGES, Stage
from strategies.programs.shrink.still_fails import Inputs, RuleWitness, program_of, still_fails
from strategies.torch_api.user_modules import import_rules
from strategies.validation.finding import Candidate, RuleOutcome, case_of

MAX_TRIES = 200
"""The largest number of programs that are tried for one finding."""


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
    """The candidates of a stage that are no larger, until torch refuses to compute one: some dtypes lack most ops."""
    with contextlib.suppress(*REJECTIONS):
        for candidate in stage(program):
            if element_count(candidate) <= element_count(program):
                yield candidate


MAX_SIMULATED_RUNS = 120
"""The largest number of simulated runs of DTensor for shrinking one program."""
MAX_SMALLER = 4
"""The largest number of smaller candidates that are returned beside the given ones."""


@dataclass(frozen=True, slots=True)
class ShrinkTask:
    """The candidate findings about one rule, the smallest first; `judged` if the probe found them wrong."""

    name: str
    suspects: tuple[Candidate, ...]
    judged: bool
    seed: int
    home: tuple[str, str] = ("", "")


def smaller_candidates(doubt: ShrinkTask, note: Callable[[int], None]) -> tuple[Candidate, ...]:
    """All candidates to confirm on real processes, the smallest first, the given ones last."""
    import_rules(*doubt.home)
    note(0)
    return (*_smaller(doubt), *doubt.suspects)


def _smaller(doubt: ShrinkTask) -> Iterator[Candidate]:
    first = doubt.suspects[0]
    if first.program is not None:
        for program in _smaller_programs(first.program, first.instance.evidence.reason):
            rule = Rule(program.sample.op, tuple(placements[-1] for placements in program.inputs), ())
            instance = replace(first.instance, rule=rule, ranks=program.ranks, sample=program.sample)
            yield Candidate(instance, program)
    elif doubt.judged:
        yield from map(Candidate, smaller_instances(first.instance, doubt.seed))
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
    """Smaller programs whose simulated run is wrong for this reason, by default for that of `start`."""

    def why(program: Program) -> str:
        return run_simulated_programs([program])[0].wrong

    reason = reason or why(start)
    if not reason:
        return []
    return shrink(start, still_fails(why, reason, inputs=inputs), budget=MAX_SIMULATED_RUNS).to_try(MAX_SMALLER)


def merge_equal(
    tried: Mapping[str, Sequence[Candidate]], rules: set[str]
) -> tuple[dict[str, Sequence[Candidate]], list[RuleOutcome]]:
    """The candidates to confirm, and those that are settled as the same as another finding.

    Of programs that shrank to the same one only the first is confirmed.  One that shrank to one op on one axis is the
    same as a suspected rule of that op with those inputs, if there is one among `rules`.
    """
    left: dict[str, Sequence[Candidate]] = {}
    first: dict[str, str] = {}
    same: list[RuleOutcome] = []
    for name, found in tried.items():
        smallest = found[0]
        rule = rule_prefix(smallest)
        other = next((r for r in sorted(rules) if rule and r.startswith(rule)), "") or first.get(smallest.name, "")
        if other and smallest.program is not None:
            same.append(RuleOutcome(name, None, same_as=other))
            continue
        first[smallest.name] = name
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
