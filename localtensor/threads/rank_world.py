"""The world of each rank: which process groups it has, as torch keeps them once per process.

A group is an ordinary `ProcessGroup` with torch's own fake backend under it, registered under the name
"localtensor"; `threads/process_group.py` serves its collectives.  A program that asks for gloo or nccl gets it too,
and `get_backend()` answers what it asked for.

torch's private parts that a simulation touches, here and in threads/process_group.py, collectives/c10d_registration.py, threads/dist_patches.py and
threads/buffer_watch.py, are listed in `PRIVATE`; threads/process_globals.py and threads/state/shared_propagation.py have tables of their own.
"""

import sys
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch.distributed import distributed_c10d as c10d

from localtensor._util.ambient import of_rank
from localtensor._util.own_world import OwnWorld
from localtensor.collectives.rendezvous import Group, Line
from localtensor.threads.simulation import Simulation

c10d_cpp: Any = torch._C._distributed_c10d  # its stubs lag behind
BACKEND = "localtensor"
DEVICES = ("cpu", "cuda")
Made: TypeAlias = tuple[tuple[int, ...], Line]  # a group that the program made itself: its ranks, and where


# Private part of torch: why it is needed.  Tried on torch 2.11.0, 2.13.0 and 2.15.0; read in the sources of 2.12 and 2.14.
PRIVATE = {
    "torch._C._distributed_c10d.FakeProcessGroup._create_internal": "a Backend that does nothing, under each group",
    "torch._C._distributed_c10d._set_thread_isolation_mode": "group names are looked up per thread",
    "torch._C._distributed_c10d._create_work_from_future": "a Work that is over",
    "torch.distributed.distributed_c10d._world": "which groups this rank has",
    "torch.distributed.distributed_c10d._World": "the class of that",
    "torch.distributed.distributed_c10d._new_process_group_helper": "every group is made here, and becomes ours",
    "torch.distributed.distributed_c10d._create_process_group_wrapper": "what DETAIL puts around a group: not here",
    "torch.distributed.distributed_c10d._unregister_all_process_groups": "a rank's group names go when it ends",
    "torch._C._AutoDispatchBelowADInplaceOrView": "results are written as a backend writes them: unseen by autograd",
    "torch._C._DisableAutocast": "collectives compute in the tensors' own dtype",
    "torch._C._DisableTorchDispatch": "results are written unseen by dispatch modes",
    "torch.distributed.distributed_c10d._get_default_group": "which group a split begins with",
    "torch.library.Library._destroy": "torch's own kernels stand there again",
    "torch._C.DispatchKeySet": "how another backend's kernel is called",
    "torch.utils._python_dispatch._get_current_dispatch_mode_stack": "the watch lies below the modes of the user",
    "torch.utils._python_dispatch._pop_mode": "to put it there",
    "torch.utils._python_dispatch._push_mode": "to put it there",
    "torch.utils._python_dispatch.TorchDispatchMode._should_skip_dynamo": "no compiler is imported for the watch",
    "torch.overrides._get_current_function_mode_stack": "the same for function modes",
    "torch.overrides._pop_mode": "the same for function modes",
    "torch.overrides._push_mode": "the same for function modes",
    "torch._C._get_dispatch_mode": "whether a fake mode is on, in which nothing in flight is read or written",
    "torch._C._TorchDispatchModeKey": "the name of that mode",
    "torch._C.DisableTorchFunction": "what a collective does in Python is unseen by function modes",
    "torch._C._dispatch_get_all_op_names": "every c10d op is served, or refused by its name",
    "torch._C._dispatch_has_kernel_for_dispatch_key": "whether another backend's kernel stands there already",
}


class RankWorld(OwnWorld):
    """The groups of one rank."""

    def __init__(self, simulation: Simulation, rank: int) -> None:
        super().__init__()
        self.simulation = simulation
        self.rank = rank
        self.implicit = False  # the default group was made by us, and the program has not asked for it
        self.epoch = 0  # how many default groups it has had: torch begins to count names anew with each
        self.groups: dict[Any, Group] = {}
        self.made: dict[str, Made] = {}


def world_now() -> RankWorld | None:
    """The world of the rank that runs, or None outside of a simulation."""
    world = c10d._world
    return world if isinstance(world, RankWorld) and of_rank() is not None else None


# -- joining and leaving, in the rank's own thread


def join(world: RankWorld) -> None:
    """The rank has a default group of all ranks, as after init_process_group."""
    init(world, "gloo")
    world.implicit = True


def leave(world: RankWorld) -> dict[str, Made]:
    """The rank has no group any more; the answer names those that the program made itself, and left."""
    left = {name: made for name, made in world.made.items() if name in world.pg_names.values()}
    world.simulation.kernels.leave(world.rank)
    c10d._unregister_all_process_groups()
    return left


def init(world: RankWorld, shown: str) -> None:
    simulation = world.simulation
    hook = sys.excepthook
    try:
        innermost(c10d.init_process_group)(
            backend=BACKEND, store=simulation.store, rank=world.rank, world_size=simulation.ranks
        )
    finally:
        sys.excepthook = hook  # torch puts its own there, with this rank's number
    show(world, world.default_pg, shown)


def show(world: RankWorld, group: Any, backend: str) -> None:
    _, store = world.pg_map[group]
    world.pg_map[group] = (backend, store)


def innermost(function: Any) -> Callable[..., Any]:
    """The function within torch's logging decorators."""
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function  # type: ignore[no-any-return]
