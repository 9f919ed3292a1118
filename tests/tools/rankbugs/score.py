"""Run the corpus, and count what was found, what was accused in error, and what the explanations are worth."""

import time
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import localtensor as lt
from tests.tools.rankbugs.corpus import LABELS, Case

LIMIT = 20  # seconds for one program
LEAST_RECALL, LEAST_HELPFULNESS = 0.95, 0.9
LONGEST_RUN, LONGEST_DIAGNOSIS = 60.0, 1.0  # seconds: of the whole corpus, of one program that hangs for ever


@dataclass(frozen=True)
class Judged:
    """What came of one program: `said` is the class of the error, None if there was none."""

    case: Case
    seconds: float
    said: str | None = None
    message: str = ""
    named: tuple[int, ...] = ()  # lines of the program's own file
    cause: str | None = None  # the class of what a rank raised

    @property
    def found(self) -> bool:
        """The fault was noticed: under any of the labels, but "a rank raised" only where that is the label."""
        return self.said in LABELS and (self.said != "RankRaised" or self.case.label == "RankRaised")

    @property
    def helpful(self) -> bool:
        caused = self.case.cause in (None, self.cause)
        return self.said == self.case.label and caused and bool(self.case.lines & set(self.named))

    @property
    def complaint(self) -> str:
        """What is wrong with this answer; empty if nothing is."""
        if self.case.label is None:
            return f"false alarm: {self.said}" if self.said else ""
        if not self.found:
            return f"missed {self.case.label}: {self.said or 'nothing reported'}"
        if self.said != self.case.label:
            return f"wrong class: {self.said}, not {self.case.label}"
        if self.case.cause not in (None, self.cause):
            return f"wrong cause: {self.cause}, not {self.case.cause}"
        if not self.helpful:
            return f"wrong line: {list(self.named)}, not {sorted(self.case.lines)}"
        return f"slow: {self.seconds:.1f} s" if self.slow else ""

    @property
    def slow(self) -> bool:
        return self.case.label in ("Deadlock", "EarlyReturn") and self.seconds > LONGEST_DIAGNOSIS


def judged(case: Case) -> Judged:
    """The answer; of a slow one the second, which does not also pay for what torch imports on first use."""
    answer = asked(case)
    return asked(case) if answer.slow else answer


def asked(case: Case) -> Judged:
    begin = time.perf_counter()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # names that torch has put out of favour, groups left over
            lt.run(case.program, ranks=case.ranks, timeout=LIMIT, **case.options)
    except Exception as error:  # why: any error is an answer, right or wrong
        places = [place for place in getattr(error, "places", ()) if Path(place.file).resolve() == case.file]
        lines = tuple(place.line for place in places)
        cause = None if error.__cause__ is None else type(error.__cause__).__name__
        return Judged(case, time.perf_counter() - begin, type(error).__name__, str(error), lines, cause)
    return Judged(case, time.perf_counter() - begin)


@dataclass(frozen=True)
class Score:
    answers: tuple[Judged, ...]
    seconds: float

    @property
    def faulty(self) -> list[Judged]:
        return [answer for answer in self.answers if answer.case.label]

    @property
    def false_alarms(self) -> list[Judged]:
        return [answer for answer in self.answers if answer.said and not answer.case.label]

    @property
    def recall(self) -> float:
        return sum(answer.found for answer in self.faulty) / len(self.faulty)

    @property
    def precision(self) -> float:
        found = sum(answer.found for answer in self.faulty)
        return found / max(found + len(self.false_alarms), 1)

    @property
    def helpfulness(self) -> float:
        return sum(answer.helpful for answer in self.faulty) / len(self.faulty)

    @property
    def slowest(self) -> Judged:
        return max(self.answers, key=lambda answer: answer.seconds)

    @property
    def passed(self) -> bool:
        good = self.recall >= LEAST_RECALL and self.helpfulness >= LEAST_HELPFULNESS and not self.false_alarms
        return good and self.seconds <= LONGEST_RUN and not any(answer.slow for answer in self.answers)


def score(programs: Iterable[Case]) -> Score:
    begin = time.perf_counter()
    answers = tuple(judged(case) for case in programs)
    return Score(answers, time.perf_counter() - begin)
