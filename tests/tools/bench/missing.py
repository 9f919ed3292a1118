"""What `localtensor discover` says beside a list that was checked by hand: `python -m tests.tools.bench.missing`.

Noise is the share of rules called Missing that do not hold; what it finds of those that hold and that torch
does not claim is its reach.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from strategies.base import worker_pool
from strategies.model.rule import Rule
from strategies.validation.discover import Discovery, discover
from strategies.validation.missing_rules import Survey
from strategies.validation.rule_inference import values_by_name
from tests.strategies.cases import placements
from tests.strategies.missing_list import Row, rows
from tests.tools.bench.by_other_means import refuted

TARGET = 2.0
"""Per cent of noise at most."""


@dataclass(slots=True)
class Measure:
    """`false` are rules called Missing that do not hold, `beside` those that the list does not name and that a
    second judge finds nothing against; `lost` hold and are neither claimed nor found; `untried` could not be asked."""

    reported: int = 0
    false: list[str] = field(default_factory=list)
    beside: list[str] = field(default_factory=list)
    right: list[str] = field(default_factory=list)
    claimed: int = 0
    found: int = 0
    lost: list[str] = field(default_factory=list)
    untried: list[str] = field(default_factory=list)

    @property
    def noise(self) -> float:
        return 100 * len(self.false) / max(1, self.reported)

    @property
    def reach(self) -> float:
        return 100 * self.found / max(1, self.found + len(self.lost))


def measure(discoveries: Iterable[Discovery], listed: Sequence[Row]) -> Measure:
    """Every rule that was called Missing beside the list, and every rule of the list beside what was found."""
    told = Measure()
    for one in discoveries:
        here = [row for row in listed if f"aten.{row.op}" == one.op]
        for survey in one.surveys:
            for rule in survey.missing():
                _report(told, survey, rule, here)
        for row in here:
            if row.holds:
                _reach(told, one, row)
    return told


def _report(told: Measure, survey: Survey, rule: Rule, here: Sequence[Row]) -> None:
    told.reported += 1
    verdicts = [row for row in here if _rule(row) == str(rule) and _meant(row, survey)]
    name = f"{rule} {survey.kind.dims} {survey.kind.numbers} {', '.join(map(str, survey.kind.facts))}"
    if any(not row.holds for row in verdicts):
        told.false.append(f"{name}: {next(row.why for row in verdicts if not row.holds)}")
    elif verdicts:
        told.right.append(name)
    else:
        wrong = refuted(rule, survey.samples)
        (told.false if wrong else told.beside).append(f"{name}{f': {wrong}' if wrong else ''}")


def _reach(told: Measure, one: Discovery, row: Row) -> None:
    meant = [survey for survey in one.surveys if _meant(row, survey) and _asked(row, survey)]
    if not meant:
        told.untried.append(str(row))
    elif any(_rule(row) in survey.claimed for survey in meant):
        told.claimed += 1
    elif any(survey.says(survey.holds[_rule(row)]) for survey in meant if _rule(row) in survey.holds):
        told.found += 1
    else:
        told.lost.append(str(row))


def _rule(row: Row) -> str:
    inputs, outputs = row.rule.split(" -> ")
    return str(Rule(f"aten.{row.op}", placements(inputs), placements(outputs)))


def _meant(row: Row, survey: Survey) -> bool:
    if len(survey.kind.dims) != len(row.rule.split(" -> ")[0].split(", ")):
        return False
    with contextlib.suppress(TypeError, IndexError):
        return not row.where or bool(eval(row.where, values_by_name(survey)))
    return False


def _asked(row: Row, survey: Survey) -> bool:
    return row.rule.split(" -> ")[0] in survey.tried


def work(op: str, note: Callable[[int], None]) -> Discovery:
    return discover(op)


def found_for(ops: Sequence[str], many: int) -> list[Discovery]:
    answers = worker_pool.run_tasks(work, list(ops), workers=many, limit=600.0)
    return [answer.value for answer in answers if isinstance(answer, worker_pool.TaskDone)]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.tools.bench.missing", description=__doc__)
    parser.add_argument("ops", nargs="*", help="overloads of the list, as cumsum.default; all of them if none is named")
    parser.add_argument("--show", action="store_true", help="name every rule that is not as it should be")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    listed = rows()
    ops = sorted({f"aten.{row.op}" for row in listed if not asked.ops or row.op in asked.ops})
    start = time.perf_counter()
    found = found_for(ops, os.cpu_count() or 1)
    told = measure(found, listed)
    print(
        f"{len(listed)} rules in the list, {len(found)} of {len(ops)} overloads searched in"
        f" {time.perf_counter() - start:.1f} s: {told.reported} called Missing, {len(told.right)} of them listed as right,"
        f" {len(told.beside)} not listed and not refuted, {len(told.false)} wrong: noise {told.noise:.1f} % (at most {TARGET} %).\n"
        f"Of those that hold, torch claims {told.claimed}; of the rest {told.found} were found and {len(told.lost)} not"
        f" ({told.reach:.0f} %); {len(told.untried)} could not be asked."
    )
    for name, lines in (("wrong", told.false), ("not found", told.lost)) + (
        (("not asked", told.untried), ("beside the list", told.beside)) if asked.show else ()
    ):
        for line in lines:
            print(f"  {name}: {line}")
    return 0 if told.noise < TARGET else 1


if __name__ == "__main__":
    raise SystemExit(main())
