"""`localtensor report`: one HTML page of a journal.  `localtensor merge`: one report of several journals."""

from __future__ import annotations

from pathlib import Path

from localtensor.errors import refusal_sentence
from strategies.base import atomic_files, journal
from strategies.base.signals import SHORTAGES, print_error
from strategies.cli.commands.validate import deliver
from strategies.cli.options import MergeOptions, ReportOptions, fail
from strategies.model.verdict import CLEAN, NOTHING, USAGE, Report
from strategies.sweep import aggregate
from strategies.sweep.report.html_page import page

CALL = "localtensor report"


def run(options: ReportOptions) -> int:
    """Write the page of the journal.

    The exit code: 0; 3 if the journal tested nothing, or the disk is full; 2 for a file that is no journal, and for a
    place to which nothing can be written.
    """
    path, out = options.journal, options.out
    if problem := _place_problem(out):
        return fail(_refused("--out", out, problem, "Name a file in a folder that is there."), USAGE)
    try:
        read = journal.load_journal(path, CALL)
    except journal.BadJournal as error:
        return fail(str(error), USAGE)
    try:
        text, report = page(read.begin, read.lines, name=path.name, cut=read.cut)
    except journal.FOREIGN_LINE_ERRORS as error:
        return fail(str(journal.foreign_line_error(path, error, CALL)), USAGE)
    try:
        atomic_files.write_whole(out, text)
    except OSError as error:
        problem, full = f"it cannot be written ({error.strerror})", error.errno in SHORTAGES
        remedy = "Make room, or name a file elsewhere." if full else "Name a file of yours."
        return fail(_refused("--out", out, problem, remedy), NOTHING if full else USAGE)
    if read.cut:
        print_error(read.cut)
    return _summarize(path, out, report)


def _summarize(path: Path, out: Path, report: Report) -> int:
    """Print what the page shows on standard error, since the page itself may go to standard output."""
    counts, findings = report.counts, len(report.findings)
    if not counts.instances:
        return fail(_refused("JOURNAL", path, "nothing was tested in it", f"{out} says why."), NOTHING)
    tried = f"{counts.instances:,} rule instances on {counts.overloads:,} overloads"
    print_error(f"{out} shows {findings:,} finding{'s' * (findings != 1)}, of {tried}.")
    return CLEAN


def _place_problem(out: Path) -> str:
    """Why no page can be written there, or "".  Missing folders are not created."""
    try:
        if out.is_dir():
            return "is a folder"
        return "" if out.parent.is_dir() else f"there is no folder {out.parent}"
    except OSError as error:  # for instance a name that is too long
        return f"it cannot be ({error.strerror})"


def _refused(argument: str, path: Path, problem: str, remedy: str) -> str:
    return refusal_sentence(CALL, argument, str(path), problem, remedy)


def merge_journals(options: MergeOptions) -> int:
    """Report on all shards as on one run.

    The exit code: that of the whole run, 2 for a file that is no journal of it, 3 where a unit is missing.
    """
    try:
        begin, lines, cut = aggregate.merged_run(options.journals)
        report = aggregate.report(begin, lines)
        if options.out is not None:
            aggregate.write(options.out, begin, lines)
    except aggregate.IncompleteRun as error:
        return fail(str(error), NOTHING)
    except journal.BadJournal as error:
        return fail(str(error), USAGE)
    except journal.FOREIGN_LINE_ERRORS as error:
        names = ", ".join(map(str, options.journals))
        return fail(str(journal.foreign_line_error(names, error, aggregate.MERGE_CALL)), USAGE)
    except OSError as error:
        return fail(f"localtensor merge: cannot write {options.out}: {error.strerror}.", NOTHING)
    for sentence in cut:
        print_error(sentence)
    return deliver(report, options.json, options.repro)
