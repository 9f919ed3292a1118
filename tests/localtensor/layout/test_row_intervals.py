"""Rows as runs: against the pieces that `split` gives, and against lists of rows."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard

from localtensor.layout import row_intervals
from localtensor.layout.mesh import Mesh
from localtensor.layout.shards import split, strided_chunk_bounds
from localtensor.layout.spec import Spec, StridedShard

SIZES = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple)


def rows(runs):
    return [row for start, length in runs for row in range(start, start + length)]


@st.composite
def specs(draw):
    """Of one dim, with strided shards and in any order."""
    sizes = draw(SIZES)
    shards = [Shard(0), Replicate(), *(StridedShard(0, split_factor=factor) for factor in (1, 2, 3, 5))]
    placements = tuple(draw(st.sampled_from(shards)) for _ in sizes)
    plain = Spec(Mesh.of(*sizes), placements, (draw(st.integers(0, 30)),), torch.int64)
    order = draw(st.permutations(plain.cut_by(0)))
    return Spec(plain.mesh, placements, plain.shape, torch.int64, ((0, tuple(order)),) if order else ())


@given(specs())
def test_every_rank_holds_the_rows_of_its_piece(spec):
    pieces = [piece.tolist() for piece in split(torch.arange(spec.shape[0]), spec)]
    [cut] = row_intervals.cuts_by_dim(spec)
    assert [rows(runs) for runs in row_intervals.rows_by_rank(spec.shape[0], cut, spec.mesh.sizes)] == pieces
    for rank, piece in enumerate(pieces):
        assert rows(row_intervals.rows_at(spec.shape[0], cut, spec.mesh.sizes, spec.mesh.coordinate(rank))) == piece


@given(st.sets(st.integers(0, 20)), st.integers(1, 5), st.integers(1, 4), st.data())
def test_a_chunk_of_runs_is_that_of_the_rows_and_its_runs_do_not_touch(some, factor, ranks, data):
    place, held = data.draw(st.integers(0, ranks - 1)), sorted(some)
    runs = tuple((row, 1) for row in held if row - 1 not in some)
    runs = tuple((row, next(n for n in range(1, 22) if row + n not in some)) for row, _ in runs)
    found = row_intervals.chunk_rows(runs, factor, ranks, place)
    chunks = [block[place] for block in strided_chunk_bounds(len(held), factor, ranks)]
    assert rows(found) == [row for start, length in chunks for row in held[start : start + length]]
    ends = [start + length for start, length in found]
    assert all(length > 0 for _, length in found)
    assert all(end < start for end, (start, _) in zip(ends, found[1:], strict=False))


@given(st.integers(0, 40), SIZES, st.data())
def test_cuts_are_alike_if_every_rank_has_the_same_rows(size, sizes, data):
    axes = st.lists(
        st.tuples(st.sampled_from(range(len(sizes))), st.integers(1, 3)), max_size=3, unique_by=lambda c: c[0]
    )
    one, other = (tuple(data.draw(axes)) for _ in range(2))
    both = [[rows(runs) for runs in row_intervals.rows_by_rank(size, cut, sizes)] for cut in (one, other)]
    assert row_intervals.same_rows(size, one, other, sizes) == (both[0] == both[1])
    unlike = [rank for rank, (mine, theirs) in enumerate(zip(*both, strict=True)) if mine != theirs]
    assert row_intervals.first_differing(size, one, other, sizes) == (unlike[0] if unlike else None)
    if row_intervals.surely_nonempty(size, one, sizes):
        assert all(both[0])


def test_a_billion_rows_are_compared_by_their_runs():
    strided, ordered = ((0, 2), (1, 1)), ((1, 1), (0, 1))
    assert row_intervals.same_rows(6 * 10**9, strided, ordered, (3, 2))
    assert not row_intervals.same_rows(6 * 10**9 + 1, strided, ordered, (3, 2))
    assert row_intervals.rows_at(6 * 10**9, strided, (3, 2), (1, 1)) == ((4 * 10**9, 10**9),)


def test_the_ranks_beside_the_first_are_second_on_one_axis():
    assert list(row_intervals.probe_coordinates((2, 1, 3))) == [(1, 0, 0), (0, 0, 1)]
