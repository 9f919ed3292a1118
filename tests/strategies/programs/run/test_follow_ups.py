"""Each follower against plain torch; and, for each that the sweep of pairs uses, a planted rule that it alone catches."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSpec, OpStrategy
from torch.distributed.tensor.experimental import register_sharding

from localtensor.errors import BadPlacement
from localtensor.layout.spec import parse
from strategies.model.rule import overload
from strategies.programs.run import follow_ups
from strategies.programs.script import program_script
from strategies.torch_api import dtensor
from tests.strategies.cases import numbers, sample
from tests.strategies.programs_of import assert_goes_wrong, assert_right, on, played
from tests.strategies.users import undone

X = numbers(4, 6)
NEG = sample("neg.default", X)


def ran(one, then):
    return follow_ups.CallWithFollowUp(one.call.op, one.call.args, one.call.kwargs, then)(one.tensors)


@pytest.mark.parametrize(("then", "want"), [
    ("", -X), ("cast float32", -X.float()), ("cast int64", (-X).long()), ("cast bool", torch.ones(4, 6).bool()),
    ("sum", -X.sum()), ("sum 0", -X.sum(0)), ("sum -1", -X.sum(-1)), ("times 2", X * -2), ("times -1", X),
    ("plus 1", 1 - X), ("squared", X * X), ("absolute", X.abs()), ("transpose", -X.t()), ("slice", -X[1:]),
    ("select", -X[3]), ("narrow", -X[:, :1]), ("view", -X.reshape(24)), ("unsqueeze", -X[None]), ("R", -X),
    ("S(0)", -X), ("S(1)", -X), ("only 0", -X), ("again(x0)", -X),
])  # fmt: skip
def test_what_follows_a_call_on_plain_tensors(then, want):
    (got,) = ran(NEG, then)
    torch.testing.assert_close(got, want)


def test_gathered_twice_there_are_two_results():
    assert all(torch.equal(got, -X) for got in ran(NEG, "full twice")) and len(ran(NEG, "full twice")) == 2


def test_one_of_several_results_is_used():
    (got,) = ran(sample("max.dim", X, 0), "only 1")
    assert torch.equal(got, X.argmax(0))


def test_an_op_that_writes_is_judged_by_what_it_wrote_to():
    out, base, view = ran(sample("mul_.Scalar", X.clone(), 3.0), "base")
    assert torch.equal(out, X * 3) and torch.equal(base, X * 3) and torch.equal(view, (X * 3)[None])


def test_the_call_before_leaves_no_trace_in_plain_tensors():
    one = sample("mul_.Scalar", X.clone(), 3.0)
    assert torch.equal(ran(one, "again(x0, 5.0)")[0], X * 3)


@pytest.mark.parametrize("then", ["sums", "only x", "again(", "times 3"])
def test_a_follower_that_there_is_not_is_refused(then):
    with pytest.raises((ValueError, SyntaxError)):
        ran(NEG, then)
    assert then not in follow_ups.RESULT_STEPS


SHAPES = dict.fromkeys(("unflatten", "unflatten last", "two rows", "two columns"), (5, 4)) | {"unflatten 0": (6, 5)}
"""Of steps that ask for an even size."""


@pytest.mark.few(10)
@pytest.mark.parametrize("then", [*follow_ups.RESULT_STEPS, *follow_ups.GRADS, "base", "only 0", "again(x0)"])
def test_followers_of_a_right_rule_are_right_on_uneven_shards(then):
    one = sample("neg.default" if then != "grad twice" else "sin.default", numbers(*SHAPES.get(then, (5, 3))))
    assert_right(on(one, "R", then=then))
    if then != "grad twice":
        assert_right(on(one, "P(sum)", then=then))
    if then not in ("view", "row", "outer", "flatten", "flatten last", "two rows", "two columns", "unflatten 0"):
        # DTensor refuses these where the first dim is sharded
        assert_right(on(one, "S(0)", then=then))


@pytest.mark.parametrize(("name", "text"), [
    ("to (S(0), R)", "laid(x, [Shard(0), Replicate()])"), ("to (P(max), S(1))", "laid(x, [Partial('max'), Shard(1)])"),
    ("to (SS(0,2), S(0))", "laid(x, [_StridedShard(0, split_factor=2), Shard(0)])"),
])  # fmt: skip
def test_a_redistribution_to_any_layout_is_a_follower(name, text):
    assert follow_ups.follow_up(name) == follow_ups.FollowUp(name, text)
    assert follow_ups.needs_results_only(name)


@pytest.mark.few(20)
@pytest.mark.parametrize("then", [*follow_ups.VIEW_STEPS])
def test_writes_through_views_of_a_dim_that_is_not_sharded_are_right(then):
    assert_right(on(NEG, "R", then=then), on(NEG, "P(sum)", then=then))


@pytest.mark.parametrize(
    "then",
    ["v = x[1:], v.mul_(-2)", "v = x.chunk(2)[0], v.fill_(2)", "v = x[::2], v.copy_(v * 3)", "v = x[-1], x.mul_(-2)"],
)
def test_writes_through_copies_of_a_sharded_dim_are_lost(then):
    """torch 2.13 gathers the sharded dim first, so that its views are copies."""
    assert_goes_wrong(on(NEG, "S(0)", then=then), ", expected ")


def test_a_redistribution_does_nothing_to_plain_tensors():
    (got,) = follow_ups.follow_up("to (S(0), R)").apply([X])
    assert torch.equal(got, X)


def test_a_redistribution_of_a_result_on_two_axes_moves_it():
    program = on(sample("neg.default", numbers(8, 6)), "S(0)/S(1)", (2, 2), "to (S(0), R)")
    (found,) = played(program)
    assert (found.wrong, found.rank_results[0].placements) == ("", ("(S(0), R)",))
    assert "laid(x, [Shard(0), Replicate()])" in program_script(program, "wrong", "x.py")


def test_an_odd_layout_is_refused():
    with pytest.raises(BadPlacement):
        follow_ups.follow_up("to (S(0), Q)")


def test_a_follower_is_a_named_value():
    assert follow_ups.follow_up("sum") == follow_ups.follow_up("sum") and follow_ups.follow_up("sum").text == "x.sum()"


# What only a second op shows: the op alone is right, and the program is not.

LIB = torch.library.Library("followed", "FRAGMENT")
S0, S1, R, SUM, MAX = [Shard(0)], [Shard(1)], [Replicate()], [Partial()], [Partial("max")]


@pytest.fixture(autouse=True)
def registries():
    with undone():
        yield


def define(schema, function, meta=torch.empty_like):
    """The op of that schema; it is defined once, and outlives the test."""
    name = schema.partition("(")[0]
    if not hasattr(torch.ops.followed, name):
        LIB.define(schema)
        LIB.impl(name, function, "CPU")
        LIB.impl(name, meta, "Meta")
    return overload(f"followed.{name}.default")


def rules(op, *rows):
    """These are the only rules of the op, whoever had others."""
    prop = dtensor.propagator()
    for table in (prop.op_single_dim_strategy_funcs, prop.op_to_schema_info_for_single_dim_strategy):
        table.pop(op, None)
    register_sharding(op)(lambda x, *_, **__: list(rows))


def assert_shown_by(one, text, then, mesh=(2,)):
    assert_right(on(one, text, mesh))
    assert_goes_wrong(on(one, text, mesh, then), ", expected ")


@pytest.mark.parametrize(("op", "then", "text"), [
    ("aten.mul.Tensor", "times -1", "P(max)"),
    ("aten.mul.Tensor", "squared", "P(sum)"),
    ("aten.add.Tensor", "plus 1", "P(sum)"),
    ("aten.abs.default", "absolute", "P(sum)"),
    ("aten._to_copy.default", "cast int64", "P(sum)"),
    ("aten._to_copy.default", "cast bool", "P(sum)"),
])  # fmt: skip
def test_a_second_op_that_keeps_a_partial_value_which_it_should_not(op, then, text):
    op = overload(op)
    row = [parse(text)]
    tensors = 2 if then == "squared" else 1
    rules(op, (row, row * tensors + [None] * (len(op._schema.arguments) - tensors)))
    x = torch.tensor([[0, 3], [2, 0]]) if then == "cast bool" else X
    assert_shown_by(sample("alias.default", x), text, then)


@pytest.mark.parametrize(("op", "then"), [
    ("aten.slice.Tensor", "slice"), ("aten.transpose.int", "transpose"), ("aten.unsqueeze.default", "unsqueeze"),
])  # fmt: skip
def test_a_second_op_that_keeps_a_shard_which_it_should_not(op, then):
    op = overload(op)
    rules(op, (S0, S0 + [None] * (len(op._schema.arguments) - 1)))
    one = sample("alias.default", X)
    assert_right(on(one, "S(0)"))
    found = played(on(one, "S(0)", then=then))[0]
    assert found.wrong, found


class Once(Partial):
    """A sum that can be added up but once, as a placement with a state of its own."""

    def _reduce_value(self, tensor, mesh, mesh_dim):
        total = super()._reduce_value(tensor, mesh, mesh_dim)
        tensor.zero_()
        return total


def test_a_result_that_can_be_gathered_but_once():
    op = define("once(Tensor x) -> Tensor", torch.clone)
    rules(op, ([Once("sum")], SUM))
    assert_shown_by(sample("followed.once.default", X), "P(sum)", "full twice")


def test_a_gradient_that_divides_by_the_rows_of_one_rank():
    rules(define("share(Tensor x) -> Tensor", lambda x: x / x.shape[0]), (S0, S0))
    op = define("doubled(Tensor x) -> Tensor", lambda x: x * 2)
    rules(op, (S0, S0))
    torch.library.register_autograd(op, lambda _, coming: torch.ops.followed.share(coming), lib=LIB)
    one = sample("followed.doubled.default", X)
    assert_shown_by(one, "S(0)", "grad S(0)")


def test_a_gradient_of_one_of_two_results():
    rules(define("share(Tensor x) -> Tensor", lambda x: x / x.shape[0]), (S0, S0))
    op = define("both(Tensor x) -> (Tensor, Tensor)", lambda x: (x * 2, x * 3), lambda x: (x.new_empty(x.shape),) * 2)
    rules(op, ([Shard(0), Shard(0)], S0))

    def backward(_, first, second):
        return first * 2 if second is None or not second.any() else torch.ops.followed.share(second)

    torch.library.register_autograd(op, backward, lib=LIB)
    one = sample("followed.both.default", X)
    assert_right(on(one, "S(0)"), on(one, "S(0)", then="grad of 0"))
    assert_goes_wrong(on(one, "S(0)", then="grad of 1"), ", expected ")


def moved(x):
    """Adds one; on a piece, by putting other memory in the place of its own, which views do not see."""
    return x.add_(1) if x.shape[0] == 4 else x.set_(x + 1)


def test_a_view_taken_before_that_does_not_see_what_was_written():
    op = define("bump_(Tensor(a!) x) -> Tensor(a!)", moved, lambda x: x)
    rules(op, (S0, S0))
    assert_shown_by(sample("followed.bump_.default", X.clone()), "S(0)", "base")


def test_a_call_before_whose_placements_are_remembered():
    op = define("turned(Tensor x, int by) -> Tensor", lambda x, by: x.roll(by, 0), lambda x, by: torch.empty_like(x))

    def strategy(schema):
        placement = Shard(0) if schema.args_schema[1] == 0 else Replicate()
        spec = schema.args_schema[0].strategies[0].output_spec
        wanted = DTensorSpec(spec.mesh, (placement,), tensor_meta=spec.tensor_meta)
        return OpStrategy([OpSpec(wanted, input_specs=(wanted,), redistribute_cost=[[0.0]])])

    dtensor.propagator().register_op_strategy(op, strategy)  # it does not say that the second argument counts
    one = sample("followed.turned.default", X, 1)
    assert_right(on(one, "S(0)"), on(one, "S(0)", then="again(x0, 2)"))
    assert_shown_by(one, "S(0)", "again(x0, 0)")
