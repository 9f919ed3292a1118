"""KindMismatch: ranks meet in one group, each in a collective of its own kind."""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn

from tests.tools.rankbugs.corpus import fault, right


@fault("KindMismatch", ranks=2)
def one_reduces_and_the_other_gathers():
    x = torch.ones(2)
    if dist.get_rank() == 0:
        dist.all_reduce(x)  # fault
    else:
        dist.all_gather([torch.empty(2) for _ in range(2)], x)  # fault


@right(ranks=2)
def both_reduce_and_then_gather():
    x = torch.ones(2)
    dist.all_reduce(x)
    got = [torch.empty(2) for _ in range(2)]
    dist.all_gather(got, x)
    assert torch.stack(got).tolist() == [[2.0, 2.0], [2.0, 2.0]]


@fault("KindMismatch", ranks=4)
def the_last_rank_is_at_a_barrier():
    loss = torch.tensor([float(dist.get_rank())])
    if dist.get_rank() == dist.get_world_size() - 1:
        dist.barrier()  # fault
    dist.all_reduce(loss)


@right(ranks=4)
def every_rank_is_at_the_barrier():
    loss = torch.tensor([float(dist.get_rank())])
    dist.barrier()
    dist.all_reduce(loss)
    assert loss.item() == 6.0


@fault("KindMismatch", ranks=3)
def the_middle_rank_turns_the_order_round():
    weights, loss = torch.ones(3), torch.ones(3)
    if dist.get_rank() == 1:
        dist.all_reduce(loss)  # fault
        dist.broadcast(weights, src=0)
    else:
        dist.broadcast(weights, src=0)
        dist.all_reduce(loss)


@right(ranks=3)
def broadcast_and_then_reduce():
    weights, loss = torch.full((3,), float(dist.get_rank())), torch.ones(3)
    dist.broadcast(weights, src=1)
    dist.all_reduce(loss)
    assert (weights + loss).tolist() == [4.0, 4.0, 4.0]


@fault("KindMismatch", ranks=4)
def in_the_third_step_one_rank_reduces_to_the_root_only():
    total = torch.zeros(2)
    for step in range(5):
        gradient = torch.full((2,), float(step))
        if step == 2 and dist.get_rank() == 2:
            dist.reduce(gradient, dst=0)  # fault
        else:
            dist.all_reduce(gradient)
        total += gradient


@right(ranks=4)
def in_the_third_step_all_reduce_to_the_root_only():
    total = torch.zeros(2)
    for step in range(5):
        gradient = torch.full((2,), float(step))
        if step == 2:
            dist.reduce(gradient, dst=0)
        else:
            dist.all_reduce(gradient)
            total += gradient
    assert total.tolist() == [32.0, 32.0]


@fault("KindMismatch", ranks=3)
def rank_zero_skips_the_barrier_between():
    x = torch.arange(4)
    if dist.get_rank() != 0:
        dist.barrier()  # fault
    dist.all_reduce(x)  # fault


@fault("KindMismatch", ranks=2)
def the_data_decide_what_is_called():
    loss = torch.tensor(0.5 + dist.get_rank())
    if loss.item() > 1:
        dist.broadcast(loss, src=1)  # fault
    else:
        dist.all_reduce(loss)  # fault


@right(ranks=2)
def the_data_of_all_ranks_decide_what_is_called():
    loss = torch.tensor(0.5 + dist.get_rank())
    worst = loss.clone()
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    if worst.item() > 1:
        dist.broadcast(loss, src=1)
    else:
        dist.all_reduce(loss)
    assert loss.item() == 1.5


def reduced(x):
    if x.shape[0] % 2 == 0 and dist.get_rank() < 3:
        mine = x.new_empty(x.shape[0] // 4)
        dist.reduce_scatter_tensor(mine, x)
        return mine
    dist.all_reduce(x)  # fault
    return x


@fault("KindMismatch", ranks=4, helpers=(reduced,))
def a_helper_takes_another_path_on_the_last_rank():
    return reduced(torch.ones(8)).sum()


@fault("KindMismatch", ranks=4)
def within_one_subgroup_a_rank_broadcasts():
    low, high = dist.new_group([0, 1]), dist.new_group([2, 3])
    x = torch.ones(3)
    if dist.get_rank() < 2:
        dist.all_reduce(x, group=low)
    elif dist.get_rank() == 2:
        dist.all_reduce(x, group=high)  # fault
    else:
        dist.broadcast(x, src=2, group=high)  # fault


@right(ranks=4)
def each_subgroup_does_something_else():
    low, high = dist.new_group([0, 1]), dist.new_group([2, 3])
    x = torch.full((3,), float(dist.get_rank()))
    if dist.get_rank() < 2:
        dist.all_reduce(x, group=low)
        assert x.tolist() == [1.0, 1.0, 1.0]
    else:
        dist.broadcast(x, src=2, group=high)
        assert x.tolist() == [2.0, 2.0, 2.0]


@fault("KindMismatch", ranks=2)
def functional_calls_of_two_kinds():
    x = torch.arange(4.0)
    if dist.get_rank() == 0:
        y = functional.all_gather_tensor(x, 0, dist.group.WORLD)  # fault
    else:
        y = functional.all_reduce(x, "sum", dist.group.WORLD)  # fault
    return (y + 1).sum()


class SumGradients(torch.autograd.Function):
    @staticmethod
    def forward(_ctx, x):
        return x.clone()

    @staticmethod
    def backward(_ctx, gradient):
        gradient = gradient.clone()
        if gradient.shape[0] > 2:
            dist.all_reduce(gradient)
        elif dist.get_rank() == 1:
            dist.barrier()  # fault
        else:
            dist.reduce(gradient, dst=0)  # fault
        return gradient


@fault("KindMismatch", ranks=2, helpers=(SumGradients.backward,))
def the_backward_of_one_rank_goes_another_way():
    large, small = torch.ones(3, requires_grad=True), torch.ones(2, requires_grad=True)
    SumGradients.apply(large).sum().backward()
    SumGradients.apply(small).sum().backward()


@right(ranks=2)
def the_backward_of_both_ranks_sums_gradients():
    large = torch.ones(3, requires_grad=True)
    SumGradients.apply(large).mul(dist.get_rank() + 1).sum().backward()
    assert large.grad.tolist() == [3.0, 3.0, 3.0]


@fault("KindMismatch", ranks=2)
def two_works_begun_in_another_order():
    a, b = torch.ones(2), torch.zeros(2)
    if dist.get_rank() == 0:
        works = [dist.all_reduce(a, async_op=True)]  # fault
        works.append(dist.broadcast(b, src=0, async_op=True))
    else:
        works = [dist.broadcast(b, src=0, async_op=True)]  # fault
        works.append(dist.all_reduce(a, async_op=True))
    for work in works:
        work.wait()


class SharedNorm(nn.Module):
    def forward(self, x):
        mean = x.mean(0)
        if self.training:
            dist.all_reduce(mean)  # fault
            mean = mean / dist.get_world_size()
        return x - mean


@fault("KindMismatch", ranks=3, helpers=(SharedNorm.forward,))
def one_rank_forgot_to_go_back_to_training():
    model = SharedNorm()
    model.train(dist.get_rank() != 2)
    y = model(torch.ones(4, 2)).sum()
    dist.all_gather([torch.empty(()) for _ in range(3)], y)  # fault


@right(ranks=3)
def every_rank_went_back_to_training():
    model = SharedNorm()
    model.train()
    y = model(torch.full((4, 2), float(dist.get_rank()))).sum()
    got = [torch.empty(()) for _ in range(3)]
    dist.all_gather(got, y)
    assert [one.item() for one in got] == [-8.0, 0.0, 8.0]


@right(ranks=3)
def no_rank_is_in_training():
    model = SharedNorm().eval()
    y = model(torch.tensor([[float(dist.get_rank())], [5.0]]))
    dist.all_reduce(y)
    assert y.flatten().tolist() == [3 - 7.5 - 1.5, 15 - 7.5 - 1.5]


@fault("KindMismatch", ranks=2)
def objects_are_broadcast_and_gathered():
    if dist.get_rank() == 0:
        dist.broadcast_object_list([{"step": 1}], src=0)  # fault
    else:
        dist.all_gather_object([None, None], {"step": 1})  # fault


@fault("KindMismatch", ranks=3)
def a_handler_waits_at_a_barrier():
    try:
        x = torch.tensor([1.0, 2.0])
        if dist.get_rank() == 1:
            raise ValueError("bad sample")  # noqa: TRY301
        dist.all_reduce(x)
    except ValueError:
        dist.barrier()  # fault


@right(ranks=3)
def a_handler_makes_up_for_the_sample():
    try:
        if dist.get_rank() == 1:
            raise ValueError("bad sample")  # noqa: TRY301
        x = torch.tensor([1.0, 2.0])
    except ValueError:
        x = torch.zeros(2)
    dist.all_reduce(x)
    assert x.tolist() == [2.0, 4.0]


@fault("KindMismatch", ranks=8)
def the_sixth_of_eight_exchanges_instead_of_gathering():
    x, y = torch.arange(8.0), torch.empty(64)
    if dist.get_rank() == 5:
        dist.all_to_all_single(torch.empty(8), x)  # fault
    else:
        dist.all_gather_into_tensor(y, x)


@right(ranks=8)
def all_eight_gather_and_exchange():
    x, y, z = torch.arange(8.0) + dist.get_rank(), torch.empty(64), torch.empty(8)
    dist.all_gather_into_tensor(y, x)
    dist.all_to_all_single(z, x)
    assert y.view(8, 8)[3].tolist() == [3.0 + i for i in range(8)]
    assert z.tolist() == [float(i + dist.get_rank()) for i in range(8)]


@fault("KindMismatch", ranks=3)
def rank_zero_gathers_what_the_others_expect_to_get():
    x = torch.ones(2)
    if dist.get_rank() == 0:
        dist.gather(x, [torch.empty(2) for _ in range(3)], dst=0)  # fault
    else:
        dist.scatter(x, None, src=0)  # fault


@fault("KindMismatch", ranks=3)
def one_rank_clips_its_gradients_and_the_others_save_first():
    norm, state = torch.ones(1), [{"step": 1}]
    for step in range(3):
        if step == 2 and dist.get_rank() != 1:
            dist.broadcast_object_list(state, src=0)  # fault
        dist.all_reduce(norm)  # fault
