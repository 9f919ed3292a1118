"""What the detector finds in the corpus: recall, false alarms, right lines.  `python -m tests.tools.symmetric.measure`.

With `--cost`, what it costs: 10,000 accesses of eight ranks, and each right program, with the detector and without.
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

import localtensor as lt
from localtensor._util.patching import replaced
from localtensor.threads.symmetric.watch import SymmetricWatch
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


RANKS, ACCESSES, RUNS = 8, 10_000, 5


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


@contextmanager
def unwatched() -> Iterator[None]:
    """Inside the block no access is seen: neither a check nor a yield point.  A loop that polls a pad would not end."""
    with replaced(SymmetricWatch, "begin", lambda _: None), replaced(SymmetricWatch, "end", lambda _: None):
        yield


def seconds(program: Callable[..., object], *args: object, ranks: int, races: bool, watched: bool = True) -> float:
    """The processor time of one run."""
    with nullcontext() if watched else unwatched():
        begin = time.process_time()
        lt.run(program, *args, ranks=ranks, races=races, leftovers="ignore", device=DEVICE)
        return time.process_time() - begin


WAYS = ({"races": True}, {"races": False}, {"races": False, "watched": False})


def costs(
    program: Callable[..., object], *args: object, ranks: int, ways: Sequence[dict[str, bool]] = WAYS
) -> list[float]:
    """The seconds of the program with the detector, with `races=False`, and unwatched: medians of a few runs in turns."""
    seconds(program, *args, ranks=ranks, races=True)  # the first run fills torch's caches
    rounds = [[seconds(program, *args, ranks=ranks, **way) for way in ways] for _ in range(RUNS)]
    return [median(column) for column in zip(*rounds, strict=True)]


def print_costs() -> None:
    for program in (in_phases, spread):
        detected, off, bare = costs(program, ACCESSES, ranks=RANKS)
        print(
            f"{program.__name__}: {ACCESSES} accesses of {RANKS} ranks in {detected:.2f} s,"
            f" {detected / off:.2f} times races=False, {detected / bare:.2f} times unwatched"
        )
    each = {one.name: costs(one.body, ranks=one.ranks, ways=WAYS[:2]) for one in RIGHT}
    whole = sum(on for on, _ in each.values()) / sum(off for _, off in each.values())
    worst = max(each, key=lambda name: each[name][0] / each[name][1])
    most = each[worst][0] / each[worst][1]
    print(f"{len(each)} right programs: {whole:.2f} times races=False, {most:.2f} times at most ({worst})")


def print_findings() -> None:
    outcomes, alarms, recall, lines = report()
    print(f"{len(FAULTY)} faulty programs: recall {recall:.3f}, right lines {lines:.3f}")
    print(f"{len(RIGHT)} right programs, 3 schedules each: {len(alarms)} false alarms")
    for outcome in outcomes:
        if not outcome.recalled or not outcome.right_lines:
            print(f"  {outcome.program.name}: {sorted(outcome.names)}, {outcome.schedule}")


if __name__ == "__main__":
    print_costs() if "--cost" in sys.argv[1:] else print_findings()
