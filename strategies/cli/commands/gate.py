"""What `localtensor gate` does once its options are read: the run, the baseline, the files, the exit code."""

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
from strategies.base.progress import bar
from strategies.base.signals import printed, say, undisturbed
from strategies.gate import baseline, decision, plan
from strategies.gate.baseline import BadBaseline, Baseline, GateResult
from strategies.gate.formats import github
from strategies.gate.formats import wording as terminal
from strategies.gate.formats.json_output import as_json
from strategies.gate.formats.junit import junit
from strategies.gate.formats.sarif import sarif
from strategies.gate.options import GateOptions
from strategies.gate.plan import Work, within
from strategies.model.settings import BadSetting, UnknownOp
from strategies.model.verdict import NOTHING, USAGE
from strategies.torch_api.user_modules import BadRules

REFUSED = (
    BadOption, BadBaseline, BadRevision, NoRepository, NoGit, BadSetting, UnknownOp, BadRules, BadJournal,
)  # fmt: skip
"""What the user can mend: one sentence and exit code 2."""


@undisturbed()
def run(options: GateOptions) -> int:
    """The exit code: 0 clean, 1 something new or gone, 2 usage, 3 in trouble.  Files are written whole or not at all."""
    start = time.time()
    errors = Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)
    try:
        today = dt.datetime.now(tz=dt.timezone.utc).date()
        options.last_day(today)
        accepted = baseline.read(options.baseline)
        with bar(errors, options.quiet) as shown:
            found = plan.work(options, plan.chosen(options, Path.cwd(), start), shown)
        result, done = _beside(options, found, accepted, today)
        result = replace(result, seconds=time.time() - start)
        home = within(options.baseline, found.top)
    except DiskFull as error:
        return _said(errors, str(error), NOTHING)
    except REFUSED as error:  # settings, names and modules are those of validate, and say so
        return _said(errors, str(error).replace("localtensor validate: ", "localtensor gate: ", 1), USAGE)
    except LocalTensorError as error:
        return _said(errors, f"localtensor itself failed: {error}", NOTHING)
    lost = _write(options, result, home)
    problem = _show(options, result, home, done)
    if lost:
        return _said(errors, f"localtensor gate: {lost}", NOTHING)
    return _said(errors, f"localtensor gate: {problem}", result.exit_code or NOTHING) if problem else result.exit_code


def _said(errors: Console, text: str, code: int) -> int:
    errors.print(text, markup=False)
    return code


def _beside(options: GateOptions, found: Work, before: Baseline, today: dt.date) -> tuple[GateResult, Sequence[str]]:
    """The result beside the baseline, which is written first as it was asked for; and what was done."""
    result = found.beside(before, today)
    if not (options.update or options.accept):
        return result, ()
    reason = (options.accept or "").strip()
    after = decision.amended(before, result, remove=options.update, reason=reason, expires=options.last_day(today))
    if after.entries == before.entries:
        return result, (f"{before.path} stays as it is",)
    say("; the baseline is as it was, or as it was to be")
    after = baseline.write(after, result.report.torch)
    say("; the baseline is written, and other files perhaps not")
    more = len(set(after.entries) - set(before.entries))
    less = len({e.key for e in before.entries} - {e.key for e in after.entries})
    return found.beside(after, today), (f"{before.path}: {more} written, {less} removed",)


def _write(options: GateOptions, result: GateResult, home: str) -> str:
    """Write the files that are asked for; which could not be written, or "".  What was found is shown all the same."""
    texts: dict[str, Callable[[], str]] = {
        "--junit": lambda: junit(result), "--json": lambda: as_json(result), "--summary": lambda: github.summary(result),
        "--sarif": lambda: sarif(result, baseline=home, version=localtensor.__version__),
    }  # fmt: skip
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


def _show(options: GateOptions, result: GateResult, home: str, done: Sequence[str]) -> str:
    """Print the result; why it could not be printed, or ""."""

    def show(wide: Console) -> None:
        terminal.show(result, wide, done=done)
        if options.github:
            sys.stdout.write(github.annotations(result, baseline=home))

    return printed(show)
