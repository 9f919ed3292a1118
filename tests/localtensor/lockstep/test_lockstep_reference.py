"""The slow twin: a loop over the ranks with plain tensors, and what it finds where lockstep differs from it."""

import pytest
import torch

import localtensor as lt
from localtensor.lockstep.dispatch import execute
from localtensor.lockstep.mode import LocalTensorMode, rank_map
from localtensor.lockstep.values.local_tensor import LocalTensor
from tests.localtensor.lockstep.lockstep_reference import (
    LockstepDifference,
    check_op,
    differences_from_reference,
    envelope,
    rank_by_rank,
    same_to_the_bit,
    within_envelope,
)

aten = torch.ops.aten
RANKS = 4


@pytest.fixture(autouse=True)
def mode():
    torch.manual_seed(0)
    with LocalTensorMode(RANKS) as found:
        yield found


def numbers(*shape, scale=1.0):
    """Another tensor on each rank."""
    return rank_map(lambda rank: scale * torch.randn(shape, generator=torch.Generator().manual_seed(rank)))


def test_the_loop_gives_each_rank_its_own(mode):
    x = rank_map(lambda rank: torch.tensor([rank, 10]))
    found = rank_by_rank(torch.add, x, mode.rank())
    assert [found[rank].result.tolist() for rank in range(RANKS)] == [[2 * rank, 10 + rank] for rank in range(RANKS)]
    assert all(type(alone.result) is torch.Tensor and alone.error is None for alone in found.values())


def test_only_ranks_that_hold_all_operands_are_asked():
    x = lt.tensor_map(numbers(2), lambda rank, value: value if rank else None)
    assert sorted(rank_by_rank(torch.add, x, numbers(2))) == [1, 2, 3]


def test_the_operands_are_left_alone_and_the_ranks_arguments_are_as_the_op_left_them():
    x = numbers(3)
    before = x.clone()
    found = rank_by_rank(torch.Tensor.zero_, x)
    assert all(same_to_the_bit(x.__localtensor_on__(r), before.__localtensor_on__(r)) for r in range(RANKS))
    assert all(alone.args[0].tolist() == [0, 0, 0] for alone in found.values())


def test_what_shares_memory_in_lockstep_does_so_in_the_loop():
    x = numbers(4)
    found = rank_by_rank(lambda whole, part: part.fill_(7), x, x[1::2])
    assert all(alone.args[0][1::2].tolist() == [7, 7] and alone.args[0][0] != 7 for alone in found.values())
    assert found[0].args[1].stride() == (2,) and found[0].args[1].storage_offset() == 1


def test_one_tensor_given_twice_is_one_tensor():
    x = numbers(2)
    found = rank_by_rank(lambda one, other: one is other, x, x)
    assert all(alone.result is True for alone in found.values())


@pytest.mark.parametrize("make", [
    lambda x: x.t(), lambda x: x[:, :1].expand(3, 4), lambda x: x.to(torch.complex64).conj(), lambda x: x[:0],
])  # fmt: skip
def test_copies_have_the_strides_that_ranks_see(make):
    x = make(numbers(3, 4))
    for rank, alone in rank_by_rank(lambda x: (x.stride(), x.is_conj()), x).items():
        assert alone.result == (x.__localtensor_on__(rank).stride(), x.is_conj())
    assert differences_from_reference(rank_by_rank(torch.clone, x), x.clone(), (x,)) == []


def test_each_rank_draws_from_its_own_stream_and_lockstep_is_not_moved_on():
    torch.manual_seed(rank_of := torch.distributed.get_rank())
    found = rank_by_rank(torch.rand, 3)
    assert [found[rank].result.tolist() for rank in range(RANKS)] == [
        torch.rand(3, generator=torch.Generator().manual_seed(rank)).__localtensor_on__(0).tolist()
        for rank in range(RANKS)
    ]
    assert differences_from_reference(found, torch.rand(3)) == [] and rank_of is not None


def test_what_the_op_raises_is_kept_and_raised_when_it_is_compared():
    found = rank_by_rank(torch.mm, numbers(2, 3), numbers(2, 3))
    assert "cannot be multiplied" in str(found[3].error)
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        differences_from_reference(found, None)


def gathered(change, what):
    """What is found where one rank's result is another."""
    x = numbers(2, 3)
    twin = rank_by_rank(torch.neg, x)
    with_fault = rank_map(lambda rank: change(twin[rank].result) if rank == 2 else twin[rank].result)
    return [(one.rank, one.what) for one in differences_from_reference(twin, with_fault, (x,))] == [(2, what)]


@pytest.mark.parametrize(("change", "what"), [
    (lambda x: x + (x == x.max()) * 1e-7, "value"), (lambda x: x.t().contiguous().t(), "stride"), (lambda x: x.t(), "shape"),
    (lambda x: x.view(3, 2), "shape"),
])  # fmt: skip
def test_a_fault_on_one_rank_is_found(change, what):
    assert gathered(change, what)


def test_a_dtype_a_structure_a_number_and_a_wrong_argument_are_found():
    x = numbers(2)
    twin = rank_by_rank(torch.neg, x)
    assert {one.what for one in differences_from_reference(twin, (-x).double(), (x,))} == {"dtype"}
    assert {one.what for one in differences_from_reference(twin, [-x], (x,))} == {"value"}
    assert {one.what for one in differences_from_reference(rank_by_rank(torch.unbind, x), list(x.unbind()), (x,))} == {
        "structure"
    }
    assert {one.what for one in differences_from_reference(rank_by_rank(torch.numel, x), 3, (x,))} == {"value"}
    found = differences_from_reference(rank_by_rank(torch.Tensor.add_, x, 1), x, (x, 1))
    assert {(one.place, one.what) for one in found} == {("result", "value"), ("argument 0", "value")}
    assert {one.what for one in differences_from_reference(rank_by_rank(lambda x: x, x), x.clone(), (x,))} == {
        "identity"
    }


def test_signs_of_zeros_count_and_nans_do_not():
    nan = float("nan")
    assert same_to_the_bit(torch.tensor([nan, 0.0]), torch.tensor([nan, 0.0]))
    assert not same_to_the_bit(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not same_to_the_bit(torch.tensor([1 + 2j]), torch.tensor([1 - 2j]))
    assert same_to_the_bit(torch.tensor([1 + 2j]).conj(), torch.tensor([1 - 2j]))


def test_sparse_tensors_are_compared_by_all_their_elements():
    sparse = torch.eye(2).to_sparse()
    assert same_to_the_bit(sparse, torch.eye(2).to_sparse())
    assert not same_to_the_bit(sparse, (torch.eye(2) * 2).to_sparse())


def test_a_difference_says_where_and_how_far():
    told = str(LockstepDifference(3, "result 0", "value", torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.5])))
    assert (
        told
        == "rank 3, result 0: value: f32[2] [1.0, 2.0] in lockstep, f32[2] [1.0, 2.5] alone, in 1 of 2 elements, by up to 0.5"
    )


def test_the_envelope_is_what_noise_and_the_ops_own_error_are(mode):
    with mode.disable():
        x = torch.randn(1000)
        assert envelope(torch.neg, (x,), {}) == pytest.approx(2**-22, rel=1)  # an ulp of the largest
        assert envelope(torch.sum, (x,), {}) >= 2 * abs(x.sum().double() - x.double().sum())
        assert envelope(torch.argmax, (x,), {}) == 0 == envelope(torch.Tensor.zero_, (x,), {})
        assert envelope(torch.Tensor.neg_, (x,), {}) == envelope(torch.neg, (x,), {})
        near = LockstepDifference(0, "result", "value", x.sum(), x.double().sum().float())
        assert within_envelope(near, envelope(torch.sum, (x,), {}))
        assert not within_envelope(
            LockstepDifference(0, "result", "value", x.sum(), x.sum() + 0.01), envelope(torch.sum, (x,), {})
        )
        assert not within_envelope(LockstepDifference(0, "result", "value", torch.tensor(1), torch.tensor(2)), 9.0)
        assert not within_envelope(LockstepDifference(0, "result", "stride", (1,), (2,)), 9.0)
        assert not within_envelope(
            LockstepDifference(0, "result", "value", torch.tensor(float("nan")), torch.tensor(1.0)), 9.0
        )


def test_check_op_gives_the_result_or_says_what_is_wrong(monkeypatch):
    x = numbers(2, 3)
    done = check_op(torch.mm, x, x.t())
    assert isinstance(done, LocalTensor) and done.shape == (2, 2)
    original = execute._on_stack
    monkeypatch.setattr(execute, "_on_stack", lambda *args: original(*args) + 0.5)
    with pytest.raises(
        AssertionError, match=r"in lockstep is not what it is alone:\nrank 0, result: value: f32\[2,3\]"
    ):
        check_op(torch.neg, x)


def test_check_op_raises_what_the_op_raises():
    with pytest.raises(IndexError, match="Dimension out of range"):
        check_op(torch.softmax, numbers(2), 3)
