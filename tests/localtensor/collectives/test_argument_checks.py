import pytest
import torch
import torch.distributed as dist

import localtensor as lt
from localtensor.collectives.argument_checks import check_message, check_rank_arguments
from localtensor.collectives.c10d_table import CallArguments
from localtensor.errors import DtypeNotCarried, LocalTensorError

X = torch.zeros(3, 4)
SPARSE = torch.zeros(2).to_sparse()
MOVES = "Tensors must be contiguous, as the call moves memory as it lies. Pass x.contiguous()."
OFFERS = {
    "a root outside": ("broadcast", CallArguments(X, [X], root=2),
        "broadcast: root: root=2: invalid root rank, the group has 2 ranks. Name a rank from 0 to 1, counted within the group."),
    "a root below zero": ("reduce", CallArguments(X, [X], root=-1),
        "reduce: root: root=-1: invalid root rank, the group has 2 ranks. Name a rank from 0 to 1, counted within the group."),
    "too few buffers": ("all_gather", CallArguments(X, [X]),
        "all_gather: lists[5]: 1 tensors: the call needs 2 of this rank. Let rank 5 bring a list of 2."),
    "too many buffers at the root": ("gather", CallArguments(X, [X, X, X], root=1),
        "gather: lists[5]: 3 tensors: the call needs 2 of this rank. Let rank 5 bring a list of 2."),
    "a column": ("all_reduce", CallArguments(X, [X[:, 1]]), f"all_reduce: tensor: shape (3,) with strides (4,): {MOVES}"),
    "one row many times": ("broadcast", CallArguments(X, [X[:1].expand(3, 4)], root=0),
        f"broadcast: tensor: shape (3, 4) with strides (0, 1): {MOVES}"),
    "an output in another order": (
        "scatter", CallArguments([], [X.t()], root=0), f"scatter: output: shape (4, 3) with strides (1, 4): {MOVES}"),
    "a sparse tensor": ("all_reduce", CallArguments(SPARSE, [SPARSE]),
        "all_reduce: tensor: torch.sparse_coo: only strided tensors have a definition here. Pass x.to_dense()."),
}  # fmt: skip
MESSAGES = {
    "a peer outside": (
        (X, 2, 0), "send: peer: peer=2: invalid peer rank, the group has 2 ranks. Name a rank from 0 to 1, counted within the group."),
    "a tag below zero": ((X, 1, -1), "send: tag: tag=-1: a tag is 0 or more. Count tags from 0."),
    "another order": ((X.t(), 1, 0), f"send: tensor: shape (4, 3) with strides (1, 4): {MOVES}"),
}  # fmt: skip


@pytest.mark.parametrize("name", OFFERS)
def test_an_offer_is_refused_word_for_word(name):
    kind, brought, message = OFFERS[name]
    with pytest.raises(LocalTensorError) as refused:
        check_rank_arguments(kind, brought, 5, (3, 5))
    assert str(refused.value) == message


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_is_refused_word_for_word(name):
    (x, peer, tag), message = MESSAGES[name]
    with pytest.raises(LocalTensorError) as refused:
        check_message("send", [x], peer, tag, 2)
    assert str(refused.value) == message


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor"])
@pytest.mark.parametrize("x", [X, X.t(), X[:0, 1], X.to(memory_format=torch.contiguous_format), X[:1, :1]])
def test_what_gloo_moves_well_passes(kind, x):
    assert check_rank_arguments(kind, CallArguments(x, [x]), 0, (0, 1)) is None


def test_a_list_beside_the_root_and_a_message_from_anyone_pass():
    assert check_rank_arguments("gather", CallArguments(X, [], root=1), 3, (3, 5)) is None
    assert check_message("recv", [X], None, 0, 2) is None


def summed_or_caught():
    try:
        dist.all_reduce(torch.ones(2, dtype=torch.int16))
    except DtypeNotCarried as refused:
        caught = str(refused)
    x = torch.ones(2)
    dist.all_reduce(x)
    return caught.partition(":")[0], x.tolist()


def test_what_every_rank_is_refused_each_can_catch():
    assert lt.run(summed_or_caught, ranks=2).values == (("all_reduce", [2.0, 2.0]),) * 2
