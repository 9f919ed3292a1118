"""LocalTensors in lockstep beside torch's own: the cost of one step, of the first use, and of one op, by ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table

RANKS = (1, 4, 16, 64, 256, 1024, 4096)
PEER_RANKS = {"step": 256, "first": 256, "pointwise": 1024}  # the most that take the peer less than a minute
TARGETS = {("step", 4): 2.0, ("step", 256): 30.0}
GROWTH, SECONDS, MIB, OP = 1.5, {1024: 1.0, 4096: 10.0}, 600.0, 30e-6
LIMIT = 300  # seconds for one case


@dataclass(frozen=True, slots=True)
class Case:
    """Seconds: of a step or an op, the median of many; of the first use, that one.  The peak of the process."""

    seconds: float
    peak_mib: float


@dataclass(frozen=True, slots=True)
class Compared:
    """By kind of work, way and number of ranks; a case of the peer that came to no end is not there."""

    cases: dict[str, dict[str, dict[int, Case]]]

    def ratio(self, work: str, ranks: int) -> float | None:
        ours, peer = self.cases[work]["ours"].get(ranks), self.cases[work]["peer"].get(ranks)
        return None if ours is None or peer is None else peer.seconds / ours.seconds

    @property
    def growth(self) -> float:
        """The step with 1024 ranks over the step with 64."""
        step = self.cases["step"]["ours"]
        return step[1024].seconds / step[64].seconds

    @property
    def op_budget(self) -> tuple[float, float]:
        """One op on a replicated value of 1024 ranks, and what it may take: twice the plain op, and 30 us."""
        plain = self.cases["pointwise"]["floor"][1].seconds
        return self.cases["pointwise"]["ours"][1024].seconds, 2 * plain + OP

    def figures(self) -> dict[str, object]:
        ratios = {work: {n: self.ratio(work, n) for n in RANKS} for work in self.cases}
        return asdict(self) | {"ratios": ratios, "growth": self.growth, "op_budget": self.op_budget}


def run_case(work: str, way: str, ranks: int) -> Case | None:
    """None if it is over the limit of time, or is killed, as for want of memory."""
    words = [sys.executable, "-W", "ignore", "-m", "tests.tools.bench.lockstep_case", work, way, str(ranks)]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT, check=False, env=os.environ)
    except subprocess.TimeoutExpired:
        return None
    if done.returncode == -signal.SIGKILL:
        return None
    if done.returncode:
        raise RuntimeError(f"{work} by {way} on {ranks} ranks failed with {done.returncode}:\n{done.stderr[-2000:]}")
    return Case(**json.loads(done.stdout.splitlines()[-1]))


def compare(console: Console, *, full: bool = False) -> Compared:
    """Each case in a process of its own; `full` lets the peer try every number of ranks that ours does."""
    cases: dict[str, dict[str, dict[int, Case]]] = {w: {"floor": {}, "ours": {}, "peer": {}} for w in PEER_RANKS}
    for work, found in cases.items():
        for ranks in RANKS:
            console.print(f"{work}, {ranks} ranks ...", style="dim")
            for way, most in (("ours", RANKS[-1]), ("floor", 1), ("peer", RANKS[-1] if full else PEER_RANKS[work])):
                case = run_case(work, way, ranks) if ranks <= most else None
                if case:
                    found[way][ranks] = case
                elif ranks <= most and way == "peer":
                    console.print(f"  torch's: not done in {LIMIT} s, or killed")
                elif ranks <= most:
                    raise RuntimeError(f"{work} on {ranks} ranks: not done in {LIMIT} s, or killed")
    return Compared(cases)


def show(console: Console, compared: Compared) -> None:
    for work, found in compared.cases.items():
        unit, times = ("us", 1e6) if work == "pointwise" else ("s", 1.0) if work == "first" else ("ms", 1e3)
        table = Table("ranks", f"ours {unit}", f"torch's {unit}", "times faster", "peak MiB", "torch's MiB", title=work)
        for ranks in RANKS:
            ours, peer, ratio = found["ours"][ranks], found["peer"].get(ranks), compared.ratio(work, ranks)
            table.add_row(
                str(ranks),
                f"{ours.seconds * times:.3g}",
                f"{peer.seconds * times:.3g}" if peer else "not tried",
                f"{ratio:.1f}" if ratio else "",
                f"{ours.peak_mib:.0f}",
                f"{peer.peak_mib:.0f}" if peer else "",
            )
        console.print(table)
    op, budget = compared.op_budget
    console.print(f"the step with 1024 ranks over 64: {compared.growth:.2f}x (target {GROWTH}x)")
    console.print(f"one op on a replicated value, 1024 ranks: {op * 1e6:.1f} us, target {budget * 1e6:.1f} us")


def draw(compared: Compared, path: str) -> None:
    """Cost against ranks, both axes logarithmic, as an SVG that reads on light and dark pages."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "localtensor"  # the same figures draw the same file
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    titles = {"step": "DTensor MLP training step", "first": "first distribute, matmul, gather"}
    for one, (work, title) in zip(axes, titles.items(), strict=True):
        for way, label, style in (("ours", "localtensor", "o-"), ("peer", "torch's LocalTensorMode", "s--")):
            found = compared.cases[work][way]
            one.loglog(list(found), [case.seconds for case in found.values()], style, label=label)
        floor = compared.cases[work]["floor"][1].seconds
        one.axhline(floor, color="grey", lw=0.8, ls=":", label="one rank alone")
        one.set(title=title, xlabel="ranks", ylabel="seconds", xticks=RANKS, xticklabels=[str(n) for n in RANKS])
        one.grid(alpha=0.3, which="both")
        one.legend()
    figure.savefig(path, metadata={"Date": None}, facecolor="white")
