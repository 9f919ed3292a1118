"""`ProcessGroupGloo(store, rank, size)`, made by the program without `new_group`; and the backend of a group's device."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d

from localtensor._util.patching import replaced
from localtensor.collectives.gloo_checks import check_like_gloo
from localtensor.collectives.rendezvous import Group
from localtensor.threads import rank_world

_DIRECT = "localtensor/direct"  # keys of these groups in the store that the program gives


class DirectGroup(torch.distributed.ProcessGroup):
    """A simulated group in the place of a `ProcessGroupGloo`.

    gloo checks lists of tensors before torch dispatches by them, and torch cannot dispatch an empty one.  Each method has the
    name and the `self` of torch's: pybind11 calls the C++ one where it is called from a frame of that name, and else this one.
    """

    def allreduce(self, *args: Any, **kwargs: Any) -> Any:
        self._check("all_reduce", args)
        return super().allreduce(*args, **kwargs)

    def allreduce_coalesced(self, *args: Any, **kwargs: Any) -> Any:
        self._check("all_reduce_coalesced", args)
        return super().allreduce_coalesced(*args, **kwargs)

    def broadcast(self, *args: Any, **kwargs: Any) -> Any:
        self._check("broadcast", args, "rootRank", "rootTensor")
        return super().broadcast(*args, **kwargs)

    def reduce(self, *args: Any, **kwargs: Any) -> Any:
        self._check("reduce", args, "reduceOp", "rootRank", "rootTensor")
        return super().reduce(*args, **kwargs)

    def allgather(self, *args: Any, **kwargs: Any) -> Any:
        self._check("all_gather", args)
        return super().allgather(*args, **kwargs)

    def allgather_coalesced(self, *args: Any, **kwargs: Any) -> Any:
        self._check("all_gather_coalesced", args)
        return super().allgather_coalesced(*args, **kwargs)

    def gather(self, *args: Any, **kwargs: Any) -> Any:
        self._check("gather", args, "rootRank")
        return super().gather(*args, **kwargs)

    def scatter(self, *args: Any, **kwargs: Any) -> Any:
        self._check("scatter", args, "rootRank")
        return super().scatter(*args, **kwargs)

    def _check(self, kind: str, args: Sequence[Any], *options: str) -> None:
        lists = [arg for arg in args if isinstance(arg, list | tuple)]
        given = [getattr(args[len(lists)], option, None) for option in options] if len(args) > len(lists) else []
        if lists and len(given) == len(options):
            check_like_gloo(kind, [*lists, *given], self.rank(), self.size())

    @property
    def options(self) -> Any:
        return RankBackend(self, None, "gloo").options

    def _set_default_timeout(self, timeout: timedelta) -> None:
        RankBackend(self, None, "gloo").set_timeout(timeout)


def _gloo_group(
    kind: type[Any],
    store: torch.distributed.Store,
    rank: int,
    size: int,
    timeout: object = None,
) -> object:
    """A simulated group of the ranks that have named this store, in the place of a `ProcessGroupGloo`.

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
    group = DirectGroup(rank, size)  # type: ignore[call-arg]  # the one that pybind11 lets a subclass have
    backend, custom = rank_world.c10d_cpp.FakeProcessGroup._create_internal(rank, size), group.BackendType.CUSTOM
    group._set_default_backend(custom)
    for device in rank_world.DEVICES:
        group._register_backend(torch.device(device), custom, backend)
    group._set_group_name(c10d.GroupName(name))
    world.groups[group] = world.simulation.groups.setdefault(
        f"{world.epoch}/{name}", Group(name, members, axes=world.simulation.axes, direct=True)
    )
    limit = getattr(timeout, "_timeout", timeout)
    rank_world.set_time_limit(world, world.groups[group], limit)
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
        group = torch.distributed.ProcessGroup
        owner = self._group if hasattr(group, name) else self._idle if hasattr(self._idle, name) else self._kind
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
            rank_world.set_time_limit(world, world.groups[self._group], timeout)

    set_timeout = _set_default_timeout


@contextmanager
def direct_groups() -> Iterator[None]:
    """Inside the block ranks may make groups of gloo themselves."""
    if not hasattr(torch.distributed, "ProcessGroupGloo"):
        yield
        return
    with replaced(torch.distributed.ProcessGroupGloo, "__new__", _gloo_group):
        yield
