"""`localtensor causes`: the findings of a journal, or of some ops, grouped by the function of torch that makes them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from localtensor.errors import LocalTensorError, refusal_sentence
from strategies.base import journal
from strategies.base.progress import Progress, error_console, progress_bar
from strategies.base.signals import print_error, quiet_on_one_thread, set_stop_note, worker_count
from strategies.cli.commands.output import deliver_text, fail
from strategies.cli.options import CausesOptions
from strategies.model.settings import BadSetting, Settings, UnknownOp
from strategies.model.verdict import CLEAN, NOTHING, USAGE, WRONG
from strategies.sweep.causes import pages
from strategies.sweep.causes.cause import causes_of
from strategies.sweep.session import run_validation

CALL = "localtensor causes"
MESHES = ((2, 2),)
"""The meshes of several axes on which ops are tried that are named in place of a journal."""


@quiet_on_one_thread()
def run(options: CausesOptions) -> int:
    """The exit code: 0 for no finding, 1 for a cause, 2 for no journal or no op, 3 where nothing was tested or written."""
    try:
        with progress_bar(error_console(), options.quiet) as progress:
            begin, lines, cut = _lines(options, progress)
            report, causes = causes_of(begin, lines, workers=worker_count(options.workers), progress=progress)
            made = pages.pages_of(causes, progress)
    except (BadSetting, UnknownOp, journal.BadJournal) as error:
        return fail(str(error), USAGE)
    except journal.FOREIGN_LINE_ERRORS as error:
        return fail(str(journal.foreign_line_error(", ".join(options.what), error, CALL)), USAGE)
    except LocalTensorError as error:
        return fail(f"localtensor itself failed: {error}", NOTHING)
    if cut:
        print_error(cut)
    if not report.counts.instances:
        what = ", ".join(options.what)
        return fail(refusal_sentence(CALL, "JOURNAL", what, "nothing was tested in it", "Validate something."), NOTHING)
    set_stop_note("; what was to be written is written whole, or not at all")
    code = WRONG if causes else CLEAN
    files = [(options.json, pages.as_json(report, made, code))] if options.json else []
    files += [(options.repro / page.file, page.run.script) for page in made if options.repro and page.run]
    return deliver_text(pages.as_text(report, made), files, code)


def _lines(options: CausesOptions, progress: Progress) -> tuple[journal.Line, Sequence[journal.Line], str]:
    """The lines of the journal that is named, or those of a validation of the ops that are named."""
    if len(options.what) == 1 and Path(options.what[0]).exists():
        read = journal.load_journal(Path(options.what[0]), CALL)
        return read.begin, read.lines, read.cut
    settings = Settings(
        patterns=options.what, pairs=True, meshes=MESHES, seed=options.seed, workers=worker_count(options.workers)
    )
    with journal.open_journal(None, resume=False) as kept:
        run_validation(settings, kept, progress)
        return kept.begun or {}, tuple(kept.lines), ""
