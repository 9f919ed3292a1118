"""`compare`: does a parallel program compute what one device computes, and where does it first go wrong?"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from localtensor.errors import Diverged, NotComparable, WrongType
from localtensor.testing.compare import programs
from localtensor.testing.compare.comparison import (
    FINITE,
    NOT_FINITE,
    Comparison,
    collective_lines,
    comparison_of,
    notes_of_values,
    nothing_compared,
)
from localtensor.testing.compare.divergence import (
    MOSTLY_JUMP,
    ONE_DEVICE,
    Divergence,
    Findings,
    Sides,
    first_divergence,
)
from localtensor.testing.compare.names import NameMap, find_names
from localtensor.testing.compare.suspects import CloserLook, closer_look
from localtensor.testing.compare.watch import DROPOUT, region_of
from localtensor.testing.compare_dropout import dropout_off
from localtensor.testing.compare_script import NoScript, script_of
from localtensor.testing.compare_shrink import Smaller, smallest
from localtensor.testing.compare_tolerance import Noise, Repeated, Settled, Slacks, free_what_is_left, in_double

STEEP = "Compare where rounding does not decide: in float64, or before the function that is so steep."
TO_PASS = {
    "optimizer": "Pass its class, or a function of the parameters",
    "batch": "Pass a tensor, a tuple of arguments, a dict of named ones, or a function that makes one",
    "inputs": "Pass the tuple of arguments, or a function that makes it",
}
WAYS = ("threads", "lockstep", "gloo", "nccl")


def compare(
    build: Callable[[], nn.Module],
    parallelize: Callable[[nn.Module, Any], nn.Module | None],
    batch: Callable[[], Any] | Tensor | tuple[Any, ...] | Mapping[str, Any],
    *,
    mesh: Mapping[str, int],
    loss: Callable[[Any], Tensor] | None = None,
    optimizer: Callable[..., torch.optim.Optimizer] | None = None,
    steps: int = 1,
    batch_axes: Sequence[str] | None = None,
    seed: int = 0,
    on: str = "threads",
    shrink: bool = False,
    script: str | os.PathLike[str] | None = None,
    progress: Callable[[str], None] | None = None,
) -> Comparison:
    """Compare a parallel program with the same model on one device; returns what was compared.

    build        makes the model on one device; called with the same seed on every rank.  A function that takes arguments is
                 compared as by `compare_functions`: it is the reference, `parallelize` the parallel one, `batch` makes the inputs
    parallelize  gets that model, with the one device's parameters, and the DeviceMesh of the rank; changes it in place, or
                 returns another (DDP, FSDP, tensor parallel, layers written by hand); or a schedule of
                 torch.distributed.pipelining, which has the loss function and gets the rank's rows.  Parameters under
                 other names, or fused with others, are found by their values
    batch        makes one global batch: a tensor, a tuple of arguments, or a dict of named ones; or is that itself
    mesh         the mesh axes and their sizes, as {"dp": 2, "tp": 2}
    loss         from the model's output to a scalar; without it only the forward pass is compared
    optimizer    from the parameters to an optimizer, as torch.optim.AdamW
    steps        steps of training, each on a global batch that `batch` makes
    batch_axes   the mesh axes along which each rank gets its rows of the batch: those named dp, fsdp, data and the like
    shrink       whether a divergence is also looked for in smaller programs, for a minute at most; the report names the smallest
    progress     called with the name of each run before it starts
    script       a file for a script of plain torch that shows the divergence under torchrun: that of the smallest program
    on           "threads": rank threads; "lockstep": one control flow for all ranks, where their program does not branch;
                 "gloo", "nccl": real processes, which find the functions by their modules and names

    Watched are the inputs and outputs of every module, the gradients of outputs and of parameters, the loss, and the
    parameters before and after each step.  For each the layout on the mesh is searched under which the ranks' tensors
    assemble to the one device's.  How far a right value may be away is measured: by a run in double precision, and by one
    with noise of one unit in the last place.

    Raises `Diverged`, an AssertionError, at the first value that no layout explains, in the order in which one device
    computes; `NotComparable` where the program on one device gives other values when it runs twice, or nothing could be
    compared.  An exception of a rank is raised as `run` does.

    >>> from torch.nn.parallel import DistributedDataParallel
    >>> print(compare(
    ...     lambda: nn.Linear(4, 2), lambda model, mesh: DistributedDataParallel(model, process_group=mesh.get_group()),
    ...     lambda: torch.randn(4, 4), mesh={"dp": 2}, loss=lambda y: y.square().mean(), optimizer=torch.optim.SGD,
    ... ))
    compare on dp=2: the parallel program computes what one device computes
      compared  12 values; not compared: 0
    """
    __tracebackhide__ = True  # pytest shows the line that calls it
    _check_mesh(mesh)
    if isinstance(batch, Tensor | tuple | Mapping):
        batch = partial(_given, batch)
    _check_callables(build=build, parallelize=parallelize, batch=batch, loss=loss, optimizer=optimizer)
    if isinstance(build, nn.Module):
        remedy = (
            "Pass what makes it, as lambda: Model(); a module that is taken for a function goes to compare_functions."
        )
        raise WrongType("compare", "build", build, "it is a model, and each run makes its own", remedy)
    if _takes_arguments(build):
        _check_of_functions(optimizer=optimizer, steps=None if steps == 1 else steps, batch_axes=batch_axes)
        return compare_functions(
            build, parallelize, batch, mesh=mesh, loss=loss, seed=seed, on=on, shrink=shrink, script=script,
            progress=progress,
        )  # fmt: skip
    axes = programs.batch_axes_of(mesh) if batch_axes is None else tuple(batch_axes)
    _check(mesh, axes, steps, on)
    if script is not None and not Path(script).absolute().parent.is_dir():
        raise NotComparable(f"{script} lies in no folder that exists", "script", "Make the folder first.")
    program = programs.TrainingProgram(build, parallelize, batch, dict(mesh), loss, optimizer, steps, axes, seed, on)
    with dropout_off():
        done = _compared(program, shrink, script, progress or _no_progress)
    if done.divergence is not None:
        raise Diverged(str(done), done)
    return done


def _compared(
    program: programs.TrainingProgram,
    shrink: bool,
    script: str | os.PathLike[str] | None,
    progress: Callable[[str], None],
) -> Comparison:
    start = programs.start_of(program)
    _check_rows(program, start)
    sides, collectives, names = _run_both(program, start, progress, settle=True)
    findings, look = first_divergence(sides), None
    if findings.divergence is not None:
        progress("both op by op")
        sides, findings, look = _look(program, start, sides, findings, names)
    found = findings.divergence
    notes = notes_of_values(sides, findings)
    notes += [] if names is None else [names.note()]
    if found is not None:
        less = Smaller(program, (), found)
        if shrink:
            progress("smaller programs")
            less = smallest(program, start, found, _divergence_of)
            notes.append(
                f"the same shows with {less}" if less.words else "no smaller program that was tried shows the same"
            )
        if script is not None:
            bound = float(sides.slack(found.key).max())
            notes.append(_write_script(Path(script), less, bound, names))
    done = comparison_of(sides, findings, look, collectives, notes)
    why = nothing_compared(sides, findings) if findings.divergence is None else ""
    if why:
        remedy = "Give the modules that `build` and `parallelize` make the same names."
        remedy = f"{STEEP} Else give{remedy.removeprefix('Give')}" if MOSTLY_JUMP in why else remedy
        remedy = FINITE if NOT_FINITE in why else remedy
        raise NotComparable(f"nothing that the program computes was compared ({why})", "the ranks", remedy)
    return done


def _write_script(path: Path, less: Smaller, bound: float, names: NameMap | None) -> str:
    """Writes the torchrun script of a divergence; returns what to do with it, or why there is none."""
    found = less.found
    if found is None or found.key.kind == DROPOUT:
        return "no script was written: dropout is off in it"
    try:
        text = script_of(less.program, found.key, bound, f"{found.key}: {found.what}\n{found.values}", names)
    except NoScript as reason:
        return f"no script was written: {reason}"
    path.write_text(text, encoding="utf-8")
    return f"run it: torchrun --nproc-per-node {less.program.ranks} {path}"


def compare_functions(
    reference: Callable[..., Any],
    parallel: Callable[..., Any],
    inputs: Callable[[], tuple[Any, ...]] | tuple[Any, ...],
    *,
    mesh: Mapping[str, int],
    loss: Callable[[Any], Tensor] | None = None,
    seed: int = 0,
    on: str = "threads",
    shrink: bool = False,
    script: str | os.PathLike[str] | None = None,
    progress: Callable[[str], None] | None = None,
) -> Comparison:
    """Compare a function that every rank runs with another that runs on one device, both on equal inputs.

    `inputs` makes the arguments, whole on every rank, or is their tuple; `parallel` gets the DeviceMesh too if it has a parameter `mesh`.  Results are
    compared as those of `compare` are: a result may be replicated, a shard, or a declared partial value.  So are numbers among
    them, and what the arguments are after the call.  Raises as `compare` does.

    >>> def halves(x, mesh):
    ...     mine = x.chunk(2)[mesh.get_rank()].sum(0)
    ...     return mine  # the all_reduce is missing
    >>> compare_functions(lambda x: x.sum(0), halves, lambda: (torch.arange(8.0).view(4, 2),), mesh={"dp": 2})
    Traceback (most recent call last):
    localtensor.errors.programs.Diverged: compare on dp=2: the parallel program differs from one device
      first at  output of the whole model, step 0
      call      sum, ...:2 in halves
      because   an all_reduce over dp is missing
      values    2 where one device gives 12 at [0]; 2 of 2 elements differ, by more than 0.0019
      assembles as P(sum) on dp where R was expected, as what reads it takes it for whole
      right before it: input of arguments after the call, step 0 as R
      compared  3 values; different: 1; not reached: 0; not compared: 0
    """
    __tracebackhide__ = True
    if isinstance(inputs, tuple):
        inputs = partial(_given, inputs)
    for argument, value in (("reference", reference), ("parallel", parallel), ("inputs", inputs)):
        _check_callable("compare_functions", argument, value)
    takes_mesh = "mesh" in inspect.signature(parallel).parameters
    made = partial(programs.parallel_function, parallel, takes_mesh=takes_mesh)
    return compare(
        partial(programs.FunctionModel, reference),
        made,
        inputs,
        mesh=mesh,
        loss=loss,
        batch_axes=(),
        seed=seed,
        on=on,
        shrink=shrink,
        script=script,
        progress=progress,
    )


def _no_progress(_: str) -> None:
    pass


def _run_both(
    program: programs.TrainingProgram,
    start: programs.Start,
    progress: Callable[[str], None] = _no_progress,
    settle: bool = False,
) -> tuple[Sides, tuple[str, ...], NameMap | None]:
    """Both programs, with the runs that measure how far a right value may be away; the collectives by line; the names.

    With `settle` the ranks keep only what is not the reference's.
    """
    progress("one device")
    reference = programs.on_one_device(program, start, _same)
    progress("one device again")
    free_what_is_left(reference)
    again = Repeated(reference)
    programs.on_one_device(program, start, _same, sink=again.take)
    check_repeated(again)
    free_what_is_left(reference)
    progress("one device with noise, and in double precision")
    slacks = Slacks(reference)
    for seed in (1, 2):
        noise = Noise(seed)
        with slacks.of_run(noise=noise) as take:
            programs.on_one_device(program, start, noise, sink=take)
        free_what_is_left(reference)
    notes = _run_in_double(program, start, slacks)
    free_what_is_left(reference)
    progress(f"{program.ranks} ranks")
    settled = Settled(reference, slacks.found, program.sizes)
    ranks, calls = programs.on_ranks(program, start, None, settled if settle else None)
    sides = Sides(
        reference, slacks.found, ranks, program.mesh, program.batch_axes, settled=settled.layouts, notes=notes
    )
    names = find_names(sides)
    sides = sides if names is None else names.applied(sides)
    return sides, collective_lines(program.mesh, calls), names


def _run_in_double(program: programs.TrainingProgram, start: programs.Start, slacks: Slacks) -> tuple[str, ...]:
    """Measures how far the run in double precision is; a note if the model does not run so, as with a cast of its own."""
    try:
        with slacks.of_run(double=True) as take:
            programs.on_one_device(program, start, in_double, sink=take)
    except (RuntimeError, TypeError, ValueError) as error:  # it runs as it is: an op refuses the dtype beside another
        said = (str(error).splitlines() or [type(error).__name__])[0]
        return (
            f"{ONE_DEVICE} does not run in double precision ({said[:100]}); the tolerance is measured by noise alone",
        )
    return ()


def _divergence_of(program: programs.TrainingProgram) -> Divergence | None:
    return first_divergence(_run_both(program, programs.start_of(program))[0]).divergence


def _look(
    program: programs.TrainingProgram, start: programs.Start, sides: Sides, findings: Findings, names: NameMap | None
) -> tuple[Sides, Findings, CloserLook | None]:
    """Both programs run once more: everything is kept, and the ops around the divergence are compared."""
    found = findings.divergence
    if found is None:
        return sides, findings, None
    region = region_of(found.key, sides.ranks[0].calls)
    there = region if names is None else names.region_on_ranks(region)
    reference, (ranks, _) = (
        programs.on_one_device(program, start, _same, region),
        programs.on_ranks(program, start, there),
    )
    second = replace(sides, reference=reference, ranks=ranks, settled={})
    second = second if names is None else names.applied(second)
    again = first_divergence(second)
    if again.divergence is not None and again.divergence.key == found.key:  # else two runs of the program differ
        findings, found = again, again.divergence
    part = second.part_of(findings.part) or second if findings.part else second
    return second, findings, closer_look(part, findings, found)


def _takes_arguments(build: Callable[..., Any]) -> bool:
    """Whether a call without arguments cannot be meant: it is a function to compare, and makes no model."""
    if isinstance(build, type):
        return False
    try:
        parameters = inspect.signature(build).parameters.values()
    except (TypeError, ValueError):  # a builtin may have none
        return False
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(one.default is inspect.Parameter.empty and one.kind in by_place for one in parameters)


def _check_of_functions(**given: object) -> None:
    for argument, value in given.items():
        if value is not None:
            raise NotComparable(
                "`build` takes arguments, so that functions are compared, and these take no steps on parts of a batch",
                argument, "Leave it out; or pass a `build` without arguments, which makes the model.",
            )  # fmt: skip


def _same(x: Tensor) -> Tensor:
    return x


def check_repeated(again: Repeated, argument: str = "build, batch and loss", name: str = ONE_DEVICE) -> None:
    """Raises `NotComparable` if two runs of the reference from one seed saw different values."""
    if again.other is not None:
        raise NotComparable(
            f"{again.other} on {name} differs between two runs from one seed", argument,
            "Take all randomness from torch's generator, and leave no state behind.",
        )  # fmt: skip


def _given(batch: Any) -> Any:
    """The batch that was given instead of a function; what the ranks get are copies anyway."""
    return batch


def _check_callables(**given: object) -> None:
    for name, one in given.items():
        if one is not None or name not in ("loss", "optimizer"):
            _check_callable("compare", name, one)


def _check_callable(call: str, argument: str, value: object) -> None:
    if not callable(value):
        raise WrongType(call, argument, value, "it is not a function", f"{TO_PASS.get(argument, 'Pass a function')}.")


def _check_mesh(mesh: object) -> None:
    sizes = list(mesh.values()) if isinstance(mesh, Mapping) else []
    if not sizes or any(not isinstance(size, int) or isinstance(size, bool) or size < 1 for size in sizes):
        given = dict(mesh) if isinstance(mesh, Mapping) else mesh
        raise NotComparable(
            f"a mesh of {given!r}", "mesh", 'Give each axis a size of 1 or more, as {"dp": 2, "tp": 2}.'
        )


def _check(mesh: Mapping[str, int], axes: Sequence[str], steps: int, on: str) -> None:
    if on not in WAYS:
        raise NotComparable(f"{on!r} is no way to run", "on", f"Pass one of {', '.join(WAYS)}.")
    unknown = [axis for axis in axes if axis not in mesh]
    if unknown:
        raise NotComparable(
            f"no mesh axis is called {', '.join(unknown)}", "batch_axes", f"Name some of {', '.join(mesh)}."
        )
    if not isinstance(steps, int) or steps < 1:
        raise NotComparable(f"{steps} steps", "steps", "Give 1 or more.")


def _check_rows(program: programs.TrainingProgram, start: programs.Start) -> None:
    """Each part of the ranks along the batch axes needs a row of each batch."""
    for x in tree_leaves(start.batches):
        if isinstance(x, Tensor) and x.dim() and len(x) < program.parts:
            raise NotComparable(
                f"a tensor of {len(x)} rows, for {program.parts} parts along {', '.join(program.batch_axes)}", "batch",
                "Make a batch of at least as many rows, or name the axes along which it is cut as batch_axes.",
            )  # fmt: skip
