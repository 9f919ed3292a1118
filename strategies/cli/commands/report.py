"""What `localtensor report` does: a journal as one page that a person looks at."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from localtensor.errors import refusal
from strategies.base import atomic_files, journal
from strategies.base.signals import SHORT
from strategies.cli.commands.validate import deliver
from strategies.cli.options import MergeOptions, ReportOptions
from strategies.model.verdict import CLEAN, NOTHING, USAGE, Report
from strategies.sweep import aggregate
from strategies.sweep.report.html_page import page

CALL = "localtensor report"


def run(options: ReportOptions) -> int:
    """Write the page of the journal.

    The exit code: 0; 3 if the journal tested nothing, or the disk is full; 2 for what is no journal, and for a place
    to which nothing can be written.
    """
    path, out = options.journal, options.out
    errors = Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)
    if problem := _no_place(out):
        errors.print(_refused("--out", out, problem, "Name a file in a folder that is there."), markup=False)
        return USAGE
    try:
        read = journal.read(path, CALL)
    except journal.BadJournal as error:
        errors.print(str(error), markup=False)
        return USAGE
    try:
        text, report = page(read.begin, read.lines, name=path.name, cut=read.cut)
    except journal.STRANGE as error:
        errors.print(str(journal.strange(path, error, CALL)), markup=False)
        return USAGE
    try:
        atomic_files.write_whole(out, text)
    except OSError as error:
        problem, full = f"it cannot be written ({error.strerror})", error.errno in SHORT
        remedy = "Make room, or name a file elsewhere." if full else "Name a file of yours."
        errors.print(_refused("--out", out, problem, remedy), markup=False)
        return NOTHING if full else USAGE
    if read.cut:
        errors.print(read.cut, markup=False)
    return _summarize(errors, path, out, report)


def _summarize(errors: Console, path: Path, out: Path, report: Report) -> int:
    """Say what the page shows; on standard error, for the page itself may go to standard output."""
    counts, findings = report.counts, len(report.findings)
    if not counts.instances:
        errors.print(_refused("JOURNAL", path, "nothing was tested in it", f"{out} says why."), markup=False)
        return NOTHING
    tried = f"{counts.instances:,} rule instances on {counts.overloads:,} overloads"
    errors.print(f"{out} shows {findings:,} finding{'s' * (findings != 1)}, of {tried}.", markup=False)
    return CLEAN


def _no_place(out: Path) -> str:
    """Why no page can be made there; folders are not made."""
    try:
        if out.is_dir():
            return "is a folder"
        return "" if out.parent.is_dir() else f"there is no folder {out.parent}"
    except OSError as error:  # too long a name, say
        return f"it cannot be ({error.strerror})"


def _refused(argument: str, path: Path, problem: str, remedy: str) -> str:
    return refusal(CALL, argument, str(path), problem, remedy)


# What `localtensor merge` does: one report of all shards, or what is missing.


def merge_journals(options: MergeOptions) -> int:
    """The exit code: that of the whole run, 2 for a file that is no journal of it, 3 where a unit is missing."""
    errors = Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)
    try:
        begin, lines, cut = aggregate.merged(options.journals)
        report = aggregate.report(begin, lines)
        if options.out is not None:
            aggregate.write(options.out, begin, lines)
    except aggregate.Gap as error:
        errors.print(str(error), markup=False)
        return NOTHING
    except journal.BadJournal as error:
        errors.print(str(error), markup=False)
        return USAGE
    except journal.STRANGE as error:
        names = ", ".join(map(str, options.journals))
        errors.print(str(journal.strange(names, error, aggregate.MERGES)), markup=False)
        return USAGE
    except OSError as error:
        errors.print(f"localtensor merge: cannot write {options.out}: {error.strerror}.", markup=False)
        return NOTHING
    for sentence in cut:
        errors.print(sentence, markup=False)
    return deliver(report, options.json, options.repro, errors)
