"""The world of each rank: which process groups it has, as torch keeps them once per process.

A group is an ordinary `ProcessGroup` with torch's own fake backend under it, registered under the name
"localtensor"; `threads/process_group.py` serves its collectives.  A program that asks for gloo or nccl gets it too,
and `get_backend()` answers what it asked for.

torch's private parts that a simulation touches, here and in threads/process_group.py, collectives/c10d_table.py, threads/dist_patches.py and
threads/buffer_watch.py, are listed in `PRIVATE`; threads/rank_world.py and threads/state/shared_propagation.py have tables of their own.
"""

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.autograd import profiler
from torch.distributed import distributed_c10d as c10d

from localtensor._util.ambient import of_rank, running
from localtensor._util.call_sites import innermost
from localtensor._util.patching import OwnWorld, wrapped
from localtensor.collectives.rendezvous import Group, Line
from localtensor.errors import NotServed
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


# What torch keeps once per process and no hand-over can swap: made harmless while ranks share the process, or refused.
#
# torch.compile     Dynamo keeps what it compiled by code object and takes `get_rank()` for a constant: the second rank
#                   would run the first one's code.  So compiled functions run eagerly (`torch.compiler.set_stance`).
# torch.profiler    One profiler per process; a second one across a hand-over ends the process.  Refused by name.
# collect_all       Waits in C++, where no other rank can run.  Our futures are waited for first; so is the one that a
#                   communication hook of DistributedDataParallel returns.
# fake tensors      torch 2.11, built with CUDA and run without a GPU, keeps a stand-in for the missing device in memory of
#                   the thread that first made a fake tensor.  When that rank has ended, the next fake tensor kills the
#                   process.  So the thread that starts the ranks comes first.
# DTensor's cache   torch empties a thread's cache of shardings when the thread has ended, under a lock that each thread
#                   takes at its first op, and lets other threads run meanwhile: the next rank's first op then waits
#                   for ever.  So a rank empties its cache itself, as long as it runs alone.

# Private part of torch: why it is needed.  Tried on torch 2.11.0, 2.13.0 and 2.15.0.
PROCESS_GLOBALS_PRIVATE = {
    "torch.autograd.profiler.profile._prepare_trace": "what ends the profiler of another rank, on torch 2.11",
    "torch.autograd.profiler.profile._start_trace": "where every profiler of torch begins",
    "torch.distributed._register_comm_hook": "where the hooks of DistributedDataParallel pass into C++",
    "torch._dynamo.eval_frame._stance": "how compiled functions are called now, to be put back",
    "torch._C._ensureCUDADeviceGuardSet": "what the first fake tensor calls: here in a thread that outlives the ranks",
    "torch._C._clear_DTensor_sharding_propagator_cache": "of this thread, before it ends",
}


@contextmanager
def kept() -> Iterator[None]:
    """While inside, the limits above hold for all ranks; afterwards everything is as it was before."""
    guard_first()
    with ExitStack() as stack:
        stack.enter_context(_eagerly())
        stack.enter_context(_one_profiler())
        for name in ("collect_all", "wait_all"):
            stack.enter_context(wrapped(torch.futures, name, _settled_first))
        stack.enter_context(wrapped(dist, "_register_comm_hook", _settling_hook))
        yield


def guard_first() -> None:
    """Threads that end may make fake tensors from here on: this thread, which must outlive them, was first."""
    if torch.__version__.startswith("2.11.") and torch.version.cuda is not None and not torch.cuda.is_available():
        torch._C._ensureCUDADeviceGuardSet()


def rank_over() -> None:
    """What DTensor keeps of this thread's ops is gone: nothing is left for torch to free when the thread has ended."""
    clear = getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)  # not every torch has it
    if clear is not None and "torch.distributed.tensor" in sys.modules:
        clear()


def _settled_first(original: Callable[..., Any], futures: Any) -> Any:
    for future in futures:
        _settle(future)
    return original(futures)


def _settling_hook(original: Callable[..., Any], reducer: Any, state: Any, hook: Callable[..., Any]) -> Any:
    @functools.wraps(hook)
    def settled(*args: Any) -> Any:
        future = hook(*args)
        _settle(future)
        return future

    return original(reducer, state, settled)


def _settle(future: Any) -> None:
    """A future of ours is done; any other is left as it is."""
    settle = getattr(future, "settle", None)
    if settle is not None:
        settle()


@contextmanager
def _eagerly() -> Iterator[None]:
    """Compiled functions run as they were written.  torch's compiler is not imported for that: it takes a second."""
    with ExitStack() as stack:
        forced: list[None] = []

        def force() -> None:
            if not forced:
                forced.append(None)
                stack.enter_context(torch.compiler.set_stance("force_eager"))

        def compiling(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            compiled = original(*args, **kwargs)
            force()
            return compiled

        if "torch._dynamo" in sys.modules:
            force()
        stack.enter_context(wrapped(torch, "compile", compiling))
        yield


@contextmanager
def _one_profiler() -> Iterator[None]:
    owners: dict[Any, int] = {}

    def start(original: Callable[..., Any], self: Any) -> Any:
        rank = running().rank()  # type: ignore[union-attr]
        others = set(owners.values()) - {rank}
        if others:
            detail = f"rank {min(others)} profiles already, and torch has one profiler per process: let one rank do it"
            raise NotServed("torch.profiler", detail)
        owners[self] = rank
        return original(self)

    def leave(original: Callable[..., Any], self: Any, *exc: Any) -> Any:
        owners.pop(self, None)
        return original(self, *exc)

    with ExitStack() as stack:
        for name, around in (("_prepare_trace", start), ("_start_trace", start), ("__exit__", leave)):
            stack.enter_context(wrapped(profiler.profile, name, around))
        yield
