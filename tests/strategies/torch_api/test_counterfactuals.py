"""What DTensor calls, traced, and one part of it replaced."""

import pytest
import torch
import torch.distributed as dist
import torch.utils._mode_utils
from torch.distributed.tensor import (
    DTensor,
    Replicate,
    Shard,
    _redistribute,
    distribute_tensor,
    init_device_mesh,
    placement_types,
)

import localtensor as lt
from strategies.model.rule import overload
from strategies.torch_api import counterfactuals
from strategies.torch_api.code_places import registered_place
from strategies.torch_api.dtensor import propagator
from tests.strategies.wrong_here import if_cumprod_has_a_rule

PARTS = [
    (DTensor._op_dispatcher, ("_custom_op_handlers", "unwrap_to_op_info")),
    (propagator(), ("propagate_op_sharding", "propagate_op_sharding_non_cached", "_propagate_tensor_meta_non_cached")),
    (_redistribute, ("redistribute_local_tensor",)),
    (type(DTensor._op_dispatcher), ("wrap",)),
    (torch._decomp, ("decomposition_table",)),
    (torch.utils._mode_utils, ("no_dispatch",)),
    (torch.ops.aten.add.Tensor, ("_can_decompose", "decompose")),
    (placement_types.Partial, counterfactuals.STEPS["Partial"]),
    (placement_types.Shard, counterfactuals.STEPS["Shard"]),
]


@pytest.mark.parametrize(("owner", "names"), PARTS, ids=lambda value: getattr(value, "__name__", ""))
def test_every_part_of_torch_that_is_used_is_there(owner, names):
    assert [name for name in names if not hasattr(owner, name)] == []


def cumprod():
    x = distribute_tensor(torch.arange(1.0, 5.0), init_device_mesh("cpu", (2,)), [Shard(0)], src_data_rank=None)
    return torch.cumprod(x, -1).full_tensor()


@if_cumprod_has_a_rule
def test_a_trace_names_the_ops_and_the_functions_that_placed_them():
    with counterfactuals.traced() as trace:
        lt.run(cumprod, ranks=2)
    (step,) = [step for step in trace.steps if step.op == "aten.cumprod.default"]
    assert (step.how, step.inputs) == ("op strategy", ("S(0)",)) and step.place == registered_place(overload(step.op))
    assert trace.wrong == []


def exp_of_a_sum():
    x = distribute_tensor(torch.arange(4.0), init_device_mesh("cpu", (2,)), [Shard(0)], src_data_rank=None)
    dist.barrier()
    return (x + x).exp().full_tensor()


@pytest.mark.parametrize("seed", range(4))
def test_whichever_rank_asks_first_every_op_is_in_the_trace(seed):
    with counterfactuals.traced() as trace:
        lt.run(exp_of_a_sum, ranks=2, schedule=lt.shuffled(seed))
    ops = [step.op for step in trace.steps]
    assert ops[:1] == ["aten.add.Tensor"] and ops.count("aten.exp.default") == ops.count("aten.add.Tensor") == 1


def moved_on_its_row():
    """Rows of ranks that move tensors of their own, one of them twice: what is looked at on one row does not wait for the other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    row, number = mesh["b"], mesh.get_local_rank("a")
    x = distribute_tensor(torch.arange(4.0) + number, row, [Shard(0)], src_data_rank=None)
    for _ in range(number):
        x = x.redistribute(placements=[Replicate()]).redistribute(placements=[Shard(0)])
    return x.full_tensor().tolist()


@pytest.mark.parametrize("replaced", [False, True])
def test_a_move_on_a_submesh_is_compared_on_that_submesh(replaced):
    with counterfactuals.redistribution_replaced() if replaced else counterfactuals.traced() as trace:
        assert lt.run(moved_on_its_row, ranks=4).values == ([0, 1, 2, 3],) * 2 + ([1, 2, 3, 4],) * 2
    assert replaced or trace.wrong == []


def replicas_of_unlike_sizes():
    x = torch.ones(4 - 2 * dist.get_rank())
    x = DTensor.from_local(x, init_device_mesh("cpu", (2,)), [Replicate()], run_check=False)
    return x.redistribute(placements=[Shard(0)]).to_local().tolist()


def test_pieces_that_do_not_fit_their_placement_do_not_end_a_run_that_is_looked_at():
    with counterfactuals.traced():
        assert lt.run(replicas_of_unlike_sizes, ranks=2).values == ([1, 1], [1])


def test_an_op_replaced_is_right_and_keeps_its_placement():
    with counterfactuals.op_replaced(torch.ops.aten.cumprod.default):
        assert lt.run(cumprod, ranks=2)[0].tolist() == [1.0, 2.0, 6.0, 24.0]


def squeezed():
    x = distribute_tensor(torch.ones(4, 1), init_device_mesh("cpu", (2,)), [Shard(0)], src_data_rank=None)
    y = x.squeeze_(-1)
    return tuple(y.shape), tuple(y.to_local().shape)


def test_a_tensor_that_an_op_in_place_gives_another_shape_says_so():
    with counterfactuals.op_replaced(torch.ops.aten.squeeze_.dim):
        assert lt.run(squeezed, ranks=2).values == (((4,), (2,)),) * 2


@if_cumprod_has_a_rule
def test_a_rule_replaced_is_right_and_nothing_stays_replaced():
    place = registered_place(torch.ops.aten.cumprod.default)
    before = lt.run(cumprod, ranks=2)[0].tolist()
    with counterfactuals.rules_replaced(place):
        assert lt.run(cumprod, ranks=2)[0].tolist() == [1.0, 2.0, 6.0, 24.0]
    assert lt.run(cumprod, ranks=2)[0].tolist() == before
