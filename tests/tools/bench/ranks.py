"""Rank threads beside their peers: torch's own threaded group, real gloo processes, and one rank alone."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table

RANKS = (4, 16, 64, 256)
JOB_RANKS = 16
STEPS = {4: 60, 16: 40, 64: 20, 256: 10}
LIMIT = 600  # seconds for one way
ROUNDS = 5  # of the floor, bare threads and ours, in turn: a machine that is uneven for seconds makes of one round what it likes


@dataclass(frozen=True, slots=True)
class Figures:
    """Seconds: of one step of all ranks (median), and of the job from a Python with torch loaded to its end."""

    step: float
    job: float
    peak_mib: float


@dataclass(frozen=True, slots=True)
class Beside:
    """One number of ranks.  A round is the floor, one rank alone, so that `ranks` times its step is the least that all
    can take; as many bare threads in turn, each with the work of the floor; and ours, right after them.
    """

    ranks: int
    rounds: tuple[tuple[Figures, Figures, Figures], ...]
    wide: Figures  # one rank alone with the tensors of all, in turn
    threaded: Figures
    threaded_on_one_core: Figures  # OMP_NUM_THREADS=1: torch's threads do not fight for cores then

    @property
    def floor(self) -> float:
        return self.ranks * statistics.median(floor.step for floor, _, _ in self.rounds)

    @property
    def step(self) -> float:
        return statistics.median(ours.step for _, _, ours in self.rounds)

    @property
    def peak_mib(self) -> float:
        return max(ours.peak_mib for _, _, ours in self.rounds)

    @property
    def over_floor(self) -> float:
        """The median of the rounds' own ratios."""
        return statistics.median(ours.step / (floor.step * self.ranks) for floor, _, ours in self.rounds)

    @property
    def wide_over_floor(self) -> float:
        """What of that ratio is the tensors' being so many."""
        return self.ranks * self.wide.step / self.floor

    @property
    def turns_over_floor(self) -> float:
        """What of that ratio is the threads' being so many; the median of the rounds, too."""
        return statistics.median(turns.step / (floor.step * self.ranks) for floor, turns, _ in self.rounds)

    @property
    def ratio(self) -> float:
        return self.threaded.step / self.step

    @property
    def ratio_on_one_core(self) -> float:
        return self.threaded_on_one_core.step / self.step


@dataclass(frozen=True, slots=True)
class Compared:
    by_ranks: list[Beside]
    job: Figures
    gloo: Figures

    @property
    def job_ratio(self) -> float:
        return self.gloo.job / self.job.job

    def figures(self) -> dict[str, object]:
        return asdict(self) | {
            "over_floor": {one.ranks: one.over_floor for one in self.by_ranks},
            "wide_over_floor": {one.ranks: one.wide_over_floor for one in self.by_ranks},
            "turns_over_floor": {one.ranks: one.turns_over_floor for one in self.by_ranks},
            "ratio_on_one_core": {one.ranks: one.ratio_on_one_core for one in self.by_ranks},
            "ratio": {one.ranks: one.ratio for one in self.by_ranks},
            "job_ratio": self.job_ratio,
        }


def run_way(way: str, ranks: int, steps: int, **environment: str) -> Figures:
    words = [sys.executable, "-m", "tests.tools.bench.mlp_step", way, str(ranks), str(steps)]
    env = os.environ | environment
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT, check=False, env=env)
    if done.returncode:
        raise RuntimeError(f"{way} on {ranks} ranks failed with {done.returncode}:\n{done.stderr[-2000:]}")
    return Figures(**json.loads(done.stdout.splitlines()[-1]))


def compare(console: Console) -> Compared:
    """Each way in a process of its own, one after the other."""
    rows = []
    for ranks in RANKS:
        console.print(f"{ranks} ranks ...", style="dim")
        rows.append(
            Beside(
                ranks,
                tuple(
                    (
                        run_way("floor", ranks, 200),
                        run_way("turns", ranks, STEPS[ranks]),
                        run_way("ours", ranks, STEPS[ranks]),
                    )
                    for _ in range(ROUNDS)
                ),
                wide=run_way("wide_floor", ranks, STEPS[ranks]),
                threaded=run_way("threaded", ranks, STEPS[ranks]),
                threaded_on_one_core=run_way("threaded", ranks, STEPS[ranks], OMP_NUM_THREADS="1"),
            )
        )
    console.print(f"{JOB_RANKS} gloo processes ...", style="dim")
    return Compared(rows, run_way("ours", JOB_RANKS, 5), run_way("gloo", JOB_RANKS, 5))


def show(console: Console, compared: Compared) -> None:
    table = Table(
        "ranks",
        "floor ms",
        "ours ms",
        "over floor",
        "wide floor",
        "in turn",
        "torch's threads ms",
        "ratio",
        "with OMP=1 ms",
        "ratio",
        "peak MiB",
    )
    for one in compared.by_ranks:
        table.add_row(
            str(one.ranks),
            f"{one.floor * 1e3:.1f}",
            f"{one.step * 1e3:.1f}",
            f"{one.over_floor:.2f}x",
            f"{one.wide_over_floor:.2f}x",
            f"{one.turns_over_floor:.2f}x",
            f"{one.threaded.step * 1e3:.1f}",
            f"{one.ratio:.1f}x",
            f"{one.threaded_on_one_core.step * 1e3:.1f}",
            f"{one.ratio_on_one_core:.1f}x",
            f"{one.peak_mib:.0f}",
        )
    console.print(table)
    console.print("wide floor: one rank alone with the tensors of all ranks in turn, beside the floor", style="dim")
    console.print(
        "in turn: as many threads, which hand on after each step, each with the work of the floor", style="dim"
    )
    ours, gloo = compared.job.job, compared.gloo.job
    console.print(
        f"a job of {JOB_RANKS} ranks and 8 steps, start-up included: {ours:.2f} s; on gloo processes {gloo:.1f} s: "
        f"{compared.job_ratio:.0f}x"
    )
