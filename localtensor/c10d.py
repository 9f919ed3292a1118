"""Collectives of torch.distributed on LocalTensors: c10d's ops, functional collectives, and DTensor's own one.

c10d's ops are read by the table that serves rank threads (kernels.py), so that a call means the same in either way.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from localtensor import collectives, exchange
from localtensor.c10d_ops import plain, positions
from localtensor.engine import check_write, plainly
from localtensor.errors import NotHeld, NotInLockstep
from localtensor.exchange import Value
from localtensor.families import Family
from localtensor.frames import origin
from localtensor.kernels import SERVED, Brought, Served
from localtensor.lockstep_groups import family_of
from localtensor.meetings import Group, Part
from localtensor.memory import overwrite
from localtensor.offers import check_offer
from localtensor.tensor import LocalTensor, wrap
from localtensor.lockstep_works import LockstepWork, over


def value_of(mode: Any, x: Tensor) -> Value:
    """What every rank brings: a plain tensor is the same on all of them."""
    return Value(x._cells, x._partition) if isinstance(x, LocalTensor) else Value((x.detach(),), mode.everyone)


def serve(mode: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One of c10d's ops, for all groups of the family that its process group stands for."""
    name = func._schema.name.removeprefix("c10d::")
    served = SERVED.get(name)
    if served is None:
        raise NotInLockstep(f"torch.distributed ({name})", "who sends to whom differs from rank to rank")
    at, when, count = positions(name, func._schema)
    whole = family_of(mode, args[at])
    rest = [plain(a) for a in (*args[:at], *args[at + 1 :])][:count]
    meant, brought = served.brings(rest)
    check_offer(meant.kind, brought, whole.groups[0][0], whole.groups[0])
    for buffer in brought.writes:
        check_write(mode, buffer, str(func))
    with plainly():
        for buffer, value in zip(brought.writes, results(mode, meant, brought, whole), strict=True):
            write(mode, buffer, value, meant.kind)
    if served.kind == "monitored_barrier":
        return None
    later = when is not None and len(args) > when and bool(args[when]) and origin(sys._getframe(2)).hands_work_out
    work = LockstepWork(mode, meant.kind, brought, whole).boxed() if later else over()
    return work if served.returns is None else (rest[served.returns], work)


def results(mode: Any, served: Served, brought: Brought, whole: Family) -> Sequence[Value]:
    """What each written buffer holds afterwards."""
    quick = _QUICK.get(served.kind)
    found = None if quick is None else quick(mode, brought, whole)
    return found if found is not None else _by_ranks(mode, served, brought, whole)


def write(mode: Any, buffer: Tensor, value: Value, call: str) -> None:
    """The buffer holds the value; one from outside the mode can, if all ranks agree on it."""
    if isinstance(buffer, LocalTensor):
        outside = buffer._memory is not None and buffer._memory.outside
        missing = set(buffer.ranks) - {rank for rank, row in enumerate(value.held.row_of) if row >= 0}
        if missing:  # who is in no group keeps what it had
            kept = {r: value_of(mode, buffer).on(r) for r in missing}
            kept.update({r: value.on(r) for r in buffer.ranks if r not in missing})
            value = exchange.of_ranks(kept, mode.world)
        if not (outside and value.held.rows > 1):
            overwrite(buffer, value.cells, value.held)
            return
    elif value.held.rows == 1 and value.held.row_of.tobytes() == mode.everyone.row_of.tobytes():
        buffer.detach().copy_(value.cells[0].reshape(buffer.shape))
        return
    from localtensor.errors import OutsideWrite

    raise OutsideWrite(call, origin(sys._getframe(2)).place, f"{value.held.rows} different values")


# -- the quick ways, by kind


def _all_reduce(mode: Any, brought: Brought, whole: Family) -> list[Value]:
    return [all_reduced(value_of(mode, brought.reads), whole, brought.op)]


def all_reduced(value: Value, whole: Family, op: Any) -> Value:
    return exchange.all_reduce(value, whole, op, lambda held: collectives.all_reduce(held, op))


def _reduce(mode: Any, brought: Brought, whole: Family) -> list[Value]:
    root = brought.root or 0
    plainly_done = lambda held: collectives.reduce(held, brought.op, root=root)  # noqa: E731
    return [exchange.reduce(value_of(mode, brought.reads), whole, brought.op, root, plainly_done)]


def _broadcast(mode: Any, brought: Brought, whole: Family) -> list[Value]:
    return [broadcasted(value_of(mode, brought.reads), whole, brought.root or 0)]


def broadcasted(value: Value, whole: Family, root: int) -> Value:
    return exchange.broadcast(value, whole, root, lambda held: collectives.broadcast(held, root))


def gathered(value: Value, whole: Family) -> Value:
    """All members' tensors, along a new dim 0."""
    return exchange.all_gather(value, whole, lambda held: [torch.stack(each) for each in collectives.all_gather(held)])


def _all_gather(mode: Any, brought: Brought, whole: Family) -> list[Value]:
    cells, held = gathered(value_of(mode, brought.reads), whole)
    pairs = list(zip(cells, held.sizes, strict=True))
    return [
        Value(tuple(cell[:, i] if rows > 1 else cell[i] for cell, rows in pairs), held)
        for i in range(len(brought.writes))
    ]


def _all_gather_into_tensor(mode: Any, brought: Brought, whole: Family) -> list[Value]:
    return [joined_rows(gathered(value_of(mode, brought.reads), whole))]


def joined_rows(value: Value) -> Value:
    """Dims 0 and 1 of each rank's tensor are one."""
    shapes = [
        (cell.flatten(1, 2) if cell.dim() > 2 else cell) if rows > 1 else (cell.flatten(0, 1) if cell.dim() > 1 else cell)
        for cell, rows in zip(value.cells, value.held.sizes, strict=True)
    ]
    return Value(tuple(shapes), value.held)


def _reduce_scatter_tensor(mode: Any, brought: Brought, whole: Family) -> list[Value]:
    return [reduce_scattered(value_of(mode, brought.reads), whole, brought.op)]


def reduce_scattered(value: Value, whole: Family, op: Any) -> Value:
    return exchange.reduce_scatter(value, whole, op, lambda held: collectives.reduce_scatter_tensor(held, op))


def _all_to_all_single(mode: Any, brought: Brought, whole: Family) -> list[Value] | None:
    if brought.input_splits or brought.output_splits:
        return None
    return [exchanged(value_of(mode, brought.reads), whole)]


def exchanged(value: Value, whole: Family) -> Value:
    return exchange.all_to_all(value, whole, collectives.all_to_all_single)


def _scatter(mode: Any, brought: Brought, whole: Family) -> list[Value] | None:
    found = exchange.scatter([value_of(mode, x) for x in brought.reads], whole, brought.root or 0)
    return None if found is None else [found]


_QUICK: dict[str, Callable[[Any, Brought, Family], list[Value] | None]] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "all_gather_into_tensor": _all_gather_into_tensor,
    "reduce_scatter_tensor": _reduce_scatter_tensor,
    "all_to_all_single": _all_to_all_single,
    "scatter": _scatter,
}


def _by_ranks(mode: Any, served: Served, brought: Brought, whole: Family) -> list[Value]:
    """As rank threads do it: each rank's own tensors, group by group."""
    outputs: list[dict[int, Tensor]] = [{} for _ in brought.writes]
    for number, ranks in enumerate(whole.groups):
        group = Group(str(number), ranks)
        parts = [_part(mode, served, brought, rank, group) for rank in ranks]
        for rank, mine in zip(ranks, served.compute(parts), strict=True):
            for output, x in zip(outputs, mine, strict=False):  # the root alone gets a gathered list
                output[rank] = x
    return [exchange.of_ranks(output, mode.world) for output in outputs]


def _part(mode: Any, served: Served, brought: Brought, rank: int, group: Group) -> Part:
    reads = _on(mode, brought.reads, rank)
    if served.kind == "scatter" and rank != group.ranks[brought.root or 0]:
        reads = []
    part = Part(rank, served.kind, group, reads, (), None, op=brought.op)
    part.root = None if brought.root is None else group.ranks[brought.root]
    part.input_splits, part.output_splits = brought.input_splits, brought.output_splits
    return part


def _on(mode: Any, reads: Any, rank: int) -> Any:
    if not isinstance(reads, Tensor):
        return [_on(mode, each, rank) for each in reads]
    value = value_of(mode, reads)
    if value.held.row_of[rank] < 0:
        raise NotHeld("collective", [rank], [r for r, row in enumerate(value.held.row_of) if row >= 0])
    return value.on(rank)


# -- functional collectives: what comes back is a tensor of its own


def _split_sizes(mode: Any, x: Tensor, out: Any, sent: Any, group: Any) -> Value:
    whole = family_of(mode, group)
    even = len(set(out)) <= 1 and len(set(sent)) <= 1
    if even:
        return exchanged(value_of(mode, x), whole)
    brought = Brought(x, [x], input_splits=list(sent), output_splits=list(out))
    return _by_ranks(mode, SERVED["alltoall_base_"], brought, whole)[0]


def _moved_shards(mode: Any, x: Tensor, gather_dim: int, shard_dim: int, group: Any) -> Value:
    """Cut along one dim, sent, joined along the other: an all-to-all with the pieces in front."""
    whole = family_of(mode, group)
    done = partial(collectives.shard_dim_alltoall, gather_dim=gather_dim, shard_dim=shard_dim)
    return exchange.move_shards(value_of(mode, x), whole, gather_dim, shard_dim, done)


_FUNCTIONAL: dict[str, Callable[..., Value]] = {
    "all_reduce": lambda mode, x, op, group: all_reduced(value_of(mode, x), family_of(mode, group), op),
    "broadcast": lambda mode, x, src, group: broadcasted(value_of(mode, x), family_of(mode, group), src),
    "all_gather_into_tensor": lambda mode, x, size, group: joined_rows(
        gathered(value_of(mode, x), family_of(mode, group))
    ),
    "reduce_scatter_tensor": lambda mode, x, op, size, group: reduce_scattered(
        value_of(mode, x), family_of(mode, group), op
    ),
    "all_to_all_single": _split_sizes,
    "shard_dim_alltoall": _moved_shards,
}


def serve_functional(mode: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One of torch's functional collectives."""
    name = func._schema.name.split("::")[1]
    if name in ("wait_tensor", "_wrap_tensor_autograd"):
        return args[0]
    into = kwargs.get("out")
    if name.endswith("_coalesced"):
        one = _FUNCTIONAL[name.removesuffix("_coalesced")]
        with plainly():
            values = [one(mode, x, *args[1:]) for x in args[0]]
        return [wrap(*value, mode) for value in values]
    plain_name = name.removesuffix("_out").removesuffix("_coalesced_").removesuffix("_")
    served = _FUNCTIONAL.get(plain_name)
    if served is None:
        raise NotInLockstep(f"torch.ops.{func}", "who sends to whom differs from rank to rank")
    targets = [into] if into is not None else args[0] if name.endswith("_coalesced_") else [args[0]]
    sources = args[0] if name.endswith("_coalesced_") else [args[0]]
    with plainly():
        values = [served(mode, x, *args[1:]) for x in sources]
        if not name.endswith(("_out", "_")):
            return wrap(*values[0], mode)
        for target, value in zip(targets, values, strict=True):
            check_write(mode, target, str(func))
            write(mode, target, value, name)
    return targets if name.endswith("_coalesced_") else targets[0]


@lru_cache(256)
def handler(namespace: str) -> Any:
    """Who serves the ops of a namespace; None for those of torch itself."""
    if namespace == "c10d":
        return serve
    if namespace in ("_c10d_functional", "_c10d_functional_autograd", "_dtensor"):
        return serve_functional
    return None
