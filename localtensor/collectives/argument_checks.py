"""What one rank offers to a collective or a message is fit by itself: said at its own call, before its peers come.

Real backends refuse some of it here, too, and read or write the wrong bytes with the rest.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from localtensor.collectives import checks
from localtensor.collectives.c10d_table import Brought
from localtensor.errors import BadGroup, DtypeNotCarried, NegativeTag, NotContiguous
from localtensor.layout.reductions import CARRIED, carrier, check_reducible

# gloo works on the memory of these as it lies: gaps are filled with what belongs elsewhere, and the rest stays.
_IN_PLACE = frozenset({"all_reduce", "all_reduce_coalesced", "reduce", "broadcast"})
_IN_ORDER = frozenset({"scatter", "reduce_scatter", "all_to_all_single"})  # rows arrive in the order of memory


def check_offer(kind: str, brought: Brought, rank: int, members: Sequence[int]) -> None:
    """`members` are the ranks of the group, `rank` one of them.

    Raises `DtypeNotCarried`, `DtypeNotReducible`, `UnknownReduction`, `RankOutside`, `WrongListLength`, `NotDense`,
    `NotContiguous`: each rank by itself, so that a program can catch it, as it can on gloo.
    """
    for x in flat(brought.reads):
        if x.dtype not in CARRIED:
            raise DtypeNotCarried(kind, "tensor", x.dtype, carrier(x.dtype))
        if brought.op is not None:
            check_reducible(kind, brought.op, x.dtype)
    if brought.root is not None:
        checks.check_rank(kind, "root", brought.root, len(members))
    if kind == "all_gather" or (kind == "gather" and rank == members[brought.root or 0]):
        checks.check_length(kind, rank, brought.writes, len(members))
    if kind in _IN_PLACE:
        for x in brought.writes:
            checks.check_dense(kind, {"tensor": x})
            if not x.is_contiguous() and not _without_gaps(x):
                raise NotContiguous(kind, "tensor", tuple(x.shape), x.stride())
    elif kind in _IN_ORDER:
        for x in brought.writes:
            checks.check_contiguous(kind, {"output": x})


def check_message(kind: str, tensors: Sequence[Tensor], peer: int | None, tag: int, ranks: int) -> None:
    """`peer` is counted within the group; None is anyone.  Raises `RankOutside`, `NotContiguous`, `NegativeTag`."""
    if peer is not None:
        checks.check_rank(kind, "peer", peer, ranks)
    if tag < 0:
        raise NegativeTag(kind, tag)
    for x in tensors:
        if not x.is_contiguous():
            raise NotContiguous(kind, "tensor", tuple(x.shape), x.stride())


def flat(reads: Any) -> Iterator[Tensor]:
    """The tensors of what a collective reads: a tensor, a list, or a list of lists."""
    if isinstance(reads, Tensor):
        yield reads
    else:
        for each in reads:
            yield from flat(each)


def _without_gaps(x: Tensor) -> bool:
    """Whether the elements fill one stretch of memory, each a place of its own, in whatever order.

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


def must_fit(asked: Mapping[str, Any], rank: int, ranks: int) -> None:
    """What init_process_group is asked for is what this run has, or nothing in particular."""
    for name, actual in (("world_size", ranks), ("rank", rank)):
        if asked.get(name, -1) not in (-1, actual):
            remedy = "Leave it out, or read it from the environment (RANK, WORLD_SIZE) as under torchrun."
            raise BadGroup("init_process_group", name, f"{name}={asked[name]}", f"this run has {actual}", remedy)
