"""Suggestions for an invalid redistribution text: candidates for its invalid part, of which valid ones are shown."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from difflib import get_close_matches

from localtensor.layout import PARTIAL_KINDS

LONGEST_SHOWN = 60


@dataclass(frozen=True, slots=True)
class TextSpan:
    """A part of a text that knows its position, so that an error can quote it and a suggestion can replace it.

    >>> [piece.text for piece in TextSpan("R, SS(0,2)", 0, 10).split()]
    ['R', 'SS(0,2)']
    """

    whole: str
    start: int
    end: int

    @classmethod
    def of(cls, text: str) -> TextSpan:
        return cls(text, 0, len(text))

    @property
    def text(self) -> str:
        return self.whole[self.start : self.end]

    @property
    def shown(self) -> str:
        """The quotation in an error: one short line of ASCII."""
        text = self.text
        return ascii(text if len(text) <= LONGEST_SHOWN else text[:LONGEST_SHOWN] + "...")

    def trimmed(self) -> TextSpan:
        text = self.text
        start = self.start + len(text) - len(text.lstrip())
        return TextSpan(self.whole, start, max(start, self.start + len(text.rstrip())))

    def cut(self, sign: str) -> tuple[TextSpan, TextSpan | None]:
        """The text before the first such sign, and the text after it; None if the sign does not occur."""
        at = self.whole.find(sign, self.start, self.end)
        if at < 0:
            return self.trimmed(), None
        return TextSpan(self.whole, self.start, at).trimmed(), TextSpan(self.whole, at + len(sign), self.end).trimmed()

    def split(self) -> list[TextSpan]:
        """The parts between commas outside of brackets; none for an empty text."""
        parts, start, depth = [], self.start, 0
        for at in range(self.start, self.end):
            sign = self.whole[at]
            depth += (sign in "([") - (sign in ")]")
            if sign == "," and depth <= 0:
                parts.append(TextSpan(self.whole, start, at).trimmed())
                start = at + 1
        last = TextSpan(self.whole, start, self.end).trimmed()
        return [*parts, last] if parts or last.text else []


class UnreadableText(Exception):
    """A part that cannot be parsed, and replacements for it, the likeliest first."""

    def __init__(self, argument: str, piece: TextSpan, problem: str, remedy: str, *meant: str) -> None:
        super().__init__(argument, piece, problem, remedy, meant)
        self.argument, self.piece, self.problem, self.remedy, self.meant = argument, piece, problem, remedy, meant


TRIES = 200
"""The most texts that are parsed in search of a valid one."""
_DTYPES = {
    "half": "f16", "bfloat": "bf16", "bfloat16": "bf16", "float": "f32", "double": "f64", "byte": "u8", "short": "i16",
    "int": "i32", "long": "i64", "boolean": "bool", "b8": "bool", "complex": "c64", "cfloat": "c64", "cdouble": "c128",
    "complex64": "c64", "complex128": "c128", "fp8": "float8_e4m3fn", "f8": "float8_e4m3fn", "float8": "float8_e4m3fn",
}  # fmt: skip
_BITS = re.compile(r"(?:fp|float|int|uint|f|i|u)(?:8|16|32|64)")
_REDUCTIONS = {"add": "sum", "mean": "avg", "average": "avg", "prod": "product", "mul": "product", "": "sum"}
ASCII_FORMS = {
    "\u2192": "->", "\u27f6": "->", "\u21d2": "->", "\u2212": "-", "\u2013": "-", "\uff1a": ":", "\uff0c": ",",
    "\u201c": "", "\u201d": "", "\u00a0": " ", "\t": " ", "\n": " ", "\r": " ",
}  # fmt: skip
"""The ASCII form of an arrow or a dash typed by a word processor."""
_STRIDED = re.compile(r"_?(?:strided_?shard|ss)\W*(?:dim\W*)?([0-9]+)\D+([0-9]+)\W*")
_SHARD = re.compile(r"(?:shard|s)\W*?(?:dim\W*?)?(-?[0-9]+)[)\]]*")
_PARTIAL = re.compile(r"(?:partial|p)[^a-z]*([a-z]*)\W*")


def suggest_text(text: str, bad: UnreadableText, read: Callable[[str], object]) -> str:
    """The text with replacements for each part that cannot be parsed; empty if none of these texts is valid.

    `read` raises `UnreadableText` for an invalid text.
    """
    left = TRIES

    def corrected(text: str, bad: UnreadableText, deep: int) -> str:
        nonlocal left
        for meant in dict.fromkeys(bad.meant):
            if not left:
                break
            left -= 1
            other = text[: bad.piece.start] + meant + text[bad.piece.end :]
            try:
                read(other)
            except UnreadableText as more:
                if deep and more.piece.whole == other and (found := corrected(other, more, deep - 1)):
                    return found
            else:
                return other
        return ""

    return corrected(text, bad, 8) if bad.piece.whole == text else ""


def dtypes_near(written: str, known: Iterable[str]) -> list[str]:
    """Dtypes of the same name elsewhere, or of similar spelling.

    >>> dtypes_near("torch.float32", ("f32", "f64")), dtypes_near("f65", ("f32", "f64", "i8"))
    (['f32'], ['f64'])
    """
    known = list(known)
    name = written.lower().removeprefix("torch.")
    exact = _DTYPES.get(name, "")
    if _BITS.fullmatch(name):
        exact = name[0] + re.sub(r"\D", "", name)
    return [exact] if exact in known else [name] if name in known else get_close_matches(name, known, 3, 0.5)


def placements_near(written: str, dims: int) -> list[str]:
    """Placements that torch's own notation, another letter case or a negative dim may stand for.

    >>> placements_near("Shard(dim=-1)", 2), placements_near("replicate", 2), placements_near("Partial(mean)", 2)
    (['S(1)'], ['R'], ['P(avg)'])
    """
    name = written.lower().replace(" ", "")
    if name.rstrip("()") in ("r", "replicate", "replicated", "rep"):
        return ["R"]
    if found := _STRIDED.fullmatch(name):
        return [f"SS({found[1]},{found[2]})", f"S({found[1]})"]
    if found := _SHARD.fullmatch(name):
        dim = int(found[1][:9])
        return [f"S({dim + dims})"] if dim < 0 else [f"S({dim})", f"S({max(0, dims - 1)})"]
    if name.rstrip("()") in ("s", "shard"):
        return ["S(0)"]
    if found := _PARTIAL.fullmatch(name):
        kinds = (_REDUCTIONS.get(found[1], found[1]), *get_close_matches(found[1], PARTIAL_KINDS, 1))
        return [f"P({kind})" for kind in kinds]
    begun = re.match(r"R|S\([0-9]+\)|SS\([0-9]+, ?[0-9]+\)|P\([a-z]+\)", written)
    return [begun[0]] if begun else []


def arrow_for(text: str) -> list[str]:
    """The text with an arrow in place of another sign or word."""
    signs = (" *=> *", " *--+> *", " to ", " *(?<![-=])> *", " *- *(?=[RSP])")
    return [other for sign in signs if (other := re.sub(sign, " -> ", text, count=1)) != text]


def counts_near(written: str) -> list[str]:
    """The number without its sign, and without separators between its digits.

    >>> counts_near("-4"), counts_near("4_096"), counts_near("2 tp=4"), counts_near("four")
    (['4'], ['4096'], ['2,tp=4'], [])
    """
    if re.fullmatch(r"[-+]? *[0-9][0-9_' ]*", written):
        return [re.sub(r"[^0-9]", "", written)]
    other = re.sub(r"([0-9]) +(?=[A-Za-z_])", r"\1,", written)
    return [other] if other != written else []


def shapes_near(written: str) -> list[str]:
    """The shape with square brackets, or with the missing one.

    >>> shapes_near("f32(4,4)"), shapes_near("f32[4,4")
    (['f32[4,4]'], ['f32[4,4]'])
    """
    other = re.sub(r"\((.*)\)$", r"[\1]", written)
    return [other] if other != written else [written + "]"] if "[" in written else []


def at_after(written: str) -> str:
    """The text with an @ after the shape.

    >>> at_after("f32[8] dp=2: R")
    'f32[8] @ dp=2: R'
    """
    return re.sub(r"\] *", "] @ ", written, count=1)
