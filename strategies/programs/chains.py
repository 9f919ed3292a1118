"""Chains: an op, two or three steps after it, and in the end perhaps a gradient or two steps of an optimizer.

A single step shows whether a placement is what the rule claims.  A chain also shows what is lost on the way: the strides
and the shape that DTensor remembers, a placement that no rule claims as an input, the backward of a redistribution.
"""

from __future__ import annotations

import itertools
import random
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from localtensor.layout import is_arithmetic, is_inexact, is_standard, shorts
from strategies.model.kernels import REJECTIONS, run_call
from strategies.model.oracle import mutates
from strategies.model.rule import Call, Leaf, Program, Sample, flat_results, split_prior_call
from strategies.model.verdict import Verdict
from strategies.programs.mesh_programs import COPY, copy_sample
from strategies.programs.mesh_validation import Found, smallest_wrong_programs
from strategies.programs.public_api import drawing as public_api
from strategies.programs.run.follow_ups import (
    BASE_WRITTEN,
    CHAIN_SIGN,
    GRADS,
    RESHAPES,
    RESULT_STEPS,
    VIEW_STEPS,
    CallWithFollowUp,
    follow_up,
    shorter_chains,
    steps_of,
)
from strategies.programs.run.program_oracle import oracle_of_sample
from strategies.programs.run.real_run import run_simulated_programs
from strategies.programs.run.step_functions import uneven
from strategies.programs.run.verdict import Confirmation, is_claimed, layout_or_none
from strategies.validation.finding import Candidate, refusal_key

ALIAS = "aten.alias.default"
"""The op of a program in which a tensor is followed by steps, without an op before them."""
_MOVES = ("R", "S(0)", "S(1)")
"""Redistributions: each step is one of them in one of four cases."""
_STEPS = tuple(name for name in RESULT_STEPS if name not in (*_MOVES, "full twice"))
_ENDS = ("grad", "grad S(0)", "grad twice", "sgd", "adam")
MAX_ELEMENTS = 2048
"""The largest result of a step, in elements: some steps multiply their number."""
_ATTEMPTS = 8
"""How often another step is drawn where plain torch refuses one."""


def chain_programs(
    sample: Sample, inputs: Sequence[tuple[Placement, ...]], mesh: tuple[int, ...], *, seed: int, most: int
) -> list[Program]:
    """At most `most` chains after this call, the same for a seed in any process.

    `inputs` are the placements of its tensors along the last axis of the mesh to choose from; the other axes replicate.
    """
    if not inputs:
        return []
    draw = random.Random(zlib.crc32(f"chain {seed} {sample.op} {sample.arguments()} {mesh}".encode()))
    rest = (Replicate(),) * (len(mesh) - 1)
    chains = [(draw.choice(list(inputs)), chain) for _ in range(most) if (chain := _chain(sample, draw))]
    found = dict.fromkeys(chains)
    return [Program(sample, mesh, tuple((*rest, p) for p in row), chain, seed, seed % 2) for row, chain in found]


RESHAPED = (4, 4, 4)
"""The shape of the tensor that is reshaped twice: each of its dims can be split in halves."""


def reshape_programs(mesh: tuple[int, ...], *, seed: int) -> list[Program]:
    """Every two reshapes, one after the other, of a tensor that each axis of the mesh shards along a dim of its own, or two along one.

    One alone is a view of even shards.  It may leave a _StridedShard, whose rows do not lie together, and only the next one
    has to heed that.
    """
    if len(mesh) > len(RESHAPED):
        return []
    sample = copy_sample(uneven(RESHAPED, torch.float32, torch.device("cpu")))
    chains = []
    for first in RESHAPES:
        outs = _results(first, sample.tensors)
        chains += [CHAIN_SIGN.join((first, second)) for second in RESHAPES if outs and _results(second, outs)]
    dims = range(len(RESHAPED))
    cuts = itertools.product(dims, dims) if len(mesh) == 2 else itertools.permutations(dims, len(mesh))
    layouts = [tuple(map(Shard, cut)) for cut in cuts]
    return [Program(sample, mesh, (layout,), chain, seed) for layout in layouts for chain in chains]


def is_reshaped(program: Program) -> bool:
    """Whether all steps are reshapes, two or more."""
    steps = steps_of(program.then)
    return len(steps) > 1 and all(step in RESHAPES for step in steps)


def _chain(sample: Sample, draw: random.Random) -> str:
    """A chain whose steps plain torch takes, or "" if none was found."""
    try:
        _, outs = run_call(sample.call, [x.clone() for x in sample.tensors], mutates=mutates(sample.op))
    except REJECTIONS:
        return ""
    steps: list[str] = []
    for _ in range(draw.choice((2, 2, 3))):
        for _ in range(_ATTEMPTS):
            step = draw.choice(_MOVES if draw.random() < 0.25 else _STEPS)
            after = _results(step, outs)
            if after:
                steps.append(step)
                outs = after
                break
    if any(map(is_inexact, sample.tensors)) and draw.random() < 0.6:
        around = CHAIN_SIGN.join((*steps[:2], draw.choice(_ENDS)))
        if len(steps) > 1 and _has_gradient(sample, around):
            return around
    return CHAIN_SIGN.join(steps) if len(steps) > 1 else ""


def _has_gradient(sample: Sample, chain: str) -> bool:
    """Whether plain torch takes the chain: a step may detach its result, and a second gradient may be none."""
    call = CallWithFollowUp(sample.op, sample.call.args, sample.call.kwargs, chain)
    try:
        return bool(call([x.clone() for x in sample.tensors]))
    except REJECTIONS:
        return False


def _results(step: str, outs: Sequence[object]) -> list[object]:
    """The results of a step on whole tensors; none where torch refuses it, or where a result is empty or large."""
    if step in _MOVES and not all(isinstance(x, Tensor) and x.ndim > _MOVES.index(step) - 1 for x in outs):
        return []  # a shard of a dim that is not there
    try:
        after = follow_up(step).apply(outs)
    except REJECTIONS:
        return []
    sizes = [x.numel() for x in after if isinstance(x, Tensor)]
    return after if sizes and min(sizes) > 0 and max(sizes) <= MAX_ELEMENTS else []


def wrong_chains(tried: Sequence[Program]) -> Found:
    """The chains that are wrong on simulated ranks, and the gradients of chains that every rank refuses.

    Each is reduced to the steps without which it is right, and to a fresh tensor where its op is not the cause; a chain
    whose op is wrong alone is left out, since the op is tested alone.
    """
    made: dict[str, tuple[Program, Confirmation]] = {}
    for program, seen in zip(tried, run_simulated_programs(tried), strict=True):
        if _fails(program, seen):
            small = _reduced(program, seen)
            if small[0].then and (not small[1].refused or is_claimed(small[1].refused)):
                made.setdefault(str(small[0]), small)
    return list(made.values())


def _fails(program: Program, seen: Confirmation) -> bool:
    """Whether it is wrong, or its gradient is refused: a step that is refused is a call of another op."""
    *forward, last = steps_of(program.then) or ("",)
    if seen.wrong or not seen.refused or last not in GRADS:
        return bool(seen.wrong)
    (run,) = run_simulated_programs([replace(program, then=CHAIN_SIGN.join(forward))])
    return not run.refused and not run.wrong


def _reduced(program: Program, seen: Confirmation) -> tuple[Program, Confirmation]:
    """The program, with its run, after every step or op was left out without which it still fails."""
    while program.then:
        for smaller in _smaller(program):
            (run,) = run_simulated_programs([smaller])
            if bool(run.wrong) == bool(seen.wrong) and _fails(smaller, run):
                program, seen = smaller, run
                break
        else:
            break
    return program, seen


def _smaller(program: Program) -> Iterator[Program]:
    """The last steps on a new tensor with the placements of what comes before; the chain with a plain gradient; without
    a step.  Each is made when it is needed, since most chains fail by their last steps."""
    steps = steps_of(program.then)
    ends = [first for first in range(len(steps) - 1, -1, -1) if steps[first] not in GRADS]
    for first in ends:
        before = replace(program, then=CHAIN_SIGN.join(steps[:first]))
        if before.then or program.sample.op != ALIAS:
            (run,) = run_simulated_programs([before])
            yield from filter(None, [on_fresh_tensor(before, run, CHAIN_SIGN.join(steps[first:]))])
    if steps[-1] in GRADS and steps[-1] != "grad":
        yield replace(program, then=CHAIN_SIGN.join((*steps[:-1], "grad")))
    yield from (replace(program, then=then) for then in shorter_chains(program.then))


def fault_key(candidate: Candidate) -> str:
    """The name under which candidates are one: refusals by their error, prior calls by the op, writes through a view by the
    view and the layout of the base, two reshapes by the second, redistributions whatever the numbers of dims and ranks.
    """
    program = candidate.program
    if program is not None and program.public_call:
        return public_api.fault_name(program, candidate.instance.evidence.reason)
    if candidate.instance.verdict is Verdict.REFUSED:
        return refusal_key(candidate)
    if program is None:
        return candidate.name
    if split_prior_call(program.then)[1]:
        return f"{program.sample.op} after a call with another argument"
    if program.then in VIEW_STEPS:
        view, _, write = program.then.rpartition(", ")
        return str(program if write == BASE_WRITTEN else replace(program, then=f"{view}, v is written"))
    if is_reshaped(program):
        return f"{program.then.rpartition(CHAIN_SIGN)[2]} of what was reshaped, mesh axes: {len(program.mesh)}"
    if program.then.startswith("to (") and program.sample.op == COPY:
        return redistribution_key(program)
    return candidate.name


def redistribution_key(program: Program) -> str:
    """The layouts between which it moves, whatever the numbers of dims and ranks."""
    number: dict[str, int] = {}
    layouts = f"{shorts(program.inputs[0])} {program.then}, a flattened submesh: {program.flattened}"
    return re.sub(r"(S\()(\d+)(,\d+)?", lambda m: f"{m[1]}{number.setdefault(m[2], len(number))}", layouts)


def wrong_redistributions(tried: Sequence[Program]) -> Found:
    """Of the redistributions that are wrong on simulated ranks, the first of each two layouts, made small."""
    first: dict[str, tuple[Program, Confirmation]] = {}
    for program, seen in zip(tried, run_simulated_programs(tried), strict=True):
        if seen.wrong:
            first.setdefault(redistribution_key(program), (program, seen))
    return smallest_wrong_programs(list(first.values()))


def on_fresh_tensor(before: Program, run: Confirmation, then: str) -> Program | None:
    """The follow-up on a new tensor with the placements of a result of the program before, which was run.

    None if there is no such program: DTensor could not have made such a tensor.
    """
    if not run.rank_results:
        return None
    try:
        outs = flat_results(oracle_of_sample(before.sample, before.then, before.seed).raw)
    except REJECTIONS:
        return None
    for out, text in zip(outs, run.rank_results[0].placements, strict=False):
        placements = layout_or_none(text)
        if not isinstance(out, Tensor) or placements is None or len(placements) != len(before.mesh):
            continue
        if all(is_drawn(p, out) for p in placements):
            call = Call(ALIAS, (Leaf(0),))
            sample = Sample(call, (out.detach().clone(),), f"the result of {before.sample.op}")
            return replace(before, sample=sample, inputs=(placements,), then=then)
    return None


def is_drawn(placement: Placement, x: Tensor) -> bool:
    """Whether a program may begin with the tensor in this placement, which DTensor could have made."""
    if isinstance(placement, Partial) and is_standard(placement):
        return is_arithmetic(placement.reduce_op, x.dtype)
    return is_standard(placement)
