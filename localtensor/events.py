"""What became of one rank: it returned, it raised, it never came back, or its process died.

Strings and numbers only, apart from the value that a rank returned: an outcome outlives the rank.
"""

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Returned:
    """The rank finished; `value` is the parent's own copy.

    >>> Returned(rank=0, value=5)
    Returned(rank=0, value=5)
    """

    rank: int
    value: object


@dataclass(frozen=True, slots=True)
class Raised:
    """The rank's function raised; `kind` is the name of the exception's class."""

    rank: int
    kind: str
    message: str
    traceback: str


@dataclass(frozen=True, slots=True)
class Waiting:
    """The rank was still busy when nobody waited for it any longer; `where` is its innermost line, or "unknown"."""

    rank: int
    where: str


@dataclass(frozen=True, slots=True)
class Died:
    """The rank's process ended under it; a negative `exitcode` is the number of the signal."""

    rank: int
    exitcode: int


Outcome: TypeAlias = Returned | Raised | Waiting | Died
