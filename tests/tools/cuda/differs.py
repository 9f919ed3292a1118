"""Two runs of the sweep side by side: every rule that is judged otherwise on one device than on the other."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from strategies.base.journal import Line, lines_of_kind
from strategies.model.kernels import kernels_on
from strategies.programs.run.real_run import ProgramRealRuns
from strategies.sweep.confirmation import RealConfirmation
from strategies.validation import finding as findings
from strategies.validation.finding import Candidate


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
        if finding is None:
            found[settled.name] = Word("sound", "cleared")
        elif NOT_CONFIRMED not in finding.reason:  # else it is as in a journal that was cut
            found[settled.name] = Word(finding.verdict.value, finding.reason)
    return found


def differing(cpu: Sequence[Line], cuda: Sequence[Line]) -> tuple[list[Differs], int]:
    """Rules that both devices tried and judge otherwise, in the order of their names; and how many both tried.

    After them, rules that are wrong on CUDA and were not tried on the CPU, which may have no kernel for them.
    """
    one, other = words(cpu), words(cuda)
    both = sorted({*one} & {*other})
    found = [Differs(rule, one[rule], other[rule]) for rule in both if one[rule].verdict != other[rule].verdict]
    alone = sorted(rule for rule in {*other} - {*one} if _kind(other[rule]) in ("wrong", "suspect"))
    return [*found, *(Differs(rule, Word(UNTRIED), other[rule]) for rule in alone)], len(both)


UNTRIED = "not tried"
NOT_CONFIRMED = "--confirm none"
"""In the reason of what no real run has judged."""


def confirmed(
    found: Sequence[Differs], lines: Mapping[str, Sequence[Line]], backends: Mapping[str, str], *, until: float
) -> list[Differs]:
    """Those on which the devices differ after DTensor itself has run what is wrong on one of them, on real processes there.

    `lines` and `backends` are by device.  No case begins after the time `until` of `time.monotonic`; what was not run stays as
    it was.
    """
    settled: dict[str, dict[str, Word]] = {}
    for device in ("cuda", "cpu"):
        doubtful = {one.rule for one in found if getattr(one, device).verdict in ("wrong", "suspect")}
        results = [findings.read_task(line) for line in lines_of_kind(lines[device], "unit")]
        every = findings.merge_candidates([result.suspects for result in results], KEPT)
        todo = {name: candidates for name, candidates in every.items() if name in doubtful}
        settled[device] = dict(_confirmations(todo, device, backends[device], until))
    after = [
        Differs(one.rule, settled["cpu"].get(one.rule, one.cpu), settled["cuda"].get(one.rule, one.cuda))
        for one in found
    ]
    right_alone = (UNTRIED, "right")
    return [
        one for one in after if (kinds := (_kind(one.cpu), _kind(one.cuda)))[0] != kinds[1] and kinds != right_alone
    ]


KEPT = 2
"""Cases of a rule that are run on real processes."""


def _confirmations(
    todo: Mapping[str, Sequence[Candidate]], device: str, backend: str, until: float
) -> Iterator[tuple[str, Word]]:
    with kernels_on(device), ProgramRealRuns(backend, device) as real_runs:
        for outcome in RealConfirmation([real_runs], backend, 0, "dtensor").settle(todo, {*todo}):
            finding = outcome.finding
            why = f"{finding.reason}" if finding else "right on real processes"
            yield outcome.name, Word(finding.verdict.value if finding else "cleared", why)
            if time.monotonic() > until:
                return


def _kind(word: Word) -> str:
    """What the verdict says: wrong for DTensor itself, right, suspect (wrong for the probe, and not for DTensor, or not run)."""
    return {"unsound": "wrong", "refused": "wrong", "sound": "right", "cleared": "right"}.get(
        word.verdict, word.verdict
    )


def by_op(found: Sequence[Differs]) -> Iterator[str]:
    """A line for each op: how many of its rules are judged so on the CPU, and so on CUDA."""
    ops: dict[str, Counter[str]] = {}
    for one in found:
        said = f"{_kind(one.cpu)} on the CPU, {_kind(one.cuda)} on CUDA"
        ops.setdefault(one.rule.split(":")[0], Counter())[said] += 1
    for op, counts in sorted(ops.items()):
        yield f"{op}: " + "; ".join(f"{count} {said}" for said, count in sorted(counts.items()))


def crashes(lines: Sequence[Line]) -> dict[str, str]:
    """What crashed, by overload: a device on which an op dies has no verdict on its rules."""
    return {
        crash.op: crash.error for line in lines_of_kind(lines, "unit") for crash in findings.read_task(line).crashed
    }
