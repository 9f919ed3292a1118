"""`localtensor races`: explores schedules of our programs, or runs scripts against torch's own propagator."""

from __future__ import annotations

import platform
import time
from importlib.metadata import version
from pathlib import Path

from strategies.base.progress import ProgressBar, error_console, progress_bar
from strategies.base.signals import EXIT_CLEAN, EXIT_NOTHING, EXIT_WRONG, set_stop_note
from strategies.cli.options import RacesOptions, deliver_text
from strategies.propagation.races import explore
from strategies.propagation.races.explore import GRACE, RACE_SCRIPTS, race_script, run_race_script
from strategies.propagation.races.linearizability import ExploredProgram, ProgramSummary, RaceFinding

SCHEDULES = {"once": 20_000, "propagate": 2_000, "dtensor": 20}
"""Default for --schedules: schedules of the explored targets, rounds of the target whose threads run freely."""
THREADS, PER_SCRIPT, LEAST = 8, 60.0, 20.0
"""Free-running threads; seconds that a script may take; seconds without which no script is started."""


def run(options: RacesOptions) -> int:
    """The exit code: 0 nothing found, 1 something found, 3 nothing was run, or a file cannot be written."""
    with progress_bar(error_console(), options.quiet) as shown:
        parts = (_run_scripts if options.target == "dtensor" else _explore)(options, shown)
    code = exit_code(parts)
    torch_version = f", torch {version('torch')}" if options.target != "once" else ""
    about = f"Python {platform.python_version()}, seed {options.seed}{torch_version}"
    files = [(options.json, explore.as_json(options.target, about, parts, code))] if options.json else []
    files += _scripts(options.repro, parts) if options.repro else []
    set_stop_note("; what was to be written is written whole, or not at all")
    return deliver_text(
        explore.as_text(options.target, about, parts, _repeat(options)) + "\n", files, code, options.repro
    )


def exit_code(parts: list[ProgramSummary]) -> int:
    """1 if something was found; 3 if a part was not run; 0."""
    if any(part.findings for part in parts):
        return EXIT_WRONG
    return EXIT_NOTHING if not parts or any(part.trouble for part in parts) else EXIT_CLEAN


def _explore(options: RacesOptions, shown: ProgressBar) -> list[ProgramSummary]:
    programs, within = explore.ONCE, explore.WITHIN
    if options.target == "propagate":
        from strategies.propagation.races import propagator_programs  # which imports torch

        programs, within = propagator_programs.PROGRAMS, propagator_programs.WITHIN
    schedules = options.schedules or SCHEDULES[options.target]
    shown.phase(f"--target {options.target}", schedules)
    counts: dict[str, int] = {}

    def update(name: str, count: int) -> None:
        before, counts[name] = counts.get(name, 0), count
        shown.tick(count - before)

    tried = explore.explore_all(
        programs, schedules, within=within, seed=options.seed, seconds=options.seconds, progress=update
    )
    return [_summary(options.target, one) for one in tried]


def _summary(target: str, tried: ExploredProgram) -> ProgramSummary:
    trouble = "" if tried.schedules else "its share of the time was over before it began"
    if tried.failure is None:
        return ProgramSummary(tried.name, tried.promise, tried.schedules, tried.seconds, trouble=trouble)
    module, within = "cache_programs", "explore.WITHIN"
    if target == "propagate":
        module, within = "propagator_programs", "propagator_programs.WITHIN"
    if tried.name == "calls":
        module = "linearizability"
    imported = ", ".join(dict.fromkeys(("explore", module, within.partition(".")[0])))
    text = (
        f"from localtensor.concurrency.explorer import replay\nfrom strategies.propagation.races import {imported}\n\n"
        f"program = explore.made({module}.{tried.name}, {tried.yields!r}, {within})\n"
        f"failure = replay(program, {tried.failure.text!r})\n"
        "raise SystemExit(str(failure) if failure else 0)\n"
    )
    finding = RaceFinding(tried.name, tried.failure.kind, 1, str(tried.failure), text)
    return ProgramSummary(tried.name, tried.promise, tried.schedules, tried.seconds, (finding,))


def _run_scripts(options: RacesOptions, shown: ProgressBar) -> list[ProgramSummary]:
    end = None if options.seconds is None else time.monotonic() + options.seconds
    shown.phase("--target dtensor", len(RACE_SCRIPTS))
    parts = []
    for name, asks in RACE_SCRIPTS.items():
        left = PER_SCRIPT if end is None else min(PER_SCRIPT, end - time.monotonic() - GRACE)
        if end is not None and left < LEAST - GRACE:
            trouble = f"too little was left of --seconds {options.seconds:g}"
            parts.append(ProgramSummary(name, asks, 0, 0.0, trouble=trouble))
        else:
            text = race_script(
                name,
                threads=options.threads or THREADS,
                rounds=options.schedules or SCHEDULES["dtensor"],
                seed=options.seed,
                seconds=max(1, int(left)),
            )
            parts.append(run_race_script(name, asks, text, left))
        shown.tick()
    return parts


def _repeat(options: RacesOptions) -> str:
    if options.repro:
        return f"Repeat: the scripts in {options.repro}, each by itself"
    given = {"schedules": options.schedules, "threads": options.threads, "seconds": options.seconds}
    settings = "".join(f" --{name} {value:g}" for name, value in given.items() if value is not None)
    return f"Repeat: localtensor races --target {options.target} --seed {options.seed}{settings} --repro FOLDER writes a script for each"


def _scripts(folder: Path, parts: list[ProgramSummary]) -> list[tuple[Path, str]]:
    return [(folder / f"races_{part.name}.py", part.findings[0].script) for part in parts if part.findings]
