"""Each refusal of the collectives, word for word, and its remedy, which must go through."""

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import localtensor.collectives.reference as c
from localtensor import errors
from localtensor.collectives import argument_checks as checks
from localtensor.errors import base, collectives
from localtensor.layout import reductions


def t(*numbers: float, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(numbers, dtype=dtype)


A, B = t(1, 2), t(3, 5)


@dataclass(frozen=True)
class Refusal:
    refused: Callable[[], object]
    kind: type[errors.LocalTensorError]
    message: str
    remedied: Callable[[], object]


ROWS = torch.arange(10.0).reshape(5, 2)
ACROSS = torch.arange(4.0).reshape(2, 2).t()
I16 = t(1, 2, dtype=torch.int16)
C64 = t(1, 2, dtype=torch.complex64)
I64 = t(1, 2, dtype=torch.int64)

REFUSALS = {
    "a lone tensor": Refusal(lambda: c.all_reduce(A), errors.NotOnePerRank,
        "all_reduce: held: one tensor of shape (2,): a collective needs what each rank of the group brings. "
        "Pass a list with an entry for each rank, in group order.",
        lambda: c.all_reduce([A])),
    "nothing": Refusal(lambda: c.broadcast([], 0), errors.NotOnePerRank,
        "broadcast: held: nothing: a collective needs what each rank of the group brings. "
        "Pass a list with an entry for each rank, in group order.",
        lambda: c.broadcast([A], 0)),
    "a tensor for a list": Refusal(lambda: c.all_to_all([[A, A], B]), errors.NotOnePerRank,
        "all_to_all: lists[1]: one tensor of shape (2,): a collective needs what each rank of the group brings. "
        "Pass a list with an entry for each rank, in group order.",
        lambda: c.all_to_all([[A, A], [B, B]])),
    "splits of one rank only": Refusal(lambda: c.all_to_all_single([A, B], input_splits=[[1, 1]]), errors.NotOnePerRank,
        "all_to_all_single: input_splits: 1 lists for 2 ranks: a collective needs what each rank of the group "
        "brings. Pass a list with an entry for each rank, in group order.",
        lambda: c.all_to_all_single([A, B], input_splits=[[1, 1], [1, 1]])),
    "output splits of one rank only": Refusal(
        lambda: c.all_to_all_single([A, B], output_splits=[[1, 1]]), errors.NotOnePerRank,
        "all_to_all_single: output_splits: 1 lists for 2 ranks: a collective needs what each rank of the group "
        "brings. Pass a list with an entry for each rank, in group order.",
        lambda: c.all_to_all_single([A, B], output_splits=[[1, 1], [1, 1]])),
    "a short list": Refusal(lambda: c.reduce_scatter([[A, A], [B]]), errors.WrongListLength,
        "reduce_scatter: lists[1]: 1 tensors: the call needs 2 of this rank. Let rank 1 bring a list of 2.",
        lambda: c.reduce_scatter([[A, A], [B, B]])),
    "a short list to all_to_all": Refusal(lambda: c.all_to_all([[A], [B, B]]), errors.WrongListLength,
        "all_to_all: lists[0]: 1 tensors: the call needs 2 of this rank. Let rank 0 bring a list of 2.",
        lambda: c.all_to_all([[A, A], [B, B]])),
    "a root without enough pieces": Refusal(lambda: c.scatter([[], [A]], root=1), errors.WrongListLength,
        "scatter: lists[1]: 1 tensors: the call needs 2 of this rank. Let rank 1 bring a list of 2.",
        lambda: c.scatter([[], [A, A]], root=1)),
    "pieces from who is not the root": Refusal(lambda: c.scatter([[A, A], [B, B]], root=0), errors.ListFromNonRoot,
        "scatter: lists[1]: rank 1 brings 2 tensors, root=0: only the root has something to scatter. "
        "Let rank 1 bring an empty list.",
        lambda: c.scatter([[A, A], []], root=0)),
    "pieces from who comes before the root": Refusal(lambda: c.scatter([[B], [A, A]], root=1), errors.ListFromNonRoot,
        "scatter: lists[0]: rank 0 brings 1 tensors, root=1: only the root has something to scatter. "
        "Let rank 0 bring an empty list.",
        lambda: c.scatter([[], [A, A]], root=1)),
    "a coalesced call of nothing": Refusal(lambda: c.all_reduce_coalesced([[], []]), errors.NothingToReduce,
        "all_reduce_coalesced: lists: empty lists: gloo refuses a coalesced call of no tensors. Leave the call out.",
        lambda: None),
    "coalesced lists of different lengths": Refusal(lambda: c.all_reduce_coalesced([[A], [B, B]]), errors.ListsDiffer,
        "all_reduce_coalesced: lists: lists[0] has length 1, lists[1] has length 2: each tensor needs its partner "
        "on every rank. Bring the first 1 on every rank, and the rest in calls of their own.",
        lambda: c.all_reduce_coalesced([[A], [B]])),
    "shapes of other lengths": Refusal(lambda: c.all_reduce([A, A, t(1, 2, 3)]), errors.ShapesDiffer,
        "all_reduce: held: held[0] has shape (2,), held[2] has shape (3,): the call needs one shape throughout. "
        "Pad each of them to (3,).",
        lambda: c.all_reduce([torch.nn.functional.pad(A, (0, 1))] * 2 + [t(1, 2, 3)])),
    "shapes of as many numbers": Refusal(lambda: c.all_gather([ROWS, ROWS.t()]), errors.ShapesDiffer,
        "all_gather: held: held[0] has shape (5, 2), held[1] has shape (2, 5): the call needs one shape throughout. "
        "Reshape each of them to (5, 2).",
        lambda: c.all_gather([ROWS, ROWS.t().reshape(5, 2)])),
    "shapes of other dims and numbers": Refusal(lambda: c.broadcast([A, ROWS], 0), errors.ShapesDiffer,
        "broadcast: held: held[0] has shape (2,), held[1] has shape (5, 2): the call needs one shape throughout. "
        "Flatten each of them and pad it to (10,).",
        lambda: c.broadcast([torch.nn.functional.pad(A, (0, 8)), ROWS.flatten()], 0)),
    "pieces of other shapes": Refusal(lambda: c.scatter([[A, t(1)], []], root=0), errors.ShapesDiffer,
        "scatter: lists: lists[0][0] has shape (2,), lists[0][1] has shape (1,): the call needs one shape throughout. "
        "Pad each of them to (2,).",
        lambda: c.scatter([[A, t(1, 0)], []], root=0)),
    "pieces that do not fit their partners": Refusal(lambda: c.reduce_scatter([[A, A], [t(1), B]]), errors.ShapesDiffer,
        "reduce_scatter: lists: lists[0][0] has shape (2,), lists[1][0] has shape (1,): the call needs one shape "
        "throughout. Pad each of them to (2,).",
        lambda: c.reduce_scatter([[A, A], [t(1, 0), B]])),
    "rows of other shapes": Refusal(
        lambda: c.all_to_all_single([torch.ones(2, 3), torch.ones(2, 2)]), errors.ShapesDiffer,
        "all_to_all_single: held: held[0][0] has shape (3,), held[1][0] has shape (2,): the call needs one shape "
        "throughout. Pad each of them to (3,).",
        lambda: c.all_to_all_single([torch.ones(2, 3), torch.ones(2, 3)])),
    "a buffer too small for what is sent": Refusal(lambda: c.send_recv([t(1), t(2), B], [(2, 0)]), errors.ShapesDiffer,
        "send_recv: held: held[2] has shape (2,), held[0] has shape (1,): the call needs one shape throughout. "
        "Pad each of them to (2,).",
        lambda: c.send_recv([t(1, 0), t(2), B], [(2, 0)])),
    "dtypes": Refusal(lambda: c.all_reduce([A, I64]), errors.DtypesDiffer,
        "all_reduce: held: held[0] has dtype torch.float32, held[1] has dtype torch.int64: the call needs one dtype "
        "throughout. Convert each of them to torch.float32.",
        lambda: c.all_reduce([A, I64.to(torch.float32)])),
    "dtypes whose common one does not travel": Refusal(
        lambda: c.all_reduce([I64.to(torch.int8), I64.to(torch.uint8)], "band"), errors.DtypesDiffer,
        "all_reduce: held: held[0] has dtype torch.int8, held[1] has dtype torch.uint8: the call needs one dtype "
        "throughout. Convert each of them to torch.int32.",
        lambda: c.all_reduce([I64.to(torch.int32)] * 2, "band")),
    "dtypes in one coalesced call": Refusal(lambda: c.all_reduce_coalesced([[A, I64], [A, I64]]), errors.DtypesDiffer,
        "all_reduce_coalesced: lists: lists[0][0] has dtype torch.float32, lists[0][1] has dtype torch.int64: "
        "the call needs one dtype throughout. Convert each of them to torch.float32.",
        lambda: c.all_reduce_coalesced([[A, I64.float()], [A, I64.float()]])),
    "devices": Refusal(lambda: c.broadcast([A.to("meta"), A], 0), errors.DevicesDiffer,
        "broadcast: held: held[0] has device meta, held[1] has device cpu: all ranks are simulated on one device. "
        "Move each of them to meta.",
        lambda: c.broadcast([A.to("meta"), A.to("meta")], 0)),
    "sparse tensors": Refusal(lambda: c.all_reduce([A, A.to_sparse()]), errors.NotDense,
        "all_reduce: held[1]: torch.sparse_coo: only strided tensors have a definition here. Pass x.to_dense().",
        lambda: c.all_reduce([A, A.to_sparse().to_dense()])),
    "sparse tensors to send": Refusal(lambda: c.send_recv([A, A.to_sparse()], []), errors.NotDense,
        "send_recv: held[1]: torch.sparse_coo: only strided tensors have a definition here. Pass x.to_dense().",
        lambda: c.send_recv([A, A.to_sparse().to_dense()], [])),
    "a piece with gaps": Refusal(lambda: c.scatter([[ACROSS, ACROSS], []], root=0), errors.NotContiguous,
        "scatter: lists[0][0]: shape (2, 2) with strides (1, 2): Tensors must be contiguous, as the call moves memory as it lies. "
        "Pass x.contiguous().",
        lambda: c.scatter([[ACROSS.contiguous()] * 2, []], root=0)),
    "a piece with gaps to reduce_scatter": Refusal(lambda: c.reduce_scatter([[A, ACROSS]] * 2), errors.NotContiguous,
        "reduce_scatter: lists[0][1]: shape (2, 2) with strides (1, 2): Tensors must be contiguous, as the call moves memory as it lies. "
        "Pass x.contiguous().",
        lambda: c.reduce_scatter([[A, ACROSS.contiguous()]] * 2)),
    "a tensor with gaps to all_to_all_single": Refusal(
        lambda: c.all_to_all_single([ACROSS, ACROSS]), errors.NotContiguous,
        "all_to_all_single: held[0]: shape (2, 2) with strides (1, 2): Tensors must be contiguous, as the call moves memory as it lies. "
        "Pass x.contiguous().",
        lambda: c.all_to_all_single([ACROSS.contiguous()] * 2)),
    "a buffer with gaps": Refusal(lambda: c.send_recv([ROWS[:2], ACROSS], [(0, 1)]), errors.NotContiguous,
        "send_recv: held[1]: shape (2, 2) with strides (1, 2): Tensors must be contiguous, as the call moves memory as it lies. "
        "Pass x.contiguous().",
        lambda: c.send_recv([ROWS[:2], ACROSS.contiguous()], [(0, 1)])),
    "a dtype that does not travel": Refusal(lambda: c.broadcast([I16, I16], 0), errors.DtypeNotCarried,
        "broadcast: held[0]: torch.int16: gloo carries no such dtype in a collective. "
        "Pass x.to(torch.int32) and convert the answer back.",
        lambda: [x.to(torch.int16) for x in c.broadcast([I16.to(torch.int32)] * 2, 0)]),
    "complex numbers to gather": Refusal(lambda: c.gather([C64, C64], root=0), errors.ComplexNotGathered,
        "gather: held: torch.complex64: gloo's gather carries no complex numbers. "
        "Pass torch.view_as_real(x), or use all_gather.",
        lambda: (c.gather([torch.view_as_real(C64)] * 2, root=0), c.all_gather([C64, C64]))),
    "a reduction that is in no table": Refusal(lambda: c.all_reduce([A, B], "mean"), errors.UnknownReduction,
        "all_reduce: op: 'mean': there is no such reduction. Write 'sum', 'avg', 'product', 'min', 'max', 'band', "
        "'bor', 'bxor', or pass PremulSum(factor).",
        lambda: c.all_reduce([A, B], "avg")),
    "an average of integers": Refusal(lambda: c.reduce([I64, I64], "avg", root=0), errors.DtypeNotReducible,
        "reduce: op: 'avg' of torch.int64: there is no avg of integer tensors. "
        "Pass x.to(torch.float64), or use 'sum' and divide.",
        lambda: (c.reduce([I64.to(torch.float64)] * 2, "avg", root=0), c.reduce([I64] * 2, root=0)[0] / 2)),
    "a root outside": Refusal(lambda: c.broadcast([A, B], root=2), errors.RankOutside,
        "broadcast: root: root=2: invalid root rank, the group has 2 ranks. Name a rank from 0 to 1, counted within the group.",
        lambda: c.broadcast([A, B], root=1)),
    "a negative root": Refusal(lambda: c.gather([A, B], root=-1), errors.RankOutside,
        "gather: root: root=-1: invalid root rank, the group has 2 ranks. Name a rank from 0 to 1, counted within the group.",
        lambda: c.gather([A, B], root=0)),
    "a root of reduce outside": Refusal(lambda: c.reduce([A, B], root=2), errors.RankOutside,
        "reduce: root: root=2: invalid root rank, the group has 2 ranks. Name a rank from 0 to 1, counted within the group.",
        lambda: c.reduce([A, B], root=1)),
    "a root of scatter outside": Refusal(lambda: c.scatter([[A, B], []], root=2), errors.RankOutside,
        "scatter: root: root=2: invalid root rank, the group has 2 ranks. Name a rank from 0 to 1, counted within the group.",
        lambda: c.scatter([[A, B], []], root=0)),
    "a sender outside": Refusal(lambda: c.send_recv([A, B], [(2, 0)]), errors.RankOutside,
        "send_recv: sender: sender=2: invalid sender rank, the group has 2 ranks. Name a rank from 0 to 1, counted within the group.",
        lambda: c.send_recv([A, B], [(1, 0)])),
    "a receiver outside": Refusal(lambda: c.send_recv([A, B], [(0, 2)]), errors.RankOutside,
        "send_recv: receiver: receiver=2: invalid receiver rank, the group has 2 ranks. Name a rank from 0 to 1, counted within the group.",
        lambda: c.send_recv([A, B], [(0, 1)])),
    "five rows over two ranks": Refusal(lambda: c.reduce_scatter_tensor([ROWS, ROWS]), errors.UnevenDim,
        "reduce_scatter_tensor: held: dim 0 of shape (5, 2), 2 ranks: 5 rows leave 1 over. Pad dim 0 to 6, or pass "
        "uneven pieces to reduce_scatter.",
        lambda: (
            c.reduce_scatter_tensor([torch.nn.functional.pad(ROWS, (0, 0, 0, 1))] * 2),
            c.reduce_scatter([[ROWS[:3], ROWS[3:]]] * 2),
        )),
    "five rows over three ranks": Refusal(lambda: c.reduce_scatter_tensor([ROWS] * 3), errors.UnevenDim,
        "reduce_scatter_tensor: held: dim 0 of shape (5, 2), 3 ranks: 5 rows leave 2 over. Pad dim 0 to 6, or pass "
        "uneven pieces to reduce_scatter.",
        lambda: c.reduce_scatter_tensor([torch.nn.functional.pad(ROWS, (0, 0, 0, 1))] * 3)),
    "five rows to all_to_all_single": Refusal(lambda: c.all_to_all_single([ROWS, ROWS]), errors.UnevenDim,
        "all_to_all_single: held: dim 0 of shape (5, 2), 2 ranks: 5 rows leave 1 over. Pad dim 0 to 6, or name the "
        "sizes in input_splits.",
        lambda: (
            c.all_to_all_single([torch.nn.functional.pad(ROWS, (0, 0, 0, 1))] * 2),
            c.all_to_all_single([ROWS] * 2, input_splits=[[3, 2]] * 2),
        )),
    "five columns to shard_dim_alltoall": Refusal(
        lambda: c.shard_dim_alltoall([ROWS, ROWS], gather_dim=1, shard_dim=0), errors.UnevenDim,
        "shard_dim_alltoall: held: dim 0 of shape (5, 2), 2 ranks: 5 rows leave 1 over. Pad dim 0 to 6.",
        lambda: c.shard_dim_alltoall([torch.nn.functional.pad(ROWS, (0, 0, 0, 1))] * 2, gather_dim=1, shard_dim=0)),
    "a scalar to join": Refusal(lambda: c.all_gather_into_tensor([A.sum(), B.sum()]), errors.ScalarTensor,
        "all_gather_into_tensor: held: shape (): a tensor of no dims has none to join or cut along. "
        "Pass x.reshape(1).",
        lambda: c.all_gather_into_tensor([A.sum().reshape(1), B.sum().reshape(1)])),
    "a scalar to cut": Refusal(lambda: c.reduce_scatter_tensor([A.sum(), B.sum()]), errors.ScalarTensor,
        "reduce_scatter_tensor: held: shape (): a tensor of no dims has none to join or cut along. "
        "Pass x.expand(2).contiguous(), a row for each rank.",
        lambda: c.reduce_scatter_tensor([A.sum().expand(2).contiguous()] * 2)),
    "a scalar to all_to_all_single": Refusal(lambda: c.all_to_all_single([A.sum(), B.sum()]), errors.ScalarTensor,
        "all_to_all_single: held: shape (): a tensor of no dims has none to join or cut along. "
        "Pass x.expand(2).contiguous(), a row for each rank.",
        lambda: c.all_to_all_single([A.sum().expand(2).contiguous()] * 2)),
    "a scalar to shard_dim_alltoall": Refusal(
        lambda: c.shard_dim_alltoall([A.sum(), B.sum()], gather_dim=0, shard_dim=0), errors.ScalarTensor,
        "shard_dim_alltoall: held: shape (): a tensor of no dims has none to join or cut along. "
        "Pass x.expand(2).contiguous(), a row for each rank.",
        lambda: c.shard_dim_alltoall([A.sum().expand(2).contiguous()] * 2, gather_dim=0, shard_dim=0)),
    "a dim that is not there": Refusal(lambda: c.all_gather_into_tensor([ROWS, ROWS], 2), errors.NoSuchDim,
        "all_gather_into_tensor: dim: dim=2 of shape (5, 2): a tensor of 2 dims has dims 0 to 1. "
        "Name one of those dims.",
        lambda: c.all_gather_into_tensor([ROWS, ROWS], 1)),
    "a negative dim": Refusal(lambda: c.shard_dim_alltoall([ROWS, ROWS], gather_dim=0, shard_dim=-1), errors.NoSuchDim,
        "shard_dim_alltoall: dim: dim=-1 of shape (5, 2): a tensor of 2 dims has dims 0 to 1. Name one of those dims.",
        lambda: c.shard_dim_alltoall([ROWS, ROWS], gather_dim=0, shard_dim=1)),
    "a negative dim to gather": Refusal(
        lambda: c.shard_dim_alltoall([ROWS, ROWS], gather_dim=-2, shard_dim=1), errors.NoSuchDim,
        "shard_dim_alltoall: dim: dim=-2 of shape (5, 2): a tensor of 2 dims has dims 0 to 1. Name one of those dims.",
        lambda: c.shard_dim_alltoall([ROWS, ROWS], gather_dim=0, shard_dim=1)),
    "a negative dim to cut": Refusal(lambda: c.reduce_scatter_tensor([ROWS, ROWS], dim=-1), errors.NoSuchDim,
        "reduce_scatter_tensor: dim: dim=-1 of shape (5, 2): a tensor of 2 dims has dims 0 to 1. "
        "Name one of those dims.",
        lambda: c.reduce_scatter_tensor([ROWS, ROWS], dim=1)),
    "too few split sizes": Refusal(lambda: c.all_to_all_single([A, B], input_splits=[[2], None]), errors.SplitCount,
        "all_to_all_single: input_splits[0]: [2]: 1 sizes for 2 ranks. "
        "Name 2 sizes, 0 where nothing is sent, or None for equal pieces.",
        lambda: (
            c.all_to_all_single([A, B], input_splits=[[2, 0], None], output_splits=[[2, 1], [0, 1]]),
            c.all_to_all_single([A, B], input_splits=[None, None]),
        )),
    "a negative split size": Refusal(
        lambda: c.all_to_all_single([A, B], input_splits=[None, [-1, 3]]), errors.NegativeSplit,
        "all_to_all_single: input_splits[1]: [-1, 3]: a piece has no fewer than 0 rows. Write 0 where nothing is sent.",
        lambda: c.all_to_all_single([A, B], input_splits=[None, [0, 2]], output_splits=[[1, 0], [1, 2]])),
    "split sizes that do not add up": Refusal(
        lambda: c.all_to_all_single([A, B], input_splits=[[1, 2], None]), errors.SplitSum,
        "all_to_all_single: input_splits[0]: [1, 2] of 2 rows: the sizes add up to 3. "
        "Let them add up to 2, or pass 3 rows.",
        lambda: (
            c.all_to_all_single([A, B], input_splits=[[1, 1], None]),
            c.all_to_all_single([t(1, 2, 3), B], input_splits=[[1, 2], None], output_splits=[[1, 1], [2, 1]]),
        )),
    "split sizes that disagree": Refusal(
        lambda: c.all_to_all_single([A, B], output_splits=[[1, 1], [2, 1]]), errors.SplitsDisagree,
        "all_to_all_single: output_splits[1]: [2, 1] expected, [1, 1] sent: rank 1 waits for rows that no rank sends, "
        "or gets rows that it has no space for. Write [1, 1].",
        lambda: c.all_to_all_single([A, B], output_splits=[[1, 1], [1, 1]])),
    "uneven splits that nobody expects": Refusal(
        lambda: c.all_to_all_single([A, B], input_splits=[[2, 0], None]), errors.SplitsDisagree,
        "all_to_all_single: output_splits[0]: equal pieces expected, [2, 1] sent: rank 0 waits for rows that no rank "
        "sends, or gets rows that it has no space for. Write [2, 1].",
        lambda: c.all_to_all_single([A, B], input_splits=[[2, 0], None], output_splits=[[2, 1], [0, 1]])),
    "two ranks to one destination": Refusal(lambda: c.permute([A, B], [0, 0]), errors.NotAPermutation,
        "permute: destinations: [0, 0] for 2 ranks: each rank must be named once. "
        "Order the ranks 0 to 1 in another way, or use send_recv.",
        lambda: (c.permute([A, B], [1, 0]), c.send_recv([A, B], [(1, 0)]))),
    "a rank that sends to itself": Refusal(lambda: c.send_recv([A, B], [(0, 1), (0, 0)]), errors.SelfSend,
        "send_recv: pairs: (0, 0): rank 0 would wait for itself. Leave the pair (0, 0) out: rank 0 keeps its tensor.",
        lambda: c.send_recv([A, B], [(0, 1)])),
    "two senders": Refusal(lambda: c.send_recv([A, B, A], [(0, 1), (2, 1)]), errors.TwoSenders,
        "send_recv: pairs: [(0, 1), (2, 1)]: rank 1 holds one tensor afterwards. Make a call for each sender.",
        lambda: (c.send_recv([A, B, A], [(0, 1)]), c.send_recv([A, B, A], [(2, 1)]))),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refusal_says_it_in_five_parts(name):
    case = REFUSALS[name]
    with pytest.raises(case.kind) as caught:
        case.refused()
    assert str(caught.value) == case.message


@pytest.mark.parametrize("name", REFUSALS)
def test_what_a_refusal_suggests_goes_through(name):
    assert REFUSALS[name].remedied() != []


def test_every_refusal_that_the_collectives_know_has_its_words_tested():
    text = "".join(inspect.getsource(module) for module in (c, checks, reductions))
    known = {
        value
        for name, value in (vars(base) | vars(collectives)).items()
        if is_refusal(value) and re.search(rf"\b{name}\(", text)
    }
    known -= {errors.NotReducible, errors.BadGroup, errors.NegativeTag}  # tested with partial values and messages
    assert len(known) > 20
    assert known - {errors.NotReducible} == {case.kind for case in REFUSALS.values()}  # that one is of placements


def is_refusal(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, errors.LocalTensorError)
