"""Replacements of torch.distributed's own functions while a simulation runs.

A function that a program has imported by name is replaced as well, inside torch's logging decorators.
"""

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import torch.distributed.autograd
import torch.distributed.nn.functional  # binds the default group of its arguments now, when there is none
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

from localtensor._util.call_sites import bound_arguments, origin, undecorated
from localtensor._util.events import Place
from localtensor._util.patching import replaced, wrapped
from localtensor.collectives.argument_checks import check_init_arguments
from localtensor.collectives.rendezvous import Group
from localtensor.errors import BadGroup, GroupMismatch, NotServed, TorchChanged
from localtensor.threads import rank_world
from localtensor.threads.store import RankStore, file_store, tcp_store

STORES: dict[type[Any], Callable[..., RankStore]] = {
    torch.distributed.TCPStore: tcp_store,
    torch.distributed.FileStore: file_store,
    torch.distributed.HashStore: RankStore,  # of the ranks and threads that refer to it; torch's would stop them all
}
FAKE = "fake"  # torch's backend that does nothing; used as it is


def _init_process_group(original: Callable[..., None], *args: object, **kwargs: object) -> None:
    world = rank_world.world_now()
    if world is None:
        return original(*args, **kwargs)
    arguments = bound_arguments(original, args, kwargs)
    shown = str(arguments.get("backend") or "gloo")
    if shown.lower() == FAKE:
        if world.implicit and world.default_pg is not None:
            c10d.destroy_process_group()
        world.implicit = False
        return original(*args, **kwargs)
    check_init_arguments(arguments, world.rank, world.simulation.ranks)
    _check_backend(shown)
    implicit, world.implicit = world.implicit and world.default_pg is not None, False
    if implicit:
        rank_world.set_shown_backend(world, world.default_pg, shown)
    elif world.default_pg is not None:
        return original(*args, **kwargs)  # refuses a second default group in its own words
    else:
        rank_world.init_default_group(world, shown)
    set_time_limit(world, world.groups[c10d._get_default_group()], arguments.get("timeout"))
    line = origin(sys._getframe(1)).line
    world.made[world.pg_names[c10d._get_default_group()]] = (tuple(range(world.simulation.ranks)), line)
    return None


def _split_group(original: Callable[..., Any], *args: object, **kwargs: object) -> object:
    """Each rank gets the group of its split.  torch itself splits only NCCL's communicators."""
    world = rank_world.world_now()
    if world is None:
        return original(*args, **kwargs)
    arguments = bound_arguments(original, args, kwargs)
    order = world.pg_group_ranks[arguments.get("parent_pg") or c10d._get_default_group()]
    members = sorted(order, key=order.__getitem__)
    splits = arguments.get("split_ranks")
    flat = [rank for split in splits or () for rank in split]
    if not splits or not all(splits) or len(set(flat)) != len(flat) or not set(flat) <= set(range(len(members))):
        problem = f"they must be lists of different ranks below {len(members)}, none of them empty"
        raise BadGroup("split_group", "split_ranks", f"split_ranks={splits}", problem, "Name each rank at most once.")
    for split in splits:
        ranks = [members[rank] for rank in sorted(split)]
        if world.rank in ranks:
            return c10d.new_group(ranks, use_local_synchronization=True, group_desc=arguments.get("group_desc"))
    return None


def _new_group_helper(original: Callable[..., Any], *args: object, **kwargs: object) -> object:
    """Every group is made here, and becomes a simulated one; ranks that disagree about it raise `GroupMismatch`."""
    world = rank_world.world_now()
    if world is None:
        return original(*args, **kwargs)
    arguments = bound_arguments(original, args, kwargs)
    if str(arguments["backend"]).lower() == FAKE:
        return original(*args, **kwargs)
    ranks = tuple(arguments["global_ranks_in_group"] or ())
    if not ranks:
        world.epoch += 1
    name, shown = str(arguments["group_name"]), str(arguments["backend"])
    _check_backend(shown)
    group = _declare_group(
        world, name, ranks or tuple(range(world.simulation.ranks)), arguments.get("timeout"), default=not ranks
    )
    arguments.update(backend=c10d.Backend(rank_world.BACKEND), backend_options=None, device_id=None)
    process_group, store = original(**arguments)
    if process_group in world.pg_map:
        world.groups[process_group] = group
        rank_world.set_shown_backend(
            world, process_group, "gloo" if shown in (rank_world.BACKEND, "undefined") else shown
        )
    return process_group, store


def new_store(make: Callable[..., object], kind: type[Any], *args: object, **kwargs: object) -> object:
    """A store of the simulation for a rank; for any other thread torch's own, which its constructor then fills."""
    world = rank_world.world_now()
    if world is None or kind not in STORES:  # a subclass of the user's
        return torch.distributed.Store.__new__(kind)
    return make(world.simulation, *args, **kwargs)


_DIRECT = "localtensor/direct"  # keys of groups that the program makes without `new_group`, in the store that it gives


def _gloo_group(
    kind: type[Any],
    store: torch.distributed.Store,
    rank: int,
    size: int,
    timeout: object = None,
) -> object:
    """`ProcessGroupGloo(store, rank, size)` in a rank: a simulated group of the ranks that have named this store.

    Its members find each other by the store, as on gloo; `rank` is the number in the group.
    """
    world = rank_world.world_now()
    if world is None:
        return torch.distributed.ProcessGroup.__new__(kind)
    world.direct += 1
    members: tuple[int, ...] = (world.rank,)
    name = f"direct/{world.rank}/{world.direct}"
    if size > 1:
        key = f"{_DIRECT}/{store.add(f'{_DIRECT}/{rank}', 1)}"  # a store may serve several groups in turn
        if rank == 0:
            store.set(f"{key}/name", name)
        store.set(f"{key}/{rank}", str(world.rank))
        members = tuple(int(store.get(f"{key}/{other}")) for other in range(size))
        name = store.get(f"{key}/name").decode()
    group = torch.distributed.ProcessGroup(store, rank, size)
    backend, custom = rank_world.c10d_cpp.FakeProcessGroup._create_internal(rank, size), group.BackendType.CUSTOM
    group._set_default_backend(custom)
    for device in rank_world.DEVICES:
        group._register_backend(torch.device(device), custom, backend)
    group._set_group_name(c10d.GroupName(name))
    world.groups[group] = world.simulation.groups.setdefault(
        f"{world.epoch}/{name}", Group(name, members, axes=world.simulation.axes)
    )
    limit = getattr(timeout, "_timeout", timeout)
    set_time_limit(world, world.groups[group], limit)
    return group


_BACKEND_TYPES = {"gloo": "ProcessGroupGloo", "nccl": "ProcessGroupNCCL"}  # where this torch is built with them


class RankBackend:
    """The backend of one device of a simulated group: for `isinstance` of the type of the requested backend.

    Its collectives are those of the group.  Anything else is answered by the idle backend, which is `_idle`.
    """

    def __init__(self, group: torch.distributed.ProcessGroup, idle: Any, name: str) -> None:
        self._group, self._idle, self._name = group, idle, name
        kind = getattr(torch.distributed, _BACKEND_TYPES.get(name, ""), None)
        self._kind: Any = kind or torch.distributed.distributed_c10d.Backend
        self.supports_splitting = name in _BACKEND_TYPES
        self.supports_coalescing = self.supports_time_estimate = name == "nccl"

    @property  # type: ignore[misc]  # what isinstance() asks, after the type
    def __class__(self) -> type:
        return self._kind  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> Any:
        owner = self._group if hasattr(torch.distributed.ProcessGroup, name) else self._idle
        return getattr(owner, name)

    def name(self) -> str:
        return self._name

    _get_backend_name = name

    @property
    def options(self) -> Any:
        make = getattr(self._kind, "_Options" if self._name == "gloo" else "Options", None)
        if make is None:
            return self._idle.options
        options, world = make(), rank_world.world_now()
        seconds = None if world is None else world.groups[self._group].timeouts.get(world.rank)
        if seconds is not None:
            options._timeout = timedelta(seconds=seconds)
        return options

    def _set_default_timeout(self, timeout: timedelta) -> None:
        world = rank_world.world_now()
        if world is not None:
            set_time_limit(world, world.groups[self._group], timeout)

    set_timeout = _set_default_timeout


def _backend_of_device(
    original: Callable[..., Any], group: torch.distributed.ProcessGroup, device: torch.device
) -> object:
    """The idle backend's collectives would return their inputs in silence: those of the group are served."""
    idle, world = original(group, device), rank_world.world_now()
    if world is None or group not in world.groups:
        return idle
    shown = world.pg_map[group][0] if group in world.pg_map else "gloo"
    by_device = c10d.BackendConfig(c10d.Backend(shown)).get_device_backend_map()
    return RankBackend(group, idle, by_device.get(torch.device(device).type, shown))


def _sequence_number(original: Callable[..., int], group: torch.distributed.ProcessGroup) -> int:
    """The number of calls that the rank has made in the group, as gloo counts them."""
    world = rank_world.world_now()
    if world is None or group not in world.groups:
        return original(group)
    return world.groups[group].calls_made.get(world.rank, 0)


def _start_coalescing(original: Callable[..., None], group: torch.distributed.ProcessGroup, device: object) -> None:
    """`_coalescing_manager(device=...)`, which only NCCL has."""
    world = rank_world.world_now()
    if world is not None and group in world.groups:
        raise RuntimeError(f"Backend {_group_name_of_backend(str, group)} does not implement startCoalescing")
    original(group, device)


def _refuse_rpc(original: Callable[..., object], *args: object, **kwargs: object) -> object:
    if rank_world.world_now() is None:
        return original(*args, **kwargs)
    raise NotServed("torch.distributed.rpc.init_rpc", "torch has one RPC agent per process")


def _group_name_of_backend(original: Callable[..., str], group: torch.distributed.ProcessGroup) -> str:
    """The name of the requested backend, in Python.  In C++ it stays "custom": DistributedDataParallel casts a group called "gloo"."""
    world = rank_world.world_now()
    if world is None or group not in world.groups:
        return original(group)
    return world.pg_map[group][0] if group in world.pg_map else "gloo"


def _without_wrapper_group(
    original: Callable[..., Any], wrapped_pg: torch.distributed.ProcessGroup, *args: object, **kwargs: object
) -> object:
    """No wrapper group: with TORCH_DISTRIBUTED_DEBUG=DETAIL torch would compare the ranks' calls, which we do anyway."""
    return original(wrapped_pg, *args, **kwargs) if rank_world.world_now() is None else wrapped_pg


def _check_backend(backend: str) -> None:
    """Check that torch has the backend, or each backend of "cpu:gloo,cuda:nccl".  Raises `BadGroup`."""
    for part in backend.split(","):
        name = part.rpartition(":")[2].lower()
        if name not in c10d.Backend.backend_list:
            known = ", ".join(sorted({*c10d.Backend.backend_list} - {rank_world.BACKEND, c10d.Backend.UNDEFINED}))
            problem = f"torch knows no backend {name!r}"
            raise BadGroup("new_group", "backend", f"backend={backend!r}", problem, f"Name one of {known}.")


def _declare_group(
    world: rank_world.RankWorld, name: str, ranks: tuple[int, ...], timeout: object, *, default: bool
) -> Group:
    """The group that the rank makes under this name; all ranks must give it the same members, or each itself alone."""
    simulation, (line, by_program, _) = world.simulation, origin(sys._getframe(2))
    key = f"{world.epoch}/{name}"
    declared = simulation.declared.setdefault(key, {})
    declared[world.rank] = (() if default else ranks, line)
    alone = ranks == (world.rank,) and all(members == (rank,) for rank, (members, _) in declared.items())
    if not alone and any(other != declared[world.rank][0] for other, _ in declared.values()):
        places = {rank: None if where is None else Place(*where) for rank, (_, where) in declared.items()}
        simulation.fail(GroupMismatch(name, {rank: members for rank, (members, _) in declared.items()}, places))
    if world.rank in ranks and not default and by_program:
        world.made[name] = (ranks, line)
    group = simulation.groups.setdefault(
        f"{key}/{ranks[0]}" if alone else key, Group(name, ranks, axes=simulation.axes)
    )
    set_time_limit(world, group, timeout)
    return group


def set_time_limit(world: rank_world.RankWorld, group: Group, timeout: object) -> None:
    """Note a time limit of the program's own; torch's default is none."""
    if isinstance(timeout, timedelta) and timeout != c10d.default_pg_timeout:
        group.timeouts[world.rank] = timeout.total_seconds()


def _create_backend(options: c10d._DistributedBackendOptions, backend_options: object = None) -> object:
    """The constructor of the registered backend: an idle backend under the simulated process group."""
    if rank_world.world_now() is None:
        problem = "this backend lives inside a simulation only"
        remedy = "Call your function through localtensor.run(fn, ranks=...)."
        raise BadGroup("init_process_group", "backend", f"backend={rank_world.BACKEND!r}", problem, remedy)
    return rank_world.c10d_cpp.FakeProcessGroup._create_internal(options.group_rank, options.group_size)


@contextmanager
def patched_torch_distributed() -> Iterator[None]:
    """Inside the block torch.distributed is replaced; afterwards everything is restored."""
    if not hasattr(c10d.Backend, rank_world.BACKEND.upper()):
        c10d.Backend.register_backend(
            rank_world.BACKEND, _create_backend, extended_api=True, devices=list(rank_world.DEVICES)
        )
    with ExitStack() as stack:
        stack.enter_context(replaced(c10d, "_world", c10d._world))
        helper = functools.partial(_new_group_helper, c10d._new_process_group_helper)
        stack.enter_context(replaced(c10d, "_new_process_group_helper", helper))
        stack.enter_context(wrapped(c10d, "_create_process_group_wrapper", _without_wrapper_group))
        for kind, make in STORES.items():
            stack.enter_context(replaced(kind, "__new__", functools.partial(new_store, make)))
        if hasattr(torch.distributed.autograd, "_init"):  # the first step of init_rpc that changes the process
            stack.enter_context(wrapped(torch.distributed.autograd, "_init", _refuse_rpc))
        for name in ("name", "_get_backend_name"):
            stack.enter_context(wrapped(torch.distributed.ProcessGroup, name, _group_name_of_backend))
        stack.enter_context(wrapped(torch.distributed.ProcessGroup, "_get_backend", _backend_of_device))
        stack.enter_context(wrapped(torch.distributed.ProcessGroup, "_get_sequence_number_for_group", _sequence_number))
        stack.enter_context(wrapped(torch.distributed.ProcessGroup, "_start_coalescing", _start_coalescing))
        if hasattr(torch.distributed, "ProcessGroupGloo"):
            stack.enter_context(replaced(torch.distributed.ProcessGroupGloo, "__new__", _gloo_group))
        if hasattr(c10d, "_maybe_attach_flight_recorder"):  # since 2.15: one per process, it warns of further ranks
            stack.enter_context(replaced(c10d, "_maybe_attach_flight_recorder", lambda *args, **kwargs: None))
        stack.enter_context(patched_inside_decorators(c10d.init_process_group, _init_process_group))
        stack.enter_context(patched_inside_decorators(c10d.split_group, _split_group))
        stack.enter_context(
            replaced(DeviceMesh, "_thread_id", property(lambda mesh: mesh.__dict__.get("_thread_id"), _set_mesh_owner))
        )
        rank_world.c10d_cpp._set_thread_isolation_mode(True)
        stack.callback(rank_world.c10d_cpp._set_thread_isolation_mode, False)
        stack.callback(clear_mesh_caches)
        yield


def clear_mesh_caches() -> None:
    """Clear torch's process-wide caches, whose keys are meshes and whose values depend on the rank."""
    tensor = "torch.distributed.tensor"  # without it there are no such caches
    redistribute, utils = sys.modules.get(f"{tensor}._redistribute"), sys.modules.get(f"{tensor}._collective_utils")
    for owner, name in (
        (redistribute, "_gen_transform_infos"),
        (redistribute, "clear_redistribute_planner_cache"),
        (getattr(utils, "MeshTopoInfo", None), "build_from_mesh"),
    ):
        found = getattr(owner, name, None)
        if found is not None:
            getattr(found, "cache_clear", found)()


def _set_mesh_owner(mesh: DeviceMesh, value: object) -> None:
    """A mesh belongs to one rank of one simulation: torch compares meshes by this, and caches by mesh."""
    world = rank_world.world_now()
    mesh.__dict__["_thread_id"] = value if world is None else (world.simulation.serial, world.rank)
    if world is not None:
        _note_axes(mesh, world)


def _note_axes(mesh: DeviceMesh, world: rank_world.RankWorld) -> None:
    """Notes which ranks lie along each axis of a mesh with this rank: the first name that a mesh gives them stays."""
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():  # the user's modes see nothing of it
        ranks = np.asarray(mesh.mesh.tolist())
    at = np.argwhere(ranks == world.rank)
    for axis, size in enumerate(ranks.shape if len(at) else ()):
        along = tuple(int(rank) for rank in np.moveaxis(ranks, axis, -1)[tuple(np.delete(at[0], axis))])
        if size > 1 or ranks.ndim == 1:
            name = mesh._mesh_dim_names[axis] if mesh._mesh_dim_names else f"dim {axis}"
            world.simulation.axes.setdefault(along, name)


@contextmanager
def patched_inside_decorators(decorated: Any, ours: Callable[..., Any]) -> Iterator[None]:
    """Inside the block the decorated function calls `ours(original, ...)` within its decorators.  Raises `TorchChanged`."""
    original = undecorated(decorated)
    while decorated is not original:
        for cell in decorated.__closure__ or ():
            if cell.cell_contents is original:
                cell.cell_contents = functools.update_wrapper(functools.partial(ours, original), original)
                try:
                    yield
                finally:
                    cell.cell_contents = original
                return
        decorated = decorated.__wrapped__
    raise TorchChanged(
        f"torch.distributed.{original.__name__}", "it is no longer wrapped in torch's logging decorators"
    )
