"""`localtensor coverage`: which registered overloads of DTensor a sweep has tested, and with which verdict.

`python -m strategies.ops` validates our own rules (`validate_ops`), or compares them with DTensor's (`compare_ops`).
"""

from __future__ import annotations

import fnmatch
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from rich.console import Console

from localtensor.errors import LocalTensorError
from strategies.base import journal
from strategies.base.atomic_files import write_whole
from strategies.base.foreign_text import PrintableConsole
from strategies.base.progress import Progress, error_console, progress_bar
from strategies.base.signals import print_stdout, quiet_on_one_thread, worker_count
from strategies.base.worker_pool import WorkerPool
from strategies.cli.options import CoverageOptions, fail
from strategies.inputs import opinfo_samples
from strategies.model.settings import Settings
from strategies.model.verdict import CLEAN, NOTHING, USAGE, WRONG, Verdict
from strategies.ops.semantics.rule_registry import OpRule, RuleRegistry
from strategies.ops.validation.claims import RuleResult, ValidationEffort, calls_of_overloads, validate_rules
from strategies.ops.validation.coverage import OverloadComparison, coverage, most_used
from strategies.sweep.coverage import OverloadCoverage, as_json, coverage_table, left_out_of, render
from strategies.sweep.session import run_validation
from strategies.torch_api import user_modules

CALL = "localtensor coverage"


@quiet_on_one_thread()
def run(options: CoverageOptions) -> int:
    """The exit code: 0 if anything was tested, 3 if not; 2 for a file that is no journal.

    Without a journal every overload is tested now, on 2 and 3 ranks, which takes minutes.
    """
    try:
        if options.journal:
            read_journal = journal.load_journal(options.journal, CALL)
            begin, lines = read_journal.begin, read_journal.lines
        else:
            begin, lines = _sweep(options)
    except journal.BadJournal as error:
        return fail(str(error), USAGE)
    except LocalTensorError as error:
        return fail(f"localtensor itself failed: {error}", NOTHING)
    try:
        tried, torch_tried, device = coverage_of_lines(lines), str(begin["torch"]), str(begin["device"])
        left_out = left_out_of(lines)
    except journal.FOREIGN_LINE_ERRORS as error:
        return fail(str(journal.foreign_line_error(options.journal or "", error, CALL)), USAGE)
    found = coverage_table(
        user_modules.all_registered_overloads(device), tried, torch=torch_tried, device=device, left_out=left_out
    )
    lost = ""
    if options.json is not None:
        try:
            write_whole(options.json, as_json(found))
        except OSError as error:  # the table is printed all the same: it may be the work of minutes
            lost = f"cannot write {options.json}: {error.strerror}."
    if problem := print_stdout(lambda console: console.print(render(found, left_out=options.left_out))) or lost:
        return fail(f"{CALL}: {problem}", NOTHING)
    return CLEAN if any(one.samples for one in tried.values()) else NOTHING


def _sweep(options: CoverageOptions) -> tuple[journal.Line, tuple[journal.Line, ...]]:
    settings = Settings(everything=True, ranks=(2, 3), seed=options.seed, workers=worker_count(options.workers))
    with progress_bar(error_console(), options.quiet) as progress, journal.open_journal(None, resume=False) as kept:
        run_validation(settings, kept, progress)
        return kept.begun or {}, tuple(kept.lines)


def coverage_of_lines(lines: Iterable[journal.Line]) -> dict[str, OverloadCoverage]:
    """The coverage of each overload by the lines of a journal.  Only tests of one op on its own count."""
    samples: Counter[str] = Counter()
    verdicts: dict[str, set[str]] = defaultdict(set)
    reasons: dict[str, list[str]] = defaultdict(list)
    kept = list(lines)
    for line in journal.lines_of_kind(kept, "unit"):
        op, kind = line["unit"].split(" ")[:2]
        if kind != "alone":
            continue
        samples[op] += line.get("samples", 0)
        verdicts[op] |= {Verdict.SOUND.value} if line.get("sound") else set()
        reasons[op] += [*line.get("untestable", {}).values(), *line.get("skipped", {})]
        reasons[op] += [crash["error"] for crash in line.get("crashed", ())]
    for line in journal.lines_of_kind(kept, "settled"):
        op = line["rule"].split(":")[0]
        if op in samples:
            verdicts[op].add(Verdict.SOUND.value if line["verdict"] == "cleared" else line["verdict"])
            reasons[op] += [line["reason"]] if "reason" in line else []
    return {
        op: OverloadCoverage(samples[op], frozenset(verdicts[op]), tuple(dict.fromkeys(reasons[op]))) for op in samples
    }


OPS_CALL = "python -m strategies.ops"


@quiet_on_one_thread()
def validate_ops(
    registry: RuleRegistry,
    patterns: Sequence[str] = (),
    *,
    seeds: int = 3,
    most: int = 24,
    workers: int = 1,
    quiet: bool = False,
) -> int:
    """Validate the rules of our own whose overload or family fits a pattern; all of them without patterns.

    Wrong rules, and untested ones with the reason, go to standard output; progress goes to standard error.
    The exit code: 0 where every tested rule is right, 1 where one is wrong, 2 for patterns that fit no rule, 3 where
    nothing was tested.
    """
    entries = chosen_rules(registry, patterns)
    if not entries:
        return fail(f"{OPS_CALL}: no rule of our own is of {' or '.join(patterns) or 'any family'}.", USAGE)
    results: list[RuleResult] = []
    with progress_bar(error_console(), quiet) as progress:
        for seed in range(seeds):
            effort = ValidationEffort((2, 3, 4), seed)
            results += _validate_once(entries, effort, most, workers, progress, near=len(entries) < len(registry))
    return print_validation(results, _output_console())


def _output_console() -> Console:
    return PrintableConsole(width=None if sys.stdout.isatty() else 140, highlight=False, emoji=False, soft_wrap=True)


def chosen_rules(registry: RuleRegistry, patterns: Sequence[str]) -> list[OpRule]:
    """The rules whose overload, packet or family fits one of the patterns, in their order; all without patterns."""
    return [e for e in registry if not patterns or any(_fits(e, pattern) for pattern in patterns)]


def _fits(entry: OpRule, pattern: str) -> bool:
    names = (entry.op, entry.op.partition(".")[2], entry.op.split(".")[1], entry.family)
    return any(fnmatch.fnmatchcase(name, pattern) for name in names)


def _validate_once(
    entries: Sequence[OpRule], effort: ValidationEffort, most: int, workers: int, progress: Progress, *, near: bool
) -> list[RuleResult]:
    progress.phase(f"calls, seed {effort.seed}", len(opinfo_samples.database()))
    with WorkerPool(workers) as pool:
        found = calls_of_overloads(
            pool, [e.op for e in entries], seed=effort.seed, most=most, tick=progress.tick, near=near
        )
    progress.phase(f"tests, seed {effort.seed}", len([e for e in entries if found.of.get(e.op)]))
    with WorkerPool(workers) as pool:  # a second pool: its forked workers inherit the captured calls
        return validate_rules(pool, entries, found.of, found.without, effort, progress.tick)


def print_validation(results: Sequence[RuleResult], out: Console) -> int:
    """Print the wrong rules, the untested ones with the reason, and the totals.  Returns the exit code."""
    wrong = dict.fromkeys(sentence for one in results for sentence in one.wrong)
    tested = {one.op for one in results if one.tested}
    for sentence in wrong:
        out.print(f"WRONG {sentence}", markup=False)
    untested: dict[str, str] = {}
    for one in results:
        if one.op not in tested:
            untested.setdefault(
                one.op, "; ".join(one.untried[:2]) or f"it has no placement rule for any of {one.calls} calls"
            )
    for op, reasons in sorted(untested.items()):
        out.print(f"not tested: {op}: {reasons}", markup=False)
    of_family = Counter(one.family for one in {r.op: r for r in results}.values() if one.op in tested)
    for family, count in sorted(of_family.items()):
        out.print(f"{family}: {count} overloads", markup=False)
    sound, tried = sum(one.sound for one in results), sum(one.calls for one in results)
    out.print(
        f"{len(tested)} of {len({one.op for one in results})} overloads tested on {tried} calls: "
        f"{sound} instances of their placement rules are right, {len(wrong)} placement rules are wrong",
        markup=False,
    )
    return WRONG if wrong else CLEAN if tested else NOTHING


@quiet_on_one_thread()
def compare_ops(*, workers: int = 1, quiet: bool = False) -> int:
    """Compare our rules with DTensor's on the most used overloads.

    The exit code: 0 if every overload that could be compared is covered, 1 if not, 3 if none could be compared.
    """
    with progress_bar(error_console(), quiet) as progress:
        progress.phase("calls", len(opinfo_samples.database()))
        with WorkerPool(workers) as pool:
            found = calls_of_overloads(pool, most_used(), most=6, tick=progress.tick)
        progress.phase("overloads", len(most_used()))
        with WorkerPool(workers) as pool:
            compared = coverage(pool, found.of, ranks=(2, 3), tick=progress.tick)
    return print_comparison(compared, _output_console())


def print_comparison(compared: Sequence[OverloadComparison], out: Console) -> int:
    """Print each rule that we lack, the overloads that could not be compared, and the totals.  Returns the exit code."""
    for one in compared:
        for lack in one.lacking:
            kind = f"left out: {lack.excused}" if lack.excused else "lacking"
            out.print(f"{kind}: {lack.rule} on {lack.ranks} ranks, {lack.call}", markup=False)
    for one in compared:
        if one.why:
            out.print(f"not compared: {one.op}: {one.why}", markup=False)
    able = [one for one in compared if not one.why]
    theirs, ours = sum(one.theirs for one in able), sum(one.same + one.served for one in able)
    done = sum(one.covered for one in able)
    out.print(
        f"{done} of {len(able)} overloads covered; of {theirs} different placement rules of DTensor's that are right, {ours} are served "
        f"({sum(one.same for one in able)} the same); {len(compared) - len(able)} overloads have nothing to compare",
        markup=False,
    )
    return NOTHING if not able else CLEAN if done == len(able) else WRONG
