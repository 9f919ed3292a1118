"""What an op returns in lockstep: tensors, lists of them, ints of each rank, or one plain value of all ranks."""

import math

import pytest
import torch

from localtensor.errors import NotInLockstep, RanksDiverge
from localtensor.lockstep.dispatch.execute import PerRow, copy_lazy_flags, dense_rows, equal_or_nan
from localtensor.lockstep.mode import rank_map, tensor_map
from localtensor.lockstep.values.local_tensor import LocalTensor
from localtensor.lockstep.values.rank_int import is_rank_int
from localtensor.lockstep.values.stacks import is_in_blocks

pytestmark = pytest.mark.usefixtures("mode")

aten = torch.ops.aten


@pytest.fixture
def x():
    return rank_map(lambda rank: torch.arange(6.0).view(2, 3) * (rank - 1))


def by_rank(want, *xs):
    """What a function gives on each rank's own plain tensors."""
    return [want(*[x.on(rank) for x in xs]) for rank in range(4)]


def check(got, wanted):
    for rank, want in enumerate(wanted):
        assert torch.equal(got.on(rank), want) and got.on(rank).stride() == want.stride()


def test_one_tensor_a_tuple_and_a_list(x):
    check(x.exp(), by_rank(torch.exp, x))
    for place, one in enumerate(x.sort(dim=1, descending=True)):
        check(one, [each[place] for each in by_rank(lambda own: own.sort(dim=1, descending=True), x)])
    pieces = x.split([1, 2], 1)
    assert type(pieces) is tuple and len(pieces) == 2
    for place, one in enumerate(torch.ops.aten.split_with_sizes_copy(x, [1, 2], 1)):
        check(
            one,
            by_rank(
                lambda own, place=place: own.split([1, 2], 1)[place].clone(memory_format=torch.contiguous_format), x
            ),
        )


def test_results_keep_the_order_in_which_their_dims_lie(x):
    for got, want in [(x.t() * 2, lambda own: own.t() * 2), (x.t()[1:] + 1, lambda own: own.t()[1:] + 1)]:
        check(got, by_rank(want, x))
        assert got.stride() == got.on(0).stride() and is_in_blocks(got._cells[0])


def test_stacks_that_come_out_askew_are_put_in_order():
    x = rank_map(lambda rank: torch.arange(32.0).view(2, 4, 2, 2).sin() * rank)
    got = torch.nn.functional.batch_norm(x, None, None, training=True)
    assert got.stride() == (16, 4, 2, 1) and is_in_blocks(got._cells[0])
    got[0].add_(x[0])
    assert got.stride() == got.on(1).stride() == (16, 4, 2, 1)


def test_nothing_where_nothing_was_wanted(x):
    weight, mean, rstd = torch.ones(3), x.mean(1, True), x.var(1, keepdim=True)
    found = aten.native_layer_norm_backward(x, x, [3], mean, rstd, weight, weight, [True, False, True])
    assert found[1] is None and found[0].shape == (2, 3) and found[2].shape == (3,)
    assert aten._assert_async(torch.tensor(True)) is None


def test_what_is_written_is_what_is_returned(x):
    out = torch.empty(2, 3)
    assert x.add_(1) is x and torch.exp(x, out=out) is out
    values, indices = torch.empty(2), torch.empty(2, dtype=torch.int64)
    found = torch.max(x, 1, out=(values, indices))
    assert found[0] is values and found[1] is indices
    check(values, by_rank(lambda own: own.max(1).values, x))


def test_a_size_that_depends_on_data_is_an_int_of_each_rank(x):
    found = x.nonzero()
    assert is_rank_int(found.shape[0]) and [found.on(rank).shape[0] for rank in range(4)] == [5, 0, 5, 5]
    assert len(found._cells) == 2  # those of one size are in one stack
    check(x[x > 2], by_rank(lambda own: own[own > 2], x))
    assert x.long().unique().shape[0] == torch.ops.aten._unique2(x.long())[0].shape[0]


def test_an_answer_that_is_no_tensor_is_one_for_all(x):
    assert torch.equal(x, x.clone()) is True and x.is_same_size(x) is True and x[0, 0].item() == 0
    assert aten.sym_size.int(x, 1) == 3 and x.sum(1).isnan().any().item() is False
    nan = x * math.nan
    assert math.isnan(nan.sum().item())


def test_an_answer_that_differs_is_refused_with_the_values_and_the_line(x):
    with pytest.raises(RanksDiverge) as caught:
        x.sum().item()
    text = str(caught.value)
    assert text.startswith("Tensor.item: value: -15.0 on rank 0, 0.0 on rank 1, 15.0 on rank 2, 30.0 on rank 3: ")
    assert "at test_execute.py" in text and "`x.sum().item()`" in text
    assert caught.value.values == {0: -15.0, 1: 0.0, 2: 15.0, 3: 30.0}
    some = tensor_map(x, lambda rank, own: own if rank in (1, 2) else None)
    with pytest.raises(RanksDiverge, match=r"0\.0 on rank 1, 15\.0 on rank 2"):
        some.sum().item()
    with pytest.raises(RanksDiverge, match=r"aten\.equal\.default: value: True on rank 1, False on ranks 0, 2, 3"):
        torch.equal(x, torch.zeros(2, 3))


def test_lists_and_dims_that_differ_in_number_are_refused():
    uneven = rank_map(lambda rank: torch.ones(rank + 1, 1))
    with pytest.raises(NotInLockstep, match=r"aten\.unbind\.int: ranks get lists of different lengths: \[1, 2, 3, 4\]"):
        uneven.unbind()
    with pytest.raises(NotInLockstep, match="it has 0 or 1 dims, depending on the rank"):
        uneven.squeeze()


def test_sparse_results_are_held_each_by_itself(x):
    sparse = x.to_sparse()
    assert len(sparse._cells) == 4 and sparse.layout is torch.sparse_coo and sparse.shape == (2, 3)
    check(sparse.to_dense(), by_rank(lambda own: own, x))
    assert sparse.sparse_dim() == 2
    with pytest.raises(RanksDiverge, match="0 on rank 1, 5 on ranks 0, 2, 3"):
        sparse._nnz()
    assert torch.eye(3).to_sparse()._partition.uniform


def test_lazy_conjugates_are_seen_from_outside_where_torch_can_resolve_them():
    z = rank_map(lambda rank: torch.tensor([1j * rank]))
    assert z.conj().is_conj() and copy_lazy_flags(z.conj()).is_conj() and not copy_lazy_flags(z).is_conj()
    uneven = rank_map(lambda rank: torch.full((rank,), 1j))
    assert not uneven.conj().is_conj() and (uneven.conj() * 2).on(2).tolist() == [-2j, -2j]


def test_what_is_not_ours_stays_what_it_is(mode):
    with mode.disable():
        plain = torch.arange(4.0)
    assert type(plain[1:]) is type(plain.detach()) is torch.Tensor and type(plain.clone()) is LocalTensor
    assert type(torch.tensor([1.0])) is type(torch.as_tensor([1.0])) is LocalTensor


def test_tidy_makes_each_row_dense():
    with torch._C._DisableTorchDispatch():
        dense, mixed = torch.ones(2, 3), torch.arange(6.0).view(3, 2).t()
        assert (
            dense_rows(dense) is dense and torch.equal(dense_rows(mixed), mixed) and dense_rows(mixed).is_contiguous()
        )


@pytest.mark.parametrize(
    ("one", "other", "wanted"), [(1, 1, True), (math.nan, math.nan, True), (1, 2, False), (math.nan, 1.0, False)]
)
def test_same_numbers(one, other, wanted):
    assert equal_or_nan(one, other) is wanted and isinstance(PerRow([one]), list)
