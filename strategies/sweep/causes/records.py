"""The computation of causes: findings are attributed, a script for each cause is run on gloo, and the result is data.

Everything that speaks of causes reads the records: from here, or from the line that `keep` adds to the journal.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from strategies.base.foreign_text import read_json
from strategies.base.journal import JournalLines, Line, lines_of_kind, open_journal
from strategies.base.progress import Progress
from strategies.model.cause import KIND, SHOWS, CauseRecord, causes_line, read_causes
from strategies.sweep import aggregate
from strategies.sweep.causes.cause import Case, Cause, causes_of, is_fault
from strategies.sweep.causes.reach import Reach, call_text
from strategies.sweep.causes.script import ScriptRun, right_text, run_first_that_shows
from strategies.sweep.causes.spelling import raw_spelling
from strategies.torch_api.rank_runs import RankProcesses

KNOWN_VERSIONS = Path(__file__).parent / "known_versions.json"
"""What each cause's script showed on each torch, as `python -m tests.tools.versions SCRIPTS --json FILE` writes it."""


def torch_version() -> str:
    """The version of the torch that runs, without its build: `2.13.0`."""
    return torch.__version__.split("+")[0]


def records_of(begin: Line, lines: Sequence[Line], *, workers: int, progress: Progress) -> tuple[CauseRecord, ...]:
    """The causes of the findings of a journal's lines, in their order; each script has run on real processes."""
    _, causes = causes_of(begin, lines, workers=workers, progress=progress)
    progress.phase("running scripts", len(causes))
    made: dict[int, CauseRecord] = {}
    ranked = sorted(range(len(causes)), key=lambda i: causes[i].record.ranks)  # other ranks need other processes
    with RankProcesses("gloo") as processes:
        for number in ranked:
            made[number] = with_run(causes[number], processes)
            progress.tick()
    return tuple(sorted(made.values(), key=lambda record: record.order))


def with_run(cause: Cause, processes: RankProcesses) -> CauseRecord:
    """The record of the cause with its call, its script, and what came of the script's run."""
    record = replace(cause.record, versions=known_versions(cause.record))
    if cause.case is None:
        return record
    record = replace(record, call=call_text(cause.case.program))
    ran = run_first_that_shows(processes, cause.case, record.name, _about(record), record.script_name)
    return record if ran is None else _ran(record, cause.case, ran)


def _ran(record: CauseRecord, case: Case, ran: ScriptRun) -> CauseRecord:
    if ran.verdict == SHOWS and ran.spelling == raw_spelling(
        case.program.sample.call
    ):  # no public function makes this very call
        private = replace(case.severity, reach=max(case.severity.reach, Reach.PRIVATE))
        order = tuple(map(int, private.order))
        record = replace(record, severity=str(private), rank=order, call=call_text(case.program, ran.spelling))
    every = ran.prints.splitlines()
    wanted = [line for line in every if re.match(r"rank \d+ want ", line)]
    if len(wanted) == 1:
        right, prints = wanted[0].partition(" want ")[2], "\n".join(line for line in every if line != wanted[0])
    else:  # it printed nothing of the kind, or so for several results
        prints, right = ran.prints, right_text(case.program)
    return replace(
        record,
        lines=ran.lines,
        prints=prints,
        right=right,
        verdict=ran.verdict,
        ran_on=torch_version(),
        script=ran.script,
    )


def _about(record: CauseRecord) -> str:
    count = len(record.findings)
    made = f"It makes {count} finding{'s' * (count != 1)}."
    return f"Found in torch {record.found_on}, {record.where}. {made} {record.tried_text}"


@functools.cache
def _known() -> tuple[tuple[str, frozenset[str], tuple[tuple[str, str], ...]], ...]:
    data = read_json(KNOWN_VERSIONS.read_bytes())
    found = []
    for script in data["scripts"]:
        words, families = _title_parts(script["title"])
        found.append((words, families, tuple((v, one["kind"]) for v, one in script["outcomes"].items())))
    return tuple(found)


def _title_parts(title: str) -> tuple[str, frozenset[str]]:
    """The words of a cause's name and the families of ops in it: those that are named, not those that are counted."""
    words, _, families = re.sub(r" and \d+ more$", "", title).partition(", for ")
    return words, frozenset(families.split(", ")) - {""}


def known_versions(record: CauseRecord) -> tuple[tuple[str, str], ...]:
    """What the cause showed on each torch, by the data in `KNOWN_VERSIONS`; empty where no one row is of this cause.

    A row is of this cause if function and words are equal, and it names an op of it: a journal of few ops names fewer.
    """
    words, _ = _title_parts(f"{record.subject}: {record.words}")
    own = set(record.families)
    rows = [row for row in _known() if row[0] == words and (row[1] & own or not (row[1] or own))]
    shown = rows[0][2] if len(rows) == 1 else ()
    # A script that does not show the fault where it was found says nothing of other versions.
    return shown if dict(shown).get(record.found_on, "").startswith("present") else ()


def kept(read: JournalLines) -> tuple[CauseRecord, ...] | None:
    """The causes that the journal holds; None if it has none, or those of another torch, or not of all its findings."""
    lines = list(lines_of_kind(read.lines, KIND))
    if not lines or lines[-1]["torch"] != torch_version():
        return None
    records = read_causes(lines)
    named = {name for record in records for name in record.findings}
    found = {f.name for f in filter(is_fault, aggregate.report(read.begin, read.lines).findings)}
    return records if named == found else None


def keep(path: Path, records: Iterable[CauseRecord]) -> None:
    """Add the causes to the journal.  Raises `BadJournal`, and `DiskFull` where its other lines stay as they are."""
    with open_journal(path, resume=True) as journal:
        shard = (journal.begun or {}).get("shard")
        journal.add(causes_line(records, torch_version(), shard))
