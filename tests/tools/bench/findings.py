"""Renews what the README says of torch, and docs/findings.md, from one sweep.

python -m tests.tools.bench.findings                         # sweep now, and print the summary
python -m tests.tools.bench.findings sweep.jsonl             # from the journal of a sweep
python -m tests.tools.bench.findings sweep.jsonl --write     # and write README.md and docs/findings.md
"""

import argparse
import datetime as dt
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from strategies.base.atomic_files import write_whole
from strategies.base.journal import load_journal, open_journal
from strategies.base.progress import Progress
from strategies.base.signals import worker_count
from strategies.model.cause import CauseRecord
from strategies.model.settings import Settings
from strategies.model.verdict import Finding, Report, Verdict
from strategies.sweep import aggregate
from strategies.sweep.causes import pages
from strategies.sweep.causes.records import kept, records_of
from strategies.sweep.report.text_and_json import is_silent
from strategies.sweep.session import run_validation

ROOT = Path(__file__).parents[3]
START, END = "<!-- findings:start -->", "<!-- findings:end -->"
SHOWN = 10
"""Rows of the README's table; the others are in docs/findings.md."""


ABOUT = """\
By `localtensor validate --all --pairs --mesh 2,2 --mesh 2,3 --mesh 2,2,2 --journal sweep.jsonl`, then `localtensor causes
sweep.jsonl --repro scripts`, which prints a page and writes a script for each row.

A cause is the function of torch whose replacement makes its findings vanish. The rows are in the order of severity: silent ones
first, then by reach (everyday calls, uneven shards, arguments, NaN, other dtypes, private ops, `out=`, empty shards).

No finding depends on what a reduction makes of a number and a NaN, which gloo keeps or drops by the order of the ranks: where an
input that is P(min) or P(max) is NaN, every rank has it.
"""


def wrong(report: Report) -> list[Finding]:
    return [f for f in report.findings if f.verdict is Verdict.UNSOUND]


def totals(report: Report) -> str:
    """What the sweep came to, in two sentences."""
    found, c = wrong(report), report.counts
    programs = [f for f in found if f.title]
    quiet = [f for f in found if is_silent(f)]
    today = dt.datetime.now(tz=dt.timezone.utc).date().isoformat()
    ops = len({f.rule.op for f in found})
    return (
        f"torch {report.torch}, {today}: **{len(found)} wrong rules and programs of {ops} overloads**, each confirmed end to end on "
        f"gloo processes;\n{len(quiet)} of them silently: every rank goes on, with wrong numbers or shapes. "
        f"{len(programs)} show only with a second op, a gradient or\na mesh of several axes. {c.sound + c.unsound:,} rules were "
        f"validated in {c.instances:,} instances on {c.overloads:,} overloads.\n"
    )


def table(causes: Sequence[CauseRecord]) -> str:
    """A table in Markdown: a row for each cause."""
    lines = [
        "| # | cause | severity | a case that shows it | what happens | where | findings | tried |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for number, cause in enumerate(causes, 1):
        cells = (
            str(number), cause.name, cause.severity, f"`{_case(cause)}`", _happening(cause), f"`{cause.where}`",
            str(len(cause.findings)), " ".join(filter(None, (cause.tried_text, cause.why))),
        )  # fmt: skip
        lines.append(_row(cells))
    return "\n".join(lines) + "\n"


def short_table(causes: Sequence[CauseRecord], most: int) -> str:
    """A table of the first causes that reproduce."""
    lines = ["| what is wrong | case | what happens | where in torch |", "|---|---|---|---|"]
    for cause in [cause for cause in causes if cause.reproduces][:most]:
        cells = (cause.what, f"`{_case(cause)}`", _happening(cause), f"`{cause.where}`")
        lines.append(_row(cells))
    return "\n".join(lines) + "\n"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _case(cause: CauseRecord) -> str:
    return cause.call or cause.findings[0]


def _happening(cause: CauseRecord) -> str:
    if not cause.call:
        return "no case shows it alone"
    if cause.verdict and not cause.reproduces:
        return f"its script {cause.verdict} on gloo"
    return pages.happening(re.sub(r" \(\d+ of \d+ elements differ\)$", "", cause.reason))


def whole(report: Report) -> str:
    """The page with every cause."""
    parts = [
        "# What the sweep finds in torch, by cause\n", totals(report), pages.totals(report) + "\n",
        ABOUT, table(report.causes),
    ]  # fmt: skip
    return "\n".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("journal", nargs="?", type=Path, help="what --journal wrote")
    parser.add_argument("--write", action="store_true", help="write README.md and docs/findings.md")
    asked = parser.parse_args()
    if asked.journal:
        read = load_journal(asked.journal)
        begin, lines, causes = read.begin, read.lines, kept(read)
    else:
        with open_journal(None, resume=False) as journal:
            run_validation(
                Settings(everything=True, pairs=True, meshes=((2, 2), (2, 3), (2, 2, 2))), journal, Progress()
            )
            begin, lines, causes = journal.begun or {}, tuple(journal.lines), None
    if causes is None:
        causes = records_of(begin, lines, workers=worker_count(None), progress=Progress())
    report = replace(aggregate.report(begin, lines), causes=causes)
    made = f"{totals(report)}\n{pages.totals(report)}\n\n{short_table(causes, SHOWN)}"
    sys.stdout.write(made)
    if asked.write:
        text = (ROOT / "README.md").read_text()
        head, rest = text.split(START)
        more = "All of them: [docs/findings.md](docs/findings.md). These are the ten with the widest reach:\n\n"
        body = made.replace("| what is wrong |", f"{more}| what is wrong |", 1)
        write_whole(ROOT / "README.md", f"{head}{START}\n\n{body}\n{END}{rest.split(END)[1]}")
        write_whole(ROOT / "docs" / "findings.md", whole(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
