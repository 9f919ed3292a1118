"""DTensor and its neighbours: right, or with a fault of one of the other topics' classes."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tests.tools.rankbugs.corpus import fault, right


@fault("EarlyReturn", ranks=2)
def the_full_tensor_is_saved_by_rank_zero_alone():
    mesh = init_device_mesh("cpu", (2,))
    weight = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])
    if dist.get_rank() == 0:
        weight.full_tensor()  # fault


@right(ranks=2)
def the_full_tensor_is_made_by_all_and_saved_by_rank_zero():
    mesh = init_device_mesh("cpu", (2,))
    weight = distribute_tensor(torch.arange(8.0).view(4, 2), mesh, [Shard(0)])
    whole = weight.full_tensor()
    if dist.get_rank() == 0:
        assert whole.sum().item() == 28.0
    assert weight.to_local().shape == (2, 2)


@fault("KindMismatch", ranks=4)
def one_rank_keeps_only_its_rows_of_a_sum():
    mesh = init_device_mesh("cpu", (4,))
    x = DTensor.from_local(torch.ones(8, 4), mesh, [Partial()])
    if dist.get_rank() == 2:
        x.redistribute(mesh, [Shard(0)]).to_local().sum()  # fault
    else:
        x.redistribute(mesh, [Replicate()]).to_local().sum()


@right(ranks=4)
def every_rank_redistributes_to_columns_and_back():
    mesh = init_device_mesh("cpu", (4,))
    x = distribute_tensor(torch.arange(32.0).view(8, 4), mesh, [Shard(0)])
    y = x.redistribute(mesh, [Shard(1)])
    assert y.to_local()[0].tolist() == [float(dist.get_rank())]
    assert torch.equal(y.redistribute(mesh, [Shard(0)]).to_local(), x.to_local())


@fault("ShapeMismatch", ranks=2)
def local_parts_of_two_sizes_are_called_one_tensor():
    mesh = init_device_mesh("cpu", (2,))
    mine = torch.ones(2 + dist.get_rank(), 3)
    DTensor.from_local(mine, mesh, [Shard(0)]).full_tensor()  # fault


@right(ranks=2)
def local_parts_of_two_sizes_and_the_size_of_the_whole():
    mesh = init_device_mesh("cpu", (2,))
    mine = torch.full((3 - dist.get_rank(), 2), float(dist.get_rank()))
    x = DTensor.from_local(mine, mesh, [Shard(0)], shape=torch.Size([5, 2]), stride=(2, 1))
    assert x.full_tensor()[:, 0].tolist() == [0.0, 0.0, 0.0, 1.0, 1.0]


@fault("DtypeMismatch", ranks=3)
def one_rank_turned_its_part_into_doubles():
    mesh = init_device_mesh("cpu", (3,))
    mine = torch.ones(2, 2)
    if dist.get_rank() == 1:
        mine = mine.double()
    DTensor.from_local(mine, mesh, [Partial()]).full_tensor()  # fault


@right(ranks=3)
def partial_sums_are_added_up():
    mesh = init_device_mesh("cpu", (3,))
    x = DTensor.from_local(torch.ones(2, 2) * dist.get_rank(), mesh, [Partial()])
    assert x.full_tensor().tolist() == [[3.0, 3.0], [3.0, 3.0]]


@fault("ReduceOpMismatch", ranks=2)
def partial_values_of_two_reductions():
    mesh = init_device_mesh("cpu", (2,))
    kind = Partial("max") if dist.get_rank() == 0 else Partial("sum")
    DTensor.from_local(torch.ones(2), mesh, [kind]).full_tensor()  # fault


@right(ranks=2)
def partial_values_of_one_reduction():
    mesh = init_device_mesh("cpu", (2,))
    x = DTensor.from_local(torch.tensor([1.0, 2.0]) * dist.get_rank(), mesh, [Partial("max")])
    assert x.full_tensor().tolist() == [1.0, 2.0]


@fault("EarlyReturn", ranks=4)
def a_norm_of_a_sharded_weight_on_the_last_rank_only():
    mesh = init_device_mesh("cpu", (4,))
    weight = distribute_tensor(torch.ones(8), mesh, [Shard(0)])
    total = weight.sum()
    if dist.get_rank() == 3:
        total.full_tensor()  # fault


@right(ranks=4)
def sharded_matrices_are_multiplied():
    mesh = init_device_mesh("cpu", (4,))
    a, b = torch.arange(24.0).view(3, 8), torch.ones(8, 2)
    x = distribute_tensor(a, mesh, [Shard(1)]) @ distribute_tensor(b, mesh, [Shard(0)])
    assert x.full_tensor().tolist() == (a @ b).tolist()


@right(ranks=4)
def a_mesh_of_two_axes_holds_uneven_rows():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole = torch.arange(15.0).view(5, 3)
    x = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
    assert torch.equal((x + x).full_tensor(), whole * 2)


@right(ranks=2)
def gradients_flow_through_sharded_tensors():
    mesh = init_device_mesh("cpu", (2,))
    weight = distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)]).requires_grad_()
    x = distribute_tensor(torch.full((2, 4), 2.0), mesh, [Replicate()])
    (x @ weight).sum().backward()
    assert weight.grad.full_tensor().tolist() == [[4.0] * 3] * 4


def two_layers():
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    for weight in model.parameters():
        nn.init.ones_(weight)
    return model


@right(ranks=2)
def a_model_is_cut_in_columns_and_rows():
    mesh = init_device_mesh("cpu", (2,))
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    model = parallelize_module(two_layers(), mesh, plan)
    y = model(torch.ones(3, 4))
    y.sum().backward()
    assert y.tolist() == [[41.0, 41.0]] * 3
    assert model[0].weight.grad.to_local().shape == (4, 4)


@fault("EarlyReturn", ranks=2)
def one_rank_runs_the_cut_model_once_more():
    mesh = init_device_mesh("cpu", (2,))
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    model = parallelize_module(two_layers(), mesh, plan)
    for _ in range(2 + dist.get_rank()):
        model(torch.ones(3, 4)) + 0  # fault


@fault("KindMismatch", ranks=4)
def one_rank_gathers_a_sharded_tensor_for_its_norm():
    mesh = init_device_mesh("cpu", (4,))
    weight = distribute_tensor(torch.ones(8, 2), mesh, [Shard(0)])
    if dist.get_rank() == 1:
        weight.full_tensor().sum()  # fault
    else:
        weight.sum().full_tensor()  # fault


@right(ranks=2)
def a_replicated_model_learns_the_average():
    model = nn.Linear(2, 1, bias=False)
    nn.init.ones_(model.weight)
    replica = DistributedDataParallel(model)
    replica(torch.full((1, 2), 2.0 * dist.get_rank())).sum().backward()
    assert model.weight.grad.tolist() == [[1.0, 1.0]]


@fault("EarlyReturn", ranks=2)
def one_replica_has_a_batch_more():
    replica = DistributedDataParallel(nn.Linear(2, 1))
    for _ in range(2 + dist.get_rank()):
        loss = replica(torch.ones(1, 2)).sum()
        loss.backward()  # fault


@right(ranks=2)
def a_replica_gathers_gradients_over_two_batches():
    model = nn.Linear(2, 1, bias=False)
    replica = DistributedDataParallel(model)
    with replica.no_sync():
        replica(torch.full((1, 2), 1.0 + dist.get_rank())).sum().backward()
    replica(torch.ones(1, 2)).sum().backward()
    assert model.weight.grad.tolist() == [[2.5, 2.5]]


@fault("RankRaised", ranks=2)
def one_rank_mixes_a_plain_tensor_in():
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])
    y = x @ torch.ones(2, 2) if dist.get_rank() == 1 else x  # fault
    y.full_tensor()


@fault("RootMismatch", ranks=4)
def the_columns_of_a_mesh_have_two_sources():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    group, source = mesh.get_group("dp"), 1 if dist.get_rank() == 3 else 0
    dist.broadcast(torch.ones(2), group_src=source, group=group)  # fault


@right(ranks=4)
def the_columns_of_a_mesh_have_a_source_each():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    x = torch.full((2,), float(dist.get_rank()))
    dist.broadcast(x, group_src=mesh.get_local_rank("tp"), group=mesh.get_group("dp"))
    assert x.tolist() == [[0.0, 0.0], [3.0, 3.0]][dist.get_rank() % 2]
