"""Two runs of the sweep side by side: every rule that is judged otherwise on one device than on the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from strategies.base.journal import Line, lines_of_kind
from strategies.validation import finding as findings


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
    """The verdict on each rule of a journal; what was settled counts more than what one unit said.

    "wrong" is a rule that was wrong on some sample, in a journal that was cut before its confirmation.
    """
    found: dict[str, Word] = {}
    wrong: set[str] = set()
    for line in lines_of_kind(lines, "unit"):
        result = findings.read_task(line)
        for name, why in result.untestable.items():
            found.setdefault(name, Word("untestable", why))
        for name in result.sound:
            found[name] = Word("sound")
        wrong |= {*result.suspects, *result.whole}
    found |= dict.fromkeys(wrong, Word("wrong"))
    for line in lines_of_kind(lines, "settled"):
        settled = findings.read_outcome(line)
        finding = settled.finding
        found[settled.name] = Word(finding.verdict.value, finding.reason) if finding else Word("sound", "cleared")
    return found


def differing(cpu: Sequence[Line], cuda: Sequence[Line]) -> tuple[list[Differs], int]:
    """Rules that both devices tried and judge otherwise, in the order of their names; and how many both tried."""
    one, other = words(cpu), words(cuda)
    both = sorted({*one} & {*other})
    return [Differs(rule, one[rule], other[rule]) for rule in both if one[rule].verdict != other[rule].verdict], len(
        both
    )


def crashes(lines: Sequence[Line]) -> dict[str, str]:
    """What crashed, by overload: a device on which an op dies has no verdict on its rules."""
    return {
        crash.op: crash.error for line in lines_of_kind(lines, "unit") for crash in findings.read_task(line).crashed
    }
