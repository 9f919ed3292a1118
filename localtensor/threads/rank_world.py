"""Process-global state of torch under rank threads: each rank's process groups, and parts that ranks cannot share.

A group is an ordinary `ProcessGroup` with torch's own fake backend under it, registered under the name "localtensor";
`threads/process_group.py` serves its collectives.  A program that requests gloo or nccl gets it too, and
`get_backend()` returns what was requested.

Other parts that torch keeps once per process cannot be swapped at a hand-over.  They are made harmless, or refused:

torch.compile     Dynamo keeps compiled code by code object and takes `get_rank()` for a constant: the second rank would
                  run the first one's code.  So compiled functions run eagerly (`torch.compiler.set_stance`).
torch.profiler    One tracer per process; a second one across a hand-over ends the process.  A rank that profiles while
                  another does gets torch's recorder of its own thread.
collect_all       Waits in C++, where no other rank can run.  Our futures are waited for first; so is the one that a
                  communication hook of DistributedDataParallel returns.
fake tensors      torch 2.11, built with CUDA and run without a GPU, keeps a stand-in for the missing device in memory
                  of the thread that first made a fake tensor.  When that rank has ended, the next fake tensor kills
                  the process.  So the thread that starts the ranks makes it first.
DTensor's cache   torch empties a thread's cache of shardings after the thread has ended, under a lock that each thread
                  takes at its first op, and lets other threads run meanwhile: the next rank's first op then hangs.
                  So a rank empties its cache itself, while it runs alone.

`PRIVATE` lists torch's private parts that a simulation touches, here and in threads/process_group.py,
collectives/c10d_table.py, threads/dist_patches.py and threads/buffer_watch.py.
"""

import functools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.autograd import profiler
from torch.autograd.profiler_legacy import _parse_legacy_records as parse_legacy_records
from torch.autograd.profiler_util import EventList
from torch.distributed import distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel

from localtensor._util.ambient import simulation_of_this_rank
from localtensor._util.call_sites import undecorated
from localtensor._util.patching import IndependentWorld, wrapped
from localtensor.collectives.rendezvous import Group, Line
from localtensor.errors import NotServed
from localtensor.threads.simulation import Simulation

c10d_cpp: Any = torch._C._distributed_c10d  # its stubs lag behind
BACKEND = "localtensor"
DEVICES = ("cpu", "cuda")
EVENT_PREFIXES = ("gloo:", "nccl:")  # of the names of collectives in a profile
MadeGroup: TypeAlias = tuple[tuple[int, ...], Line]  # its ranks, and the line that made it

# Private part of torch: why it is needed.  Tried on torch 2.11.0, 2.13.0 and 2.15.0; read in the sources of 2.12 and 2.14.
PRIVATE = {
    "torch._C._distributed_c10d.FakeProcessGroup._create_internal": "a Backend that does nothing, under each group",
    "torch._C._distributed_c10d._set_thread_isolation_mode": "group names are looked up per thread",
    "torch._C._distributed_c10d._create_work_from_future": "a completed Work",
    "torch.Tensor._reduce_ex_internal": "what pickles a plain tensor: a read that no mode sees, by buffer_watch",
    "torch.distributed.distributed_c10d._world": "which groups this rank has",
    "torch.distributed.distributed_c10d._World": "the class of that",
    "torch.distributed.distributed_c10d._new_process_group_helper": "every group is made here, and becomes a simulated one",
    "torch.distributed.distributed_c10d._create_process_group_wrapper": "what DETAIL puts around a group: not here",
    "torch.distributed.ProcessGroup._get_backend": "the backend of a device is of the requested type, and is served",
    "torch.distributed.ProcessGroup._get_backend_name": "the name of the requested backend",
    "torch.distributed.ProcessGroup._get_sequence_number_for_group": "how many calls a group has made, as gloo counts",
    "torch.distributed.distributed_c10d._unregister_all_process_groups": "a rank's group names go when it ends",
    "torch._C._AutoDispatchBelowADInplaceOrView": "results are written as a backend writes them: unseen by autograd",
    "torch._C._DisableAutocast": "collectives compute in the tensors' own dtype",
    "torch._C._DisableTorchDispatch": "results are written unseen by dispatch modes",
    "torch.distributed.distributed_c10d._get_default_group": "which group a split begins with",
    "torch.library.Library._destroy": "restores torch's own kernels",
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
    "torch._C._dispatch_get_all_op_names": "every c10d op is served, or refused by name",
    "torch._C._dispatch_has_kernel_for_dispatch_key": "whether another backend has a kernel for the op",
}


class RankWorld(IndependentWorld):
    """The process groups of one rank."""

    def __init__(self, simulation: Simulation, rank: int) -> None:
        super().__init__()
        self.simulation = simulation
        self.rank = rank
        self.implicit = False  # the default group was made by us, and the program has not requested it
        self.epoch = 0  # the number of default groups so far: with each, torch numbers the groups from 0 again
        self.direct = 0  # the number of groups that the program has made without `new_group`
        self.groups: dict[Any, Group] = {}
        self.made: dict[str, MadeGroup] = {}


def world_now() -> RankWorld | None:
    """The world of the running rank, or None outside a simulation."""
    world = c10d._world
    return world if isinstance(world, RankWorld) and simulation_of_this_rank() is not None else None


def groups_of_rank() -> dict[tuple[int, ...], str]:
    """The groups of the running rank, a thread or a process, by their ranks, in order, with the description of each."""
    found: dict[tuple[int, ...], str] = {}
    for group, ranks in c10d._world.pg_group_ranks.items():
        found.setdefault(tuple(sorted(ranks)), str(getattr(group, "group_desc", "") or ""))
    return found


def set_time_limit(world: RankWorld, group: Group, timeout: object) -> None:
    """Note a time limit of the program's own; torch's default is none."""
    if isinstance(timeout, timedelta) and timeout != c10d.default_pg_timeout:
        group.timeouts[world.rank] = timeout.total_seconds()


def leave_groups(world: RankWorld) -> dict[str, MadeGroup]:
    """Remove all groups of the rank, in its own thread; returns those that the program made and did not destroy."""
    left = {name: made for name, made in world.made.items() if name in world.pg_names.values()}
    world.simulation.kernels.leave(world.rank)
    c10d._unregister_all_process_groups()
    return left


def init_default_group(world: RankWorld, shown: str) -> None:
    """Make the default group of a rank, of all ranks; `shown` is the backend that the program asks for."""
    simulation = world.simulation
    hook = sys.excepthook
    try:
        undecorated(c10d.init_process_group)(
            backend=BACKEND, store=simulation.store, rank=world.rank, world_size=simulation.ranks
        )
    finally:
        sys.excepthook = hook  # torch replaces it, with this rank's number
    set_shown_backend(world, world.default_pg, shown)


def set_shown_backend(world: RankWorld, group: Any, backend: str) -> None:
    """Let the group's backend and its configuration be those that the program has requested."""
    _, store = world.pg_map[group]
    world.pg_map[group] = (backend, store)
    world.pg_backend_config[group] = str(c10d.BackendConfig(c10d.Backend(backend)))


# Private part of torch: why it is needed.  Tried on torch 2.11.0, 2.13.0 and 2.15.0.
PROCESS_GLOBALS_PRIVATE = {
    "torch.autograd.profiler.profile._prepare_trace": "what ends the profiler of another rank, on torch 2.11",
    "torch.autograd._enable_profiler_legacy": "the recorder of one thread, for every further rank that profiles",
    "torch.autograd._disable_profiler_legacy": "its records",
    "torch.autograd.profiler_legacy._parse_legacy_records": "its records as events",
    "torch.autograd.profiler_util.EventList._build_tree": "where collectives become asynchronous events",
    "torch._C._profiler._RecordFunctionFast": "an event of a collective, with its inputs",
    "torch.autograd.profiler.profile._start_trace": "where every profiler of torch begins",
    "torch.distributed._register_comm_hook": "where the hooks of DistributedDataParallel pass into C++",
    "torch.nn.parallel.DistributedDataParallel._get_ddp_logging_data": "the name of the backend, which C++ does not know",
    "torch._dynamo.eval_frame._stance": "how compiled functions are called now, to be put back",
    "torch._C._ensureCUDADeviceGuardSet": "what the first fake tensor calls: here in a thread that outlives the ranks",
    "torch._C._clear_DTensor_sharding_propagator_cache": "of this thread, before it ends",
}


@contextmanager
def process_globals_guarded() -> Iterator[None]:
    """Inside the block the process-global parts above are made harmless; afterwards everything is restored."""
    if torch.__version__.startswith("2.11.") and torch.version.cuda is not None and not torch.cuda.is_available():
        torch._C._ensureCUDADeviceGuardSet()  # for fake tensors of the ranks: this thread outlives theirs
    with ExitStack() as stack:
        stack.enter_context(_without_compiling())
        stack.enter_context(_profilers_of_ranks())
        for name in ("collect_all", "wait_all"):
            stack.enter_context(wrapped(torch.futures, name, _wait_all_settled))
        stack.enter_context(wrapped(dist, "_register_comm_hook", _register_hook))
        stack.enter_context(wrapped(DistributedDataParallel, "_get_ddp_logging_data", _logging_data))
        yield


def clear_sharding_cache() -> None:
    """Clear DTensor's cache of this thread, so that torch has nothing to free after the thread has ended."""
    clear = getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)  # not every torch has it
    if clear is not None and "torch.distributed.tensor" in sys.modules:
        clear()


def _wait_all_settled(original: Callable[..., Any], futures: Sequence[Any]) -> object:
    for future in futures:
        _settle(future)
    return original(futures)


def _register_hook(original: Callable[..., Any], reducer: object, state: object, hook: Callable[..., Any]) -> object:
    @functools.wraps(hook)
    def settled(*args: object) -> object:
        future = hook(*args)
        _settle(future)
        return future

    return original(reducer, state, settled)


GLOO_THREADS = 2  # of gloo's groups, unless the program asks for others


def _logging_data(original: Callable[..., dict[str, Any]], module: DistributedDataParallel) -> dict[str, Any]:
    """What DistributedDataParallel logs: C++ finds a backend called "custom" there."""
    data, world = original(module), world_now()
    if world is None or module.process_group not in world.groups:
        return data
    data["backend_name"] = c10d.get_backend(module.process_group)
    if data["backend_name"] == "gloo":
        names = ("GLOO_SOCKET_IFNAME", "GLOO_DEVICE_TRANSPORT")
        data.update({name.lower(): os.environ.get(name, "N/A") for name in names}, gloo_num_threads=GLOO_THREADS)
    return data


def _settle(future: object) -> None:
    """Wait for a future of ours; any other is left as it is."""
    settle = getattr(future, "settle", None)
    if settle is not None:
        settle()


@contextmanager
def _without_compiling() -> Iterator[None]:
    """Compiled functions run eagerly.  torch's compiler is not imported for that, because it takes a second."""
    with ExitStack() as stack:

        def force() -> None:
            """For the rank that runs: where ranks are isolated, what torch's compiler keeps in a global is each rank's own."""
            from torch._dynamo import eval_frame  # lazy: it takes a second

            if eval_frame._stance.stance != "force_eager":
                stack.enter_context(torch.compiler.set_stance("force_eager"))

        def compiling(original: Callable[..., Any], *args: object, **kwargs: object) -> object:
            compiled = original(*args, **kwargs)
            force()
            return compiled

        if "torch._dynamo" in sys.modules:
            force()
        stack.enter_context(wrapped(torch, "compile", compiling))
        yield


class _RankTrace:
    """What stands for the trace of a profile that torch's per-process tracer has not made."""

    def __init__(self, profile: Any) -> None:
        self._profile = profile

    def save(self, path: str) -> None:
        self._profile.function_events.export_chrome_trace(path)

    def __getattr__(self, name: str) -> Any:
        detail = (
            "another rank profiles, and torch has one tracer per process: let one rank profile, or ask for its events"
        )
        raise NotServed(f"torch.profiler: {name}", detail)


@contextmanager
def _profilers_of_ranks() -> Iterator[None]:
    """The first rank that profiles has torch's tracer, of which a process has one; the others its recorder of a thread."""
    tracing: dict[Any, int] = {}  # by profile
    recording: set[Any] = set()

    def prepare(original: Callable[..., Any], self: Any) -> object:
        simulation = simulation_of_this_rank()
        if simulation is None:
            return original(self)
        rank = simulation.rank()
        if self in recording or set(tracing.values()) - {rank}:
            recording.add(self)
            self.entered = True
            return None
        tracing[self] = rank
        return original(self)

    def start(original: Callable[..., Any], self: Any) -> object:
        simulation = simulation_of_this_rank()
        if simulation is None:
            return original(self)
        simulation.kernels.profiling.add(simulation.rank())
        if self not in recording:
            tracing[self] = simulation.rank()
            return original(self)
        torch.autograd._enable_profiler_legacy(
            torch._C._profiler.ProfilerConfig(
                torch._C._profiler.ProfilerState.CPU,
                self.record_shapes,
                self.profile_memory,
                self.with_stack,
                self.with_flops,
                self.with_modules,
                torch._C._profiler._ExperimentalConfig(),
            )
        )
        return None

    def leave(original: Callable[..., Any], self: Any, *exc: object) -> object:
        simulation = simulation_of_this_rank()
        if simulation is not None:
            simulation.kernels.profiling.discard(simulation.rank())
        tracing.pop(self, None)
        if self not in recording:
            return original(self, *exc)
        recording.discard(self)
        before = self._function_events if self.acc_events else None
        events = parse_legacy_records(torch.autograd._disable_profiler_legacy())
        self._function_events = EventList(events, profile_memory=self.profile_memory, with_flops=self.with_flops)
        self._function_events._build_tree()
        self._function_events.extend(before or ())
        self.kineto_results, self._needs_processing = _RankTrace(self), False
        return False

    with ExitStack() as stack:
        for name, around in (("_prepare_trace", prepare), ("_start_trace", start), ("__exit__", leave)):
            stack.enter_context(wrapped(profiler.profile, name, around))
        stack.enter_context(wrapped(EventList, "_build_tree", _build_tree))
        yield


def _build_tree(original: Callable[..., None], events: Any) -> None:
    """Collectives are asynchronous, as on gloo, where another thread makes them."""
    for event in events:
        event.is_async = event.is_async or event.name.startswith(EVENT_PREFIXES)
    original(events)
