"""What the detector finds in the corpus: recall, false alarms, right lines.  `python -m tests.tools.symmetric.measure`.

With `--cost`, what it costs: the time of 10,000 accesses of eight ranks, with the detector and without.
"""

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

import localtensor as lt
from tests.device import DEVICE
from tests.tools.symmetric import faulty, late, late_faulty, late_right, right  # noqa: F401  # they register the programs
from tests.tools.symmetric.labels import FAULTY, RIGHT, Labelled

MOST_SCHEDULES = 1000


@dataclass
class Outcome:
    """What a run of a program ended with: the error, if any, and the schedule."""

    program: Labelled
    error: Exception | None
    schedule: str

    @property
    def names(self):
        found = [self.error, getattr(self.error, "__cause__", None)]
        return {type(one).__name__ for one in found if one is not None}

    @property
    def recalled(self):
        return bool(self.names & set(self.program.errors))

    @property
    def right_lines(self):
        """Whether each line that the error names is one of those marked, and for a race both of its lines."""
        named = {place.line for place in getattr(self.error, "places", ())}
        return bool(named) and named <= self.program.lines


def run(program, schedule):
    try:
        lt.run(program.body, ranks=program.ranks, schedule=schedule, leftovers="ignore", device=DEVICE)
    except lt.errors.ProgramFault as error:
        return Outcome(program, error, schedule)
    return Outcome(program, None, schedule)


def hunt(program):
    """The first outcome with an error: under round robin, and where the fault needs an order of its own, under others."""
    orders = ["round_robin", *(f"shuffled:{seed}" for seed in range(MOST_SCHEDULES if program.schedules else 0))]
    for schedule in orders:
        outcome = run(program, schedule)
        if outcome.error is not None:
            break
    return outcome


def report():
    outcomes = [hunt(program) for program in FAULTY]
    alarms = [o for o in (run(p, s) for p in RIGHT for s in ("round_robin", "shuffled:1", "pct:2")) if o.error]
    found = [o for o in outcomes if o.recalled]
    lines = [o for o in found if o.right_lines]
    return outcomes, alarms, len(found) / len(outcomes), len(lines) / max(len(found), 1)


RANKS, ACCESSES, RUNS = 8, 10_000, 3


def in_phases(count):
    """Each rank fills its buffer and reads all, barrier by barrier: `count` accesses of all ranks."""
    mine = symm_mem.empty(64, device=DEVICE).zero_()
    handle = symm_mem.rendezvous(mine, dist.group.WORLD)
    for step in range(count // (RANKS * (RANKS + 1))):
        handle.barrier()
        mine.fill_(step)
        handle.barrier()
        for peer in range(RANKS):
            handle.get_buffer(peer, (64,), torch.float32).sum()
    handle.barrier()


def spread(count):
    """Each rank writes the elements of its neighbour's buffer one by one, without a barrier: nothing may be forgotten."""
    mine = symm_mem.empty(2000, device=DEVICE).zero_()
    handle = symm_mem.rendezvous(mine, dist.group.WORLD)
    handle.barrier()
    theirs = handle.get_buffer((handle.rank + 1) % RANKS, (2000,), torch.float32)
    for step in range(count // RANKS):
        theirs[step % 2000].fill_(1)
    handle.barrier()


def seconds(program: Callable[[int], None], races: bool) -> float:
    """The shortest of a few runs."""

    def once() -> float:
        begin = time.perf_counter()
        lt.run(program, ACCESSES, ranks=RANKS, races=races, leftovers="ignore", device=DEVICE)
        return time.perf_counter() - begin

    return min(once() for _ in range(RUNS))


def costs() -> Iterator[tuple[str, float, float]]:
    """Each program's name, its seconds with the detector, and those without."""
    for program in (in_phases, spread):
        seconds(program, True)  # the first run fills torch's caches
        yield program.__name__, seconds(program, True), seconds(program, False)


def print_costs() -> None:
    for name, with_detector, without in costs():
        ratio = with_detector / without
        print(
            f"{name}: {ACCESSES} accesses of {RANKS} ranks in {with_detector:.2f} s, {without:.2f} s without: {ratio:.2f}"
        )


def print_findings() -> None:
    outcomes, alarms, recall, lines = report()
    print(f"{len(FAULTY)} faulty programs: recall {recall:.3f}, right lines {lines:.3f}")
    print(f"{len(RIGHT)} right programs, 3 schedules each: {len(alarms)} false alarms")
    for outcome in outcomes:
        if not outcome.recalled or not outcome.right_lines:
            print(f"  {outcome.program.name}: {sorted(outcome.names)}, {outcome.schedule}")


if __name__ == "__main__":
    print_costs() if "--cost" in sys.argv[1:] else print_findings()
