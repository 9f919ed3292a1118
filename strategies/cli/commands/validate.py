"""What `localtensor validate` does once its options are read: checks, the run, the output, the exit code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from localtensor.errors import LocalTensorError
from strategies.base.atomic_files import unwritable, write_whole
from strategies.base.journal import BadJournal, DiskFull
from strategies.base.progress import bar
from strategies.base.signals import printed, say, undisturbed
from strategies.model.settings import DEFAULT_DTYPES, BadSetting, Settings, UnknownOp
from strategies.model.verdict import NOTHING, USAGE, Report
from strategies.sweep.report import text_and_json
from strategies.torch_api.user_modules import BadRules


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
    mesh: tuple[str, ...] = ()
    pairs: bool = False
    journal: Path | None = None
    resume: bool = False
    shard: str = ""
    executor: str = ""


def meshes(ranks: Sequence[int], given: Sequence[str]) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """One-axis meshes by their size, and the meshes of several axes; 2, 3 and 4 ranks where none is named.

    >>> meshes([], ["2", "2,2"])
    ((2,), ((2, 2),))
    """
    read = [tuple(_number(size, text) for size in text.split(",")) for text in given]
    axes = [*ranks, *(mesh[0] for mesh in read if len(mesh) == 1)]
    several = tuple(dict.fromkeys(mesh for mesh in read if len(mesh) > 1))
    return tuple(dict.fromkeys(axes or (2, 3, 4))), several


def _number(text: str, whole: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise BadSetting("--mesh", whole, "this is no mesh", "Write the size of each axis: --mesh 2,2.") from None


def _shard(text: str) -> tuple[int, int] | None:
    if not text:
        return None
    number, slash, count = text.partition("/")
    if not (slash and number.isdecimal() and count.isdecimal() and len(text) < 99):  # int() reads no 4,301 digits
        raise BadSetting("--shard", text, "this is no shard", "Write --shard 1/4 for the first of four.")
    return int(number), int(count)


@undisturbed()
def run(chosen: Chosen) -> int:
    """The exit code.  Usage errors are one sentence on standard error; files are written whole or not at all."""
    from strategies.sweep.session import (
        validate,  # who only shows a report, or reads options, needs nothing that judges
    )

    errors = Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)
    try:
        _writable(chosen)
        settings = _settings(chosen)
        with bar(errors, chosen.quiet) as shown:
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
    return told(report, chosen.json, chosen.repro, errors)


def told(report: Report, json: Path | None, repro: Path | None, errors: Console) -> int:
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


def _settings(chosen: Chosen) -> Settings:
    axes, several = meshes(chosen.ranks, chosen.mesh)
    return Settings(
        patterns=chosen.ops, everything=chosen.everything, search=chosen.search, ranks=axes, device=chosen.device, rules=chosen.rules, confirm=chosen.confirm,
        seed=chosen.seed, workers=chosen.workers,
        dtypes=chosen.dtypes or DEFAULT_DTYPES, meshes=several, pairs=chosen.pairs, journal=chosen.journal,
        resume=chosen.resume, shard=_shard(chosen.shard), executor=chosen.executor,
    )  # fmt: skip


def _writable(chosen: Chosen) -> None:
    """Say before the work, not after it, that a file cannot be written."""
    for option, path in (("--json", chosen.json), ("--repro", chosen.repro)):
        problem, remedy = unwritable(path, folder=option == "--repro") if path is not None else ("", "")
        if path is not None and problem:
            raise BadSetting(option, path, problem, remedy)
    if chosen.json is not None and not chosen.json.absolute().parent.is_dir():
        raise BadSetting("--json", chosen.json, "its folder is not there", "Make the folder first, or name another.")
