"""Patched functions of torch.distributed and torch that depend on the rank: groups, seeds, RNG state, `torch.tensor`.

Installed once, when the first mode is entered; in a thread without a mode they call the originals.
"""

from __future__ import annotations

import dis
import inspect
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from types import FrameType
from typing import Any

import numpy as np
import torch
import torch.utils._device
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor._random import OffsetBasedRNGTracker

from localtensor._util import ambient
from localtensor._util.call_sites import Args, Fn, bound_arguments, undecorated
from localtensor._util.patching import left_alone_by_the_compiler
from localtensor.collectives.argument_checks import check_init_arguments
from localtensor.errors import BadGroup, NotInLockstep, TorchChanged
from localtensor.lockstep.comms.process_groups import LockstepGroup, RoutedWorld, resolve_group
from localtensor.lockstep.values.local_tensor import LocalTensor, Mode, wrap
from localtensor.lockstep.values.rank_int import Int, is_rank_number, rank_int, rank_values
from localtensor.lockstep.values.rng_streams import Stream
from localtensor.lockstep.values.stacks import index_by_rank, stack_nested, write_by_rank

Patch = Callable[..., Any]  # (mode, original, *args, **kwargs)


@cache
def install() -> None:
    """Patch the functions of this module, once per process."""
    torch.utils._device._device_constructors()  # cached by torch before the patch, which a default device needs
    c10d._world = RoutedWorld(c10d._world)
    for name, replacement in _GROUP_PATCHES.items():
        patch_distributed(name, replacement)
    for owner, name, replacement in _TORCH_PATCHES:
        if hasattr(owner, name):
            patch_attribute(owner, name, replacement)
    _install_numbers()


def patch_distributed(name: str, replacement: Patch) -> None:
    """Patch a function of torch.distributed, also where it was imported by name."""
    found = getattr(c10d, name, None)
    if found is None:
        return
    if hasattr(found, "__wrapped__"):
        _patch_within_decorators(found, replacement)
        return
    made = dispatch_by_mode(found, replacement)
    for owner in (c10d, torch.distributed):
        if getattr(owner, name, None) is found:
            setattr(owner, name, made)


def patch_attribute(owner: object, name: str, replacement: Patch) -> None:
    """Patch `owner.name`, a function, method, staticmethod or classmethod."""
    raw = vars(owner).get(name, getattr(owner, name)) if isinstance(owner, type) else getattr(owner, name)
    kind = type(raw) if isinstance(raw, staticmethod | classmethod) else None
    made = dispatch_by_mode(raw if kind is None else raw.__func__, replacement)
    setattr(owner, name, made if kind is None else kind(made))


def dispatch_by_mode(original: Fn, replacement: Patch) -> Fn:
    """A function that calls `replacement` in a thread with a mode, else the original."""

    def routed(*args: object, **kwargs: object) -> object:
        mode = ambient.lockstep()
        return original(*args, **kwargs) if mode is None else replacement(mode, original, *args, **kwargs)

    left_alone_by_the_compiler(routed)  # nor does it compile what runs beneath, such as an `__init__` of a dataclass
    for name in ("__name__", "__qualname__", "__doc__", "__module__"):
        if hasattr(original, name):
            setattr(routed, name, getattr(original, name))
    with suppress(ValueError, TypeError):  # a function of C has no signature
        routed.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    return routed


def refuse(call: str, why: str) -> Patch:
    """A patch that raises `NotInLockstep`."""

    def patch(mode: Mode, original: Fn, *args: object, **kwargs: object) -> Tensor:
        raise NotInLockstep(call, why)

    return patch


def _patch_within_decorators(decorated: Any, replacement: Patch) -> None:
    """Patch within torch's logging decorators, so that names imported from torch call `replacement` too."""
    original = undecorated(decorated)
    while decorated is not original:
        for cell in decorated.__closure__ or ():
            if cell.cell_contents is original:
                cell.cell_contents = dispatch_by_mode(original, replacement)
                decorated.__wrapped__ = cell.cell_contents
                return
        decorated = decorated.__wrapped__
    raise TorchChanged(
        f"torch.distributed.{original.__name__}", "it is no longer wrapped in torch's logging decorators"
    )


def _init_process_group(mode: Mode, original: Fn, *args: object, **kwargs: object) -> None:
    options = bound_arguments(original, args, kwargs)
    rank = options.pop("rank", -1)
    by_rank = rank_values(rank, mode.world)
    if by_rank is not None or rank != -1:
        numbers = np.full(mode.world, rank) if by_rank is None else by_rank
        if (numbers != np.arange(mode.world))[list(mode.ranks)].any():
            problem = "in one control flow each rank has a number of its own"
            remedy = "Leave it out, or pass torch.distributed.get_rank()."
            raise BadGroup("init_process_group", "rank", f"rank={rank}", problem, remedy)
    check_init_arguments(options, -1, len(mode.ranks))
    world = mode.groups
    if world.default_pg is None:
        world.open()
    elif not world.implicit:
        original(*args, **kwargs)  # raises for a second default group
    world.implicit = False


def _new_group(mode: Mode, original: Fn, *args: object, **kwargs: object) -> LockstepGroup:
    return mode.groups.new_group(bound_arguments(original, args, kwargs).get("ranks"))


def _subgroups(mode: Mode, original: Fn, *args: object, **kwargs: object) -> object:
    lists = [sorted(ranks) for ranks in bound_arguments(original, args, kwargs)["ranks_per_subgroup_list"] or ()]
    if not lists:
        return original(*args, **kwargs)  # raises
    mine = mode.groups.family_group("new_subgroups_by_enumeration", lists)
    return mine, [mine if len(lists) == 1 else mode.groups.make([ranks]) for ranks in lists]


def _split_group(mode: Any, original: Fn, *args: object, **kwargs: object) -> LockstepGroup:
    """The group of each rank's part; each group of the parent is split alike."""
    options = bound_arguments(original, args, kwargs)
    parent, splits = options.get("parent_pg") or mode.groups.default_pg, options.get("split_ranks")
    members = parent.family.groups
    flat = [place for split in splits or () for place in split]
    if not splits or not all(splits) or len(set(flat)) != len(flat) or not set(flat) <= set(range(len(members[0]))):
        problem = f"they must be lists of different ranks below {len(members[0])}, none of them empty"
        raise BadGroup("split_group", "split_ranks", f"split_ranks={splits}", problem, "Name each rank at most once.")
    lists = [[group[place] for place in sorted(split)] for group in members for split in splits]
    made: LockstepGroup = mode.groups.family_group("split_group", lists)
    return made


def _destroy(mode: Mode, original: Fn, group: LockstepGroup | None = None) -> None:
    if group is None or group is mode.groups.default_pg:
        if mode.groups.default_pg is None:
            original(group)  # raises
        mode.groups.close()
    else:
        resolve_group(mode, group)
        mode.groups.forget(group.group_name)


_GROUP_PATCHES: dict[str, Patch] = {
    "init_process_group": _init_process_group,
    "new_group": _new_group,
    "split_group": _split_group,
    "new_subgroups_by_enumeration": _subgroups,
    "destroy_process_group": _destroy,
}


def _manual_seed(mode: Mode, original: Fn, seed: Int) -> object:
    by_rank = rank_values(seed, mode.world)
    if by_rank is None:
        made = original(seed)
        mode.streams.agree()
        return made
    mode.streams.seed(by_rank)
    return torch.default_generator


def _initial_seed(mode: Mode, original: Fn) -> Int:
    """The seed of each rank; a generator has it in its state."""
    stream = mode.streams.of()
    if not stream.states:
        return original()  # type: ignore[no-any-return]
    with mode.disable():
        seeds = [_seed_of(state) for state in stream.states]
    return rank_int(np.array(seeds)[stream.partition.row_of], mode.everyone.held)


def _seed_of(state: Tensor) -> int:
    generator = torch.Generator()
    generator.set_state(state)
    return generator.initial_seed()


def _get_rng_state(mode: Mode, original: Fn) -> Tensor:
    stream = mode.streams.of()
    return mode.gather({r: stream.state_on(r) for r in mode.ranks}) if stream.states else original()


def _get_cuda_state(mode: Mode, original: Fn, device: torch.device | str | int = "cuda") -> Tensor:
    """A state that each rank has for itself: DTensor adds the offset of the rank's piece to it."""
    stream = mode.streams.of(_cuda_generator(device))
    if stream.states:
        return mode.gather({r: stream.state_on(r) for r in mode.ranks})
    return wrap((original(device),), mode.everyone, mode)


def _set_rng_state(mode: Mode, original: Fn, new_state: Tensor) -> None:
    _set_states(mode, mode.streams.of(), original, new_state)


def _set_cuda_state(mode: Mode, original: Fn, new_state: Tensor, device: torch.device | str | int = "cuda") -> None:
    _set_states(mode, mode.streams.of(_cuda_generator(device)), partial(original, device=device), new_state)


def _cuda_generator(device: torch.device | str | int) -> torch.Generator:
    torch.cuda.init()
    index = device if isinstance(device, int) else torch.device(device).index
    found: torch.Generator = torch.cuda.default_generators[torch.cuda.current_device() if index is None else index]
    return found


def _set_states(mode: Mode, stream: Stream, original: Fn, new_state: Tensor) -> None:
    if not isinstance(new_state, LocalTensor):
        original(new_state)
        stream.agree()
        return
    held = new_state._partition
    with mode.disable():  # copies: torch reads a state from where its storage begins
        states = {row: new_state.__localtensor_on__(held.ranks(row)[0]).clone() for row in range(held.rows)}
    stream.set_on(held.row_of, states)


def _rng_tracker(
    mode: Mode, original: Fn, tracker: OffsetBasedRNGTracker, device_mesh: DeviceMesh, run_state_sync: bool = True
) -> None:
    """All ranks get rank 0's state.  torch compares it with each rank's first, to warn, which here is a branch on the rank."""
    original(tracker, device_mesh, False)
    if run_state_sync:
        state = tracker._get_device_state()
        torch.distributed.broadcast(state, 0)
        tracker._set_device_state(state)


def _tensor(mode: Mode, original: Fn, data: object, **options: Any) -> object:
    """A tensor of nested lists that hold LocalTensors and numbers of each rank, made without reading one number for all."""
    found = stack_nested(data, _of_ranks, original)
    if found is None:
        return original(data, **options)
    found = found.to(dtype=options.get("dtype"), device=options.get("device"), copy=True)
    return found.requires_grad_(options.get("requires_grad", False))


def _of_ranks(x: object) -> Tensor | None:
    """The tensor of what differs between ranks: a LocalTensor without its history, the tensor of no dims of a number."""
    if isinstance(x, LocalTensor):
        return x.detach()
    if not is_rank_number(x):
        return None
    return torch.scalar_tensor(x, dtype=torch.int64 if isinstance(x, torch.SymInt) else torch.bool)  # type: ignore[arg-type]


def _as_tensor(mode: Mode, original: Fn, data: object, **options: object) -> object:
    listed = isinstance(data, list | tuple) or is_rank_number(data)
    return _tensor(mode, original, data, **options) if listed else original(data, **options)


# -- numbers of each rank, where torch has SymInts without a value of their own


def _torch_function_of(number: Any) -> Fn:
    """What torch calls for an index that it does not know: that of a number of each rank, in a subscript alone.

    A LocalTensor has its own subscripts; this is for tensors from outside, of which only the number differs, and for fake ones.
    """
    if is_rank_number(number) and _is_subscript(sys._getframe(1)):
        return _subscript
    raise AttributeError("__torch_function__")


def _is_subscript(frame: FrameType) -> bool:
    """Whether the frame takes or writes an item; a TorchFunctionMode does so by calling the function that it gets."""
    if dis.opname[frame.f_code.co_code[frame.f_lasti]].endswith("_SUBSCR"):
        return True
    return any(value is Tensor.__getitem__ or value is Tensor.__setitem__ for value in frame.f_locals.values())


def _subscript(func: Any, types: Any, args: Args, kwargs: Any = None) -> Tensor | None:
    if len(args) == 2:
        return index_by_rank(*args)
    write_by_rank(*args)
    return None


def _divmod(number: Any, other: Any) -> object:
    return (number // other, number % other) if is_rank_number(number) or is_rank_number(other) else NotImplemented


def _rdivmod(number: Any, other: Any) -> object:
    return (other // number, other % number) if is_rank_number(number) else NotImplemented


def _format(number: Any, how: str) -> str:
    """With a format, that of the one int of the ranks that run now.  Raises `RanksDiverge` where they differ."""
    return format(int(number), how) if how and is_rank_number(number) else object.__format__(number, how)


def _round(number: Any, digits: int | None = None) -> object:
    """As torch, which rounds an int to itself."""
    if digits is not None and digits < 0 and is_rank_number(number):
        raise NotInLockstep(f"round({number}, {digits})", "only digits behind the point are rounded")
    return number


def _install_numbers() -> None:
    kinds: tuple[Any, ...] = (torch.SymInt, torch.SymBool)
    for kind in kinds:
        kind.__torch_function__ = property(_torch_function_of)
    kinds[0].__divmod__, kinds[0].__rdivmod__ = _divmod, _rdivmod
    kinds[0].__format__, kinds[0].__round__ = _format, _round


_TORCH_PATCHES: list[tuple[Any, str, Patch]] = [
    (torch, "tensor", _tensor),
    (torch, "as_tensor", _as_tensor),
    (torch.random, "_manual_seed_impl", _manual_seed),
    (torch, "initial_seed", _initial_seed),
    (torch.random, "initial_seed", _initial_seed),
    (torch, "get_rng_state", _get_rng_state),
    (torch.random, "get_rng_state", _get_rng_state),
    (torch, "set_rng_state", _set_rng_state),
    (torch.random, "set_rng_state", _set_rng_state),
    (OffsetBasedRNGTracker, "__init__", _rng_tracker),
    (torch.cuda, "get_rng_state", _get_cuda_state),
    (torch.cuda.random, "get_rng_state", _get_cuda_state),
    (torch.cuda, "set_rng_state", _set_cuda_state),
    (torch.cuda.random, "set_rng_state", _set_cuda_state),
]
