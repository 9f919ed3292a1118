"""`make bench`: the score against planted wrong rules, the speed beside torch's own validator on one op and on ten, the
whole sweep, rank threads beside torch's threaded group and gloo, lockstep beside torch's LocalTensorMode, fifty
small tests under our pytest plugin beside torch's multi-process base class, a cached propagation beside DTensor's, how
many interleavings a second are explored, and our planner beside torch's."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from strategies.base.atomic_files import write_whole
from tests.tools.bench import fifty, lockstep, peers, planner, propagate, races, ranks, score, sizes, speed, sweep
from tests.tools.command_line import parser_of

PARTS = ("planted", "speed", "peers", "sweep", "ranks", "lockstep", "fifty", "propagate", "races", "planner")
"""What runs if nothing is asked for; `sizes` needs a report, and so is asked for."""
BESIDE: dict[str, tuple[Callable[[Console], Any], Callable[[Console, Any], None]]] = {
    "peers": (peers.compare, peers.show),
    "ranks": (ranks.compare, ranks.show),
    "fifty": (fifty.compare, fifty.show),
    "propagate": (lambda console: propagate.compare(), propagate.show),
    "races": (lambda console: races.measure(), races.show),
    "planner": (planner.compare, planner.show),
}
"""Parts that need no more than to be run and shown."""
EXAMPLES = """examples:
  python -m tests.tools.bench                          all ten, many minutes
  python -m tests.tools.bench --only planted           the planted wrong rules: which survive?
  python -m tests.tools.bench --only speed --runs 3    three runs of ours beside torch's validator
  python -m tests.tools.bench --only peers             ten ops, ours beside torch's validator, by the combination
  python -m tests.tools.bench --only sizes --report r.json    how small the findings of a report are
  python -m tests.tools.bench --only ranks             rank threads beside torch's threaded group and gloo processes
  python -m tests.tools.bench --only lockstep --figure docs/lockstep.svg    cost against ranks, drawn
  python -m tests.tools.bench --only fifty             fifty tests under pytest --ranks 4, beside torch's base class
  python -m tests.tools.bench --only propagate         a cached propagation, beside DTensor's own Python path
  python -m tests.tools.bench --only races             interleavings a second, and planted races found
  python -m tests.tools.bench --only planner           our planner beside torch's graph-based and greedy ones
  python -m tests.tools.bench --json bench.json        the figures for a program, too

Exit code 1 if a planted wrong rule survives that should not, a right one is accused, or a planted race is missed; times and memory never fail it.
"""


def main() -> int:
    asked = _asked()
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    console.print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} before the start", style="dim")
    figures: dict[str, Any] = {}
    good = True
    for part in asked.only or PARTS:
        try:
            figures[part], passed = _measured(part, asked, console)
        except KeyboardInterrupt:
            left = [f"--only {name}" for name in asked.only or PARTS if name not in figures]
            console.print(
                f"stopped; what was measured stands above. For the rest: python -m tests.tools.bench {' '.join(left)}"
            )
            return 130
        good = good and passed
        if asked.json:  # after each part: a run takes most of an hour
            write_whole(asked.json, json.dumps(figures, indent=1) + "\n")
    return 0 if good else 1


def _measured(part: str, asked: argparse.Namespace, console: Console) -> tuple[Any, bool]:
    """The figures of a part, which is shown, and whether it came out as it has to."""
    if part == "planted":
        scored = score.score()
        _show_score(console, scored)
        return asdict(scored), scored.passed
    if part == "speed":
        timed = speed.speed(asked.runs, asked.peer_runs)
        _show_speed(console, timed)
        ratios = {name: getattr(timed, name) for name in ("ratio", "cpu_ratio", "ratio_per_combination")}
        return asdict(timed) | ratios, True
    if part == "sizes":
        small = sizes.sizes(asked.report)
        sizes.show(console, small)
        return [asdict(s) for s in small], True
    if part == "lockstep":
        beside = lockstep.compare(console, full=asked.full)
        lockstep.show(console, beside)
        if asked.figure:
            lockstep.draw(beside, str(asked.figure))
        return beside.figures(), True
    if part in BESIDE:
        compare, show = BESIDE[part]
        found = compare(console)
        show(console, found)
        return found.figures(), getattr(found, "passed", True)
    swept = sweep.sweep()
    _show_sweep(console, swept)
    return asdict(swept), True


def _asked() -> argparse.Namespace:
    parser = parser_of("bench", EXAMPLES, __doc__)
    parser.add_argument(
        "--only", action="append", choices=(*PARTS, "sizes"), help="this part; may be given more than once"
    )
    parser.add_argument(
        "--runs", type=_count, default=5, metavar="N", help="runs of ours in the speed part (default 5)"
    )
    parser.add_argument(
        "--peer-runs", type=_count, default=2, metavar="N", help="runs of torch's validator (default 2)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here, whole or not at all")
    parser.add_argument("--report", type=Path, metavar="FILE", help="the JSON report of which --only sizes speaks")
    parser.add_argument("--figure", type=Path, metavar="FILE", help="draw the lockstep part here, as SVG (matplotlib)")
    parser.add_argument("--full", action="store_true", help="let torch's LocalTensorMode try 4096 ranks, too")
    asked = parser.parse_args()
    if asked.json and (asked.json.is_dir() or not asked.json.absolute().parent.is_dir()):
        parser.error(f"--json {asked.json}: this is no file in a folder that is there")
    if "sizes" in (asked.only or ()) and not (asked.report and asked.report.is_file()):
        parser.error(f"--report {asked.report}: --only sizes needs a report of `localtensor validate --json`")
    return asked


def _count(text: str) -> int:
    count = int(text)
    if count < 1:
        raise argparse.ArgumentTypeError(f"{text} runs measure nothing: pass 1 or more")
    return count


def _table(title: str, rows: list[tuple[str, str, str]]) -> Table:
    table = Table(title=title, title_justify="left", show_header=False)
    for row in rows:
        table.add_row(*row)
    return table


def _show_score(console: Console, found: score.Score) -> None:
    misfits = ", ".join(f"{count} {verdict}" for verdict, count in sorted(found.misfits.items()))
    console.print(_table(f"Planted wrong rules ({found.seconds:.0f} s)", [
        ("mutants Unsound or Refused", f"{found.killed} of {found.mutants} ({found.share:.1f} %)", f"target {score.TARGET:.0f} %"),
        ("originals Sound", f"{found.sound} of {found.originals}", "target all"),
        ("rules without a verdict, crashes", f"{found.untried}, {found.crashed}", "target 0, 0"),
        ("misfits, which torch refuses aloud", misfits, "none may be sound"),
    ]))  # fmt: skip
    console.print("\n| family | mutants found | originals Sound |\n|---|---|---|", markup=False)
    for family, (killed, mutants, sound, originals) in found.families.items():
        console.print(f"| {family} | {killed} of {mutants} | {sound} of {originals} |", markup=False)
    for name, told in (found.survivors | found.accused).items():
        console.print(f"  {name}: {told}", markup=False)


def _show_speed(console: Console, timed: speed.Speed) -> None:
    ours, peer = statistics.median(timed.ours), statistics.median(timed.peer)
    console.print(_table(f"localtensor {' '.join(speed.OURS)}, beside torch's validator", [
        ("ours, median", f"{ours:.2f} s of {_each(timed.ours)}",
         f"{timed.our_samples} samples, {timed.our_combinations} combinations of placements"),
        ("torch's, median", f"{peer:.2f} s of {_each(timed.peer)}",
         f"{timed.peer_samples} samples, {timed.peer_combinations} combinations of placements"),
        ("times faster", f"{timed.ratio:.1f}", f"target {speed.TARGET:.0f}"),
        ("times less processor time", f"{timed.cpu_ratio:.1f}",
         f"{statistics.median(timed.our_cpu):.2f} s beside {statistics.median(timed.peer_cpu):.2f} s"),
        ("times faster by the combination", f"{timed.ratio_per_combination:.1f}", "if each is paid by what it tries"),
    ]))  # fmt: skip


def _each(seconds: tuple[float, ...]) -> str:
    return ", ".join(f"{s:.2f}" for s in seconds)


def _show_sweep(console: Console, swept: sweep.Sweep) -> None:
    counts, phases = swept.counts, ", ".join(f"{name} {seconds:.1f}" for name, seconds in swept.phases.items())
    rows = [
        ("wall time, Python's start included", f"{swept.wall:.1f} s", f"target {sweep.SECONDS:.0f} s ({phases})"),
        ("processor time", f"{swept.cpu:.1f} s", "of all processes"),
        ("tried", f"{counts['instances']} rule instances", f"{counts['overloads']} overloads, {counts['samples']} samples"),
        ("verdicts", f"{counts['unsound']} unsound, {counts['suspect']} suspect",
         f"{counts['sound']} sound, {counts['untestable']} untestable, {counts['crashed']} crashed"),
    ]  # fmt: skip
    peak = swept.peak
    if peak:
        largest = ", ".join(map(str, peak.children[:4]))
        rows += [
            ("peak memory, shared pages once", f"{peak.shared_once} MiB", f"target {sweep.MEMORY} MiB"),
            (
                "peak memory, resident sizes added up",
                f"{peak.together} MiB",
                "counts a shared page once for each process",
            ),
            (
                "largest: parent; children",
                f"{peak.parent} MiB; {largest} MiB",
                f"{len(peak.children)} processes came and went",
            ),
        ]
    console.print(_table("localtensor validate --all --claims", rows))


if __name__ == "__main__":
    sys.exit(main())
