"""Every API of torch.distributed, one small program each: ordinary code of one rank, of three unless it says so."""

import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.distributed import distributed_c10d as c10d


def mine(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """What this rank brings: numbers that no other rank has."""
    size = torch.Size(shape).numel()
    return (torch.arange(size) + 10 * dist.get_rank()).reshape(shape).to(dtype)


def like(x: Tensor) -> list[Tensor]:
    return [torch.zeros_like(x) for _ in range(dist.get_world_size())]


def here() -> int:
    return dist.get_rank()


# -- collectives


def all_reduces() -> Any:
    given = []
    for op in ("SUM", "PRODUCT", "MIN", "MAX"):
        x = mine(2, 3)
        dist.all_reduce(x, getattr(dist.ReduceOp, op))
        given.append(x)
    for op in ("BAND", "BOR", "BXOR"):
        x = mine(5, dtype=torch.int64)
        dist.all_reduce(x, getattr(dist.ReduceOp, op))
        given.append(x)
    return given


def all_reduces_of_every_dtype() -> Any:
    given = []
    for name in ("float16", "bfloat16", "float64", "int8", "uint8", "int32", "int64", "bool", "complex64"):
        x = mine(4, dtype=getattr(torch, name))
        dist.all_reduce(x)
        given.append(x)
    return given


def all_reduce_of_nothing_and_of_a_scalar() -> Any:
    nothing, scalar = torch.ones(0, 3), torch.tensor(float(here()))
    dist.all_reduce(nothing)
    dist.all_reduce(scalar)
    return nothing, scalar


def one_element_in_other_dims() -> Any:
    shape, given = [(), (1,), (1, 1)][here()], []
    for call in (dist.all_reduce, lambda x: dist.broadcast(x, 1), lambda x: dist.reduce(x, 0)):
        x = mine(*shape)
        call(x)
        given.append(x)
    gathered = like(x)
    dist.all_gather(gathered, mine(*shape))
    root = [torch.tensor(float(rank)) for rank in range(3)] if here() == 0 else None
    dist.scatter(x, root, 0)
    return given if here() == 0 else given[:2], gathered, x  # of a reduction, only the root has a defined result


def all_reduce_across_memory() -> Any:
    x = mine(3, 4).t()
    dist.all_reduce(x)
    gathered = torch.zeros(8, 3).t().contiguous().t()
    dist.all_gather_into_tensor(gathered[:6], mine(2, 3).t().contiguous().t())
    return x, x.stride(), gathered


def all_reduce_later() -> Any:
    x = mine(3)
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    return x, work.is_completed()


def all_reduce_by_future() -> Any:
    x = mine(3)
    doubled = dist.all_reduce(x, async_op=True).get_future().then(lambda done: done.value()[0] * 2).wait()
    return x, doubled


def all_reduce_coalesced() -> Any:
    x, y = mine(3), mine(2, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.all_reduce_coalesced([x, y])
    return x, y


def all_reduce_of_requires_grad() -> Any:
    x = mine(3).requires_grad_()
    with torch.no_grad():
        dist.all_reduce(x)
    return x, x.requires_grad, x.is_leaf


def reduces() -> Any:
    x, y = mine(4), mine(4)
    dist.reduce(x, 1)
    dist.reduce(y, dst=2, op=dist.ReduceOp.MAX)
    return x if here() == 1 else None, y if here() == 2 else None


def broadcasts() -> Any:
    x, y, z = mine(2, 2), mine(3).t(), torch.tensor(here())
    dist.broadcast(x, 2)
    dist.broadcast(y, src=0, async_op=True).wait()
    dist.broadcast(z, group_src=1)
    return x, y, z


def all_gathers() -> Any:
    x = mine(2, 3)
    plain, later, scalars = like(x), like(x), [torch.tensor(0) for _ in range(3)]
    dist.all_gather(plain, x)
    dist.all_gather(later, x + 1, async_op=True).wait()
    dist.all_gather(scalars, torch.tensor(here()))
    return plain, later, scalars


def all_gather_into_tensors() -> Any:
    x = mine(2, 3)
    joined, later, flat = torch.zeros(6, 3), torch.zeros(6, 3), torch.zeros(3)
    dist.all_gather_into_tensor(joined, x)
    dist.all_gather_into_tensor(later, x, async_op=True).wait()
    dist.all_gather_into_tensor(flat, torch.tensor(float(here())).reshape(1))
    return joined, later, flat


def gathers() -> Any:
    x = mine(2)
    into = like(x) if here() == 1 else None
    dist.gather(x, into, dst=1)
    return into


def scatters() -> Any:
    into = torch.zeros(2)
    dist.scatter(into, [torch.full((2,), float(r)) for r in range(3)] if here() == 2 else None, src=2)
    return into


def reduce_scatters() -> Any:
    into, later = torch.zeros(2), torch.zeros(2)
    dist.reduce_scatter(into, [mine(2) + r for r in range(3)])
    dist.reduce_scatter(later, [mine(2) + r for r in range(3)], op=dist.ReduceOp.MAX, async_op=True).wait()
    return into, later


def reduce_scatter_tensors() -> Any:
    rows, later = torch.zeros(2, 2), torch.zeros(2, 2)
    dist.reduce_scatter_tensor(rows, mine(6, 2))
    dist.reduce_scatter_tensor(later, mine(6, 2), async_op=True).wait()
    return rows, later


def all_to_alls() -> Any:
    into = like(mine(2))
    dist.all_to_all(into, [mine(2) + 100 * r for r in range(3)])
    return into


def all_to_all_singles() -> Any:
    even, later = torch.zeros(6), torch.zeros(6)
    dist.all_to_all_single(even, mine(6))
    dist.all_to_all_single(later, mine(6), async_op=True).wait()
    return even, later


UNEVEN = [[1, 0, 3], [2, 2, 0], [0, 3, 1]]


def uneven_all_to_all_singles() -> Any:
    sent, received = UNEVEN[here()], [row[here()] for row in UNEVEN]
    into = torch.zeros(sum(received), 2)
    dist.all_to_all_single(into, mine(sum(sent), 2), received, sent)
    return into


def barriers() -> Any:
    dist.barrier()
    dist.barrier(async_op=True).wait()
    dist.monitored_barrier()
    return here()


def one_then_another_in_flight() -> Any:
    x, y = mine(2), mine(3)
    works = [dist.all_reduce(x, async_op=True), dist.broadcast(y, 1, async_op=True), dist.barrier(async_op=True)]
    for work in reversed(works):
        work.wait()
    return x, y


# -- messages


def sends_and_receives() -> Any:
    into = torch.zeros(2)
    after_me, before_me = (here() + 1) % 3, (here() - 1) % 3
    work = dist.isend(mine(2), after_me)
    source = dist.recv(into, before_me)
    work.wait()
    return into, source


def blocking_sends() -> Any:
    x = mine(2)
    if here() == 0:
        dist.send(x, 1)
        dist.send(x + 1, 2, tag=7)
    if here() == 1:
        dist.recv(x, 0)
    if here() == 2:
        dist.recv(x, src=0, tag=7)
    return x


def receives_from_anyone() -> Any:
    if here():
        dist.send(mine(1), 0)
        return None
    got = []
    for _ in range(2):
        into = torch.zeros(1)
        got.append((dist.recv(into), into.item()))
    return sorted(got)


def tags_out_of_order() -> Any:
    x, y = mine(1), mine(1)
    if here() == 0:
        works = [dist.isend(torch.ones(1), 1, tag=1), dist.isend(torch.full((1,), 2.0), 1, tag=2)]
        for work in works:
            work.wait()
    if here() == 1:
        second, first = dist.irecv(y, 0, tag=2), dist.irecv(x, 0, tag=1)
        second.wait()
        first.wait()
    return x, y


def batched_messages() -> Any:
    into = torch.zeros(2)
    works = dist.batch_isend_irecv([
        dist.P2POp(dist.isend, mine(2), (here() + 1) % 3), dist.P2POp(dist.irecv, into, (here() - 1) % 3),
    ])  # fmt: skip
    for work in works:
        work.wait()
    return into


def messages_of_nothing_and_of_every_dtype() -> Any:
    got = []
    for x in (torch.ones(0), torch.tensor(here()), mine(2, dtype=torch.int16), mine(2, dtype=torch.complex64)):
        if here() == 0:
            dist.send(x, 1)
        if here() == 1:
            dist.recv(x, 0)
        got.append(x)
    return got


# -- objects


def objects_gathered() -> Any:
    everywhere: list[Any] = [None] * 3
    dist.all_gather_object(everywhere, {"rank": here(), "x": mine(2)})
    at_one: list[Any] | None = [None] * 3 if here() == 1 else None
    dist.gather_object("x" * (here() + 1), at_one, dst=1)
    return everywhere, at_one


def objects_broadcast() -> Any:
    objects: list[Any] = [{"a": 1}, (2, "b"), None] if here() == 2 else [None, None, None]
    dist.broadcast_object_list(objects, src=2)
    return objects


def objects_scattered() -> Any:
    into: list[Any] = [None]
    dist.scatter_object_list(into, [["a"], {"b": 1}, None] if here() == 0 else None, src=0)
    return into


def objects_sent() -> Any:
    objects: list[Any] = [here(), "x" * here()] if here() == 1 else [None, None]
    if here() == 1:
        dist.send_object_list(objects, dst=2)
    if here() == 2:
        dist.recv_object_list(objects, src=1)
    return objects


# -- many at once


def coalesced_all_reduces() -> Any:
    x, y = mine(2), mine(3)
    with c10d._coalescing_manager():
        dist.all_reduce(x)
        dist.all_reduce(y)
    return x, y


def coalesced_later() -> Any:
    x, y = mine(2), mine(3)
    with c10d._coalescing_manager(async_ops=True) as manager:
        dist.all_reduce(x)
        dist.all_reduce(y)
    manager.wait()
    return x, y


def coalesced_all_gathers() -> Any:
    x, y = torch.zeros(6), torch.zeros(3, 2)
    with c10d._coalescing_manager():
        dist.all_gather_into_tensor(x, mine(2))
        dist.all_gather_into_tensor(y, mine(1, 2))
    return x, y


def coalesced_reduce_scatters() -> Any:
    x, y = torch.zeros(2), torch.zeros(1, 2)
    with c10d._coalescing_manager():
        dist.reduce_scatter_tensor(x, mine(6))
        dist.reduce_scatter_tensor(y, mine(3, 2))
    return x, y


# -- functional collectives


def functional_ones() -> Any:
    world = dist.group.WORLD
    return [
        functional.all_reduce(mine(2), "sum", world) + 0,
        functional.all_gather_tensor(mine(2, 3), 0, world) + 0,
        functional.all_gather_tensor(mine(2, 3), 1, world) + 0,
        functional.reduce_scatter_tensor(mine(3, 3), "sum", 0, world) + 0,
        functional.reduce_scatter_tensor(mine(2, 3), "max", 1, world) + 0,
        functional.broadcast(mine(2), 1, world) + 0,
        functional.all_to_all_single(mine(3), None, None, world) + 0,
        functional.permute_tensor(mine(2), [1, 2, 0], world) + 0,
    ]


def functional_lists() -> Any:
    world = dist.group.WORLD
    return [
        [x + 0 for x in functional.all_reduce_coalesced([mine(2), mine(3)], "sum", world)],
        [x + 0 for x in functional.all_gather_into_tensor_coalesced([mine(2), mine(1, 2)], world)],
        [x + 0 for x in functional.reduce_scatter_tensor_coalesced([mine(3), mine(6)], "sum", [0, 0], world)],
    ]


def functional_uneven_all_to_all() -> Any:
    sent, received = UNEVEN[here()], [row[here()] for row in UNEVEN]
    return functional.all_to_all_single(mine(4)[: sum(sent)], received, sent, dist.group.WORLD) + 0


def functional_backwards() -> Any:
    world = dist.group.WORLD
    given = []
    for call in (
        lambda x: functional.all_gather_tensor_autograd(x, 0, world),
        lambda x: functional.reduce_scatter_tensor_autograd(x, "sum", 0, world),
        lambda x: functional.all_to_all_single_autograd(x, [1, 1, 1], [1, 1, 1], world),
    ):
        x = mine(3).requires_grad_()
        y = call(x)
        (y * (torch.arange(len(y)) + here())).sum().backward()
        given.append((y.detach() + 0, x.grad))
    return given


def shard_dims_exchanged() -> Any:
    import torch.distributed.tensor  # registers the op

    name = dist.group.WORLD.group_name
    given = torch.ops._dtensor.shard_dim_alltoall(mine(2, 3), 0, 1, name)
    return functional.wait_tensor(given) + 0


def differentiable_collectives() -> Any:
    import torch.distributed.nn.functional as nn

    given = []
    for call in (
        nn.all_reduce,
        lambda x: torch.stack(nn.all_gather(x)),
        lambda x: nn.broadcast(x, 1),
        lambda x: torch.stack(nn.all_to_all(like(x[:1]), list(x.reshape(3, 1).unbind()))),
        lambda x: nn.reduce_scatter(torch.zeros(1), list(x.reshape(3, 1).unbind())),
        lambda x: nn.all_to_all_single(torch.zeros(3), x),
        lambda x: nn.reduce(x, 1) if here() == 1 else nn.reduce(x, 1) * 0,
    ):
        x = mine(3).requires_grad_()
        y = call(x)
        (y.flatten() * (torch.arange(y.numel()) + here())).sum().backward()
        given.append((y.detach(), x.grad))
    return given


# -- groups and meshes


def subgroups() -> Any:
    evens = dist.new_group([0, 2])
    x = mine(2)
    if here() != 1:
        dist.all_reduce(x, group=evens)
        dist.broadcast(x, src=2, group=evens)
    place = dist.get_rank(evens), dist.get_world_size(evens) if here() != 1 else None
    if here() != 1:
        dist.destroy_process_group(evens)
    return x, place


def destroyed_groups_still_serve() -> Any:
    group = dist.new_group([0, 1, 2])
    dist.destroy_process_group(group)
    x = mine(2)
    dist.all_reduce(x, group=group)
    return x


def outsiders_are_let_through() -> Any:
    pair = dist.new_group([0, 1])
    x = mine(2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.all_reduce(x, group=pair)
    return x


def groups_in_another_order() -> Any:
    group = dist.new_group([2, 0, 1])
    into = torch.zeros(3)
    dist.all_gather_into_tensor(into, mine(1), group=group)
    return into, dist.get_rank(group), dist.get_process_group_ranks(group)


def local_groups() -> Any:
    x = mine(2)
    if here() != 2:
        group = dist.new_group([0, 1], use_local_synchronization=True)
        dist.all_reduce(x, group=group)
    return x


def four_in_subgroups() -> Any:
    group, everyone = dist.new_subgroups(2)
    other, _ = dist.new_subgroups_by_enumeration([[0, 3], [1, 2]])
    x, y = mine(2), mine(2)
    dist.all_reduce(x, group=group)
    dist.all_reduce(y, group=other)
    return x, y, [dist.get_process_group_ranks(one) for one in everyone]


def four_on_a_mesh() -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    x, y, z = mine(2), mine(2), mine(2)
    dist.all_reduce(x, group=mesh.get_group("dp"))
    dist.all_reduce(y, group=mesh["tp"].get_group())
    dist.all_reduce(z, group=mesh._flatten("all").get_group())
    return x, y, z, mesh.get_coordinate(), mesh.get_local_rank("tp"), mesh.size(0)


def four_redistribute() -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    x = distribute_tensor(torch.arange(20.0).reshape(5, 4), mesh, [Shard(0), Shard(1)])
    y = x.redistribute(mesh, [Shard(1), Replicate()])
    return x.to_local(), y.to_local(), (x @ x.t()).full_tensor(), x.sum().full_tensor()


def properties() -> Any:
    return (
        dist.get_backend(), dist.get_rank(), dist.get_world_size(), dist.is_initialized(), dist.is_available(),
        dist.get_node_local_rank(), dist.get_process_group_ranks(dist.group.WORLD),
        dist.get_global_rank(dist.group.WORLD, 1), dist.get_group_rank(dist.group.WORLD, 2), dist.get_pg_count(),
    )  # fmt: skip


def groups_initialised_by_the_program() -> Any:
    dist.init_process_group("gloo")
    x = mine(2)
    dist.all_reduce(x)
    dist.destroy_process_group()
    return x, dist.is_initialized()


def groups_initialised_again() -> Any:
    totals = []
    for times in (1, 2):
        dist.init_process_group("gloo", init_method="env://")
        x = mine(2) * times
        dist.all_reduce(x)
        totals.append(x)
        dist.destroy_process_group()
    return totals


WITH_THREE = [
    all_reduces, all_reduces_of_every_dtype, all_reduce_of_nothing_and_of_a_scalar, one_element_in_other_dims, all_reduce_across_memory,
    all_reduce_later, all_reduce_by_future, all_reduce_coalesced, all_reduce_of_requires_grad, reduces, broadcasts,
    all_gathers, all_gather_into_tensors, gathers, scatters, reduce_scatters, reduce_scatter_tensors, all_to_alls,
    all_to_all_singles, uneven_all_to_all_singles, barriers, one_then_another_in_flight, sends_and_receives,
    blocking_sends, receives_from_anyone, tags_out_of_order, batched_messages,
    messages_of_nothing_and_of_every_dtype, objects_gathered, objects_broadcast, objects_scattered, objects_sent,
    coalesced_all_reduces, coalesced_later, coalesced_all_gathers, coalesced_reduce_scatters, functional_ones,
    functional_lists, functional_uneven_all_to_all, functional_backwards, shard_dims_exchanged,
    differentiable_collectives, subgroups, destroyed_groups_still_serve, outsiders_are_let_through, groups_in_another_order, local_groups,
    properties, groups_initialised_by_the_program, groups_initialised_again,
]  # fmt: skip
WITH_FOUR = [four_in_subgroups, four_on_a_mesh, four_redistribute]
