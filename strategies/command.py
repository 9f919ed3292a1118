"""What `localtensor validate` does once its options are read: checks, the run, the output, the exit code."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from localtensor.errors import LocalTensorError
from strategies import report as reports
from strategies.modules import BadRules
from strategies.progress import bar
from strategies.settings import DEFAULT_DTYPES, BadSetting, Settings, UnknownOp
from strategies.validate import validate
from strategies.verdicts import NOTHING, USAGE


@dataclass(frozen=True, slots=True)
class Chosen:
    """The command line's options as they were read."""

    ops: tuple[str, ...]
    everything: bool
    search: bool
    ranks: tuple[int, ...]
    dtypes: tuple[str, ...]
    device: str
    rules: str
    confirm: str
    json: Path | None
    repro: Path | None
    seed: int
    workers: int
    quiet: bool


def run(chosen: Chosen) -> int:
    """The exit code.  Usage errors are one sentence on standard error; files are written whole or not at all."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)  # the tensors are small, the workers many, and they are forked from here
    errors = Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)
    try:
        _writable(chosen)
        settings = _settings(chosen)
        with bar(errors, chosen.quiet) as shown:
            report = validate(settings, shown)
    except (BadSetting, UnknownOp, BadRules) as error:
        errors.print(str(error), markup=False)
        return USAGE
    except LocalTensorError as error:
        errors.print(f"localtensor itself failed: {error}", markup=False)
        return NOTHING
    try:
        report = reports.written(report, str(chosen.repro) if chosen.repro else None)
        if chosen.json:
            reports.write_whole(chosen.json, reports.as_json(report))
    except OSError as error:
        errors.print(f"localtensor validate: cannot write {error.filename}: {error.strerror}.", markup=False)
        return NOTHING
    wide = _Pipe(width=None if sys.stdout.isatty() else 140, soft_wrap=False, emoji=False)
    try:
        reports.show(report, wide)
    except BrokenPipeError:  # `localtensor ... | head` has read enough; the exit code is still the verdict
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return report.exit_code


class _Pipe(Console):
    """rich leaves with exit code 1 when nobody reads any longer; here 1 means a wrong rule."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def _settings(chosen: Chosen) -> Settings:
    return Settings(
        patterns=chosen.ops, everything=chosen.everything, search=chosen.search,
        ranks=tuple(dict.fromkeys(chosen.ranks)), device=chosen.device, rules=chosen.rules, confirm=chosen.confirm,
        seed=chosen.seed, workers=chosen.workers,
        dtypes=chosen.dtypes or DEFAULT_DTYPES,
    )  # fmt: skip


def _writable(chosen: Chosen) -> None:
    """Say before the work, not after it, that a file cannot be written."""
    if chosen.json is not None:
        if chosen.json.is_dir():
            raise BadSetting("--json", chosen.json, "this is a folder", "Name a file.")
        if not chosen.json.absolute().parent.is_dir():
            raise BadSetting(
                "--json", chosen.json, "its folder is not there", "Make the folder first, or name another."
            )
        if not os.access(chosen.json.absolute().parent, os.W_OK):
            raise BadSetting("--json", chosen.json, "its folder cannot be written", "Name a file in a folder of yours.")
    if chosen.repro is not None and chosen.repro.exists() and not chosen.repro.is_dir():
        raise BadSetting("--repro", chosen.repro, "this is a file", "Name a folder; it is made if it is not there.")
    if chosen.repro is not None:
        there = next(p for p in (chosen.repro.absolute(), *chosen.repro.absolute().parents) if p.exists())
        if not there.is_dir() or not os.access(there, os.W_OK):
            raise BadSetting("--repro", chosen.repro, f"{there} takes no files", "Name a folder below one of yours.")
