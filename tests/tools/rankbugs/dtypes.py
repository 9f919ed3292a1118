"""DtypeMismatch and ReduceOpMismatch: the sizes agree, the elements or the arithmetic do not."""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable
from torch import nn

from tests.tools.rankbugs.corpus import fault, right

SUM, MAX, MIN, PRODUCT = dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT


@fault("DtypeMismatch", ranks=2)
def one_rank_came_from_numpy():
    x = torch.ones(3) if dist.get_rank() == 0 else torch.from_numpy(torch.ones(3).double().numpy())
    dist.all_reduce(x)  # fault


@right(ranks=2)
def both_ranks_are_of_single_precision():
    x = torch.ones(3) if dist.get_rank() == 0 else torch.from_numpy(torch.ones(3).double().numpy()).float()
    dist.all_reduce(x)
    assert x.dtype == torch.float32 and x.tolist() == [2.0] * 3


@fault("DtypeMismatch", ranks=3)
def the_receivers_take_labels_for_floats():
    labels = torch.tensor([1, 0, 2]) if dist.get_rank() == 0 else torch.empty(3)
    dist.broadcast(labels, src=0)  # fault


@right(ranks=3)
def the_receivers_take_labels_for_labels():
    labels = torch.tensor([1, 0, 2]) if dist.get_rank() == 0 else torch.empty(3, dtype=torch.int64)
    dist.broadcast(labels, src=0)
    assert labels.tolist() == [1, 0, 2]


@fault("DtypeMismatch", ranks=4)
def the_last_rank_gathers_in_half_precision():
    x = torch.ones(2, dtype=torch.float16 if dist.get_rank() == 3 else torch.float32)
    out = x.new_empty(8)
    dist.all_gather_into_tensor(out, x)  # fault


@fault("DtypeMismatch", ranks=4)
def a_subgroup_mixes_precisions():
    left, right_half = dist.new_group([0, 1]), dist.new_group([2, 3])
    x = torch.ones(2)
    if dist.get_rank() == 2:
        x = x.double()
    dist.all_reduce(x, group=left if dist.get_rank() < 2 else right_half)  # fault


@right(ranks=4)
def each_subgroup_has_a_precision_of_its_own():
    left, right_half = dist.new_group([0, 1]), dist.new_group([2, 3])
    x = torch.ones(2)
    if dist.get_rank() >= 2:
        x = x.double()
    dist.all_reduce(x, group=left if dist.get_rank() < 2 else right_half)
    assert x.tolist() == [2.0, 2.0]


@fault("DtypeMismatch", ranks=2)
def a_functional_sum_of_two_precisions():
    x = torch.ones(4)
    y = functional.all_reduce(x.half() if dist.get_rank() else x, "sum", dist.group.WORLD)  # fault
    return y.float().sum()


@right(ranks=2)
def a_functional_sum_of_one_precision():
    x = torch.arange(4.0).half() if dist.get_rank() else torch.arange(4.0)
    y = functional.all_reduce(x.float(), "sum", dist.group.WORLD)
    assert (y + 0).tolist() == [0.0, 2.0, 4.0, 6.0]


@fault("DtypeMismatch", ranks=2)
def one_rank_runs_under_autocast():
    layer = nn.Linear(2, 2)
    with torch.autocast("cpu", torch.bfloat16, enabled=dist.get_rank() == 1):
        y = layer(torch.ones(3, 2)).detach()
    dist.all_reduce(y)  # fault


@right(ranks=2)
def both_ranks_run_under_autocast():
    layer = nn.Linear(2, 2)
    nn.init.constant_(layer.weight, 1.0)
    nn.init.zeros_(layer.bias)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(torch.ones(3, 2)).detach()
    dist.all_reduce(y)
    assert y.dtype == torch.bfloat16 and y.float().sum().item() == 24.0


@fault("DtypeMismatch", ranks=3)
def the_pieces_of_one_rank_are_short_integers():
    kind = torch.int32 if dist.get_rank() == 1 else torch.int64
    mine = torch.empty(2, dtype=kind)
    dist.reduce_scatter(mine, [torch.ones(2, dtype=kind) for _ in range(3)])  # fault


@right(ranks=3)
def the_pieces_of_all_ranks_are_integers():
    mine = torch.empty(2, dtype=torch.int32)
    dist.reduce_scatter(mine, [torch.full((2,), i, dtype=torch.int32) for i in range(3)])
    assert mine.tolist() == [3 * dist.get_rank()] * 2


@fault("DtypeMismatch", ranks=2)
def in_the_third_step_a_division_makes_floats():
    count = torch.tensor([8])
    for step in range(4):
        if step == 2 and dist.get_rank() == 0:
            count = count / 2
        dist.all_reduce(count)  # fault


@right(ranks=2)
def in_the_third_step_a_division_keeps_integers():
    count = torch.tensor([8])
    for step in range(4):
        if step == 2 and dist.get_rank() == 0:
            count = count // 2
        dist.all_reduce(count)
    assert count.tolist() == [96]


@fault("ReduceOpMismatch", ranks=2)
def one_rank_takes_the_maximum():
    x = torch.tensor([1.0, 5.0])
    if dist.get_rank() == 0:
        dist.all_reduce(x, SUM)  # fault
    else:
        dist.all_reduce(x, MAX)  # fault


@right(ranks=2)
def both_ranks_take_the_maximum_and_then_the_sum():
    x = torch.tensor([1.0, 5.0]) * (1 + dist.get_rank())
    dist.all_reduce(x, MAX)
    dist.all_reduce(x, SUM)
    assert x.tolist() == [4.0, 20.0]


@fault("ReduceOpMismatch", ranks=4)
def the_best_is_sought_from_both_ends():
    score = torch.tensor([0.25 * dist.get_rank()])
    best = MIN if dist.get_rank() == 2 else MAX
    dist.reduce(score, dst=1, op=best)  # fault


@right(ranks=4)
def the_best_is_sought_from_one_end_and_then_the_other():
    low = torch.tensor([0.25 * dist.get_rank()])
    high = low.clone()
    dist.all_reduce(low, MIN)
    dist.all_reduce(high, MAX)
    assert (low.item(), high.item()) == (0.0, 0.75)


def shared(x, op):
    y = functional.all_reduce(x, op, dist.group.WORLD)  # fault
    return y + 0


@fault("ReduceOpMismatch", ranks=3, helpers=(shared,))
def a_helper_is_told_another_reduction_on_rank_zero():
    return shared(torch.ones(2), "max" if dist.get_rank() == 0 else "sum")


@right(ranks=3)
def a_helper_is_told_one_reduction_after_another():
    x = torch.arange(2.0) + dist.get_rank()
    assert shared(x, "max").tolist() == [2.0, 3.0]
    assert shared(x, "sum").tolist() == [3.0, 6.0]


@fault("ReduceOpMismatch", ranks=2)
def one_rank_scatters_products():
    out = torch.empty(1)
    dist.reduce_scatter_tensor(out, torch.ones(2), PRODUCT if dist.get_rank() else SUM)  # fault


@right(ranks=2)
def both_ranks_scatter_products():
    out = torch.empty(1)
    dist.reduce_scatter_tensor(out, torch.tensor([2.0, 3.0]) + dist.get_rank(), PRODUCT)
    assert out.item() == (12.0 if dist.get_rank() else 6.0)


@fault("ReduceOpMismatch", ranks=4)
def in_one_pair_of_ranks_the_reductions_differ():
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    x = torch.tensor([3, 4])
    op = dist.ReduceOp.BOR if dist.get_rank() == 3 else dist.ReduceOp.BAND
    dist.all_reduce(x, op, group=pairs[dist.get_rank() // 2])  # fault


@right(ranks=4)
def each_pair_of_ranks_has_its_own_reduction():
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    x = torch.tensor([3, 4]) >> (dist.get_rank() % 2)
    op = dist.ReduceOp.BOR if dist.get_rank() >= 2 else dist.ReduceOp.BAND
    dist.all_reduce(x, op, group=pairs[dist.get_rank() // 2])
    assert x.tolist() == ([3, 6] if dist.get_rank() >= 2 else [1, 0])


@fault("ReduceOpMismatch", ranks=3)
def in_the_third_epoch_one_rank_sums_its_losses():
    for epoch in range(4):
        loss = torch.tensor(1.0 / (epoch + 1))
        if dist.get_rank() == 2 and epoch == 2:
            dist.all_reduce(loss, SUM)  # fault
        else:
            dist.all_reduce(loss, MIN)


@right(ranks=3)
def in_the_third_epoch_all_ranks_sum_their_losses():
    losses = []
    for epoch in range(4):
        loss = torch.tensor(4.0 * epoch)
        dist.all_reduce(loss, SUM if epoch == 2 else MIN)
        losses.append(loss.item())
    assert losses == [0.0, 4.0, 24.0, 12.0]


@fault("ReduceOpMismatch", ranks=3)
def a_sum_with_gradients_becomes_a_minimum_on_one_rank():
    x = torch.ones(2, requires_grad=True)
    y = differentiable.all_reduce(x, MIN if dist.get_rank() == 1 else SUM)  # fault
    y.sum().backward()


@fault("DtypeMismatch", ranks=4)
def the_counts_of_one_rank_are_short_integers():
    counts = torch.ones(4, dtype=torch.int32 if dist.get_rank() == 0 else torch.int64)
    dist.all_to_all_single(torch.empty_like(counts), counts)  # fault
