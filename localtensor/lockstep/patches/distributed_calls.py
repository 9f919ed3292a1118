"""Functions of torch.distributed that depend on the rank, for all ranks at once.

Most run unchanged.  Where torch's own code is right for the root, it runs as the root (`running_as`); others are
replaced.  Point-to-point messages are refused, since in one control flow all ranks would send, but for `batch_isend_irecv`, in which each
rank sends to a rank that receives from it.

An object collective sends one object for all ranks.  Its tensors and ints of each rank are taken from the sender; the
rest must be the same on all ranks, and is copied by pickle, as torch.distributed does.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import cache
from typing import Any

import numpy as np
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as with_gradients
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.utils import _pytree

from localtensor._util.call_sites import Fn, bound_arguments, origin
from localtensor.collectives.c10d_table import CallArguments
from localtensor.errors import NotHeld, NotInLockstep, WrongListLength
from localtensor.lockstep.comms import c10d_dispatch, collectives
from localtensor.lockstep.comms.collectives import stacked_value
from localtensor.lockstep.comms.process_groups import Groups, LockstepGroup, resolve_group
from localtensor.lockstep.comms.stacked_collectives import GroupFamily
from localtensor.lockstep.dispatch.dispatcher import plain_dispatch
from localtensor.lockstep.patches.rank_queries import Patch, patch_attribute, patch_distributed, refuse
from localtensor.lockstep.values.local_tensor import Mode, wrap
from localtensor.lockstep.values.partition import NOWHERE, Array
from localtensor.lockstep.values.rank_int import RankInt, is_rank_int, rank_int, rank_values


def object_from_source(mode: Mode, thing: object, source: Array) -> object:
    """The object that each rank gets from rank `source[rank]`; nothing where that is negative."""
    return select_objects(mode, [thing], np.where(source >= 0, 0, -1), source)


def select_objects(mode: Mode, things: Sequence[Any], number: Array, source: Array) -> object:
    """The object `things[number[rank]]` for each rank, as rank `source[rank]` has it.

    Raises `NotInLockstep` if it differs between ranks, apart from tensors and ints.
    """
    flat = [_pytree.tree_flatten(thing, is_leaf=is_rank_int) for thing in things]
    used = [int(one) for one in np.unique(number[number >= 0])]
    structures = {str(flat[index][1]) for index in used}
    if len(structures) > 1:
        raise NotInLockstep("an object collective", "ranks get objects that are built differently")
    leaves, structure = flat[used[0]]
    selected = [_select_leaf(mode, [each[0][at] for each in flat], number, source, used) for at in range(len(leaves))]
    return _pytree.tree_unflatten(selected, structure)


def _select_leaf(mode: Mode, leaves: list[Any], number: Array, source: Array, used: list[int]) -> object:
    first = leaves[used[0]]
    if all(isinstance(leaves[index], Tensor) for index in used):
        with plain_dispatch():
            values = [stacked_value(mode, x if isinstance(x, Tensor) else first) for x in leaves]
            return wrap(*collectives.select(values, number, source), mode)
    if all(type(leaves[index]) in (int, RankInt) for index in used):
        table = [x.node.values if is_rank_int(x) else np.full(mode.world, x if type(x) is int else 0) for x in leaves]
        held = (number >= 0) & (mode.everyone.row_of >= 0)
        return rank_int(np.array(table)[np.maximum(number, 0), np.maximum(source, 0)], None if held.all() else held)
    copies = [pickle.dumps(leaves[index]) for index in used]
    if len(set(copies)) > 1:
        raise NotInLockstep("an object collective", f"ranks get different objects: {first!r} and others")
    return pickle.loads(copies[0])


@cache
def install() -> None:
    """Patch the functions of this module, once per process."""
    for name, replacement in DISTRIBUTED_PATCHES.items():
        patch_distributed(name, replacement)
    for owner, name, replacement in OTHER_PATCHES:
        if hasattr(owner, name):
            patch_attribute(owner, name, replacement)


def _group_or_default(group: Groups) -> LockstepGroup:
    found: Any = group or c10d._get_default_group()
    return found  # type: ignore[no-any-return]


def _root(options: dict[str, Any], name: str, otherwise: int | None = 0) -> int:
    """The position of the root of a call, given by global or by group rank."""
    group = _group_or_default(options.get("group"))
    given, by_group = options.get(name), options.get(f"group_{name}")
    if given is None and by_group is None:
        given = otherwise
    return group.place(c10d._canonicalize_group_rank(group, given, by_group))


def _as_root(mode: Mode, family: GroupFamily, root: int) -> AbstractContextManager[None]:
    members = family.groups[0]
    return mode.running_as(members[root] if 0 <= root < len(members) else members[0])


def _run_as_root(name: str) -> Patch:
    """A patch that runs torch's own code as the root, whose list the call's argument is."""

    def replacement(mode: Mode, original: Fn, *args: object, **kwargs: object) -> object:
        options = bound_arguments(original, args, kwargs)
        family = resolve_group(mode, _group_or_default(options.get("group"))).family
        with _as_root(mode, family, _root(options, name)):
            return original(*args, **kwargs)

    return replacement


def _barrier(mode: Mode, original: Fn, *args: object, **kwargs: object) -> object:
    with mode.running_as(mode.ranks[0]):
        return original(*args, **kwargs)


def _all_to_all_single(mode: Mode, original: Fn, *args: object, **kwargs: object) -> object:
    """Splits that differ by rank bypass c10d's op, which takes plain ints only."""
    if len(args) <= 2 and "output_split_sizes" not in kwargs and "input_split_sizes" not in kwargs:
        return original(*args, **kwargs)
    options = bound_arguments(original, args, kwargs)
    splits = [list(options.get(f"{name}_split_sizes") or ()) for name in ("output", "input")]
    if not any(map(is_rank_int, [*splits[0], *splits[1]])):
        return original(*args, **kwargs)
    later = bool(options.get("async_op"))
    arguments = [options["output"], options["input"], *splits]
    group = _group_or_default(options.get("group"))
    return c10d_dispatch.run_collective(mode, "alltoall_base_", group, arguments, later=later)


# -- object collectives


def _sources(family: GroupFamily, place: int) -> Array:
    """The member of each rank's group at this position; -1 for ranks in no group."""
    return np.where(family.members, family.matrix[family.index, place], -1)  # type: ignore[index]


def _family_of_one_size(mode: Mode, call: str, options: dict[str, Any]) -> GroupFamily:
    family = resolve_group(mode, _group_or_default(options.get("group"))).family
    if family.matrix is None:
        problem = "its groups are of different sizes, and so would be their lists"
        raise NotInLockstep(f"torch.distributed.{call}", problem)
    return family


def _all_gather_object(mode: Mode, original: Fn, *args: object, **kwargs: object) -> None:
    options = bound_arguments(original, args, kwargs)
    family = _family_of_one_size(mode, "all_gather_object", options)
    for place in range(len(family.groups[0])):
        options["object_list"][place] = object_from_source(mode, options["obj"], _sources(family, place))


def _gather_object(mode: Mode, original: Fn, *args: object, **kwargs: object) -> None:
    options = bound_arguments(original, args, kwargs)
    family = _family_of_one_size(mode, "gather_object", options)
    root, found = _root(options, "dst"), options.get("object_gather_list")
    if found is None:
        with _as_root(mode, family, root):
            original(*args, **kwargs)  # raises
    for place in range(len(family.groups[0])):
        source = np.where(family.position == root, _sources(family, place), -1)
        found[place] = object_from_source(mode, options["obj"], source)  # type: ignore[index]


def _broadcast_object_list(mode: Mode, original: Fn, *args: object, **kwargs: object) -> None:
    options = bound_arguments(original, args, kwargs)
    family, things = _family_of_one_size(mode, "broadcast_object_list", options), options["object_list"]
    own = np.where(family.members, _sources(family, _root(options, "src")), np.arange(family.world))
    things[:] = [object_from_source(mode, thing, own) for thing in things]


def _scatter_object_list(mode: Mode, original: Fn, *args: object, **kwargs: object) -> None:
    options = bound_arguments(original, args, kwargs)
    family, root = _family_of_one_size(mode, "scatter_object_list", options), _root(options, "src")
    things = options.get("scatter_object_input_list") or ()
    if len(things) != len(family.groups[0]):
        raise WrongListLength("scatter_object_list", family.groups[0][root], len(things), len(family.groups[0]))
    options["scatter_object_output_list"][0] = select_objects(mode, things, family.position, _sources(family, root))


# -- messages from rank to rank


def _p2p_op(mode: Mode, original: Fn, message: Any, *args: object, **kwargs: object) -> None:
    """A message with the peer of each rank, by its place in the group."""
    options = bound_arguments(original, (message, *args), kwargs)
    message.op, message.tensor, message.tag = options["op"], options["tensor"], options.get("tag", 0)
    message.group = _group_or_default(options.get("group"))
    given, place = options.get("peer"), options.get("group_peer")
    if (given is None) == (place is None):
        original(message, *args, **kwargs)  # raises
    peer: Any = given if place is None else place
    values, held = rank_values(peer, mode.world), mode.everyone.row_of != NOWHERE
    if values is not None and peer.node.held is not None and (held & ~peer.node.held).any():
        raise NotHeld("P2POp", np.flatnonzero(held).tolist(), np.flatnonzero(peer.node.held).tolist())
    peers = np.full(mode.world, peer) if values is None else values
    family = resolve_group(mode, message.group).family
    if place is None and not (known := np.isin(peers, np.flatnonzero(family.members)))[held].all():
        raise NotInLockstep("torch.distributed.P2POp", f"rank {peers[held & ~known][0]} is in no group of it")
    message.peer, message.group_peer = given, place
    message.places = family.position[np.where(held, peers, 0)] if place is None else peers


def _batch(mode: Any, original: Fn, messages: list[Any]) -> list[Any]:
    """Each rank's messages: what is received is what its peer sends, in the order of the list, by tag."""
    c10d._check_p2p_op_list(messages)
    family = resolve_group(mode, messages[0].group).family
    sends, receives = ([one for one in messages if one.op is op] for op in (c10d.isend, c10d.irecv))
    found = [_matches(mode, family, sends, receives, at) for at in range(len(receives))]
    sent = sum(int(_talk(mode, family).sum()) for _ in sends)
    if sent != sum(int((number >= 0).sum()) for number, _ in found):
        raise NotInLockstep("torch.distributed.batch_isend_irecv", "a rank sends what no rank receives in this call")
    with plain_dispatch():
        values = [stacked_value(mode, one.tensor) for one in sends]
        got = [collectives.select(values, number, source) for number, source in found]
    with ExitStack() as failed:
        works = {}
        for one in sends:
            mode.check_read(one.tensor, "isend")
            works[id(one)] = c10d_dispatch.LockstepWork(mode, "isend", CallArguments([one.tensor], []), family)
            failed.callback(works[id(one)].wait)
        for one, value in zip(receives, got, strict=True):
            mode.check_not_in_flight(one.tensor, "irecv")
            brought = CallArguments([], [one.tensor])
            with plain_dispatch():
                c10d_dispatch.write_results(mode, [one.tensor], [value], "irecv", brought, family)
            works[id(one)] = c10d_dispatch.LockstepWork(mode, "irecv", brought, family)
            failed.callback(works[id(one)].wait)
        failed.pop_all()
    if mode.recorder is not None:
        mode.recorder.called(
            "batch_isend_irecv", [one.tensor for one in sends], family.groups, origin(sys._getframe(2)).place
        )
    return [works[id(one)] for one in messages]


def _talk(mode: Mode, family: GroupFamily) -> Array:
    found: Array = family.members & (mode.everyone.row_of != NOWHERE)
    return found


def _matches(mode: Mode, family: GroupFamily, sends: list[Any], receives: list[Any], at: int) -> tuple[Array, Array]:
    """For each rank the number of the message that its receive at this place of the list gets, and the rank that sends it."""
    number, source = np.full(mode.world, -1), np.zeros(mode.world, np.int64)
    here, mine = _talk(mode, family), receives[at]
    for rank in np.flatnonzero(here).tolist():
        group, place = family.group_of(rank), int(mine.places[rank])
        peer = group[place] if 0 <= place < len(group) else rank
        before = sum(one.tag == mine.tag and one.places[rank] == place for one in receives[:at])
        fits = [
            index
            for index, one in enumerate(sends)
            if one.tag == mine.tag and here[peer] and one.places[peer] == family.position[rank]
        ]
        if peer == rank or before >= len(fits):
            raise NotInLockstep(
                "torch.distributed.batch_isend_irecv",
                f"rank {rank} receives what rank {peer} does not send in this call",
            )
        number[rank], source[rank] = fits[before], peer
    return number, source


DISTRIBUTED_PATCHES: dict[str, Patch] = {
    "gather": _run_as_root("dst"),
    "scatter": _run_as_root("src"),
    "barrier": _barrier,
    "batch_isend_irecv": _batch,
    "all_to_all_single": _all_to_all_single,
    "all_gather_object": _all_gather_object,
    "gather_object": _gather_object,
    "broadcast_object_list": _broadcast_object_list,
    "scatter_object_list": _scatter_object_list,
    **{
        name: refuse(f"torch.distributed.{name}", c10d_dispatch.POINT_TO_POINT)
        for name in ("send", "recv", "send_object_list", "recv_object_list")
    },
}


# -- functional collectives, and those with gradients


def _permute_tensor(mode: Mode, original: Fn, *args: object, **kwargs: object) -> Tensor:
    """Each rank sends all its elements to one other, as an all-to-all with splits that differ by rank."""
    options = bound_arguments(original, args, kwargs)
    x, order, group = options["self"], list(options["src_dst"]), options["group"]
    position, held = resolve_group(mode, group).family.position, mode.everyone.held
    to = np.array(order)[position]
    source = np.argsort(order)[position]
    count = x.numel()
    sent: list[Any] = [rank_int(np.where(to == place, count, 0), held) for place in range(len(order))]
    got: list[Any] = [rank_int(np.where(source == place, count, 0), held) for place in range(len(order))]
    return functional.all_to_all_single(x, got, sent, group, options.get("tag", ""))


def _find_group(mode: Mode, original: Fn, tag: str, ranks: list[int]) -> LockstepGroup:
    for group in mode.groups.by_name.values():
        if len(group.family.groups) == 1 and list(group.family.groups[0]) == list(ranks):
            return group
    return mode.groups.new_group(ranks)


def _forward_as_root(mode: Mode, original: Fn, ctx: Any, root: int, group: Groups, *tensors: Tensor) -> object:
    found = _group_or_default(group)
    with _as_root(mode, resolve_group(mode, found).family, found.place(c10d._canonicalize_group_rank(found, root))):
        return original(ctx, root, group, *tensors)


def _broadcast_backward(mode: Mode, original: Fn, ctx: Any, grad: Tensor) -> object:
    """The gradient reduced to the root, and zeros on the others."""
    group = _group_or_default(ctx.group)
    total = with_gradients._Reduce.apply(ctx.src, c10d.ReduceOp.SUM, ctx.group, grad)
    root = group.place(c10d._canonicalize_group_rank(group, ctx.src))
    position = group.family.position
    others = (position >= 0) & (position != root)
    with plain_dispatch():
        mine = stacked_value(mode, total)
        number = np.where(mine.held.row_of >= 0, others, -1)
        kept = collectives.select([mine, collectives.zeros_like(mine)], number)
    return None, None, wrap(*kept, mode)


def _all_to_all_forward(
    mode: Mode, original: Fn, ctx: Any, group: Groups, out: list[Tensor], *tensors: Tensor
) -> tuple[Tensor, ...]:
    ctx.group = group
    ctx.input_tensor_size_list = [x.size() for x in tensors]
    c10d.all_to_all(out, [x.contiguous() for x in tensors], group=group)
    return tuple(out)


def _canonical(mode: Mode, original: Fn, *args: object, **kwargs: object) -> object:
    """torch's group rank as an int.  Raises `RanksDiverge` if it differs between ranks."""
    found = original(*args, **kwargs)
    return found if kwargs.get("return_global") else int(found)


OTHER_PATCHES: list[tuple[Any, str, Callable[..., Any]]] = [
    (c10d, "_canonicalize_group_rank", _canonical),
    (c10d.P2POp, "__init__", _p2p_op),
    (c10d, "_find_pg_by_ranks_and_tag", _find_group),
    (functional, "permute_tensor", _permute_tensor),
    (with_gradients._Gather, "forward", _forward_as_root),
    (with_gradients._Scatter, "forward", _forward_as_root),
    (with_gradients._Broadcast, "backward", _broadcast_backward),
    (with_gradients._AlltoAll, "forward", _all_to_all_forward),
]
