"""`localtensor causes`: the findings of a journal, or of some ops, grouped by the function of torch that makes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from localtensor.errors import LocalTensorError, refusal_sentence
from strategies.base import journal
from strategies.base.progress import Progress, error_console, progress_bar
from strategies.base.signals import print_error, quiet_on_one_thread, set_stop_note, worker_count
from strategies.cli.options import CausesOptions, deliver_text, fail
from strategies.model.cause import CauseRecord
from strategies.model.settings import BadSetting, Settings, UnknownOp
from strategies.model.verdict import CLEAN, NOTHING, USAGE, WRONG
from strategies.sweep import aggregate
from strategies.sweep.causes import pages
from strategies.sweep.causes.records import keep, kept, records_of
from strategies.sweep.session import run_validation
from strategies.torch_api.rank_runs import prepare_confirmation

CALL = "localtensor causes"
MESHES = ((2, 2),)
"""The meshes of several axes on which ops are tried that are named in place of a journal."""


@quiet_on_one_thread()
def run(options: CausesOptions) -> int:
    """The exit code: 0 for no finding, 1 for a cause, 2 for no journal or no op, 3 where nothing was tested or written.

    The causes of a journal are kept in it, and taken from it when they are there.
    """
    try:
        with progress_bar(error_console(), options.quiet) as progress:
            read = _lines(options, progress)
            records = None if options.again else kept(read)
            computed = records is None
            if records is None:
                _check_rules(options.rules, str(read.begin["rules"]))
                records = records_of(read.begin, read.lines, workers=worker_count(options.workers), progress=progress)
            report = replace(aggregate.report(read.begin, read.lines), causes=records)
    except (BadSetting, UnknownOp, journal.BadJournal) as error:
        return fail(str(error), USAGE)
    except journal.FOREIGN_LINE_ERRORS as error:
        return fail(str(journal.foreign_line_error(", ".join(options.what), error, CALL)), USAGE)
    except LocalTensorError as error:
        return fail(f"localtensor itself failed: {error}", NOTHING)
    if read.cut:
        print_error(read.cut)
    if not report.counts.instances:
        what = ", ".join(options.what)
        return fail(refusal_sentence(CALL, "JOURNAL", what, "nothing was tested in it", "Validate something."), NOTHING)
    set_stop_note("; what was to be written is written whole, or not at all")
    code = WRONG if records else CLEAN
    files = [(options.json, pages.as_json(report, code))] if options.json else []
    files += [(options.repro / one.script_name, one.script) for one in records if options.repro and one.script]
    lost = _kept_in_journal(options, records) if computed and read.whole else ""
    code = deliver_text(pages.as_text(report, options.repro), files, code, options.repro)
    return fail(lost, NOTHING) if lost else code


def _check_rules(given: str, found: str) -> None:
    """Raises `BadSetting` where the module of a journal's rules, which is imported, is not the one that the user names."""
    if given != found:
        own = found == "dtensor"
        which = "DTensor's own" if own else f"those of {found}, which would be imported"
        remedy = "Leave --rules out." if own else f"Pass --rules {found} if you trust that module."
        raise BadSetting("--rules", given, f"the journal's rules are {which}", remedy, CALL)


def _kept_in_journal(options: CausesOptions, records: Sequence[CauseRecord]) -> str:
    """Add the causes to the journal.  Returns why they are not in it on a full disk; a journal of others is left alone."""
    try:
        keep(Path(options.what[0]), records)
    except journal.DiskFull as error:
        return f"{CALL}: the causes are not in the journal: {error}"
    except journal.BadJournal as error:
        print_error(f"{CALL}: the causes are not kept in the journal: {error}")
    return ""


def _lines(options: CausesOptions, progress: Progress) -> journal.JournalLines:
    """The lines of the journal that is named, or those of a validation of the ops that are named, in no file."""
    if len(options.what) == 1 and Path(options.what[0]).exists():
        return journal.load_journal(Path(options.what[0]), CALL)
    settings = Settings(
        patterns=options.what,
        pairs=True,
        meshes=MESHES,
        rules=options.rules,
        seed=options.seed,
        workers=worker_count(options.workers),
    )
    prepare_confirmation(settings.confirm)
    with journal.open_journal(None, resume=False) as made:
        run_validation(settings, made, progress)
        return journal.JournalLines(made.begun or {}, tuple(made.lines), 0)
