"""The command line: `localtensor validate ...`; the exit codes stand in `strategies.base.signals`."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import traceback
from typing import Annotated

import typer
from typer import Option

from strategies.base import signals
from strategies.base.options import takes_options
from strategies.cli import options as command_options
from strategies.cli.cost import cost
from strategies.cli.usage import Command, Commands, repeat_options
from strategies.gate.options import GateOptions

app = typer.Typer(
    name="localtensor", cls=Commands, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
    epilog="Examples:\n\n\b\n"
           "  localtensor validate gather\n"
           "      one op of torch\n"
           "  localtensor validate --all --json report.json\n"
           "      every rule of torch's own\n"
           "  localtensor run -n 8 train.py\n"
           "      a torchrun script, its ranks as threads\n"
           "  localtensor gate --rules my_rules\n"
           "      before a merge: only new findings fail\n"
           "  localtensor plan \"f32[8,8] @ dp=2: S(0) -> S(1)\"\n"
           "      the cheapest redistribution, and DTensor's own\n",
)  # fmt: skip

EXAMPLES = """Examples:

\b
  localtensor validate cumprod gather "nn.functional.*"
      some ops of torch, by OpInfo name, overload or glob
  localtensor validate --all --json report.json
      every overload that DTensor registers
  localtensor validate add --search --ranks 2
      also valid shardings that DTensor does not register
  localtensor validate cumprod --repro scripts
      a torchrun script for every finding
  localtensor validate --rules my_rules
      just the rules that this module registers
  localtensor validate --all --journal s.jsonl
      keeps what is done; --resume goes on with it
  localtensor validate --all --journal 1.jsonl --shard 1/4
      a quarter of the work, for a CI matrix
  localtensor validate --plans --mesh 2,2
      DTensor's own redistributions: wrong values, waste

Exit codes: 0 nothing wrong; 1 an Unsound or Refused rule, or a registration that torch ignores; 2 usage;
3 nothing was tested, or the tool itself failed; 130 stopped by Ctrl-C, 143 by SIGTERM, as every command.
"""


def _print_version(given: bool) -> None:
    if given:
        import localtensor

        typer.echo(f"localtensor {localtensor.__version__}")
        raise typer.Exit(signals.EXIT_CLEAN)


@app.callback()
def _root(
    version: Annotated[
        bool, Option("--version", help="Print the version and leave.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Tests distributed PyTorch without a cluster: every rank simulated in one process, every sharding rule tested."""


@app.command(cls=Command, epilog=EXAMPLES, short_help="Validate sharding rules.")
@takes_options(section=True)
def validate(options: command_options.ValidateOptions) -> int:
    """Validate sharding rules against the real op, and confirm every Unsound on real processes."""
    journal = options.journal
    remedy = f"go on with it by --journal {journal} --resume" if journal else "--journal FILE would keep what is done"
    signals.set_stop_note(f"; no report was written; {remedy}")
    if options.plans:
        from strategies.cli.commands import plans_audit

        return plans_audit.run(options)
    from strategies.cli.commands.validate import run

    return run(options)


MERGE_EXAMPLES = """Examples:

\b
  localtensor merge 1.jsonl 2.jsonl 3.jsonl 4.jsonl
      one report of four shards
  localtensor merge *.jsonl --json report.json
      the same, for programs

Exit codes: those of the whole run; 2 a file that is no journal, or of another run; 3 a unit is missing.
"""


@app.command(cls=Command, epilog=MERGE_EXAMPLES, short_help="Join the journals of several shards.")
@takes_options()
def merge(options: command_options.MergeOptions) -> int:
    """Join the journals of several shards, and prove that nothing is missing."""
    from strategies.cli.commands.report import merge_journals

    return merge_journals(options)


COVERAGE_EXAMPLES = """Examples:

\b
  localtensor coverage sweep.jsonl
      of the sweep that wrote this journal
  localtensor coverage
      of a sweep that is made now: some minutes

Exit codes: 0 something was tested; 2 a file that is no journal; 3 nothing was tested, or the tool itself failed.
"""


@app.command(cls=Command, epilog=COVERAGE_EXAMPLES, short_help="What was tested, and why the rest was not.")
@takes_options()
def coverage(options: command_options.CoverageOptions) -> int:
    """Which of the overloads that DTensor registers were tested, which have a verdict, and why the others have none."""
    from strategies.cli.commands.coverage import run

    return run(options)


DISCOVER_EXAMPLES = """Examples:

\b
  localtensor discover scatter_add
      valid shardings that DTensor does not register
  localtensor discover aten.mv.default --emit
      a module of plain torch that registers them
  localtensor discover aten.mv.default --emit > more.py
      and `localtensor validate --rules more` validates it

Exit codes: 0 searched, whether something is missing or not; 2 usage; 3 nothing was searched.
"""


@app.command(cls=Command, epilog=DISCOVER_EXAMPLES, short_help="Find missing rules.")
@takes_options()
def discover(options: command_options.DiscoverOptions) -> int:
    """Find the missing rules of an op: valid shardings that DTensor does not register."""
    from strategies.cli.commands.discover import run

    return run(options)


RUN_EXAMPLES = """Examples:

\b
  localtensor run -n 8 train.py --epochs 1
      eight rank threads, the same order every time
  localtensor run -n 4 --schedule shuffled:7 train.py
      another order, the same on every repetition
  localtensor run -n 2 --on gloo train.py
      two real processes, as torchrun starts them
  localtensor run -n 2 -m my_package.train --epochs 1
      a module, as `python -m` runs it

Exit codes: that of the first rank that failed; 1 a fault of the program, on standard error; 2 usage;
130 stopped by Ctrl-C.
"""


@app.command(
    cls=Command,
    epilog=RUN_EXAMPLES,
    short_help="Run a torchrun script on rank threads.",
    context_settings={"allow_interspersed_args": False},
)
@takes_options()
def run(options: command_options.RunOptions) -> int:
    """Run a torchrun script on rank threads, or on real processes, of this machine."""
    from strategies.cli.commands.run import run

    return run(options)


COMPARE_EXAMPLES = """Examples:

\b
  localtensor compare train.py -n 8
      with the same script on one rank
  localtensor compare train.py -n 8 --reference "train.py -n 4" -- --steps 2
      two configurations, both with --steps 2

Exit codes: 0 equal; 1 a divergence; 2 usage; 3 nothing was compared, or a script failed; 130 stopped by Ctrl-C.
"""


@app.command(cls=Command, epilog=COMPARE_EXAMPLES, short_help="Where a parallel script first goes wrong.")
@takes_options()
def compare(options: command_options.CompareOptions) -> int:
    """Compare a torchrun script with another, or with itself on fewer ranks: does it compute the same, and where not?"""
    from strategies.cli.commands.compare import run

    return run(options)


GATE_EXAMPLES = """Examples:

\b
  localtensor gate --rules my_rules
      all rules of this module, compared with the baseline
  localtensor gate --rules my_rules --changed origin/main
      just what changed since then, and why it was chosen
  localtensor gate --rules my_rules --accept "issue 12"
      accept the new findings from now on
  localtensor gate --rules my_rules --update
      drop the entries that no longer show
  localtensor gate cumprod gather --budget 5m
      torch's own rules for two ops, five minutes at most
  localtensor gate --rules my_rules --sarif out.sarif --github
      for a CI server; --junit, --json and --summary, too

Exit codes: 0 clean; 1 something new, or an entry of the baseline that no longer shows; 2 usage;
3 infrastructure, a crash, or nothing was tested; 130 stopped by Ctrl-C.
"""


@app.command(cls=Command, epilog=GATE_EXAMPLES, short_help="Fail CI on new findings only.")
@takes_options("; the baseline is as it was", section=True)
def gate(options: GateOptions) -> int:
    """Fail CI on new findings only: validate rules, and compare the findings with a committed baseline."""
    from strategies.cli.commands.gate import run

    return run(options)


REPORT_EXAMPLES = """Examples:

\b
  localtensor validate --all --journal sweep.jsonl
      makes a journal
  localtensor report sweep.jsonl -o report.html
      one page that opens without a network

Exit codes: 0 the page is written; 2 a file that is no journal, or a place that cannot be written; 3 nothing was tested.
"""


@app.command(cls=Command, epilog=REPORT_EXAMPLES, short_help="Write one HTML page of a journal.")
@takes_options()
def report(options: command_options.ReportOptions) -> int:
    """Write one HTML page of a journal: totals, a map of ops, filters, and each finding with its picture."""
    from strategies.cli.commands.report import run

    return run(options)


CAUSES_EXAMPLES = """Examples:

\b
  localtensor causes sweep.jsonl --repro scripts
      the causes of a sweep's findings, and their scripts
  localtensor causes cumprod nn.functional.mse_loss
      validate these ops first
  localtensor causes own.jsonl --rules my_rules
      the causes of a run that was made with --rules

Exit codes: 0 no finding; 1 a cause; 2 a file that is no journal, an unknown op, or a journal of other --rules; 3 nothing was tested.
"""


@app.command(cls=Command, epilog=CAUSES_EXAMPLES, short_help="Group findings by what is wrong in torch.")
@takes_options()
def causes(options: command_options.CausesOptions) -> int:
    """Group findings by cause: the function of torch that is wrong, found by replacing it, with a script for each."""
    from strategies.cli.commands.causes import run

    return run(options)


RACES_EXAMPLES = """Examples:

\b
  localtensor races
      our shared cache under 20,000 interleavings
  localtensor races --target once --schedules 1000000
      a night of them
  localtensor races --target propagate --schedules 300
      our propagator, many threads, one schedule at a time
  localtensor races --target dtensor
      torch's own propagator, under threads that run free
  localtensor races --target dtensor --repro scripts
      and a script of plain torch for each finding
  localtensor races --target dtensor --seconds 120 --json races.json
      two minutes at most, for a CI server

Exit codes: 0 nothing found; 1 something found; 2 usage; 3 infrastructure, or a part was not run and nothing was found;
130 stopped by Ctrl-C.
"""


@app.command(cls=Command, epilog=RACES_EXAMPLES, short_help="Look for races in caches of propagation.")
@takes_options("; nothing was written")
def races(options: command_options.RacesOptions) -> int:
    """Look for races: in our shared cache and propagator, schedule by schedule, and in torch's own propagator."""
    from strategies.cli.commands.races import run

    return run(options)


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


@app.command(cls=Command, epilog=PLAN_EXAMPLES, short_help="Plan the cheapest redistribution.")
@takes_options()
def plan(options: command_options.PlanOptions) -> int:
    """Plan the cheapest redistribution from one layout to another, beside its alternatives and DTensor's own plan."""
    from strategies.cli.commands.plan import run

    return run(options)


app.add_typer(cost)
CHANGED = b"localtensor itself failed, or a module of yours has changed Python; this says nothing about any rule.\n"


def _end_beside_triton(code: object) -> None:
    """Ends the process as the interpreter does, but for its last step, in which triton prints 60 lines of what it leaks.

    torch's OpInfo database imports triton where it is installed: as it is beside torch for GPUs, which pip installs on Linux.
    """
    if "triton" in sys.modules and isinstance(code, int):
        sys.modules["threading"]._shutdown()
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        os._exit(code & 0xFF)


def main() -> None:
    """The console script.  The words after `run` are left alone: a `--ranks` among them may be the script's own."""
    signals.install_handlers()
    signals.open_streams()
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # before torch is imported: it warns of each resized out=
    words = sys.argv[1:]
    signals.refuse_silent_exit(of_the_program=words[:1] == ["run"])
    try:
        app(args=words if words[:1] == ["run"] else repeat_options(words))
    except SystemExit as leaving:
        if words[:1] != ["run"]:  # the threads and handlers of a script are its own
            signals.limit_leaving(leaving.code)
        _end_beside_triton(leaving.code)
        raise
    except OSError as error:  # of --help and --version: commands handle errors of their own output
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        signals.print_error(f"localtensor: cannot write to standard output: {error.strerror}.")
        sys.exit(signals.EXIT_NOTHING)
    except Exception:  # why: Python leaves with 1, a verdict; a rules module that replaces builtins leads here
        with contextlib.suppress(Exception):  # why: what prints may be replaced, too; the line below needs none of it
            signals.print_error(traceback.format_exc())
        os.write(2, CHANGED)
        os._exit(signals.EXIT_NOTHING)
    signals.print_error("localtensor: a module or an executor of yours has replaced sys.exit.")
    raise SystemExit(signals.EXIT_NOTHING)
