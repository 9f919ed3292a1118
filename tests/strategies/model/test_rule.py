"""Layouts as they are written, and on fewer axes; and the pieces that ranks are given."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._ops._embedding_ops import _MaskPartial

from localtensor.errors import BadPlacement
from localtensor.layout.spec import parse, shorts
from strategies.model.rule import (
    Call,
    Claim,
    Leaf,
    Program,
    Rule,
    Sample,
    call_of,
    flat_results,
    layout_on_axes,
    out_leaves,
    overload,
    read_layout,
    written_leaves,
)
from strategies.programs.run.step_functions import local_inputs_of
from tests.strategies.cases import numbers, sample
from tests.strategies.programs_of import on

aten = torch.ops.aten


def test_a_call_is_run_with_the_tensors_where_their_leaves_stand():
    x, y = numbers(2, 3), numbers(2, 3, seed=1)
    call = Call("aten.sub.Tensor", (Leaf(1), Leaf(0)), (("alpha", 2),))
    assert torch.equal(call([x, y]), y - 2 * x)


def test_leaves_inside_lists_are_filled_and_lists_stay_lists():
    x, y = numbers(2), numbers(3)
    assert torch.equal(Call("aten.cat.default", ([Leaf(0), Leaf(1)], 0))([x, y]), torch.cat([x, y]))


def test_tensors_are_taken_out_in_the_order_in_which_dtensor_counts_them():
    x, index, values = numbers(4), torch.tensor([0, 2]), numbers(2)
    call, tensors = call_of(aten.index_put.default, (x, [index], values), {"accumulate": True})
    assert call == Call("aten.index_put.default", (Leaf(0), [Leaf(1)], Leaf(2)), (("accumulate", True),))
    assert [t.data_ptr() for t in tensors] == [x.data_ptr(), index.data_ptr(), values.data_ptr()]


def test_tensors_among_the_keywords_come_after_the_others():
    x, low = numbers(4), torch.zeros(4)
    call, tensors = call_of(aten.clamp.Tensor, (x,), {"max": low})
    assert call == Call("aten.clamp.Tensor", (Leaf(0),), (("max", Leaf(1)),))
    assert tensors[1] is low
    assert torch.equal(call(tensors), torch.clamp(x, max=low))


def test_none_in_a_list_of_tensors_keeps_its_place():
    x, index = numbers(3, 3), torch.tensor([1])
    call, tensors = call_of(aten.index.Tensor, (x, [None, index]), {})
    assert call.args == (Leaf(0), [None, Leaf(1)])
    assert torch.equal(call(tensors), x[:, [1]])


def test_a_sample_prints_its_arguments_in_the_order_of_the_call():
    one = sample("index_put.default", torch.zeros(8, 4), [torch.tensor([1])], torch.ones(1, 4), accumulate=True)
    assert one.arguments() == ["f32[8,4]", "[i64[1]]", "f32[1,4]", "accumulate=True"]


def test_the_size_of_a_sample_counts_all_its_elements():
    assert sample("add.Tensor", numbers(2, 3), numbers(3)).size == 9


def test_a_sample_knows_its_op():
    assert sample("relu.default", numbers(2)).op == "aten.relu.default"


def test_a_rule_prints_on_one_line():
    rule = Rule("aten.mm.default", (Shard(1), Shard(0)), (Partial("sum"), None))
    assert str(rule) == "aten.mm.default: S(1), S(0) -> P(sum), -"


def test_rules_of_the_same_words_are_the_same_rule():
    assert len({Rule("a", (Shard(0),), (Replicate(),)), Rule("a", (Shard(0),), (Replicate(),))}) == 1


def test_a_rule_is_plain_if_all_its_placements_are_arithmetic():
    assert Rule("a", (Shard(0), None), (Partial("avg"),)).plain
    assert not Rule("a", (_MaskPartial(offset_shape=torch.Size([2]), offset_dim=0),), (Replicate(),)).plain


def test_a_claim_speaks_of_the_samples_own_call_unless_it_says_otherwise():
    claim = Claim(Rule("a", (), ()), "op strategy")
    assert (claim.local, claim.whole) == (None, "")


def test_an_overload_is_found_by_its_name():
    assert overload("aten.add.Tensor") is aten.add.Tensor


def test_an_unknown_overload_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_op"):
        overload("aten.no_such_op.default")


def test_results_are_flat_and_what_is_no_tensor_keeps_its_place():
    x, y = numbers(2), numbers(3)
    first, second, none, number = flat_results((x, [y, None], 5))
    assert (first is x, second is y, none, number) == (True, True, None, 5)


def test_an_op_that_gives_nothing_has_no_results():
    assert flat_results(None) == []


@pytest.mark.parametrize(("one", "leaves"), [
    (sample("add_.Tensor", numbers(2), numbers(2)), ()),
    (sample("exp.out", numbers(2), out=numbers(2)), ()),
    (sample("relu.default", numbers(2)), ()),
    (sample("_foreach_neg_.default", [numbers(2), numbers(3)]), (0, 1)),
    (sample("_native_batch_norm_legit.default", numbers(4, 2), numbers(2), None, numbers(2), numbers(2), True, 0.1, 1e-5),
     (2, 3)),
], ids=lambda given: getattr(given, "op", None))  # fmt: skip
def test_arguments_that_an_op_writes_to_and_does_not_return_are_known(one, leaves):
    assert written_leaves(one.call) == leaves


def test_a_sample_travels_as_a_pickle():
    one = sample("cumsum.default", numbers(2, 3), 1, dtype=torch.float32)
    back: Sample = pickle.loads(pickle.dumps(one))
    assert back.call == one.call
    assert torch.equal(back.call(back.tensors), one.call(one.tensors))


def test_the_outs_of_a_call_are_in_the_order_of_its_results():
    x = numbers(4, 6)
    swapped = sample("frexp.Tensor_out", x, exponent=x.int(), mantissa=x)
    assert out_leaves(swapped.call) == (2, 1)
    assert out_leaves(sample("add_.Tensor", x, x).call) == ()


ADD = sample("add.Tensor", numbers(4), numbers(4))


@pytest.mark.parametrize(("program", "shown"), [
    (on(ADD, "S(0), R"), "aten.add.Tensor on (2,): S(0), R"),
    (on(ADD, "S(0)/R, R", (2, 2), "sum"), "aten.add.Tensor on (2, 2): (S(0), R), R, then sum"),
    (on(ADD, "S(0), R", then="again(x0, 2.0)"), "aten.add.Tensor on (2,): S(0), R, after a call with (x0, 2.0)"),
    (on(ADD, "R, P(sum)/P(avg)", (2, 3), flattened=True),
     "aten.add.Tensor on (2, 3): R, (P(sum), P(avg)), a flattened submesh present"),
])  # fmt: skip
def test_a_program_is_one_line(program, shown):
    assert str(program) == shown


def test_the_ranks_of_a_mesh_are_counted():
    assert on(ADD, "R, R", (2, 3, 2)).ranks == 12


def test_programs_are_values():
    assert on(ADD, "S(0), R") == on(ADD, "S(0), R")
    assert on(ADD, "S(0), R") != on(ADD, "S(0), R", then="sum")


def test_what_has_a_meaning_is_what_the_ranks_are_given():
    x = torch.arange(7.0)
    (held,) = local_inputs_of(Program(sample("relu.default", x), (2, 3), ((parse("SS(0,3)"), Shard(0)),)))
    assert [piece.tolist() for piece in held] == [[0, 1], [3, 4], [6], [2], [5], []]


def test_a_layout_on_fewer_axes_keeps_the_order_of_cuts():
    whole = read_layout("(SS(0,4), SS(0,2), S(0))")  # the last axis first, then the middle one
    assert shorts(layout_on_axes(whole, (2, 2, 2), (0, 1), (2, 2))) == "SS(0,2), S(0)"
    assert shorts(layout_on_axes(whole, (2, 2, 2), (0, 2), (2, 3))) == "SS(0,3), S(0)"
    assert shorts(layout_on_axes(whole, (2, 2, 2), (1,), (2,))) == "S(0)"


def test_on_fewer_axes_what_is_no_shard_stays():
    assert shorts(layout_on_axes(read_layout("(P(sum), S(0), R)"), (2, 2, 2), (0, 2), (2, 2))) == "P(sum), R"
    assert shorts(layout_on_axes(read_layout("(SS(0,4), R)"), (2, 2), (0,), (2,))) == "SS(0,4)"


@pytest.mark.parametrize("text", ["S(0)", "R", "(S(0), R)", "(SS(1,2), P(avg), R)", "(R)"])
def test_a_layout_is_read_as_it_is_written(text):
    assert shorts(read_layout(text)) == text.removeprefix("(").removesuffix(")" if text.startswith("(") else "")


def test_what_is_no_layout_is_refused():
    with pytest.raises(BadPlacement, match="no placement"):
        read_layout("(S(0), -)")


@pytest.mark.parametrize(
    "name", ["import_module.__call__.__call__", "aten.add.__call__", "aten.nothing.default", "a.b.c"]
)
def test_a_name_that_no_overload_has_is_none(name):
    with pytest.raises(AttributeError):
        overload(name)
