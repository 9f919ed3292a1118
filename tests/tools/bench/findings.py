"""Renews what the README says of torch, and docs/findings.md, from one sweep.

python -m tests.tools.bench.findings                         # sweep now, and print the summary
python -m tests.tools.bench.findings sweep.jsonl             # from the journal of a sweep
python -m tests.tools.bench.findings sweep.jsonl --write     # and write README.md and docs/findings.md
"""

import argparse
import datetime as dt
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from strategies.base.atomic_files import write_whole
from strategies.base.journal import load_journal
from strategies.model.settings import Settings
from strategies.model.verdict import Finding, Report, Verdict
from strategies.sweep import aggregate
from strategies.sweep.report.text_and_json import call_text, is_silent
from strategies.sweep.session import validate

ROOT = Path(__file__).parents[3]
START, END = "<!-- findings:start -->", "<!-- findings:end -->"
SHOWN = 10
"""Rows of the README's table; the others are in docs/findings.md."""


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


def short_table(found: Iterable[Finding]) -> str:
    """One row for each op, its out=, in-place and foreach forms left out: the smallest silent case of each."""
    best: dict[str, Finding] = {}
    for f in found:
        family = re.sub(r"^(aten|prims)\._?(foreach_)?|_$", "", ".".join(f.rule.op.split(".")[:2]))
        if (
            is_silent(f)
            and not f.rule.op.endswith("out")
            and (family not in best or _weight(f) < _weight(best[family]))
        ):
            best[family] = f
    lines = ["| what | smallest case | what happens |", "|---|---|---|"]
    shown = sorted(sorted(best.values(), key=_weight)[:SHOWN], key=lambda f: f.name)
    lines += [f"| `{f.name.removeprefix('aten.')}` | `{call_text(f)}` | {_reason(f)} |" for f in shown]
    return "\n".join(lines) + "\n"


def _reason(f: Finding) -> str:
    return re.sub(r" \(\d+ of \d+ elements differ\)$", "", f.reason).replace("|", "\\|")


def _weight(f: Finding) -> tuple[bool, int, int, str]:
    return "every rank raises" in f.reason, f.ranks, f.elements, f.name


def markdown(findings: Iterable[Finding]) -> str:
    """The table of the rules that are wrong: a row for each overload, with its smallest case."""
    by_op: dict[str, list[Finding]] = {}
    for finding in findings:
        if finding.verdict is Verdict.UNSOUND:
            by_op.setdefault(finding.rule.op, []).append(finding)
    lines = ["| rules found wrong | smallest case, ranks | what happens | show it |", "|---|---|---|---|"]
    for op, found in sorted(by_op.items()):
        first = min(found, key=lambda f: (f.ranks, sum(map(len, f.sample))))
        rules = "; ".join(f"`{str(f.rule).removeprefix(op + ': ')}`" for f in found[:3])
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        reason = _reason(first)
        cells = (
            f"**{op}** {rules}{more}",
            f"`{call_text(first)}`, {first.ranks}",
            reason,
            f"`localtensor validate {op}`",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def whole(report: Report) -> str:
    """The page with every finding."""
    found = wrong(report)
    alone, programs = [f for f in found if not f.title], [f for f in found if f.title]
    quiet, loud = [f for f in alone if is_silent(f)], [f for f in alone if not is_silent(f)]
    parts = [
        "# What the sweep finds in torch\n", totals(report),
        "By `localtensor validate --all --pairs --mesh 2,2 --mesh 2,3 --mesh 2,2,2`; `--repro DIR` writes a script for each.\n",
        f"## Silently wrong: {len(quiet)} rules\n", markdown(quiet), f"## One rank stops: {len(loud)} rules\n",
        "A rank raises on its (mostly empty) piece, and its peers wait for it for ever.\n", markdown(loud),
        f"## More than one op on one axis: {len(programs)} programs\n", _programs(programs),
    ]  # fmt: skip
    return "\n".join(parts)


def _programs(found: Sequence[Finding]) -> str:
    rows = [
        f"| `{f.name}` | `{call_text(f)}` | {f.reason.replace('|', chr(92) + '|')} |"
        for f in sorted(found, key=lambda f: f.name)
    ]
    return "\n".join(["| program | smallest case | what happens |", "|---|---|---|", *rows]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("journal", nargs="?", type=Path, help="what --journal wrote")
    parser.add_argument("--write", action="store_true", help="write README.md and docs/findings.md")
    asked = parser.parse_args()
    if asked.journal:
        kept = load_journal(asked.journal)
        report = aggregate.report(kept.begin, kept.lines)
    else:
        report = validate(Settings(everything=True, pairs=True, meshes=((2, 2), (2, 3), (2, 2, 2))))
    made = f"{totals(report)}\n{short_table(wrong(report))}"
    sys.stdout.write(made)
    if asked.write:
        text = (ROOT / "README.md").read_text()
        head, rest = text.split(START)
        more = (
            "All of them: [docs/findings.md](docs/findings.md). These are the smallest silent ones, one for an op:\n\n"
        )
        body = made.replace("| what |", f"{more}| what |", 1)
        write_whole(ROOT / "README.md", f"{head}{START}\n\n{body}\n{END}{rest.split(END)[1]}")
        write_whole(ROOT / "docs" / "findings.md", whole(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
