"""A rank program as a value: it prints as code that runs, runs on any way of `run`, and knows what must come out."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import CodeType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from localtensor._util.events import Place
from localtensor.testing.programs import programs_words
from localtensor.testing.programs.codegen import written
from localtensor.testing.programs.model import PRIME, SIZE, Event
from localtensor.testing.programs.reference import Referee

FILE = "a drawn rank program"
"""The file that errors name as the place of a program's lines."""
_WORDS = (programs_words.feed, programs_words.mix, programs_words.blank, programs_words.Planted)
_HEAD = """from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
"""


@dataclass(frozen=True, slots=True)
class Rendered:
    """The text, and of each of its lines that an event became the rank and the event's place in the rank's list."""

    source: str
    lines: dict[int, tuple[int, int]]

    def events_at(self, places: Sequence[Place]) -> set[tuple[int, int]]:
        """(rank, index of the event) of each place."""
        return {self.lines[place.line] for place in places if place.file == FILE and place.line in self.lines}


@dataclass(frozen=True, slots=True, repr=False)
class RankProgram:
    """A whole torch.distributed program: `events[rank]` is what that rank does, in its order.

    `groups` are the members of each group; the first is all ranks, and is not made.  Called on a rank, it runs that
    rank's part and returns the rank's accumulator, int64[48], and what the rank got from each step, by its number.
    `print(program)` shows the code.

    >>> from localtensor import run
    >>> from localtensor.testing.compare_runs import assert_same
    >>> from localtensor.testing.programs.model import Step
    >>> total = Step(0, "all_reduce", 0, (0, 1))
    >>> program = RankProgram(((0, 1),), ((Event("launch", total), Event("mix", total)),) * 2)
    >>> assert_same(run(program, ranks=program.ranks), program.expected())
    """

    groups: tuple[tuple[int, ...], ...]
    events: tuple[tuple[Event, ...], ...]

    @property
    def ranks(self) -> int:
        """How many ranks it is for."""
        return len(self.events)

    def __call__(self) -> Any:
        """What the rank that calls it returns.  Raises `RuntimeError` on another number of ranks than it is for."""
        if dist.get_world_size() != self.ranks:
            raise RuntimeError(f"this program is for {self.ranks} ranks, and there are {dist.get_world_size()}")
        words: dict[str, Any] = {"__name__": FILE}
        exec(_compiled(str(self)), words)  # noqa: S102  # its own text, and nothing else: what is printed is what runs
        return words["program"]()

    def expected(self) -> list[Any]:
        """What each rank must return, by rank: worked out by plain loops over numpy arrays, without a simulator.

        Raises `Illegal` where the program is wrong, which no drawn program is.
        """
        return [(_tensor(acc), {s: [*map(_tensor, got)] for s, got in out.items()}) for acc, out in self.played()]

    def played(self) -> list[tuple[Any, dict[int, list[Any]]]]:
        """The same as numpy arrays."""
        return Referee(self.groups, self.events).play()

    def changed(self, rank: int, events: Sequence[Event]) -> RankProgram:
        """The program in which that rank does something else."""
        return replace(self, events=(*self.events[:rank], tuple(events), *self.events[rank + 1 :]))

    def rendered(self) -> Rendered:
        """The text with its map of lines.  No two events share a line."""
        text = [_HEAD, f"PRIME = {PRIME}"]
        text += [
            f"\n\n{inspect.getsource(word).rstrip()}" for word in _WORDS if word.__name__ != "Planted" or self._raises()
        ]
        text = "\n".join(text).split("\n")
        lines: dict[int, tuple[int, int]] = {}
        for rank, events in enumerate(self.events):
            text += ["", "", f"def rank{rank}():", f"    out, acc, g0 = {{}}, torch.arange({SIZE}) * {rank + 1}, None"]
            for index, event in enumerate(events):
                for line in written(self.groups, event, rank):
                    text.append(f"    {line}")
                    lines[len(text)] = rank, index
            text.append("    return acc, out")
        listed = ", ".join(f"rank{rank}" for rank in range(self.ranks))
        text += ["", "", "def program():", f"    return [{listed}][dist.get_rank()]()"]
        return Rendered("\n".join(text) + "\n", lines)

    def _raises(self) -> bool:
        return any(event.what == "raise" for events in self.events for event in events)

    def __str__(self) -> str:
        return self.rendered().source

    def __repr__(self) -> str:
        return self.rendered().source

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Hypothesis would else print the fields."""
        printer.text(repr(self))


@functools.lru_cache(maxsize=64)
def _compiled(source: str) -> CodeType:
    return compile(source, FILE, "exec")


def _tensor(x: Any) -> Any:
    return torch.from_numpy(np.ascontiguousarray(x)) if isinstance(x, np.ndarray) else x
