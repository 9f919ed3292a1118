"""Replacements of torch.distributed's own functions while a simulation runs.

A function that a program has imported by name is replaced as well, inside torch's logging decorators.
"""

import functools
import inspect
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
from localtensor.threads.direct_groups import RankBackend, direct_groups
from localtensor.threads.store import RankStore, file_store, tcp_store

STORES: dict[type[Any], Callable[..., RankStore]] = {
    torch.distributed.TCPStore: tcp_store,
    torch.distributed.FileStore: file_store,
    torch.distributed.HashStore: RankStore,  # of the ranks and threads that refer to it; torch's would stop them all
}
THREADED = "threaded"  # a group of torch's own tests, which names itself; C++ calls all other registered ones "custom"
FAKE = "fake"  # torch's backend that does nothing; used as it is


def _init_process_group(original: Callable[..., None], *args: object, **kwargs: object) -> None:
    world = rank_world.world_now()
    if world is None:
        return original(*args, **kwargs)
    arguments = bound_arguments(original, args, kwargs)
    shown = str(arguments.get("backend") or "gloo")
    if _serves_itself(shown):
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
    rank_world.set_time_limit(world, world.groups[c10d._get_default_group()], arguments.get("timeout"))
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
    if _serves_itself(str(arguments["backend"])):
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


def _set_timeout(original: Callable[..., None], group: torch.distributed.ProcessGroup, timeout: timedelta) -> None:
    world = rank_world.world_now()
    if world is None or group not in world.groups:
        original(group, timeout)
    else:
        rank_world.set_time_limit(world, world.groups[group], timeout)


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


_OF_TORCH = ("gloo", "nccl", "ucc", "mpi", "xccl")  # since 2.15 torch registers these as it does a program's


def _group_name_of_backend(original: Callable[..., str], group: torch.distributed.ProcessGroup) -> str:
    """The name of the requested backend, in Python.  In C++ it stays "custom": DistributedDataParallel casts a group called "gloo"."""
    world = rank_world.world_now()
    if world is None or group not in world.groups:
        return original(group)
    shown = world.pg_map[group][0] if group in world.pg_map else "gloo"
    custom = str(shown).upper() in c10d.Backend._plugins and shown not in (THREADED, *_OF_TORCH)
    return "custom" if custom else shown


def _without_wrapper_group(
    original: Callable[..., Any], wrapped_pg: torch.distributed.ProcessGroup, *args: object, **kwargs: object
) -> object:
    """No wrapper group: with TORCH_DISTRIBUTED_DEBUG=DETAIL torch would compare the ranks' calls, which we do anyway."""
    return original(wrapped_pg, *args, **kwargs) if rank_world.world_now() is None else wrapped_pg


def _serves_itself(backend: str) -> bool:
    """Whether no simulation stands for the backend: torch's fake one, or one that the program has registered and written in Python."""
    names = {part.rpartition(":")[2].lower() for part in backend.split(",")}
    makers = [c10d.Backend._plugins[name.upper()].creator_fn for name in names if name.upper() in c10d.Backend._plugins]
    own = [make for make in makers if inspect.isfunction(make)]
    return names == {FAKE} or any(make.__module__.partition(".")[0] not in ("torch", "localtensor") for make in own)


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
    """The group that the rank makes under this name; all ranks must give it the same members, or one member each.

    A group of one rank waits for no other, so those of one name do not meet: on gloo, too, each is by itself.
    """
    simulation, (line, by_program, _) = world.simulation, origin(sys._getframe(2))
    key = f"{world.epoch}/{name}"
    declared = simulation.declared.setdefault(key, {})
    declared[world.rank] = (() if default else ranks, line)
    alone = all(len(members) == 1 for members, _ in declared.values())
    if not alone and any(other != declared[world.rank][0] for other, _ in declared.values()):
        places = {rank: None if where is None else Place(*where) for rank, (_, where) in declared.items()}
        simulation.fail(GroupMismatch(name, {rank: members for rank, (members, _) in declared.items()}, places))
    if world.rank in ranks and not default and by_program:
        world.made[name] = (ranks, line)
    group = simulation.groups.setdefault(
        f"{key}/{ranks[0]}" if alone else key, Group(name, ranks, axes=simulation.axes)
    )
    rank_world.set_time_limit(world, group, timeout)
    return group


def _create_backend(options: c10d._DistributedBackendOptions, backend_options: object = None) -> object:
    """The constructor of the registered backend: an idle backend under the simulated process group."""
    if rank_world.world_now() is None:
        problem = "this backend lives inside a simulation only"
        remedy = "Call your function through localtensor.run(fn, ranks=...)."
        raise BadGroup("init_process_group", "backend", f"backend={rank_world.BACKEND!r}", problem, remedy)
    return rank_world.c10d_cpp.FakeProcessGroup._create_internal(options.group_rank, options.group_size)


def register_backend() -> None:
    """Register the backend under the groups of ranks; before their states are made, which have a copy of the table."""
    if not hasattr(c10d.Backend, rank_world.BACKEND.upper()):
        c10d.Backend.register_backend(
            rank_world.BACKEND, _create_backend, extended_api=True, devices=list(rank_world.DEVICES)
        )


@contextmanager
def patched_torch_distributed() -> Iterator[None]:
    """Inside the block torch.distributed is replaced; afterwards everything is restored."""
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
        if hasattr(torch.distributed.ProcessGroup, "set_timeout"):  # since 2.15
            stack.enter_context(wrapped(torch.distributed.ProcessGroup, "set_timeout", _set_timeout))
        stack.enter_context(direct_groups())
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
