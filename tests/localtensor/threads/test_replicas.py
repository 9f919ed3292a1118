"""Replicas that diverge are named; shards, experts, stages and partitions are not accused."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import localtensor as lt
from localtensor.errors import RanksDisagree, UnknownWay
from localtensor.threads.replicas import FIRST, MOST_REDUCED, THEN_EACH, ReplicaWatch


def gradients(model, group=None, average=None):
    """Backward of a loss of the rank's own data; then the average of the gradients of `average`, or of all."""
    data = torch.randn(8, 4, generator=torch.Generator().manual_seed(dist.get_rank()))
    model.zero_grad()
    model(data).square().mean().backward()
    for parameter in model.parameters() if average is None else average:
        dist.all_reduce(parameter.grad.data, group=group)
        parameter.grad /= dist.get_world_size(group)


def training(model, steps=3, average=None, skip=(), group=None):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        gradients(model, group, average)
        if (dist.get_rank(), step) not in skip:
            optimizer.step()


def linear(seed=3):
    torch.manual_seed(seed)
    return nn.Linear(4, 2)


def other_seeds():
    training(linear(dist.get_rank()))


def a_step_is_skipped():
    training(linear(), skip={(1, 1)})


def in_views_of_one_bucket():
    """Gradients that are views of a bucket, which one call reduces, as DistributedDataParallel does."""
    model = linear(dist.get_rank() % 2)
    bucket = torch.zeros(10)
    model.weight.grad, model.bias.grad = bucket[:8].view(2, 4), bucket[8:]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad(set_to_none=False)
        model(torch.ones(1, 4)).sum().backward()
        dist.all_reduce(bucket)
        optimizer.step()


def in_one_coalesced_call():
    model = linear(dist.get_rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model.zero_grad()
        model(torch.ones(1, 4)).sum().backward()
        dist.all_reduce_coalesced([parameter.grad for parameter in model.parameters()])
        optimizer.step()


def in_a_module(skipped=1, steps=3, **options):
    """DistributedDataParallel averages; one rank skips a step."""
    model = DistributedDataParallel(linear(), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.randn(2, 4)).square().mean().backward()
        if (dist.get_rank(), step) != (1, skipped):
            optimizer.step()


def in_a_module_with_views_of_buckets():
    in_a_module(gradient_as_bucket_view=True)


def late():
    """After the steps at which all parameters are compared."""
    in_a_module(FIRST + 3, FIRST + 8)


def a_gradient_is_divided_by_the_ranks_own_count():
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        gradients(model)
        for parameter in model.parameters():
            parameter.grad /= 1 + dist.get_rank()
        optimizer.step()


WRONG = [
    other_seeds, a_step_is_skipped, in_views_of_one_bucket, in_one_coalesced_call, in_a_module,
    in_a_module_with_views_of_buckets, late, a_gradient_is_divided_by_the_ranks_own_count,
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*all_reduce_coalesced")
@pytest.mark.parametrize("program", WRONG)
@pytest.mark.parametrize("schedule", [None, lt.shuffled(1)])
def test_replicas_that_differ_are_named_without_a_line_of_the_programs(program, schedule):
    with pytest.raises(RanksDisagree, match=r"optimizer\.step: parameter 0 of SGD: .*their gradients are averaged"):
        lt.run(program, ranks=3, schedule=schedule)
    lt.run(program, ranks=3, schedule=schedule, replicas="ignore")


def test_the_message_names_rank_and_line():
    with pytest.raises(RanksDisagree) as found:
        lt.run(a_step_is_skipped, ranks=3)
    text = str(found.value)
    assert "Likely culprit: rank 1; ranks 0, 2 agree." in text
    assert "test_replicas.py" in text and " in training" in text
    assert "f32[2,4] " in text


def right():
    training(linear())


def experts():
    """A part that all ranks share, and one of each rank's own, which begins equal and is not averaged."""
    model = nn.Sequential(linear(), nn.Linear(2, 2))
    training(model, average=model[0].parameters())


def shards():
    """Each rank's own columns; nothing is averaged, and the gradients of a sum are equal on all ranks."""
    torch.manual_seed(dist.get_rank())
    own = nn.Linear(4, 2)
    optimizer = torch.optim.Adam(own.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        y = own(torch.ones(3, 4))
        dist.all_reduce(y.detach())
        y.sum().backward()
        optimizer.step()


def halves():
    """Two models, each with replicas on two ranks."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = dist.get_rank() // 2
    training(linear(mine), group=groups[mine])
    dist.destroy_process_group()


def partitions():
    """ZeRO 1: each rank steps its own parameter, and the others get it by broadcast."""
    rank = dist.get_rank()
    model = nn.ParameterList([torch.ones(3), torch.zeros(3), torch.ones(3), torch.zeros(3)])
    optimizer = torch.optim.SGD([model[rank]], lr=0.1)
    for step in range(4):
        for number, parameter in enumerate(model):
            parameter.grad = torch.full((3,), float(rank + step + number))
            dist.all_reduce(parameter.grad)
        optimizer.step()
        for number, parameter in enumerate(model):
            dist.broadcast(parameter.data, number)
    assert all(len(set(parameter.tolist())) == 1 for parameter in model)


def memory_that_is_used_again():
    """A sum of the ranks' losses is freed, and gradients that are not averaged may get its memory."""
    torch.manual_seed(dist.get_rank())
    weight = nn.Parameter(torch.rand(()))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(20):
        loss = torch.ones(())
        dist.all_reduce(loss)
        del loss
        optimizer.zero_grad()
        (weight * 2).backward()
        optimizer.step()


def norms_of_gradients():
    """Each rank's own model: the sum of the norms is no gradient."""
    model = linear(dist.get_rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        gradients(model, average=())
        total = torch.stack([p.grad.norm() ** 2 for p in model.parameters()]).sum()
        dist.all_reduce(total)
        for p in model.parameters():
            p.grad.div_(total.sqrt())
        optimizer.step()


@pytest.mark.parametrize(
    "program", [right, experts, shards, halves, partitions, memory_that_is_used_again, norms_of_gradients]
)
def test_what_is_no_replica_is_not_accused(program):
    assert len(lt.run(program, ranks=4, schedule=lt.shuffled(2), leftovers="ignore")) == 4


def test_all_parameters_are_checked_on_demand():
    def forgotten():
        model = linear()
        training(model, average=[model.weight])

    lt.run(forgotten, ranks=2)
    with pytest.raises(RanksDisagree, match=r"optimizer\.step: parameter 1 of SGD: "):
        lt.run(forgotten, ranks=2, replicas="check")
    lt.run(right, ranks=4, replicas="check")


def test_another_word_is_refused():
    with pytest.raises(UnknownWay, match="run: replicas: replicas='always': there is no such choice"):
        lt.run(right, ranks=2, replicas="always")


def test_a_watch_lets_go_of_storages_that_are_gone():
    class Part:
        rank, group, number = 0, None, 0

    class Simulated:
        ranks = 1

    watch = ReplicaWatch(Simulated(), every=False)
    kept = torch.ones(1)
    watch.note(Part(), [kept])
    for _ in range(3000):
        watch.note(Part(), [torch.ones(1)])
    sums = watch._ranks[0].sums
    assert len(sums) <= MOST_REDUCED and kept.untyped_storage()._cdata in sums


def test_the_hooks_of_optimizers_are_as_before_after_a_run():
    from torch.optim import optimizer

    before = dict(optimizer._global_optimizer_pre_hooks), dict(optimizer._global_optimizer_post_hooks)
    lt.run(right, ranks=2)
    assert (dict(optimizer._global_optimizer_pre_hooks), dict(optimizer._global_optimizer_post_hooks)) == before


def test_the_parts_of_torch_that_the_watch_uses_are_there():
    assert torch.autograd._engine_run_backward is torch.autograd.graph._engine_run_backward
    assert "_engine_run_backward" in torch.autograd.backward.__code__.co_names


def test_a_parameter_behind_the_first_is_compared_at_some_steps():
    def second_differs():
        model = nn.Sequential(linear(), nn.LayerNorm(2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(THEN_EACH):
            gradients(model)
            if (dist.get_rank(), step) == (1, 12):
                with torch.no_grad():
                    model[1].bias += 1
            optimizer.step()

    with pytest.raises(RanksDisagree, match=r"optimizer\.step: parameter 3 of SGD: "):
        lt.run(second_differs, ranks=2)
