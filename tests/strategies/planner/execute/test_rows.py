"""Which rows a rank holds, against what `split` deals out; and what goes from whom to whom.  Rows as tensors: cut
out, packed, put together again, and set among values that change nothing."""

import itertools

import pytest
import torch

from localtensor.layout.mesh import Mesh
from localtensor.layout.reductions import fold_partials as fold
from localtensor.layout.reductions import is_unambiguous
from localtensor.layout.shards import split
from localtensor.layout.spec import PARTIAL_KINDS, Spec, parse
from strategies.planner.execute.rows import (
    BlockPiece,
    NotInnermost,
    all_rows,
    are_in_memory_order,
    block_shape,
    common_rows,
    copy_rows_to,
    flattened,
    neutral_element,
    pack,
    pad_rows,
    piece_of_rank,
    rank_groups,
    rows_after_cuts,
    spaced_runs,
    take_rows,
    transfers,
    unpack,
)
from tests.strategies.planner.execute.random_specs import DTYPES, draw


def _listed(runs):
    return [row for start, length in runs for row in range(start, start + length)]


def _rows(spec, rank, dim):
    axes = spec.cut_by(dim)
    return piece_of_rank(spec, axes, rank).runs if axes else all_rows(spec.shape[dim])


def _placed(specs):
    return [one for one in specs if not any("P" in str(p)[:1] for p in one.placements)]


def test_the_rows_of_each_dim_are_those_that_split_gives_the_rank():
    tried = 0
    for one in draw(5, 400, ranks=12, axes=3):
        for spec in _placed([one.src, one.dst]):
            for dim in range(len(spec.shape)):
                line = torch.arange(spec.shape[dim]).view([-1 if d == dim else 1 for d in range(len(spec.shape))])
                for rank, held in enumerate(split(line.expand(spec.shape), spec)):
                    if held.numel():
                        row = held.movedim(dim, 0).reshape(held.shape[dim], -1)[:, 0]
                        assert row.tolist() == _listed(_rows(spec, rank, dim)), (spec, rank, dim)
                        tried += 1
    assert tried > 1000


def test_a_piece_is_the_part_of_its_block_that_the_axes_of_the_step_leave():
    for one in draw(6, 300, ranks=12, axes=3):
        spec = one.src
        for dim in range(len(spec.shape)):
            for count in range(1, len(stack := spec.cut_by(dim)) + 1):
                axes = tuple(sorted(stack[-count:]))
                for line in rank_groups(spec.mesh, axes):
                    found = [piece_of_rank(spec, axes, rank) for rank in line]
                    held = sorted(row for p in found for row in _listed(p.runs))
                    assert held == list(range(block_shape(spec, axes, line[0])[dim])), (spec, axes)
                    assert len({block_shape(spec, axes, rank) for rank in line}) == 1


def test_a_cut_within_which_another_cuts_is_no_piece():
    spec = Spec(Mesh.of(2, 2), (parse("S(0)"), parse("S(0)")), (8,), torch.float32)
    with pytest.raises(NotInnermost, match="b cuts what a has left of dim 0"):
        piece_of_rank(spec, (0,), 0)


@pytest.mark.parametrize("seed", range(20))
def test_rows_that_two_share_are_what_lists_of_numbers_say(seed):
    rng = torch.Generator().manual_seed(seed)
    held, wanted = (_runs(torch.randint(0, 2, (24,), generator=rng).tolist()) for _ in range(2))
    both = [place for place, row in enumerate(_listed(held)) if row in _listed(wanted)]
    assert _listed(common_rows(held, wanted)) == both


def _runs(bits):
    found = [list(group) for bit, group in itertools.groupby(range(len(bits)), bits.__getitem__) if bit]
    return tuple((group[0], len(group)) for group in found)


def test_what_one_sends_is_what_the_other_gets():
    for one in draw(8, 200, ranks=8, axes=2):
        for axis in range(len(one.src.mesh.sizes)):
            line = rank_groups(one.src.mesh, (axis,))[0]
            size = one.src.mesh.sizes[axis]
            was = [BlockPiece(0, rows_after_cuts(11, ((1, size, place),))) for place in range(len(line))]
            now = [BlockPiece(0, rows_after_cuts(11, ((3, size, place),))) for place in range(len(line))]
            there = [BlockPiece(1, rows_after_cuts(5, ((1, size, place),))) for place in range(len(line))]
            for after in (now, there):
                sent = [[p.shape for p in transfers((11, 5), mine, after)] for mine in was]
                got = [[p.shape for p in transfers((11, 5), mine, was)] for mine in after]
                assert sent == [list(column) for column in zip(*got, strict=True)]


def test_parts_lie_in_order_only_along_the_outermost_dim_and_one_behind_the_other():
    first, second = BlockPiece(0, ((0, 3),)), BlockPiece(0, ((3, 1),))
    assert are_in_memory_order((4, 5), transfers((4, 5), None, [first, second]))
    assert not are_in_memory_order((4, 5), transfers((4, 5), None, [second, first]))
    assert not are_in_memory_order((4, 5), transfers((4, 5), None, [first, BlockPiece(0, ())]))
    assert are_in_memory_order((1, 4), transfers((1, 4), None, [BlockPiece(1, ((0, 3),)), BlockPiece(1, ((3, 1),))]))


SPECIAL = [3.0, float("nan"), float("inf"), float("-inf"), -0.0]


def _dealt(shape, dim, factor, ranks):
    pieces = [BlockPiece(dim, rows_after_cuts(shape[dim], ((factor, ranks, place),))) for place in range(ranks)]
    return transfers(shape, None, pieces)


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize(("factor", "ranks"), [(1, 2), (1, 4), (2, 2), (3, 2), (2, 3), (5, 4)])
def test_what_is_packed_is_unpacked_even_in_slots_of_one_size(dim, factor, ranks):
    x = torch.arange(5 * 7 * 3).view(5, 7, 3)
    found = _dealt((5, 7, 3), dim, factor, ranks)
    most = max(part.rows for part in found)
    for rows in (None, most, most + 1):
        flat = pack(x, found, rows)
        assert flat.numel() == (x.numel() if rows is None else x.numel() // x.shape[dim] * rows * ranks)
        assert torch.equal(unpack(flat, found, (5, 7, 3), rows), x)


def test_what_lies_in_order_is_not_copied():
    x = torch.arange(12).view(4, 3)
    found = _dealt((4, 3), 0, 1, 2)
    flat = pack(x, found, 2)
    assert flat.data_ptr() == x.data_ptr()
    assert unpack(flat, found, (4, 3), 2).data_ptr() == x.data_ptr()
    assert pack(x.t().contiguous().t(), found, 2).data_ptr() != x.data_ptr()
    assert pack(x, _dealt((4, 3), 1, 1, 3), 1).data_ptr() != x.data_ptr()


def test_one_element_is_flat_whatever_its_stride():
    assert flattened(torch.zeros(1, 2)[:, 1]).stride() == (1,)
    assert flattened(torch.arange(4).view(2, 2).t()).tolist() == [0, 2, 1, 3]
    x = torch.arange(4).view(2, 2)
    assert flattened(x).data_ptr() == x.data_ptr()


def test_rows_of_a_strided_shard_are_one_view_however_many_blocks_it_has():
    runs = rows_after_cuts(4000, ((1000, 2, 1),))
    assert len(runs) == 1000
    assert spaced_runs(runs) == ((2, 2, 4, 1000),)
    x = torch.arange(4000)
    assert torch.equal(take_rows(x, 0, runs), x.view(1000, 2, 2)[:, 1].flatten())
    again = torch.zeros_like(x)
    copy_rows_to(take_rows(x, 0, runs), 0, runs, again)
    assert torch.equal(again, x * (x % 4 >= 2))


def test_a_short_piece_is_filled_with_zeros_and_a_full_one_is_not_copied():
    x = torch.ones(2, 3)
    assert pad_rows(x, 0, 3).tolist() == [1] * 6 + [0] * 3
    assert pad_rows(x, 0, 2).data_ptr() == x.data_ptr()


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [(kind, dtype) for kind in PARTIAL_KINDS for dtype in DTYPES if kind != "avg" and is_unambiguous(kind, dtype)],
)
def test_the_neutral_value_changes_nothing_nan_infinity_and_minus_zero_included(kind, dtype):
    x = torch.tensor(SPECIAL if dtype.is_floating_point else [0, 1, 3]).to(dtype)
    if not dtype.is_floating_point and not dtype.is_complex and dtype != torch.bool:
        x = torch.cat([x, torch.tensor([torch.iinfo(dtype).min, torch.iinfo(dtype).max], dtype=dtype)])
    other = torch.full_like(x, neutral_element(kind, dtype))
    pair = {"sum": torch.add, "product": torch.mul, "min": torch.minimum, "max": torch.maximum}
    for one, two in ((x, other), (other, x)):
        torch.testing.assert_close(fold(torch.stack([one, two]), kind), x, rtol=0, atol=0, equal_nan=True)
        if dtype.is_floating_point:
            assert torch.equal(pair[kind](one, two).nan_to_num().signbit(), x.nan_to_num().signbit())
