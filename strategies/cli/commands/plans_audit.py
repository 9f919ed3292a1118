"""What `localtensor validate --plans` does once its options are read: the pairs, the findings, the exit code."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from localtensor.errors import Refusal
from strategies.base.atomic_files import unwritable, write_whole
from strategies.base.progress import Bar, bar
from strategies.base.signals import CLEAN, INTERRUPTED, NOTHING, USAGE, WRONG, gently, wrote
from strategies.planner.audit.pairs import MODES, draw_pairs
from strategies.planner.audit.report import Cause, Tried, as_json, as_text, causes, confirmed, rows, wasted
from strategies.planner.audit.script import script
from strategies.planner.audit.verdict import Bench, Verdict, judge

MESHES = ("2", "3", "2,2", "2,3")
SAMPLES = 100
"""Pairs on each mesh, if nobody says otherwise."""
PLANNERS = {"greedy": ("greedy",), "graph": ("graph",), "both": MODES}
MOST_RANKS = 64


class BadPlans(Refusal, call="localtensor validate --plans"):
    """Options of `localtensor validate --plans` that cannot be followed."""


@dataclass(frozen=True, slots=True)
class Asked:
    """The options.  Raises `BadPlans`."""

    meshes: tuple[str, ...] = MESHES
    samples: int = SAMPLES
    seed: int = 0
    planner: str = "both"
    confirm: str = "gloo"
    json_file: Path | None = None
    repro: Path | None = None
    quiet: bool = False

    def __post_init__(self) -> None:
        for text in self.meshes:
            sizes(text)
        if self.samples < 1:
            raise BadPlans("--samples", str(self.samples), "it has to be 1 or more", f"Pass --samples {SAMPLES}.")
        if not 0 <= self.seed < 2**63:
            raise BadPlans("--seed", str(self.seed), "it has to be 0 or more, and less than 2**63", "Pass --seed 0.")
        if self.planner not in PLANNERS:
            problem = "DTensor has no such planner"
            raise BadPlans("--planner", repr(self.planner), problem, f"Use {', '.join(PLANNERS)}.")
        if self.confirm not in ("gloo", "none"):
            problem = "pairs are confirmed on gloo, or not at all"
            raise BadPlans("--confirm", repr(self.confirm), problem, "Use gloo or none.")
        for name, path in (("--json", self.json_file), ("--repro", self.repro)):
            problem, remedy = unwritable(path, folder=name == "--repro") if path is not None else ("", "")
            if problem:
                raise BadPlans(name, str(path), problem, remedy)


def sizes(text: str) -> tuple[int, ...]:
    """`2,3` as (2, 3); raises `BadPlans`.

    >>> sizes("2,3")
    (2, 3)
    """
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise BadPlans("--mesh", repr(text), "a mesh is a size, or several with commas between", "Pass --mesh 2,3.")
    found = tuple(map(int, parts))
    if math.prod(found) > MOST_RANKS:
        raise BadPlans("--mesh", repr(text), f"these are more than {MOST_RANKS} ranks", "Pass --mesh 2,2,2.")
    return found


def run(asked: Asked) -> int:
    """The exit code: 0 nothing wrong, 1 a finding that real processes confirm, 3 nothing was tried; 130 after Ctrl-C.

    After Ctrl-C what was found so far is printed, and no file is written.
    """
    errors = Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)
    verdicts: list[Verdict] = []
    found: list[Cause] = []
    try:
        with gently(), bar(errors, asked.quiet) as shown:
            _judge(asked, verdicts, shown)
            bad = [verdict for verdict in verdicts if verdict.found]
            shown.phase("looking for the smallest", len(bad))
            found = causes(bad, shown.tick)
            found = _confirmed(asked, found, shown)
    except KeyboardInterrupt:
        wrote("\n".join([as_text(_tried(asked, verdicts, found, whole=False)), *_so_far(verdicts, found), ""]))
        return INTERRUPTED
    tried = _tried(asked, verdicts, found)
    code = exit_code(tried)
    problem = wrote(f"{as_text(tried)}\n{_again(asked)}\n")
    if problem:
        errors.print(f"localtensor: {problem}", markup=False)
    try:
        if asked.json_file:
            write_whole(asked.json_file, as_json(tried, code))
        if asked.repro:
            _write_scripts(asked.repro, tried.causes)
    except OSError as trouble:
        where = trouble.filename or asked.json_file or asked.repro
        above = "nor could the report be shown" if problem else "the report above is whole"
        errors.print(f"localtensor: {where}: {trouble.strerror}; {above}", markup=False)
        return NOTHING
    return (code or NOTHING) if problem else code


def command(
    meshes: Sequence[str] = (), samples: int | None = None, seed: int = 0, planner: str = "both", confirm: str = "gloo",
    json_file: Path | None = None, repro: Path | None = None, quiet: bool = False, others: Sequence[str] = (),
) -> int:  # fmt: skip
    """What the command line calls: as `run`, and 2 for options that cannot be followed.

    `others` are the options beside these that were given: they are about rules, and are refused.
    """
    if others:
        problem, remedy = "with --plans this is without meaning", "Leave it out."
        return _refuse(BadPlans("options", ", ".join(others), problem, remedy))
    try:
        asked = Asked(
            tuple(meshes) or MESHES,
            SAMPLES if samples is None else samples,
            seed,
            planner,
            confirm,
            json_file,
            repro,
            quiet,
        )
    except BadPlans as error:
        return _refuse(error)
    return run(asked)


def without(samples: int | None, planner: str) -> int:
    """2, if one of these was given without `--plans`: then it is without meaning; else 0."""
    given = [f"--samples {samples}"] * (samples is not None) + [f"--planner {planner}"] * (planner != "both")
    if not given:
        return CLEAN
    return _refuse(BadPlans(given[0].split()[0], ", ".join(given), "this goes with --plans", "Pass --plans, too."))


def _refuse(error: BadPlans) -> int:
    Console(stderr=True, highlight=False, soft_wrap=True).print(str(error), markup=False)
    return USAGE


def exit_code(tried: Tried) -> int:
    """1 if something is wrong on real processes, too; 3 if nothing was tried; 0."""
    if tried.confirmed:
        return WRONG
    return CLEAN if tried.pairs else NOTHING


def _judge(asked: Asked, verdicts: list[Verdict], shown: Bar) -> None:
    modes = PLANNERS[asked.planner]
    meshes = list(dict.fromkeys(map(sizes, asked.meshes)))  # one that is named twice is one
    shown.phase("redistributions", len(meshes) * len(modes) * asked.samples)
    for mesh in meshes:
        pairs = list(draw_pairs(mesh, seed=asked.seed, budget=asked.samples))
        for mode in modes:
            for verdict in judge(pairs, mode, seed=asked.seed):
                verdicts.append(verdict)
                shown.tick()


def _confirmed(asked: Asked, found: list[Cause], shown: Bar) -> list[Cause]:
    if asked.confirm == "none" or not found:
        return found
    shown.phase("on real processes", len(found))
    with Bench(asked.confirm) as bench:
        return confirmed(found, bench, shown.tick)


def _tried(asked: Asked, verdicts: Sequence[Verdict], found: Sequence[Cause], *, whole: bool = True) -> Tried:
    version = torch.__version__.split("+")[0]
    return Tried(version, asked.seed, rows(verdicts), tuple(found), wasted(verdicts), whole)


def _so_far(verdicts: Sequence[Verdict], found: Sequence[Cause]) -> list[str]:
    """What went wrong before it was stopped, as it was drawn."""
    bad = [verdict for verdict in verdicts if verdict.found and not found]
    return [f"  {verdict.mode}: {verdict.pair}: {verdict.outcome.text}" for verdict in bad]


def _again(asked: Asked) -> str:
    meshes = "".join(f" --mesh {text}" for text in asked.meshes)
    how = f"--samples {asked.samples} --seed {asked.seed} --planner {asked.planner} --confirm {asked.confirm}"
    return f"Repeat: localtensor validate --plans{meshes} {how}"


def _write_scripts(folder: Path, found: Sequence[Cause]) -> None:
    for number, one in enumerate(found, 1):
        name = f"plan_{number}.py"
        write_whole(folder / name, script(one, name))
