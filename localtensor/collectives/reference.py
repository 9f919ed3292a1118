"""Collectives as arithmetic: pure functions from what the ranks of one group bring to what each holds afterwards.

Arguments and results are in group order: a list of tensors where each rank brings or gets one tensor, a list of lists
where each brings or gets a list.  Results are fresh and contiguous: no result shares storage with an input or with
another result, and no input is changed.  Autograd sees ordinary arithmetic, so the backward is the true adjoint.  A
barrier has no value, and so no function.

The functions refuse what gloo of torch 2.13.0 refuses, and also the calls in which gloo hangs, ends the process, or
returns other ranks' bits as numbers (shapes or dtypes that differ).  Every function raises

    NotOnePerRank      held is one tensor, or empty
    DtypeNotCarried    gloo's collectives do not take the dtype; send_recv takes any
    DtypesDiffer, ShapesDiffer, DevicesDiffer, NotDense

and each that reduces raises UnknownReduction and DtypeNotReducible.  Docstrings name only what is added.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from localtensor import errors
from localtensor.collectives import argument_checks as checks
from localtensor.layout.reductions import ReductionOp, fold

T = TypeVar("T")


def all_reduce(held: Sequence[Tensor], op: ReductionOp = "sum") -> list[Tensor]:
    """Every rank holds the reduction of all ranks' tensors, in their shape and dtype.

    >>> all_reduce([torch.tensor([1, 5]), torch.tensor([2, 3])], "max")
    [tensor([2, 5]), tensor([2, 5])]
    """
    checks.check_held("all_reduce", held, op)
    total = fold(held, op)
    return [_fresh(total) for _ in held]


def sparse_all_reduce(held: Sequence[Tensor]) -> list[Tensor]:
    """Every rank holds the sum of all ranks' sparse tensors, coalesced; each rank's own is coalesced first, as gloo does.

    Raises `ShapesDiffer` for different numbers of sparse dims, too.

    >>> x = torch.tensor([0.0, 5.0, 0.0]).to_sparse()
    >>> sparse_all_reduce([x, x])[1].to_dense()
    tensor([ 0., 10.,  0.])
    """
    call = "sparse_all_reduce"
    named = checks.name_held(call, held)
    checks.check_one_kind(call, named)
    checks.check_shapes(call, {name: x.shape[: x.sparse_dim()] for name, x in named.items()})
    checks.check_shapes(call, checks.shapes_of(named))
    total = held[0].coalesce().clone()
    for x in held[1:]:
        total += x.coalesce()
    total = total.coalesce()
    return [total.clone() for _ in held]


def reduce(held: Sequence[Tensor], op: ReductionOp = "sum", *, root: int) -> list[Tensor]:
    """The root holds the reduction of all ranks' tensors; the others hold what they brought.

    torch does not define the result of the others (torch.distributed.reduce), and gloo leaves partial sums there.
    Raises `RankOutside`.

    >>> reduce([torch.tensor([1]), torch.tensor([2])], root=1)
    [tensor([1]), tensor([3])]
    """
    checks.check_held("reduce", held, op)
    checks.check_rank("reduce", "root", root, len(held))
    return [_fresh(fold(held, op, rooted=True) if rank == root else x) for rank, x in enumerate(held)]


def broadcast(held: Sequence[Tensor], root: int) -> list[Tensor]:
    """Every rank holds the root's tensor.  Raises `RankOutside`.

    >>> broadcast([torch.tensor([1]), torch.tensor([2])], root=1)
    [tensor([2]), tensor([2])]
    """
    checks.check_held("broadcast", held)
    checks.check_rank("broadcast", "root", root, len(held))
    return [_fresh(held[root]) for _ in held]


def all_gather(held: Sequence[Tensor]) -> list[list[Tensor]]:
    """Every rank holds a list of all ranks' tensors.

    Equal shapes only: gloo refuses others, though NCCL would carry them.

    >>> all_gather([torch.tensor(1), torch.tensor(2)])
    [[tensor(1), tensor(2)], [tensor(1), tensor(2)]]
    """
    checks.check_held("all_gather", held)
    return [[_fresh(x) for x in held] for _ in held]


def all_gather_into_tensor(held: Sequence[Tensor], dim: int = 0) -> list[Tensor]:
    """Every rank holds all ranks' tensors, joined along `dim`.

    c10d itself joins along dim 0; functional collectives offer the others (all_gather_tensor).
    Raises `ScalarTensor`, and `NoSuchDim` also for negative dims.

    >>> all_gather_into_tensor([torch.tensor([[1, 2]]), torch.tensor([[3, 4]])], dim=1)
    [tensor([[1, 2, 3, 4]]), tensor([[1, 2, 3, 4]])]
    """
    call = "all_gather_into_tensor"
    checks.check_held(call, held)
    checks.check_dim(call, dim, held[0].shape, for_scalars="Pass x.reshape(1).")
    return [torch.cat(list(held), dim).contiguous() for _ in held]


def gather(held: Sequence[Tensor], root: int) -> list[list[Tensor]]:
    """The root holds a list of all ranks' tensors, the others an empty list.

    Raises `RankOutside`, `ComplexNotGathered`.

    >>> gather([torch.tensor(1), torch.tensor(2)], root=1)
    [[], [tensor(1), tensor(2)]]
    """
    checks.check_held("gather", held)
    checks.check_rank("gather", "root", root, len(held))
    if held[0].is_complex():
        raise errors.ComplexNotGathered("gather", held[0].dtype)
    return [[_fresh(x) for x in held] if rank == root else [] for rank in range(len(held))]


def scatter(lists: Sequence[Sequence[Tensor]], root: int) -> list[Tensor]:
    """Rank i holds the i-th tensor of the root's list; the others bring empty lists.

    Raises `RankOutside`, `WrongListLength`, `ListFromNonRoot`, and `NotContiguous`, because gloo sends the
    bytes of such a piece in the order in which they lie.

    >>> scatter([[torch.tensor(1), torch.tensor(2)], []], root=0)
    [tensor(1), tensor(2)]
    """
    named = _check_lists("scatter", lists)
    checks.check_rank("scatter", "root", root, len(lists))
    for rank, pieces in enumerate(lists):
        if rank != root and pieces:
            raise errors.ListFromNonRoot("scatter", rank, len(pieces), root)
    checks.check_length("scatter", root, lists[root], len(lists))
    checks.check_shapes("scatter", checks.shapes_of(named))
    checks.check_contiguous("scatter", named)
    return [_fresh(piece) for piece in lists[root]]


def reduce_scatter(lists: Sequence[Sequence[Tensor]], op: ReductionOp = "sum") -> list[Tensor]:
    """Rank i holds the reduction of the i-th tensors of all ranks' lists; the pieces may be uneven.

    Raises `WrongListLength`, and `NotContiguous`, because gloo then adds the wrong elements.

    >>> reduce_scatter([[torch.tensor([1, 2]), torch.tensor([3])], [torch.tensor([4, 5]), torch.tensor([6])]])
    [tensor([5, 7]), tensor([9])]
    """
    named = _check_lists("reduce_scatter", lists, op)
    for rank, pieces in enumerate(lists):
        checks.check_length("reduce_scatter", rank, pieces, len(lists))
    columns = list(zip(*lists, strict=True))
    for i, column in enumerate(columns):
        checks.check_shapes("reduce_scatter", {f"lists[{rank}][{i}]": x.shape for rank, x in enumerate(column)})
    checks.check_contiguous("reduce_scatter", named)
    return [_fresh(fold(column, op)) for column in columns]


def reduce_scatter_tensor(held: Sequence[Tensor], op: ReductionOp = "sum", *, dim: int = 0) -> list[Tensor]:
    """Rank i holds the i-th of equal pieces, cut along `dim`, of the reduction of all ranks' tensors.

    c10d itself cuts along dim 0; functional collectives offer the others (reduce_scatter_tensor).
    Raises `UnevenDim`, `ScalarTensor`, and `NoSuchDim` also for negative dims.

    >>> reduce_scatter_tensor([torch.tensor([1, 2]), torch.tensor([3, 4])])
    [tensor([4]), tensor([6])]
    """
    call = "reduce_scatter_tensor"
    checks.check_held(call, held, op)
    checks.check_dim(call, dim, held[0].shape, for_scalars=_one_row_per_rank(held))
    checks.check_even(call, dim, held[0].shape, len(held), instead="pass uneven pieces to reduce_scatter")
    rows = [x.movedim(dim, 0) for x in held]  # as they are sent: the order of adding depends on the place
    return [_fresh(piece.movedim(0, dim)) for piece in fold(rows, op).tensor_split(len(held))]


def all_to_all(lists: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    """The j-th tensor that rank i brings is the i-th that rank j holds; the tensors may be uneven.

    Uneven ones follow torch's documentation (torch.distributed.all_to_all) and NCCL; gloo refuses them.
    Raises `WrongListLength`.

    >>> all_to_all([[torch.tensor([0]), torch.tensor([1])], [torch.tensor([10]), torch.tensor([11])]])
    [[tensor([0]), tensor([10])], [tensor([1]), tensor([11])]]
    """
    _check_lists("all_to_all", lists)
    for rank, pieces in enumerate(lists):
        checks.check_length("all_to_all", rank, pieces, len(lists))
    return [[_fresh(x) for x in column] for column in zip(*lists, strict=True)]


def all_to_all_single(
    held: Sequence[Tensor], *, input_splits: checks.Splits | None = None, output_splits: checks.Splits | None = None
) -> list[Tensor]:
    """Rank j holds the j-th piece of each rank's tensor, joined in rank order; pieces are cut along dim 0.

    `input_splits[i]` are the rows that rank i sends to each rank, `output_splits[i]` those that it gets; None
    means equal pieces, of a whole list or of one rank's.  Only dim 0 may differ between ranks.
    Raises `SplitCount`, `NegativeSplit`, `SplitSum`, `SplitsDisagree`, `UnevenDim`, `ScalarTensor`, and
    `NotContiguous` as torch.distributed.all_to_all_single does.  Uneven rows without split sizes are refused
    as by functional collectives; through c10d, gloo cuts them in the middle of a number.

    >>> all_to_all_single([torch.tensor([1, 2]), torch.tensor([3, 4])])
    [tensor([1, 3]), tensor([2, 4])]
    """
    call = "all_to_all_single"
    named = checks.name_held(call, held)
    checks.check_wire(call, named)
    for x in held:
        checks.check_dim(call, 0, x.shape, for_scalars=_one_row_per_rank(held))
    checks.check_shapes(call, {f"{name}[0]": x.shape[1:] for name, x in named.items()})
    checks.check_contiguous(call, named)
    sizes = checks.sizes_sent(call, held, input_splits)
    checks.check_received(call, sizes, output_splits)
    pieces = [x.split(rows) for x, rows in zip(held, sizes, strict=True)]
    return [torch.cat(column).contiguous() for column in zip(*pieces, strict=True)]


def shard_dim_alltoall(held: Sequence[Tensor], *, gather_dim: int, shard_dim: int) -> list[Tensor]:
    """Shards of `gather_dim` become shards of `shard_dim`: cut along `shard_dim`, joined along `gather_dim`.

    DTensor uses it for S(gather_dim) -> S(shard_dim) (torch.ops._dtensor.shard_dim_alltoall).
    Raises `UnevenDim`, `ScalarTensor`, and `NoSuchDim` also for negative dims, which end gloo's process.

    >>> shard_dim_alltoall([torch.tensor([[1, 2]]), torch.tensor([[3, 4]])], gather_dim=0, shard_dim=1)
    [tensor([[1],
            [3]]), tensor([[2],
            [4]])]
    """
    call = "shard_dim_alltoall"
    checks.check_held(call, held)
    for dim in (gather_dim, shard_dim):
        checks.check_dim(call, dim, held[0].shape, for_scalars=_one_row_per_rank(held))
    checks.check_even(call, shard_dim, held[0].shape, len(held))
    pieces = [x.tensor_split(len(held), shard_dim) for x in held]
    return [torch.cat(column, gather_dim).contiguous() for column in zip(*pieces, strict=True)]


def permute(held: Sequence[Tensor], destinations: Sequence[int]) -> list[Tensor]:
    """Rank destinations[i] holds the tensor of rank i.  Raises `NotAPermutation`.

    >>> permute([torch.tensor(1), torch.tensor(2), torch.tensor(3)], [1, 2, 0])
    [tensor(3), tensor(1), tensor(2)]
    """
    checks.check_held("permute", held)
    if sorted(destinations) != list(range(len(held))):
        raise errors.NotAPermutation("permute", list(destinations), len(held), len(held) - 1)
    source_of = {destination: source for source, destination in enumerate(destinations)}
    return [_fresh(held[source_of[rank]]) for rank in range(len(held))]


def send_recv(held: Sequence[Tensor], pairs: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Each receiver holds its sender's tensor as it was before; a rank that receives nothing holds what it brought.

    `pairs` are (sender, receiver), sent at the same time as in torch.distributed.batch_isend_irecv.  Only the two
    ranks of a pair must agree in shape and dtype; any dtype can be sent.
    Raises `RankOutside`, `SelfSend`, `TwoSenders`, and `NotContiguous` as torch.distributed.send does.

    >>> send_recv([torch.tensor(1), torch.tensor(2), torch.tensor(3)], [(0, 1), (1, 2)])
    [tensor(1), tensor(1), tensor(2)]
    """
    checks.check_dense("send_recv", checks.name_held("send_recv", held))
    sender_of: dict[int, int] = {}
    for sender, receiver in pairs:
        checks.check_rank("send_recv", "sender", sender, len(held))
        checks.check_rank("send_recv", "receiver", receiver, len(held))
        if sender == receiver:
            raise errors.SelfSend("send_recv", sender)
        if receiver in sender_of:
            raise errors.TwoSenders("send_recv", sender_of[receiver], receiver, sender)
        sender_of[receiver] = sender
    for sender, receiver in pairs:
        named = {f"held[{rank}]": held[rank] for rank in (sender, receiver)}
        checks.check_one_kind("send_recv", named)
        checks.check_shapes("send_recv", checks.shapes_of(named))
        checks.check_contiguous("send_recv", named)
    return [_fresh(held[sender_of.get(rank, rank)]) for rank in range(len(held))]


def coalesced(lists: Sequence[Sequence[Tensor]], collective: Callable[[list[Tensor]], list[T]]) -> list[list[T]]:
    """Rank i holds a list: its results of `collective` on the ranks' first tensors, on their second, and so on.

    Raises `ListsDiffer` if the ranks bring different numbers of tensors, and what `collective` raises.

    >>> coalesced([[torch.tensor([1]), torch.tensor([2])]] * 2, lambda held: all_reduce(held, "sum"))
    [[tensor([2]), tensor([4])], [tensor([2]), tensor([4])]]
    """
    checks.check_group("coalesced", "lists", lists)
    checks.check_equal_lengths("coalesced", lists)
    columns = [collective(list(column)) for column in zip(*lists, strict=True)]
    return [[column[rank] for column in columns] for rank in range(len(lists))]


def all_reduce_coalesced(lists: Sequence[Sequence[Tensor]], op: ReductionOp = "sum") -> list[list[Tensor]]:
    """Every rank holds a list: the reduction of all ranks' first tensors, of their second, and so on.

    Unlike one all_reduce after another, it needs one dtype in all tensors, as gloo does.
    Raises `ListsDiffer`, `NothingToReduce`.

    >>> all_reduce_coalesced([[torch.tensor([1]), torch.tensor(2)], [torch.tensor([3]), torch.tensor(4)]])
    [[tensor([4]), tensor(6)], [tensor([4]), tensor(6)]]
    """
    call = "all_reduce_coalesced"
    _check_lists(call, lists, op)
    checks.check_equal_lengths(call, lists)
    if not lists[0]:
        raise errors.NothingToReduce(call)
    return coalesced(lists, partial(all_reduce, op=op))


def _fresh(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def _one_row_per_rank(held: Sequence[Tensor]) -> str:
    return f"Pass x.expand({len(held)}).contiguous(), a row for each rank."


def _check_lists(call: str, lists: Sequence[Sequence[Tensor]], op: ReductionOp | None = None) -> checks.Named:
    named = checks.name_lists(call, lists)
    checks.check_wire(call, named, op)
    return named
