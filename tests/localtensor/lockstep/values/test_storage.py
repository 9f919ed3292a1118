"""Memory that views share: it is split under all of them at once, and each lies where it lay."""

import gc

import pytest
import torch

from localtensor.errors import NotHeld, OutsideWrite
from localtensor.lockstep.mode import rank_map, tensor_map
from localtensor.lockstep.values.partition import one_row_per_rank, partition, refinement
from localtensor.lockstep.values.storage import Memory, SeparateRows, any_overlap, memory_of, overwrite, refine

pytestmark = pytest.mark.usefixtures("mode")

HALVES = partition([0, 0, 1, 1], [2])


def finer(x, held):
    with torch._C._DisableTorchDispatch():  # as while an op is served
        refine(x, held)


def written(x, values, held):
    with torch._C._DisableTorchDispatch():
        cells = tuple(value._cells[0] for value in values)
        overwrite(x, cells, held)


def differing(*shape):
    return rank_map(lambda rank: torch.full(shape, float(rank)))


def test_a_finer_write_to_a_view_is_seen_by_its_base_and_its_other_views():
    base = torch.zeros(4, 2)
    column, row, flat = base[:, 1], base[1], base.view(-1)
    row.add_(differing(2))
    for rank in range(4):
        assert base.on(rank).tolist() == [[0, 0], [rank, rank], [0, 0], [0, 0]]
        assert column.on(rank).tolist() == [0, rank, 0, 0] and flat.on(rank)[2:4].tolist() == [rank, rank]
    assert {x._partition for x in (base, column, row, flat)} == {base._partition}


def test_cells_of_an_empty_tensor_do_not_share_what_each_grows_into():
    x = torch.empty(0)
    finer(x, partition([0, 1, 2, 3], [1, 1, 1, 1]))
    assert len({cell.untyped_storage()._cdata for cell in x._cells}) == 4
    y = torch.empty(0)
    y.resize_(torch.distributed.get_rank() + 1)
    for rank, cell in enumerate(y._cells):
        cell.fill_(rank)
    assert [y.on(rank).tolist() for rank in range(4)] == [[0], [1, 1], [2, 2, 2], [3, 3, 3, 3]]


def test_an_overlap_on_any_rank_is_refused_as_each_rank_alone_refuses_it():
    x = rank_map(lambda rank: torch.arange(0.0 if rank == 0 else 4.0) + rank)  # rank 0 has nothing that could overlap
    assert x._partition.sizes[0] == 1 < x._partition.rows
    with pytest.raises(RuntimeError, match="single memory location"):
        x[1:].add_(x[:-1])


def test_only_what_lies_in_the_same_places_overlaps():
    x = differing(6)
    half, rest, middle = x[:3], x[3:], x[2:4]
    assert (
        not any_overlap([half], [half, rest]) and any_overlap([half], [half, middle]) and any_overlap([rest], [middle])
    )
    assert (
        not any_overlap([half], [half])
        and not any_overlap([half], [differing(6)])
        and not any_overlap([half], [x[3:3]])
    )


def test_whole_values_of_one_shape_become_one_cell_whatever_their_strides():
    x = torch.zeros(2, 3)
    by_rows, by_columns = torch.ones(2, 3), torch.full((3, 2), 2.0).t()
    written(x, [by_rows, by_columns], partition([0, 1, 0, 1], [1, 1]))
    assert len(x._cells) == 1 and [x.on(rank)[1, 1].item() for rank in range(4)] == [1, 2, 1, 2]


def test_a_split_copies_no_more_than_it_must():
    x = rank_map(lambda rank: torch.full((2,), float(rank // 2)))
    before = x._cells[0].data_ptr()
    x.add_(1)
    assert x._cells[0].data_ptr() == before and x._partition is HALVES
    x.add_(rank_map(lambda rank: torch.tensor(float(rank // 2)) * 5))
    assert x._cells[0].data_ptr() == before  # the same ranks differ: nothing is split
    x.add_(differing(2))
    assert x._partition.rows == 4 and x.on(3).tolist() == [10, 10]


def test_a_cell_that_goes_to_one_new_cell_stays_where_it_is():
    x = rank_map(lambda rank: torch.zeros(rank // 2 + 1))
    kept = x._cells[1].data_ptr()
    finer(x, refinement(partition([0, 1, 2, 2], [1, 1, 1]), x._partition))
    assert x._cells[2].data_ptr() == kept and len(x._cells) == 3


def test_views_lie_where_they_lay():
    base = torch.arange(24.0).view(4, 6)
    views = [base.t(), base[1:, ::2], base.diagonal(), base.as_strided((2, 3), (1, 2), 5), base[2].expand(3, 6)]
    wanted = [(x.shape, x.stride(), x.storage_offset(), x.on(0)) for x in views]
    base[0, 0].mul_(differing())
    for x, (shape, stride, offset, value) in zip(views, wanted, strict=True):
        cell = x._cells[0]
        assert (cell.shape[1:], cell.stride()[1:], cell.storage_offset()) == (shape, stride, offset)
        assert torch.equal(x.on(1), value)


def test_blocks_fit_the_largest_items_that_a_view_has():
    base = torch.arange(12, dtype=torch.uint8)
    view, other = base[:8].view(torch.int64), base[8:].view(torch.int32)
    base.add_(rank_map(lambda rank: torch.tensor(rank, dtype=torch.uint8)))
    for rank in range(4):
        wanted = torch.arange(12, dtype=torch.uint8) + rank
        assert torch.equal(base.on(rank), wanted)
        assert torch.equal(view.on(rank), wanted[:8].clone().view(torch.int64))
        assert torch.equal(other.on(rank), wanted[8:].clone().view(torch.int32))


def test_a_lazy_conjugate_stays_one():
    base = torch.tensor([1 + 2j, 3j])
    view, imaginary = base.conj(), base.conj().imag
    base.mul_(differing())
    assert view.is_conj() and view.on(2).tolist() == [2 - 4j, -6j]
    assert imaginary.is_neg() and imaginary.on(2).tolist() == [-4, -6]
    view.add_(1j)
    assert base.on(1).tolist() == [1 + 1j, 2j]


def test_views_that_are_gone_are_forgotten():
    base = torch.zeros(3)
    for _ in range(300):
        base[1:]
    assert len(base._memory._members) < 70 and base._memory.members() == [base]
    kept = [base[1:] for _ in range(300)]
    base.add_(differing(3))
    assert all(x.on(2).tolist() == [2, 2] for x in kept)


def test_a_base_that_is_gone_leaves_its_views_together():
    base = torch.zeros(4)
    head, tail = base[:3], base[1:]
    del base
    gc.collect()
    head.add_(differing(3))
    assert tail.on(3).tolist() == [3, 3, 0]


def test_each_rank_takes_another_view_and_writes_through_it(mode):
    base = torch.zeros(4, 2)
    base[mode.rank()].add_(7)
    base.narrow(0, mode.rank(), 1).mul_(2)
    for rank in range(4):
        assert base.on(rank)[rank].tolist() == [14, 14] and base.on(rank).sum() == 28


def test_ranks_that_hold_nothing_of_what_is_written_keep_what_they_have():
    x = differing(2)
    view = x[1:]
    x.add_(tensor_map(x, lambda rank, own: own if rank < 2 else None))
    assert [x.on(rank).tolist() for rank in range(4)] == [[0, 0], [2, 2], [2, 2], [3, 3]]
    x[:1].zero_()
    assert [view.on(rank).item() for rank in range(4)] == [0, 2, 2, 3]
    y = torch.zeros(2)
    finer(y, one_row_per_rank([1], 4))
    assert y.ranks == (0, 1, 2, 3) and y._partition.rows == 2


def test_a_view_that_only_some_ranks_can_take_is_refused(mode):
    x = torch.zeros(4)
    some = tensor_map(x, lambda rank, own: own[:rank] if rank else None)
    with pytest.raises(NotHeld, match="rank 0"):
        x[: some.shape[0]]
    assert x.ranks == (0, 1, 2, 3)


def test_sparse_tensors_are_split_without_memory():
    x = torch.eye(2).to_sparse()
    finer(x, partition([0, 0, 1, 1], [1, 1]))
    assert len(x._cells) == 2 and x._cells[0] is not x._cells[1]
    with pytest.raises(SeparateRows):
        finer(x, partition([0, 1, 2, 3], [2, 2]))
    y = torch.eye(2).to_sparse()
    y.mul_(differing())
    assert y.on(3).to_dense().tolist() == [[3, 0], [0, 3]]


def test_memory_is_made_when_it_is_shared_and_a_member_is_in_one_only():
    x, y = torch.zeros(2), torch.ones(2)
    assert x._memory is None and memory_of(x) is memory_of(x) is x._memory
    view = x[:1]
    view.data = y
    assert view._memory is y._memory is not x._memory and [id(x)] == [id(one) for one in x._memory.members()]
    y.add_(differing(2))
    assert view.on(2).tolist() == [3, 3] and x._partition.uniform


def test_overwrite_holds_values_as_coarse_as_they_come():
    x = differing(2, 2)
    view = x[0]
    written(x, (torch.full((2, 2), 9.0),), partition([0] * 4, [1]))
    assert x._partition.uniform and view._partition.uniform and view.reconcile().tolist() == [9, 9]
    part = x[1]
    written(part, (torch.tensor([[1.0, 2.0], [3.0, 4.0]]),), HALVES)
    assert x.on(0).tolist() == [[9, 9], [1, 2]] and x.on(3).tolist() == [[9, 9], [3, 4]]


def test_overwrite_keeps_no_hand_on_the_values():
    x, values = differing(2), torch.arange(12.0).view(3, 4)
    written(x, (values[1, :2],), partition([0] * 4, [1]))
    values.zero_()
    assert x.reconcile().tolist() == [4, 5]


def test_tensors_from_outside_are_one_for_all_ranks(mode):
    with mode.disable():
        outside = torch.zeros(4)
    view, mine = outside[1:], outside[: mode.rank()]
    view.add_(1)
    assert type(view) is torch.Tensor and mine._memory.outside
    assert [mine.on(rank).tolist() for rank in range(4)] == [[], [0], [0, 1], [0, 1, 1]]
    for write in (lambda: outside.add_(differing(4)), lambda: view.copy_(differing(3)), lambda: mine.add_(1)):
        with pytest.raises(OutsideWrite, match="it was made outside the mode"):
            write()
    assert outside.tolist() == [0, 1, 1, 1]
    x = torch.ones(4)
    x.data = outside
    x.add_(1)
    assert outside.tolist() == [1, 2, 2, 2] and isinstance(x._memory, Memory)
    with pytest.raises(OutsideWrite):
        x.add_(differing(4))
