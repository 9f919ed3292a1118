"""`localtensor gate`: runs, compares with the baseline, writes the files, and returns the exit code."""

from __future__ import annotations

import datetime as dt
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

import localtensor
from localtensor.errors import LocalTensorError
from strategies.base.atomic_files import write_whole
from strategies.base.git import BadRevision, NoGit, NoRepository
from strategies.base.journal import BadJournal, DiskFull
from strategies.base.options import BadOption
from strategies.base.progress import error_console, progress_bar, with_count
from strategies.base.signals import print_stdout, quiet_on_one_thread, set_stop_note
from strategies.cli.options import fail
from strategies.gate import baseline, decision, plan
from strategies.gate.baseline import BadBaseline, Baseline, GateResult
from strategies.gate.formats import github, wording
from strategies.gate.formats.json_output import as_json
from strategies.gate.formats.junit import junit
from strategies.gate.formats.sarif import sarif
from strategies.gate.options import GateOptions
from strategies.gate.plan import GateFindings, repository_path
from strategies.model.settings import BadRules, BadSetting, UnknownOp
from strategies.model.verdict import NOTHING, USAGE

REFUSED = (
    BadOption, BadBaseline, BadRevision, NoRepository, NoGit, BadSetting, UnknownOp, BadRules, BadJournal,
)  # fmt: skip
"""Errors that the user can fix: one sentence and exit code 2."""


@quiet_on_one_thread()
def run(options: GateOptions) -> int:
    """The exit code: 0 clean, 1 something new or gone, 2 usage, 3 in trouble.  Files are written whole or not at all."""
    start = time.time()
    try:
        today = dt.datetime.now(tz=dt.timezone.utc).date()
        options.last_day(today)
        accepted = baseline.read(options.baseline)
        with progress_bar(error_console(), options.quiet) as progress:
            found = plan.run_plan(options, plan.make_plan(options, Path.cwd(), start), progress)
        result, changes = _amend_baseline(options, found, accepted, today)
        result = replace(result, seconds=time.time() - start)
        home = repository_path(options.baseline, found.top)
    except DiskFull as error:
        return fail(str(error), NOTHING)
    except REFUSED as error:  # checks of settings, names and modules are those of validate, as are their messages
        return fail(str(error).replace("localtensor validate: ", "localtensor gate: ", 1), USAGE)
    except LocalTensorError as error:
        return fail(f"localtensor itself failed: {error}", NOTHING)
    lost = _write(options, result, home)

    def show(console: Console) -> None:
        wording.show(result, console, done=changes)
        if options.github:
            sys.stdout.write(github.annotations(result, baseline=home))

    problem = print_stdout(show)
    if lost:
        return fail(f"localtensor gate: {lost}", NOTHING)
    return fail(f"localtensor gate: {problem}", result.exit_code or NOTHING) if problem else result.exit_code


def _amend_baseline(
    options: GateOptions, found: GateFindings, before: Baseline, today: dt.date
) -> tuple[GateResult, Sequence[str]]:
    """The result compared with the baseline as --update and --accept leave it, and what was written to that file."""
    result = found.beside(before, today)
    if not (options.update or options.accept):
        return result, ()
    reason = (options.accept or "").strip()
    last = options.last_day(today)
    after = decision.amend_baseline(before, result, remove=options.update, reason=reason, expires=last)
    if after.entries == before.entries:
        return result, (f"{before.path} stays as it is",)
    set_stop_note("; the baseline is as it was, or as it was to be")
    after = baseline.write(after, result.report.torch)
    set_stop_note("; the baseline is written, and other files perhaps not")
    written = {entry.key for entry in set(after.entries) - set(before.entries)}
    causes = [one for one in result.new_causes if written.intersection(one.keys)]
    of = f" of {with_count(len(causes), 'rule function')}" if causes else ""
    less = len({e.key for e in before.entries} - {e.key for e in after.entries})
    said = f"{before.path}: {with_count(len(written), 'entry', 'entries')}{of} written, {less} removed"
    return found.beside(after, today), (said,)


def _write(options: GateOptions, result: GateResult, home: str) -> str:
    """Write the requested files.  Why one could not be written, or "": the result is printed all the same."""
    texts: dict[str, Callable[[], str]] = {
        "--junit": lambda: junit(result),
        "--json": lambda: as_json(result),
        "--summary": lambda: github.summary(result),
        "--comment": lambda: github.comment(result),
        "--sarif": lambda: sarif(result, baseline=home, version=localtensor.__version__),
    }
    for flag, path in options.files():
        try:
            if flag == "--summary" and str(path) == os.environ.get("GITHUB_STEP_SUMMARY"):
                with path.open("a", encoding="utf-8") as file:  # one step's commands share it
                    file.write(texts[flag]())
            else:
                write_whole(path, texts[flag]())
        except OSError as error:
            return f"cannot write {path}: {error.strerror}."
    return ""
