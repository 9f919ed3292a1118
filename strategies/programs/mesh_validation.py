"""Validation of calls on meshes of several axes by simulated runs of DTensor, and of attention under context parallelism.

The cause of a wrong program may be one axis alone, or the redistribution of the result and not the op.
`smallest_wrong_programs` returns each fault once, as the smallest program that shows it.

They are tried once for a mesh, beside the rules of the attention op that runs on a CPU.  What cannot run there is listed.
"""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard

from localtensor.errors import BadPlacement, error_in_one_line
from localtensor.layout import Layout, has_one_meaning, is_inexact, is_reducible
from strategies.inputs.variants.adversarial import VALUES, two_maxima, values_generator
from strategies.model.kernels import REJECTIONS
from strategies.model.oracle import OracleResult, run_oracle, run_stable_oracle
from strategies.model.rule import LEAVES, Call, Claim, Program, Sample, dtype_class, overload, read_layout
from strategies.model.verdict import ALONE, Verdict
from strategies.programs.mesh_programs import copy_sample, draw_programs, smallest_wrong_program
from strategies.programs.random_laws import wrong_program_candidate
from strategies.programs.run.program_oracle import has_partial, oracle_of_program
from strategies.programs.run.real_run import run_simulated_programs
from strategies.programs.run.step_functions import RINGS
from strategies.programs.run.verdict import Confirmation, is_claimed
from strategies.torch_api.dtensor import registry_of, special_dispatch_reason
from strategies.validation.difference import not_gathered
from strategies.validation.finding import OverloadTask, TaskResult, keep_smallest, refusal_key, refused_program
from strategies.validation.overload import KEPT_CANDIDATES, Note, Recorder
from strategies.validation.probe import check_claims
from strategies.validation.sources.dtensor import claims

Found = list[tuple[Program, Confirmation]]
MESHES: tuple[tuple[int, ...], ...] = ((2, 2), (2, 3), (2, 2, 2))
"""The meshes on which every call is tried."""
REDISTRIBUTED, FURTHER_SHARDED, HANDLED_TENSORS = 8, 2, 10
"""Programs of a sample with placements that no rule takes, at most, and those with a shard of another tensor than the first;
tensors in all samples of a class of dtypes of an op with a handler."""
TIES = 8
"""How often two equal maxima are drawn for an op with a handler: one draw may have both on ranks where they do not matter."""
Claimed = dict[int, list[Claim]]
"""The claims along one axis, by its size."""
SECONDS = 0.2
"""The time that one call on one mesh of two axes may take, approximately; on three, half of it: they alone show 7 of 785 findings."""
SECONDS_PER_PROGRAM, SECONDS_PER_COMBINATION = 0.02, 0.0002
"""Seconds for a program, and for each combination of one-axis lines that DTensor considers for it (torch 2.13)."""


MANY_TRACES = 300
"""Traces of a decomposition for one program, from which on an op gets one program in place of several (3 ms each)."""


def is_costly(sample: Sample) -> bool:
    """Whether DTensor finds the placements of this call by very many traces: one for each choice of all tensors' placements.

    It traces a decomposition for each tensor whole and sharded along each dim, and partial where one is.
    """
    traces = math.prod(2 + x.ndim for x in sample.tensors)
    return traces > MANY_TRACES and registry_of(overload(sample.op)) == "decomposition"


def programs_in_time(claims: Mapping[int, Sequence[Claim]], mesh: tuple[int, ...]) -> int:
    """How many programs fit in `SECONDS`, given that DTensor considers every combination of a line for each axis.

    It does not measure time, so that two runs try the same programs.
    """
    combinations = math.prod(1 + len(claims.get(size, ())) for size in mesh)
    seconds = SECONDS / max(1, len(mesh) - 1)
    return max(1, int(seconds / (SECONDS_PER_PROGRAM + SECONDS_PER_COMBINATION * combinations)))


def try_meshes(
    sample: Sample, claims: Mapping[int, Sequence[Claim]], meshes: Sequence[tuple[int, ...]] = MESHES, *, seed: int,
    budget: int | None = None,
) -> Found:  # fmt: skip
    """Programs of this call on these meshes, with the result of each in simulation.

    `claims` are the one-axis claims by number of ranks; `budget` is the largest number of programs on one mesh, by
    default as many as fit in `SECONDS`.
    """
    programs: list[Program] = []
    for mesh in meshes:
        most = (1 if is_costly(sample) else programs_in_time(claims, mesh)) if budget is None else budget
        programs += draw_programs(sample, claims, mesh, seed=seed, budget=most)
    return list(zip(programs, run_simulated_programs(programs), strict=True))


def smallest_wrong_programs(found: Found) -> Found:
    """The smallest programs that are wrong in simulation, one for each fault, in the order of `found`."""
    known: dict[tuple[str, ...], Confirmation] = {}

    def run(program: Program) -> Confirmation:
        values = f"{program.seed} {program.draw if has_partial(program) else 0}"
        key = (str(program), values, program.sample.origin, *program.sample.arguments())
        if key not in known:
            known[key] = run_simulated_programs([program], quick=True)[0]
        return known[key]

    by_fault: dict[str, tuple[Program, Confirmation]] = {}
    for program, confirmation in found:
        if confirmation.wrong:
            smallest = cause_of(program, confirmation, run)
            # Programs that differ in seed and draw alone show the same fault.
            fault = f"{replace(smallest, seed=0, draw=0)}"
            if fault in by_fault:
                continue
            shown = confirmation if smallest is program else run_simulated_programs([smallest])[0]
            by_fault[fault] = (smallest, shown) if shown.wrong else (program, confirmation)
    return list(by_fault.values())


def cause_of(program: Program, confirmation: Confirmation, confirm: Callable[[Program], Confirmation]) -> Program:
    """The smallest program that is wrong: a redistribution without an op, if one is wrong already."""
    for moved in redistributions(program, confirmation):
        if confirm(moved).wrong:
            return smallest_wrong_program(moved, confirm)
    return smallest_wrong_program(program, confirm)


def redistributions(program: Program, confirmation: Confirmation) -> Iterator[Program]:
    """Programs that only gather the results of a program, and its inputs, each in its layout."""
    inputs = zip(program.sample.tensors, program.inputs, strict=True)
    for x, layout in [*_results(program, confirmation), *inputs]:
        if len(layout) == len(program.mesh) and has_one_meaning(layout, x.shape, x.dtype, program.mesh):
            yield replace(program, sample=copy_sample(x), inputs=(layout,), then="")


def _results(program: Program, confirmation: Confirmation) -> list[tuple[Tensor, Layout]]:
    if not confirmation.rank_results:
        return []
    try:
        outputs = oracle_of_program(program).outputs
    except REJECTIONS:  # a random op may refuse now what it took before
        return []
    made = []
    for want, text in zip(outputs, confirmation.rank_results[0].placements, strict=False):
        try:
            layout = read_layout(text)
        except BadPlacement:  # a plain tensor, or a placement of DTensor's own
            continue
        if isinstance(want, Tensor) and want.numel():
            made.append((want.detach(), layout))
    return made


def oracle_and_claims(sample: Sample, mesh: tuple[int, ...], seed: int) -> tuple[OracleResult, Claimed] | str:
    """The oracle and the claims along an axis of each size of the mesh, or why there is none.  An exception after this step is an error of ours."""
    try:
        oracle = run_oracle(sample, seed=seed)
    except REJECTIONS as error:
        return error_in_one_line(error, 90)
    try:
        every = {size: claims(sample, size, oracle.raw) for size in sorted(set(mesh))}
    # DTensor's own rule raises these where it has no line.
    except (*REJECTIONS, AttributeError, ArithmeticError) as error:
        return error_in_one_line(error, 90)
    return oracle, {
        size: [c for c in found if not not_gathered(c.rule, oracle.inputs)] for size, found in every.items()
    }


def not_unsound(sample: Sample, oracle: OracleResult, claimed: Claimed, seed: int) -> Claimed:
    """The claims that are not unsound along one axis.  The others are reported there, and would be found again here."""
    found = {}
    for size, every in claimed.items():
        instances = check_claims(sample, oracle, size, every, seed=seed)
        found[size] = [c for c, i in zip(every, instances, strict=True) if i.verdict is not Verdict.UNSOUND]
    return found


def try_redistributed(
    sample: Sample, oracle: OracleResult, mesh: tuple[int, ...], claimed: Claimed, *, seed: int
) -> Found:
    """Programs of the op alone with placements that no rule takes along the last axis: DTensor redistributes first.

    There are none where a claim is unsound, since DTensor may choose it.
    """
    if not_unsound(sample, oracle, claimed, seed) != claimed:
        return []
    taken = {tuple(p or Replicate() for p in claim.rule.inputs) for claim in claimed[mesh[-1]]}
    drawn = draw_programs(sample, claimed, mesh, seed=seed, budget=2 * REDISTRIBUTED)
    partial = one_partial(sample, mesh, seed) if dtype_class(sample) == "integer" else ()
    programs = [*partial, *one_sharded(sample, mesh, seed), *sorted(drawn, key=has_partial)]
    others = [program for program in programs if tuple(layout[-1] for layout in program.inputs) not in taken]
    programs = list({program.inputs: program for program in others}.values())[:REDISTRIBUTED]
    return list(zip(programs, run_simulated_programs(programs), strict=True))


def one_sharded(sample: Sample, mesh: tuple[int, ...], seed: int) -> Iterator[Program]:
    """The placements that programs have most often: one tensor sharded, the others whole; the first one along every dim."""
    rest = (Replicate(),) * (len(mesh) - 1)
    whole = [(*rest, Replicate())] * len(sample.tensors)
    spots = [(i, dim) for i, x in enumerate(sample.tensors) for dim in range(x.ndim) if x.shape[dim] >= mesh[-1]]
    first, further = [spot for spot in spots if not spot[0]], [spot for spot in spots if spot[0]]
    turn = zlib.crc32(f"{seed} {sample.op} {sample.arguments()}".encode()) % max(len(further), 1)
    for i, dim in [*first, *(further[turn:] + further[:turn])[:FURTHER_SHARDED]]:
        yield Program(sample, mesh, (*whole[:i], (*rest, Shard(dim)), *whole[i + 1 :]), seed=seed)


def one_partial(sample: Sample, mesh: tuple[int, ...], seed: int) -> Iterator[Program]:
    """One tensor with parts of a sum, the others whole, which DTensor may divide by the number of ranks: integers then are floats."""
    whole = [(Replicate(),) * len(mesh)] * len(sample.tensors)
    for i, x in enumerate(sample.tensors):
        if len(sample.tensors) > 1 and is_reducible("sum", x.dtype):
            layout = (*whole[i][1:], Partial())
            yield Program(sample, mesh, (*whole[:i], layout, *whole[i + 1 :]), seed=seed)


def try_other_values(sample: Sample, mesh: tuple[int, ...], seed: int) -> Found:
    """The op alone with each kind of other values that is finite, one tensor sharded, the first along each of its dims.

    For ops that DTensor runs by code of its own: of no line of theirs are other values tried, since only DTensor's own dispatch
    can show what comes of it.  Where the sample's own values show a fault, which is known then, others are not tried.
    """
    own = list(one_sharded(sample, mesh, seed))
    right = [program for program, found in zip(own, run_simulated_programs(own), strict=True) if not found.wrong]
    made = [(kind.make(sample, values_generator(kind.name, seed)), kind.name) for kind in VALUES if not kind.wild]
    others = [replace(sample, tensors=tensors, origin=f"{sample.origin}, {name}") for tensors, name in made if tensors]
    others += _with_ties(sample, seed)
    tried = [replace(program, sample=other) for other in others for program in right]
    return list(zip(tried, run_simulated_programs(tried), strict=True))


def _with_ties(sample: Sample, seed: int) -> list[Sample]:
    """The call on integers of which two are equal and the largest; none where the op takes no integers.

    The oracle perturbs floats, and so breaks their ties.
    """
    if not all(x.numel() > 1 and is_inexact(x) and not x.is_complex() for x in sample.tensors):
        return []
    rng = values_generator("two maxima", seed)
    made = [tuple(two_maxima(x, rng) for x in sample.tensors) for _ in range(TIES)]
    others = [replace(sample, tensors=tensors, origin=f"{sample.origin}, two maxima") for tensors in made]
    return others if others and run_stable_oracle(others[0], seed=seed) is not None else []


def validate_handlers(task: OverloadTask, results: list[TaskResult], note: Note) -> None:
    """Try such programs of an op that DTensor's dispatcher treats by itself, and add candidates to the task's results.

    A handler has to redistribute by itself: that of convolutions did not on torch 2.13.  Other ops are tried with `PAIRS`.
    """
    if task.kind != ALONE or not special_dispatch_reason(overload(task.op)):
        return
    recorder, by_unit, seen = Recorder(task), {result.unit: result for result in results}, Counter[str]()
    for number, sample in enumerate(task.samples):
        seen[dtype_class(sample)] += len(sample.tensors)
        for i in recorder.meshes(number)[:1] if seen[dtype_class(sample)] <= HANDLED_TENSORS else ():
            note(task.step(number, i))
            result = by_unit.setdefault(unit := recorder.result_of(sample, task.meshes[i]).unit, TaskResult(unit))
            known = oracle_and_claims(sample, task.meshes[i], task.seed)
            if isinstance(known, str):
                continue  # the rules were tried on the sample, too, and say so
            tried = try_redistributed(sample, known[0], task.meshes[i], known[1], seed=task.seed)
            result.tried += len(tried)
            wrong = [wrong_program_candidate(program, found) for program, found in smallest_wrong_programs(tried)]
            refused = [
                refused_program(p, f.refused)
                for p, f in tried
                if f.refused and is_claimed(f.refused) and not has_partial(p)
            ]
            named = [(one.name, one) for one in wrong] + [(refusal_key(one), one) for one in refused]
            for name, candidate in named:
                keep_smallest(result.suspects.setdefault(name, []), candidate, KEPT_CANDIDATES)
    results[:] = [by_unit[unit] for unit in sorted(by_unit)]


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
