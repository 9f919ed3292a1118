"""The findings that a sweep of torch 2.13 confirmed on gloo, as data, and how they are played again on simulated ranks.

`findings_torch_2_13.json` has a line for each: the call and its tensors as `strategies.model.codec` writes them, the mesh, how
each tensor lies, the pieces where that is partial, and what follows the op.
"""

import json
import logging
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate

from localtensor.errors import LocalTensorError
from localtensor.errors.base import error_in_one_line
from localtensor.layout.shards import split_axis
from localtensor.layout.spec import parse
from strategies.model import codec
from strategies.model.kernels import REJECTIONS
from strategies.model.oracle import OracleResult, run_oracle
from strategies.model.rule import Program, Sample
from strategies.programs.run.program_oracle import oracle_of_sample, program_call
from strategies.programs.run.rank_run import ProgramRankTask
from strategies.programs.run.real_run import is_right, mesh_task_of, rank_tasks
from strategies.programs.run.verdict import Confirmation
from strategies.torch_api.mesh_and_caches import averages_as_sums
from strategies.torch_api.rank_runs import MeshTask, run_on_threads, run_simulated

FILE = Path(__file__).parent / "findings_torch_2_13.json"


@dataclass(frozen=True)
class Found:
    """One finding: `rule` is what the sweep called it, and `parts` what each rank has of it."""

    rule: str
    program: Program
    parts: tuple[ProgramRankTask, ...]

    @property
    def op(self) -> str:
        return self.program.sample.op

    def oracle(self) -> OracleResult:
        """What the op, and what follows it, gives on whole tensors."""
        program = self.program
        if " on (" not in self.rule:
            return run_oracle(program.sample)
        partial = any(isinstance(p, Partial) for row in program.inputs for p in row)
        return oracle_of_sample(program.sample, program.then, partial=partial)

    def fresh_parts(self) -> tuple[ProgramRankTask, ...]:
        """The parts, of which a run may write to the pieces."""
        return tuple(replace(part, pieces=tuple(p.clone() for p in part.pieces)) for part in self.parts)


@cache
def findings() -> tuple[Found, ...]:
    """All of them, in the order of their names."""
    return tuple(map(_read, json.loads(FILE.read_text())))


def _read(told: dict[str, Any]) -> Found:
    sample: Sample = codec.read_sample({**told, "origin": "found"})
    inputs = tuple(tuple(map(parse, row)) for row in told["inputs"])
    program = Program(sample, tuple(told["mesh"]), inputs, told["then"], flattened=told["flattened"])
    columns = []
    for leaf, x in enumerate(sample.tensors):
        held = told["held"].get(str(leaf))
        columns.append([codec.read_tensor(t) for t in held] if held else _split(x, inputs[leaf], program.mesh))
    part = ProgramRankTask(program_call(program), inputs, (), (), (), "cpu", ("", ""), program.mesh, program.flattened)
    return Found(told["rule"], program, tuple(rank_tasks(part, sample.tensors, columns)))


def _split(x: torch.Tensor, placements: Sequence[Any], mesh: Sequence[int]) -> list[torch.Tensor]:
    pieces = [x]
    for placement, ranks in zip(placements, mesh, strict=True):
        pieces = [p for whole in pieces for p in split_axis(whole, placement or Replicate(), ranks)]
    return [p.clone() for p in pieces]


def play(found: Sequence[Found], *, lockstep: bool = False) -> dict[str, Confirmation]:
    """What DTensor makes of each, by name, on rank threads; or in lockstep first, and on threads if that is wrong."""
    validated: dict[str, Confirmation] = {}
    with warnings.catch_warnings(), averages_as_sums("simulated"), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        before = logging.root.manager.disable
        logging.disable()
        try:
            groups: dict[Any, dict[str, MeshTask[Confirmation]]] = {}
            for one in found:
                try:
                    work = mesh_task_of(one.program, one.oracle(), one.fresh_parts())
                except (*REJECTIONS, LocalTensorError) as error:
                    validated[one.rule] = Confirmation("", f"no such program: {error_in_one_line(error)}")
                    continue
                groups.setdefault(work.mesh, {})[one.rule] = work
            for named in groups.values():
                works = list(named.values())
                validated.update(
                    zip(named, run_simulated(works, is_right) if lockstep else run_on_threads(works), strict=True)
                )
        finally:
            logging.disable(before)
    return validated


def wrong(verdict: Confirmation) -> str:
    """What is wrong with a run: wrong numbers or shapes, a rank alone that raises, or a refusal of all of them."""
    failed = (
        verdict.note if verdict.note.startswith(("DTensor refuses", "DTensor cannot", "no such", "the stage")) else ""
    )
    return verdict.wrong or failed or verdict.failed


def main() -> None:
    """Prints what is left wrong under our rules: the table of test_overlay_findings.py is to have just these."""
    from strategies.propagation.overlay.context import overlay_dtensor

    with overlay_dtensor():
        left = {rule: wrong(verdict) for rule, verdict in play(findings()).items() if wrong(verdict)}
    sys.stdout.write("".join(f"{rule}\n    {why}\n" for rule, why in left.items()))
    sys.stdout.write(f"{len(findings()) - len(left)} of {len(findings())} are right\n")


if __name__ == "__main__":
    main()
