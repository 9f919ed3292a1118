"""What `localtensor coverage` does: of every overload that DTensor registers what a sweep has made of it."""

from __future__ import annotations

import logging
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from rich.console import Console

from localtensor.errors import LocalTensorError
from strategies import coverage, population
from strategies.coverage import Tried
from strategies.files import write_whole
from strategies.journal import BadJournal, Line, of_kind, open_journal, read
from strategies.progress import bar
from strategies.settings import Settings
from strategies.validate import sweep
from strategies.verdicts import CLEAN, NOTHING, USAGE, Verdict


def run(journal: Path | None, json: Path | None, *, seed: int, workers: int, quiet: bool) -> int:
    """The exit code: 0 if anything was tried, 3 if not; 2 for a file that is no journal.

    Without a journal everything is tried now, on 2 and 3 ranks, which takes minutes.
    """
    errors = Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    if json is not None and not json.absolute().parent.is_dir():
        errors.print(f"localtensor coverage: --json: {json}: its folder is not there. Make it first.", markup=False)
        return USAGE
    try:
        begin, lines = _read(journal) if journal else _now(errors, seed, workers, quiet)
    except BadJournal as error:
        errors.print(str(error), markup=False)
        return USAGE
    except LocalTensorError as error:
        errors.print(f"localtensor itself failed: {error}", markup=False)
        return NOTHING
    tried = of_lines(lines)
    members = population.everything(begin["device"])
    found = coverage.table(members, tried, torch=begin["torch"], device=begin["device"])
    if json is not None:
        try:
            write_whole(json, coverage.as_json(found))
        except OSError as error:
            errors.print(f"localtensor coverage: cannot write {json}: {error.strerror}.", markup=False)
            return NOTHING
    Console(width=None if sys.stdout.isatty() else 140, emoji=False).print(coverage.rendered(found))
    return CLEAN if any(one.samples for one in tried.values()) else NOTHING


def _read(path: Path) -> tuple[Line, Sequence[Line]]:
    found = read(path, "JOURNAL")
    return found.begin, found.lines


def _now(errors: Console, seed: int, workers: int, quiet: bool) -> tuple[Line, Sequence[Line]]:
    settings = Settings(everything=True, ranks=(2, 3), seed=seed, workers=workers)
    with bar(errors, quiet) as shown, open_journal(None, resume=False) as journal:
        sweep(settings, journal, shown)
        return journal.begun or {}, journal.lines


def of_lines(lines: Iterable[Line]) -> dict[str, Tried]:
    """What became of each overload, by the lines of a journal; trials of one op alone count."""
    samples: Counter[str] = Counter()
    verdicts: dict[str, set[str]] = defaultdict(set)
    reasons: dict[str, list[str]] = defaultdict(list)
    kept = list(lines)
    for line in of_kind(kept, "unit"):
        op, trial = line["unit"].split(" ")[:2]
        if trial != "alone":
            continue
        samples[op] += line.get("samples", 0)
        verdicts[op] |= {Verdict.SOUND.value} if line.get("sound") else set()
        reasons[op] += [*line.get("untestable", {}).values(), *line.get("skipped", {})]
        reasons[op] += [crash["error"] for crash in line.get("crashed", ())]
    for line in of_kind(kept, "settled"):
        op = line["rule"].split(":")[0]
        if op in samples:
            verdicts[op].add(Verdict.SOUND.value if line["verdict"] == "cleared" else line["verdict"])
            reasons[op] += [line["reason"]] if "reason" in line else []
    return {op: Tried(samples[op], frozenset(verdicts[op]), tuple(dict.fromkeys(reasons[op]))) for op in samples}
