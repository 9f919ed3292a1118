"""The two programs of a comparison: one device and its variants, and all ranks, from equal parameters on equal batches."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from localtensor._util.call_sites import place_of_function
from localtensor._util.events import Call
from localtensor._util.module_names import plain_name
from localtensor._util.pickling import dumps
from localtensor.collectives.calls_seen import calls_seen
from localtensor.errors import NotComparable, RankRaised
from localtensor.runner.api import run
from localtensor.testing.compare.op_stream import recorded
from localtensor.testing.compare.pipelines import Pipeline, Stages, pipeline_of, reassembled
from localtensor.testing.compare.setup_lines import SetupLines
from localtensor.testing.compare.watch import (
    AFTER,
    ARGUMENTS,
    BACKWARD,
    FORWARD,
    IN_STEP,
    UPDATE,
    Key,
    Region,
    Watch,
    declared_dtype,
)
from localtensor.testing.compare_dropout import drawing, dropout_off
from localtensor.testing.compare_lockstep import REMEDY, LockstepWatch, in_lockstep
from localtensor.testing.compare_tolerance import Noise, Settled

DATA_AXES = ("dp", "ddp", "fsdp", "hsdp", "data", "batch", "replicate", "shard")
"""Words in the names of mesh axes along which each rank has a part of the batch."""


class _Arguments(nn.Module):
    """Takes the arguments of a function after its call, where a watch sees them: a function may write to them."""

    def forward(self, *args: Any) -> None:
        """Gives nothing."""


class FunctionModel(nn.Module):
    """A plain function in a module's place; its result, with numbers as tensors, is the output of the whole model."""

    def __init__(self, function: Callable[..., Any], **named: object) -> None:
        super().__init__()
        self.function, self.named = function, named
        self.add_module(ARGUMENTS, _Arguments())

    def forward(self, *args: Any) -> Any:
        result = self.function(*args, **self.named)
        self.get_submodule(ARGUMENTS)(*args)
        return tree_map(lambda x: torch.tensor(x) if isinstance(x, int | float | complex) else x, result)


def parallel_function(parallel: Callable[..., Any], model: nn.Module, mesh: Any, *, takes_mesh: bool) -> nn.Module:
    """The parallel function as a model; it gets the mesh if it takes one."""
    return FunctionModel(parallel, mesh=mesh) if takes_mesh else FunctionModel(parallel)


@dataclass(frozen=True)
class TrainingProgram:
    """What is compared: how to build the model on one device, make it parallel, and train it."""

    build: Callable[[], nn.Module]
    parallelize: Callable[[nn.Module, Any], nn.Module | None]
    batch: Callable[[], Any]
    mesh: Mapping[str, int]
    loss: Callable[[Any], Tensor] | None
    optimizer: Callable[..., torch.optim.Optimizer] | None
    steps: int
    batch_axes: tuple[str, ...]
    seed: int
    on: str = "threads"  # or "lockstep", "gloo", "nccl"

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(self.mesh.values())

    @property
    def ranks(self) -> int:
        return torch.Size(self.sizes).numel()

    @property
    def parts(self) -> int:
        """Into how many parts the batch is cut."""
        return torch.Size([self.mesh[axis] for axis in self.batch_axes]).numel()


def batch_axes_of(mesh: Mapping[str, int]) -> tuple[str, ...]:
    """The axes whose names say that ranks along them have different parts of the batch.

    >>> batch_axes_of({"dp_replicate": 2, "dp_shard": 2, "tp": 2})
    ('dp_replicate', 'dp_shard')
    """
    return tuple(name for name in mesh if any(word in DATA_AXES for word in name.lower().split("_")))


@dataclass(frozen=True)
class Start:
    """Where both programs start: the model on one device, and the batch of each step."""

    model: nn.Module
    batches: tuple[Any, ...]


def start_of(program: TrainingProgram) -> Start:
    """The model and the batches, made once from the seed."""
    with _seeded(program.seed):
        model = program.build()
        if not isinstance(model, nn.Module):
            raise NotComparable(f"it gives {type(model).__name__}", "build", "Return the model, a torch.nn.Module.")
        batches = tuple(_checked_batch(program.batch()) for _ in range(program.steps))
    return Start(model, batches)


def _checked_batch(batch: Any) -> Any:
    if isinstance(batch, list) or not any(isinstance(x, Tensor) for x in tree_leaves(batch)):
        raise NotComparable(
            f"it gives {type(batch).__name__}",
            "batch",
            "Return a tensor, a tuple of arguments, or a dict of named ones.",
        )
    return batch


def on_one_device(
    program: TrainingProgram,
    start: Start,
    vary: Callable[[Tensor], Tensor],
    region: Region | None = None,
    sink: Callable[[Key, Tensor], None] | None = None,
) -> Watch:
    """The run on one device; `vary` is applied to every parameter and input first (double precision, one-ulp noise).

    Noise is also entered.  `sink` gets each value, which is not kept then.
    """
    model = copy.deepcopy(start.model)
    with torch.no_grad():
        for parameter in [*model.parameters(), *model.buffers()]:
            parameter.data = vary(parameter.data)
    watch = Watch(region=region, causal=True, sink=sink)
    batches = [tree_map(lambda x: vary(x.clone()) if isinstance(x, Tensor) else x, batch) for batch in start.batches]
    with _seeded(program.seed), vary if isinstance(vary, Noise) else nullcontext():
        optimizer = _optimizer_of(program, model)
        _train(program, model, optimizer, batches, watch)
    _release(model, optimizer)
    return watch


def _release(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Frees the tensors of a run that has ended: a model may refer to itself, and would stay until it is collected."""
    for x in [*model.parameters(), *model.buffers()]:
        x.grad, x.data = None, x.data.new_empty(0)
    if optimizer is not None:
        optimizer.state.clear()


def on_ranks(
    program: TrainingProgram, start: Start, region: Region | None = None, settled: Settled | None = None
) -> tuple[tuple[Watch, ...], Sequence[Call]]:
    """The parallel run: the `Watch` of each rank, and the calls of collectives.

    Rank threads keep what is not the reference's only, if there is a `settled`.
    """
    given = (program, start.model.state_dict(), start.batches, region)
    pool: dict[Key, list[Tensor]] = {} if settled is None else settled.pool
    options: Any = {"ranks": program.ranks, "seed": program.seed}
    try:
        # A partial: ranks get no copies.  Replicas that differ are a divergence, with its reason.
        if program.on == "threads":
            trained = partial(_trained_rank, *given, pool, settled)
            ran = run(trained, leftovers="ignore", replicas="ignore", **options)
            return ran.values, ran.calls
        if program.on == "lockstep" and region is None:
            return _run_in_lockstep(program, start, pool, settled), ()
        if program.on == "lockstep":  # the ops of each rank are recorded where each rank has its own
            return on_ranks(replace(program, on="threads"), start, region)
        check_sendable(program)
        values = run(rank_process, *given, on=program.on, **options).values
        return tuple(watch for watch, _ in values), [call for _, calls in values for call in calls]
    except RankRaised as fault:
        if isinstance(fault.__cause__, NotComparable):  # each rank has found the same
            raise fault.__cause__ from None
        raise


def _run_in_lockstep(
    program: TrainingProgram, start: Start, pool: dict[Key, list[Tensor]], settled: Settled | None
) -> tuple[Watch, ...]:
    """The parallel run in one control flow; the watch of each rank."""
    kept = [None if settled is None else settled.of_rank(rank) for rank in range(program.ranks)]
    watch = LockstepWatch(ranks=tuple(Watch(pool=pool, kept=one) for one in kept))

    def run_all(watch: LockstepWatch, parts: Callable[..., Any]) -> None:
        with _seeded(program.seed):
            model, mesh = _built(program, start.model.state_dict())
            model, optimizer, pipeline = _parallelized(program, model, mesh)
            if pipeline is not None:
                raise NotComparable("a pipeline schedule, whose ranks do different things", "parallelize", REMEDY)
            watch.declared = declared_dtype(model)
            batches = [parts(partial(part_of, program, batch)) for batch in start.batches]
            _train(program, model, optimizer, batches, watch)

    in_lockstep(program.sizes, tuple(program.mesh), run_all, watch)
    return watch.by_rank()


def rank_process(
    program: TrainingProgram, state: Mapping[str, Tensor], batches: Sequence[Any], region: Region | None
) -> tuple[Watch, list[Call]]:
    """What a rank runs as a real process; returns what was seen of it, and its calls of collectives."""
    with dropout_off(), calls_seen() as calls:
        return _trained_rank(program, state, batches, region, {}), calls


def check_sendable(program: TrainingProgram) -> None:
    """Raises `NotComparable` for a function that real processes do not find by its module and name."""
    for argument in ("build", "parallelize", "batch", "loss", "optimizer"):
        function = getattr(program, argument)
        try:
            dumps(function)
        except Exception as error:  # why: pickling what a function is bound to runs its own code
            raise NotComparable(
                f"a real process does not find it: {error}", argument,
                "Pass a function at the top level of a module; a lambda is found on rank threads only.",
            ) from error  # fmt: skip


def _trained_rank(
    program: TrainingProgram, state: Mapping[str, Tensor], batches: Sequence[Any], region: Region | None,
    pool: dict[Key, list[Tensor]], settled: Settled | None = None,
) -> Watch:  # fmt: skip
    lines, (model, mesh) = SetupLines(), _built(program, state)
    with lines.watched() if region is not None else nullcontext():
        model, optimizer, pipeline = _parallelized(program, model, mesh)
    coordinates = dict(zip(program.mesh, mesh.get_coordinate() or (), strict=True))
    setup = lines.by_name(model, plain_name)
    watch = Watch(region=region, declared=declared_dtype(model), setup=setup, pool=pool)
    watch.kept = None if settled is None else settled.of_rank(mesh.get_rank())
    if pipeline is not None:
        pipeline.watch(watch)
    _train(program, model, optimizer, [part_of(program, batch, coordinates) for batch in batches], watch, pipeline)
    return reassembled(watch.finished())


def _built(program: TrainingProgram, state: Mapping[str, Tensor]) -> tuple[nn.Module, Any]:
    """The model with the one device's parameters, and the mesh: of the GPU if they lie there."""
    from torch.distributed.device_mesh import init_device_mesh

    model = program.build()
    device = "cuda" if any(parameter.is_cuda for parameter in model.parameters()) else "cpu"
    mesh = init_device_mesh(device, program.sizes, mesh_dim_names=tuple(program.mesh))
    _load(model, state)
    return model, mesh


def _parallelized(
    program: TrainingProgram, model: nn.Module, mesh: Any
) -> tuple[nn.Module, torch.optim.Optimizer | None, Pipeline | None]:
    """The parallel model, its optimizer, and the pipeline if it is one."""
    made = program.parallelize(model, mesh)
    _check_made(made)
    pipeline = pipeline_of(made)
    model = Stages(pipeline.stages) if pipeline is not None else made if isinstance(made, nn.Module) else model
    return model, _optimizer_of(program, model), pipeline


def part_of(program: TrainingProgram, batch: Any, coordinates: Mapping[str, int]) -> Any:
    """The rows of a global batch for the rank at these coordinates."""
    number = 0
    for axis in program.batch_axes:
        number = number * program.mesh[axis] + coordinates[axis]
    parts = program.parts

    def cut(x: Any) -> Any:
        return x.tensor_split(parts)[number].clone() if isinstance(x, Tensor) and x.dim() else copy.deepcopy(x)

    return tree_map(cut, batch)


def _load(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Gives the model the parameters of the one device.  Raises `NotComparable` if it has others."""
    own = model.state_dict()
    other = [
        name for name in (*state, *own) if name not in own or name not in state or own[name].shape != state[name].shape
    ]
    if other:
        here, there = (
            f"of shape {tuple(one[other[0]].shape)}" if other[0] in one else "missing" for one in (own, state)
        )
        raise NotComparable(
            f"on a rank {other[0]} is {here}, and on one device {there}", "build",
            "Build the same model everywhere; what depends on the rank belongs in `parallelize`.",
        )  # fmt: skip
    model.load_state_dict(state)


def _check_made(made: object) -> None:
    if made is not None and not isinstance(made, nn.Module) and pipeline_of(made) is None:
        raise NotComparable(
            f"it gives {type(made).__name__}", "parallelize", "Return the model, a pipeline schedule, or nothing."
        )


def _optimizer_of(program: TrainingProgram, model: nn.Module) -> torch.optim.Optimizer | None:
    made = None if program.optimizer is None else program.optimizer(model.parameters())
    if made is not None and not isinstance(made, torch.optim.Optimizer):
        raise NotComparable(f"it gives {type(made).__name__}", "optimizer", "Return a torch.optim.Optimizer.")
    return made


def _train(
    program: TrainingProgram,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    batches: Sequence[Any],
    watch: Watch,
    pipeline: Pipeline | None = None,
) -> None:
    if optimizer is not None:
        optimizer.register_step_pre_hook(lambda *_: watch.parameters(model, IN_STEP))
    watch.parameters(model, "parameter")
    with watch.model(model), recorded(watch), drawing(watch.drop) as draws:
        for step, batch in enumerate(batches):
            watch.step = step
            if step:
                watch.buffers(model)
            with watch.phase(FORWARD):
                loss = _forward(program, model, batch, pipeline)
                watch.add(
                    "loss", "", loss, place=place_of_function(program.loss if pipeline is None else pipeline.loss)
                )
            if program.loss is None:
                continue
            with watch.phase(BACKWARD):
                if pipeline is None and loss is not None:
                    loss.backward()
                watch.parameters(model, "gradient")
            if optimizer is not None:
                with watch.phase(UPDATE):
                    optimizer.step()
                    watch.optimizer_state(optimizer, model)
                    watch.parameters(model, AFTER)
                optimizer.zero_grad()
            else:
                model.zero_grad()
        watch.step = len(batches)
        watch.buffers(model)
    watch.draws, watch.seeds = draws.others, torch.initial_seed() != program.seed


def _forward(program: TrainingProgram, model: nn.Module, batch: Any, pipeline: Pipeline | None) -> Tensor | None:
    """The loss; a pipeline goes backward, too."""
    if pipeline is not None:
        return pipeline.step(batch)
    output = call_model(model, batch)
    loss = None if program.loss is None else program.loss(output)
    if program.loss is not None and not (isinstance(loss, Tensor) and loss.numel() == 1):
        found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise NotComparable(f"it gives {found}", "loss", "Return one number, as by .mean().")
    return loss


def call_model(model: nn.Module, batch: Any) -> Any:
    """The model's output: a tuple is its positional arguments, a dict its named ones."""
    if isinstance(batch, dict):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple) else model(batch)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """torch's and Python's generators from this seed; afterwards as they were."""
    before = random.getstate()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        random.seed(seed)
        try:
            yield
        finally:
            random.setstate(before)
