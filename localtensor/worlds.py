"""The world of each rank: which process groups it has, as torch keeps them once per process.

A group is an ordinary `ProcessGroup` with torch's own fake backend under it, registered under the name
"localtensor"; `process_group.py` serves its collectives.  A program that asks for gloo or nccl gets it too,
and `get_backend()` answers what it asked for.

torch's private parts are touched here and in process_group.py, and listed in `PRIVATE`.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias

import torch
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

from localtensor._context import running
from localtensor.errors import BadGroup, GroupMismatch, TorchChanged
from localtensor.events import Place
from localtensor.frames import origin
from localtensor.meetings import Group, Line
from localtensor.simulation import Simulation

c10d_cpp: Any = torch._C._distributed_c10d  # its stubs lag behind
BACKEND = "localtensor"
DEVICES = ("cpu", "cuda")
Made: TypeAlias = tuple[tuple[int, ...], Line]  # a group that the program made itself: its ranks, and where


# Private part of torch: why it is needed.  Tried on torch 2.13.0; read in the sources of 2.11 to 2.15.
PRIVATE = {
    "torch._C._distributed_c10d.FakeProcessGroup._create_internal": "a Backend that does nothing, under each group",
    "torch._C._distributed_c10d._set_thread_isolation_mode": "group names are looked up per thread",
    "torch._C._distributed_c10d._create_work_from_future": "a Work that is over",
    "torch.distributed.distributed_c10d._world": "which groups this rank has",
    "torch.distributed.distributed_c10d._World": "the class of that",
    "torch.distributed.distributed_c10d._new_process_group_helper": "every group is made here, and becomes ours",
    "torch.distributed.distributed_c10d._unregister_all_process_groups": "a rank's group names go when it ends",
    "torch._C._AutoDispatchBelowADInplaceOrView": "results are written as a backend writes them: unseen by autograd",
    "torch._C._DisableAutocast": "collectives compute in the tensors' own dtype",
    "torch._C._dispatch_get_all_op_names": "every c10d op is served, or refused by its name",
    "torch._C._dispatch_has_kernel_for_dispatch_key": "whether another backend's kernel stands there already",
}


class RankWorld(c10d._World):
    """The groups of one rank."""

    def __init__(self, simulation: Simulation, rank: int) -> None:
        super().__init__()
        self.group_count = 0
        self.simulation = simulation
        self.rank = rank
        self.implicit = False  # the default group was made by us, and the program has not asked for it
        self.epoch = 0  # how many default groups it has had: torch begins to count names anew with each
        self.groups: dict[Any, Group] = {}
        self.made: dict[str, Made] = {}


def _own(name: str) -> property:
    """A property whose value belongs to the object, where torch's belongs to the module."""

    def read(self: RankWorld) -> Any:
        return self.__dict__.setdefault(f"_own_{name}", {})

    def write(self: RankWorld, value: Any) -> None:
        self.__dict__[f"_own_{name}"] = value

    return property(read, write)


for _name, _value in vars(c10d._World).items():
    if isinstance(_value, property) and _name not in ("default_pg", "pg_coalesce_state", "comms", "pg_config_info"):
        setattr(RankWorld, _name, _own(_name))


def world_now() -> RankWorld | None:
    """The world of the rank that runs, or None outside of a simulation."""
    world = c10d._world
    simulation = running()
    return world if isinstance(world, RankWorld) and simulation is not None and simulation.is_rank() else None


# -- joining and leaving, in the rank's own thread


def join(world: RankWorld) -> None:
    """The rank has a default group of all ranks, as after init_process_group."""
    _init(world, "gloo")
    world.implicit = True


def leave(world: RankWorld) -> dict[str, Made]:
    """The rank has no group any more; the answer names those that the program made itself, and left."""
    left = {name: made for name, made in world.made.items() if name in world.pg_names.values()}
    world.simulation.kernels.leave(world.rank)
    c10d._unregister_all_process_groups()
    return left


def _init(world: RankWorld, shown: str) -> None:
    simulation = world.simulation
    hook = sys.excepthook
    try:
        _innermost(c10d.init_process_group)(
            backend=BACKEND, store=simulation.store, rank=world.rank, world_size=simulation.ranks
        )
    finally:
        sys.excepthook = hook  # torch puts its own there, with this rank's number
    _show(world, world.default_pg, shown)


def _show(world: RankWorld, group: Any, backend: str) -> None:
    _, store = world.pg_map[group]
    world.pg_map[group] = (backend, store)


# -- what stands in for torch's own functions while a simulation runs


def _init_process_group(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    world = world_now()
    if world is None:
        return original(*args, **kwargs)
    asked = _named(original, args, kwargs)
    for name, actual in (("world_size", world.simulation.ranks), ("rank", world.rank)):
        if asked.get(name, -1) not in (-1, actual):
            remedy = "Leave it out, or read it from the environment (RANK, WORLD_SIZE) as under torchrun."
            raise BadGroup("init_process_group", name, f"{name}={asked[name]}", f"this run has {actual}", remedy)
    shown = str(asked.get("backend") or "gloo")
    implicit, world.implicit = world.implicit and world.default_pg is not None, False
    if implicit:
        _show(world, world.default_pg, shown)
    elif world.default_pg is not None:
        return original(*args, **kwargs)  # refuses a second default group in its own words
    else:
        _init(world, shown)
    world.made[world.pg_names[c10d._get_default_group()]] = (tuple(range(world.simulation.ranks)), _user_line())
    return None


def _split_group(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Each rank gets the group of its part.  torch itself splits the communicators of NCCL only."""
    world = world_now()
    if world is None:
        return original(*args, **kwargs)
    asked = _named(original, args, kwargs)
    order = world.pg_group_ranks[asked.get("parent_pg") or c10d._get_default_group()]
    members = sorted(order, key=order.__getitem__)
    splits = asked.get("split_ranks")
    flat = [rank for split in splits or () for rank in split]
    if not splits or not all(splits) or len(set(flat)) != len(flat) or not set(flat) <= set(range(len(members))):
        problem = f"they must be lists of different ranks below {len(members)}, none of them empty"
        raise BadGroup("split_group", "split_ranks", f"split_ranks={splits}", problem, "Name each rank at most once.")
    for split in splits:
        ranks = [members[rank] for rank in sorted(split)]
        if world.rank in ranks:
            return c10d.new_group(ranks, use_local_synchronization=True, group_desc=asked.get("group_desc"))
    return None


def _new_group_helper(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Every group is made here, and becomes one of ours; ranks that disagree about it are told."""
    world = world_now()
    if world is None:
        return original(*args, **kwargs)
    asked = _named(original, args, kwargs)
    ranks = tuple(asked["global_ranks_in_group"] or ())
    if not ranks:
        world.epoch += 1
    name, shown = str(asked["group_name"]), str(asked["backend"])
    group = _declare(world, name, ranks or tuple(range(world.simulation.ranks)), default=not ranks)
    asked.update(backend=c10d.Backend(BACKEND), backend_options=None, device_id=None)
    process_group, store = original(**asked)
    if process_group in world.pg_map:
        world.groups[process_group] = group
        _show(world, process_group, "gloo" if shown in (BACKEND, "undefined") else shown)
    return process_group, store


def _declare(world: RankWorld, name: str, ranks: tuple[int, ...], *, default: bool) -> Group:
    """The rank makes a group of that name: all ranks must mean the same by it."""
    simulation, (line, by_program) = world.simulation, origin(sys._getframe(2))
    key = f"{world.epoch}/{name}"
    declared = simulation.declared.setdefault(key, {})
    declared[world.rank] = (ranks, line)
    if any(other != ranks for other, _ in declared.values()):
        places = {rank: None if where is None else Place(*where) for rank, (_, where) in declared.items()}
        simulation.fail(GroupMismatch(name, {rank: members for rank, (members, _) in declared.items()}, places))
    if world.rank in ranks and not default and by_program:
        world.made[name] = (ranks, line)
    return simulation.groups.setdefault(key, Group(name, ranks))


def _user_line() -> Line:
    return origin(sys._getframe(2)).line


def _create(options: Any, backend_options: Any = None) -> Any:
    """What torch asks of a registered backend: something to lie under the process group."""
    if world_now() is None:
        raise BadGroup(
            "init_process_group",
            "backend",
            f"backend={BACKEND!r}",
            "this backend lives inside a simulation only",
            "Call your function through localtensor.run(fn, ranks=...).",
        )
    return c10d_cpp.FakeProcessGroup._create_internal(options.group_rank, options.group_size)


# -- putting all that in place


@contextmanager
def installed() -> Iterator[None]:
    """torch.distributed is ours; afterwards everything is as it was before."""
    if not hasattr(c10d.Backend, BACKEND.upper()):
        c10d.Backend.register_backend(BACKEND, _create, extended_api=True, devices=list(DEVICES))
    with ExitStack() as stack:
        stack.enter_context(_set(c10d, "_world", c10d._world))
        stack.enter_context(_set(c10d, "_new_process_group_helper", _around(c10d._new_process_group_helper)))
        stack.enter_context(_inside(c10d.init_process_group, _init_process_group))
        stack.enter_context(_inside(c10d.split_group, _split_group))
        stack.enter_context(_set(DeviceMesh, "_thread_id", property(_mesh_owner, _own_mesh)))
        c10d_cpp._set_thread_isolation_mode(True)
        stack.callback(c10d_cpp._set_thread_isolation_mode, False)
        stack.callback(forget_meshes)
        yield


def forget_meshes() -> None:
    """torch's process-wide caches hold nothing of this simulation's meshes (keys) and ranks (values)."""
    tensor = "torch.distributed.tensor"  # who has not imported it has no such caches
    redistribute, utils = sys.modules.get(f"{tensor}._redistribute"), sys.modules.get(f"{tensor}._collective_utils")
    for owner, name in (
        (redistribute, "_gen_transform_infos"),
        (redistribute, "clear_redistribute_planner_cache"),
        (getattr(utils, "MeshTopoInfo", None), "build_from_mesh"),
    ):
        found = getattr(owner, name, None)
        if found is not None:
            getattr(found, "cache_clear", found)()


def _around(original: Callable[..., Any]) -> Callable[..., Any]:
    return functools.partial(_new_group_helper, original)


def _mesh_owner(mesh: DeviceMesh) -> Any:
    return mesh.__dict__.get("_thread_id")


def _own_mesh(mesh: DeviceMesh, value: Any) -> None:
    """A mesh belongs to one rank of one simulation: torch compares meshes by this, too, and caches by mesh."""
    world = world_now()
    mesh.__dict__["_thread_id"] = value if world is None else (world.simulation.serial, world.rank)


@contextmanager
def _set(owner: Any, name: str, value: Any) -> Iterator[None]:
    missing = object()
    before = vars(owner).get(name, missing)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is missing:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


def _innermost(function: Any) -> Callable[..., Any]:
    """The function within torch's logging decorators."""
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function  # type: ignore[no-any-return]


@contextmanager
def _inside(decorated: Any, ours: Callable[..., Any]) -> Iterator[None]:
    """Whoever has imported the decorated function reaches ours within the decorators."""
    original = _innermost(decorated)
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


def _named(function: Callable[..., Any], args: Any, kwargs: Any) -> dict[str, Any]:
    """The arguments by name."""
    return dict(inspect.signature(function).bind(*args, **kwargs).arguments)
