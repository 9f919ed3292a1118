"""`localtensor validate --plans`: tests DTensor's redistributions of drawn pairs of layouts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from strategies.base.progress import Bar, bar
from strategies.base.signals import CLEAN, INTERRUPTED, NOTHING, WRONG, gently, wrote
from strategies.cli.commands import deliver_text
from strategies.cli.options import SAMPLES, ValidateOptions, plan_sizes
from strategies.planner.audit.pairs import MODES, draw_pairs
from strategies.planner.audit.report import AuditResult, Cause, as_json, as_text, causes, confirmed, rows, wasted
from strategies.planner.audit.script import script
from strategies.planner.audit.verdict import RealRuns, Verdict, judge

MESHES = ("2", "3", "2,2", "2,3")


def run(options: ValidateOptions) -> int:
    """The exit code: 0 nothing wrong, 1 a finding that real processes confirm, 3 nothing was tried; 130 after Ctrl-C.

    After Ctrl-C what was found so far is printed, and no file is written.
    """
    errors = Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)
    verdicts: list[Verdict] = []
    found: list[Cause] = []
    try:
        with gently(), bar(errors, options.quiet) as shown:
            _judge(options, verdicts, shown)
            bad = [verdict for verdict in verdicts if verdict.found]
            shown.phase("looking for the smallest", len(bad))
            found = causes(bad, shown.tick)
            found = _confirmed(options, found, shown)
    except KeyboardInterrupt:
        wrote("\n".join([as_text(_result(options, verdicts, found, whole=False)), *_so_far(verdicts, found), ""]))
        return INTERRUPTED
    tried = _result(options, verdicts, found)
    code = exit_code(tried)
    files = [(options.json, as_json(tried, code))] if options.json else []
    for number, one in enumerate(tried.causes if options.repro else (), 1):
        name = f"plan_{number}.py"
        files.append(((options.repro or Path()) / name, script(one, name)))
    return deliver_text(f"{as_text(tried)}\n{_repeat(options)}\n", files, code)


def exit_code(tried: AuditResult) -> int:
    """1 if something is wrong on real processes, too; 3 if nothing was tried; 0."""
    if tried.confirmed:
        return WRONG
    return CLEAN if tried.pairs else NOTHING


def _judge(options: ValidateOptions, verdicts: list[Verdict], shown: Bar) -> None:
    modes = MODES if options.planner == "both" else (options.planner,)
    samples = options.samples or SAMPLES
    meshes = list(dict.fromkeys(map(plan_sizes, options.mesh or MESHES)))  # one that is named twice is one
    shown.phase("redistributions", len(meshes) * len(modes) * samples)
    for mesh in meshes:
        pairs = list(draw_pairs(mesh, seed=options.seed, budget=samples))
        for mode in modes:
            for verdict in judge(pairs, mode, seed=options.seed):
                verdicts.append(verdict)
                shown.tick()


def _confirmed(options: ValidateOptions, found: list[Cause], shown: Bar) -> list[Cause]:
    if options.confirm == "none" or not found:
        return found
    shown.phase("on real processes", len(found))
    with RealRuns(options.confirm) as real_runs:
        return confirmed(found, real_runs, shown.tick)


def _result(
    options: ValidateOptions, verdicts: Sequence[Verdict], found: Sequence[Cause], *, whole: bool = True
) -> AuditResult:
    version = torch.__version__.split("+")[0]
    return AuditResult(version, options.seed, rows(verdicts), tuple(found), wasted(verdicts), whole)


def _so_far(verdicts: Sequence[Verdict], found: Sequence[Cause]) -> list[str]:
    """What went wrong before Ctrl-C, on the pairs as they were drawn."""
    bad = [verdict for verdict in verdicts if verdict.found and not found]
    return [f"  {verdict.mode}: {verdict.pair}: {verdict.outcome.text}" for verdict in bad]


def _repeat(options: ValidateOptions) -> str:
    meshes = "".join(f" --mesh {text}" for text in options.mesh or MESHES)
    how = f"--samples {options.samples or SAMPLES} --seed {options.seed} --planner {options.planner} --confirm {options.confirm}"
    return f"Repeat: localtensor validate --plans{meshes} {how}"
