"""The smallest program that still shows what a large one showed, and what it makes of a suspected rule."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from localtensor.layout import is_plain
from strategies.base import shrink as base_shrink
from strategies.base.shrink import Shrunk
from strategies.model.oracle import REFUSALS
from strategies.model.rule import Program, Rule
from strategies.model.verdict import Instance
from strategies.programs.run.real_run import play_all
from strategies.programs.shrink.sizes import STAGES, Stage
from strategies.programs.shrink.still_fails import Inputs, Witness, program_of, still
from strategies.torch_api.user_modules import at_home
from strategies.validation.finding import Candidate, Settled, case_of

BUDGET = 200
"""Candidates that one finding may cost."""


def elements(program: Program) -> int:
    """How many numbers the program's tensors hold."""
    return program.sample.size


def shrink(
    start: Program,
    shows: Callable[[Program], bool],
    *,
    budget: int = BUDGET,
    stages: Sequence[tuple[str, Stage]] = STAGES,
) -> Shrunk[Program]:
    """The smallest program found that `shows` says yes to, of which it must say no to what the op itself refuses."""
    usable = [(name, functools.partial(_candidates, stage)) for name, stage in stages]
    return base_shrink.shrink(start, shows, budget=budget, stages=usable)


def _candidates(stage: Stage, program: Program) -> Iterator[Program]:
    """Those that are no larger, as far as the stage gets: there are dtypes that torch can hardly compute with."""
    with contextlib.suppress(*REFUSALS):
        for candidate in stage(program):
            if elements(candidate) <= elements(program):
                yield candidate


# What a worker makes of one suspected rule before it goes to real processes: the same, as small as it still shows.

PLAYED = 120
"""Programs that may be played to shrink one: each is a run of DTensor."""
MOST = 4
"""Smaller ones that are offered beside what was given."""


@dataclass(frozen=True, slots=True)
class Doubt:
    """One rule's suspects, the smallest first; `judged` says that the probe itself found them wrong."""

    name: str
    suspects: tuple[Candidate, ...]
    judged: bool
    seed: int
    home: tuple[str, str] = ("", "")


def shrunk(doubt: Doubt, note: Callable[[int], None]) -> tuple[Candidate, ...]:
    """All that there is to try for real, the smallest first, those that were given last."""
    at_home(*doubt.home)
    note(0)
    return (*_smaller(doubt), *doubt.suspects)


def _smaller(doubt: Doubt) -> Iterator[Candidate]:
    first = doubt.suspects[0]
    if first.program is not None:
        for program in _played(first.program, first.instance.evidence.reason):
            yield _of(first, program)
    elif doubt.judged:
        yield from map(Candidate, smaller_instances(first.instance, doubt.seed))
    else:
        yield from _whole(first, doubt.seed)


def smaller_instances(instance: Instance, seed: int = 0, *, budget: int = BUDGET) -> list[Instance]:
    """Instances of the same rule that the probe finds wrong in the same way, the smallest first, all smaller than this.

    More than one, since DTensor's own run may clear a small case that the probe finds wrong, and confirm a larger one.
    There is none where the probe does not find this one wrong.
    """
    witness = Witness(instance, case_of(instance, seed), seed=seed)
    tries = shrink(witness.start, witness, budget=budget).to_try(MOST)
    return [charge for program in tries if (charge := witness.charge(program)) is not None]


def _whole(first: Candidate, seed: int) -> Iterator[Candidate]:
    """A claim of which only a run says whether it is wrong: smaller ones, if a simulated run says so."""
    instance = first.instance
    inputs = tuple((p,) for p in instance.rule.inputs if p is not None and is_plain(p))
    if len(inputs) < len(instance.rule.inputs):
        return
    start = program_of(case_of(instance, seed), instance.evidence.draw, seed)
    for program in _played(start, "", inputs):
        yield Candidate(replace(instance, ranks=program.ranks, sample=program.sample))


def _played(start: Program, reason: str, inputs: Inputs | None = None) -> list[Program]:
    def why(program: Program) -> str:
        return play_all([program])[0].wrong

    reason = reason or why(start)
    if not reason:
        return []
    return shrink(start, still(why, reason, inputs=inputs), budget=PLAYED).to_try(MOST)


def _of(first: Candidate, program: Program) -> Candidate:
    rule = Rule(program.sample.op, tuple(placements[-1] for placements in program.inputs), ())
    instance = replace(first.instance, rule=rule, ranks=program.ranks, sample=program.sample)
    return Candidate(instance, program)


def regrouped(
    tried: Mapping[str, Sequence[Candidate]], rules: set[str]
) -> tuple[dict[str, Sequence[Candidate]], list[Settled]]:
    """Programs that shrank to the same one are tried once; those that shrank to one op on one axis not at all, if
    a rule for that op and those inputs is suspected itself.  The others are settled as the same as that."""
    left: dict[str, Sequence[Candidate]] = {}
    first: dict[str, str] = {}
    same: list[Settled] = []
    for name, found in tried.items():
        smallest = found[0]
        rule = plain_rule(smallest)
        other = next((r for r in sorted(rules) if rule and r.startswith(rule)), "") or first.get(smallest.name, "")
        if other and smallest.program is not None:
            same.append(Settled(name, None, same_as=other))
            continue
        first[smallest.name] = name
        left[name] = found
    return left, same


def plain_rule(suspect: Candidate) -> str:
    """Where a program has shrunk to one op on one axis: the beginning of the names of that op's own rules.

    Such a fault is that rule's, and is reported there.  Empty for all others.
    """
    program = suspect.program
    if program is None or program.then or program.flattened or len(program.mesh) > 1:
        return ""
    return str(Rule(program.sample.op, suspect.instance.rule.inputs, ()))
