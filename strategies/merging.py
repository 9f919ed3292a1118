"""What `localtensor merge` does: one report of all shards, or what is missing."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from strategies import merge, tally
from strategies.command import told
from strategies.journal import BadJournal
from strategies.verdicts import NOTHING, USAGE


def run(paths: tuple[Path, ...], out: Path | None, json: Path | None, repro: Path | None) -> int:
    """The exit code: that of the whole run, 2 for a file that is no journal of it, 3 where a unit is missing."""
    errors = Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)
    try:
        begin, lines, cut = merge.merged(paths)
        if out is not None:
            merge.write(out, begin, lines)
    except merge.Gap as error:
        errors.print(str(error), markup=False)
        return NOTHING
    except BadJournal as error:
        errors.print(str(error), markup=False)
        return USAGE
    except OSError as error:
        errors.print(f"localtensor merge: cannot write {out}: {error.strerror}.", markup=False)
        return NOTHING
    for sentence in cut:
        errors.print(sentence, markup=False)
    return told(tally.report(begin, lines), json, repro, errors)
