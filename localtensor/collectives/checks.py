"""What the ranks of a collective must agree on before anything moves; each check passes in silence or raises.

Tensors go by their place in what the ranks bring: `held[1]` is rank 1's, `lists[1][0]` its first of several.
"""

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import TypeAlias

import torch
from torch import Tensor

from localtensor.errors import (
    DevicesDiffer,
    DtypeNotCarried,
    DtypesDiffer,
    ListsDiffer,
    NegativeSplit,
    NoSuchDim,
    NotContiguous,
    NotDense,
    NotOnePerRank,
    RankOutside,
    ScalarTensor,
    ShapesDiffer,
    SplitCount,
    SplitsDisagree,
    SplitSum,
    UnevenDim,
    WrongListLength,
)
from localtensor.layout.reductions import CARRIED, Op, carrier, check_reducible

Named: TypeAlias = dict[str, Tensor]
Splits: TypeAlias = Sequence[Sequence[int] | None]


def name_held(call: str, held: Sequence[Tensor]) -> Named:
    """Each rank's tensor by its place; raises `NotOnePerRank` for a lone tensor and for nothing."""
    check_group(call, "held", held)
    return {f"held[{rank}]": x for rank, x in enumerate(held)}


def name_lists(call: str, lists: Sequence[Sequence[Tensor]]) -> Named:
    """Each tensor of each rank's list by its place; raises `NotOnePerRank` for a lone tensor and for nothing."""
    check_group(call, "lists", lists)
    for rank, tensors in enumerate(lists):
        if isinstance(tensors, Tensor):
            raise NotOnePerRank(call, f"lists[{rank}]", f"one tensor of shape {tuple(tensors.shape)}")
    return {f"lists[{rank}][{i}]": x for rank, tensors in enumerate(lists) for i, x in enumerate(tensors)}


def check_group(call: str, argument: str, held: Sequence[object]) -> None:
    if isinstance(held, Tensor):
        raise NotOnePerRank(call, argument, f"one tensor of shape {tuple(held.shape)}")
    if not held:
        raise NotOnePerRank(call, argument, "nothing")


def check_wire(call: str, named: Named, op: Op | None = None) -> None:
    """All dense, of one device and of one dtype that gloo's collectives carry, and reduce if there is an op.

    Whether the dtype can be reduced comes before whether dtypes agree, so that the remedy for the latter,
    a common dtype, always can.
    """
    check_dense(call, named)
    for name, x in named.items():
        if x.dtype not in CARRIED:
            raise DtypeNotCarried(call, name, x.dtype, carrier(x.dtype))
        if op is not None:
            check_reducible(call, op, x.dtype)
    check_one_kind(call, named)


def check_dense(call: str, named: Named) -> None:
    for name, x in named.items():
        if x.layout != torch.strided:
            raise NotDense(call, name, x.layout)


def check_one_kind(call: str, named: Named) -> None:
    """One device and one dtype."""
    devices = {name: x.device for name, x in named.items()}
    dtypes = {name: x.dtype for name, x in named.items()}
    if len(set(devices.values())) > 1:
        raise DevicesDiffer(call, devices)
    if len(set(dtypes.values())) > 1:
        raise DtypesDiffer(call, dtypes, carrier(reduce(torch.promote_types, dtypes.values())))


def check_shapes(call: str, shapes: Mapping[str, Sequence[int]]) -> None:
    if len({tuple(shape) for shape in shapes.values()}) > 1:
        raise ShapesDiffer(call, {name: tuple(shape) for name, shape in shapes.items()})


def shapes_of(named: Named) -> dict[str, torch.Size]:
    return {name: x.shape for name, x in named.items()}


def check_contiguous(call: str, named: Named) -> None:
    for name, x in named.items():
        if not x.is_contiguous():
            raise NotContiguous(call, name, tuple(x.shape), x.stride())


def check_rank(call: str, argument: str, rank: int, ranks: int) -> None:
    if not 0 <= rank < ranks:
        raise RankOutside(call, argument, rank, ranks)


def check_length(call: str, rank: int, tensors: Sequence[Tensor], want: int) -> None:
    if len(tensors) != want:
        raise WrongListLength(call, rank, len(tensors), want)


def check_equal_lengths(call: str, lists: Sequence[Sequence[Tensor]]) -> None:
    lengths = {f"lists[{rank}]": len(tensors) for rank, tensors in enumerate(lists)}
    if len(set(lengths.values())) > 1:
        raise ListsDiffer(call, lengths)


def check_dim(call: str, dim: int, shape: Sequence[int], *, for_scalars: str) -> None:
    """The shape has that dim, counted from the front; `for_scalars` is what to do if it has none at all."""
    if not shape:
        raise ScalarTensor(call, for_scalars)
    if not 0 <= dim < len(shape):
        raise NoSuchDim(call, dim, shape)


def check_even(call: str, dim: int, shape: Sequence[int], ranks: int, *, instead: str = "") -> None:
    if shape[dim] % ranks:
        raise UnevenDim(call, dim, shape, ranks, instead)


def sizes_sent(call: str, held: Sequence[Tensor], splits: Splits | None) -> list[list[int]]:
    """The rows that each rank sends to each; None means equal pieces, of all ranks or of one."""
    each = [None] * len(held) if splits is None else splits
    if len(each) != len(held):
        raise NotOnePerRank(call, "input_splits", f"{len(each)} lists for {len(held)} ranks")
    return [
        _even_sizes(call, x.shape, len(held)) if sizes is None else _checked(call, rank, sizes, x, len(held))
        for rank, (x, sizes) in enumerate(zip(held, each, strict=True))
    ]


def _even_sizes(call: str, shape: Sequence[int], ranks: int) -> list[int]:
    check_even(call, 0, shape, ranks, instead="name the sizes in input_splits")
    return [shape[0] // ranks] * ranks


def _checked(call: str, rank: int, sizes: Sequence[int], x: Tensor, ranks: int) -> list[int]:
    argument = f"input_splits[{rank}]"
    if len(sizes) != ranks:
        raise SplitCount(call, argument, sizes, ranks)
    if min(sizes) < 0:
        raise NegativeSplit(call, argument, list(sizes))
    if sum(sizes) != x.shape[0]:
        raise SplitSum(call, argument, sizes, x.shape[0])
    return list(sizes)


def check_received(call: str, sent: list[list[int]], splits: Splits | None) -> None:
    """Each rank expects what its peers send it; None expects equal pieces, on all ranks or on one."""
    each = [None] * len(sent) if splits is None else splits
    if len(each) != len(sent):
        raise NotOnePerRank(call, "output_splits", f"{len(each)} lists for {len(sent)} ranks")
    for rank, (expected, column) in enumerate(zip(each, zip(*sent, strict=True), strict=True)):
        if len(set(column)) > 1 if expected is None else list(expected) != list(column):
            raise SplitsDisagree(call, rank, "equal pieces" if expected is None else list(expected), list(column))
