"""What `localtensor merge` does: one report of all shards, or what is missing."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from localtensor.errors import refusal
from strategies.base.atomic_files import unwritable
from strategies.base.journal import STRANGE, BadJournal, strange
from strategies.cli.commands.validate import told
from strategies.model.verdict import NOTHING, USAGE
from strategies.sweep import aggregate as tally
from strategies.sweep import shards as merge


def run(paths: tuple[Path, ...], out: Path | None, json: Path | None, repro: Path | None) -> int:
    """The exit code: that of the whole run, 2 for a file that is no journal of it, 3 where a unit is missing."""
    errors = Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)
    for option, place in (("--out", out), ("--json", json), ("--repro", repro)):
        problem, remedy = unwritable(place, folder=option == "--repro") if place is not None else ("", "")
        if problem:
            errors.print(refusal(merge.MERGES, option, str(place), problem, remedy), markup=False)
            return USAGE
    try:
        begin, lines, cut = merge.merged(paths)
        report = tally.report(begin, lines)
        if out is not None:
            merge.write(out, begin, lines)
    except merge.Gap as error:
        errors.print(str(error), markup=False)
        return NOTHING
    except BadJournal as error:
        errors.print(str(error), markup=False)
        return USAGE
    except STRANGE as error:
        names = ", ".join(map(str, paths))
        errors.print(str(strange(names, error, merge.MERGES)), markup=False)
        return USAGE
    except OSError as error:
        errors.print(f"localtensor merge: cannot write {out}: {error.strerror}.", markup=False)
        return NOTHING
    for sentence in cut:
        errors.print(sentence, markup=False)
    return told(report, json, repro, errors)
