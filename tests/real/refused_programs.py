"""What gloo or torch refuses, one small program each, of two ranks: the simulation refuses it too."""

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from tests.real.api_programs import here, like, mine


def max_of_complex() -> Any:
    dist.all_reduce(mine(2, dtype=torch.complex64), dist.ReduceOp.MAX)


def bits_of_floats() -> Any:
    dist.all_reduce(mine(2), dist.ReduceOp.BOR)


def int16() -> Any:
    dist.all_reduce(mine(2, dtype=torch.int16))


def float8() -> Any:
    dist.all_reduce(torch.zeros(2).to(torch.float8_e4m3fn))


def sparse_broadcast() -> Any:
    dist.broadcast(mine(2).to_sparse(), 0)


def not_a_tensor() -> Any:
    dist.all_reduce([1, 2])


def root_outside() -> Any:
    dist.broadcast(mine(2), 2)


def negative_root() -> Any:
    dist.reduce(mine(2), -1)


def root_named_twice() -> Any:
    dist.broadcast(mine(2), src=0, group_src=0)


def no_root() -> Any:
    dist.broadcast(mine(2))


def short_list() -> Any:
    dist.all_gather([torch.zeros(2)], mine(2))


def long_list() -> Any:
    dist.all_gather([torch.zeros(2)] * 3, mine(2))


def wrong_buffers() -> Any:
    dist.all_gather([torch.zeros(3), torch.zeros(3)], mine(2))


def buffers_of_another_dtype() -> Any:
    dist.all_gather([torch.zeros(2, dtype=torch.int64)] * 2, mine(2))


def short_buffer_to_gather_into() -> Any:
    dist.all_gather_into_tensor(torch.zeros(3), mine(2))


def other_dtype_to_gather_into() -> Any:
    dist.all_gather_into_tensor(torch.zeros(4, dtype=torch.int64), mine(2))


def no_list_at_the_root_of_gather() -> Any:
    dist.gather(mine(2), None, dst=0)


def list_beside_the_root_of_gather() -> Any:
    dist.gather(mine(2), like(mine(2)), dst=0)


def no_list_at_the_root_of_scatter() -> Any:
    dist.scatter(torch.zeros(2), None, src=0)


def list_beside_the_root_of_scatter() -> Any:
    dist.scatter(torch.zeros(2), like(mine(2)), src=0)


def scatter_of_other_shapes() -> Any:
    dist.scatter(torch.zeros(2), [torch.zeros(3), torch.zeros(3)] if here() == 0 else None, src=0)


def short_reduce_scatter() -> Any:
    dist.reduce_scatter(torch.zeros(2), [mine(2)])


def reduce_scatter_into_another_shape() -> Any:
    dist.reduce_scatter(torch.zeros(3), [mine(2), mine(2)])


def uneven_reduce_scatter_tensor() -> Any:
    dist.reduce_scatter_tensor(torch.zeros(2), mine(5))


def all_to_all_of_too_few() -> Any:
    dist.all_to_all([torch.zeros(2)], [mine(2)])


def all_to_all_into_other_shapes() -> Any:
    dist.all_to_all([torch.zeros(3), torch.zeros(3)], [mine(2), mine(2)])


def splits_that_do_not_add_up() -> Any:
    dist.all_to_all_single(torch.zeros(4), mine(4), [2, 2], [1, 2])


def splits_of_too_few() -> Any:
    dist.all_to_all_single(torch.zeros(4), mine(4), [4], [4])


def splits_that_disagree() -> Any:
    dist.all_to_all_single(torch.zeros(4), mine(4), [3, 1], [3, 1] if here() else [2, 2])


def all_to_all_single_across_memory() -> Any:
    dist.all_to_all_single(torch.zeros(2, 2), mine(2, 2).t())


def all_to_all_single_of_another_dtype() -> Any:
    dist.all_to_all_single(torch.zeros(2, dtype=torch.int64), mine(2))


def send_to_oneself() -> Any:
    dist.send(mine(2), here())


def receive_from_oneself() -> Any:
    dist.recv(mine(2), here())


def send_outside() -> Any:
    dist.send(mine(2), 5)


def send_across_memory() -> Any:
    if here():
        dist.recv(mine(2, 2), 0)
    else:
        dist.send(mine(2, 2).t(), 1)


def receive_across_memory() -> Any:
    if here():
        dist.recv(mine(2, 2).t(), 0)
    else:
        dist.send(mine(2, 2), 1)


def negative_tag() -> Any:
    dist.send(mine(2), 1, tag=-1) if here() == 0 else dist.recv(mine(2), 0, tag=-1)


def empty_batch() -> Any:
    dist.batch_isend_irecv([])


def batch_of_others() -> Any:
    dist.batch_isend_irecv([1])


def batch_operation_that_is_none() -> Any:
    dist.P2POp(dist.all_reduce, mine(2), 0)


def object_that_cannot_travel() -> Any:
    dist.all_gather_object([None, None], lambda: 1)


def short_object_list() -> Any:
    dist.all_gather_object([None], 1)


def scattered_objects_of_too_few() -> Any:
    dist.scatter_object_list([None], [1] if here() == 0 else None, src=0)


def scattered_objects_into_nothing() -> Any:
    dist.scatter_object_list([], [1, 2], src=0)


def objects_broadcast_into_a_shorter_list() -> Any:
    dist.broadcast_object_list([1, 2] if here() == 0 else [None], src=0)


def no_list_at_the_root_of_gathered_objects() -> Any:
    dist.gather_object(1, None, dst=0)


def group_of_a_rank_twice() -> Any:
    dist.new_group([0, 0])


def group_of_a_rank_outside() -> Any:
    dist.new_group([0, 7])


def group_of_unknown_backend() -> Any:
    dist.new_group([0, 1], backend="smoke")


def subgroups_that_do_not_fit() -> Any:
    dist.new_subgroups(3)


def initialised_twice() -> Any:
    dist.init_process_group("gloo")
    dist.init_process_group("gloo")


def used_after_it_was_destroyed() -> Any:
    x = mine(2)
    dist.destroy_process_group()
    dist.all_reduce(x)


def mesh_larger_than_the_world() -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    init_device_mesh("cpu", (3,))


def mesh_of_one_name_twice() -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "a"))


def mesh_without_that_name() -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    init_device_mesh("cpu", (2,), mesh_dim_names=("a",))["b"]


def functional_gather_along_no_dim() -> Any:
    functional.all_gather_tensor(mine(2), 2, dist.group.WORLD) + 0


def functional_uneven_reduce_scatter() -> Any:
    functional.reduce_scatter_tensor(mine(3), "sum", 0, dist.group.WORLD) + 0


def functional_unknown_reduction() -> Any:
    functional.all_reduce(mine(2), "median", dist.group.WORLD) + 0


def functional_splits_that_do_not_add_up() -> Any:
    functional.all_to_all_single(mine(4), [2, 2], [1, 2], dist.group.WORLD) + 0


def permutation_outside() -> Any:
    functional.permute_tensor(mine(2), [1, 2], dist.group.WORLD) + 0


def shards_exchanged_unevenly() -> Any:
    import torch.distributed.tensor  # registers the op

    functional.wait_tensor(torch.ops._dtensor.shard_dim_alltoall(mine(2, 3), 0, 1, dist.group.WORLD.group_name))


def a_shape_of_its_own() -> Any:
    dist.all_reduce(mine(2 + here()))


def a_gathered_shape_of_its_own() -> Any:
    x = mine(2 + here())
    dist.all_gather(like(x), x)


def another_collective() -> Any:
    x = mine(2)
    dist.all_reduce(x) if here() else dist.all_gather(like(x), x)


def two_roots() -> Any:
    dist.broadcast(mine(2), here())


def one_collective_too_few() -> Any:
    dist.barrier()
    if here():
        dist.barrier()


def one_that_raises() -> Any:
    if here():
        raise ValueError("rank 1 has had enough")
    dist.barrier()


def one_that_returns_early_from_a_receive() -> Any:
    if here():
        dist.recv(mine(2), 0)


def a_circle_of_receives() -> Any:
    dist.recv(mine(2), 1 - here())


def a_missing_rank_at_a_monitored_barrier() -> Any:
    from datetime import timedelta

    if here() == 0:
        dist.monitored_barrier(timeout=timedelta(seconds=0.5))


# What gloo says, in part; "" where it hangs, "Died" where a process ends, and with | between where chance decides.
GLOO_SAYS = {
    max_of_complex: "does not support RedOpType.MAX on complex tensors", bits_of_floats: "BOR with non-integral dtype",
    int16: "Invalid scalar type", float8: "Invalid scalar type", sparse_broadcast: "'SparseCPU' backend",
    not_a_tensor: "Expected parameter `tensor` of type torch.Tensor", root_outside: "invalid root rank: 2",
    negative_root: "invalid root rank: -1", root_named_twice: "Can't specify both group_rank and global_rank",
    no_root: "Must specify global_rank or group_rank", short_list: "expected length 2, got 1",
    long_list: "expected length 2, got 3", wrong_buffers: "expected (2), got (3)",
    buffers_of_another_dtype: "tensors with different dtypes", short_buffer_to_gather_into: "invalid tensor size",
    other_dtype_to_gather_into: "invalid tensor type", no_list_at_the_root_of_gather: "must be specified on destination",
    list_beside_the_root_of_gather: "must NOT be specified", no_list_at_the_root_of_scatter: "must be specified on source",
    list_beside_the_root_of_scatter: "must NOT be specified", scatter_of_other_shapes: "expected (2), got (3)",
    short_reduce_scatter: "invalid input tensor list size", reduce_scatter_into_another_shape: "(3 vs. 2)",
    uneven_reduce_scatter_tensor: "(4 vs. 5)", all_to_all_of_too_few: "list size 1 does not match world size 2",
    all_to_all_into_other_shapes: "input and output tensors must have the same size",
    splits_that_do_not_add_up: "Split sizes doesn't match", splits_of_too_few: "splits not equal to group size",
    splits_that_disagree: "inLengthPerRank", all_to_all_single_across_memory: "Tensors must be contiguous",
    all_to_all_single_of_another_dtype: "tensors with different dtypes",
    send_to_oneself: "should not be the same as the rank", receive_from_oneself: "state_ >= CONNECTED",
    send_outside: "Died|hangs", send_across_memory: "has to be contiguous", receive_across_memory: "has to be contiguous",
    negative_tag: "Tag must be nonnegative", empty_batch: "list index out of range", batch_of_others: "p2p_op_list",
    batch_operation_that_is_none: "Invalid ``op``", short_object_list: "out of range",
    object_that_cannot_travel: "pickle|Can't get local object",  # Python 3.13.0 does not name pickle
    scattered_objects_of_too_few: "Incorrect input list size 1", scattered_objects_into_nothing: "of size at least 1",
    objects_broadcast_into_a_shorter_list: "Died", no_list_at_the_root_of_gathered_objects: "must be specified",
    group_of_a_rank_twice: "duplicate", group_of_a_rank_outside: "out of range", group_of_unknown_backend: "smoke",
    subgroups_that_do_not_fit: "must not exceed the world size", initialised_twice: "twice!",
    used_after_it_was_destroyed: "has not been initialized", mesh_larger_than_the_world: "bigger than default world",
    mesh_of_one_name_twice: "must be unique", mesh_without_that_name: "Invalid mesh_dim_name",
    functional_gather_along_no_dim: "Dimension out of range", functional_uneven_reduce_scatter: "multiple of group_size",
    functional_unknown_reduction: "Unrecognized reduce_op", functional_splits_that_do_not_add_up: "Split sizes doesn't",
    permutation_outside: "out of range", shards_exchanged_unevenly: "invalid for input of size",
    a_shape_of_its_own: "Connection closed|hangs", a_gathered_shape_of_its_own: "Died|Connection|invalid tensor size",
    another_collective: "", two_roots: "", one_collective_too_few: "Connection closed by peer", one_that_raises: "has had enough",
    one_that_returns_early_from_a_receive: "Connection closed by peer", a_circle_of_receives: "",
    a_missing_rank_at_a_monitored_barrier: "failed to pass monitoredBarrier",
}  # fmt: skip
