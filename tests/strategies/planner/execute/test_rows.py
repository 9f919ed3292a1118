"""Which rows a rank holds, against what `split` deals out; and what goes from whom to whom."""

import itertools

import pytest
import torch

from localtensor.layout.mesh import Mesh
from localtensor.layout.shards import split
from localtensor.layout.spec import Spec, parse
from strategies.planner.execute.rows import (
    BlockPiece,
    NotInnermost,
    all_rows,
    are_in_memory_order,
    block_shape,
    common_rows,
    piece_of_rank,
    rank_groups,
    rows_after_cuts,
    transfers,
)
from tests.strategies.planner.execute.random_specs import draw


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
