"""Events of a run: the communication calls of each rank, and how each rank ended.

An event outlives its rank, so it holds strings and numbers only, apart from the value that a rank returned.
"""

from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import PurePath
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Returned:
    """The rank's function returned; `value` is the parent's own copy.

    >>> Returned(rank=0, value=5)
    Returned(rank=0, value=5)
    """

    rank: int
    value: object


@dataclass(frozen=True, slots=True)
class Raised:
    """The rank's function raised; `kind` is the name of the exception's class, `at` the time (0.0 if unknown)."""

    rank: int
    kind: str
    message: str
    traceback: str
    at: float = field(default=0.0, repr=False, compare=False)  # seconds of time.monotonic()


@dataclass(frozen=True, slots=True)
class Waiting:
    """The rank had not finished when the time was up; `where` is its innermost line, or "unknown".

    `raised` is the error that it was about to tell its peers: the text of a local variable `__raised__` of a function at work.
    """

    rank: int
    where: str
    raised: str = ""


@dataclass(frozen=True, slots=True)
class Died:
    """The rank's process ended; a negative `exitcode` is minus the number of the signal."""

    rank: int
    exitcode: int


Outcome: TypeAlias = Returned | Raised | Waiting | Died


@dataclass(frozen=True, slots=True)
class Place:
    """A line of the user's own program.

    >>> str(Place("project/train.py", 31, "step"))
    'train.py:31 in step'
    """

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{PurePath(self.file).name}:{self.line} in {self.function}"


@lru_cache(1 << 14)
def place_at(file: str, line: int, function: str) -> Place:
    """The place with these parts: one object for all events of a line, as a run has few lines and many events."""
    return Place(file, line, function)


@dataclass(frozen=True, slots=True)
class Call:
    """One rank's call of a collective, send or receive: what must match its peers' calls, and where it was made.

    `group` is the global ranks of the process group, in group order; `number` counts this rank's collectives on
    that group from 0 (for send and recv: its messages with that peer and tag).  `tensors` are in short form
    ("f32[8,4]"), `root`, `peer` and `rank` are global ranks.  A field that does not apply is None.

    >>> print(Call(1, "broadcast", "0", (0, 1), 3, ("f32[4]",), device="cpu", root=0, place=Place("a.py", 7, "f")))
    rank 1: broadcast #3 of f32[4] on cpu, root=0, in group 0 (ranks 0, 1), at a.py:7 in f
    """

    rank: int
    kind: str
    group_name: str
    group: tuple[int, ...]
    number: int
    tensors: tuple[str, ...] = ()
    bytes: int = 0
    device: str | None = None
    op: str | None = None
    root: int | None = None
    peer: int | None = None
    tag: int | None = None
    input_splits: tuple[int, ...] | None = None
    output_splits: tuple[int, ...] | None = None
    place: Place | None = None
    handling: str | None = None  # the exception being handled during the call
    axis: str | None = field(default=None, repr=False, compare=False)  # the mesh axis of the group, if a mesh has it
    implicit: bool = field(default=False, repr=False, compare=False)  # an op of DTensor made it, for its own tensors

    def __str__(self) -> str:
        of = f" of {', '.join(self.tensors)}" if self.tensors else ""
        on = f" on {self.device}" if self.device else ""
        named = ("op", "root", "peer", "tag", "input_splits", "output_splits")
        extra = "".join(f", {name}={value}" for name in named if (value := getattr(self, name)) is not None)
        members = ", ".join(map(str, self.group))
        at = f", at {self.place}" if self.place else ""
        at += f", while handling {self.handling}" if self.handling else ""
        return f"rank {self.rank}: {self.kind} #{self.number}{of}{on}{extra}, in group {self.group_name} (ranks {members}){at}"


@dataclass(frozen=True, slots=True)
class Wait:
    """A blocked rank: the ranks for which it waits, and the call in which it does."""

    rank: int
    ranks: tuple[int, ...]
    call: Call
