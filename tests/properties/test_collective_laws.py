"""Equations between the collectives, and what all of them promise: inputs unchanged, nothing shared."""

from collections.abc import Callable, Iterator
from itertools import chain

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import localtensor.collectives.reference as c
from localtensor.layout.reductions import GLOO_DTYPES, PAIRS, PremulSum, fold
from localtensor.testing import draws

INTEGER_OPS = [op for op in PAIRS if op != "avg"]
Ranks = st.integers(1, 5)
REAL = tuple(
    dtype for dtype in draws.DTYPES if dtype in GLOO_DTYPES and not dtype.is_complex
)  # gloo gathers no complex
FLOATS = tuple(dtype for dtype in REAL if dtype.is_floating_point)
Parts = draws.sharded(kinds=("P",), max_axes=1, dtypes=REAL)  # each rank's tensor, and what they make together, exactly
Averages = draws.sharded(kinds=("P(avg)",), max_axes=1, dtypes=FLOATS)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    """Integers of both signs, so that sums in any order are exact."""
    return torch.randint(-9, 9, shape, generator=torch.Generator().manual_seed(seed))


def flat(nested: object) -> Iterator[Tensor]:
    yield from [nested] if isinstance(nested, Tensor) else chain.from_iterable(map(flat, nested))


def equal(got: object, want: object) -> bool:
    pairs = list(zip(flat(got), flat(want), strict=True))
    return bool(pairs) and all(torch.equal(a, b) for a, b in pairs)


@st.composite
def held_evenly(draw: st.DrawFn) -> tuple[list[Tensor], int]:
    """Each rank's tensor, and a dim of it that divides by the number of ranks."""
    ranks, dim, seed = draw(Ranks), draw(st.integers(0, 1)), draw(st.integers(0, 99))
    sizes = [draw(st.integers(0, 3)) * ranks, draw(st.integers(1, 3))]
    return [numbers(*(sizes if dim == 0 else sizes[::-1]), seed=seed + rank) for rank in range(ranks)], dim


@st.composite
def splits(draw: st.DrawFn) -> list[list[int]]:
    ranks = draw(Ranks)
    return [[draw(st.integers(0, 3)) for _ in range(ranks)] for _ in range(ranks)]


@given(case=held_evenly(), op=st.sampled_from(INTEGER_OPS))
def test_gathering_the_scattered_pieces_gives_every_rank_the_total(case, op):
    held, dim = case
    back = c.all_gather_into_tensor(c.reduce_scatter_tensor(held, op, dim=dim), dim)
    assert equal(back, c.all_reduce(held, op))
    assert equal(back, [fold(held, op)] * len(held))


@given(x=Parts, seed=st.integers(0, 99))
def test_all_reduce_gives_every_rank_the_whole_and_so_does_a_broadcast_of_what_a_root_has_reduced(x, seed):
    op, root = x.spec.placements[0].reduce_op, seed % len(x.pieces)
    assert equal(c.all_reduce(x.pieces, op), [x.whole] * len(x.pieces))
    assert equal(c.broadcast(c.reduce(x.pieces, op, root=root), root), [x.whole] * len(x.pieces))


@given(x=Parts, seed=st.integers(0, 99))
def test_scatter_undoes_gather(x, seed):
    root = seed % len(x.pieces)
    assert equal(c.scatter(c.gather(x.pieces, root), root), x.pieces)


@given(case=held_evenly())
def test_all_gather_is_a_gather_to_every_root(case):
    held, dim = case
    assert equal(c.all_gather(held), [c.gather(held, root)[root] for root in range(len(held))])
    assert equal(c.all_gather_into_tensor(held, dim), [torch.cat(tensors, dim) for tensors in c.all_gather(held)])


@given(sizes=splits())
def test_all_to_all_twice_is_the_identity(sizes):
    lists = [[numbers(rows, 2, seed=rows + i) for i, rows in enumerate(row)] for row in sizes]
    assert equal(c.all_to_all(c.all_to_all(lists)), lists)


@given(sizes=splits())
def test_all_to_all_single_is_all_to_all_joined_and_undone_by_the_turned_sizes(sizes):
    turned = [list(column) for column in zip(*sizes, strict=True)]
    held = [numbers(sum(row), 2, seed=rank) for rank, row in enumerate(sizes)]
    there = c.all_to_all_single(held, input_splits=sizes, output_splits=turned)
    lists = [list(x.split(row)) for x, row in zip(held, sizes, strict=True)]
    assert equal(there, [torch.cat(tensors) for tensors in c.all_to_all(lists)])
    assert equal(c.all_to_all_single(there, input_splits=turned, output_splits=sizes), held)


@given(case=held_evenly(), op=st.sampled_from(INTEGER_OPS))
def test_reduce_scatter_is_all_to_all_then_a_fold_on_each_rank(case, op):
    held, dim = case
    lists = [[piece.contiguous() for piece in x.tensor_split(len(held), dim)] for x in held]
    want = [fold(tensors, op) for tensors in c.all_to_all(lists)]
    assert equal(c.reduce_scatter(lists, op), want)
    assert equal(c.reduce_scatter_tensor(held, op, dim=dim), want)


@given(ranks=Ranks, rows=st.integers(0, 3), columns=st.integers(1, 3), from_dim=st.integers(0, 1))
def test_shard_dim_alltoall_moves_shards_from_dim_to_dim_and_back(ranks, rows, columns, from_dim):
    whole = numbers(rows * ranks, columns * ranks)
    before, after = (whole.tensor_split(ranks, dim) for dim in (from_dim, 1 - from_dim))
    assert equal(c.shard_dim_alltoall(before, gather_dim=from_dim, shard_dim=1 - from_dim), after)


@given(order=Ranks.flatmap(lambda n: st.permutations(range(n))))
def test_permuting_is_sending_to_all_others_and_undone_by_the_inverse(order):
    held = [numbers(2, seed=rank) for rank in range(len(order))]
    there = c.permute(held, order)
    assert equal(there, c.send_recv(held, [(i, j) for i, j in enumerate(order) if i != j]))
    assert equal(c.permute(there, [order.index(rank) for rank in range(len(order))]), held)


@given(x=Parts)
def test_coalescing_changes_nothing_but_the_number_of_calls(x):
    lists = [[piece, piece.flatten()] for piece in x.pieces]
    got = c.all_reduce_coalesced(lists, x.spec.placements[0].reduce_op)
    assert equal(got, [[x.whole, x.whole.flatten()]] * len(lists))


@given(x=Averages)
def test_the_average_is_the_sum_by_the_number_of_ranks_and_a_premultiplied_sum(x):
    ranks = len(x.pieces)
    assert equal([total / ranks for total in c.all_reduce(x.pieces)], [x.whole] * ranks)
    wide = [piece.double() for piece in x.pieces]
    torch.testing.assert_close(c.all_reduce(wide, PremulSum(1 / ranks)), [x.whole.double()] * ranks)


@given(case=held_evenly())
def test_gather_and_reduce_scatter_are_each_others_backward(case):
    """By the adjoint identity <A x, y> = <x, A* y>: autograd computes A* y from A alone."""
    held, dim = case
    held = [x.double().requires_grad_() for x in held]
    pieces = c.reduce_scatter_tensor(held, dim=dim)
    directions = [numbers(*x.shape, seed=rank).double() for rank, x in enumerate(pieces)]
    assert equal(torch.autograd.grad(pieces, held, directions), c.all_gather_into_tensor(directions, dim))
    directions = [numbers(*x.shape, seed=rank).double() for rank, x in enumerate(held)]
    shares = [x.detach().requires_grad_() for x in pieces]
    backward = torch.autograd.grad(c.all_gather_into_tensor(shares, dim), shares, directions)
    assert equal(backward, c.reduce_scatter_tensor(directions, dim=dim))


# Each takes a list of equal tensors whose dim 0 divides by the number of ranks.
CALLS: dict[str, Callable[[list[Tensor]], object]] = {
    **{f"all_reduce {op}": lambda held, op=op: c.all_reduce(held, op) for op in INTEGER_OPS},
    "reduce": lambda held: c.reduce(held, root=0),
    "broadcast": lambda held: c.broadcast(held, len(held) - 1),
    "all_gather": c.all_gather,
    "all_gather_into_tensor": c.all_gather_into_tensor,
    "gather": lambda held: c.gather(held, 0),
    "scatter": lambda held: c.scatter([held, *[[] for _ in held[1:]]], 0),
    "reduce_scatter": lambda held: c.reduce_scatter([held for _ in held]),
    "reduce_scatter_tensor": c.reduce_scatter_tensor,
    "all_to_all": lambda held: c.all_to_all([held for _ in held]),
    "all_to_all_single": c.all_to_all_single,
    "shard_dim_alltoall": lambda held: c.shard_dim_alltoall(held, gather_dim=1, shard_dim=0),
    "permute": lambda held: c.permute(held, [*range(1, len(held)), 0]),
    "send_recv": lambda held: c.send_recv(held, [(0, 1)] if len(held) > 1 else []),
    "coalesced": lambda held: c.coalesced([held for _ in held], c.all_reduce),
    "all_reduce_coalesced": lambda held: c.all_reduce_coalesced([held for _ in held]),
}


@pytest.mark.parametrize("name", CALLS)
@given(ranks=Ranks, rows=st.integers(1, 2), columns=st.integers(1, 3))
def test_inputs_stay_as_they_are_and_results_share_storage_with_nothing(name, ranks, rows, columns):
    held = [numbers(rows * ranks, columns, seed=rank) for rank in range(ranks)]
    before = [x.clone() for x in held]
    results = list(flat(CALLS[name](held)))
    assert equal(held, before)
    storages = [x.untyped_storage().data_ptr() for x in [*held, *results]]
    assert len(set(storages)) == len(held) + len(results) > len(held)


def test_every_collective_makes_that_promise():
    public = {name for name, value in vars(c).items() if getattr(value, "__module__", "") == c.__name__}
    strided = {name for name in public if not name.startswith("_")} - {"T", "sparse_all_reduce"}
    assert {name.split()[0] for name in CALLS} == strided
