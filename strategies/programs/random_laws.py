"""Random ops validated by law: programs whose follow-up step is a law, on large samples made from those of a task.

The laws and what they rest on are in `run.law_steps`.  An op whose elements are drawn one by one, in one draw for a call,
has laws; random results of all others are compared by metadata only.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from localtensor.errors import error_in_one_line
from localtensor.layout import is_standard
from strategies.model.call_signature import numeric_arguments
from strategies.model.kernels import REJECTIONS
from strategies.model.oracle import run_oracle
from strategies.model.rule import Claim, Leaf, Program, Rule, Sample, overload, written_leaves
from strategies.model.verdict import ALONE, MESHES, Evidence, Instance, Verdict
from strategies.programs.run.follow_ups import packet
from strategies.programs.run.law_steps import LAWS
from strategies.programs.run.program_oracle import oracle_of_program
from strategies.programs.run.real_run import run_simulated_programs
from strategies.programs.run.verdict import Confirmation
from strategies.validation.finding import Candidate, OverloadTask, TaskResult, keep_smallest
from strategies.validation.overload import KEPT_CANDIDATES, Note, Recorder
from strategies.validation.sources.dtensor import claims

FACTORS = ("native_dropout", "dropout")
"""Ops whose result is their first tensor times a factor that is drawn: so is the gradient."""
NAMED = (
    *FACTORS, "rrelu_with_noise", "rrelu_with_noise_functional", "alpha_dropout", "bernoulli", "cauchy", "exponential", "geometric", "log_normal",
    "multinomial", "normal", "normal_functional", "rand_like", "randn_like", "randint_like", "uniform",
)  # fmt: skip
"""The ops with laws, without their overload."""
KEPT = {ALONE: 3, MESHES: 1}
"""Samples of one overload, of different arguments or numbers of dims, for a kind of test; along one axis each is tried on one mesh, in turn."""
MOST_ROWS = {ALONE: 8, MESHES: 5}
"""Placements of the inputs for one sample, for a kind of test."""
SIZES = {1: (9801,), 2: (99, 100), 3: (21, 22, 23), 4: (10, 11, 9, 10)}
"""The sizes of a large sample by its number of dims: about 10,000 elements, and no dim that all meshes divide."""


def has_laws(op: str) -> bool:
    """Whether the random op has laws."""
    random = torch.Tag.nondeterministic_seeded in overload(op).tags
    return random and packet(op) in NAMED


def laws_of(op: str) -> list[str]:
    """The laws that the op has."""
    gradient = packet(op) in FACTORS and not overload(op)._schema.is_mutable
    values = packet(op) not in ("cauchy", "normal", "normal_functional", "randn_like", "alpha_dropout")
    left = {"law: gradients off the mask": gradient, "law: impossible values": values}
    return [name for name in LAWS if left.get(name, True)]


def large_sample(sample: Sample, *, alike: bool) -> Sample | None:
    """The same call on large tensors: all elements `alike`, or of few different values.  None if there is no such call."""
    shapes = {x.shape for x in sample.tensors}
    first = sample.tensors[0]
    if len(shapes) != 1 or first.ndim not in SIZES or first.dtype not in (torch.float32, torch.float64):
        return None
    names = {leaf.index: name for name, leaf in sample.call.named().items() if isinstance(leaf, Leaf)}
    sizes = SIZES[first.ndim]
    if packet(sample.op) == "multinomial":
        sizes = (*SIZES[first.ndim - 1][:-1], SIZES[first.ndim - 1][-1] // 4, 5) if first.ndim > 1 else (5,)
    tensors = tuple(
        _filled(_levels(packet(sample.op), names.get(i, "")), sizes, alike, x.dtype, i)
        for i, x in enumerate(sample.tensors)
    )
    return Sample(sample.call, tensors, f"{sample.origin}, enlarged")


def _levels(name: str, argument: str) -> tuple[float, ...]:
    """The values of one tensor of a large sample; the first is that of samples whose elements are alike."""
    if name == "multinomial":
        return (4.0, 3.0, 0.0, 2.0, 1.0)
    if argument in {"out", "noise"}:
        return (0.0,)
    if argument == "std":
        return (2.0, 1.0)
    return (0.5, 0.0, 0.25, 1.0) if name == "bernoulli" else (-2.0, 1.0)


def _filled(levels: tuple[float, ...], sizes: tuple[int, ...], alike: bool, dtype: torch.dtype, leaf: int) -> Tensor:
    """A tensor of the levels in turn, one step further in each row and slower for each further leaf."""
    if len(levels) == sizes[-1]:  # weights of a row
        return torch.tensor(levels, dtype=dtype).expand(sizes).clone()
    steps = torch.arange(torch.Size(sizes).numel()) // 2**leaf
    return torch.tensor(levels, dtype=dtype)[(steps * (not alike)) % len(levels)].reshape(sizes)


def law_programs(sample: Sample, mesh: tuple[int, ...], seed: int) -> Iterator[tuple[Program, list[str]]]:
    """Each law of a sample's op on a mesh, for each claimed placement of the inputs, and the rules that it tests.

    A law that the op breaks on whole tensors is left out.  Raises `REJECTIONS`, and what a rule of DTensor raises.
    """
    for alike in (False, True):
        large = large_sample(sample, alike=alike)
        laws = [law for law in laws_of(sample.op) if (law == "law: shards that are copies") == alike]
        if large is None or not laws:
            continue
        outputs = run_oracle(large, seed=seed)
        by_size = {size: _lines(large, claims(large, size, outputs.raw)) for size in sorted(set(mesh))}
        rows = list(itertools.product(*(by_size[size].items() for size in mesh)))
        if len(mesh) > 1:
            rows = [row for row in rows if _is_cut([p for line, _ in row for p in line])]
        rows = rows[:: -(-len(rows) // MOST_ROWS[MESHES if len(mesh) > 1 else ALONE]) or 1]
        for law in laws:
            alone = oracle_of_program(Program(large, mesh, (), law, seed)).outputs
            if any(bool(x.any()) for x in alone[: len(alone) - len(written_leaves(large.call))]):
                continue
            for row in rows:
                inputs = tuple(zip(*(line for line, _ in row), strict=True))
                yield Program(large, mesh, inputs, law, seed), [name for _, names in row for name in names]


def _is_cut(placements: Sequence[Placement]) -> bool:
    """Whether a tensor is sharded and none is partial, which one axis shows and kinds of which may not go together."""
    return any(isinstance(p, Shard) for p in placements) and not any(isinstance(p, Partial) for p in placements)


def _lines(sample: Sample, found: Sequence[Claim]) -> dict[tuple[Placement, ...], list[str]]:
    """The rules by their input placements."""
    lines: dict[tuple[Placement, ...], list[str]] = {}
    for claim in found:
        inputs = tuple(p or Replicate() for p in claim.rule.inputs)
        if len(inputs) == len(sample.tensors) and all(map(is_standard, inputs)):
            lines.setdefault(inputs, []).append(str(claim.rule))
    return lines


def validate_laws(task: OverloadTask, results: list[TaskResult], note: Note) -> None:
    """Test the laws of a task's random op on simulated ranks, and add candidates to its results.

    A rule of which all laws hold is no longer one that is right by its metadata.  An error of ours is a `Crash`.
    """
    if task.kind not in KEPT or not has_laws(task.op):
        return
    recorder, by_unit = Recorder(task), {result.unit: result for result in results}
    kept: set[tuple[object, ...]] = set()
    for number, sample in enumerate(task.samples):
        key = (sample.tensors[0].ndim, *numeric_arguments(sample.call).items()) if sample.tensors else ()
        if not key or key in kept or len(kept) == KEPT[task.kind] or large_sample(sample, alike=True) is None:
            continue
        meshes = [len(kept) % len(task.meshes)] if task.kind == ALONE else range(len(task.meshes))
        kept.add(key)
        for i in (i for i in recorder.meshes(number) if i in meshes):
            note(task.step(number, i))
            unit = recorder.result_of(sample, task.meshes[i]).unit
            result = by_unit.setdefault(unit, TaskResult(unit))
            try:
                _try(sample, task.meshes[i], task.seed, result)
            except REJECTIONS as error:  # of the op on the large sample, or of a rule that has no line for it
                result.skipped[f"no law is tested: {error_in_one_line(error, 90)}"] += 1
    results[:] = [by_unit[unit] for unit in sorted(by_unit)]


def _try(sample: Sample, mesh: tuple[int, ...], seed: int, result: TaskResult) -> None:
    tried = list(law_programs(sample, mesh, seed))
    found = run_simulated_programs([program for program, _ in tried])
    result.tried += len(tried)
    holds = {name: True for _, names in tried for name in names}
    for (program, names), one in zip(tried, found, strict=True):
        if one.wrong:
            candidate = wrong_program_candidate(program, one)
            keep_smallest(result.suspects.setdefault(candidate.name, []), candidate, KEPT_CANDIDATES)
        if one.wrong or one.refused or not one.rank_results:
            holds.update(dict.fromkeys(names, False))
    result.by_metadata -= {name for name, holding in holds.items() if holding}


def wrong_program_candidate(program: Program, found: Confirmation) -> Candidate:
    """A program that is wrong on simulated ranks as a candidate finding."""
    rule = Rule(program.sample.op, tuple(placements[-1] for placements in program.inputs), ())
    evidence = Evidence(found.wrong, "", program.draw, found.got, found.want)
    return Candidate(Instance(rule, program.ranks, program.sample, Verdict.UNSOUND, "simulated", evidence), program)
