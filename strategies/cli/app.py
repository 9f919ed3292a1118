"""The command line: `localtensor validate ...`, `localtensor run ...`.  Exit codes are a table in `verdicts`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from strategies.base.signals import CLEAN, NOTHING, complain, gently, leave, many, open_streams, watch
from strategies.cli import options as plan_options

# The part of the command line that looks for races: `localtensor races`.

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


def races(
    target: Annotated[str, Option("--target", help="once: our cache; propagate: our propagator; dtensor: torch's own.")] = "once",
    schedules: Annotated[int | None, Option("--schedules", help="How many interleavings; for dtensor, rounds of free-running threads.  [default: 20000; propagate 2000; dtensor 20]", show_default=False)] = None,
    threads: Annotated[int | None, Option("--threads", help="Free-running threads, for dtensor.  [default: 8]", show_default=False)] = None,
    seconds: Annotated[float | None, Option("--seconds", help="Seconds for the whole; each script of dtensor has 60 at most.", show_default=False)] = None,
    seed: Annotated[int, Option("--seed", help="Same seed, same schedules.")] = 0,
    json_file: Annotated[Path | None, Option("--json", help="Write the whole report here.", show_default=False)] = None,
    repro: Annotated[Path | None, Option("--repro", help="Write a script for every part that found something into this folder.", show_default=False)] = None,
    quiet: Annotated[bool, Option("--quiet", "-q", help="No progress bar.")] = False,
) -> None:  # fmt: skip
    """Look for races: in our shared cache and propagator, schedule by schedule, and in torch's own propagator."""

    def work() -> int:
        from strategies.cli.commands import races as races_command

        try:
            asked = races_command.Asked(target, schedules, threads, seconds, seed, json_file, repro, quiet)
        except races_command.BadRaces as error:
            return races_command.refused(error, lambda said: typer.echo(said, err=True))
        return races_command.run(asked)

    leave(work, "; nothing was written")


app = typer.Typer(
    name="localtensor", no_args_is_help=True, add_completion=False, rich_markup_mode=None,
    pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Examples:\n\n\b\n"
           "  localtensor validate cumprod\n"
           "      one op of torch\n"
           "  localtensor validate --all --json report.json\n"
           "      every rule of torch's own\n"
           "  localtensor run -n 8 train.py\n"
           "      a torchrun script, its ranks as threads\n"
           "  localtensor gate --rules my_rules\n"
           "      before a merge: only what is new fails\n"
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
      also what holds and nobody claims
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

Exit codes: 0 nothing wrong; 1 an Unsound rule, or a registration that torch ignores; 2 usage;
3 nothing was tested, or the tool itself failed; 130 stopped by Ctrl-C, 143 by SIGTERM, as every command.
"""


def _version(asked: bool) -> None:
    if asked:
        import localtensor

        typer.echo(f"localtensor {localtensor.__version__}")
        raise typer.Exit(CLEAN)


@app.callback()
def _root(
    version: Annotated[bool, Option("--version", help="Print the version and leave.", callback=_version, is_eager=True)] = False,
) -> None:  # fmt: skip
    """Puts PyTorch's distributed sharding rules on trial: every rank simulated, every verdict confirmed."""


@app.command(epilog=EXAMPLES, short_help="Put sharding rules on trial.")
def validate(
    ops: Annotated[list[str] | None, Argument(metavar="OP", help="OpInfo names, overloads or globs.", show_default=False)] = None,
    everything: Annotated[bool, Option("--all", help="Every overload that DTensor registers, and those that it takes apart.")] = False,
    search: Annotated[bool, Option("--search/--claims", help="Also try every tuple of input placements and report Missing rules; --claims tries only what is claimed.")] = False,
    ranks: Annotated[list[int] | None, Option("--ranks", help="Mesh sizes to try: --ranks 2 3.  [default: 2 3 4]", show_default=False)] = None,
    dtype: Annotated[list[str] | None, Option("--dtype", help="float64, float32, int64, bool or complex64.  [default: all but float32]", show_default=False)] = None,
    device: Annotated[str, Option("--device", help="Where the op runs: cpu or cuda.")] = "cpu",
    rules: Annotated[str, Option("--rules", help="`dtensor`, or a module that registers rules: just those are judged.")] = "dtensor",
    confirm: Annotated[str, Option("--confirm", help="Real processes that confirm a suspicion: gloo, nccl or none.")] = "gloo",
    json_file: Annotated[Path | None, Option("--json", help="Write the whole report here.")] = None,
    repro: Annotated[Path | None, Option("--repro", help="Write a torchrun script for every finding into this folder.")] = None,
    mesh: Annotated[list[str] | None, Option("--mesh", help="A mesh to try: --mesh 2,2 has two axes, --mesh 2 is --ranks 2.", show_default=False)] = None,
    pairs: Annotated[bool, Option("--pairs", help="Also what follows the op: a second op, its gradient, the same call again.")] = False,
    plans: Annotated[bool, Option("--plans", help="DTensor's own redistributions, instead of rules.")] = False,
    samples: Annotated[int | None, Option("--samples", help="With --plans: pairs on each mesh.  [default: 100]", show_default=False)] = None,
    planner: Annotated[str, Option("--planner", help="With --plans: greedy, graph or both.")] = "both",
    journal: Annotated[Path | None, Option("--journal", help="Keep a line for each unit done in this file.", show_default=False)] = None,
    resume: Annotated[bool, Option("--resume", help="Go on with the journal.")] = False,
    shard: Annotated[str, Option("--shard", help="i/N: the i-th of N parts of the work, for a CI matrix.")] = "",
    executor: Annotated[str, Option("--executor", help="MODULE:FUNCTION that gives a concurrent.futures executor; or dask.")] = "",
    seed: Annotated[int, Option("--seed", help="Same seed, same output.")] = 0,
    workers: Annotated[int | None, Option("--workers", help="Worker processes.  [default: one for each core]", show_default=False)] = None,
    quiet: Annotated[bool, Option("--quiet", "-q", help="No progress bar.")] = False,
) -> None:  # fmt: skip
    """Put sharding rules on trial against the real op, and confirm every Unsound on real processes."""

    def work() -> int:
        if plans:
            from strategies.cli.commands import plans_audit as dtensor_command

            others = {
                "OP": ops, "--all": everything, "--search": search, "--ranks": ranks, "--dtype": dtype,
                "--device": device != "cpu", "--rules": rules != "dtensor", "--pairs": pairs, "--journal": journal,
                "--resume": resume, "--shard": shard, "--executor": executor, "--workers": workers,
            }  # fmt: skip
            given = tuple(name for name, value in others.items() if value)
            return dtensor_command.command(
                tuple(mesh or ()), samples, seed, planner, confirm, json_file, repro, quiet, given
            )
        if samples is not None or planner != "both":
            from strategies.cli.commands import plans_audit as dtensor_command

            return dtensor_command.without(samples, planner)
        from strategies.cli.commands import validate as command

        chosen = command.Chosen(
            tuple(ops or ()), everything, search, tuple(ranks or ()), tuple(dtype or ()), device, rules, confirm,
            json_file, repro, seed, many(workers), quiet, tuple(mesh or ()), pairs, journal, resume, shard, executor,
        )  # fmt: skip
        return command.run(chosen)

    kept = f"go on with it by --journal {journal} --resume" if journal else "--journal FILE would keep what is done"
    leave(work, f"; no report was written; {kept}")


MERGE_EXAMPLES = """Examples:

\b
  localtensor merge 1.jsonl 2.jsonl 3.jsonl 4.jsonl
      one report of four shards
  localtensor merge *.jsonl --json report.json
      the same, for programs

Exit codes: those of the whole run; 2 a file that is no journal, or of another run; 3 a unit is missing.
"""


@app.command(epilog=MERGE_EXAMPLES, short_help="Join the journals of several shards.")
def merge(
    journals: Annotated[list[Path], Argument(metavar="JOURNAL...", help="What --journal wrote, of every shard.", show_default=False)],
    out: Annotated[Path | None, Option("--out", help="Write one journal of the whole run here.")] = None,
    json_file: Annotated[Path | None, Option("--json", help="Write the whole report here.")] = None,
    repro: Annotated[Path | None, Option("--repro", help="Write a torchrun script for every finding into this folder.")] = None,
) -> None:  # fmt: skip
    """Join the journals of several shards, and prove that nothing is missing."""

    def work() -> int:
        from strategies.cli.commands import report as merging

        return merging.run_merge(tuple(journals), out, json_file, repro)

    leave(work)


COVERAGE_EXAMPLES = """Examples:

\b
  localtensor coverage sweep.jsonl
      of the sweep that wrote this journal
  localtensor coverage
      of a sweep that is made now: some minutes

Exit codes: 0 something was tried; 2 a file that is no journal; 3 nothing was tried, or the tool itself failed.
"""


@app.command(epilog=COVERAGE_EXAMPLES, short_help="What was tried, and why the rest was not.")
def coverage(
    journal: Annotated[Path | None, Argument(metavar="JOURNAL", help="What --journal wrote.", show_default=False)] = None,
    json_file: Annotated[Path | None, Option("--json", help="Write the whole table here.")] = None,
    seed: Annotated[int, Option("--seed", help="Same seed, same output.")] = 0,
    workers: Annotated[int | None, Option("--workers", help="Worker processes.  [default: one for each core]", show_default=False)] = None,
    quiet: Annotated[bool, Option("--quiet", "-q", help="No progress bar.")] = False,
) -> None:  # fmt: skip
    """Which of the overloads that DTensor registers were tried, which have a verdict, and why the others have none."""

    def work() -> int:
        from strategies.cli.commands import coverage as covered

        return covered.run(journal, json_file, seed=seed, workers=many(workers), quiet=quiet)

    leave(work)


DISCOVER_EXAMPLES = """Examples:

\b
  localtensor discover scatter_add
      rules that hold and nobody claims, with evidence
  localtensor discover aten.mv.default --emit
      a module of plain torch that registers them
  localtensor discover aten.mv.default --emit > more.py
      and `localtensor validate --rules more` judges it

Exit codes: 0 searched, whether something is missing or not; 2 usage; 3 nothing was searched.
"""


@app.command(epilog=DISCOVER_EXAMPLES, short_help="Look for rules that nobody claims.")
def discover(
    op: Annotated[str, Argument(metavar="OP", help="An overload, or an op that has one.", show_default=False)],
    emit: Annotated[bool, Option("--emit", help="Print a module that registers what is missing.")] = False,
    ranks: Annotated[list[int] | None, Option("--ranks", help="Mesh sizes to try.  [default: 2 3]", show_default=False)] = None,
    seed: Annotated[int, Option("--seed", help="Same seed, same output.")] = 0,
    workers: Annotated[int | None, Option("--workers", help="Worker processes.  [default: one for each core]", show_default=False)] = None,
) -> None:  # fmt: skip
    """Look for the sharding rules of an op that hold, and that nobody claims."""

    def work() -> int:
        from strategies.cli.commands.discover import discover_command

        return discover_command(op, emitted=emit, ranks=tuple(ranks or (2, 3)), seed=seed, many=many(workers))

    leave(work)


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

Exit codes: that of the first rank that failed; 1 a fault of the program, told on standard error; 2 usage;
130 stopped by Ctrl-C.
"""


@app.command(
    epilog=RUN_EXAMPLES,
    short_help="Run a torchrun script on rank threads.",
    context_settings={"allow_interspersed_args": False},
)
def run(
    script: Annotated[str, Argument(metavar="SCRIPT", help="A Python file; with -m, the name of a module.", show_default=False)],
    arguments: Annotated[list[str] | None, Argument(metavar="ARGS", help="What follows is the script's own.", show_default=False)] = None,
    ranks: Annotated[int, Option("-n", "--ranks", help="How many ranks.", show_default=False)] = 1,
    on: Annotated[str, Option("--on", help="threads: all ranks in this process, one at a time; gloo: real processes.")] = "threads",
    module: Annotated[bool, Option("-m", "--module", help="SCRIPT is the name of a module.")] = False,
    schedule: Annotated[str | None, Option("--schedule", help="Who runs next: round_robin, or the text after `Replay:`.", show_default=False)] = None,
    seed: Annotated[int, Option("--seed", help="Where the random generators of every rank start.")] = 0,
    timeout: Annotated[float, Option("--timeout", help="Seconds for the whole run; 0 is no limit.")] = 0.0,
    prefix: Annotated[bool, Option("--prefix/--no-prefix", help="Each line of output says whose it is.")] = True,
) -> None:  # fmt: skip
    """Run a torchrun script on rank threads, or on real processes, of this machine."""

    def work() -> int:
        from localtensor.runner import torchrun as scripts

        asked = scripts.Asked(script, tuple(arguments or ()), ranks, on, module, schedule, seed, timeout, prefix)
        with gently():  # it is the user's program that is stopped
            return scripts.run_script(asked)

    leave(work)


app.command(epilog=plan_options.GATE_EXAMPLES, short_help="Let only what is new fail, before a merge.")(
    plan_options.gate
)
app.command(epilog=plan_options.REPORT_EXAMPLES, short_help="Write one HTML page of a journal.")(plan_options.report)
app.command(epilog=RACES_EXAMPLES, short_help="Look for races in caches of propagation.")(races)
app.command(epilog=plan_options.PLAN_EXAMPLES, short_help="Plan the cheapest redistribution.")(plan_options.plan)
app.add_typer(plan_options.cost)

_DTYPES = ("float64", "float32", "int64", "bool", "complex64")


def spread(words: Sequence[str]) -> list[str]:
    """`--ranks 2 3`, `--ranks 2,3` and `--ranks=2,3` as `--ranks 2 --ranks 3`, and so for dtypes.

    >>> spread(["add", "--ranks", "2", "3", "--dtype", "bool,int64"])
    ['add', '--ranks', '2', '--ranks', '3', '--dtype', 'bool', '--dtype', 'int64']
    """
    made: list[str] = []
    option, first = "", False
    for word in (part for given in words for part in _apart(given)):
        if word in ("--ranks", "--dtype"):
            option, first = word, True
            continue
        fits = {"--ranks": word.replace(",", "").isdigit(), "--dtype": set(word.split(",")) <= set(_DTYPES)}.get(option)
        if option and (first or fits):
            values = [value for value in word.split(",") if value] or [word]
            made += [part for value in values for part in (option, value)]
            first = False
            continue
        option = ""
        made.append(word)
    return [*made, option] if option and first else made


def _apart(word: str) -> list[str]:
    return word.split("=", 1) if word.startswith(("--ranks=", "--dtype=")) else [word]


def main() -> None:
    """The console script.  What follows `run` may be a script's own `--ranks`: it is left alone."""
    watch()
    open_streams()
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # before torch is imported: it warns of each resized out=
    words = sys.argv[1:]
    try:
        app(args=words if words[:1] == ["run"] else spread(words))
    except OSError as error:  # of --help and --version: what a command prints it sees to itself
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        complain(f"localtensor: cannot write to standard output: {error.strerror}.")
        sys.exit(NOTHING)
