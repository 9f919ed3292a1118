"""The smallest program that still shows what a large one showed: greedy, in a fixed order, to a fixpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from localtensor._util import pickling as wire
from strategies.model.oracle import REFUSALS
from strategies.model.program import Program
from strategies.programs.shrink.ranks_and_dims import STAGES, Stage

BUDGET = 200
"""Candidates that one finding may cost."""


@dataclass(frozen=True, slots=True)
class Shrunk:
    """What is left of a program, how many candidates it took, and the way there.

    `steps` are the programs that still showed, each smaller than the one before; the last is `program`,
    and there are none where nothing smaller showed.  `stages` names the stage that made each.
    """

    program: Program
    tried: int
    steps: tuple[Program, ...] = ()
    stages: tuple[str, ...] = ()

    def to_try(self, most: int = 4) -> list[Program]:
        """The smallest first, then what each earlier stage had come to: what to fall back on where a dearer
        witness does not agree about the smallest."""
        last = {f"{stage} {i}": step for i, (stage, step) in enumerate(zip(self.stages, self.steps, strict=True))
                if i + 1 == len(self.steps) or self.stages[i + 1] != stage}  # fmt: skip
        return list(reversed(last.values()))[:most]


def elements(program: Program) -> int:
    """How many numbers the program's tensors hold."""
    return program.sample.size


def shrink(
    start: Program,
    shows: Callable[[Program], bool],
    *,
    budget: int = BUDGET,
    stages: Sequence[tuple[str, Stage]] = STAGES,
) -> Shrunk:
    """The smallest program found that `shows` says yes to, after at most `budget` questions.

    `shows` must say no to what the op itself refuses.  Where it says no to the start, the start comes back with
    no steps.  The stages are gone through in their order, again and again until none of them helps.
    """
    search = _Search(shows, budget)
    if not search.ask(start):
        return Shrunk(start, search.tried)
    now, steps, names = start, [], []
    moved = True
    while moved and search.left:
        moved = False
        for name, stage in stages:
            while (found := search.first(now, stage)) is not None:
                now, moved = found, True
                steps.append(found)
                names.append(name)
    return Shrunk(now, search.tried, tuple(steps), tuple(names))


class _Search:
    """Asks about each program once, as long as the budget lasts."""

    def __init__(self, shows: Callable[[Program], bool], budget: int) -> None:
        self.shows, self.budget, self.tried = shows, budget, 0
        self._asked: set[bytes] = set()

    @property
    def left(self) -> bool:
        return self.tried < self.budget

    def ask(self, program: Program) -> bool:
        key = wire.dumps(program)
        if key in self._asked or not self.left:
            return False
        self._asked.add(key)
        self.tried += 1
        return self.shows(program)

    def first(self, program: Program, stage: Stage) -> Program | None:
        """The first candidate of that stage which is no larger and shows."""
        for candidate in _candidates(stage, program):
            if not self.left:
                return None
            if elements(candidate) <= elements(program) and self.ask(candidate):
                return candidate
        return None


def _candidates(stage: Stage, program: Program) -> Iterator[Program]:
    """The stage's candidates, as far as it gets: there are dtypes that torch can hardly compute with."""
    found = stage(program)
    while True:
        try:
            candidate = next(found, None)
        except REFUSALS:
            return
        if candidate is None:
            return
        yield candidate
