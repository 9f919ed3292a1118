"""What the detector finds in the corpus: recall, false alarms, right lines.  `python -m tests.tools.symmetric.measure`."""

from dataclasses import dataclass

import localtensor as lt
from tests.device import DEVICE
from tests.tools.symmetric import faulty, late, right  # noqa: F401  # they register the programs
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


if __name__ == "__main__":
    outcomes, alarms, recall, lines = report()
    print(f"{len(FAULTY)} faulty programs: recall {recall:.3f}, right lines {lines:.3f}")
    print(f"{len(RIGHT)} right programs, 3 schedules each: {len(alarms)} false alarms")
    for outcome in outcomes:
        if not outcome.recalled or not outcome.right_lines:
            print(f"  {outcome.program.name}: {sorted(outcome.names)}, {outcome.schedule}")
