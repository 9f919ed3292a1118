"""`compare`: does a parallel program compute what one device computes, and where does it first go wrong?"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from localtensor.errors import Diverged, NotComparable, WrongType
from localtensor.testing.compare import programs
from localtensor.testing.compare.divergence import Divergence, Findings, Sides, first_divergence
from localtensor.testing.compare.watch import Watch

ONE_DEVICE = "one device"
MOST_COLLECTIVES = 8  # lines of collectives that a report of a divergence shows


@dataclass(frozen=True)
class Comparison:
    """What was compared, and with which layout; what was not, and why; the first divergence, or None.

    `layouts` gives each observation's layout, such as "S(0), R", by its name.  `collectives` are those of the first rank, by
    line.  `notes` say what was changed for the
    comparison (dropout that was switched off).  `reference` is what the program was compared with: one device, or a script.
    """

    mesh: Mapping[str, int]
    layouts: Mapping[str, str]
    not_compared: Mapping[str, str]
    divergence: Divergence | None
    call: str | None
    collectives: tuple[str, ...]
    notes: tuple[str, ...]
    reference: str = ONE_DEVICE

    def __str__(self) -> str:
        return self._named(self._text())

    def _named(self, text: str) -> str:
        """A text that speaks of one device, with what the reference is."""
        return text.replace(ONE_DEVICE, self.reference)

    def as_json(self) -> dict[str, Any]:
        """What was compared, and the divergence, as values that json writes."""
        found = self.divergence
        divergence = None if found is None else {
            "step": found.key.step, "kind": found.key.kind, "name": found.key.name, "call": found.key.call,
            "value": str(found.key), "place": None if found.place is None else str(found.place),
            "layout": found.layout, "because": self._named(found.what), "values": self._named(found.values),
            "inner_call": None if self.call is None else self._named(self.call),
        }  # fmt: skip
        return {
            "version": 1, "reference": self.reference, "mesh": dict(self.mesh), "equal": found is None,
            "divergence": divergence, "compared": dict(self.layouts), "not_compared": dict(self.not_compared),
            "collectives": list(self.collectives), "notes": list(self.notes), "text": str(self),
        }  # fmt: skip

    def _text(self) -> str:
        mesh = ", ".join(f"{name}={size}" for name, size in self.mesh.items())
        lines = []
        if self.divergence is not None:
            d = self.divergence
            lines.append(f"compare on {mesh}: the parallel program differs from one device")
            lines.append(f"  first at  {d.key}{f', {d.place}' if d.place else ''}")
            lines += [f"  call      {self.call}"] if self.call else []
            lines.append(f"  because   {d.what}")
            lines.append(f"  values    {d.values}")
            if d.layout:
                lines.append(f"  assembles as {d.layout}")
            last = list(self.layouts.items())[-1:]
            lines += [f"  right before it: {name} as {layout}" for name, layout in last]
            lines += [f"  calls     {one}" for one in self.collectives[:MOST_COLLECTIVES]]
            more = len(self.collectives) - MOST_COLLECTIVES
            lines += [f"            and {more} more lines"] if more > 0 else []
        else:
            lines.append(f"compare on {mesh}: the parallel program computes what one device computes")
        lines.append(f"  compared  {len(self.layouts)} values; not compared: {len(self.not_compared)}")
        reasons = Counter(self.not_compared.values())
        lines += [f"    {count} of which {reason}" for reason, count in reasons.most_common(4)]
        return "\n".join([*lines, *(f"  note      {note}" for note in self.notes)])


def compare(
    build: Callable[[], nn.Module],
    parallelize: Callable[[nn.Module, Any], nn.Module | None],
    batch: Callable[[], Any],
    *,
    mesh: Mapping[str, int],
    loss: Callable[[Any], Tensor] | None = None,
    optimizer: Callable[..., torch.optim.Optimizer] | None = None,
    steps: int = 1,
    batch_axes: Sequence[str] | None = None,
    seed: int = 0,
) -> Comparison:
    """Compare a parallel program with the same model on one device; returns what was compared.

    build        makes the model on one device; called with the same seed on every rank
    parallelize  gets that model, with the one device's parameters, and the DeviceMesh of the rank; changes it in place, or
                 returns another (DDP, FSDP, tensor parallel, layers written by hand)
    batch        makes one global batch: a tensor, a tuple of arguments, or a dict of named ones
    mesh         the mesh axes and their sizes, as {"dp": 2, "tp": 2}
    loss         from the model's output to a scalar; without it only the forward pass is compared
    optimizer    from the parameters to an optimizer, as torch.optim.AdamW
    batch_axes   the mesh axes along which each rank gets its rows of the batch: those named dp, fsdp, data and the like

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
      compared  10 values; not compared: 0
    """
    if not isinstance(mesh, Mapping):
        raise WrongType("compare", "mesh", mesh, "it names no axes", 'Give each axis a size, as {"dp": 2, "tp": 2}.')
    for argument, value in (("build", build), ("parallelize", parallelize), ("batch", batch)):
        _check_callable("compare", argument, value)
    axes = programs.batch_axes_of(mesh) if batch_axes is None else tuple(batch_axes)
    _check(mesh, axes, steps)
    program = programs.TrainingProgram(build, parallelize, batch, dict(mesh), loss, optimizer, steps, axes, seed)
    start = programs.start_of(program)
    findings, calls = _judge(program, start, None)
    call = first_call(lambda deep: _judge(program, start, deep)[0], findings)
    done = Comparison(
        dict(mesh),
        {str(key): str(layout) for key, layout in findings.layouts.items()},
        {str(key): why for key, why in findings.not_compared.items()},
        findings.divergence,
        call,
        calls,
        tuple(f"dropout of {name} is off" for name in start.dropouts),
    )
    if findings.divergence is not None:
        raise Diverged(str(done), done)
    if not findings.layouts:
        raise NotComparable(
            "nothing was compared", "the ranks", "Give `build` and `parallelize` the same names of modules."
        )
    return done


class _Function(nn.Module):
    """A plain function in a module's place; its result is the output of the whole model."""

    def __init__(self, function: Callable[..., Any], **named: object) -> None:
        super().__init__()
        self.function, self.named = function, named

    def forward(self, *args: Any) -> Any:
        return self.function(*args, **self.named)


def compare_functions(
    reference: Callable[..., Any],
    parallel: Callable[..., Any],
    inputs: Callable[[], tuple[Any, ...]],
    *,
    mesh: Mapping[str, int],
    loss: Callable[[Any], Tensor] | None = None,
    seed: int = 0,
) -> Comparison:
    """Compare a function that every rank runs with another that runs on one device, both on equal inputs.

    `inputs` makes the arguments, whole on every rank; `parallel` gets the DeviceMesh too if it has a parameter `mesh`.  Results are
    compared as those of `compare` are: a result may be replicated, a shard, or a declared partial value.  Raises as `compare` does.

    >>> def halves(x, mesh):
    ...     mine = x.chunk(2)[mesh.get_rank()].sum(0)
    ...     return mine  # the all_reduce is missing
    >>> compare_functions(lambda x: x.sum(0), halves, lambda: (torch.arange(8.0).view(4, 2),), mesh={"dp": 2})
    Traceback (most recent call last):
    localtensor.errors.programs.Diverged: compare on dp=2: the parallel program differs from one device
      first at  output of the whole model, step 0
      because   an all_reduce over dp is missing
      values    2 where one device gives 12 at [0]; 2 of 2 elements differ, by more than 0.0029
      assembles as P(sum)
      right before it: input of the whole model, step 0 as R
      compared  1 values; not compared: 0
    """
    for argument, value in (("reference", reference), ("parallel", parallel), ("inputs", inputs)):
        _check_callable("compare_functions", argument, value)
    takes_mesh = "mesh" in inspect.signature(parallel).parameters

    def made_parallel(model: nn.Module, device_mesh: Any) -> nn.Module:
        return _Function(parallel, mesh=device_mesh) if takes_mesh else _Function(parallel)

    return compare(lambda: _Function(reference), made_parallel, inputs, mesh=mesh, loss=loss, batch_axes=(), seed=seed)


def _judge(
    program: programs.TrainingProgram, start: programs.Start, deep: str | None
) -> tuple[Findings, tuple[str, ...]]:
    same = lambda x: x  # noqa: E731
    reference = programs.on_one_device(program, start, same, deep)
    again = programs.on_one_device(program, start, same, deep)
    check_deterministic(reference, again)
    variants = tuple(
        programs.on_one_device(program, start, vary, deep)
        for vary in (programs.in_double, programs.with_noise(1), programs.with_noise(2))
    )
    ranks = programs.on_ranks(program, start, deep)
    sides = Sides(reference, variants, tuple(ranks), program.mesh, program.batch_axes)
    return first_divergence(sides), programs.collective_lines(program.mesh, ranks.calls)


def first_call(judge: Callable[[str], Findings], findings: Findings) -> str | None:
    """The call of torch inside the module that goes wrong, with its line: both programs run once more for it.

    `judge` compares them once more, and each call of torch inside the module of this name as well.
    """
    found = findings.divergence
    if found is None or found.key.kind not in ("input", "output"):
        return None
    inner = judge(found.key.name if found.key.kind == "output" else found.key.name.rpartition(".")[0]).divergence
    if inner is None or not inner.key.kind.startswith("call of"):
        return None
    return f"{inner.key.kind.removeprefix('call of ')}{f', {inner.place}' if inner.place else ''}: {inner.what}"


def check_deterministic(first: Watch, second: Watch, argument: str = "build, batch and loss") -> None:
    """Raises `NotComparable` if two runs of the reference from one seed saw different values."""
    for key, one in first.seen.items():
        other = second.seen.get(key)
        if other is None or not torch.equal(one.value.nan_to_num(), other.value.nan_to_num()):
            raise NotComparable(
                f"{key} on one device differs between two runs from one seed", argument,
                "Take all randomness from torch's generator, and leave no state behind.",
            )  # fmt: skip


def _check_callable(call: str, argument: str, value: object) -> None:
    if not callable(value):
        raise WrongType(call, argument, value, "it is not a function", "Pass one, as the docstring says.")


def _check(mesh: Mapping[str, int], axes: Sequence[str], steps: int) -> None:
    if not mesh or any(not isinstance(size, int) or size < 1 for size in mesh.values()):
        raise NotComparable(
            f"a mesh of {dict(mesh)}", "mesh", 'Give each axis a size of 1 or more, as {"dp": 2, "tp": 2}.'
        )
    unknown = [axis for axis in axes if axis not in mesh]
    if unknown:
        raise NotComparable(
            f"no mesh axis is called {', '.join(unknown)}", "batch_axes", f"Name some of {', '.join(mesh)}."
        )
    if steps < 1:
        raise NotComparable(f"{steps} steps", "steps", "Give 1 or more.")
