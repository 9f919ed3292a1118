"""What `lt.compare` says of each program, and the score."""

import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import localtensor as lt
from localtensor.errors import Diverged
from tests.tools.compare.cases import Case

# A verdict has the right word if one of these is in its text: the phrases of the labels, and what an engineer would
# take for the same.
SAID = {
    "missing": r"missing|not reduced|never reduced|assembles as P\(sum\)|partial sum",
    "large": r"too large|\b[2-8](\.0+)? times|\b[2-8](\.0+)? ?x\b|scaled",
    "small": r"too small|1/[2-8]|0\.(5|25)\b|divided by|scaled",
    "group": r"wrong group|\bgroup\b|also over|too many ranks|instead of over",
    "replicas": r"replicas? .*differ|differs? between|broadcast|seed|not the same on",
    "slice": r"slice|shard of|order of",
    "stale": r"stale|previous step|step before|not updated|kept from",
    "dtype": r"dtype|bfloat16|float16|precision",
    "counted": r"counted by each|once by each rank|by each rank|added \d+ times",
}


@dataclass(frozen=True)
class Answer:
    """What came of one program."""

    case: Case
    text: str
    seconds: float
    alarm: bool
    error: bool = False

    @property
    def first(self) -> str:
        """The line that names the first divergence."""
        found = re.search(r"first at\s+(.*)", self.text)
        return found.group(1) if found else ""

    @property
    def module(self) -> bool:
        names = self.case.module.split("|")
        if "loss" in names and re.search(r"\bloss\b|whole model", self.first):
            return self.alarm
        each = "|".join(map(re.escape, names))
        pattern = rf"(?<![\w.])(module\.)?({each})(\.(weight|bias|w[12]|by))?(?![\w]|\.\w)"
        if self.first.startswith("buffer of"):
            pattern = rf"^buffer of (module\.)?({each})\.\w+"
        return self.alarm and re.search(pattern, self.first) is not None

    @property
    def line(self) -> bool:
        """A line of the faulty statement is named, or the call that goes wrong first is one of its operations."""
        if any(re.search(rf"{re.escape(place)}(?!\d)", self.text) for place in self.case.places):
            return self.alarm
        call = re.search(r"^ *\|? *call\s+(\w+)", self.text, re.MULTILINE)
        return self.alarm and call is not None and call.group(1) in self.case.op.split("|")

    @property
    def because(self) -> str:
        """The verdict in words."""
        found = re.search(r"because\s+(.*(?:\n\s{4,}.*)*)", self.text)
        return found.group(1) if found else ""

    @property
    def word(self) -> bool:
        return self.alarm and any(map(self.says, self.case.word.split("|")))

    def says(self, word: str) -> bool:
        if word == "values":  # no cause that is not there may be claimed
            return not any(re.search(said, self.because) for said in SAID.values())
        return re.search(SAID[word], self.because) is not None

    @property
    def complaint(self) -> str:
        if self.error:
            return "raised"
        if not self.case.kind:
            return "false alarm" if self.alarm else ""
        if not self.alarm:
            return "not detected"
        wrong = [name for name in ("module", "line", "word") if not getattr(self, name)]
        return f"wrong {', '.join(wrong)}" if wrong else ""


def ask(case: Case) -> Answer:
    started = time.perf_counter()
    try:
        text, alarm, error = str(lt.compare(**case.program())), False, False
    except Diverged as diverged:
        text, alarm, error = str(diverged), True, False
    except (
        Exception
    ) as raised:  # why: a program on which the tool fails is a result of the corpus, and the others go on
        text, alarm, error = f"{type(raised).__name__}: {raised}", False, True
    return Answer(case, text, time.perf_counter() - started, alarm, error)


def answers(chosen: Iterable[Case]) -> Iterator[Answer]:
    for case in chosen:
        yield ask(case)


def table(got: list[Answer]) -> list[str]:
    """The score of early and late programs."""
    lines = [f"{'':24}{'early':>12}{'late':>12}{'all':>12}"]
    columns = [[one for one in got if one.case.late == late] for late in (False, True)] + [got]
    for name, counts in (
        ("detected", lambda one: one.alarm),
        ("module named", lambda one: one.module),
        ("line or op named", lambda one: one.line),
        ("verdict in words", lambda one: one.word),
    ):
        cells = []
        for column in columns:
            of = [one for one in column if one.case.kind]
            good = sum(map(counts, of))
            cells.append(f"{good}/{len(of)} {100 * good // max(len(of), 1)}%")
        lines.append(f"{name:24}" + "".join(f"{cell:>12}" for cell in cells))
    cells = []
    for column in columns:
        of = [one for one in column if not one.case.kind]
        cells.append(f"{sum(one.alarm or one.error for one in of)}/{len(of)}")
    lines.append(f"{'false alarms, or raised':24}" + "".join(f"{cell:>12}" for cell in cells))
    return lines
