"""Programs of public calls: which steps, on which tensors and layouts, and their simulated runs.

Of each public name some steps are tried on each mesh, those of other meshes first: together they are all or as many as there
is time for.  The rest of a step's choices are drawn from the seed.
"""

from __future__ import annotations

import functools
import itertools
import random
import re
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from localtensor.layout import Layout, has_one_meaning
from strategies.model.rule import PUBLIC, Call, Leaf, Program, Sample
from strategies.programs.mesh_programs import placement_options
from strategies.programs.public_api.submesh_steps import CROSSED
from strategies.programs.public_api.table import OF_TORCH, STEPS, TWO_AXES, base_name, public_steps, step_name
from strategies.programs.public_api.tensor_steps import (
    EVEN,
    EVEN_SEQUENCES,
    FEW_CLASSES,
    FLOATS,
    IMAGES,
    INDICES,
    LOGITS,
    MATRICES,
    NUMBERS,
    ROWS,
    SEQUENCES,
    PublicStep,
)
from strategies.programs.run.real_run import run_simulated_programs
from strategies.programs.run.verdict import Confirmation, is_claimed
from strategies.programs.shrink.search import failure_kind

MESHES = ((2,), (3,), (4,))
"""The meshes of one axis on which every public name is tried."""
_ORDER = (*MESHES, (2, 2), (2, 3))
"""Meshes that follow each other: each has the steps of a name that come after those of the mesh before."""
MOST = 8
"""The largest number of programs of one public name on one mesh."""
MOST_FURTHER, MOST_OPTIMIZER, MOST_OF_TORCH = 6, 2, 12
"""The same for further programs of a name that has others; of an optimizer, or of what only counts; of what tensors, functions and submeshes are used for."""
IN_EACH_LAYOUT = ("torch.nn.functional", "torch.Tensor, functions", "torch.inference_mode")
LAYOUTS = 6
"""The beginnings of names whose functions are each tried in this many layouts on the first mesh: one may be wrong in one of them."""
REPEATS = 2
"""How often one step is drawn for one mesh, at most: with other tensors and layouts."""
SHAPES: dict[str, tuple[tuple[int, ...], ...]] = {
    FLOATS: ((8, 6), (5, 3), (4, 2, 6), (1, 4), (6, 12)),
    NUMBERS: ((8, 6), (5, 3), (3,), (4, 2, 6), (1, 4)),
    MATRICES: ((12, 12), (24, 12)),
    ROWS: ((8, 6), (5, 3), (1, 4), (6, 12)),
    SEQUENCES: ((2, 4, 6), (2, 12, 5), (3, 5, 4), (4, 8, 4)),
    EVEN_SEQUENCES: ((12, 24, 2), (24, 12, 3)),
    INDICES: ((4, 6), (5, 3), (3,), (12, 2)),
    LOGITS: ((8, 6), (5, 12), (4, 5), (3, 8, 2), (2, 6, 4)),
    IMAGES: ((2, 6, 2, 3), (3, 8, 2, 2), (2, 5, 3, 4)),
    FEW_CLASSES: ((4, 2), (6, 3), (3, 2, 4)),
    EVEN: ((6, 12), (12, 6), (6, 6, 2)),
}
"""Shapes that are even, uneven, and shorter than the mesh, for each kind of tensors."""
DTYPES = {NUMBERS: (torch.float64, torch.float32, torch.int64), INDICES: (torch.int64,)}
"""The dtypes of each kind; floats of both sizes for the others."""
FIRST_ROWS = 5
"""Indices are below this number, which every table of the steps has."""
BATCH = 24
"""The number of programs that are run at one time, a second at most."""
TRIES = 30
"""Draws of a tensor and a layout for one step, until one has a meaning."""


@functools.cache
def _sample(kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> Sample:
    """A call that keeps a tensor and its layout, on which a public call follows; equal samples are one, so that they share an oracle."""
    steps = torch.arange(torch.Size(shape).numel())
    rising = 1 + steps * FIRST_ROWS // len(steps)  # the largest index of each rank is another one
    values = (steps * 3 + 1) % rising if kind == INDICES else steps * 2 - len(steps)
    x = (values / 8 if dtype.is_floating_point else values).reshape(shape).to(dtype)
    return Sample(Call("aten.alias.default", (Leaf(0),)), (x,), "a public call of DTensor")


def draw_public_programs(mesh: tuple[int, ...], *, seed: int, turn: int = 0) -> list[Program]:
    """Programs of every public name on this mesh, the same for a seed in any process.  `turn` counts the meshes."""
    drawn = (one for name in STEPS for one in _some(name, mesh, seed, turn))
    found = (_program(step, mesh, seed, number, layout) for step, number, layout in drawn)
    return list(dict.fromkeys(program for program in found if program is not None))


def _some(name: str, mesh: tuple[int, ...], seed: int, turn: int) -> Iterator[tuple[PublicStep, int, int | None]]:
    """Some steps of a name, from where those of the mesh before end, each with the number of its draw; all groups in turn.

    A third number is that of a layout, where each group is tried in each.
    """
    groups: dict[str, list[PublicStep]] = {}
    for step in public_steps(name, len(mesh)):
        groups.setdefault(step.group, []).append(step)
    for group, steps in groups.items():
        random.Random(f"{seed} {name} {group}").shuffle(steps)
    order = list(groups)
    if _is_of_torch(name):  # a list of torch's names has an order that is no choice
        random.Random(f"{seed} {name}").shuffle(order)
    rounds = itertools.zip_longest(*(groups[group] for group in order))
    steps = [step for row in rounds for step in row if step is not None]
    most = min(_most(name), REPEATS * len(steps))
    for i in range(turn * most, (turn + 1) * most):
        yield steps[i % len(steps)], i, None
    if mesh == MESHES[0] and name.startswith(IN_EACH_LAYOUT):
        for layout, group in itertools.product(range(LAYOUTS), order):
            yield groups[group][layout % len(groups[group])], layout, layout


def _is_of_torch(name: str) -> bool:
    """Whether the steps of a name are a list of what tensors, functions and submeshes are used for."""
    return name.startswith("torch.") or name in TWO_AXES


def _most(name: str) -> int:
    if name.startswith(("optim.", "debug.")):
        return MOST_OPTIMIZER
    if name.startswith("torch.inference_mode") or name == CROSSED:  # each function goes wrong in few layouts, if at all
        return 2 * MOST_OF_TORCH
    if _is_of_torch(name):
        return MOST_OF_TORCH
    return MOST_FURTHER if name.startswith(OF_TORCH) or base_name(name) != name else MOST


def _program(
    step: PublicStep, mesh: tuple[int, ...], seed: int, number: int, chosen: int | None = None
) -> Program | None:
    """The step on a tensor and a layout that it takes; None if none of the draws is one.  The tensor is the same on all meshes.

    The first draws have the layout of the number `chosen`, if there is one.
    """
    tensors = random.Random(f"{seed} {number % REPEATS} {step.call}")
    layouts = random.Random(f"{seed} {number} {step.call} {mesh}")
    for attempt in range(TRIES):
        shape = tensors.choice(SHAPES[step.takes])
        dtype = tensors.choice(DTYPES.get(step.takes, (torch.float64, torch.float32)))
        sample = _sample(step.takes, shape, dtype)
        if chosen is not None and attempt < TRIES // 2:
            layout: Layout = (_layouts(sample.tensors[0])[chosen],)
        else:
            layout = _layout(sample.tensors[0], mesh, layouts)
        given = (layout, *step.layouts)
        if step.fits(sample.tensors[0], layout) and all(has_one_meaning(p, shape, dtype, mesh) for p in given):
            return Program(sample, mesh, (layout,), PUBLIC + step.call, seed)
    return None


def _layout(x: Tensor, mesh: Sequence[int], rng: random.Random) -> Layout:
    """Any layout, in which no more than one placement in three is partial."""
    every = placement_options(x)
    partial = [p for p in every if isinstance(p, Partial)]
    others = [p for p in every if not isinstance(p, Partial)]
    return tuple(rng.choice([*others, *others, *rng.choices(partial, k=len(others))]) for _ in mesh)


def _layouts(x: Tensor) -> list[Placement]:
    """`LAYOUTS` placements on one axis: a pending sum, shards along each dim, and replicas, over again."""
    every = [Partial("sum"), *map(Shard, reversed(range(x.ndim))), Replicate()]
    return [every[i % len(every)] for i in range(LAYOUTS)]


def _turns(meshes: Sequence[tuple[int, ...]]) -> list[tuple[tuple[int, ...], int]]:
    return [(mesh, _ORDER.index(mesh) if mesh in _ORDER else 0) for mesh in meshes]


def try_public_programs(
    meshes: Sequence[tuple[int, ...]],
    *,
    seed: int,
    share: int = 0,
    shares: int = 1,
    began: Callable[[int], None] = lambda batch: None,
) -> tuple[int, list[tuple[Program, Confirmation]]]:
    """How many programs of public calls were run on these meshes, and those that are wrong on simulated ranks.

    A documented call that every rank refuses is among them, unless an op in it has no rule.  Of `shares` equal parts of the
    programs that of number `share` is run.  `began` gets the number of each batch before it runs, and their number at last.
    """
    programs = [p for mesh, turn in _turns(meshes) for p in draw_public_programs(mesh, seed=seed, turn=turn)][
        share::shares
    ]
    played = in_batches(programs, lambda batch: [*zip(batch, run_simulated_programs(batch), strict=True)], began)
    return len(programs), [(p, f) for p, f in played if f.wrong or is_refused(p, f.refused)]


def in_batches(
    programs: Sequence[Program],
    play: Callable[[Sequence[Program]], Sequence[tuple[Program, Confirmation]]],
    began: Callable[[int], None],
) -> list[tuple[Program, Confirmation]]:
    """What `play` gives for all programs, of which it gets `BATCH` at a time.

    `began` gets the number of each batch before it runs, and their number at last.
    """
    played: list[tuple[Program, Confirmation]] = []
    batches = [programs[first : first + BATCH] for first in range(0, len(programs), BATCH)]
    for number, batch in enumerate(batches):
        began(number)
        played += play(batch)
    began(len(batches))
    return played


OF_OTHER_CLASSES = ("not supported for tensor subclasses", "unsupported format string passed to")
"""Parts of errors by which torch refuses a use of any other class than torch.Tensor: `tolist`, `numpy`, `format` (of nn.Parameter, too)."""
IN_PLACE = "in-place operations that require placement changes are not supported"
TO_REDISTRIBUTE = "which requires redistribution. Please redistribute"
_RESHAPES = re.compile(r"\b(flatten|unflatten|ravel|reshape|view|squeeze|unsqueeze)\w*\(")


def _is_meant(program: Program, name: str, error: str) -> bool:
    """Whether torch says that it means to refuse what the program itself does with a tensor: a write or a reshape that it asks for.

    A function that is made of others asks for no write; what is written to or reshaped within it is torch's own affair.
    """
    use, made_of_others = name.startswith("torch.Tensor,"), name.startswith("torch.Tensor, functions")
    if IN_PLACE in error:
        return "inplace=True" in program.then or (use and not made_of_others)
    if TO_REDISTRIBUTE in error:
        return use and (not made_of_others or bool(_RESHAPES.search(program.then)))
    return use and any(text in error for text in OF_OTHER_CLASSES)


def is_refused(program: Program, error: str) -> bool:
    """Whether every rank refuses a documented call that a rule has claimed, and torch does not mean to."""
    name = step_name(program.then)
    if name.startswith(CROSSED):
        return False  # torch need not take tensors of two meshes
    return bool(error) and is_claimed(error) and not _is_meant(program, name, error)


def fault_name(program: Program, reason: str) -> str:
    """The name under which candidates of public calls are one: those of one public name that fail in one way."""
    kind = failure_kind(reason)
    stops = " stops" if reason.startswith("stops") else ""
    return f"{step_name(program.then)}: {kind.what}{stops}"


def calls_left(meshes: Sequence[tuple[int, ...]], *, seed: int) -> list[str]:
    """How many of the public calls of each name are not drawn on these meshes: `parallel.ColwiseParallel: 90 of 128`."""
    drawn = {
        program.then for mesh, turn in _turns(meshes) for program in draw_public_programs(mesh, seed=seed, turn=turn)
    }
    left = []
    for name in STEPS:
        every = {PUBLIC + step.call for axes in {len(mesh) for mesh in meshes} for step in public_steps(name, axes)}
        if every - drawn:
            left.append(f"{name}: {len(every - drawn)} of {len(every)}")
    return left
