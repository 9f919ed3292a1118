"""`localtensor validate`: checks the settings, runs, delivers the report, and returns the exit code."""

from __future__ import annotations

from pathlib import Path

from localtensor.errors import LocalTensorError
from strategies.base.atomic_files import write_whole
from strategies.base.journal import BadJournal, DiskFull
from strategies.base.progress import error_console, progress_bar
from strategies.base.signals import print_error, print_stdout, quiet_on_one_thread, set_stop_note
from strategies.cli.options import ValidateOptions, fail
from strategies.model.settings import BadRules, BadSetting, BadSource, UnknownOp
from strategies.model.verdict import NOTHING, USAGE, Report
from strategies.sweep.report import text_and_json


@quiet_on_one_thread()
def run(options: ValidateOptions) -> int:
    """The exit code.  Usage errors are one sentence on standard error; files are written whole or not at all."""
    from strategies.sweep.session import validate
    from strategies.torch_api.rank_runs import (
        prepare_confirmation,  # `deliver` alone is also used by commands that validate nothing
    )

    try:
        with progress_bar(error_console(), options.quiet) as shown:
            prepare_confirmation(options.confirm)
            report = validate(options.settings(), shown)
    except DiskFull as error:
        return fail(str(error), NOTHING)
    except (BadSetting, UnknownOp, BadRules, BadSource, BadJournal) as error:
        return fail(str(error), USAGE)
    except LocalTensorError as error:
        return fail(f"localtensor itself failed: {error}", NOTHING)
    return deliver(report, options.json, options.repro)


def deliver(report: Report, json: Path | None, repro: Path | None) -> int:
    """Write the JSON file and the repro scripts, print the report; the exit code: 3 where a file could not be written."""
    if json or repro:
        set_stop_note("; what was to be written is written whole, or not at all")
    try:
        report = text_and_json.write_scripts(report, str(repro) if repro else None)
        if json:
            write_whole(json, text_and_json.as_json(report))
        lost = ""
    except OSError as error:  # the report is printed all the same: it may be the work of hours
        lost = f"cannot write {error.filename}: {error.strerror}."
    problem = print_stdout(lambda wide: text_and_json.show(report, wide))
    for trouble in filter(None, (problem, lost)):
        print_error(f"localtensor: {trouble}")
    if lost:
        return NOTHING
    return (report.exit_code or NOTHING) if problem else report.exit_code
