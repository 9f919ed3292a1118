"""Right programs beside the watch of replicas: parameters that differ on purpose, or for a while, are not accused."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import localtensor as lt

LONG = 10  # steps: more than those at which all parameters are compared


def data(step=0):
    """Data of the rank's own."""
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(100 * dist.get_rank() + step))


def linear(seed=3, outputs=2):
    torch.manual_seed(seed)
    return nn.Linear(4, outputs)


def sgd(*modules):
    return torch.optim.SGD([p for module in modules for p in module.parameters()], lr=0.1)


def backward(model, step):
    model(data(step)).square().mean().backward()


def reduce_gradients(*modules, group=None):
    for parameter in (p for module in modules for p in module.parameters()):
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad, group=group)
            parameter.grad /= dist.get_world_size(group)


def average(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.data)
        parameter.data /= dist.get_world_size()


def coalesced_gradients_of_one_shape():
    parameters = [nn.Parameter(torch.full((3,), float(i))) for i in range(4)]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    for step in range(4):
        for i, parameter in enumerate(parameters):
            parameter.grad = torch.full((3,), float(dist.get_rank() + i + step))
        dist.all_reduce_coalesced([parameter.grad for parameter in parameters])
        optimizer.step()


def a_part_of_a_flat_buffer_is_reduced():
    """The rest of it are gradients of an expert."""
    shared, own = nn.Parameter(torch.ones(4)), nn.Parameter(torch.full((4,), float(dist.get_rank())))
    flat = torch.zeros(8)
    shared.grad, own.grad = flat[:4], flat[4:]
    optimizer = torch.optim.SGD([shared, own], lr=0.1)
    for _ in range(4):
        flat.zero_()
        (shared.sum() + own.square().sum()).backward()
        dist.all_reduce(flat[:4])
        optimizer.step()


def gradients_are_summed_in_place_for_a_log():
    """After the step: the next backward pass begins with zeros in the same memory."""
    model = linear(dist.get_rank())
    optimizer = sgd(model)
    for step in range(4):
        optimizer.zero_grad(set_to_none=False)
        backward(model, step)
        optimizer.step()
        reduce_gradients(model)


def copies_of_gradients_are_summed_for_a_log():
    model = linear(dist.get_rank())
    optimizer = sgd(model)
    for step in range(4):
        optimizer.zero_grad()
        backward(model, step)
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad.clone())
        optimizer.step()


def two_parameters_have_one_gradient():
    a, b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([a, b], lr=0.1)
    for _ in range(4):
        a.grad = b.grad = torch.full((3,), float(dist.get_rank()))
        dist.all_reduce(a.grad)
        optimizer.step()


def several_steps_with_one_sum():
    model = linear()
    optimizer = sgd(model)
    for step in range(4):
        optimizer.zero_grad()
        backward(model, step)
        reduce_gradients(model)
        for _ in range(3):
            optimizer.step()


def local_sgd():
    model = linear()
    optimizer = sgd(model)
    for step in range(LONG):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
        if step % 3 == 2:
            average(model)


def local_sgd_after_averaged_gradients():
    """The gradients keep their memory."""
    model = linear()
    optimizer = sgd(model)
    for step in range(8):
        optimizer.zero_grad(set_to_none=False)
        backward(model, step)
        if step < 4:
            reduce_gradients(model)
        optimizer.step()


def an_outer_optimizer():
    """DiLoCo: the gradient of the outer step is the way that each rank has gone."""
    model = linear()
    kept = [parameter.detach().clone() for parameter in model.parameters()]
    inner, outer = torch.optim.AdamW(model.parameters()), torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9)
    for step in range(9):
        inner.zero_grad()
        backward(model, step)
        inner.step()
        if step % 3 == 2:
            for parameter, old in zip(model.parameters(), kept):
                parameter.grad, parameter.data = old - parameter.data, old.clone()
            reduce_gradients(model)
            outer.step()
            kept = [parameter.detach().clone() for parameter in model.parameters()]


def adversaries(make, reduce):
    generator, critic = make(linear(3, 4)), make(linear(4, 1))
    steps = [torch.optim.Adam(model.parameters()) for model in (generator, critic)]
    for step in range(LONG):
        steps[1].zero_grad()
        (critic(data(step)).mean() - critic(generator(data(step)).detach()).mean()).backward()
        reduce(critic)
        steps[1].step()
        steps[0].zero_grad()
        critic(generator(data(step))).mean().backward()
        reduce(generator)
        steps[0].step()


def adversaries_by_hand():
    adversaries(lambda model: model, reduce_gradients)


def adversaries_in_modules():
    adversaries(DistributedDataParallel, lambda model: None)


def tensor_parallel_shards():
    """A shard's gradients are averaged over another group than those of the layer in front of it."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = dist.get_rank() % 2
    norm, shard = linear(9, 4), linear(mine)
    optimizer = sgd(shard, norm)
    for step in range(LONG):
        optimizer.zero_grad()
        backward(nn.Sequential(norm, shard), step)
        reduce_gradients(norm)
        reduce_gradients(shard, group=groups[mine])
        optimizer.step()
    dist.destroy_process_group()


def a_norm_is_reduced_to_clip():
    model, own = linear(), linear(dist.get_rank())
    optimizer = sgd(model, own)
    for step in range(LONG):
        optimizer.zero_grad()
        backward(model, step)
        backward(own, step)
        reduce_gradients(model)
        gradients = [p.grad for one in (model, own) for p in one.parameters()]
        total = torch.stack([gradient.square().sum() for gradient in gradients]).sum()
        dist.all_reduce(total)
        for gradient in gradients:
            gradient.mul_(1 / total.sqrt())
        optimizer.step()


def frozen_parameters_differ():
    model = nn.Sequential(linear(dist.get_rank()).requires_grad_(False), nn.LayerNorm(2))
    optimizer = sgd(model)
    for step in range(4):
        optimizer.zero_grad()
        backward(model, step)
        reduce_gradients(model)
        optimizer.step()


def numbers_of_experts_differ():
    torch.manual_seed(dist.get_rank())
    own = nn.ModuleList(nn.Linear(4, 2) for _ in range(1 + dist.get_rank()))
    model = linear()
    optimizer = sgd(own, model)
    for step in range(LONG):
        optimizer.zero_grad()
        for one in (*own, model):
            backward(one, step)
        reduce_gradients(model)
        optimizer.step()


def parameters_are_disturbed_and_restored():
    model = linear()
    optimizer = sgd(model)
    for step in range(4):
        optimizer.zero_grad()
        kept = [parameter.detach().clone() for parameter in model.parameters()]
        for parameter in model.parameters():
            parameter.data += 0.01 * dist.get_rank()
        backward(model, step)
        for parameter, old in zip(model.parameters(), kept):
            parameter.data.copy_(old)
        reduce_gradients(model)
        optimizer.step()


def gradients_are_reduced_in_hooks():
    model = linear()
    optimizer = sgd(model)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad) and None)
    for step in range(4):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()


def an_optimizer_with_a_closure():
    model = linear()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)

    def loss():
        optimizer.zero_grad()
        value = model(data()).square().mean()
        value.backward()
        reduce_gradients(model)
        mean = value.detach().clone()
        dist.all_reduce(mean)
        return mean

    for _ in range(3):
        optimizer.step(loss)


def local_steps_of_a_module(**options):
    model = DistributedDataParallel(linear(), **options)
    optimizer = sgd(model)
    for step in range(10):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        if step < 3:
            backward(model, step)
        else:
            with model.no_sync():
                backward(model, step)
        dist.all_reduce(torch.ones(()))
        optimizer.step()
        if step % 4 == 3:
            average(model)


def local_steps_with_views_of_buckets():
    local_steps_of_a_module(gradient_as_bucket_view=True)


def gradients_are_accumulated():
    model = DistributedDataParallel(linear())
    optimizer = sgd(model)
    for step in range(9):
        model.require_backward_grad_sync = step % 3 == 2
        backward(model, step)
        if step % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()


def a_hook_averages_within_halves():
    """Post-local SGD: the module has all ranks, and after three steps its hook averages over half of them."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = DistributedDataParallel(linear())
    state = PostLocalSGDState(None, halves[dist.get_rank() // 2], start_localSGD_iter=3)
    model.register_comm_hook(state, post_localSGD_hook)
    optimizer = sgd(model)
    for step in range(8):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
    dist.destroy_process_group()


def ranks_have_other_numbers_of_batches():
    model = DistributedDataParallel(linear())
    optimizer = sgd(model)
    with Join([model]):
        for step in range(5 + dist.get_rank()):
            optimizer.zero_grad()
            backward(model, step)
            optimizer.step()


def an_optimizer_in_partitions():
    model = DistributedDataParallel(nn.Sequential(linear(), nn.Linear(2, 3), nn.Linear(3, 1)))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
    for step in range(LONG):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()


def each_parameter_has_an_optimizer():
    model = DistributedDataParallel(nn.Sequential(linear(), nn.Linear(2, 3)))
    optimizers = [torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()]
    for step in range(LONG):
        model.zero_grad()
        backward(model, step)
        for optimizer in optimizers:
            optimizer.step()


def a_module_on_each_half():
    halves, mine = [dist.new_group([0, 1]), dist.new_group([2, 3])], dist.get_rank() // 2
    model = DistributedDataParallel(linear(mine), process_group=halves[mine])
    optimizer = sgd(model)
    for step in range(4):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
    dist.destroy_process_group()


def shards_of_fully_shard():
    model = linear()
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards")))
    optimizer = sgd(model)
    for step in range(4):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()


HELPERS = {"sgd", "reduce_gradients"}
PROGRAMS = [
    value
    for name, value in list(globals().items())
    if getattr(value, "__module__", "") == __name__ and not value.__code__.co_argcount and name not in HELPERS
]


def test_every_program_is_tried():
    assert len(PROGRAMS) == 27


@pytest.mark.few(12)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_right_program_is_not_accused(program):
    assert lt.run(program, ranks=4, schedule=lt.shuffled(1), leftovers="ignore").values == (None,) * 4
