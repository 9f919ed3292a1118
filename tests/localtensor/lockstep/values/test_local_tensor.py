"""LocalTensor as a citizen: it does what any tensor does, and refuses in words what one control flow cannot.
LocalTensors and modes: after a mode has ended, in another one, within one, beside one, and from outside of any."""

import copy
import threading

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from localtensor.errors import AnotherMode, NotHeld, NotInLockstep, OutsideWrite, RanksDisagree, RanksDiverge
from localtensor.lockstep.mode import LocalTensorMode, rank_map, tensor_map
from localtensor.lockstep.values.local_tensor import LocalTensor
from tests.localtensor.lockstep.conftest import on_all

pytestmark = pytest.mark.usefixtures("mode")


# -- what one rank holds


def test_on_gives_a_plain_copy(x):
    got = x.on(2)
    assert type(got) is torch.Tensor and got.data_ptr() != x.__localtensor_on__(2).data_ptr()
    assert x.__localtensor_on__(2).data_ptr() == x._cells[0].data_ptr() + 2 * 12
    assert torch.equal(got, torch.tensor([2.0, 3, 4])) and not got.requires_grad
    assert nn.Parameter(x).on(1).requires_grad


@pytest.mark.parametrize("rank", [-1, 4, 2, 1.5])
def test_on_a_rank_that_holds_nothing(x, rank):
    some = tensor_map(x, lambda rank, own: own if rank != 2 else None)
    assert some.ranks == (0, 1, 3) and sorted(some._local_tensors) == [0, 1, 3]
    with pytest.raises(
        NotHeld, match=rf"LocalTensor.on: ranks: rank {rank}: no value is held there, only on ranks 0, 1, 3"
    ):
        some.on(rank)


def test_values_are_held_once_by_first_rank():
    x = rank_map(lambda rank: torch.tensor(1 - rank % 2))
    assert [(ranks, value.item()) for ranks, value in x.values()] == [([0, 2], 1), ([1, 3], 0)]


def test_reconcile_is_the_one_value_of_all():
    x = rank_map(lambda rank: torch.full((2,), float(rank)))
    same = x * 0 + float("nan")
    assert same._partition.rows == 4 and type(same.reconcile()) is torch.Tensor
    assert torch.equal(same.reconcile(), torch.full((2,), float("nan"))) is False and same.reconcile().isnan().all()


def test_reconcile_says_who_differs_where_and_by_how_much():
    x = rank_map(lambda rank: torch.tensor([1.0, 2.0, 3.0]) + (rank == 2) * torch.tensor([0.0, 0.5, 0.0]))
    with pytest.raises(RanksDisagree) as caught:
        x.reconcile()
    sentence, *lines = str(caught.value).splitlines()
    assert sentence == (
        "LocalTensor.reconcile: value: f32[3] [1.0, 2.5, 3.0] on rank 2, f32[3] [1.0, 2.0, 3.0] on ranks 0, 1, 3: the ranks "
        "disagree, rank 2 from rank 0 in 1 of 3 elements, by up to 0.5. Compute it from what all ranks share: the same "
        "seed, the same input, or a broadcast from one rank."
    )
    assert any("rank 2: f32[3] [1.0, 2.5, 3.0] at test_local_tensor.py" in line for line in lines)


def test_reconcile_of_different_sizes(uneven):
    with pytest.raises(
        RanksDisagree, match=r"f32\[0,2\] .* on rank 0, f32\[1,2\] .* the ranks disagree, rank 1 from rank 0\."
    ):
        uneven.reconcile()


# -- as any tensor


def test_numpy_and_lists():
    x = torch.arange(4.0)
    assert isinstance(x.numpy(), np.ndarray) and x.numpy().tolist() == x.tolist() == [0, 1, 2, 3]
    assert np.asarray(x, np.float16).dtype == np.float16
    with pytest.raises(RuntimeError, match="requires grad"):
        nn.Parameter(x).numpy()
    assert nn.Parameter(x).detach().numpy().sum() == nn.Parameter(x).numpy(force=True).sum() == 6
    assert torch.from_dlpack(x).tolist() == [0, 1, 2, 3] and torch.from_numpy(np.ones(2)).tolist() == [1, 1]


def test_plain_tensors_are_read_by_numpy_as_ever(x, mode):
    with mode.disable():
        outside = torch.arange(3.0)
    for plain in (outside, outside.detach(), outside.view(3, 1), x.on(0)):
        assert type(plain) is torch.Tensor and plain.numpy().reshape(-1).tolist() == [0, 1, 2]


@pytest.mark.parametrize("read", [lambda x: x.numpy(), lambda x: x.tolist(), np.asarray, torch.from_dlpack])
def test_what_has_to_be_one_value_is_refused_where_ranks_disagree(x, read):
    with pytest.raises(RanksDisagree, match=r"LocalTensor\.reconcile"):
        read(x)


READS = {
    "item": lambda x: x.item(), "bool": bool, "float": float, "int": int, "complex": complex, "format": lambda x: f"{x:.2f}",
    "index": lambda x: [1, 2, 3][x.long()], "in": lambda x: 0.0 in x[None], "if": lambda x: 1 if x else 2,
}  # fmt: skip


@pytest.mark.parametrize("name", READS)
def test_a_number_is_read_if_all_ranks_agree(x, name):
    read = READS[name]
    assert read(torch.tensor(1.0)) == read(x[0] * 0 + 1) == read(torch.tensor(1.0).on(0))
    with pytest.raises(RanksDiverge, match="rank 0"):
        read(x[0])


def test_tensors_are_built_of_numbers_and_of_tensors(x):
    built = torch.tensor([[x[0], 5], [2.5, torch.tensor(3)]])
    assert built.dtype == torch.float32 and on_all(built)[3] == [[3, 5], [2.5, 3]]
    assert torch.tensor([x[1], x[2]], dtype=torch.int64, requires_grad=False).on(2).tolist() == [3, 4]
    assert torch.tensor([torch.tensor(2), 1.5]).tolist() == [2, 1.5] and torch.tensor([1, 2]).tolist() == [1, 2]
    assert on_all(torch.as_tensor([x[0], 7]))[2] == [2, 7] and torch.as_tensor([1, 2]).tolist() == [1, 2]
    assert torch.as_tensor(x) is x and on_all(torch.stack([x[0], x[1]]))[1] == [1, 2]


def test_length_iteration_and_membership(x, uneven):
    assert len(x) == 3 and [on_all(one)[1] for one in x] == [1, 2, 3]
    first, *_ = x
    assert first.dim() == 0 and 99.0 not in x
    with pytest.raises(RanksDiverge, match="0 on rank 0, 1 on rank 1"):
        len(uneven)
    with pytest.raises((RanksDiverge, NotInLockstep)):
        list(uneven)


def test_identity_and_hash(x):
    same = {x: 1}
    assert hash(x) == hash(x) == id(x) and x in same and x.clone() not in same
    assert len({x, x.view(3), x}) == 2


def test_kinds():
    module = nn.Linear(2, 2)
    assert (
        type(module.weight) is LocalTensor and isinstance(module.weight, nn.Parameter) and module.weight.requires_grad
    )
    assert not isinstance(torch.ones(2), nn.Parameter) and isinstance(torch.ones(2), torch.Tensor)
    assert [name for name, _ in module.named_parameters()] == ["weight", "bias"]
    assert isinstance(nn.Buffer(torch.ones(2)), nn.Buffer) and torch.is_tensor(module.weight)


def test_size_where_ranks_differ(uneven):
    rank = dist.get_rank()
    assert uneven.shape[0] == rank and uneven.size() == uneven.shape and uneven.size(1) == 2
    assert uneven.dim() == uneven.ndim == 2 and uneven.stride() == (2, 1) and uneven.is_contiguous()
    assert uneven.numel() == 2 * rank and uneven.nbytes == 8 * rank
    assert uneven.T.shape == (2, rank) and uneven.view(-1).shape == (2 * rank,)
    assert not rank_map(lambda rank: torch.ones(rank + 2, 2)).t().is_contiguous()
    assert uneven.reshape(-1, 1).on(2).shape == (4, 1) and torch.zeros(uneven.shape).on(3).shape == (3, 2)


def test_contiguous_is_said_of_a_row(x):
    wide = x[None].expand(2, 3)
    assert x.is_contiguous() and not wide.is_contiguous() and wide.contiguous().is_contiguous()
    picture = rank_map(lambda rank: torch.ones(2, 3, 4, 4) * rank).to(memory_format=torch.channels_last)
    assert picture.is_contiguous(memory_format=torch.channels_last) and picture.stride() == (48, 1, 12, 3)
    assert picture.on(1).stride() == (48, 1, 12, 3)


def test_ranks_whose_tensors_lie_otherwise():
    x = rank_map(
        lambda rank: torch.arange(6.0).view(2, 3).t() + rank if rank % 2 else torch.arange(6.0).view(3, 2) + rank
    )
    assert not x.is_contiguous() and x.contiguous().stride() == (2, 1) and x.shape == (3, 2)
    assert [x.stride(1) == stride for stride in (1, 3)] == [x.stride(0) == 2, x.stride(0) == 1]
    assert on_all(x.contiguous().view(-1))[1] == [1, 4, 2, 5, 3, 6] and on_all(x.t()[0])[2] == [2, 4, 6]


def test_indexing(x):
    base = rank_map(lambda rank: torch.arange(12.0).view(4, 3) + 100 * rank)
    plain = torch.arange(12.0).view(4, 3).on(0)
    for index in [
        0,
        -1,
        slice(1, 3),
        (..., 1),
        (None, 2),
        [0, 2],
        (slice(None), [1, 1]),
        torch.tensor([True, False, True, False]),
    ]:
        for rank in range(4):
            own = index.on(rank) if isinstance(index, LocalTensor) else index
            assert torch.equal(base[index].on(rank), plain[own] + 100 * rank)
    assert base[x[:2].long() % 3].on(3).tolist() == [[300, 301, 302], [303, 304, 305]]
    assert [len(one) for one in on_all(base[base[:, 0] > 103])] == [0, 2, 4, 4]


def test_an_int_of_each_rank_is_an_index():
    rank = dist.get_rank()
    x = torch.arange(16).view(4, 4)
    assert on_all(x[rank]) == [list(range(4 * r, 4 * r + 4)) for r in range(4)]
    assert on_all(x[..., rank]) == [list(range(r, 16, 4)) for r in range(4)]
    assert on_all(x[rank, rank]) == [0, 5, 10, 15] and on_all(x[-1, rank]) == [12, 13, 14, 15]
    assert on_all(x[1:, None, rank, None])[2] == [[[6]], [[10]], [[14]]]
    assert on_all(x[:rank, 0]) == [[], [0], [0, 4], [0, 4, 8]]
    x[rank, 1:3] = -1
    x[rank] *= 2
    assert on_all(x)[1] == [[0, 1, 2, 3], [8, -2, -2, 14], [8, 9, 10, 11], [12, 13, 14, 15]]
    assert on_all(x[rank, torch.tensor([0, 3])])[1:3] == [[8, 14], [16, 22]]
    with pytest.raises(NotInLockstep, match="True in an index beside ints of each rank"):
        x[rank, True]


def test_comparison_of_whole_tensors(x):
    assert torch.equal(x, x.clone()) and torch.allclose(x, x + 1e-9) and not torch.equal(x, x + 1)
    torch.testing.assert_close(torch.ones(2), torch.ones(2))
    with pytest.raises(RanksDiverge, match="True on rank 0, False on ranks 1, 2, 3"):
        torch.equal(x, torch.arange(3.0))


def test_lazy_conjugates_and_dtypes():
    z = rank_map(lambda rank: torch.tensor([1 + 2j]) * rank)
    assert z.conj().is_conj() and not z.is_conj() and z.conj().imag.is_neg()
    assert (
        on_all(z.conj().imag)[2] == [-4]
        and on_all(z.conj() * 1j)[1] == [2 + 1j]
        and on_all(z[None].mH.real)[3] == [[3]]
    )
    assert z.to(torch.complex128).dtype == torch.complex128 and z.real.double().cpu().type() == "torch.DoubleTensor"


def test_shape_in_place(x, uneven):
    y = x[None]
    assert y.t_().shape == (3, 1) and y.squeeze_().shape == (3,) and y.unsqueeze_(0).transpose_(0, 1).shape == (3, 1)
    y.add_(1)
    assert on_all(x)[2] == [3, 4, 5] and uneven.t_().shape == (2, dist.get_rank()) and uneven.on(3).shape == (2, 3)
    assert x.resize_(5).shape == (5,) and on_all(x)[1][:3] == [2, 3, 4]
    x.set_(torch.ones(2))
    assert on_all(x) == [[1, 1]] * 4 and torch.add(x, 1, out=torch.empty(0)).tolist() == [2, 2]


def test_arithmetic_goes_on_after_the_mode_has_ended():
    with LocalTensorMode(3):
        x = rank_map(lambda rank: torch.full((2, 2), float(rank)))
        weight = nn.Parameter(x)
        uneven = rank_map(lambda rank: torch.ones(rank, 2))
    with LocalTensorMode(5):
        pass
    # the mode of the fixture is still at work, and is another one
    with pytest.raises(
        AnotherMode, match=r"aten.add.Tensor: an input: used at test_local_tensor.py:\d+ in .*another LocalTensorMode"
    ):
        x + 1
    with pytest.raises(AnotherMode):
        torch.cat([torch.ones(2, 2), x])

    def outside():
        weight.mul(torch.ones(2, 2)).sum().backward()
        x.add_(1)
        return x @ torch.eye(2), weight.grad, uneven * 2, copy.deepcopy(x), x.sum(), x[0] > 1

    product, grad, doubled, twin, total, more = in_a_thread(outside)
    assert [product.on(rank).tolist() for rank in range(3)] == [[[rank + 1.0] * 2] * 2 for rank in range(3)]
    assert grad.reconcile().tolist() == [[1, 1], [1, 1]] and doubled.on(2).tolist() == [[2, 2], [2, 2]]
    assert twin.on(2).sum() == total.on(2) == 12 and more.on(0).tolist() == [False, False]


def in_a_thread(work):
    """What the work gives in a thread without a mode."""
    found = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]


def test_made_outside_of_any_mode():
    def make():
        x = LocalTensor([torch.zeros(2), torch.ones(2)], requires_grad=True)
        (x * torch.arange(2.0)).sum().backward()
        return x, LocalTensor({0: torch.ones(1), 2: torch.ones(1)})

    x, some = in_a_thread(make)
    assert x.requires_grad and x.grad.reconcile().tolist() == [0, 1] and x.on(1).tolist() == [1, 1]
    assert some.ranks == (0, 2) and some._partition.world == 3


def test_a_mode_within_a_mode_has_ranks_of_its_own(x):
    with LocalTensorMode(2):
        y = rank_map(torch.tensor)
        assert y.ranks == (0, 1) and torch.ones(2)._partition.world == 2
        with pytest.raises(AnotherMode):
            x + 1
    assert on_all(x + 1)[0] == [1, 2, 3]
    with pytest.raises(AnotherMode):
        y + 1


def test_two_threads_do_not_see_each_others_modes(x):
    barrier = threading.Barrier(2, timeout=20)
    found = {}

    def work(world):
        barrier.wait()
        with LocalTensorMode(world) as mine:
            barrier.wait()
            y = rank_map(torch.tensor)
            dist.all_reduce(y)
            torch.manual_seed(dist.get_rank())
            barrier.wait()
            found[world] = (dist.get_world_size(), y.reconcile().item(), torch.rand(1)._mode is mine, type(plain + 1))
            barrier.wait()

    plain = x.on(0)
    threads = [threading.Thread(target=work, args=(world,)) for world in (2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {2: (2, 1, True, LocalTensor), 3: (3, 3, True, LocalTensor)}
    assert dist.get_world_size() == 4 and (x + 1)._mode is x._mode


def test_plain_tensors_from_outside_are_read_and_written_by_all_alike(x, mode):
    with mode.disable():
        plain = torch.zeros(3)
    tail = plain[1:]
    plain.add_(1)
    tail += 1
    plain.unsqueeze_(0).squeeze_(0)
    dist.all_reduce(plain)
    assert type(plain + 1) is LocalTensor and plain.tolist() == [4, 8, 8] and on_all(plain + x)[1] == [5, 10, 11]
    for write in (
        plain.add_,
        tail.add_,
        plain.copy_,
        plain.data.mul_,
        lambda y: torch.add(y, 1, out=plain),
        lambda y: plain.view(3, 1).t().sub_(y),
    ):
        with pytest.raises(OutsideWrite, match=r"float32\[.*\] at test_local_tensor.py:\d+ in .*made outside the mode"):
            write(x if write is not tail.add_ else x[1:])
    assert plain.tolist() == [4, 8, 8]


@pytest.mark.parametrize("uneven", [False, True])
def test_tensors_have_one_address_if_they_share_memory(uneven):
    with LocalTensorMode(3):
        x = rank_map(lambda rank: torch.ones(4, 2 + 2 * uneven * rank))
        assert x.data_ptr() == x.view(2, 2, -1).data_ptr() == x.detach().data_ptr() != 0
        assert x.data_ptr() not in (x[1:].data_ptr(), x.clone().data_ptr())
