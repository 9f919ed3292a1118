"""The part of the command line that plans redistributions: `localtensor plan`, and `localtensor cost check`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from strategies.base.signals import USAGE, leave, many

PLAN_EXAMPLES = """Examples:

\b
  localtensor plan "f32[8,8] @ dp=2: S(0) -> S(1)"
      steps, price, alternatives, and DTensor's own plan
  localtensor plan "f32[64,64] @ dp=2,tp=4: S(0),P(sum) -> R,S(1)"
      a mesh of two axes, a placement for each
  localtensor plan "i64[7] @ 2,3: S(0)[1],S(0)[0] -> S(0),S(0)" --picture -
      one dim cut in two orders, drawn here
  localtensor plan "f32[8,8] @ dp=2: S(0) -> R" --picture plan.svg
      drawn into a file: SVG, HTML or text
  localtensor plan "f32[8,8] @ 2,8: S(0),S(0) -> S(1),R" --inner 3,300 --outer 5,25
      your links, in and between nodes: microseconds, GB/s
  localtensor plan "f32[8,8] @ 2,8: S(0),S(0) -> S(1),R" --by bytes --memory 1MB
      the fewest bytes, with no more than this in use
  localtensor plan "f32[64] @ dp=2,tp=2: P(sum),P(sum) -> R,R" --flattened dp,tp --json
      with one group of both axes; for programs

Placements: R; S(dim); SS(dim,blocks), strided; P(sum), P(avg), P(min), P(max), P(product). S(0)[1],S(0)[0]: the second
axis cuts dim 0 first. Exit codes: 0 planned; 1 no plan within --memory; 2 usage; 3 infrastructure; 130 Ctrl-C.
"""


def plan(
    text: Annotated[str, Argument(metavar="TEXT", help='Tensor, mesh, and placements before and after: "f32[8,4] @ dp=2,tp=2: S(0),R -> R,S(1)".', show_default=False)],
    by: Annotated[str, Option("--by", help="What to make least: time, bytes, torch (its own cost), or MODULE:FUNCTION, a price of one step.")] = "time",
    topology: Annotated[str | None, Option("--topology", metavar="FILE", help="The links of the cluster, as JSON; or 300,25: GB/s within and between nodes.", show_default=False)] = None,
    inner: Annotated[str | None, Option("--inner", metavar="US,GB/S", help="The link within a node: latency in microseconds, and gigabytes per second.", show_default=False)] = None,
    outer: Annotated[str | None, Option("--outer", metavar="US,GB/S", help="The link between nodes.", show_default=False)] = None,
    per_node: Annotated[int | None, Option("--per-node", metavar="N", help="How many ranks a node has, beside --inner and --outer; else 8.", show_default=False)] = None,
    memory: Annotated[str | None, Option("--memory", metavar="SIZE", help="The most that a rank may have in use: 2GB, 512MiB.", show_default=False)] = None,
    flattened: Annotated[list[str] | None, Option("--flattened", metavar="AXES", help="Axes that have one group of all their ranks: dp,tp.", show_default=False)] = None,
    alternatives: Annotated[bool, Option("--alternatives/--no-alternatives", help="Also what is best in bytes, memory or steps.")] = True,
    dtensor: Annotated[bool, Option("--dtensor/--no-dtensor", help="Also what DTensor would do. Its graph-based planner is not asked where it takes seconds.")] = True,
    picture: Annotated[str | None, Option("--picture", metavar="FILE", help="Draw what each rank holds: FILE.svg, FILE.html, FILE.txt, or - for here.", show_default=False)] = None,
    code: Annotated[bool, Option("--code", help="Print Python that makes this plan, instead.")] = False,
    as_json: Annotated[bool, Option("--json", help="Print one JSON object, instead.")] = False,
) -> None:  # fmt: skip
    """Plan the cheapest redistribution from one layout to another, beside its alternatives and DTensor's own plan."""

    def work() -> int:
        from strategies.cli.commands import plan as plan_command

        wanted = plan_command.Wanted(
            text, by, topology, inner, outer, per_node, memory, tuple(flattened or ()), alternatives, dtensor, picture,
            code, as_json,
        )  # fmt: skip
        return plan_command.run(wanted)

    leave(work)


COST_EXAMPLES = """Examples:

\b
  localtensor cost check torch
      torch's own redistribute_cost, on a mesh of 2 x 2
  localtensor cost check time --mesh 2,3 --shape 7,5
      the price by which we plan
  localtensor cost check my_package.my_costs:price --json
      a function of yours: of two specs, or of one move

Exit codes: 0 it is a metric; 1 it is none; 2 usage; 3 infrastructure; 130 stopped by Ctrl-C.
"""

cost = typer.Typer(
    name="cost", no_args_is_help=True, help="Costs of redistribution, on trial.", rich_markup_mode=None,
    epilog=COST_EXAMPLES.partition("Exit codes")[0],
)  # fmt: skip


@cost.callback()
def _cost() -> None:
    """Costs of redistribution, on trial."""


@cost.command("check", epilog=COST_EXAMPLES, short_help="Test whether a cost is a metric.")
def check(
    name: Annotated[str, Argument(metavar="COST", help="torch, time, bytes, or MODULE:FUNCTION.", show_default=False)],
    mesh: Annotated[str, Option("--mesh", help="The sizes of its axes.")] = "2,2",
    shape: Annotated[str, Option("--shape", help="The shape of the tensor.")] = "8,8",
    most: Annotated[int, Option("--most", help="How many broken triples are shown.")] = 5,
    as_json: Annotated[bool, Option("--json", help="Print one JSON object, instead.")] = False,
) -> None:  # fmt: skip
    """Test whether a cost is a metric: nothing for nothing, never negative, and no detour cheaper than the way."""

    def work() -> int:
        from strategies.cli.commands import plan as cost_command
        from strategies.planner.text.options import BadPlanOption, sizes_of

        call = "localtensor cost check"
        try:
            ranks, sizes = sizes_of("--mesh", mesh, call), sizes_of("--shape", shape, call)
        except BadPlanOption as error:
            typer.echo(str(error), err=True)
            return USAGE
        return cost_command.run_cost_check(name, ranks, sizes, most, as_json)

    leave(work)


# The part of the command line that a repository's CI calls: `localtensor gate`, and the report for people.

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
