"""Attention under context parallelism: programs that test torch's rules and handlers, which exist only while it is on.

They are tried once for a mesh, beside the rules of the attention op that runs on a CPU.  What cannot run there is listed.
"""

from __future__ import annotations

import torch
from torch.distributed.tensor import Shard

from strategies.model.rule import LEAVES, Call, Program, Sample
from strategies.model.verdict import ALONE
from strategies.programs.random_laws import wrong_program_candidate
from strategies.programs.run.attention_steps import RINGS
from strategies.programs.run.real_run import run_simulated_programs
from strategies.validation.finding import OverloadTask, TaskResult, keep_smallest
from strategies.validation.overload import KEPT_CANDIDATES, Note

ATTENTION = "aten._scaled_dot_product_flash_attention_for_cpu.default"
LENGTH_PER_RANK = 6
"""An even number: torch's load balancer gives each rank two pieces of the sequence."""
NOT_TESTED = (
    "context parallelism is not tested with the efficient and the cudnn kernel, nor with its flex attention: they need CUDA; "
    "nor on sequences that the ranks do not divide, nor in float64, for which torch computes in float32"
)


def ring_programs(mesh: tuple[int, ...], seed: int) -> list[Program]:
    """Attention on a mesh of one axis, sharded along the sequence: causal or not, balanced or not, either rotation."""
    rng = torch.Generator().manual_seed(seed)
    shape = 2, 2, LENGTH_PER_RANK * mesh[0], 4
    tensors = tuple(torch.randn(shape, generator=rng) for _ in range(3))
    sample = Sample(Call(ATTENTION, LEAVES[:3]), tensors, "attention under context parallelism")
    return [Program(sample, mesh, ((Shard(2),),) * 3, then, seed) for then in RINGS]


def validate_context_parallel(task: OverloadTask, results: list[TaskResult], note: Note) -> None:
    """Try the programs on each mesh of the task, if it is that of the CPU's attention, and add candidates to its results."""
    if task.op != ATTENTION or task.kind != ALONE:
        return
    for i, mesh in enumerate(task.meshes):
        result = next((r for r in results if r.unit.mesh == mesh and r.unit.dtypes == "real"), None)
        if result is None or task.step(0, i) in task.skip:
            continue
        note(task.step(0, i))
        tried = ring_programs(mesh, task.seed)
        result.tried += len(tried)
        result.skipped[NOT_TESTED] += 1
        for program, found in zip(tried, run_simulated_programs(tried), strict=True):
            if found.refused:
                result.skipped[f"{program.then} is refused: {found.refused[:90]}"] += 1
            if found.wrong:
                candidate = wrong_program_candidate(program, found)
                keep_smallest(result.suspects.setdefault(candidate.name, []), candidate, KEPT_CANDIDATES)
