"""`localtensor validate --plans`: tests DTensor's redistributions of drawn pairs of layouts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from strategies.base.progress import ProgressBar, error_console, progress_bar
from strategies.base.signals import EXIT_CLEAN, EXIT_INTERRUPTED, EXIT_NOTHING, EXIT_WRONG, interruptible, write_stdout
from strategies.cli.options import SAMPLES, ValidateOptions, deliver_text, parse_mesh
from strategies.planner.audit import report
from strategies.planner.audit.pairs import MODES, draw_pairs
from strategies.planner.audit.script import script
from strategies.planner.audit.verdict import PairVerdict, RealRedistributions, pair_verdicts

MESHES = ("2", "3", "2,2", "2,3")


def run(options: ValidateOptions) -> int:
    """The exit code: 0 nothing wrong, 1 a finding that real processes confirm, 3 nothing was tried; 130 after Ctrl-C.

    After Ctrl-C what was found so far is printed, and no file is written.
    """
    verdicts: list[PairVerdict] = []
    found: list[report.Cause] = []
    try:
        with interruptible(), progress_bar(error_console(), options.quiet) as shown:
            _judge(options, verdicts, shown)
            bad = [verdict for verdict in verdicts if verdict.found]
            shown.phase("looking for the smallest", len(bad))
            found = report.group_by_cause(bad, shown.tick)
            if options.confirm != "none" and found:
                shown.phase("on real processes", len(found))
                with RealRedistributions(options.confirm) as real_runs:
                    found = report.confirm_causes(found, real_runs, shown.tick)
    except KeyboardInterrupt:
        bad = [verdict for verdict in verdicts if verdict.found and not found]  # on the pairs as they were drawn
        so_far = [f"  {verdict.mode}: {verdict.pair}: {verdict.outcome.text}" for verdict in bad]
        write_stdout("\n".join([report.audit_text(_result(options, verdicts, found, whole=False)), *so_far, ""]))
        return EXIT_INTERRUPTED
    tried = _result(options, verdicts, found)
    code = exit_code(tried)
    files = [(options.json, report.audit_json(tried, code))] if options.json else []
    for number, one in enumerate(tried.causes if options.repro else (), 1):
        name = f"plan_{number}.py"
        files.append(((options.repro or Path()) / name, script(one, name)))
    return deliver_text(f"{report.audit_text(tried)}\n{_repeat(options)}\n", files, code, options.repro)


def exit_code(tried: report.AuditResult) -> int:
    """1 if something is wrong on real processes, too; 3 if nothing was tried; 0."""
    if tried.confirmed:
        return EXIT_WRONG
    return EXIT_CLEAN if tried.pairs else EXIT_NOTHING


def _judge(options: ValidateOptions, verdicts: list[PairVerdict], shown: ProgressBar) -> None:
    modes = MODES if options.planner == "both" else (options.planner,)
    samples = options.samples or SAMPLES
    meshes = list(dict.fromkeys(map(parse_mesh, options.mesh or MESHES)))  # one that is named twice is one
    shown.phase("redistributions", len(meshes) * len(modes) * samples)
    for mesh in meshes:
        pairs = list(draw_pairs(mesh, seed=options.seed, budget=samples))
        for mode in modes:
            for verdict in pair_verdicts(pairs, mode, seed=options.seed):
                verdicts.append(verdict)
                shown.tick()


def _result(
    options: ValidateOptions, verdicts: Sequence[PairVerdict], found: Sequence[report.Cause], *, whole: bool = True
) -> report.AuditResult:
    version = torch.__version__.split("+")[0]
    return report.AuditResult(
        version, options.seed, report.count_outcomes(verdicts), tuple(found), report.total_waste(verdicts), whole
    )


def _repeat(options: ValidateOptions) -> str:
    meshes = "".join(f" --mesh {text}" for text in options.mesh or MESHES)
    how = f"--samples {options.samples or SAMPLES} --seed {options.seed} --planner {options.planner} --confirm {options.confirm}"
    return f"Repeat: localtensor validate --plans{meshes} {how}"
