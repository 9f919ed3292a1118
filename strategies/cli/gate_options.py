"""The part of the command line that a repository's CI calls: `localtensor gate`, and the report for people."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from strategies.base.exits import USAGE, leave, many

GATE_EXAMPLES = """Examples:

\b
  localtensor gate --rules my_rules
      all rules of this module, beside the baseline
  localtensor gate --rules my_rules --changed origin/main
      just what changed since then, and why it was chosen
  localtensor gate --rules my_rules --accept "issue 12"
      what is new now is accepted from now on
  localtensor gate --rules my_rules --update
      drop the entries that no longer show
  localtensor gate cumprod gather --budget 5m
      torch's own rules for two ops, five minutes at most
  localtensor gate --rules my_rules --sarif out.sarif --github
      for a CI server; --junit, --json and --summary, too

Exit codes: 0 clean; 1 something new, or an entry of the baseline that no longer shows; 2 usage;
3 infrastructure, a crash, or nothing was tested; 130 stopped by Ctrl-C.
"""

REPORT_EXAMPLES = """Examples:

\b
  localtensor validate --all --journal sweep.jsonl
      makes a journal
  localtensor report sweep.jsonl -o report.html
      one page that opens without a network

Exit codes: 0 the page is written; 2 a file that is no journal, or a place that cannot be written; 3 nothing was tested.
"""


def gate(
    ops: Annotated[list[str] | None, Argument(metavar="OP", help="Names or globs of overloads: of the module's, or of torch's own.", show_default=False)] = None,
    everything: Annotated[bool, Option("--all", help="Every overload that DTensor registers.")] = False,
    rules: Annotated[str, Option("--rules", help="`dtensor`, or a module that registers rules: just those are judged.")] = "dtensor",
    baseline: Annotated[Path, Option("--baseline", help="What is known and accepted; commit it.")] = Path("localtensor-baseline.json"),
    update: Annotated[bool, Option("--update", help="Remove the entries that no longer show; adds none.")] = False,
    accept: Annotated[str | None, Option("--accept", metavar="REASON", help="Add what is new, with this reason.", show_default=False)] = None,
    expires: Annotated[str, Option("--expires", metavar="YYYY-MM-DD", help="The last day on which it is accepted.")] = "",
    changed: Annotated[str | None, Option("--changed", metavar="REV", help="Judge only what changed since this revision, by content.", show_default=False)] = None,
    budget: Annotated[str, Option("--budget", metavar="TIME", help="90s, 5m or 1h: no overload is begun after it.")] = "",
    junit: Annotated[Path | None, Option("--junit", help="Write JUnit XML here.", show_default=False)] = None,
    sarif: Annotated[Path | None, Option("--sarif", help="Write SARIF 2.1.0 here.", show_default=False)] = None,
    json_file: Annotated[Path | None, Option("--json", help="Write the whole result here.", show_default=False)] = None,
    summary: Annotated[Path | None, Option("--summary", help="Write a Markdown summary here; $GITHUB_STEP_SUMMARY is added to.", show_default=False)] = None,
    github: Annotated[bool, Option("--github", help="Also print annotations for GitHub.")] = False,
    ranks: Annotated[list[int] | None, Option("--ranks", help="Mesh sizes to try.  [default: 2 3 4]", show_default=False)] = None,
    mesh: Annotated[list[str] | None, Option("--mesh", help="A mesh of several axes to try, too: --mesh 2,2.", show_default=False)] = None,
    pairs: Annotated[bool, Option("--pairs", help="Also what follows the op.")] = False,
    confirm: Annotated[str, Option("--confirm", help="Real processes that confirm a suspicion: gloo or nccl.")] = "gloo",
    cache: Annotated[Path, Option("--cache", help="Where verdicts of equal runs are kept.")] = Path(".localtensor-cache"),
    no_cache: Annotated[bool, Option("--no-cache", help="Keep no verdicts, and take none.")] = False,
    seed: Annotated[int, Option("--seed", help="Same seed, same output.")] = 0,
    workers: Annotated[int | None, Option("--workers", help="Worker processes.  [default: one for each core]", show_default=False)] = None,
    quiet: Annotated[bool, Option("--quiet", "-q", help="No progress bar.")] = False,
) -> None:  # fmt: skip
    """Let only what is new fail: judge rules beside a committed baseline, before a merge."""

    def work() -> int:
        from strategies.cli.commands import gate as gate_command
        from strategies.gate.options import Asked, BadGate, Files

        try:
            asked = Asked(
                tuple(ops or ()), everything, rules, baseline, update, accept, expires, changed, budget,
                Files(junit, sarif, json_file, summary, github), tuple(ranks or ()), tuple(mesh or ()), pairs, confirm,
                None if no_cache else cache, many(workers), quiet, seed,
            )  # fmt: skip
        except BadGate as refusal:
            typer.echo(str(refusal), err=True)
            return USAGE
        return gate_command.run(asked)

    leave(work, "; the baseline is as it was")


def report(
    journal: Annotated[Path, Argument(metavar="JOURNAL", help="What `localtensor validate --journal` wrote.", show_default=False)],
    out: Annotated[Path, Option("-o", "--out", help="The page to write.")] = Path("report.html"),
) -> None:  # fmt: skip
    """Write one HTML page of a journal: totals, a map of ops, filters, and each finding with its picture."""

    def work() -> int:
        from strategies.cli.commands import report as html_report

        return html_report.run(journal, out)

    leave(work)
