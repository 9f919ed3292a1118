"""What each rank of an axis is left with: pieces, their sizes, and the call on them.  Books and lines that make no
sense are refused, with the file and line of the rule."""

import inspect
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from localtensor.layout.mesh import Mesh
from localtensor.layout.shards import local_length, local_shapes, split_axis
from localtensor.layout.spec import Spec, StridedShard
from strategies.model.rule import Call, Leaf, frozen
from strategies.ops.semantics import local_call
from strategies.ops.semantics.rule_registry import Meta, OpRule, PlacementRule, RuleQuery, RuleRegistry, query_of
from strategies.propagation.propagator import Propagator
from tests.strategies.little_book import BOOK, spec_of

F32 = torch.float32


def clone(*shape):
    call = Call("aten.clone.default", (Leaf(0),))
    return local_call.LocalCall(query_of(call.op, call.args, {}, [Meta(shape, F32)]), call)


@given(size=st.integers(0, 40), factor=st.integers(1, 5), ranks=st.integers(1, 9))
def test_a_piece_has_the_shape_of_the_shard(size, factor, ranks):
    placement = StridedShard(0, split_factor=factor)
    want = [tuple(piece.shape) for piece in split_axis(torch.zeros(3, size).T, placement, ranks)]
    assert [local_call.local_meta(Meta((size, 3), F32), placement, ranks, rank).shape for rank in range(ranks)] == want


@given(rows=st.integers(0, 40), columns=st.integers(0, 40), ranks=st.integers(1, 12))
def test_every_piece_lies_at_one_of_the_places(rows, columns, ranks):
    """Of two results that are cut in dims of two sizes, too."""
    call = Call("aten.mm.default", (Leaf(0), Leaf(1)))
    query = query_of(call.op, call.args, {}, [Meta((rows, 3), F32), Meta((3, columns), F32)])
    line = PlacementRule((Shard(0), Shard(1)), (Replicate(),))
    found = local_call.distinct_local_calls(
        [local_call.LocalCall(query, call)], line, ranks, local_call.no_own_arguments
    )
    want = {(local_length(rows, 1, ranks, rank), local_length(columns, 1, ranks, rank)) for rank in range(ranks)}
    assert {(p.query.tensors[0].shape[0], p.query.tensors[1].shape[1]) for p in found} == want
    assert len(local_call.representative_coordinates(line, query, ranks)) <= 5


def test_strided_shards_are_looked_at_rank_by_rank():
    line = PlacementRule((StridedShard(0, split_factor=2),), (StridedShard(0, split_factor=2),))
    found = local_call.distinct_local_calls([clone(9)], line, 4, local_call.no_own_arguments)
    assert {p.query.tensors[0].shape[0] for p in found} == {local_length(9, 2, 4, rank) for rank in range(4)}


@given(rows=st.integers(0, 9), sizes=st.lists(st.integers(1, 4), min_size=1, max_size=3))
def test_each_rank_of_a_mesh_has_the_piece_of_its_spec(rows, sizes):
    lines = [PlacementRule((Shard(0),), (Shard(0),))] * len(sizes)
    made, whose = local_call.local_calls_by_rank(clone(rows), lines, sizes, local_call.no_own_arguments)
    spec = Spec(Mesh.of(*sizes), (Shard(0),) * len(sizes), (rows,), F32)
    assert [made[which].query.tensors[0].shape for which in whose] == local_shapes(spec)


@pytest.mark.parametrize(("cut", "rows", "ranks", "why"), [
    ("any", 3, 4, ""),
    ("filled", 4, 4, ""), ("filled", 3, 4, "3 rows on 4 ranks leave one without any"),
    ("filled", 5, 4, "5 rows on 4 ranks leave one without any"), ("filled", 0, 1, "0 rows on 1 ranks leave one without any"),
    ("even", 8, 4, ""), ("even", 6, 4, "6 rows on 4 ranks are not even"), ("even", 0, 2, "0 rows on 2 ranks are not even"),
])  # fmt: skip
def test_what_a_cut_asks_for(cut, rows, ranks, why):
    assert local_call.why_inapplicable(PlacementRule((Shard(0),), (Shard(0),), cut), clone(rows).query, ranks) == why


@pytest.mark.parametrize("first", [Replicate(), Partial()])
def test_every_tensor_of_a_line_has_to_fit_whatever_stands_before_it(first):
    call = Call("aten.mul.Tensor", (Leaf(0), Leaf(1)))
    query = query_of(call.op, call.args, {}, [Meta((3, 2), F32)] * 2)
    assert (
        local_call.why_inapplicable(PlacementRule((first, Shard(0)), (Shard(0),), "even"), query, 2)
        == "3 rows on 2 ranks are not even"
    )
    assert (
        local_call.why_inapplicable(PlacementRule((first, Shard(1)), (Shard(0),), "even"), query, 2)
        == "3 rows on 2 ranks are not even"
    )
    assert local_call.why_inapplicable(PlacementRule((first, Shard(1)), (Shard(1),), "even"), query, 2) == ""


def test_a_reduction_that_means_nothing_does_not_fit():
    query = query_of("aten.clone.default", (Leaf(0),), {}, [Meta((2,), torch.complex64)])
    assert (
        local_call.why_inapplicable(PlacementRule((Partial("max"),), (Partial("max"),)), query, 2)
        == "P(max) of c64[2] means nothing"
    )


def test_an_argument_goes_where_the_argument_stands_by_place_or_by_name():
    by_place = local_call.with_arguments(Call("aten.view.default", (Leaf(0), (6,))), {"size": [3]})
    by_name = local_call.with_arguments(Call("aten.view.default", (Leaf(0),), (("size", (6,)),)), {"size": [3]})
    assert by_place.args == (Leaf(0), (3,)) and by_name.kwargs == (("size", (3,)),)
    assert by_name.args == (Leaf(0),)
    added = local_call.with_arguments(Call("aten.sum.dim_IntList", (Leaf(0), (1,))), {"keepdim": True})
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
    assert local_call.written_leaves(Call(op, args, kwargs)) == want


HERE = Path(__file__).name
MUL = "aten.mul.Tensor"


class Unheard(Placement):
    """A placement that nobody knows."""


R, S0 = Replicate(), Shard(0)
NONSENSE = {
    "no line": (lambda query: [("R", "R")], "it is no Line"),
    "no list": (lambda query: 3, "it raised when asked about"),
    "none at all": (lambda query: None, "it raised when asked about"),
    "an input too few": (lambda query: [PlacementRule((S0,), (S0,))], "the call has 2 tensors, the line speaks of 1"),
    "an output too many": (lambda query: [PlacementRule((S0, S0), (S0, S0))], "the call has 1 results, the line speaks of 2"),
    "a list of inputs": (lambda query: [PlacementRule([S0, S0], (S0,))], "which is no tuple"),
    "no such dim": (lambda query: [PlacementRule((Shard(2), R), (R,))], "tensor 0: S(2): there is no dim 2 in f64[4,3]"),
    "no such dim of the result": (lambda query: [PlacementRule((R, R), (Shard(5),))], "result 0: S(5): there is no dim 5"),
    "a negative dim": (lambda query: [PlacementRule((Shard(-1), R), (R,))], "tensor 0: S(-1): there is no dim -1"),
    "no placement": (lambda query: [PlacementRule(("S(0)", R), (R,))], "'S(0)' is no placement whose meaning is known"),
    "a placement nobody knows": (lambda query: [PlacementRule((R, R), (Unheard(),))], "is no placement whose meaning is known"),
    "a reduction nobody knows": (lambda query: [PlacementRule((Partial("xor"), R), (R,))], "is no placement whose meaning"),
    "blocks of nothing": (lambda query: [PlacementRule((StridedShard(0, split_factor=0), R), (R,))], "is no placement whose"),
    "an unknown cut": (lambda query: [PlacementRule((S0, S0), (S0,), "odd")], "a cut is one of any, filled, even"),
    "it raises": (lambda query: query["nothing"], "KeyError: 'nothing': it raised when asked about"),
}  # fmt: skip


def propagate(rule):
    mesh = Mesh.of(2, 2)
    specs = [spec_of(mesh, "S(0) R", (4, 3))] * 2
    return Propagator(RuleRegistry.of(OpRule(MUL, rule, "nonsense", "none"))).propagate(MUL, specs)


@pytest.mark.parametrize("case", NONSENSE)
def test_nonsense_is_refused_at_first_use_and_names_the_rules_line(case):
    rule, problem = NONSENSE[case]
    with pytest.raises(local_call.InvalidRule) as raised:
        propagate(rule)
    line = inspect.getsourcelines(rule)[1]
    assert problem in str(raised.value)
    assert f"{HERE}:{line}: line: " in str(raised.value)
    assert raised.value.where.endswith(f"{HERE}:{line}")
    assert str(raised.value).endswith(".")


def test_a_rule_is_checked_for_pieces_too():
    """Here for the piece of one row that the second axis has to do with."""

    def odd(query):
        rows = query.tensors[0].shape[0]
        yield PlacementRule((S0, S0), (S0,)) if rows != 1 else PlacementRule((S0, S0), (Shard(7),))

    mesh = Mesh.of(2, 2)
    book = RuleRegistry.of(OpRule(MUL, odd, "nonsense", "none"))
    with pytest.raises(local_call.InvalidRule, match=r"there is no dim 7 in f64\[1,3\]"):
        Propagator(book).propagate(MUL, [spec_of(mesh, "S(0) S(0)", (3, 3))] * 2)


@pytest.mark.parametrize(("book", "problem"), [
    (RuleRegistry({MUL: OpRule("aten.add.Tensor", lambda query: [], "f", "r")}), "it is no entry of this op"),
    (RuleRegistry({MUL: "S(0) -> S(0)"}), "it is no entry of this op"),
    (RuleRegistry.of(OpRule(MUL, None, "f", "r")), "it is no function"),
    (RuleRegistry.of(OpRule("aten.mul", lambda query: [], "f", "r")), "this torch has no such overload"),
    (RuleRegistry.of(OpRule("aten.mull.Tensor", lambda query: [], "f", "r")), "this torch has no such overload"),
    (RuleRegistry.of(OpRule("aten.view.default", lambda query: [], "f", "r", ("sizes",))), "the op has no such argument"),
])  # fmt: skip
def test_a_book_that_cannot_be_is_refused_when_the_propagator_is_made(book, problem):
    with pytest.raises(local_call.InvalidRule, match=problem) as raised:
        Propagator(book)
    assert (
        type(book.entries[next(iter(book.entries))]) is str or HERE in str(raised.value) or "None" in str(raised.value)
    )


def test_a_right_book_is_taken():
    local_call.check_registry(BOOK)
    assert len(BOOK) == 9


def clone_rows(query):
    yield PlacementRule((S0,), (S0,))


ENTRIES = {
    "own is no function": ({"own": 3}, "own=3: it is no function"),
    "instead is no function": ({"instead": "aten.mul.Tensor"}, "instead='aten.mul.Tensor': it is no function"),
}


@pytest.mark.parametrize("case", ENTRIES)
def test_an_entry_whose_functions_are_none_is_refused_at_once(case):
    more, problem = ENTRIES[case]
    with pytest.raises(local_call.InvalidRule, match=problem):
        local_call.check_registry(RuleRegistry.of(OpRule("aten.clone.default", clone_rows, "copy", "none", **more)))


AT_USE = {
    "own raises": ({"own": lambda query: query["rows"]}, "own: KeyError: 'rows': it raised when asked about"),
    "own names nothing": ({"own": lambda query: {"N": 2}}, "own: N: the op has no such argument"),
    "instead raises": ({"instead": lambda query: query["dims"]}, "instead: KeyError: 'dims': it raised when asked"),
    "instead is no call": ({"instead": lambda query: None}, "instead: AttributeError: "),
    "instead is no op": ({"instead": lambda query: Call("aten.nothing.default", (Leaf(0),))}, "instead: AttributeError: "),
    "instead loses a tensor": ({"instead": lambda query: Call("aten.rand.default", ([2],))},
                               "the call has 1 tensors, that one leaves none"),
}  # fmt: skip


@pytest.mark.parametrize("case", AT_USE)
def test_calls_of_a_ranks_own_that_make_no_sense_are_refused_at_use_and_name_the_rules_line(case):
    more, problem = AT_USE[case]
    book = RuleRegistry.of(OpRule("aten.clone.default", clone_rows, "copy", "none", **more))
    with pytest.raises(local_call.InvalidRule, match=problem) as raised:
        Propagator(book).propagate("aten.clone.default", [spec_of(Mesh.of(2), "S(0)", (4, 3))])
    assert raised.value.where.endswith(f"{HERE}:{inspect.getsourcelines(clone_rows)[1]}")


def test_arguments_of_a_ranks_own_are_those_of_its_pieces_and_none_where_it_has_all():
    entry = OpRule(
        "aten.new_zeros.default", clone_rows, "factory", "none", ("size",), lambda query: {"layout": query["layout"]}
    )
    whole = RuleQuery(entry.op, {"size": [4], "layout": None}, (Meta((4,), F32),), (Meta((4,), F32),))
    own = local_call.own_arguments_function(entry)
    assert own(whole, whole) == {}
    assert own(replace(whole, outputs=(Meta((2,), F32),)), whole) == {"size": [2], "layout": None}
    assert own(replace(whole, tensors=(Meta((2,), F32),)), whole) == {"layout": None}
