"""Ops whose rule depends on how they are called, and rules that take one call for another.

`Varied` is one op with several calls, each a `Base` with scalars of its own: `sum` over dim 1, over dim -1, with
keepdim.  A `Mistake` says what a careless rule claims of some of the calls: a negative dim is compared as it is
spelled, keepdim is ignored, an infinite norm is taken for any norm.  Of the other calls it claims what is right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.tools.bench import by_hand
from tests.tools.bench.claims import Base, Row
from tests.tools.bench.claims import row as as_row


@dataclass(frozen=True)
class Mistake:
    """In words, and what is claimed of a call, by its number: rows, or the number of the call that it is taken for."""

    words: str
    claims: Mapping[int, tuple[str, ...] | int]


@dataclass(frozen=True)
class Varied:
    """One op, the calls that differ in scalars only, and the mistakes made about it."""

    name: str
    calls: tuple[Base, ...]
    mistakes: tuple[Mistake, ...]

    def claimed(self, mistake: Mistake | None = None) -> list[tuple[Base, list[Row]]]:
        """Each call with what is claimed of it."""
        return [(base, self._rows(number, mistake)) for number, base in enumerate(self.calls)]

    def _rows(self, number: int, mistake: Mistake | None) -> list[Row]:
        said = number if mistake is None else mistake.claims.get(number, number)
        return self.calls[said].rows() if isinstance(said, int) else [as_row(text) for text in said]

    def wrong(self, mistake: Mistake | None = None) -> dict[str, str]:
        """The rows that are wrong of some call of which they are claimed, and why."""
        told = ((str(row), by_hand.wrong(base, row)) for base, rows in self.claimed(mistake) for row in rows)
        return {text: why for text, why in told if why}


def key(scalars: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """What tells one call from another, as a rule sees it."""
    return repr((_listed(scalars), sorted((name, _listed(value)) for name, value in kwargs.items())))


def _listed(value: Any) -> Any:
    return [_listed(v) for v in value] if isinstance(value, (list, tuple)) else value
