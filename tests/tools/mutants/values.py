"""A mutant is one file with one thing changed; what became of it under the tests of its room."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]


@dataclass(frozen=True)
class Planted:
    """A bug planted by hand: `before`, which stands in the file once, becomes `after`; `why` says what a user would see."""

    path: str
    before: str
    after: str
    why: str
    tests: tuple[str, ...] = ()
    """The test files that have to find it; by default those of its room."""

    def text(self) -> str:
        """The file with the bug in it.  Raises ValueError where `before` does not stand there just once."""
        source = (ROOT / self.path).read_text()
        if source.count(self.before) != 1:
            raise ValueError(f"{self.path}: {self.before!r} stands there {source.count(self.before)} times, not once")
        return source.replace(self.before, self.after)


@dataclass(frozen=True)
class Mutant:
    """A changed file to be tried: `text` is what it holds then, `change` its changed lines as a diff."""

    path: str
    text: str
    change: str
    why: str
    tests: tuple[str, ...]


@dataclass(frozen=True)
class Outcome:
    """`end` is one of killed, survived, slow (ran out of time, which a test suite notices, too), untested, red before."""

    mutant: Mutant
    end: str
    seconds: float
    seen: str
    """The first line of pytest's summary: which test saw it."""

    @property
    def caught(self) -> bool:
        return self.end in ("killed", "slow")
