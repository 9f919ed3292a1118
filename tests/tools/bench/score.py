"""Against a fooled probe: how many planted wrong rules come out Unsound or Refused, and whether every right one is Sound."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

RULES = "tests.tools.bench.planted"
TARGET = 99.0
"""Per cent of the mutants that must come out Unsound or Refused."""
FOUND = ("unsound", "refused")
"""Verdicts that are findings: real processes give other results, or all of them raise."""


@dataclass(frozen=True, slots=True)
class Score:
    """`survivors` and `accused` say of each op what was done to it and what the verdict was.

    `untried` counts the rules that have no verdict at all, and so would pass for Sound.
    """

    killed: int
    mutants: int
    survivors: dict[str, str]
    sound: int
    originals: int
    accused: dict[str, str]
    misfits: dict[str, int]
    untried: int
    crashed: int
    seconds: float
    families: dict[str, tuple[int, int, int, int]]
    """Of each family: mutants killed and planted, originals sound and planted."""

    @property
    def share(self) -> float:
        return 100 * self.killed / self.mutants

    @property
    def passed(self) -> bool:
        return self.share >= TARGET and self.sound == self.originals and not self.untried and not self.crashed


def score(confirm: str = "gloo") -> Score:
    """Validate the planted module as a user would validate his own, and count."""
    from strategies.model.settings import Settings
    from strategies.sweep.session import validate
    from tests.tools.bench.planted import MISFITS, MUTANTS, ORIGINALS, name_of, rows_of

    report = validate(Settings(rules=RULES, confirm=confirm))
    found = {f.rule.op: f for f in reversed(report.findings)}
    verdicts = {op: found[op].verdict.value if op in found else "sound" for op in (*ORIGINALS, *MUTANTS, *MISFITS)}

    def told(ops: list[str], words: dict[str, str]) -> dict[str, str]:
        return {op: f"{words[op]} ({verdicts[op]}{': ' + found[op].reason if op in found else ''})" for op in ops}

    survivors = [op for op in MUTANTS if verdicts[op] not in FOUND]
    accused = [op for op in sorted(ORIGINALS) if verdicts[op] != "sound"]
    right = {op: [good or verdicts[op] == "sound" for good in rows_of(op).values()] for op in verdicts}
    sound = len(verdicts) + sum(map(sum, right.values()))  # each op's all-replicate row, too
    return Score(
        len(MUTANTS) - len(survivors), len(MUTANTS), told(survivors, MUTANTS), len(ORIGINALS) - len(accused), len(ORIGINALS),
        told(accused, {op: '; '.join(rows_of(op)) for op in accused}), dict(Counter(verdicts[op] for op in MISFITS)),
        sound - report.counts.sound, len(report.crashed), round(sum(seconds for _, seconds in report.seconds), 1),
        _by_family({op: (name_of(op), op in MUTANTS, verdicts[op]) for op in (*MUTANTS, *sorted(ORIGINALS))}),
    )  # fmt: skip


def _by_family(told: dict[str, tuple[str, bool, str]]) -> dict[str, tuple[int, int, int, int]]:
    """From each op's base, whether it is a mutant, and its verdict."""
    from tests.tools.bench.families import FAMILY_OF

    counts = {family: [0, 0, 0, 0] for family in FAMILY_OF.values()}
    for base, mutant, verdict in told.values():
        at = 0 if mutant else 2
        counts[FAMILY_OF[base]][at] += verdict in (FOUND if mutant else ("sound",))
        counts[FAMILY_OF[base]][at + 1] += 1
    return {family: (a, b, c, d) for family, (a, b, c, d) in counts.items()}
