"""RanksDisagree without a line of the program's: copies of parameters that drift apart while gradients are averaged."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import localtensor as lt
from tests.tools.rankbugs.corpus import fault, right


def model(seed=3):
    torch.manual_seed(seed)
    return nn.Linear(4, 2)


def data(step=0):
    """Data of the rank's own."""
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))


def sgd(net, **options):
    return torch.optim.SGD(net.parameters(), lr=0.1, **options)


def gradients(net, step, group=None, average=True):
    net.zero_grad()
    net(data(step)).square().mean().backward()
    for weight in net.parameters() if average else ():
        dist.all_reduce(weight.grad, group=group)
        weight.grad /= dist.get_world_size(group)


def spread(net):
    """The largest distance between the ranks' parameters."""
    most = torch.zeros(1)
    for weight in net.parameters():
        low, high = weight.detach().clone(), weight.detach().clone()
        dist.all_reduce(low, dist.ReduceOp.MIN)
        dist.all_reduce(high, dist.ReduceOp.MAX)
        most = torch.maximum(most, (high - low).max())
    return most.item()


@fault("RanksDisagree", ranks=2)
def replicas_begin_with_the_rank_as_seed():
    net = model(dist.get_rank())
    optimizer = sgd(net)
    for step in range(3):
        gradients(net, step)
        optimizer.step()  # fault


@right(ranks=2)
def replicas_begin_with_a_broadcast():
    net = model(dist.get_rank())
    for weight in net.parameters():
        dist.broadcast(weight.data, src=0)
    optimizer = sgd(net)
    for step in range(3):
        gradients(net, step)
        optimizer.step()
    assert spread(net) == 0


@fault("RanksDisagree", ranks=4)
def a_rank_leaves_out_the_step_of_a_bad_batch():
    net = model()
    optimizer = sgd(net)
    for step in range(5):
        gradients(net, step)
        if not (dist.get_rank() == 2 and step == 1):
            optimizer.step()  # fault


@right(ranks=4)
def all_ranks_leave_out_the_step_of_a_bad_batch():
    net = model()
    optimizer = sgd(net)
    for step in range(5):
        bad = torch.tensor(float(dist.get_rank() == 2 and step == 1))
        dist.all_reduce(bad, dist.ReduceOp.MAX)
        gradients(net, step)
        if not bad:
            optimizer.step()
    assert spread(net) == 0


@fault("RanksDisagree", ranks=3)
def a_sum_is_divided_by_the_ranks_own_count():
    net = model()
    optimizer = sgd(net)
    for step in range(3):
        gradients(net, step)
        for weight in net.parameters():
            weight.grad /= 1 + dist.get_rank()
        optimizer.step()  # fault


@right(ranks=3)
def a_sum_is_divided_by_the_count_of_all():
    net = model()
    optimizer = sgd(net)
    count = torch.tensor(1.0 + dist.get_rank())
    dist.all_reduce(count)
    for step in range(3):
        gradients(net, step)
        for weight in net.parameters():
            weight.grad /= count
        optimizer.step()
    assert count == 6 and spread(net) == 0


@fault("RanksDisagree", ranks=2)
def noise_is_added_to_averaged_gradients():
    net = model()
    optimizer, noise = sgd(net), torch.Generator().manual_seed(dist.get_rank())
    for step in range(3):
        gradients(net, step)
        for weight in net.parameters():
            weight.grad += 0.01 * torch.randn(weight.shape, generator=noise)
        optimizer.step()  # fault


@right(ranks=2)
def noise_of_one_seed_is_added_to_averaged_gradients():
    net = model()
    optimizer, noise = sgd(net), torch.Generator().manual_seed(7)
    for step in range(3):
        gradients(net, step)
        for weight in net.parameters():
            weight.grad += 0.01 * torch.randn(weight.shape, generator=noise)
        optimizer.step()
    assert spread(net) == 0


@fault("RanksDisagree", ranks=3)
def the_rate_follows_the_ranks_own_loss():
    net = model()
    optimizer = sgd(net)
    for step in range(4):
        gradients(net, step)
        loss = net(data(step)).square().mean().item()
        optimizer.param_groups[0]["lr"] = 0.1 if loss > 0.4 else 0.01 * (1 + dist.get_rank())
        optimizer.step()  # fault


@right(ranks=3)
def the_rate_follows_the_mean_loss():
    net = model()
    optimizer = sgd(net)
    for step in range(4):
        gradients(net, step)
        loss = net(data(step)).square().mean().detach()
        dist.all_reduce(loss)
        optimizer.param_groups[0]["lr"] = 0.1 if loss > 1.2 else 0.02
        optimizer.step()
    assert spread(net) == 0


@fault("RanksDisagree", ranks=4)
def weights_are_dropped_with_the_ranks_own_mask():
    net = model()
    optimizer, mask = sgd(net), torch.Generator().manual_seed(dist.get_rank())
    for step in range(4):
        gradients(net, step)
        optimizer.step()  # fault
        net.weight.data *= torch.rand(2, 4, generator=mask) > 0.5


@right(ranks=4)
def activations_are_dropped_with_the_ranks_own_mask():
    net = nn.Sequential(model(), nn.Dropout(0.5))
    optimizer = sgd(net)
    torch.manual_seed(dist.get_rank())
    for step in range(4):
        gradients(net, step)
        optimizer.step()
    assert spread(net) == 0


@fault("RanksDisagree", ranks=2)
def the_first_rank_alone_loads_a_checkpoint():
    net = model()
    optimizer = sgd(net)
    for step in range(4):
        if step == 2 and dist.get_rank() == 0:
            net.load_state_dict(model(77).state_dict())
        gradients(net, step)
        optimizer.step()  # fault


@right(ranks=2)
def the_first_rank_loads_a_checkpoint_for_all():
    net = model()
    optimizer = sgd(net)
    for step in range(4):
        if step == 2:
            state = [model(77).state_dict() if dist.get_rank() == 0 else None]
            dist.broadcast_object_list(state, src=0)
            net.load_state_dict(state[0])
        gradients(net, step)
        optimizer.step()
    assert spread(net) == 0


@fault("RanksDisagree", ranks=3)
def a_rank_forgets_its_momentum():
    net = model()
    optimizer = sgd(net, momentum=0.9)
    for step in range(4):
        if step == 2 and dist.get_rank() == 1:
            optimizer = sgd(net, momentum=0.9)
        gradients(net, step)
        optimizer.step()  # fault


@right(ranks=3)
def all_ranks_forget_their_momentum():
    net = model()
    optimizer = sgd(net, momentum=0.9)
    for step in range(4):
        if step == 2:
            optimizer = sgd(net, momentum=0.9)
        gradients(net, step)
        optimizer.step()
    assert spread(net) == 0


@fault("RanksDisagree", ranks=4)
def halves_average_for_themselves_at_first():
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    net = model()
    optimizer = sgd(net)
    for step in range(5):
        gradients(net, step, halves[dist.get_rank() // 2] if step < 3 else None)
        optimizer.step()  # fault


@right(ranks=4)
def halves_average_for_themselves_and_meet():
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    net = model()
    optimizer = sgd(net)
    for step in range(5):
        gradients(net, step, halves[dist.get_rank() // 2] if step < 3 else None)
        optimizer.step()
        if step == 2:
            for weight in net.parameters():
                dist.all_reduce(weight.data)
                weight.data /= 4
    assert spread(net) == 0


@fault("RanksDisagree", ranks=2)
def a_wrapped_model_is_stepped_by_one_rank_only():
    net = DistributedDataParallel(model())
    optimizer = sgd(net)
    for step in range(4):
        gradients(net, step, average=False)
        if step != 1 or dist.get_rank() == 0:
            optimizer.step()  # fault


@right(ranks=2)
def a_wrapped_model_is_stepped_every_second_time():
    net = DistributedDataParallel(model())
    optimizer = sgd(net)
    for step in range(4):
        gradients(net, step, average=False)
        if step % 2:
            optimizer.step()
    assert spread(net) == 0


@fault("RanksDisagree", ranks=3)
def a_wrapped_model_is_changed_on_one_rank():
    net = DistributedDataParallel(model(), gradient_as_bucket_view=True)
    optimizer = sgd(net)
    for step in range(4):
        gradients(net, step, average=False)
        optimizer.step()  # fault
        if dist.get_rank() == 2 and step == 1:
            nn.init.ones_(net.module.bias)


@right(ranks=3)
def a_model_is_changed_on_one_rank_and_then_wrapped():
    net = model()
    if dist.get_rank() == 0:
        nn.init.ones_(net.bias)
    net = DistributedDataParallel(net)
    optimizer = sgd(net)
    for step in range(3):
        gradients(net, step, average=False)
        optimizer.step()
    assert spread(net) == 0


@fault("RanksDisagree", ranks=2)
def running_means_are_of_the_ranks_own_data():
    net = nn.BatchNorm1d(4)
    for step in range(3):
        net(data(step))
    lt.assert_same_on_all_ranks(net.running_mean)  # fault


@right(ranks=2)
def running_means_are_averaged():
    net = nn.BatchNorm1d(4)
    for step in range(3):
        net(data(step))
    dist.all_reduce(net.running_mean)
    net.running_mean /= 2
    lt.assert_same_on_all_ranks(net.running_mean)
    assert net.running_mean.abs().sum() > 0
