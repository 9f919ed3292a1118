"""Labelled programs for `lt.run`: half of them right, half with one planted fault.

A program is a function of no arguments, ordinary torch.distributed code; every rank runs it.

    @fault("ShapeMismatch", ranks=2)
    def rank_one_brings_more():
        x = torch.ones(2 + dist.get_rank())
        dist.all_reduce(x)  # fault

The label is the class of the error that the program deserves; `# fault` ends each line that an explanation of it
has to name.  If two lines are equally to blame (one rank reduces, the other gathers), both are marked, and naming
one of them is enough.  A mark in a helper counts if the decorator lists the helper.  `cause=` is the class of what a
rank raised, where that is the fault; other keywords are those of `lt.run`.

Nothing here is tuned to a tool: a label says what happens on real processes, and a right program passes there.
"""

import importlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
OURS = {"__main__", "corpus", "score", "test_corpus"}
LABELS = (
    "KindMismatch", "ShapeMismatch", "DtypeMismatch", "ReduceOpMismatch", "RootMismatch", "SplitMismatch",
    "LengthMismatch", "GroupMismatch", "MessageMismatch", "EarlyReturn", "Deadlock", "WorkNotWaited",
    "ReadBeforeWait", "BufferReused", "MessagesLeftOver", "GroupsLeftOver", "RanksDisagree", "RankRaised",
)  # fmt: skip

Program = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """A program, and what should come of it: `label` is None if it is right."""

    program: Program
    label: str | None
    ranks: int
    helpers: tuple[Callable[..., object], ...] = ()
    options: dict[str, Any] = field(default_factory=dict)  # for lt.run
    cause: str | None = None  # the class of the error's __cause__, if it matters

    @property
    def name(self) -> str:
        return self.program.__name__

    @property
    def file(self) -> Path:
        return Path(inspect.getsourcefile(self.program) or "").resolve()

    @property
    def lines(self) -> set[int]:
        """The marked lines of this file."""
        return {line for part in (self.program, *self.helpers) for line in marked(part)}


def marked(part: Callable[..., object]) -> Iterator[int]:
    source, first = inspect.getsourcelines(part)
    return (number for number, line in enumerate(source, first) if line.rstrip().endswith("# fault"))


def fault(
    label: str,
    *,
    ranks: int,
    helpers: tuple[Callable[..., object], ...] = (),
    cause: str | None = None,
    **options: Any,
) -> Callable[[Program], Program]:
    """The program has one fault, and this is the class of its error."""
    return lambda program: labelled(Case(program, label, ranks, helpers, options, cause))


def right(*, ranks: int, **options: Any) -> Callable[[Program], Program]:
    """The program is right, and asserts its own result."""
    return lambda program: labelled(Case(program, None, ranks, (), options))


def labelled(case: Case) -> Program:
    case.program.case = case  # type: ignore[attr-defined]
    return case.program


def cases() -> list[Case]:
    """Every program of this folder, in the order of the files."""
    topics = sorted(file.stem for file in HERE.glob("*.py") if file.stem not in OURS)
    rooms = [importlib.import_module(f"tests.tools.rankbugs.{topic}") for topic in topics]
    return [
        thing.case
        for room in rooms
        for thing in vars(room).values()
        if getattr(thing, "__module__", 0) == room.__name__ and hasattr(thing, "case")
    ]
