"""localtensor.threads.state.shared_propagation: sharding rules that a rank's program registers are that rank's."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.experimental import register_sharding
from torch.testing._internal.distributed._tensor import common_dtensor

from localtensor import run
from localtensor.threads.state.shared_propagation import TABLES, RuleTable

op_strategy_context = getattr(common_dtensor, "op_strategy_context", None)
HAS_CONTEXT = pytest.mark.skipif(
    op_strategy_context is None, reason="torch 2.11 has no op_strategy_context in its tests"
)
PROPAGATOR = DTensor._op_dispatcher.sharding_propagator
OP = torch.ops.aten.frac.default


def known():
    return {name: dict(getattr(PROPAGATOR, name)) for name in TABLES if hasattr(PROPAGATOR, name)}


def replicated(op_schema):
    from torch.distributed.tensor._dtensor_spec import DTensorSpec
    from torch.distributed.tensor._op_schema import OpSpec, OpStrategy

    one = op_schema.args_schema[0]
    spec = DTensorSpec(one.mesh, (Replicate(),), tensor_meta=one.strategies[0].output_spec.tensor_meta)
    return OpStrategy([OpSpec(spec, input_specs=(spec,), redistribute_cost=[[0.0]])])


@HAS_CONTEXT
def test_a_rank_that_leaves_a_block_with_a_rule_of_its_own_leaves_the_others_theirs():
    before = known()

    def leaves_after_the_rank_before():
        rank = dist.get_rank()
        with op_strategy_context(OP, replicated):
            if rank:
                dist.recv(torch.empty(1), rank - 1)
            inside = PROPAGATOR.op_strategy_funcs[OP] is replicated
        outside = PROPAGATOR.op_strategy_funcs.get(OP) is replicated
        if rank < 2:
            dist.send(torch.ones(1), rank + 1)
        return inside, outside

    assert run(leaves_after_the_rank_before, ranks=3).values == ((True, False),) * 3
    assert known() == before


def test_what_one_rank_registers_no_other_has_and_no_one_when_the_run_is_over():
    before = known()

    def registers():
        if dist.get_rank() == 1:

            @register_sharding(OP)
            def rule(x):
                return [([Replicate()], [Replicate()])]

        dist.barrier()
        mine = {name: getattr(PROPAGATOR, name).get(OP) for name in ("op_strategy_funcs",)}
        _clear_sharding_prop_cache()
        dist.barrier()
        return mine["op_strategy_funcs"]

    found = run(registers, ranks=3).values
    assert found[0] is found[2] and found[1] is not found[0]
    assert known() == before


@HAS_CONTEXT
def test_a_rule_that_was_there_before_the_run_is_on_all_ranks():
    def rule(op_schema):
        return replicated(op_schema)

    with op_strategy_context(OP, rule):
        assert run(lambda: PROPAGATOR.op_strategy_funcs[OP], ranks=2).values == (rule, rule)


@pytest.mark.parametrize("write", [
    lambda table: table.__setitem__("a", 2),
    lambda table: table.pop("a"),
    lambda table: table.__delitem__("a"),
    lambda table: table.setdefault("b", 3),
])  # fmt: skip
def test_every_way_to_write_is_noticed(write):
    run(dist.get_rank, ranks=1)
    table = PROPAGATOR.op_strategy_funcs  # as every run leaves it
    assert type(table) is RuleTable
    table.put("a", 1)

    def change():
        if dist.get_rank() == 0:
            write(table)
        return dict(table.changed)

    try:
        changed = run(change, ranks=1).values[0]
        assert list(changed) in (["a"], ["b"])
    finally:
        for key in ("a", "b"):
            table.pop(key, None)


def test_what_a_module_registers_when_it_is_imported_is_for_all_ranks(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "brings_a_rule.py").write_text(
        "from torch.distributed.tensor import DTensor\n"
        "DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs['imported op'] = 'a rule'\n"
    )

    def imports():
        if dist.get_rank() == 0:
            import brings_a_rule  # noqa: F401
        dist.barrier()
        return PROPAGATOR.op_strategy_funcs.get("imported op")

    try:
        assert run(imports, ranks=2).values == ("a rule", "a rule")
    finally:
        PROPAGATOR.op_strategy_funcs.pop("imported op", None)
