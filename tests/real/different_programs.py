"""Where the simulation differs from gloo on purpose: one small program of two ranks each, and the reason."""

from typing import Any

import torch
import torch.distributed as dist

from tests.real.api_programs import here, like, mine

# -- gloo refuses, we answer as torch's documentation says and NCCL does


def a_scaled_sum() -> Any:
    x = mine(2)
    dist.all_reduce(x, dist._make_nccl_premul_sum(0.5))
    return x.tolist()


def a_stacked_all_gather() -> Any:
    into = torch.zeros(2, 3)
    dist.all_gather_into_tensor(into, mine(3))
    return into.tolist()


def a_stacked_reduce_scatter() -> Any:
    into = torch.zeros(3)
    dist.reduce_scatter_tensor(into, mine(2, 3))
    return into.tolist()


def uneven_lists() -> Any:
    sizes = [[1, 2], [2, 1]]
    into = [torch.zeros(row[here()]) for row in sizes]
    dist.all_to_all(into, [mine(size) for size in sizes[here()]])
    return [x.tolist() for x in into]


def a_group_split() -> Any:
    group = dist.split_group(dist.group.WORLD, [[0], [1]])
    return dist.get_process_group_ranks(group)


WE_ANSWER = {
    a_scaled_sum: ([[5, 6], [5, 6]], "PREMUL_SUM is NCCL's"),
    a_stacked_all_gather: ([[[0, 1, 2], [10, 11, 12]]] * 2, "documented; gloo takes the joined form only"),
    a_stacked_reduce_scatter: ([[10, 12, 14], [16, 18, 20]], "documented; gloo takes the joined form only"),
    uneven_lists: ([[[0], [10, 11]], [[0, 1], [10]]], "documented; NCCL sends each pair by itself"),
    a_group_split: ([[0], [1]], "torch splits NCCL's groups only, and simulated ones stand for those too"),
}


# -- gloo answers, we refuse


def all_reduce_of_a_column() -> Any:
    x = mine(4, 2)
    dist.all_reduce(x[:, 1])
    return x.tolist()


def broadcast_of_a_column() -> Any:
    x = mine(4, 2)
    dist.broadcast(x[:, 1], 0)
    return x.tolist()


def scatter_into_a_column() -> Any:
    x = mine(4, 2)
    dist.scatter(x[:, 1], like(mine(4)) if here() == 0 else None, src=0)
    return x.tolist()


def reduce_scatter_into_a_column() -> Any:
    x = mine(4, 2)
    dist.reduce_scatter(x[:, 1], like(mine(4)))
    return x.tolist()


def all_to_all_single_into_a_column() -> Any:
    x = mine(4, 2)
    dist.all_to_all_single(x[:, 1], mine(4))
    return x.tolist()


def all_reduce_of_an_expanded_tensor() -> Any:
    dist.all_reduce(mine(1).expand(3))


def all_reduce_of_two_dtypes() -> Any:
    dist.all_reduce(mine(2, dtype=torch.int32 if here() else torch.float32))


def all_reduce_of_two_reductions() -> Any:
    dist.all_reduce(mine(2), dist.ReduceOp.MAX if here() else dist.ReduceOp.SUM)


def all_reduce_of_other_shapes() -> Any:
    dist.all_reduce(mine(2, 3) if here() else mine(3, 2))


def a_message_of_another_dtype() -> Any:
    x = mine(2, dtype=torch.int32 if here() else torch.float32)
    dist.recv(x, 0) if here() else dist.send(x, 1)


def a_work_that_nobody_waits_for() -> Any:
    dist.all_reduce(mine(2), async_op=True)


def an_output_read_too_early() -> Any:
    x = mine(2)
    work = dist.all_reduce(x, async_op=True)
    total = x.sum()
    work.wait()
    return total is not None


def an_input_written_too_early() -> Any:
    x, into = mine(2), like(mine(2))
    work = dist.all_gather(into, x, async_op=True)
    x.zero_()
    work.wait()


BYTES = "gloo works on the memory as it lies, and leaves wrong numbers on every side; NCCL refuses it"
LATER = "the numbers depend on who is faster; this time it went well"
WE_REFUSE = {
    all_reduce_of_a_column: ("NotContiguous", BYTES), broadcast_of_a_column: ("NotContiguous", BYTES),
    scatter_into_a_column: ("NotContiguous", BYTES), reduce_scatter_into_a_column: ("NotContiguous", BYTES),
    all_to_all_single_into_a_column: ("NotContiguous", BYTES),
    all_reduce_of_an_expanded_tensor: ("NotContiguous", BYTES),
    all_reduce_of_two_dtypes: ("DtypeMismatch", "one rank's bits are read as the other's numbers"),
    all_reduce_of_two_reductions: ("ReduceOpMismatch", "each rank computes its own, and they disagree in silence"),
    all_reduce_of_other_shapes: ("ShapeMismatch", "rows are added to columns"),
    a_message_of_another_dtype: ("MessageMismatch", "one rank's bits are read as the other's numbers"),
    a_work_that_nobody_waits_for: ("WorkNotWaited", LATER), an_output_read_too_early: ("ReadBeforeWait", LATER),
    an_input_written_too_early: ("BufferReused", LATER),
}  # fmt: skip


# -- both answer, and not alike


def nan_in_a_minimum() -> Any:
    x = torch.tensor([float("nan"), 1.0] if here() else [1.0, float("nan")])
    dist.all_reduce(x, dist.ReduceOp.MIN)
    return x.isnan().tolist()


def what_reduce_leaves_beside_the_root() -> Any:
    x = mine(2)
    dist.reduce(x, 1)
    return x.tolist()


BOTH_ANSWER = {
    nan_in_a_minimum: ([[True, True]] * 2, "torch.minimum carries NaN on; gloo keeps what rank 0 happens to compare"),
    what_reduce_leaves_beside_the_root: ([[0, 1], [10, 12]], "torch promises nothing; gloo leaves half-done sums"),
}
