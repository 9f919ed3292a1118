"""The job of a real process: a rank's function from `run`, in the same state as a rank thread has.

Generators, environment and switches start from the same values as in threads/state/swap.py.  The default group is the
pool's own.
"""

import os
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from localtensor._util.call_sites import bound_arguments
from localtensor.collectives.argument_checks import check_init_arguments
from localtensor.processes.worker import GROUP_TIMEOUT
from localtensor.threads.cores import threads_per_op
from localtensor.threads.dist_patches import patched_inside_decorators
from localtensor.threads.state.slots import FLAGS
from localtensor.threads.state.special_slots import torchrun_environment
from localtensor.threads.state.swap import OutsideState, RankState, switch

_POOL_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")  # as the pool sets them: loopback only


@dataclass(frozen=True, slots=True)
class FunctionNotFound:
    """The result of a process that does not find the function."""

    detail: str


@dataclass(frozen=True, slots=True)
class CallerState:
    """The state that a rank takes over from the process that called `run`."""

    seed: int
    device: str | None
    environ: Mapping[str, str]
    flags: Mapping[str, Any]


def caller_state(seed: int, device: str | torch.device | None) -> CallerState:
    """The state of this process, for the ranks of a run."""
    flags = {slot.name: slot.save() for slot in FLAGS}
    return CallerState(seed, None if device is None else str(device), dict(os.environ), flags)


def run_job(function: bytes | Callable[..., Any], mine: CallerState, *args: object) -> object:
    """Run a rank's function (pickled or not) on `args`, and restore this process; returns its result or `FunctionNotFound`."""
    before = _group_state()
    try:
        with OutsideState():
            try:
                fn = pickle.loads(function) if isinstance(function, bytes) else function
            except Exception as error:  # why: reading a function imports its module, which may raise anything
                return FunctionNotFound(f"{type(error).__name__}: {error}")
            _enter_caller_state(mine)
            with patched_inside_decorators(c10d.init_process_group, InitProcessGroupStandIn()):
                return fn(*[to_device(value, mine.device) for value in args])
    finally:
        torch.set_default_device(None)
        torch.set_grad_enabled(True)
        if _group_state() != before:
            dist.group.WORLD = None  # so the pool sees that this process cannot take another job


def _group_state() -> tuple[Any, ...]:
    world = c10d._world
    return dist.group.WORLD, world.group_count, tuple(world.pg_names.values())


def _enter_caller_state(mine: CallerState) -> None:
    """Give this process the caller's state, except for what is a rank's own."""
    for slot in FLAGS:
        slot.load(mine.flags[slot.name])
    own = {name: os.environ[name] for name in _POOL_VARIABLES if name in os.environ}
    state = RankState(dist.get_rank(), dist.get_world_size(), mine.seed)
    switch(None, state)
    wanted = {**mine.environ, **own, **torchrun_environment(state.rank, state.ranks)}
    for name in {*os.environ} - {*wanted}:
        del os.environ[name]
    os.environ.update(wanted)
    torch.set_num_threads(threads_per_op())  # as rank threads do
    if mine.device is not None:
        if (
            torch.device(mine.device).type == "cuda"
        ):  # else DeviceMesh chooses the GPU by LOCAL_RANK; ranks may share one
            torch.cuda.set_device(state.rank % torch.cuda.device_count())
        torch.set_default_device(mine.device)


def to_device(value: object, device: str | torch.device | None) -> Any:
    """A tensor or module on that device; anything else, or None as the device, unchanged."""
    if device is None:
        return value
    if isinstance(value, torch.Tensor):
        return value.detach().to(device).requires_grad_(value.requires_grad)
    return value.to(device) if isinstance(value, torch.nn.Module) else value


class InitProcessGroupStandIn:
    """Replaces init_process_group: the first call finds the pool's default group already initialised."""

    def __init__(self) -> None:
        self.implicit = True
        self.calls = 0
        self.store = c10d._get_default_store()
        self.backend, self.rank, self.ranks = dist.get_backend(), dist.get_rank(), dist.get_world_size()

    def __call__(self, original: Callable[..., None], *args: object, **kwargs: object) -> None:
        check_init_arguments(bound_arguments(original, args, kwargs), self.rank, self.ranks)
        implicit, self.implicit = self.implicit and dist.is_initialized(), False
        if implicit:
            return None
        if dist.is_initialized():
            return original(*args, **kwargs)  # refuses a second default group in its own words
        self.calls += 1
        patience = c10d.timedelta(seconds=GROUP_TIMEOUT)
        store = dist.PrefixStore(f"again {self.calls}", self.store)
        return original(self.backend, store=store, rank=self.rank, world_size=self.ranks, timeout=patience)
