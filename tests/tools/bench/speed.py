"""The same question put to torch's own validator and to ours, in turns: what holds for `add` on two ranks?"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

OURS = ("validate", "add", "--search", "--ranks", "2")
PEER = ("--op", "add", "--device", "cpu")
TARGET = 100.0
"""How many times faster ours must be."""


@dataclass(frozen=True, slots=True)
class Speed:
    """Seconds inside each process, its start and imports left out; and how much each tried in them."""

    ours: tuple[float, ...]
    peer: tuple[float, ...]
    our_cpu: tuple[float, ...]
    peer_cpu: tuple[float, ...]
    our_samples: int
    our_combinations: int
    peer_samples: int
    peer_combinations: int

    @property
    def ratio(self) -> float:
        return statistics.median(self.peer) / statistics.median(self.ours)

    @property
    def cpu_ratio(self) -> float:
        """The ratio in processor time, which other work on the machine disturbs less."""
        return statistics.median(self.peer_cpu) / statistics.median(self.our_cpu)

    @property
    def ratio_per_combination(self) -> float:
        """The same ratio if each is paid by the combination."""
        return self.ratio * self.our_combinations / self.peer_combinations


def speed(runs: int = 5, peer_runs: int = 2) -> Speed:
    """Each run in a process of its own, so that no cache of an earlier run helps; the two take turns."""
    ours: list[dict[str, Any]] = []
    peer: list[dict[str, Any]] = []
    for turn in range(max(runs, peer_runs)):
        if turn < runs:
            ours.append(run("tests.tools.bench.ours", OURS))
        if turn < peer_runs:
            peer.append(run("tests.tools.bench.peer", PEER))
    return Speed(
        _column(ours, "seconds"), _column(peer, "seconds"), _column(ours, "cpu"), _column(peer, "cpu"),
        ours[0]["samples"], ours[0]["combinations"], peer[0]["samples"], peer[0]["combinations"],
    )  # fmt: skip


def _column(runs: list[dict[str, Any]], name: str) -> tuple[float, ...]:
    return tuple(round(run[name], 3) for run in runs)


def run(module: str, words: tuple[str, ...]) -> dict[str, Any]:
    """The one line of JSON that a runner prints."""
    done = subprocess.run([sys.executable, "-m", module, *words], check=False, capture_output=True, text=True)
    if done.returncode or not done.stdout.strip():
        raise RuntimeError(
            f"python -m {module} {' '.join(words)} ended with code {done.returncode}: {done.stderr[-2000:]}"
        )
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told
