"""Checks of what ranks bring to a collective: of one rank's own arguments, and of what all ranks must agree on.

A rank's own arguments are checked when it makes its call, before its peers arrive.  Real backends refuse some of
what is refused here, and read or write the wrong bytes with the rest.

What the ranks must agree on is checked before anything moves.  Messages name a tensor by its place: `held[1]` is rank
1's, `lists[1][0]` the first of rank 1's list.  Each check returns None or raises.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from localtensor import errors
from localtensor.layout.reductions import GLOO_DTYPES, PremulSum, ReductionOp, carrier_dtype, check_reducible

if TYPE_CHECKING:
    from localtensor.collectives.c10d_table import CallArguments

# gloo works on the memory of these as it lies: with gaps, it writes elements to the wrong places.
_REQUIRE_DENSE = frozenset({"all_reduce", "all_reduce_coalesced", "reduce", "broadcast"})
_REQUIRE_CONTIGUOUS = frozenset({"scatter", "reduce_scatter", "all_to_all_single"})  # rows go in memory order
SPARSE_ALL_REDUCE = "sparse_all_reduce"
_NOT_ADDED_SPARSE = frozenset({torch.float16, torch.bool})  # torch has no sum of two sparse tensors of these
_ReduceOp: Any = dist.ReduceOp
REDUCTION_NAMES = {
    int(getattr(_ReduceOp.RedOpType, name)): name.lower()
    for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
}
PREMUL_SUM = int(_ReduceOp.RedOpType.PREMUL_SUM)
AnyOp: TypeAlias = ReductionOp | dist.ReduceOp | dist.ReduceOp.RedOpType
Reads: TypeAlias = "Tensor | Sequence[Reads]"
Named: TypeAlias = dict[str, Tensor]
Splits: TypeAlias = Sequence[Sequence[int] | None]


def check_rank_arguments(kind: str, brought: CallArguments, rank: int, members: Sequence[int]) -> None:
    """Check what one rank brings to a collective; `members` are the global ranks of the group, `rank` one of them.

    Raises `DtypeNotCarried`, `DtypeNotReducible`, `UnknownReduction`, `RankOutside`, `WrongListLength`, `NotDense`,
    `NotContiguous` on that rank alone, so that a program can catch it, as it can on gloo.
    """
    for x in flat_tensors(brought.reads):
        if x.dtype not in GLOO_DTYPES:
            raise errors.DtypeNotCarried(kind, "tensor", x.dtype, carrier_dtype(x.dtype))
        if brought.op is not None:
            check_reducible(kind, brought.op, x.dtype)
    if brought.root is not None:
        check_rank(kind, "root", brought.root, len(members))
    if kind == "all_gather" or (kind == "gather" and rank == members[brought.root or 0]):
        check_length(kind, rank, brought.writes, len(members) * brought.lists**2)
    if kind == SPARSE_ALL_REDUCE:
        _check_sparse(kind, brought)
    if kind in _REQUIRE_DENSE:
        for x in brought.writes:
            check_dense(kind, {"tensor": x})
            if not x.is_contiguous() and not _without_gaps(x):
                raise errors.NotContiguous(kind, "tensor", tuple(x.shape), x.stride())
    elif kind in _REQUIRE_CONTIGUOUS:
        for x in brought.writes:
            check_contiguous(kind, {"output": x})


def _check_sparse(kind: str, brought: CallArguments) -> None:
    """Raises `NotDense` where the gloo backend has no reduction of sparse tensors."""
    for x in brought.writes:
        if brought.op != "sum" or x.dtype in _NOT_ADDED_SPARSE:
            check_dense(kind, {"tensor": x})


def check_message(kind: str, tensors: Sequence[Tensor], peer: int | None, tag: int, ranks: int) -> None:
    """Check a send or receive; `peer` is a group rank, or None for any.

    Raises `RankOutside`, `NotContiguous`, `NegativeTag`.
    """
    if peer is not None:
        check_rank(kind, "peer", peer, ranks)
    if tag < 0:
        raise errors.NegativeTag(kind, tag)
    for x in tensors:
        if not x.is_contiguous():
            raise errors.NotContiguous(kind, "tensor", tuple(x.shape), x.stride())


def flat_tensors(reads: Reads) -> list[Tensor]:
    """The tensors in a tensor, a list, or a list of lists."""
    if isinstance(reads, Tensor):
        return [reads]
    found: list[Tensor] = []
    for each in reads:
        found += [each] if isinstance(each, Tensor) else flat_tensors(each)
    return found


def reduction_name(op: object) -> object:
    """The name of a reduction given as torch's ReduceOp, or as a name in any case; other objects unchanged.

    >>> reduction_name(dist.ReduceOp.MAX), reduction_name("SUM")
    ('max', 'sum')
    """
    if isinstance(op, str):
        return op.lower()
    if not isinstance(op, _ReduceOp | _ReduceOp.RedOpType):
        return op
    number = int(getattr(op, "op", op))
    if number == PREMUL_SUM:
        return PremulSum(float(op.__getstate__()[1]))
    return REDUCTION_NAMES.get(number, f"reduce op {number}")


def _without_gaps(x: Tensor) -> bool:
    """Whether the elements fill one contiguous range of memory without overlap, in any order.

    >>> import torch
    >>> x = torch.zeros(3, 4)
    >>> _without_gaps(x.t()), _without_gaps(x[:, 1]), _without_gaps(x[:1].expand(3, 4))
    (True, False, False)
    """
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(x.stride(), x.shape) if size != 1):
        if stride != expected:
            return x.numel() == 0
        expected *= size
    return True


def check_init_arguments(arguments: Mapping[str, Any], rank: int, ranks: int) -> None:
    """Check the world_size and rank passed to init_process_group against the run.  Raises `BadGroup`."""
    for name, actual in (("world_size", ranks), ("rank", rank)):
        if arguments.get(name, -1) not in (-1, actual):
            remedy = "Leave it out, or read it from the environment (RANK, WORLD_SIZE) as under torchrun."
            raise errors.BadGroup(
                "init_process_group", name, f"{name}={arguments[name]}", f"this run has {actual}", remedy
            )


def name_held(call: str, held: Sequence[Tensor]) -> Named:
    """Each rank's tensor by its place.  Raises `NotOnePerRank` for a single tensor and for an empty list."""
    check_group(call, "held", held)
    return {f"held[{rank}]": x for rank, x in enumerate(held)}


def name_lists(call: str, lists: Sequence[Sequence[Tensor]]) -> Named:
    """Each tensor of each rank's list by its place.  Raises `NotOnePerRank` for a single tensor and for an empty list."""
    check_group(call, "lists", lists)
    for rank, tensors in enumerate(lists):
        if isinstance(tensors, Tensor):
            raise errors.NotOnePerRank(call, f"lists[{rank}]", f"one tensor of shape {tuple(tensors.shape)}")
    return {f"lists[{rank}][{i}]": x for rank, tensors in enumerate(lists) for i, x in enumerate(tensors)}


def check_group(call: str, argument: str, held: Sequence[object]) -> None:
    """Raises `NotOnePerRank` for a single tensor and for an empty list."""
    if isinstance(held, Tensor):
        raise errors.NotOnePerRank(call, argument, f"one tensor of shape {tuple(held.shape)}")
    if not held:
        raise errors.NotOnePerRank(call, argument, "nothing")


def check_wire(call: str, named: Named, op: ReductionOp | None = None) -> None:
    """Check that all tensors are dense, on one device, and of one dtype that gloo carries (and reduces, with an op).

    Raises `NotDense`, `DtypeNotCarried`, `DtypeNotReducible`, `UnknownReduction`, `DevicesDiffer`, `DtypesDiffer`.
    Each dtype is checked for reduction before dtypes are compared, so that the remedy for different dtypes, a common
    dtype, can always be reduced.
    """
    check_dense(call, named)
    for name, x in named.items():
        if x.dtype not in GLOO_DTYPES:
            raise errors.DtypeNotCarried(call, name, x.dtype, carrier_dtype(x.dtype))
        if op is not None:
            check_reducible(call, op, x.dtype)
    check_one_kind(call, named)


def check_held(call: str, held: Sequence[Tensor], op: ReductionOp | None = None) -> None:
    """Check each rank's tensor as `check_wire` does, and that all have one shape.  Raises `NotOnePerRank`, `ShapesDiffer`, too."""
    named = name_held(call, held)
    check_wire(call, named, op)
    check_shapes(call, shapes_of(named))


def check_dense(call: str, named: Named) -> None:
    """Raises `NotDense` for a sparse tensor."""
    for name, x in named.items():
        if x.layout != torch.strided:
            raise errors.NotDense(call, name, x.layout)


def check_one_kind(call: str, named: Named) -> None:
    """Raises `DevicesDiffer` and `DtypesDiffer` unless all tensors have one device and one dtype."""
    devices = {name: x.device for name, x in named.items()}
    dtypes = {name: x.dtype for name, x in named.items()}
    if len(set(devices.values())) > 1:
        raise errors.DevicesDiffer(call, devices)
    if len(set(dtypes.values())) > 1:
        raise errors.DtypesDiffer(call, dtypes, carrier_dtype(reduce(torch.promote_types, dtypes.values())))


def check_shapes(call: str, shapes: Mapping[str, Sequence[int]]) -> None:
    """Raises `ShapesDiffer` unless all shapes are equal."""
    if len({tuple(shape) for shape in shapes.values()}) > 1:
        raise errors.ShapesDiffer(call, {name: tuple(shape) for name, shape in shapes.items()})


def shapes_of(named: Named) -> dict[str, torch.Size]:
    return {name: x.shape for name, x in named.items()}


def check_contiguous(call: str, named: Named) -> None:
    """Raises `NotContiguous` for a tensor whose elements are not in memory order."""
    for name, x in named.items():
        if not x.is_contiguous():
            raise errors.NotContiguous(call, name, tuple(x.shape), x.stride())


def check_rank(call: str, argument: str, rank: int, ranks: int) -> None:
    """Raises `RankOutside` unless it is a rank of a group of so many `ranks`."""
    if not 0 <= rank < ranks:
        raise errors.RankOutside(call, argument, rank, ranks, ranks - 1)


def check_length(call: str, rank: int, tensors: Sequence[Tensor], want: int) -> None:
    """Raises `WrongListLength` unless the list of this rank has `want` tensors."""
    if len(tensors) != want:
        raise errors.WrongListLength(call, rank, len(tensors), want)


def check_equal_lengths(call: str, lists: Sequence[Sequence[Tensor]]) -> None:
    """Raises `ListsDiffer` unless all ranks' lists are equally long."""
    lengths = {f"lists[{rank}]": len(tensors) for rank, tensors in enumerate(lists)}
    if len(set(lengths.values())) > 1:
        raise errors.ListsDiffer(call, lengths)


def check_dim(call: str, dim: int, shape: Sequence[int], *, for_scalars: str) -> None:
    """Raises `NoSuchDim` unless the shape has the dim, counted from the front.

    Raises `ScalarTensor` for a shape without dims, with the remedy `for_scalars`.
    """
    if not shape:
        raise errors.ScalarTensor(call, for_scalars)
    if not 0 <= dim < len(shape):
        raise errors.NoSuchDim(call, dim, shape)


def check_even(call: str, dim: int, shape: Sequence[int], ranks: int, *, instead: str = "") -> None:
    """Raises `UnevenDim`, with the remedy `instead`, unless the dim divides evenly among the ranks."""
    if shape[dim] % ranks:
        raise errors.UnevenDim(call, dim, shape, ranks, instead)


def sizes_sent(call: str, held: Sequence[Tensor], splits: Splits | None) -> list[list[int]]:
    """The number of rows that each rank sends to each rank; None means equal pieces, for all ranks or for one.

    Raises `NotOnePerRank`, `SplitCount`, `NegativeSplit`, `SplitSum`, `UnevenDim`.
    """
    each = [None] * len(held) if splits is None else splits
    if len(each) != len(held):
        raise errors.NotOnePerRank(call, "input_splits", f"{len(each)} lists for {len(held)} ranks")
    found = []
    for rank, (x, own) in enumerate(zip(held, each, strict=True)):
        if own is None:
            check_even(call, 0, x.shape, len(held), instead="name the sizes in input_splits")
        argument, sizes = f"input_splits[{rank}]", [x.shape[0] // len(held)] * len(held) if own is None else list(own)
        if len(sizes) != len(held):
            raise errors.SplitCount(call, argument, sizes, len(sizes), len(held))
        if min(sizes) < 0:
            raise errors.NegativeSplit(call, argument, sizes)
        if sum(sizes) != x.shape[0]:
            raise errors.SplitSum(call, argument, sizes, x.shape[0], sum(sizes))
        found.append(sizes)
    return found


def check_received(call: str, sent: list[list[int]], splits: Splits | None) -> None:
    """Check that each rank expects what its peers send; None expects equal pieces, on all ranks or on one.

    Raises `NotOnePerRank`, `SplitsDisagree`.
    """
    each = [None] * len(sent) if splits is None else splits
    if len(each) != len(sent):
        raise errors.NotOnePerRank(call, "output_splits", f"{len(each)} lists for {len(sent)} ranks")
    for rank, (expected, column) in enumerate(zip(each, zip(*sent, strict=True), strict=True)):
        if len(set(column)) > 1 if expected is None else list(expected) != list(column):
            raise errors.SplitsDisagree(
                call, rank, "equal pieces" if expected is None else list(expected), list(column)
            )
