"""`python -m tests.tools.races.nightly`: a million schedules over the shared cache; Ctrl-C ends it with what was done so far."""

from __future__ import annotations

import sys
import time

from localtensor.concurrency.explorer import replay
from strategies.propagation.races import explore as races
from tests.tools.command_line import parser_of

MILLION = 1_000_000
EXAMPLES = """examples:
  python -m tests.tools.races.nightly                     a million schedules
  python -m tests.tools.races.nightly --schedules 1300    a hundred of each program, in seconds
  python -m tests.tools.races.nightly --seed 1000000      another night, other schedules

Exit code 1 if a promise is broken, with the line that replays it; 130 after Ctrl-C.
"""
CHUNK = 26_000  # schedules between two lines of progress; each chunk has seeds of its own


def main(words: list[str] | None = None) -> int:
    parser = parser_of("races.nightly", EXAMPLES, __doc__)
    parser.add_argument("--schedules", type=int, default=MILLION, metavar="N", help="how many (default a million)")
    parser.add_argument("--seed", type=int, default=0, help="where the seeds start; another night, other schedules")
    asked = parser.parse_args(words)
    if asked.schedules < 1:
        parser.error(f"--schedules {asked.schedules}: pass 1 or more")
    start, done = time.monotonic(), 0
    try:
        while done < asked.schedules:
            share = min(CHUNK, asked.schedules - done)
            for one in races.explore_all(races.ONCE, share, seed=asked.seed + done):
                if one.failure:
                    print(f"{one.name}: {one.promise}\n{one.failure}", flush=True)
                    program = next(program for program in races.ONCE if program.__name__ == one.name)
                    again = replay(races.made(program, one.yields, races.WITHIN), one.failure.text)
                    print("It fails again by its replay." if again else "Its replay does not fail.", flush=True)
                    return 1
                done += one.schedules
            _say(done, start)
    except KeyboardInterrupt:
        _say(done, start)
        print("Stopped by Ctrl-C: nothing was found so far.", flush=True)
        return 130
    print("Nothing found.", flush=True)
    return 0


def _say(done: int, start: float) -> None:
    seconds = time.monotonic() - start
    print(f"{done:,} schedules in {seconds:.0f} s, {done / max(seconds, 1e-9):,.0f} a second", flush=True)


if __name__ == "__main__":
    sys.exit(main())
