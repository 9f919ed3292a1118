"""What each rank of an axis is left with: pieces, their sizes, and the call on them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard

from localtensor.layout.mesh import Mesh
from localtensor.layout.shards import local_length, local_shapes, split_axis
from localtensor.layout.spec import Spec, StridedShard
from strategies.model.rule import Call, Leaf, frozen
from strategies.ops.semantics.local_call import (
    LocalCall,
    distinct_local_calls,
    local_calls_by_rank,
    local_meta,
    no_own_arguments,
    representative_coordinates,
    why_inapplicable,
    with_arguments,
    written_leaves,
)
from strategies.ops.semantics.rulebook import Meta, PlacementRule, query_of

F32 = torch.float32


def clone(*shape):
    call = Call("aten.clone.default", (Leaf(0),))
    return LocalCall(query_of(call.op, call.args, {}, [Meta(shape, F32)]), call)


@given(size=st.integers(0, 40), factor=st.integers(1, 5), ranks=st.integers(1, 9))
def test_a_piece_has_the_shape_of_the_shard(size, factor, ranks):
    placement = StridedShard(0, split_factor=factor)
    want = [tuple(piece.shape) for piece in split_axis(torch.zeros(3, size).T, placement, ranks)]
    assert [local_meta(Meta((size, 3), F32), placement, ranks, rank).shape for rank in range(ranks)] == want


@given(rows=st.integers(0, 40), columns=st.integers(0, 40), ranks=st.integers(1, 12))
def test_every_piece_lies_at_one_of_the_places(rows, columns, ranks):
    """Of two results that are cut in dims of two sizes, too."""
    call = Call("aten.mm.default", (Leaf(0), Leaf(1)))
    query = query_of(call.op, call.args, {}, [Meta((rows, 3), F32), Meta((3, columns), F32)])
    line = PlacementRule((Shard(0), Shard(1)), (Replicate(),))
    found = distinct_local_calls([LocalCall(query, call)], line, ranks, no_own_arguments)
    want = {(local_length(rows, 1, ranks, rank), local_length(columns, 1, ranks, rank)) for rank in range(ranks)}
    assert {(p.ask.tensors[0].shape[0], p.ask.tensors[1].shape[1]) for p in found} == want
    assert len(representative_coordinates(line, query, ranks)) <= 5


def test_strided_shards_are_looked_at_rank_by_rank():
    line = PlacementRule((StridedShard(0, split_factor=2),), (StridedShard(0, split_factor=2),))
    found = distinct_local_calls([clone(9)], line, 4, no_own_arguments)
    assert {p.ask.tensors[0].shape[0] for p in found} == {local_length(9, 2, 4, rank) for rank in range(4)}


@given(rows=st.integers(0, 9), sizes=st.lists(st.integers(1, 4), min_size=1, max_size=3))
def test_each_rank_of_a_mesh_has_the_piece_of_its_spec(rows, sizes):
    lines = [PlacementRule((Shard(0),), (Shard(0),))] * len(sizes)
    made, whose = local_calls_by_rank(clone(rows), lines, sizes, no_own_arguments)
    spec = Spec(Mesh.of(*sizes), (Shard(0),) * len(sizes), (rows,), F32)
    assert [made[which].ask.tensors[0].shape for which in whose] == local_shapes(spec)


@pytest.mark.parametrize(("cut", "rows", "ranks", "why"), [
    ("any", 3, 4, ""),
    ("filled", 4, 4, ""), ("filled", 3, 4, "3 rows on 4 ranks leave one without any"),
    ("filled", 5, 4, "5 rows on 4 ranks leave one without any"), ("filled", 0, 1, "0 rows on 1 ranks leave one without any"),
    ("even", 8, 4, ""), ("even", 6, 4, "6 rows on 4 ranks are not even"), ("even", 0, 2, "0 rows on 2 ranks are not even"),
])  # fmt: skip
def test_what_a_cut_asks_for(cut, rows, ranks, why):
    assert why_inapplicable(PlacementRule((Shard(0),), (Shard(0),), cut), clone(rows).ask, ranks) == why


@pytest.mark.parametrize("first", [Replicate(), Partial()])
def test_every_tensor_of_a_line_has_to_fit_whatever_stands_before_it(first):
    call = Call("aten.mul.Tensor", (Leaf(0), Leaf(1)))
    query = query_of(call.op, call.args, {}, [Meta((3, 2), F32)] * 2)
    assert (
        why_inapplicable(PlacementRule((first, Shard(0)), (Shard(0),), "even"), query, 2)
        == "3 rows on 2 ranks are not even"
    )
    assert (
        why_inapplicable(PlacementRule((first, Shard(1)), (Shard(0),), "even"), query, 2)
        == "3 rows on 2 ranks are not even"
    )
    assert why_inapplicable(PlacementRule((first, Shard(1)), (Shard(1),), "even"), query, 2) == ""


def test_a_reduction_that_means_nothing_does_not_fit():
    query = query_of("aten.clone.default", (Leaf(0),), {}, [Meta((2,), torch.complex64)])
    assert (
        why_inapplicable(PlacementRule((Partial("max"),), (Partial("max"),)), query, 2)
        == "P(max) of c64[2] means nothing"
    )


def test_an_argument_goes_where_the_argument_stands_by_place_or_by_name():
    by_place = with_arguments(Call("aten.view.default", (Leaf(0), (6,))), {"size": [3]})
    by_name = with_arguments(Call("aten.view.default", (Leaf(0),), (("size", (6,)),)), {"size": [3]})
    assert by_place.args == (Leaf(0), (3,)) and by_name.kwargs == (("size", (3,)),)
    assert by_name.args == (Leaf(0),)
    added = with_arguments(Call("aten.sum.dim_IntList", (Leaf(0), (1,))), {"keepdim": True})
    assert (added.args, added.kwargs) == ((Leaf(0), (1,)), (("keepdim", True),))


def test_nothing_in_a_frozen_argument_can_change():
    assert frozen([1, [2, (3, [4])], "ab"]) == (1, (2, (3, (4,))), "ab")


@pytest.mark.parametrize(("op", "args", "kwargs", "want"), [
    ("aten.add.Tensor", (Leaf(0), Leaf(1)), (), {}),
    ("aten.add_.Tensor", (Leaf(0), Leaf(1)), (), {0: 0}),
    ("aten.add.out", (Leaf(0), Leaf(1)), (("out", Leaf(2)),), {2: 0}),
    ("aten._foreach_add_.Scalar", ([Leaf(0), Leaf(1)], 1), (), {0: None, 1: None}),
    ("aten._native_batch_norm_legit.default", (Leaf(0), None, None, Leaf(1), Leaf(2), True, 0.1, 1e-5), (), {1: None, 2: None}),
    ("aten.topk.values", (Leaf(0), 1), (("values", Leaf(1)), ("indices", Leaf(2))), {1: 0, 2: 1}),
])  # fmt: skip
def test_which_tensors_a_call_writes_to_and_what_they_become(op, args, kwargs, want):
    assert written_leaves(Call(op, args, kwargs)) == want
