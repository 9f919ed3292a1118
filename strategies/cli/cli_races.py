"""The part of the command line that looks for races: `localtensor races`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from strategies.base.exits import leave

RACES_EXAMPLES = """Examples:

\b
  localtensor races
      our shared cache under 20,000 interleavings
  localtensor races --target once --schedules 1000000
      a night of them
  localtensor races --target propagate --schedules 300
      our propagator, many threads, one schedule at a time
  localtensor races --target dtensor
      torch's own propagator, under threads that run free
  localtensor races --target dtensor --repro scripts
      and a script of plain torch for each finding
  localtensor races --target dtensor --seconds 120 --json races.json
      two minutes at most, for a CI server

Exit codes: 0 nothing found; 1 something found; 2 usage; 3 infrastructure, or a part was not run and nothing was found;
130 stopped by Ctrl-C.
"""


def races(
    target: Annotated[str, Option("--target", help="once: our cache; propagate: our propagator; dtensor: torch's own.")] = "once",
    schedules: Annotated[int | None, Option("--schedules", help="How many interleavings; for dtensor, rounds of free-running threads.  [default: 20000; propagate 2000; dtensor 20]", show_default=False)] = None,
    threads: Annotated[int | None, Option("--threads", help="Free-running threads, for dtensor.  [default: 8]", show_default=False)] = None,
    seconds: Annotated[float | None, Option("--seconds", help="Seconds for the whole; each script of dtensor has 60 at most.", show_default=False)] = None,
    seed: Annotated[int, Option("--seed", help="Same seed, same schedules.")] = 0,
    json_file: Annotated[Path | None, Option("--json", help="Write the whole report here.", show_default=False)] = None,
    repro: Annotated[Path | None, Option("--repro", help="Write a script for every part that found something into this folder.", show_default=False)] = None,
    quiet: Annotated[bool, Option("--quiet", "-q", help="No progress bar.")] = False,
) -> None:  # fmt: skip
    """Look for races: in our shared cache and propagator, schedule by schedule, and in torch's own propagator."""

    def work() -> int:
        from strategies.cli.commands import races as races_command

        try:
            asked = races_command.Asked(target, schedules, threads, seconds, seed, json_file, repro, quiet)
        except races_command.BadRaces as error:
            return races_command.refused(error, lambda said: typer.echo(said, err=True))
        return races_command.run(asked)

    leave(work, "; nothing was written")
