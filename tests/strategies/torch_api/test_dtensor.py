"""DTensor's private parts: each is named here, so that a torch that lacks one turns one test red, with its name.

The room itself is imported late: without a part that it imports, the tests that name parts still run.
"""

import functools
import importlib
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

import strategies
from localtensor.layout.spec import shorts
from strategies.model.oracle import run_oracle
from strategies.model.rule import overload
from tests.strategies.cases import numbers, sample
from tests.strategies.planted_ops import planted

X = numbers(4, 6)
MODULE = Path(strategies.__file__).parent / "torch_api/dtensor.py"


@pytest.fixture
def dtensor():
    return importlib.import_module("strategies.torch_api.dtensor")


def propagator():
    return DTensor._op_dispatcher.sharding_propagator


def if_torch_has(feature):
    return pytest.mark.skipif(not hasattr(propagator(), feature), reason=f"torch {torch.__version__} has no {feature}")


def module(name):
    return importlib.import_module(f"torch.distributed.tensor.{name}")


def outcome(one, *given):
    """What the propagator answers, through the room's own question."""
    room = importlib.import_module("strategies.torch_api.dtensor")
    ask = room.PropagatorQuery(one, 2, run_oracle(one).raw)
    return ask.prop.propagate_op_sharding_non_cached(ask.schema(given))


def meshes(*given):
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh("cpu", torch.arange(2), _init_backend=False, _rank=1)


PARTS = {
    "DTensor._op_dispatcher.sharding_propagator": {
        "DTensor._op_dispatcher": lambda: DTensor._op_dispatcher,
        "OpDispatcher.sharding_propagator": propagator,
    },
    ".op_single_dim_strategy_funcs, .op_strategy_funcs, .op_to_rules": {
        "ShardingPropagator.op_single_dim_strategy_funcs": lambda: propagator().op_single_dim_strategy_funcs,
        "the func of a single-dim strategy": lambda: next(iter(propagator().op_single_dim_strategy_funcs.values())).func,
        "ShardingPropagator.op_strategy_funcs": lambda: propagator().op_strategy_funcs,
        "ShardingPropagator.op_to_rules": lambda: propagator().op_to_rules,
    },
    ".op_to_schema_info[_for_single_dim_strategy]": {
        "ShardingPropagator.op_to_schema_info": lambda: propagator().op_to_schema_info,
        "ShardingPropagator.op_to_schema_info_for_single_dim_strategy":
            lambda: propagator().op_to_schema_info_for_single_dim_strategy,
    },
    ".op_to_shape_and_stride_idx": {
        "ShardingPropagator.op_to_shape_and_stride_idx": lambda: propagator().op_to_shape_and_stride_idx,
    },
    ".op_to_scalar_shape_adjuster, .squeeze_op_to_dims_variant": {
        "ShardingPropagator.op_to_scalar_shape_adjuster": lambda: propagator().op_to_scalar_shape_adjuster,
        "ShardingPropagator.squeeze_op_to_dims_variant": lambda: propagator().squeeze_op_to_dims_variant,
    },
    "._propagate_tensor_meta_non_cached (set on a copy)": {
        "ShardingPropagator._propagate_tensor_meta_non_cached": lambda: propagator()._propagate_tensor_meta_non_cached,
    },
    "._wrap_with_op_strategy, .propagate_op_sharding_non_cached": {
        "ShardingPropagator._wrap_with_op_strategy": lambda: propagator()._wrap_with_op_strategy,
        "ShardingPropagator.propagate_op_sharding_non_cached": lambda: propagator().propagate_op_sharding_non_cached,
    },
    "_op_dispatcher._custom_op_handlers": {
        "OpDispatcher._custom_op_handlers": lambda: DTensor._op_dispatcher._custom_op_handlers,
    },
    "_op_schema.OpSchema, OpStrategy, TupleStrategy": {
        name: functools.partial(lambda name: getattr(module("_op_schema"), name), name)
        for name in ("OpSchema", "OpStrategy", "TupleStrategy")
    },
    "_op_schema.OutputSharding: output_spec, redistribute_schema, use_val_from_redistribute_schema": {
        "OutputSharding.output_spec": lambda: outcome(sample("relu.default", X), Shard(0)).output_spec,
        "OutputSharding.redistribute_schema":
            lambda: outcome(sample("cumsum.default", X, 0), Shard(0)).redistribute_schema.args_spec,
        "OutputSharding.use_val_from_redistribute_schema":
            lambda: outcome(sample("view.default", X, [4, 2, 3]), Shard(0)).use_val_from_redistribute_schema,
    },
    "_dtensor_spec.DTensorSpec, TensorMeta": {
        "DTensorSpec": lambda: module("_dtensor_spec").DTensorSpec,
        "TensorMeta": lambda: module("_dtensor_spec").TensorMeta(torch.Size([2]), (1,), torch.float32),
    },
    "_ops.single_dim_strategy._SingleDimStrategyInfo, its fields": {
        "_SingleDimStrategyInfo": lambda: module("_ops.single_dim_strategy")._SingleDimStrategyInfo.__dataclass_fields__,
    },
    "_ops.single_dim_strategy._ShardingPlaceholder": {
        "_ShardingPlaceholder": lambda: module("_ops.single_dim_strategy")._ShardingPlaceholder(0),
    },
    "device_mesh.DeviceMesh(_init_backend=False, _rank=r)": {"DeviceMesh's private arguments": meshes},
    "torch._C._dispatch_has_kernel, OpOverload._can_decompose": {
        "torch._C._dispatch_has_kernel": lambda: torch._C._dispatch_has_kernel("aten::matmul"),
        "OpOverload._can_decompose": lambda: torch.ops.aten.matmul.default._can_decompose,
    },
}  # fmt: skip
"""Each row of the table at the head of the module, and how each part in it is reached."""
BY_FEATURE = ("op_to_scalar_shape_adjuster", "squeeze_op_to_dims_variant")


def check_part(name, find):
    """The part is there, or the failure says which is not."""
    try:
        found = find()
    except (ImportError, AttributeError, TypeError, KeyError) as gone:
        if any(feature in name for feature in BY_FEATURE):
            pytest.skip(f"torch {torch.__version__} has no {name}; we do without ({gone})")
        pytest.fail(f"torch {torch.__version__} has no {name} any more, which torch_dtensor.py uses: {gone}")
    assert found is not None, f"{name} is None in torch {torch.__version__}"


@pytest.mark.parametrize("name", [name for row in PARTS.values() for name in row])
def test_torch_still_has(name):
    check_part(name, next(row[name] for row in PARTS.values() if name in row))


def test_every_part_in_the_table_of_the_module_is_named_here():
    table = MODULE.read_text().split('"""')[1].replace(",    |                |        |\n| use_val", ", use_val")
    rows = [re.sub(r" +", " ", line.split("|")[1]).strip() for line in table.splitlines() if line.startswith("| ")]
    assert set(rows[1:]) == set(PARTS)


@pytest.mark.parametrize(("op", "composite"), [("matmul.default", True), ("mm.default", False), ("acos.int", False)])
def test_an_op_that_torch_computes_by_others_is_composite_and_one_of_torchscript_alone_is_not(dtensor, op, composite):
    packet, name = op.split(".")
    assert dtensor.is_composite(getattr(getattr(torch.ops.aten, packet), name)) is composite


def test_a_part_that_went_is_named(monkeypatch):
    monkeypatch.delattr(type(propagator()), "_wrap_with_op_strategy")
    row = PARTS["._wrap_with_op_strategy, .propagate_op_sharding_non_cached"]
    with pytest.raises(pytest.fail.Exception, match=r"has no ShardingPropagator._wrap_with_op_strategy any more"):
        check_part("ShardingPropagator._wrap_with_op_strategy", row["ShardingPropagator._wrap_with_op_strategy"])


@if_torch_has("squeeze_op_to_dims_variant")
def test_a_feature_that_went_is_skipped_and_named(monkeypatch):
    monkeypatch.delattr(propagator(), "squeeze_op_to_dims_variant")
    row = PARTS[".op_to_scalar_shape_adjuster, .squeeze_op_to_dims_variant"]
    name = "ShardingPropagator.squeeze_op_to_dims_variant"
    with pytest.raises(pytest.skip.Exception, match=name):
        check_part(name, row[name])


# Who answers for an op.


@pytest.mark.parametrize(("op", "source"), [
    ("aten.mm.default", "single-dim strategy"),
    ("aten.view.default", "op strategy"),
    ("aten.aminmax.default", "decomposition"),
    ("aten._unique2.default", ""),
])  # fmt: skip
def test_the_registry_that_answers_is_named(dtensor, op, source):
    assert dtensor.registry_of(overload(op)) == source
    assert (overload(op) in dtensor.registered_overloads()) == (source in ("single-dim strategy", "op strategy"))


def a_rule(schema):
    """A prop rule of the oldest kind: what comes in goes out."""
    return module("_op_schema").OutputSharding(schema.args_spec[0])


def test_a_prop_rule_answers_where_there_is_nothing_newer(dtensor, monkeypatch):
    op = overload("planted.approximate_floor.default")
    monkeypatch.setitem(propagator().op_to_rules, op, a_rule)
    assert dtensor.registry_of(op) == "rule"
    assert op in dtensor.registered_overloads()


def test_a_prop_rule_of_torchs_own_is_found(dtensor):
    rules = [op for op in propagator().op_to_rules if dtensor.registry_of(op) == "rule"]
    if not rules:
        pytest.skip(f"torch {torch.__version__} registers no prop rule; the planted one above stands in")
    assert set(rules) <= dtensor.registered_overloads()


def test_a_newly_registered_strategy_shows_when_two_lists_are_compared(dtensor, monkeypatch):
    op = overload("planted.approximate_floor.default")
    before = dtensor.registered_functions()
    monkeypatch.setitem(propagator().op_strategy_funcs, op, print)
    now = dtensor.registered_functions()
    assert {key for key, func in now.items() if before.get(key) is not func} == {("op strategy", op)}


def test_a_registration_that_torch_never_asks_is_seen(dtensor, monkeypatch):
    op = overload("aten.relu.default")
    if dtensor.registry_of(op) != "single-dim strategy":
        pytest.skip(f"torch {torch.__version__} asks a registration for {op}")
    for table in (propagator().op_strategy_funcs, propagator().op_to_schema_info):
        monkeypatch.setattr(propagator(), _name_of(table), dict(table))  # restored as it was, whatever is registered
    assert not dtensor.has_unused_strategy(op)
    register_sharding(op)(lambda x: [([Replicate()], [Replicate()])])
    assert dtensor.has_unused_strategy(op)
    assert dtensor.registry_of(op) == "single-dim strategy"


def _name_of(table):
    return next(name for name, value in vars(propagator()).items() if value is table)


def test_a_registration_of_a_users_own_op_is_asked(dtensor):
    op = overload("planted.remembered.default")
    assert dtensor.registry_of(op) == "op strategy"
    assert not dtensor.has_unused_strategy(op)


@pytest.mark.parametrize(("op", "own", "rewritten"), [
    ("aten.relu.default", False, False),
    ("aten.argmax.default", True, False),
    ("aten.view.default", False, True),
    pytest.param("aten.squeeze.dim", False, True, marks=if_torch_has("squeeze_op_to_dims_variant")),
    pytest.param("aten.native_group_norm.default", False, True, marks=if_torch_has("op_to_scalar_shape_adjuster")),
])  # fmt: skip
def test_handlers_and_rewritten_arguments_are_known(dtensor, op, own, rewritten):
    found = (
        bool(dtensor.special_dispatch_reason(overload(op))),
        dtensor.rewrites_arguments(overload(op)),
    )
    assert found == (own, rewritten)


# The question itself.


@pytest.fixture
def ask(dtensor):
    return lambda one, ranks=2: dtensor.PropagatorQuery(one, ranks, run_oracle(one).raw)


def single_dim(question):
    if question.op not in propagator().op_single_dim_strategy_funcs:
        pytest.skip(f"torch {torch.__version__} has no single-dim strategy for {question.op}")
    return question.single_dim_rows()


def lines(rows):
    return [f"{shorts(inputs)} -> {shorts(outputs)}" for inputs, outputs in rows]


def test_no_process_group_is_needed_and_a_mesh_is_made_once(dtensor):
    mesh = dtensor.one_axis_mesh(3, 2)
    assert not dist.is_initialized()
    assert (mesh.size(), list(mesh.get_coordinate())) == (3, [2])
    assert dtensor.one_axis_mesh(3, 2) is mesh


def test_the_outputs_metadata_come_from_the_oracle_and_not_from_a_trace(ask, monkeypatch):
    def traces(self, schema):
        pytest.fail("torch traced it")

    monkeypatch.setattr(type(propagator()), "_propagate_tensor_meta_non_cached", traces)
    turned = sample("transpose.int", X, 0, 1)
    assert ask(turned).propagate([Shard(1)])[0] == (Shard(0),)
    with pytest.raises(pytest.fail.Exception, match="torch traced it"):  # so it would have, without us
        propagator().propagate_op_sharding_non_cached(ask(turned).schema([Shard(1)]))


def test_torchs_own_propagator_is_left_alone(ask):
    ask(sample("relu.default", X))
    assert "_propagate_tensor_meta_non_cached" not in vars(propagator())


def test_a_single_dim_strategy_gives_its_lines_with_shards_for_placeholders_and_replicas_first(ask):
    found = lines(single_dim(ask(sample("neg.default", X))))
    assert found[0] == "R -> R"
    assert {"S(0) -> S(0)", "S(1) -> S(1)", "P(sum) -> P(sum)"} < set(found)
    assert len(found) == len(set(found))


@pytest.mark.parametrize(("line", "said"), [
    ([Replicate()], "a line of 1 placements, for 1 results and 1 tensor arguments"),
    ([Replicate()] * 3, "a line of 3 placements, for 1 results and 1 tensor arguments"),
    ([Shard(-1), Shard(-1)], r"a line names a negative shard dim: \[Shard\(dim=-1\), Shard\(dim=-1\)\]"),
], ids=["short", "long", "negative"])  # fmt: skip
def test_a_line_that_torch_refuses_at_each_call_is_refused_in_so_many_words(ask, monkeypatch, line, said):
    one = sample("neg.default", X)
    strategy = SimpleNamespace(func=lambda *_: [line], allow_uneven_sharding=False)
    monkeypatch.setitem(propagator().op_single_dim_strategy_funcs, overload(one.op), strategy)
    with pytest.raises(ValueError, match=f"^{said}$"):
        single_dim(ask(one))


@pytest.mark.parametrize("counts_items", [False, True])
def test_a_line_has_a_placement_for_each_item_of_a_list_where_torch_counts_them(
    ask, monkeypatch, counts_items, dtensor
):
    one = sample("split.Tensor", X, 2)
    strategy = SimpleNamespace(func=lambda *_: [[Shard(1)] * 3], allow_uneven_sharding=False)
    monkeypatch.setitem(propagator().op_single_dim_strategy_funcs, overload(one.op), strategy)
    monkeypatch.setattr(dtensor, "ONE_PLACEMENT_PER_LIST_ITEM", counts_items)
    if counts_items:
        assert lines(ask(one).single_dim_rows()) == ["R -> R, R", "S(1) -> S(1), S(1)"]
    else:
        with pytest.raises(ValueError, match="for 1 results and 1 tensor arguments"):
            ask(one).single_dim_rows()


def test_the_lines_of_an_op_strategy_for_several_inputs_are_put_together(ask):
    found = lines(ask(sample("unsqueeze.default", X, 1)).strategy_rows([[Shard(0)], [Shard(1)], [Partial("sum")]]))
    assert found == ["S(0) -> S(0)", "S(1) -> S(2)", "P(sum) -> P(sum)"]


def test_a_decomposition_gives_lines_for_each_output(ask):
    found = lines(ask(sample("aminmax.default", X, dim=0), 1).strategy_rows([[Shard(0)], [Replicate()]]))
    assert {"R -> R, R", "S(0) -> P(min), P(max)", "S(1) -> S(0), S(0)"} == set(found)


def test_an_op_strategy_that_refuses_some_inputs_answers_for_the_rest(ask):
    unbind = ask(sample("unbind.int", X, 0))
    if unbind.op not in propagator().op_strategy_funcs:
        pytest.skip(f"torch {torch.__version__} has no op strategy for {unbind.op}")
    assert lines(unbind.strategy_rows([[Shard(0)], [Shard(1)]])) == ["S(1) -> S(0), S(0), S(0), S(0)"]
    with pytest.raises(RuntimeError, match="unbind"):
        unbind.strategy_rows([[Shard(0)]])


def test_a_dim_smaller_than_the_ranks_is_not_claimed(ask):
    few = numbers(3, 8)
    found = [lines(single_dim(ask(sample("flip.default", few, [1]), ranks))) for ranks in (3, 4)]
    assert "S(0) -> S(0)" in found[0]
    assert "S(0) -> S(0)" not in found[1]


def test_a_dim_smaller_than_the_ranks_is_claimed_where_the_op_says_that_it_may_be(ask):
    few = numbers(3, 8)
    assert "S(0), S(0) -> S(0)" in lines(single_dim(ask(sample("add.Tensor", few, few), 4)))


@pytest.mark.parametrize(("inputs", "fits"), [("S(0)", True), ("S(1)", False), ("R", True), ("P(sum)", True)])
def test_whether_a_line_fits_is_asked_of_each_mesh_size(ask, inputs, fits):
    from localtensor.layout.spec import parse

    assert ask(sample("relu.default", numbers(4, 3)), 4).fits(((parse(inputs),), (parse(inputs),))) is fits


def test_what_is_written_in_place_keeps_its_placement(ask):
    in_place = lines(single_dim(ask(sample("add_.Tensor", X, X))))
    usual = lines(single_dim(ask(sample("add.Tensor", X, X))))
    assert "R, P(avg) -> P(avg)" in usual
    assert set(usual) - set(in_place) == {"R, P(avg) -> P(avg)"}
    assert all(line.split(", ")[0] == line.split(" -> ")[1] for line in in_place)


def test_an_operator_between_underscores_is_not_in_place(ask):
    question = ask(sample("__and__.Scalar", numbers(4, dtype=torch.int64), 1))
    assert question.fits(((Shard(0),), (Replicate(),)))


def test_outputs_that_are_masked_off_have_no_placement(ask):
    out, mean, rstd = torch.ops.aten.native_layer_norm.default(X, [6], None, None, 1e-5)
    one = sample("native_layer_norm_backward.default", out, X, [6], mean, rstd, None, None, [True, False, False])
    assert lines(single_dim(ask(one)))[0] == "R, R, R, R -> R, -, -"


def test_inputs_that_would_be_redistributed_first_have_no_answer(ask):
    question = ask(sample("cumsum.default", X, 0))
    assert question.propagate([Shard(0)]) is None
    assert question.propagate([Shard(1)]) == ((Shard(1),), None)


def test_a_prop_rule_is_asked_for_the_very_inputs(ask, monkeypatch):
    one = planted("approximate_floor", X)
    monkeypatch.setitem(propagator().op_to_rules, overload(one.op), a_rule)
    assert ask(one).propagate([Shard(1)]) == ((Shard(1),), None)


@pytest.mark.parametrize(("one", "calls"), [
    (sample("view.default", numbers(5, 6), [5, 2, 3]), ["(3, 2, 3)", "(2, 2, 3)"]),
    (sample("expand.default", numbers(5, 1), [5, 3]), ["(3, 3)", "(2, 3)"]),
    (sample("new_zeros.default", numbers(5, 2), [5, 2]), ["(3, 2)", "(2, 2)"]),
], ids=lambda given: getattr(given, "op", None))  # fmt: skip
def test_rewritten_shape_arguments_are_each_ranks_own(ask, one, calls):
    question = ask(one)
    for rank, want in enumerate(calls):
        outputs, call = question.propagate([Shard(0)], rank)
        assert outputs == (Shard(0),)
        assert (call.op, str(call.args[1])) == (one.op, want)


@if_torch_has("squeeze_op_to_dims_variant")
def test_a_rewritten_call_may_be_of_another_overload(ask):
    outputs, call = ask(sample("squeeze.default", numbers(4, 1, 2))).propagate([Shard(2)])
    assert (outputs, call.op, call.args[1]) == ((Shard(1),), "aten.squeeze.dims", (1,))


def test_keywords_stay_in_a_rewritten_call(ask):
    one = sample("new_zeros.default", X, [4, 6], dtype=torch.int64)
    _, call = ask(one).propagate([Shard(0)])
    assert call.kwargs == (("dtype", torch.int64),)
    assert call([X[:2]]).dtype == torch.int64


def test_the_question_on_one_rank_is_made_once(dtensor, ask):
    question = ask(sample("relu.default", X), 4)
    assert question.alone() is question.alone()
    assert question.alone().ranks == 1
    shared = dtensor.PropagatorQuery(question.sample, 2, question.outputs, question.alone())
    assert shared.alone() is question.alone()


@pytest.mark.parametrize(("op", "numbers_only"), [
    ("aten.equal.default", True),
    ("aten._local_scalar_dense.default", True),
    ("aten.add.Tensor", False),
    ("aten._foreach_add_.Scalar", False),
    ("aten._linalg_check_errors.default", False),
])  # fmt: skip
def test_what_an_op_returns_tells_whether_the_dispatcher_makes_a_number(dtensor, op, numbers_only):
    assert dtensor.returns_no_tensor(overload(op)) is numbers_only
    assert bool(dtensor.special_dispatch_reason(overload(op))) is numbers_only


@pytest.mark.parametrize(("op", "mistaken"), [
    ("aten.__lshift__.Scalar", True),
    ("aten.__lshift__.Tensor_out", True),
    ("aten.__ilshift__.Scalar", False),
    ("aten.add_.Tensor", False),
])  # fmt: skip
def test_an_op_that_dtensor_takes_for_one_in_place_is_for_the_dispatcher(dtensor, op, mistaken):
    assert ("in place" in dtensor.special_dispatch_reason(overload(op))) is mistaken
