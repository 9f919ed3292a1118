"""Validation of one overload with follow-up steps, and on meshes of several axes, by DTensor's own dispatch, simulated."""

from __future__ import annotations

import itertools
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace

from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard

from localtensor.layout import is_inexact, is_standard
from strategies.model.call_signature import prior_calls
from strategies.model.oracle import OracleResult
from strategies.model.rule import PUBLIC, Claim, Program, Sample, dtype_class, overload
from strategies.model.verdict import PAIRS
from strategies.programs import mesh_programs as redistributions
from strategies.programs import mesh_validation
from strategies.programs.chains import (
    chain_programs,
    fault_key,
    on_fresh_tensor,
    reshape_programs,
    wrong_chains,
    wrong_redistributions,
)
from strategies.programs.composites import composite_programs, wrong_composites
from strategies.programs.mesh_validation import Claimed, Found
from strategies.programs.prior_calls import Line, first_of_two_dims, lines_of, prior_call_programs, steps_alone
from strategies.programs.public_api import drawing as public_api
from strategies.programs.public_api.table import without_programs
from strategies.programs.random_laws import wrong_program_candidate
from strategies.programs.run.follow_ups import GRADS, RESULT_STEPS, VIEW_STEPS, input_alone
from strategies.programs.run.real_run import run_simulated_programs
from strategies.programs.run.verdict import NOT_ASSEMBLED, Confirmation, is_claimed
from strategies.torch_api.decompositions import has_autograd_kernel
from strategies.torch_api.dtensor import special_dispatch_reason
from strategies.validation.finding import (
    Candidate,
    OverloadTask,
    TaskResult,
    keep_smallest,
    refused_program,
)
from strategies.validation.overload import KEPT_CANDIDATES, NO_TURN, Note, Recorder

MAX_PROGRAMS, FURTHER_PROGRAMS, COSTLY_PROGRAMS = 12, 4, 2
"""The largest numbers of programs with a single step of one sample: for the first samples, for further ones, and for costly ones."""
WHOLE_SAMPLES, CHAINED_SAMPLES = 2, 3
"""How many samples of a class of dtypes have all steps, and how many of floats a chain."""
REDISTRIBUTED = ("real", "integer")
"""The classes of dtypes whose samples are tried in placements that no rule takes: what DTensor redistributes first may become a float."""
_OF_PARTIAL = (
    "R", "times -1", "plus 1", "sum", "cast float32", "cast int64", "S(0)", "squared", "absolute", "times 2", "slice",
    "full twice", "cast bool", "sum 0", "transpose", "S(1)", "cast float64", "local",
)  # fmt: skip
_OF_SHARDS = (
    "slice", "sum 0", "transpose", "select", "view", "narrow", "sum", "unsqueeze", "R", "S(1)", "plus 1", "sum -1",
    "S(0)", "cast float64", "full twice", "absolute", "local", "column", "row", "mean -1", "amax", "less its mean",
)  # fmt: skip
_OF_ITS_OWN = (
    "full twice", "swapped", "sum", "times -1", "greater 0", "exp", "mean", "softmax", "cat", "where", "clamp", "halved", "chunk",
    "max", "copied", "own transpose", "added in place", "flip", "slice", "select", "view", "sum 0",
)  # fmt: skip
"""Follow-up steps for a placement of DTensor's own, which may have a state, and need not be linear: the first three, and
three of the rest in turn."""
_FAMILIES = (_OF_PARTIAL, _OF_SHARDS, _OF_ITS_OWN, tuple(GRADS))
PLAIN_GRADS = ("grad", "grad S(0)")
"""Gradients of all results, with incoming gradients that are replicated or sharded."""


def follow_up_programs(
    sample: Sample,
    claims: Sequence[Claim],
    mesh: tuple[int, ...],
    *,
    before: Sequence[Sample] = (),
    most: int = MAX_PROGRAMS,
    seed: int = 0,
) -> list[Program]:
    """At most `most` programs for the claims about a sample, on a mesh whose last axis has the claims' placements.

    Each claim gets one of the follow-up steps that can show whether its outputs are as claimed, in turn; then
    gradients, written arguments, single outputs, and the same op again after a call from `before`.
    """
    lines = lines_of(sample, claims)
    turn = zlib.crc32(f"{seed} {sample.op} {sample.arguments()}".encode())
    short = most < MAX_PROGRAMS
    columns = [list(dict.fromkeys(_named(sample, line, turn + i, before, short))) for i, line in enumerate(lines)]
    rows = itertools.zip_longest(*columns)
    chosen = [(line[0], then) for row in rows for line, then in zip(lines, row, strict=True) if then][:most]
    rest = (Replicate(),) * (len(mesh) - 1)
    return [Program(sample, mesh, tuple((*rest, p) for p in inputs), then, seed, turn % 2) for inputs, then in chosen]


def view_programs(sample: Sample, mesh: tuple[int, ...], seed: int) -> list[Program]:
    """Every write to a view, and every view of what is written, of the first tensor sharded along each of its dims."""
    rest = (Replicate(),) * (len(mesh) - 1)
    return [
        Program(sample, mesh, ((*rest, Shard(dim)),), then, seed)
        for dim in _cut_dims(sample, mesh)
        for then in VIEW_STEPS
    ]


def _cut_dims(sample: Sample, mesh: tuple[int, ...]) -> list[int]:
    """The dims of the first tensor with rows for each rank of the last axis."""
    shape = sample.tensors[0].shape if sample.tensors else ()
    return [dim for dim, size in enumerate(shape) if size >= mesh[-1]]


def _most_cut(samples: Sequence[Sample], mesh: tuple[int, ...]) -> Sample:
    """The first sample of those whose first tensor can be sharded along most dims."""
    return max(samples, key=lambda one: len(_cut_dims(one, mesh)))


def _named(sample: Sample, line: Line, turn: int, before: Sequence[Sample], short: bool) -> Iterator[str]:
    """The names of follow-up steps for one line, the most informative first; of a `short` choice gradients are.

    What follows a result depends on its placement, which has been met on the first samples; a gradient depends on the arguments.
    """
    outputs = [p for p in line[1] if p is not None]
    writes = overload(sample.op)._schema.is_mutable
    own = _turned(_OF_PARTIAL, turn) if any(isinstance(p, Partial) for p in outputs) else ()
    own = own or (_turned(_OF_SHARDS, turn) if any(isinstance(p, Shard) for p in outputs) else ())
    if writes:
        yield "base"
    if not all(map(is_standard, outputs)):
        yield from (*_OF_ITS_OWN[:3], *_turned(_OF_ITS_OWN[3:], turn)[:3])
    differentiable = any(map(is_inexact, sample.tensors)) and has_autograd_kernel(overload(sample.op))
    yield from own[: not (short and differentiable)]
    some = (f"grad of {turn // 2 % len(line[1])}",) if len(line[1]) > 1 else ()
    if differentiable:  # autograd has no gradients for the results that a loss does not use
        yield from _turned((*some, PLAIN_GRADS[turn // 2 % 2 if some else turn % 2]), turn)
        yield from _input_alone(sample, turn)
        yield _turned(tuple(name for name in GRADS if name not in PLAIN_GRADS), turn)[0]
    yield from itertools.islice(prior_calls(sample, before), 1)
    if len(line[1]) > 1:
        yield f"only {turn % len(line[1])}"
    yield from own[:3]


def _input_alone(sample: Sample, turn: int) -> Iterator[str]:
    """The gradient of one of several tensors of floats alone: the op's gradient is then called without the others."""
    floats = [i for i, x in enumerate(sample.tensors) if is_inexact(x)]
    if len(floats) > 1:
        yield f"grad of input {floats[turn // 3 % len(floats)]} alone"


def _turned(names: tuple[str, ...], turn: int) -> tuple[str, ...]:
    start = turn % len(names)
    return (*names[start:], *names[:start])


def wrong_programs(tried: Sequence[Program]) -> list[tuple[Program, Confirmation]]:
    """The programs that are wrong on simulated ranks although their op alone is right, and those that DTensor refuses.

    `RealRuns` confirms them.  If the follow-up step is wrong on a fresh tensor with the same placements, too, the op is not
    the cause: then the program is that step, on an `alias` of the tensor.
    """
    played = list(zip(tried, run_simulated_programs(tried), strict=True))
    wrong = _as_plain_gradients([(p, found) for p, found in played if found.wrong and p.then])
    alone = run_simulated_programs([replace(p, then=steps_alone(p)) for p, _ in wrong])
    left = [(p, found, one) for (p, found), one in zip(wrong, alone, strict=True) if not one.wrong]
    fresh = [
        on_fresh_tensor(replace(p, then=""), one, p.then) if p.then in RESULT_STEPS else None for p, _, one in left
    ]
    others = iter(run_simulated_programs([program for program in fresh if program is not None]))
    made = []
    for (program, found, _), other in zip(left, fresh, strict=True):
        own = next(others) if other is not None else None
        made.append((other, own) if other is not None and own is not None and own.wrong else (program, found))
    return made + _refused_programs(_as_plain_gradients([(p, found) for p, found in played if found.refused]))


def _as_plain_gradients(found: Found) -> Found:
    """The same, with the gradient of all inputs in place of that of one alone where both fail: they are one fault."""
    alone = [p for p, _ in found if input_alone(p.then)]
    whole = [replace(p, then=PLAIN_GRADS[0]) for p in alone]
    played = dict(zip(map(id, alone), zip(whole, run_simulated_programs(whole), strict=True), strict=True))
    both = [(pair, played.get(id(pair[0]), pair)) for pair in found]
    return [other if other[1].wrong or other[1].refused else pair for pair, other in both]


def _refused_programs(refused: Found) -> Found:
    """The programs that every rank refuses: an op alone, or its gradient.

    A follow-up step that is refused is a call of another op, whose own rule may have no line for it; not so a result that is
    read a second time, and one that a step has given a placement with which it cannot be read.  An incoming gradient that is
    sharded may be cut where the op's gradient has to be whole.
    """
    alone = run_simulated_programs([replace(p, then="") for p, _ in refused])
    plain = [replace(p, then="grad" if p.then in (*PLAIN_GRADS, "grad of ones") else p.then) for p, _ in refused]
    again = run_simulated_programs(plain)
    made: dict[str, tuple[Program, Confirmation]] = {}
    for program, found, one in zip(plain, again, alone, strict=True):
        if one.refused:
            made.setdefault(program.sample.op, (replace(program, then=""), one))
        elif program.then.startswith("grad") and found.refused:
            made.setdefault(program.then, (program, found))
        elif found.refused and (program.then == "full twice" or found.note.startswith(NOT_ASSEMBLED)):
            made.setdefault(f"{program.then} {found.refused}", (program, found))
    return [(program, found) for program, found in made.values() if is_claimed(found.refused)]


REDISTRIBUTIONS_PER_MESH = 60
"""The number of redistributions between any layouts that are tried on one mesh."""
Play = Callable[[OverloadTask, int, OracleResult, tuple[int, ...], Claimed, Note], tuple[list[str], Found]]
"""A function that tries programs of one sample on one mesh: their follow-up steps, and those that are wrong."""


def validate_with_follow_ups(task: OverloadTask, note: Note) -> list[TaskResult]:
    """The results of a task, one for each unit: follow-up ops, gradients, the same call again."""
    return _each(task, note, _pairs)


def validate_on_meshes(task: OverloadTask, note: Note) -> list[TaskResult]:
    """The results of a task, one for each unit: the op on several axes, with claimed and other placements."""
    return _each(task, note, _meshes)


def _each(task: OverloadTask, note: Note, play: Play) -> list[TaskResult]:
    bench = Recorder(task)
    steps: dict[str, set[str]] = {}
    for number, sample in enumerate(task.samples):
        meshes = bench.meshes(number)
        if play is _meshes:
            meshes, left = _chosen_meshes(task, number, meshes)
            bench.leave_out(sample, f"meshes {NO_TURN}", ["x".join(map(str, task.meshes[i])) for i in left])
        for i in meshes:
            note(task.step(number, i))
            result = bench.result_of(sample, task.meshes[i])
            try:
                oracle = mesh_validation.oracle_and_claims(sample, task.meshes[i], task.seed)
                if isinstance(oracle, str):
                    result.skipped[oracle] += 1
                    continue
                tried, found = play(task, number, oracle[0], task.meshes[i], oracle[1], note)
            except Exception as error:  # why: one sample's failure is reported as Crashed, and the others are validated
                bench.crash(number, error)
                continue
            result.samples += 1
            result.tried += len(tried)
            steps.setdefault(dtype_class(sample), set()).update(tried)
            if play is _pairs and task.op == redistributions.COPY:
                result.untestable |= without_programs()
            for candidate in map(_candidate, found):
                keep_smallest(result.suspects.setdefault(fault_key(candidate), []), candidate, KEPT_CANDIDATES)
    for number, sample in enumerate(task.samples if task.kind == PAIRS else ()):
        if bench.meshes(number):
            bench.leave_out(sample, f"steps {NO_TURN}", steps_left(steps.get(dtype_class(sample), set())))
    if task.op == redistributions.COPY and task.samples:
        left_out = public_api.calls_left(public_api.MESHES if play is _pairs else task.meshes, seed=task.seed)
        bench.leave_out(task.samples[0], f"public calls {NO_TURN}", left_out)
    return bench.all()


def _chosen_meshes(task: OverloadTask, number: int, meshes: Sequence[int]) -> tuple[list[int], list[int]]:
    """The meshes on which a sample is tried, and those on which it is not: the samples of a class of dtypes take turns.

    Where the overload takes floats, integers are tried on the mesh with the longest axis alone: most shards are uneven there.
    Integers on the other meshes alone gave 13 of 796 findings in a sweep of torch 2.13.
    """
    classes = [dtype_class(one) for one in task.samples]
    turn, of = classes[:number].count(classes[number]), classes.count(classes[number])
    every = range(len(task.meshes))  # not the `meshes` alone, which are what a resumed run has left
    best = max(every, key=lambda i: (max(task.meshes[i]), -len(task.meshes[i])))
    alone = classes[number] == "integer" and "real" in classes
    chosen = [best] if alone else [i for i in every if i % min(of, len(every)) == turn % len(every)]
    return [i for i in meshes if i in chosen], [i for i in every if i not in chosen]


def _tried_on(task: OverloadTask, mesh: tuple[int, ...]) -> list[int]:
    """The numbers of the samples that a run which nothing has interrupted tries on a mesh."""
    every, i = range(len(task.meshes)), task.meshes.index(mesh)
    return [n for n in range(len(task.samples)) if task.kind == PAIRS or i in _chosen_meshes(task, n, every)[0]]


def steps_left(tried: AbstractSet[str]) -> list[str]:
    """The follow-up steps that were not tried, of those for the placements that were met.

    >>> steps_left({"slice"}), len(steps_left({"column"})) == len(_OF_SHARDS) - 1
    ([], True)
    """
    every = Counter(name for family in _FAMILIES for name in family)
    met = [family for family in _FAMILIES if any(every[name] == 1 and name in tried for name in family)]
    return [name for name in dict.fromkeys(itertools.chain(*met)) if name not in tried]


def _pairs(
    task: OverloadTask, number: int, oracle: OracleResult, mesh: tuple[int, ...], claimed: Claimed, note: Note
) -> tuple[list[str], Found]:
    sample = task.samples[number]
    public, found = _public(task, number, mesh, public_api.MESHES, note)
    if any(isinstance(out, Tensor) and not out.numel() for out in oracle.outputs):
        return public, found  # an empty result shows nothing, and DTensor 2.13 searches for a view of it for ever
    most, chains = _budgets(task, number)
    lines = claimed[mesh[-1]]
    tried = follow_up_programs(sample, lines, mesh, before=task.samples, most=most, seed=task.seed)
    # Views are of no op in particular.
    if sample.op == redistributions.COPY and sample is _most_cut(task.samples, mesh):
        tried += view_programs(sample, mesh, task.seed)
        reshapes = reshape_programs(mesh, seed=task.seed)
        public += [program.then for program in reshapes]
        found += public_api.in_batches(reshapes, wrong_chains, _notes(task, number, mesh, note))
    inputs = [line[0] for line in lines_of(sample, lines)]
    if sample is first_of_two_dims(task.samples, dtype_class(sample)):
        tried += prior_call_programs(sample, inputs, mesh, task.seed)
    chained = chain_programs(sample, inputs, mesh, seed=task.seed, most=chains)
    # An op with a handler is tried so by itself.
    moves = (
        most == MAX_PROGRAMS and dtype_class(sample) in REDISTRIBUTED and not special_dispatch_reason(overload(task.op))
    )
    moved = mesh_validation.try_redistributed(sample, oracle, mesh, claimed, seed=task.seed) if moves else []
    if most > COSTLY_PROGRAMS and special_dispatch_reason(overload(task.op)):
        moved = mesh_validation.try_other_values(sample, mesh, task.seed)
    found += wrong_programs(tried) + wrong_chains(chained) + mesh_validation.smallest_wrong_programs(moved)
    return [*public, *(program.then for program in (*tried, *chained, *(one for one, _ in moved)))], found


def _budgets(task: OverloadTask, number: int) -> tuple[int, int]:
    """The largest numbers of programs with single steps and of chains for a sample: more for the first of its dtypes."""
    if mesh_validation.is_costly(task.samples[number]):
        return COSTLY_PROGRAMS, 0
    kind = dtype_class(task.samples[number])
    before = sum(dtype_class(sample) == kind for sample in task.samples[:number])
    steps = MAX_PROGRAMS if before < WHOLE_SAMPLES else FURTHER_PROGRAMS
    return steps, int(kind == "real" and before < CHAINED_SAMPLES)


def _public(
    task: OverloadTask, number: int, mesh: tuple[int, ...], meshes: Sequence[tuple[int, ...]], note: Note
) -> tuple[list[str], Found]:
    """The programs of public calls, and of ops that torch composes of others, which are of no op in particular: a part with each sample of a copy."""
    if task.op != redistributions.COPY:
        return [], []
    tried, began = _tried_on(task, mesh), _notes(task, number, mesh, note)
    share = {"share": tried.index(number), "shares": len(tried)}
    count, found = public_api.try_public_programs(meshes, seed=task.seed, began=began, **share)
    if task.kind == PAIRS:
        composites = composite_programs(mesh, seed=task.seed, **share)
        count += len(composites)
        found += public_api.in_batches(composites, wrong_composites, began)
    return [PUBLIC] * count, found


def _notes(task: OverloadTask, number: int, mesh: tuple[int, ...], note: Note) -> Callable[[int], None]:
    """Notes that a batch begins: numbers of this sample in turn, since the pool ends a worker whose number stays the same."""
    steps = task.step(number, task.meshes.index(mesh)), task.oracle_step(number)
    return lambda batch: note(steps[batch % 2])


def _meshes(
    task: OverloadTask, number: int, oracle: OracleResult, mesh: tuple[int, ...], claimed: Claimed, note: Note
) -> tuple[list[str], Found]:
    sample = task.samples[number]
    by_size = mesh_validation.not_unsound(sample, oracle, claimed, task.seed)
    tried = mesh_validation.try_meshes(sample, by_size, [mesh], seed=task.seed)
    if sample.op == redistributions.COPY and number == _tried_on(task, mesh)[0]:  # once for a mesh
        moves = redistributions.draw_redistributions(mesh, seed=task.seed, budget=REDISTRIBUTIONS_PER_MESH)
        tried += zip(moves, run_simulated_programs(moves), strict=True)
    thens, wrong = _public(task, number, mesh, [mesh], note)
    if sample.op == redistributions.COPY and number == _tried_on(task, mesh)[0]:
        began = _notes(task, number, mesh, note)
        every, reshapes = (
            make(mesh, seed=task.seed) for make in (redistributions.every_redistribution, reshape_programs)
        )
        wrong += public_api.in_batches(every, wrong_redistributions, began) + public_api.in_batches(
            reshapes, wrong_chains, began
        )
        thens += [program.then for program in (*every, *reshapes)]
    return [*(program.then for program, _ in tried), *thens], mesh_validation.smallest_wrong_programs(tried) + wrong


def _candidate(found: tuple[Program, Confirmation]) -> Candidate:
    """The program as a candidate finding; its rule has the placements along the last axis."""
    program, seen = found
    return wrong_program_candidate(program, seen) if seen.wrong else refused_program(program, seen.refused)
