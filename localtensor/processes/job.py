"""What a real process does when `run` has sent it a rank's function: the same world as a rank thread has.

Generators, environment and switches are those that threads/state/swap.py gives a thread, from the same values.  The default
group is the pool's own.
"""

import os
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from localtensor._util.call_sites import named
from localtensor.collectives.argument_checks import must_fit
from localtensor.processes.worker import PATIENCE
from localtensor.threads.dist_patches import inside
from localtensor.threads.state.slots import FLAGS
from localtensor.threads.state.special_slots import torchrun_environment
from localtensor.threads.state.swap import OutsideState, RankState, switch

OWN = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")  # stay as the pool has set them: nothing leaves this machine


@dataclass(frozen=True, slots=True)
class Lost:
    """The function was not found here."""

    detail: str


@dataclass(frozen=True, slots=True)
class Home:
    """What a rank takes over from the process that called `run`."""

    seed: int
    device: str | None
    environ: Mapping[str, str]
    flags: Mapping[str, Any]


def home(seed: int, device: str | torch.device | None) -> Home:
    """What this process hands over to the ranks of a run."""
    flags = {slot.name: slot.save() for slot in FLAGS}
    return Home(seed, None if device is None else str(device), dict(os.environ), flags)


def live(function: bytes, mine: Home, *args: Any) -> Any:
    """One rank's life: what its function returns.  What it changed in this process is as it was before."""
    before = _groups()
    try:
        with OutsideState():
            try:
                fn = pickle.loads(function)
            except Exception as error:  # why: reading a function imports its module, which may raise anything
                return Lost(f"{type(error).__name__}: {error}")
            _move_in(mine)
            with inside(c10d.init_process_group, Initializer()):
                return fn(*[moved(value, mine.device) for value in args])
    finally:
        torch.set_default_device(None)
        torch.set_grad_enabled(True)
        if _groups() != before:
            dist.group.WORLD = None  # so the pool sees that this process is fit for no other job


def _groups() -> tuple[Any, ...]:
    world = c10d._world
    return dist.group.WORLD, world.group_count, tuple(world.pg_names.values())


def _move_in(mine: Home) -> None:
    """The process is as the caller's, but for what a rank has for itself."""
    for slot in FLAGS:
        slot.load(mine.flags[slot.name])
    own = {name: os.environ[name] for name in OWN if name in os.environ}
    state = RankState(dist.get_rank(), dist.get_world_size(), mine.seed)
    switch(None, state)
    wanted = {**mine.environ, **own, **torchrun_environment(state)}
    for name in {*os.environ} - {*wanted}:
        del os.environ[name]
    os.environ.update(wanted)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or 1))  # as rank threads do
    if mine.device is not None:
        torch.set_default_device(mine.device)


def moved(value: Any, device: str | torch.device | None) -> Any:
    """A tensor or module on that device; anything else as it is."""
    if device is None:
        return value
    if isinstance(value, torch.Tensor):
        return value.detach().to(device).requires_grad_(value.requires_grad)
    return value.to(device) if isinstance(value, torch.nn.Module) else value


class Initializer:
    """Stands in for init_process_group: the first call finds the group that is there already."""

    def __init__(self) -> None:
        self.implicit = True
        self.times = 0
        self.store = c10d._get_default_store()
        self.backend, self.rank, self.ranks = dist.get_backend(), dist.get_rank(), dist.get_world_size()

    def __call__(self, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        asked = named(original, args, kwargs)
        must_fit(asked, self.rank, self.ranks)
        implicit, self.implicit = self.implicit and dist.is_initialized(), False
        if implicit:
            return None
        if dist.is_initialized():
            return original(*args, **kwargs)  # refuses a second default group in its own words
        self.times += 1
        patience = c10d.timedelta(seconds=PATIENCE)
        store = dist.PrefixStore(f"again {self.times}", self.store)
        return original(self.backend, store=store, rank=self.rank, world_size=self.ranks, timeout=patience)
