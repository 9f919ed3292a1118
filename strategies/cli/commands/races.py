"""What `localtensor races` does once its options are read: the looks, the report, the exit code."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from localtensor.errors import LocalTensorError, Refusal
from strategies.base.atomic_files import unwritable, write_whole
from strategies.base.progress import Bar, bar
from strategies.base.signals import CLEAN, NOTHING, USAGE, WRONG, say, wrote
from strategies.propagation.races import explore as races
from strategies.propagation.races import explore as races_shown
from strategies.propagation.races.linearizability import Finding, Part, Tried
from strategies.propagation.races.subprocesses import GRACE, SCRIPTS, run_script, script

TARGETS = ("once", "propagate", "dtensor")
SCHEDULES = {"once": 20_000, "propagate": 2_000, "dtensor": 20}
"""Schedules of the targets that are explored, rounds of the one that runs free; if nobody says otherwise."""
THREADS, PER_SCRIPT, LEAST = 8, 60.0, 20.0
"""Free-running threads; seconds that a script may take, and with less than so many none is begun."""


class BadRaces(Refusal, call="localtensor races"):
    """Options of `localtensor races` that cannot be followed."""


@dataclass(frozen=True, slots=True)
class Asked:
    """The options.  Raises `BadRaces`."""

    target: str
    schedules: int | None = None
    threads: int | None = None
    seconds: float | None = None
    seed: int = 0
    json_file: Path | None = None
    repro: Path | None = None
    quiet: bool = False

    def __post_init__(self) -> None:
        if self.target not in TARGETS:
            problem = "there is no such target"
            raise BadRaces("--target", repr(self.target), problem, f"Use {', '.join(TARGETS)}.")
        for name, value, least in (
            ("schedules", self.schedules, 1),
            ("threads", self.threads, 2),
            ("seed", self.seed, 0),
        ):
            if value is not None and value < least:
                raise BadRaces(f"--{name}", str(value), f"it has to be {least} or more", f"Pass --{name} {least}.")
        if self.seconds is not None and not self.seconds > 0:
            raise BadRaces("--seconds", f"{self.seconds:g}", "nothing can be tried in no time", "Pass --seconds 60.")
        if self.threads is not None and self.target != "dtensor":
            problem = f"programs of --target {self.target} bring their own threads"
            raise BadRaces("--threads", str(self.threads), problem, "Leave it out, or use --target dtensor.")
        for name, path in (("--json", self.json_file), ("--repro", self.repro)):
            problem, remedy = unwritable(path, folder=name == "--repro") if path is not None else ("", "")
            if problem:
                raise BadRaces(name, str(path), problem, remedy)


def run(asked: Asked) -> int:
    """The exit code: 0 nothing found, 1 something found, 3 nothing was run, or a file cannot be written."""
    errors = Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)
    with bar(errors, asked.quiet) as shown:
        parts = (_free if asked.target == "dtensor" else _explored)(asked, shown)
    code = exit_code(parts)
    about = f"Python {platform.python_version()}, seed {asked.seed}" + _torch(asked)
    problem = wrote(races_shown.as_text(asked.target, about, parts, _repeat(asked)) + "\n")
    if problem:
        errors.print(f"localtensor: {problem}", markup=False)
    say("; what was to be written is written whole, or not at all")
    written = asked.json_file is None
    try:
        if asked.json_file:
            write_whole(asked.json_file, races_shown.as_json(asked.target, about, parts, code))
            written = True
        if asked.repro:
            _write_scripts(asked.repro, parts)
    except OSError as trouble:
        where = trouble.filename or (asked.repro if written else asked.json_file)  # a full disk names no file
        above = "nor could the report be shown" if problem else "the report above is whole"
        errors.print(f"localtensor: {where}: {trouble.strerror}; {above}", markup=False)
        return NOTHING
    return (code or NOTHING) if problem else code


def exit_code(parts: list[Part]) -> int:
    """1 if something was found; 3 if a part was not run; 0."""
    if any(part.findings for part in parts):
        return WRONG
    return NOTHING if not parts or any(part.trouble for part in parts) else CLEAN


def refused(error: LocalTensorError, say: Callable[[str], object]) -> int:
    say(str(error))
    return USAGE


# -- programs of ours, explored


def _explored(asked: Asked, shown: Bar) -> list[Part]:
    programs, within = races.ONCE, races.WITHIN
    if asked.target == "propagate":
        from strategies.propagation.races import propagator_programs as races_propagate  # which imports torch

        programs, within = races_propagate.PROGRAMS, races_propagate.WITHIN
    schedules = asked.schedules or SCHEDULES[asked.target]
    shown.phase(f"--target {asked.target}", schedules)
    done = {"all": 0}
    counts: dict[str, int] = {}

    def told(name: str, count: int) -> None:
        before, counts[name] = counts.get(name, 0), count
        done["all"] += count - before
        shown.tick(count - before)

    tried = races.explore_all(programs, schedules, within=within, seed=asked.seed, seconds=asked.seconds, told=told)
    return [_part(asked.target, one) for one in tried]


def _part(target: str, tried: Tried) -> Part:
    trouble = "" if tried.schedules else "its share of the time was over before it began"
    if tried.failure is None:
        return Part(tried.name, tried.promise, tried.schedules, tried.seconds, trouble=trouble)
    room = "races_propagate" if target == "propagate" else "races_once"
    module = "races_history" if tried.name == "calls" else room
    home = {"races_history": "linearizability", "races_once": "cache_programs"}.get(module, "propagator_programs")
    within = "races_propagate.WITHIN" if target == "propagate" else "races.WITHIN"
    text = (
        f"from localtensor.concurrency.explorer import replay\nfrom strategies.propagation.races import explore as races, {home} as {module}\n\n"
        f"program = races.made({module}.{tried.name}, {tried.yields!r}, {within})\n"
        f"failure = replay(program, {tried.failure.text!r})\n"
        "raise SystemExit(str(failure) if failure else 0)\n"
    )
    finding = Finding(tried.name, tried.failure.kind, 1, str(tried.failure), text)
    return Part(tried.name, tried.promise, tried.schedules, tried.seconds, (finding,))


# -- torch's own propagator, free-running


def _free(asked: Asked, shown: Bar) -> list[Part]:
    end = None if asked.seconds is None else time.monotonic() + asked.seconds
    shown.phase("--target dtensor", len(SCRIPTS))
    parts = []
    for name, asks in SCRIPTS.items():
        left = PER_SCRIPT if end is None else min(PER_SCRIPT, end - time.monotonic() - GRACE)
        if end is not None and left < LEAST - GRACE:
            parts.append(Part(name, asks, 0, 0.0, trouble=f"too little was left of --seconds {asked.seconds:g}"))
        else:
            text = script(
                name, threads=asked.threads or THREADS, rounds=asked.schedules or SCHEDULES["dtensor"],
                seed=asked.seed, seconds=max(1, int(left)),
            )  # fmt: skip
            parts.append(run_script(name, asks, text, left))
        shown.tick()
    return parts


def _torch(asked: Asked) -> str:
    if asked.target == "once":
        return ""
    from importlib.metadata import version

    return f", torch {version('torch')}"


def _repeat(asked: Asked) -> str:
    if asked.repro:
        return f"Repeat: the scripts in {asked.repro}, each by itself"
    settings = "".join(
        f" --{name} {value:g}"
        for name, value in (("schedules", asked.schedules), ("threads", asked.threads), ("seconds", asked.seconds))
        if value is not None
    )
    return f"Repeat: localtensor races --target {asked.target} --seed {asked.seed}{settings} --repro FOLDER writes a script for each"


def _write_scripts(folder: Path, parts: list[Part]) -> None:
    for part in parts:
        if part.findings:
            write_whole(folder / f"races_{part.name}.py", part.findings[0].script)
