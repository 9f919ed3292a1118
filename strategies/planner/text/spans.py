"""Pieces of a text that know where they stand in it, so that one of them can be named, and another put in its place."""

from __future__ import annotations

from dataclasses import dataclass

LONGEST_SHOWN = 60


@dataclass(frozen=True, slots=True)
class Piece:
    """Some characters of a text.

    >>> [piece.text for piece in Piece("R, SS(0,2)", 0, 10).split()]
    ['R', 'SS(0,2)']
    """

    whole: str
    start: int
    end: int

    @classmethod
    def of(cls, text: str) -> Piece:
        return cls(text, 0, len(text))

    @property
    def text(self) -> str:
        return self.whole[self.start : self.end]

    @property
    def shown(self) -> str:
        """As it is quoted in an error: one short line of ASCII."""
        text = self.text
        return ascii(text if len(text) <= LONGEST_SHOWN else text[:LONGEST_SHOWN] + "...")

    def trimmed(self) -> Piece:
        text = self.text
        start = self.start + len(text) - len(text.lstrip())
        return Piece(self.whole, start, max(start, self.start + len(text.rstrip())))

    def cut(self, sign: str) -> tuple[Piece, Piece | None]:
        """What is before the first such sign, and what is after it; None if there is none."""
        at = self.whole.find(sign, self.start, self.end)
        if at < 0:
            return self.trimmed(), None
        return Piece(self.whole, self.start, at).trimmed(), Piece(self.whole, at + len(sign), self.end).trimmed()

    def split(self) -> list[Piece]:
        """The parts between commas that stand in no brackets; none of an empty piece."""
        parts, start, depth = [], self.start, 0
        for at in range(self.start, self.end):
            sign = self.whole[at]
            depth += (sign in "([") - (sign in ")]")
            if sign == "," and depth <= 0:
                parts.append(Piece(self.whole, start, at).trimmed())
                start = at + 1
        last = Piece(self.whole, start, self.end).trimmed()
        return [*parts, last] if parts or last.text else []


class Bad(Exception):
    """A piece that cannot be read, and what might be meant: texts to put in its place, the likeliest first."""

    def __init__(self, argument: str, piece: Piece, problem: str, remedy: str, *meant: str) -> None:
        super().__init__(argument, piece, problem, remedy, meant)
        self.argument, self.piece, self.problem, self.remedy, self.meant = argument, piece, problem, remedy, meant
