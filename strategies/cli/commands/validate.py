"""What `localtensor validate` does once its options are read: checks, the run, the output, the exit code."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from localtensor.errors import LocalTensorError
from strategies.base.atomic_files import write_whole
from strategies.base.journal import BadJournal, DiskFull
from strategies.base.progress import bar
from strategies.base.signals import many, printed, say, undisturbed
from strategies.cli.options import ValidateOptions
from strategies.model.settings import DEFAULT_DTYPES, BadSetting, Settings, UnknownOp, meshes, shard
from strategies.model.verdict import NOTHING, USAGE, Report
from strategies.sweep.report import text_and_json
from strategies.torch_api.user_modules import BadRules


@undisturbed()
def run(options: ValidateOptions) -> int:
    """The exit code.  Usage errors are one sentence on standard error; files are written whole or not at all."""
    from strategies.sweep.session import (
        validate,  # who only shows a report, or reads options, needs nothing that judges
    )

    errors = Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)
    try:
        settings = _settings(options)
        with bar(errors, options.quiet) as shown:
            report = validate(settings, shown)
    except DiskFull as error:
        errors.print(str(error), markup=False)
        return NOTHING
    except (BadSetting, UnknownOp, BadRules, BadJournal) as error:
        errors.print(str(error), markup=False)
        return USAGE
    except LocalTensorError as error:
        errors.print(f"localtensor itself failed: {error}", markup=False)
        return NOTHING
    return deliver(report, options.json, options.repro, errors)


def deliver(report: Report, json: Path | None, repro: Path | None, errors: Console) -> int:
    """Write what is to be written, print the report; the exit code: 3 where something could not be written."""
    if json or repro:
        say("; what was to be written is written whole, or not at all")
    try:
        report = text_and_json.written(report, str(repro) if repro else None)
        if json:
            write_whole(json, text_and_json.as_json(report))
        lost = ""
    except OSError as error:  # what was found is shown all the same: it may be the work of hours
        lost = f"cannot write {error.filename}: {error.strerror}."
    problem = printed(lambda wide: text_and_json.show(report, wide))
    for trouble in filter(None, (problem, lost)):
        errors.print(f"localtensor: {trouble}", markup=False)
    if lost:
        return NOTHING
    return (report.exit_code or NOTHING) if problem else report.exit_code


def _settings(options: ValidateOptions) -> Settings:
    ranks, several = meshes(options.ranks, options.mesh)
    return Settings(
        patterns=options.ops, everything=options.everything, search=options.search, ranks=ranks, meshes=several,
        dtypes=options.dtypes or DEFAULT_DTYPES, device=options.device, rules=options.rules, confirm=options.confirm,
        seed=options.seed, workers=many(options.workers), pairs=options.pairs, journal=options.journal,
        resume=options.resume, shard=shard(options.shard), executor=options.executor,
    )  # fmt: skip
