"""What stands in for torch.distributed's own functions while a simulation runs.

A function that a program has imported by name is reached as well: ours goes inside torch's logging decorators.
"""

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch.distributed.nn.functional  # noqa: F401  # binds the default group of its arguments now, when there is none
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

from localtensor._util.call_sites import innermost, named, origin
from localtensor._util.events import Place
from localtensor._util.patching import replaced, wrapped
from localtensor.collectives.argument_checks import must_fit
from localtensor.collectives.rendezvous import Group, Line
from localtensor.errors import BadGroup, GroupMismatch, TorchChanged
from localtensor.threads.rank_world import BACKEND, DEVICES, RankWorld, c10d_cpp, init, show, world_now

FAKE = "fake"  # a backend of torch that does nothing: who wants no real communication gets none


def _init_process_group(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    world = world_now()
    if world is None:
        return original(*args, **kwargs)
    asked = named(original, args, kwargs)
    shown = str(asked.get("backend") or "gloo")
    if shown.lower() == FAKE:
        if world.implicit and world.default_pg is not None:
            c10d.destroy_process_group()
        world.implicit = False
        return original(*args, **kwargs)
    must_fit(asked, world.rank, world.simulation.ranks)
    _must_be_known(shown)
    implicit, world.implicit = world.implicit and world.default_pg is not None, False
    if implicit:
        show(world, world.default_pg, shown)
    elif world.default_pg is not None:
        return original(*args, **kwargs)  # refuses a second default group in its own words
    else:
        init(world, shown)
    world.made[world.pg_names[c10d._get_default_group()]] = (tuple(range(world.simulation.ranks)), _user_line())
    return None


def _split_group(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Each rank gets the group of its part.  torch itself splits the communicators of NCCL only."""
    world = world_now()
    if world is None:
        return original(*args, **kwargs)
    asked = named(original, args, kwargs)
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
    asked = named(original, args, kwargs)
    if str(asked["backend"]).lower() == FAKE:
        return original(*args, **kwargs)
    ranks = tuple(asked["global_ranks_in_group"] or ())
    if not ranks:
        world.epoch += 1
    name, shown = str(asked["group_name"]), str(asked["backend"])
    _must_be_known(shown)
    group = _declare(world, name, ranks or tuple(range(world.simulation.ranks)), default=not ranks)
    asked.update(backend=c10d.Backend(BACKEND), backend_options=None, device_id=None)
    process_group, store = original(**asked)
    if process_group in world.pg_map:
        world.groups[process_group] = group
        show(world, process_group, "gloo" if shown in (BACKEND, "undefined") else shown)
    return process_group, store


def _not_wrapped(original: Callable[..., Any], wrapped_pg: Any, *args: Any, **kwargs: Any) -> Any:
    """TORCH_DISTRIBUTED_DEBUG=DETAIL has torch compare what the ranks call, over a gloo of its own: we do so anyway."""
    return original(wrapped_pg, *args, **kwargs) if world_now() is None else wrapped_pg


def _must_be_known(backend: str) -> None:
    """A backend that torch has, or one for each kind of device: "cpu:gloo,cuda:nccl"."""
    for part in backend.split(","):
        name = part.rpartition(":")[2].lower()
        if name not in c10d.Backend.backend_list:
            known = ", ".join(sorted({*c10d.Backend.backend_list} - {BACKEND, c10d.Backend.UNDEFINED}))
            problem = f"torch knows no backend {name!r}"
            raise BadGroup("new_group", "backend", f"backend={backend!r}", problem, f"Name one of {known}.")


def _declare(world: RankWorld, name: str, ranks: tuple[int, ...], *, default: bool) -> Group:
    """The rank makes a group of that name: all ranks must mean the same by it."""
    simulation, (line, by_program) = world.simulation, origin(sys._getframe(2))
    key = f"{world.epoch}/{name}"
    declared = simulation.declared.setdefault(key, {})
    declared[world.rank] = (() if default else ranks, line)
    if any(other != declared[world.rank][0] for other, _ in declared.values()):
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
    fake = c10d_cpp.FakeProcessGroup
    make = getattr(fake, "_create_internal", fake)  # older torch has a public constructor
    return make(options.group_rank, options.group_size)


@contextmanager
def installed() -> Iterator[None]:
    """torch.distributed is ours; afterwards everything is as it was before."""
    if not hasattr(c10d.Backend, BACKEND.upper()):
        c10d.Backend.register_backend(BACKEND, _create, extended_api=True, devices=list(DEVICES))
    with ExitStack() as stack:
        stack.enter_context(replaced(c10d, "_world", c10d._world))
        stack.enter_context(replaced(c10d, "_new_process_group_helper", _around(c10d._new_process_group_helper)))
        stack.enter_context(wrapped(c10d, "_create_process_group_wrapper", _not_wrapped))
        if hasattr(c10d, "_maybe_attach_flight_recorder"):  # since 2.15, where it was tried
            stack.enter_context(wrapped(c10d, "_maybe_attach_flight_recorder", _not_recorded))
        stack.enter_context(inside(c10d.init_process_group, _init_process_group))
        stack.enter_context(inside(c10d.split_group, _split_group))
        stack.enter_context(replaced(DeviceMesh, "_thread_id", property(_mesh_owner, _own_mesh)))
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


def _not_recorded(original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """No flight recorder: there is one in a process, and it would warn of each rank but the first."""


def _around(original: Callable[..., Any]) -> Callable[..., Any]:
    return functools.partial(_new_group_helper, original)


def _mesh_owner(mesh: DeviceMesh) -> Any:
    return mesh.__dict__.get("_thread_id")


def _own_mesh(mesh: DeviceMesh, value: Any) -> None:
    """A mesh belongs to one rank of one simulation: torch compares meshes by this, too, and caches by mesh."""
    world = world_now()
    mesh.__dict__["_thread_id"] = value if world is None else (world.simulation.serial, world.rank)


@contextmanager
def inside(decorated: Any, ours: Callable[..., Any]) -> Iterator[None]:
    """Whoever has imported the decorated function reaches ours within the decorators."""
    original = innermost(decorated)
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
