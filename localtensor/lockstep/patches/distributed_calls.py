"""Functions of torch.distributed that depend on the rank, for all ranks at once.

Most run unchanged.  Where torch's own code is right for the root, it runs as the root (`standing_at`); others are
replaced.  Point-to-point messages are refused: in one control flow, all ranks would send.

An object collective sends one object for all ranks.  Its tensors and ints of each rank are taken from the sender; the
rest must be the same on all ranks, and is copied by pickle, as torch.distributed does.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as with_gradients
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.utils import _pytree

from localtensor._util.call_sites import named
from localtensor.errors import NotInLockstep, WrongListLength
from localtensor.lockstep.comms import c10d_dispatch, collectives
from localtensor.lockstep.comms.collectives import value_of
from localtensor.lockstep.comms.process_groups import LockstepGroup, group_of
from localtensor.lockstep.comms.stacked_collectives import Family
from localtensor.lockstep.dispatch.dispatcher import plainly
from localtensor.lockstep.patches.rank_queries import Door, route, route_call
from localtensor.lockstep.values.local_tensor import wrap
from localtensor.lockstep.values.rank_int import is_rank_int, rank_int


def as_sent(mode: Any, thing: Any, source: Any) -> Any:
    """The object that each rank gets from rank `source[rank]`; nothing where that is negative."""
    return picked(mode, [thing], np.where(source >= 0, 0, -1), source)


def picked(mode: Any, things: Sequence[Any], number: Any, source: Any) -> Any:
    """The object `things[number[rank]]` for each rank, as rank `source[rank]` has it.

    Raises `NotInLockstep` if it differs between ranks, apart from tensors and ints.
    """
    flat = [_pytree.tree_flatten(thing, is_leaf=is_rank_int) for thing in things]
    used = [int(one) for one in np.unique(number[number >= 0])]
    structures = {str(flat[index][1]) for index in used}
    if len(structures) > 1:
        raise NotInLockstep("an object collective", "ranks get objects that are built differently")
    leaves = [_leaf(mode, [each[0][at] for each in flat], number, source, used) for at in range(len(flat[used[0]][0]))]
    return _pytree.tree_unflatten(leaves, flat[used[0]][1])


def _leaf(mode: Any, leaves: list[Any], number: Any, source: Any, used: list[int]) -> Any:
    first = leaves[used[0]]
    if all(isinstance(leaves[index], Tensor) for index in used):
        with plainly():
            values = [value_of(mode, x if isinstance(x, Tensor) else first) for x in leaves]
            return wrap(*collectives.combined(values, number, source), mode)
    if all(type(leaves[index]) in (int, torch.SymInt) for index in used):
        table = [x.node.values if is_rank_int(x) else np.full(mode.world, x if type(x) is int else 0) for x in leaves]
        held = (number >= 0) & (mode.everyone.row_of >= 0)
        return rank_int(np.array(table)[np.maximum(number, 0), np.maximum(source, 0)], None if held.all() else held)
    copies = [pickle.dumps(leaves[index]) for index in used]
    if len(set(copies)) > 1:
        raise NotInLockstep("an object collective", f"ranks get different objects: {first!r} and others")
    return pickle.loads(copies[0])


_installed: list[bool] = []


def install() -> None:
    """Patch the functions of this module, once per process."""
    if _installed:
        return
    _installed.append(True)
    for name, ours in CALLS.items():
        route_call(name, ours)
    for owner, name, ours in OTHERS:
        if hasattr(owner, name):
            route(owner, name, ours)


def _of(group: Any) -> LockstepGroup:
    found: Any = group or c10d._get_default_group()
    return found  # type: ignore[no-any-return]


def _root(asked: dict[str, Any], name: str, otherwise: int | None = 0) -> int:
    """The position of the root of a call, given by global or by group rank."""
    group = _of(asked.get("group"))
    given, by_group = asked.get(name), asked.get(f"group_{name}")
    if given is None and by_group is None:
        given = otherwise
    return group.place(c10d._canonicalize_group_rank(group, given, by_group))


@contextmanager
def _as_root(mode: Any, whole: Family, root: int) -> Any:
    with mode.standing_at(whole.groups[0][root] if 0 <= root < len(whole.groups[0]) else whole.groups[0][0]):
        yield


def _from_the_root(name: str) -> Door:
    """A patch that runs torch's own code as the root, whose list the call's argument is."""

    def ours(mode: Any, original: Any, *args: Any, **kwargs: Any) -> Any:
        asked = named(original, args, kwargs)
        whole = group_of(mode, _of(asked.get("group"))).family
        with _as_root(mode, whole, _root(asked, name)):
            return original(*args, **kwargs)

    return ours


def _barrier(mode: Any, original: Any, *args: Any, **kwargs: Any) -> Any:
    with mode.standing_at(mode.ranks[0]):
        return original(*args, **kwargs)


def _no_message(call: str) -> Door:
    def ours(mode: Any, original: Any, *args: Any, **kwargs: Any) -> Any:
        raise NotInLockstep(f"torch.distributed.{call}", c10d_dispatch.POINT_TO_POINT)

    return ours


def _all_to_all_single(mode: Any, original: Any, *args: Any, **kwargs: Any) -> Any:
    """Splits that differ by rank bypass c10d's op, which takes plain ints only."""
    asked = named(original, args, kwargs)
    splits = [list(asked.get(f"{name}_split_sizes") or ()) for name in ("output", "input")]
    if not any(map(is_rank_int, [*splits[0], *splits[1]])):
        return original(*args, **kwargs)
    later = bool(asked.get("async_op"))
    arguments = [asked["output"], asked["input"], *splits]
    return c10d_dispatch.collective(mode, "alltoall_base_", _of(asked.get("group")), arguments, later=later)


# -- object collectives


def _sources(whole: Family, place: int) -> Any:
    """The member of each rank's group at this position; -1 for ranks in no group."""
    return np.where(whole.members, whole.matrix[whole.index, place], -1)  # type: ignore[index]


def _whole_of(mode: Any, call: str, asked: dict[str, Any]) -> Family:
    whole = group_of(mode, _of(asked.get("group"))).family
    if whole.matrix is None:
        problem = "its groups are of different sizes, and so would be their lists"
        raise NotInLockstep(f"torch.distributed.{call}", problem)
    return whole


def _all_gather_object(mode: Any, original: Any, *args: Any, **kwargs: Any) -> None:
    asked = named(original, args, kwargs)
    whole = _whole_of(mode, "all_gather_object", asked)
    for place in range(len(whole.groups[0])):
        asked["object_list"][place] = as_sent(mode, asked["obj"], _sources(whole, place))


def _gather_object(mode: Any, original: Any, *args: Any, **kwargs: Any) -> None:
    asked = named(original, args, kwargs)
    whole, root, found = _whole_of(mode, "gather_object", asked), _root(asked, "dst"), asked.get("object_gather_list")
    if found is None:
        with _as_root(mode, whole, root):
            original(*args, **kwargs)  # raises
    for place in range(len(whole.groups[0])):
        source = np.where(whole.position == root, _sources(whole, place), -1)
        found[place] = as_sent(mode, asked["obj"], source)  # type: ignore[index]


def _broadcast_object_list(mode: Any, original: Any, *args: Any, **kwargs: Any) -> None:
    asked = named(original, args, kwargs)
    whole, things = _whole_of(mode, "broadcast_object_list", asked), asked["object_list"]
    own = np.where(whole.members, _sources(whole, _root(asked, "src")), np.arange(whole.world))
    things[:] = [as_sent(mode, thing, own) for thing in things]


def _scatter_object_list(mode: Any, original: Any, *args: Any, **kwargs: Any) -> None:
    asked = named(original, args, kwargs)
    whole, root = _whole_of(mode, "scatter_object_list", asked), _root(asked, "src")
    things = asked.get("scatter_object_input_list") or ()
    if len(things) != len(whole.groups[0]):
        raise WrongListLength("scatter_object_list", whole.groups[0][root], len(things), len(whole.groups[0]))
    asked["scatter_object_output_list"][0] = picked(mode, things, whole.position, _sources(whole, root))


CALLS: dict[str, Door] = {
    "gather": _from_the_root("dst"),
    "scatter": _from_the_root("src"),
    "barrier": _barrier,
    "all_to_all_single": _all_to_all_single,
    "all_gather_object": _all_gather_object,
    "gather_object": _gather_object,
    "broadcast_object_list": _broadcast_object_list,
    "scatter_object_list": _scatter_object_list,
    **{name: _no_message(name) for name in ("send", "recv", "send_object_list", "recv_object_list")},
}


# -- functional collectives, and those with gradients


def _permute_tensor(mode: Any, original: Any, *args: Any, **kwargs: Any) -> Any:
    """Each rank sends all its elements to one other, as an all-to-all with splits that differ by rank."""
    asked = named(original, args, kwargs)
    x, order, group = asked["self"], list(asked["src_dst"]), asked["group"]
    position, held = group_of(mode, group).family.position, mode.everyone.held
    to = np.array(order)[position]
    source = np.argsort(order)[position]
    count = x.numel()
    sent: list[Any] = [rank_int(np.where(to == place, count, 0), held) for place in range(len(order))]
    got: list[Any] = [rank_int(np.where(source == place, count, 0), held) for place in range(len(order))]
    return functional.all_to_all_single(x, got, sent, group, asked.get("tag", ""))


def _find_group(mode: Any, original: Any, tag: str, ranks: list[int]) -> Any:
    for group in mode.groups.by_name.values():
        if len(group.family.groups) == 1 and list(group.family.groups[0]) == list(ranks):
            return group
    return mode.groups.new_group(ranks)


def _root_runs(mode: Any, original: Any, ctx: Any, root: int, group: Any, *tensors: Any) -> Any:
    whole = group_of(mode, _of(group)).family
    with _as_root(mode, whole, _of(group).place(c10d._canonicalize_group_rank(_of(group), root))):
        return original(ctx, root, group, *tensors)


def _broadcast_backward(mode: Any, original: Any, ctx: Any, grad: Any) -> Any:
    """The gradient reduced to the root, and zeros on the others."""
    group = _of(ctx.group)
    total = with_gradients._Reduce.apply(ctx.src, c10d.ReduceOp.SUM, ctx.group, grad)
    root = group.place(c10d._canonicalize_group_rank(group, ctx.src))
    position = group.family.position
    others = (position >= 0) & (position != root)
    with plainly():
        mine = value_of(mode, total)
        kept = collectives.combined(
            [mine, collectives.zeros_like(mine)], np.where(mine.held.row_of >= 0, others.astype(int), -1)
        )
    return None, None, wrap(*kept, mode)


def _all_to_all_forward(mode: Any, original: Any, ctx: Any, group: Any, out: Any, *tensors: Any) -> Any:
    ctx.group = group
    ctx.input_tensor_size_list = [x.size() for x in tensors]
    c10d.all_to_all(out, [x.contiguous() for x in tensors], group=group)
    return tuple(out)


def _canonical(mode: Any, original: Any, *args: Any, **kwargs: Any) -> Any:
    """torch's group rank as an int.  Raises `RanksDiverge` if it differs between ranks."""
    found = original(*args, **kwargs)
    return found if kwargs.get("return_global") else int(found)


OTHERS: list[tuple[Any, str, Callable[..., Any]]] = [
    (c10d, "_canonicalize_group_rank", _canonical),
    (c10d, "_check_p2p_op_list", _no_message("batch_isend_irecv")),
    (c10d, "_find_pg_by_ranks_and_tag", _find_group),
    (functional, "permute_tensor", _permute_tensor),
    (with_gradients._Gather, "forward", _root_runs),
    (with_gradients._Scatter, "forward", _root_runs),
    (with_gradients._Broadcast, "backward", _broadcast_backward),
    (with_gradients._AlltoAll, "forward", _all_to_all_forward),
]
