"""Ten ops put to torch's own validator and to ours, in turns: what does one combination of placements cost each?

Each run is a process of its own, and its start and imports are left out.  Torch's validator is slow, so that it gets a
few samples of each op only; it is paid for what it tried in them, as ours is for what it tried.  Ours is told not to
confirm anything on real processes, which torch's does not do either.  Of ours two times are given: that of the trials,
in which combinations are tried, and that of the whole command, which captures its samples first, backward ones too.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from tests.tools.bench.speed import TARGET, run

OPS: dict[str, int] = {
    "add": 6, "mul": 6, "div": 6, "sum": 12, "mm": 4, "softmax": 6, "cumsum": 6, "gather": 6, "topk": 6, "index_select": 6,
}  # fmt: skip
"""Names that both tools know, and how many samples torch's validator gets: some ten seconds' worth."""


@dataclass(frozen=True, slots=True)
class Pair:
    """One op: seconds, samples and combinations, ours and the peer's."""

    op: str
    trials: float
    whole: float
    peer: float
    our_samples: int
    peer_samples: int
    our_combinations: int
    peer_combinations: int

    @property
    def our_micros(self) -> float:
        return 1e6 * self.trials / self.our_combinations

    @property
    def peer_micros(self) -> float:
        return 1e6 * self.peer / self.peer_combinations

    @property
    def ratio(self) -> float:
        """How many times less a combination costs us."""
        return self.peer_micros / self.our_micros

    @property
    def whole_ratio(self) -> float:
        """The same if the whole command is counted."""
        return self.ratio * self.trials / self.whole


@dataclass(frozen=True, slots=True)
class Peers:
    """All pairs."""

    pairs: tuple[Pair, ...]

    @property
    def median(self) -> float:
        return statistics.median(pair.ratio for pair in self.pairs)

    @property
    def least(self) -> Pair:
        return min(self.pairs, key=lambda pair: pair.ratio)

    def figures(self) -> dict[str, Any]:
        rows = {
            p.op: {"ratio": p.ratio, "whole_ratio": p.whole_ratio, "ours": p.our_micros, "peer": p.peer_micros}
            for p in self.pairs
        }
        return {"median": self.median, "least": self.least.op, "ops": rows}


def compare(console: Console) -> Peers:
    """Run both on every op.  Raises RuntimeError where one of them tried nothing."""
    pairs = []
    for op, samples in OPS.items():
        console.print(f"  {op} ...", style="dim")
        pairs.append(_pair(op, samples))
    return Peers(tuple(pairs))


def _pair(op: str, samples: int) -> Pair:
    ours = run(
        "tests.tools.bench.ours", ("validate", op, "--search", "--ranks", "2", "--workers", "1", "--confirm", "none")
    )
    peer = run("tests.tools.bench.peer", ("--op", op, "--device", "cpu", "--max-samples", str(samples)))
    for name, told in (("localtensor", ours), ("torch's validator", peer)):
        if not told["combinations"]:
            raise RuntimeError(f"{name} tried no combination of placements for {op}")
    return Pair(
        op, ours["phases"].get("trials", ours["seconds"]), ours["seconds"], peer["seconds"],
        ours["samples"], peer["samples"], ours["combinations"], peer["combinations"],
    )  # fmt: skip


def show(console: Console, found: Peers) -> None:
    """The pairs as Markdown rows, the median and the least ratio."""
    console.print(
        "\n| op | ours: samples, combinations, us each | torch's: samples, combinations, us each | times less | whole command |"
        "\n|---|---|---|---|---|"
    )
    for p in found.pairs:
        console.print(
            f"| `{p.op}` | {p.our_samples}, {p.our_combinations:,}, {p.our_micros:.0f} "
            f"| {p.peer_samples}, {p.peer_combinations:,}, {p.peer_micros:,.0f} | {p.ratio:.0f} | {p.whole_ratio:.0f} |"
        )
    console.print(
        f"\nmedian {found.median:.0f} times, least {found.least.ratio:.0f} times ({found.least.op}); target {TARGET:.0f}"
    )
