"""The options of each command: a dataclass is both the command's part of the command line and the value it works with.

Those of `localtensor gate` are in `strategies.gate.options`.
The last part is what a command prints, the files it writes, and its exit code.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from strategies.base.atomic_files import write_whole
from strategies.base.foreign_text import path_below
from strategies.base.journal import check_first_line, check_is_new
from strategies.base.options import BadOption, Quiet, Seed, Workers, check_folder_exists, check_writable
from strategies.base.signals import EXIT_NOTHING, print_error, worker_count, write_stdout
from strategies.model.settings import DEFAULT_DTYPES, DTYPES, Settings, check_rules, check_source, meshes, shard


def _listed(names: Sequence[str], last: str) -> str:
    return f"{', '.join(names[:-1])} {last} {names[-1]}"


DTYPES_HELP = (
    f"{_listed(DTYPES, 'or')}.  [default: {_listed(DEFAULT_DTYPES, 'and')}, and a few samples cast to the others]"
)

# fmt: off


@dataclass(frozen=True, slots=True)
class ValidateOptions:
    ops: Annotated[tuple[str, ...], Argument(metavar="OP", help="OpInfo names, overloads or globs.", show_default=False)] = ()
    everything: Annotated[bool, Option("--all", help="Every overload that DTensor registers, and those that it takes apart.")] = False
    search: Annotated[bool, Option("--search/--claims", help="Also try every tuple of input placements and report Missing rules; --claims tests only registered rules.")] = False
    ranks: Annotated[tuple[int, ...], Option("--ranks", help="Mesh sizes to try: --ranks 2 3.  [default: 2 3 4]", show_default=False)] = ()
    dtypes: Annotated[tuple[str, ...], Option("--dtype", help=DTYPES_HELP, show_default=False)] = ()
    device: Annotated[str, Option("--device", help="Where the op runs: cpu or cuda.")] = "cpu"
    rules: Annotated[str, Option("--rules", help="`dtensor`, or a module that registers rules: just those are tested.")] = "dtensor"
    source: Annotated[str, Option("--source", help="Whose claims are tested: `dtensor`, `spmd_types`, or one that a package offers.")] = "dtensor"
    confirm: Annotated[str, Option("--confirm", help="Real processes that confirm a suspected rule: gloo, nccl or none.")] = "gloo"
    json: Annotated[Path | None, Option("--json", help="Write the whole report here.")] = None
    repro: Annotated[Path | None, Option("--repro", help="Write a torchrun script for every finding into this folder.")] = None
    mesh: Annotated[tuple[str, ...], Option("--mesh", help="Mesh shape, repeatable: --mesh 2,2 has two axes, --mesh 2 is --ranks 2.", show_default=False)] = ()
    pairs: Annotated[bool, Option("--pairs", help="Also what follows the op: a second op, its gradient, the same call again.")] = False
    plans: Annotated[bool, Option("--plans", help="DTensor's own redistributions, instead of rules.")] = False
    samples: Annotated[int | None, Option("--samples", help="With --plans: pairs on each mesh.  [default: 100]", show_default=False)] = None
    planner: Annotated[str, Option("--planner", help="With --plans: greedy, graph or both.")] = "both"
    journal: Annotated[Path | None, Option("--journal", help="Keep a line for each unit done in this file.", show_default=False)] = None
    resume: Annotated[bool, Option("--resume", help="Go on with the journal.")] = False
    shard: Annotated[str, Option("--shard", help="i/N: the i-th of N parts of the work, for a CI matrix.")] = ""
    case: Annotated[str, Option("--case", help="One finding again, by the text that stands beside it: its call, values, mesh and program.", show_default=False)] = ""
    executor: Annotated[str, Option("--executor", help="MODULE:FUNCTION that gives a concurrent.futures executor; or dask.")] = ""
    seed: Seed = 0
    workers: Workers = None
    quiet: Quiet = False

    def __post_init__(self) -> None:
        if self.plans:
            check_plan_options(self)
            return
        given = [f"--samples {self.samples}"] * (self.samples is not None)
        given += [f"--planner {self.planner}"] * (self.planner != "both")
        if given:
            option, values = given[0].split()[0], ", ".join(given)
            raise BadOption(PLANS, option, values, "this goes with --plans", "Pass --plans, too.")
        check_writable(VALIDATE, json=self.json, repro=self.repro)
        check_folder_exists(VALIDATE, self.json, "Make the folder first, or name another.")

    def check(self) -> None:
        """Checks without torch what the run would refuse.  Raises `BadSetting`, `BadRules` or `BadJournal`."""
        if self.plans:
            return
        check_rules(self.rules, self.settings().folder)
        check_source(self.source)
        if self.journal is not None:
            check_is_new(self.journal, resume=self.resume)

    def settings(self) -> Settings:
        """The settings of the run.  Raises `BadSetting`."""
        ranks, more_meshes = meshes(self.ranks, self.mesh)
        return Settings(
            patterns=self.ops, everything=self.everything, search=self.search, ranks=ranks, meshes=more_meshes,
            dtypes=self.dtypes or DEFAULT_DTYPES, device=self.device, rules=self.rules, confirm=self.confirm,
            seed=self.seed, workers=worker_count(self.workers), pairs=self.pairs, journal=self.journal, source=self.source,
            resume=self.resume, shard=shard(self.shard), executor=self.executor, case=self.case,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class MergeOptions:
    journals: Annotated[tuple[Path, ...], Argument(metavar="JOURNAL...", help="What --journal wrote, of every shard.", show_default=False)]
    out: Annotated[Path | None, Option("--out", help="Write one journal of the whole run here.")] = None
    json: Annotated[Path | None, Option("--json", help="Write the whole report here.")] = None
    repro: Annotated[Path | None, Option("--repro", help="Write a torchrun script for every finding into this folder.")] = None

    def __post_init__(self) -> None:
        check_writable("localtensor merge", out=self.out, json=self.json, repro=self.repro)

    def check(self) -> None:
        for path in self.journals:
            check_first_line(path, "localtensor merge")


@dataclass(frozen=True, slots=True)
class CoverageOptions:
    journal: Annotated[Path | None, Argument(metavar="JOURNAL", help="What --journal wrote.", show_default=False)] = None
    json: Annotated[Path | None, Option("--json", help="Write the whole table here.")] = None
    left_out: Annotated[bool, Option("--left-out", help="Also list what each overload was not tested with, and why.")] = False
    seed: Seed = 0
    workers: Workers = None
    quiet: Quiet = False

    def __post_init__(self) -> None:
        check_writable("localtensor coverage", json=self.json)
        check_folder_exists("localtensor coverage", self.json, "Make it first.")

    def check(self) -> None:
        if self.journal is not None:
            check_first_line(self.journal, "localtensor coverage")


@dataclass(frozen=True, slots=True)
class CausesOptions:
    what: Annotated[tuple[str, ...], Argument(metavar="JOURNAL|OP...", help="What `localtensor validate --journal` wrote; or ops to validate now.", show_default=False)]
    json: Annotated[Path | None, Option("--json", help="Write the causes here.")] = None
    repro: Annotated[Path | None, Option("--repro", help="Write the script of every cause into this folder.")] = None
    again: Annotated[bool, Option("--again", help="Look for the causes anew, although the journal has them.")] = False
    rules: Annotated[str, Option("--rules", help="The module that was given to `localtensor validate --rules`: it is imported only if it is named here.")] = "dtensor"
    seed: Seed = 0
    workers: Workers = None
    quiet: Quiet = False

    def __post_init__(self) -> None:
        call = "localtensor causes"
        if worker_count(self.workers) < 1:
            raise BadOption(call, "--workers", self.workers, "there must be a worker", "Pass --workers 1 or more.")
        check_writable(call, json=self.json, repro=self.repro)

    def check(self) -> None:
        if len(self.what) == 1 and Path(self.what[0]).is_file():
            check_first_line(Path(self.what[0]), "localtensor causes")
        check_rules(self.rules, os.getcwd())


@dataclass(frozen=True, slots=True)
class DiscoverOptions:
    op: Annotated[str, Argument(metavar="OP", help="An overload, or an op that has one.", show_default=False)]
    emit: Annotated[bool, Option("--emit", help="Print a module that registers what is missing.")] = False
    ranks: Annotated[tuple[int, ...], Option("--ranks", help="Mesh sizes to try.  [default: 2 3]", show_default=False)] = (2, 3)
    seed: Seed = 0
    workers: Workers = None
    quiet: Quiet = False

    def __post_init__(self) -> None:
        call = "localtensor discover"
        if worker_count(self.workers) < 1:
            raise BadOption(call, "--workers", self.workers, "there must be a worker", "Pass --workers 1 or more.")
        for n in self.ranks:
            if not 2 <= n <= 64:
                raise BadOption(call, "--ranks", n, "a rule needs at least 2 ranks", "Pass --ranks 2 to 64.")
        if not 0 <= self.seed < 2**63:
            raise BadOption(call, "--seed", self.seed, "torch's generators do not take it", "Pass 0 to 2**63 - 1.")


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The fields of `localtensor.runner.torchrun.TorchrunOptions`, which checks them."""

    name: Annotated[str, Argument(metavar="SCRIPT", help="A Python file; with -m, the name of a module.", show_default=False)]
    arguments: Annotated[tuple[str, ...], Argument(metavar="ARGS", help="What follows SCRIPT is its own; options of this command stand before it.", show_default=False)] = ()
    ranks: Annotated[int | None, Option("-n", "--ranks", help="How many ranks.  [default: 1]", show_default=False)] = None
    on: Annotated[str, Option("--on", help="threads: all ranks in this process, one at a time; gloo: real processes.")] = "threads"
    module: Annotated[bool, Option("-m", "--module", help="SCRIPT is the name of a module.")] = False
    schedule: Annotated[str | None, Option("--schedule", help="Who runs next: round_robin, or the text after `Replay:`.", show_default=False)] = None
    seed: Annotated[int, Option("--seed", help="Where the random generators of every rank start.")] = 0
    timeout: Annotated[float, Option("--timeout", envvar="LOCALTENSOR_TIMEOUT", help="Seconds for the whole run; 0 is no limit.")] = 0.0
    prefix: Annotated[bool, Option("--prefix/--no-prefix", help="Each line of output names its rank.")] = True
    faults: Annotated[str | None, Option("--faults", metavar="TEXT", help='Faults on purpose: "kill={2: 5}, restart=1", or what `Replay:` says.', show_default=False)] = None
    explain_isolation: Annotated[bool, Option("--explain-isolation", help="At the end, list what ranks share, and why.")] = False
    trace: Annotated[Path | None, Option("--trace", metavar="FILE", help="Write a trace of the run here, for Perfetto or chrome://tracing.", show_default=False)] = None
    html: Annotated[Path | None, Option("--html", metavar="FILE", help="Write a page here: time line, communication, memory, waits.", show_default=False)] = None
    summary: Annotated[bool, Option("--summary", help="At the end, the run in twelve lines.")] = False
    topology: Annotated[str | None, Option("--topology", metavar="FILE", help="The links of the modelled clock: JSON, or 300,25 GB/s within and between nodes.", show_default=False)] = None

    def __post_init__(self) -> None:
        check_writable("localtensor run", trace=self.trace, html=self.html)
        for option, path in (("--trace", self.trace), ("--html", self.html)):
            check_folder_exists("localtensor run", path, "Make it first.", option)
            if path is not None and not self.module and path.resolve() == Path(self.name).resolve():
                raise BadOption("localtensor run", option, path, "this is the script", "Name another file.")
        if self.html is not None and self.trace is not None and self.html.resolve() == self.trace.resolve():
            problem = "the trace would be overwritten by the page"
            raise BadOption("localtensor run", "--html", self.html, problem, "Name another file.")
        if self.topology is not None and not (self.trace or self.html or self.summary):
            problem = "it is for the modelled clock, and nothing shows that"
            raise BadOption("localtensor run", "--topology", self.topology, problem, "Add --summary, --trace or --html.")


@dataclass(frozen=True, slots=True)
class CompareOptions:
    """`strategies.cli.commands.compare` reads them."""

    script: Annotated[str, Argument(metavar="SCRIPT", help="The parallel script; or, in quotes, with its arguments.", show_default=False)]
    arguments: Annotated[tuple[str, ...], Argument(metavar="ARGS", help="After --: arguments of both scripts.", show_default=False)] = ()
    ranks: Annotated[int | None, Option("-n", "--ranks", help="How many ranks the parallel script has.  [default: 1, or -n in the quotes]", show_default=False)] = None
    reference: Annotated[str, Option("--reference", metavar="TEXT", help='What it is compared with: "train.py -n 1".  [default: SCRIPT on 1 rank]', show_default=False)] = ""
    mesh: Annotated[str, Option("--mesh", metavar="AXES", help="The axes of the ranks: dp=2,tp=4.  [default: those of the script's process groups]", show_default=False)] = ""
    on: Annotated[str, Option("--on", help="The ranks of both scripts: threads, or gloo for real processes.")] = "threads"
    seed: Annotated[int, Option("--seed", help="Where the random generators of every rank start.")] = 0
    timeout: Annotated[float, Option("--timeout", envvar="LOCALTENSOR_TIMEOUT", help="Seconds for each run of a script; 0 is no limit.")] = 0.0
    json: Annotated[Path | None, Option("--json", help="Write the whole report here.", show_default=False)] = None
    html: Annotated[Path | None, Option("--html", help="Write a page here: the modules, coloured by divergence, step by step.", show_default=False)] = None
    quiet: Quiet = False

    def __post_init__(self) -> None:
        check_writable("localtensor compare", json=self.json, html=self.html)
        for option, path in (("--json", self.json), ("--html", self.html)):
            check_folder_exists("localtensor compare", path, "Make it first.", option)


@dataclass(frozen=True, slots=True)
class RacesOptions:
    target: Annotated[str, Option("--target", help="once: our cache; propagate: our propagator; dtensor: torch's own.")] = "once"
    schedules: Annotated[int | None, Option("--schedules", help="How many interleavings; for dtensor, rounds of free-running threads.  [default: 20000; propagate 2000; dtensor 20]", show_default=False)] = None
    threads: Annotated[int | None, Option("--threads", help="Free-running threads, for dtensor.  [default: 8]", show_default=False)] = None
    seconds: Annotated[float | None, Option("--seconds", help="Seconds for the whole; each script of dtensor has 60 at most.", show_default=False)] = None
    seed: Annotated[int, Option("--seed", help="Same seed, same schedules.")] = 0
    json: Annotated[Path | None, Option("--json", help="Write the whole report here.", show_default=False)] = None
    repro: Annotated[Path | None, Option("--repro", help="Write a script for every part that found something into this folder.", show_default=False)] = None
    quiet: Quiet = False

    def __post_init__(self) -> None:
        call = "localtensor races"
        if self.target not in TARGETS:
            remedy = f"Use {', '.join(TARGETS)}."
            raise BadOption(call, "--target", repr(self.target), "there is no such target", remedy)
        numbers = (("schedules", self.schedules, 1), ("threads", self.threads, 2), ("seed", self.seed, 0))
        for name, value, least in numbers:
            if value is not None and value < least:
                raise BadOption(call, f"--{name}", value, f"it has to be {least} or more", f"Pass --{name} {least}.")
        if self.seconds is not None and not self.seconds > 0:
            problem = "nothing can be tried in no time"
            raise BadOption(call, "--seconds", f"{self.seconds:g}", problem, "Pass --seconds 60.")
        if self.threads is not None and self.target != "dtensor":
            problem = f"programs of --target {self.target} bring their own threads"
            raise BadOption(call, "--threads", self.threads, problem, "Leave it out, or use --target dtensor.")
        check_writable(call, json=self.json, repro=self.repro)


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """`strategies.planner.text.options` reads them."""

    text: Annotated[str, Argument(metavar="TEXT", help='Tensor, mesh, and placements before and after: "f32[8,4] @ dp=2,tp=2: S(0),R -> R,S(1)".', show_default=False)]
    by: Annotated[str, Option("--by", help="What to make least: time, bytes, torch (its own cost), or MODULE:FUNCTION, a price of one step.")] = "time"
    topology: Annotated[str | None, Option("--topology", metavar="FILE", help="The links of the cluster, as JSON; or 300,25: GB/s within and between nodes.", show_default=False)] = None
    inner: Annotated[str | None, Option("--inner", metavar="US,GB/S", help="The link within a node: latency in microseconds, and gigabytes per second.", show_default=False)] = None
    outer: Annotated[str | None, Option("--outer", metavar="US,GB/S", help="The link between nodes.", show_default=False)] = None
    per_node: Annotated[int | None, Option("--per-node", metavar="N", help="How many ranks a node has, beside --inner and --outer; else 8.", show_default=False)] = None
    memory: Annotated[str | None, Option("--memory", metavar="SIZE", help="The most that a rank may have in use: 2GB, 512MiB.", show_default=False)] = None
    flattened: Annotated[tuple[str, ...], Option("--flattened", metavar="AXES", help="Axes that have one group of all their ranks: dp,tp.", show_default=False)] = ()
    alternatives: Annotated[bool, Option("--alternatives/--no-alternatives", help="Also what is best in bytes, memory or steps.")] = True
    dtensor: Annotated[bool, Option("--dtensor/--no-dtensor", help="Also DTensor's own plan. Its graph-based planner is left out where it takes seconds.")] = True
    picture: Annotated[str | None, Option("--picture", metavar="FILE", help="Draw what each rank holds: FILE.svg, FILE.html, FILE.txt, or - for here.", show_default=False)] = None
    code: Annotated[bool, Option("--code", help="Print Python that makes this plan, instead.")] = False
    as_json: Annotated[bool, Option("--json", help="Print one JSON object, instead.")] = False


@dataclass(frozen=True, slots=True)
class CostOptions:
    name: Annotated[str, Argument(metavar="COST", help="torch, time, bytes, or MODULE:FUNCTION.", show_default=False)]
    mesh: Annotated[str, Option("--mesh", help="The sizes of its axes.")] = "2,2"
    shape: Annotated[str, Option("--shape", help="The shape of the tensor.")] = "8,8"
    most: Annotated[int, Option("--most", help="How many broken triples are shown.")] = 5
    as_json: Annotated[bool, Option("--json", help="Print one JSON object, instead.")] = False
    quiet: Quiet = False

    def check(self) -> None:
        if ":" not in self.name and self.name not in COSTS:
            raise BadOption("localtensor cost check", "cost", repr(self.name), NO_COST, known_costs(self.name))


@dataclass(frozen=True, slots=True)
class RuleCostOptions:
    op: Annotated[str, Argument(metavar="OP", help="An overload, or an op that has one.", show_default=False)]
    ranks: Annotated[int, Option("--ranks", help="How many ranks the mesh has.")] = 4
    seed: Seed = 0
    as_json: Annotated[bool, Option("--json", help="Print one JSON list, instead.")] = False

    def __post_init__(self) -> None:
        if not 2 <= self.ranks <= 64:
            raise BadOption("localtensor cost rule", "--ranks", self.ranks, "a rule needs at least 2 ranks", "Pass --ranks 2 to 64.")


@dataclass(frozen=True, slots=True)
class ReportOptions:
    journal: Annotated[Path, Argument(metavar="JOURNAL", help="What `localtensor validate --journal` wrote.", show_default=False)]
    out: Annotated[Path, Option("-o", "--out", help="The page to write.")] = Path("report.html")

    def check(self) -> None:
        check_first_line(self.journal, "localtensor report")

# fmt: on


VALIDATE, PLANS = "localtensor validate", "localtensor validate --plans"
COSTS = ("torch", "time", "bytes")
"""Costs that `localtensor cost check` knows by name."""
NO_COST = "there is no such cost"


def known_costs(name: str) -> str:
    """The remedy for a cost that is not known by this name."""
    near = get_close_matches(name, COSTS, n=1)
    return f"Did you mean {near[0]}?" if near else f"Use {', '.join(COSTS)}, or write package.module:function."


TARGETS = ("once", "propagate", "dtensor")
"""Values of `localtensor races --target`."""
PLANNERS = ("greedy", "graph", "both")
SAMPLES = 100
"""Default for --samples: pairs on each mesh."""
MOST_PLAN_RANKS = 64


def check_plan_options(options: ValidateOptions) -> None:
    """Check the options of `localtensor validate --plans`; those about rules are refused.  Raises `BadOption`."""
    others = {
        "OP": options.ops, "--all": options.everything, "--search": options.search, "--ranks": options.ranks,
        "--dtype": options.dtypes, "--device": options.device != "cpu", "--rules": options.rules != "dtensor",
        "--pairs": options.pairs, "--journal": options.journal, "--resume": options.resume, "--shard": options.shard,
        "--executor": options.executor, "--workers": options.workers,
    }  # fmt: skip
    if given := [name for name, value in others.items() if value]:
        raise BadOption(PLANS, "options", ", ".join(given), "with --plans this is without meaning", "Leave it out.")
    for text in options.mesh:
        parse_mesh(text)
    if options.samples is not None and options.samples < 1:
        raise BadOption(PLANS, "--samples", options.samples, "it has to be 1 or more", f"Pass --samples {SAMPLES}.")
    if not 0 <= options.seed < 2**63:
        raise BadOption(PLANS, "--seed", options.seed, "it has to be 0 or more, and less than 2**63", "Pass --seed 0.")
    if options.planner not in PLANNERS:
        problem = "DTensor has no such planner"
        raise BadOption(PLANS, "--planner", repr(options.planner), problem, f"Use {', '.join(PLANNERS)}.")
    if options.confirm not in ("gloo", "none"):
        problem = "pairs are confirmed on gloo, or not at all"
        raise BadOption(PLANS, "--confirm", repr(options.confirm), problem, "Use gloo or none.")
    check_writable(PLANS, json=options.json, repro=options.repro)


def parse_mesh(text: str) -> tuple[int, ...]:
    """The mesh shape that a --mesh of `validate --plans` names.  Raises `BadOption`.

    >>> parse_mesh("2,3")
    (2, 3)
    """
    parts = text.split(",")
    sizes = [part for part in parts if part.strip().isdecimal() and len(part) < 4_000 and int(part) > 0]  # for int()
    if len(sizes) < len(parts):
        problem = "a mesh is a size, or several with commas between"
        raise BadOption(PLANS, "--mesh", repr(text), problem, "Pass --mesh 2,3.")
    found = tuple(map(int, parts))
    if math.prod(found) > MOST_PLAN_RANKS:
        problem = f"these are more than {MOST_PLAN_RANKS} ranks"
        raise BadOption(PLANS, "--mesh", repr(text), problem, "Pass --mesh 2,2,2.")
    return found


def fail(sentence: str, code: int) -> int:
    """Print the sentence on standard error, with the name of the command before that of a function.  Returns the code."""
    print_error(sentence if sentence.startswith("localtensor") else f"localtensor {sentence}")
    return code


def deliver_text(text: str, files: Sequence[tuple[Path, str]], code: int, folder: Path | None = None) -> int:
    """Print the text, then write each file, whole or not at all.  Returns the exit code: 3 where a file is lost.

    Files in `folder` do not leave it, as they would through a link that lies there.
    """
    problem = write_stdout(text)
    if problem:
        print_error(f"localtensor: {problem}")
    above = "nor could the report be shown" if problem else "the report above is whole"
    for path, content in files:
        try:
            write_whole(path_below(folder, path.name) if path.parent == folder else path, content)
        except OSError as error:
            return fail(f"localtensor: {error.filename or path}: {error.strerror}; {above}", EXIT_NOTHING)
    return (code or EXIT_NOTHING) if problem else code
