"""Renews the findings table in the README from one sweep over the torch that is installed.

python -m tests.bench.findings              # print the table
python -m tests.bench.findings --readme     # and put it between the marks in README.md
"""

import argparse
import datetime as dt
import sys
from pathlib import Path

from strategies.report import markdown, silent, write_whole
from strategies.settings import Settings
from strategies.validate import validate
from strategies.verdicts import Verdict

README = Path(__file__).parents[2] / "README.md"
START, END = "<!-- findings:start -->", "<!-- findings:end -->"


def table() -> str:
    """The sentence of totals and the table."""
    report = validate(Settings(everything=True))
    wrong = [f for f in report.findings if f.verdict is Verdict.UNSOUND]
    quiet, loud = [f for f in wrong if silent(f)], [f for f in wrong if not silent(f)]
    ops = len({f.rule.op for f in wrong})
    counts = report.counts
    today = dt.datetime.now(tz=dt.timezone.utc).date().isoformat()
    return (
        f"torch {report.torch}, {today}, `localtensor validate --all`: **{len(wrong)} rules of {ops} overloads are wrong**, each\n"
        f"confirmed end to end on gloo processes, among {counts.sound + counts.unsound:,} rules judged in {counts.instances:,} instances on\n"
        f"{counts.overloads} overloads. The last column tries the overload alone; a row that it does not show comes from calls\nthat other ops make and needs `--all`. `--repro DIR` writes the scripts.\n\n"
        f"**Silently wrong: {len(quiet)} rules.** Every rank goes on, with wrong numbers or shapes.\n\n{markdown(quiet)}\n"
        f"**One rank stops: {len(loud)} rules.** A rank raises on its (mostly empty) piece, and its peers wait for it for ever.\n\n"
        f"{markdown(loud)}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--readme", action="store_true", help="write the table into README.md")
    options = parser.parse_args()
    made = table()
    sys.stdout.write(made)
    if options.readme:
        text = README.read_text()
        head, rest = text.split(START)
        write_whole(README, f"{head}{START}\n\n{made}\n{END}{rest.split(END)[1]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
