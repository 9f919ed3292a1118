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
from strategies.base.progress import bar
from strategies.base.signals import printed, say, undisturbed
from strategies.gate import baseline as baselines
from strategies.gate import decision
from strategies.gate import plan as gate_work
from strategies.gate.baseline import BadBaseline, Baseline
from strategies.gate.formats import terminal
from strategies.gate.formats.github import annotations as workflow_commands
from strategies.gate.formats.github import summary
from strategies.gate.formats.json_output import as_json
from strategies.gate.formats.junit import junit
from strategies.gate.formats.sarif import sarif
from strategies.gate.model import GateResult
from strategies.gate.options import Asked, BadGate
from strategies.gate.plan import Work, within
from strategies.model.settings import BadSetting, UnknownOp
from strategies.model.verdict import NOTHING, USAGE
from strategies.torch_api.user_modules import BadRules

REFUSED = (
    BadGate, BadBaseline, BadRevision, NoRepository, NoGit, BadSetting, UnknownOp, BadRules, BadJournal,
)  # fmt: skip
"""What the user can mend: one sentence and exit code 2."""


@undisturbed()
def run(asked: Asked) -> int:
    """The exit code: 0 clean, 1 something new or gone, 2 usage, 3 in trouble.  Files are written whole or not at all."""
    start = time.time()
    errors = Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)
    try:
        today = dt.datetime.now(tz=dt.timezone.utc).date()
        asked.last_day(today)
        baseline = baselines.read(asked.baseline)
        with bar(errors, asked.quiet) as shown:
            found = gate_work.work(asked, gate_work.chosen(asked, Path.cwd(), start), shown)
        result, done = _beside(asked, found, baseline, today)
        result = replace(result, seconds=time.time() - start)
        home = within(asked.baseline, found.top)
    except DiskFull as error:
        return _said(errors, str(error), NOTHING)
    except REFUSED as error:  # settings, names and modules are those of validate, and say so
        return _said(errors, str(error).replace("localtensor validate: ", "localtensor gate: ", 1), USAGE)
    except LocalTensorError as error:
        return _said(errors, f"localtensor itself failed: {error}", NOTHING)
    lost = _write(asked, result, home)
    problem = _show(asked, result, home, done)
    if lost:
        return _said(errors, f"localtensor gate: {lost}", NOTHING)
    return _said(errors, f"localtensor gate: {problem}", result.exit_code or NOTHING) if problem else result.exit_code


def _said(errors: Console, text: str, code: int) -> int:
    errors.print(text, markup=False)
    return code


def _beside(asked: Asked, found: Work, baseline: Baseline, today: dt.date) -> tuple[GateResult, Sequence[str]]:
    """The result beside the baseline, which is written first as it was asked for; and what was done."""
    result = found.beside(baseline, today)
    if not (asked.update or asked.accept):
        return result, ()
    reason = (asked.accept or "").strip()
    after = decision.amended(baseline, result, remove=asked.update, reason=reason, expires=asked.last_day(today))
    if after.entries == baseline.entries:
        return result, (f"{baseline.path} stays as it is",)
    say("; the baseline is as it was, or as it was to be")
    after = baselines.write(after, result.report.torch)
    say("; the baseline is written, and other files perhaps not")
    more = len(set(after.entries) - set(baseline.entries))
    less = len({e.key for e in baseline.entries} - {e.key for e in after.entries})
    return found.beside(after, today), (f"{baseline.path}: {more} written, {less} removed",)


def _write(asked: Asked, result: GateResult, home: str) -> str:
    """Write the files that are asked for; which could not be written, or "".  What was found is shown all the same."""
    texts: dict[str, Callable[[], str]] = {
        "--junit": lambda: junit(result), "--json": lambda: as_json(result), "--summary": lambda: summary(result),
        "--sarif": lambda: sarif(result, baseline=home, version=localtensor.__version__),
    }  # fmt: skip
    for option, path in asked.files.named():
        try:
            if option == "--summary" and str(path) == os.environ.get("GITHUB_STEP_SUMMARY"):
                with path.open("a", encoding="utf-8") as file:  # one step's commands share it
                    file.write(texts[option]())
            else:
                write_whole(path, texts[option]())
        except OSError as error:
            return f"cannot write {path}: {error.strerror}."
    return ""


def _show(asked: Asked, result: GateResult, home: str, done: Sequence[str]) -> str:
    """Print the result; why it could not be printed, or ""."""

    def show(wide: Console) -> None:
        terminal.show(result, wide, done=done)
        if asked.files.github:
            sys.stdout.write(workflow_commands(result, baseline=home))

    return printed(show)
