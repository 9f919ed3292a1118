"""Two runs of the sweep side by side: every rule that is judged otherwise on one device than on the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from strategies.base.journal import Line, lines_of_kind
from strategies.validation import finding as dockets
from strategies.validation import finding as findings

ABSENT = "not tried"


@dataclass(frozen=True, slots=True)
class Word:
    """The verdict on one rule, and why."""

    verdict: str
    why: str = ""


@dataclass(frozen=True, slots=True)
class Differs:
    """A rule and what is said of it on either device."""

    rule: str
    cpu: Word
    cuda: Word


def words(lines: Sequence[Line]) -> dict[str, Word]:
    """The verdict on each rule of a journal; what was settled counts more than what one unit said."""
    found: dict[str, Word] = {}
    for line in lines_of_kind(lines, "unit"):
        hearing = dockets.read_task(line)
        for name, why in hearing.untestable.items():
            found.setdefault(name, Word("untestable", why))
        for name in hearing.sound:
            found[name] = Word("sound")
    for line in lines_of_kind(lines, "settled"):
        settled = findings.read_outcome(line)
        finding = settled.finding
        found[settled.name] = Word(finding.verdict.value, finding.reason) if finding else Word("sound", "cleared")
    return found


def differing(cpu: Sequence[Line], cuda: Sequence[Line]) -> list[Differs]:
    """Rules in the order of their names; those that only one device could try are among them."""
    one, other = words(cpu), words(cuda)
    absent = Word(ABSENT)
    pairs = ((rule, one.get(rule, absent), other.get(rule, absent)) for rule in sorted({*one, *other}))
    return [Differs(rule, a, b) for rule, a, b in pairs if a.verdict != b.verdict]


def crashes(lines: Sequence[Line]) -> dict[str, str]:
    """What crashed, by overload: a device on which an op dies has no verdict on its rules."""
    return {crash.op: crash.error for line in lines_of_kind(lines, "unit") for crash in dockets.read_task(line).crashed}
