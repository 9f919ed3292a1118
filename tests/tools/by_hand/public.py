"""Public functions, modules and optimizers of DTensor."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (as torch's own pages call it)
from torch import nn
from torch.distributed import tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor, parallel
from torch.distributed.tensor.experimental import local_map

from tests.tools.by_hand.words import MAX, MIN, PRODUCT, S0, S1, SUM, Given, R, check, count

aten = torch.ops.aten


def adam(op: Any, lists: list[list[Any]], d: Given, lr: Any = 0.5) -> Any:
    """A step of a fused optimizer on [params, grads, averages, squares, largest squares]; every list afterwards."""
    steps = [d(1.0) for _ in lists[0]]
    op(*lists, steps, lr=lr, beta1=0.5, beta2=0.5, weight_decay=0.0, eps=1.0, amsgrad=True, maximize=False)
    return lists


def lists(d: Given, *odd: tuple[int, Any], params: int = 1) -> list[list[Any]]:
    """Five lists of tensors `[2, 2]`, replicated, but for the first tensor of those lists that `odd` gives a placement."""
    placements = dict(odd)
    return [
        [d(count(2, 2) + i, *([placements[i]] if i in placements and j == 0 else [])) for j in range(params)]
        for i in range(5)
    ]


@check("aten._fused_adam_.default on (2,): S(0), R, R, R, R, R, R, R, R, R, R, R")
def fused_adam_of_a_shard_and_replicas(d: Given) -> Any:
    return adam(aten._fused_adam_.default, lists(d, (0, S0), params=2), d)


@check("aten._fused_adam_.default on (2,): R, R, R, R, R, R, R, R, S(0), R, R, R")
def fused_adam_with_one_sharded_largest_square(d: Given) -> Any:
    return adam(aten._fused_adam_.default, lists(d, (4, S0), params=2), d)


@check("aten._fused_adam_.tensor_lr on (2,): R, R, R, R, S(0), R, R, R, R, R, R, R, R")
def fused_adam_with_a_sharded_average(d: Given) -> Any:
    return adam(aten._fused_adam_.tensor_lr, lists(d, (2, S0), params=2), d, d(0.5))


@check("aten._fused_adamw_.default on (2,): S(0), R, R, R, R, R, R, R, R, R, R, R")
def fused_adamw_of_a_shard_and_replicas(d: Given) -> Any:
    return adam(aten._fused_adamw_.default, lists(d, (0, S0), params=2), d)


@check("aten._fused_adamw_.tensor_lr on (2,): S(1), R, R, R, R, R, R, R, R, R, R, R, R, R, R, R, R, R, R")
def fused_adamw_of_a_sharded_parameter(d: Given) -> Any:
    return adam(aten._fused_adamw_.tensor_lr, lists(d, (0, S1), params=3), d, d(0.5))


@check("aten._fused_adamw_.tensor_lr on (2,): R, R, R, R, R, R, P(max)")
def fused_adamw_with_a_partial_learning_rate(d: Given) -> Any:
    return adam(aten._fused_adamw_.tensor_lr, lists(d), d, d(0.5, MAX))


@check("aten._fused_adam.tensor_lr on (2,): S(0), S(0), S(0), S(0), S(0), R, R")
def fused_adam_out_of_place(d: Given) -> Any:
    five = [[d(count(2, 2) + i, S0)] for i in range(5)]
    options = {"beta1": 0.5, "beta2": 0.5, "weight_decay": 0.0, "eps": 1.0, "amsgrad": True, "maximize": False}
    return aten._fused_adam.tensor_lr(*five, [d(1.0)], lr=d(0.5), **options)


@check("aten._foreach_addcmul_.Tensor on (2,): S(0), S(0), S(0), R")
def foreach_addcmul_by_a_tensor_of_numbers(d: Given) -> Any:
    x, y = [d(count(2), S0)], [d(count(2), S0)]
    torch._foreach_addcmul_(x, y, y, d([2.0]))
    return x


@check("aten._foreach_addcdiv_.Tensor on (2,): R, R, R, R, R, R, R")
def foreach_addcdiv_by_a_tensor_of_numbers(d: Given) -> Any:
    x, y = [d(count(2)), d(count(2))], [d(count(2)), d(count(2))]
    torch._foreach_addcdiv_(x, y, y, d([2.0, 3.0]))
    return x


@check("rand(x.shape, dtype=torch.float64, device_mesh=mesh, placements=[Replicate()]) on (2,): R")
def rand_on_the_cpu(d: Given) -> Any:
    if d.mesh is None:
        return [4, 2]
    return list(tensor.rand(4, 2, device_mesh=d.mesh, placements=[S0]).shape)


@check("randn(x.shape, dtype=torch.float64, device_mesh=mesh, placements=[Shard(1)]) on (2,): R")
def randn_on_the_cpu(d: Given) -> Any:
    if d.mesh is None:
        return [4, 2]
    return list(tensor.randn(4, 2, device_mesh=d.mesh, placements=[S1]).shape)


@check("DeviceMesh(device, mesh.mesh.flip(0)), then distribute_tensor and redistribute to [Shard(1)] on (2,): R")
def shards_on_a_mesh_in_reverse_order(d: Given) -> Any:
    x = count(2, 4)
    if d.mesh is None:
        return x
    mesh = DeviceMesh("cpu", d.mesh.mesh.flip(0))
    return distribute_tensor(x, mesh, [Replicate()]).redistribute(placements=[Shard(1)])


@check(
    "DTensor.full_tensor, refused",
    judged="DTensor says by name that it turns no partial value into another kind",
)
def gradient_of_a_partial_product_as_a_sum(d: Given) -> Any:
    x = d(count(2), PRODUCT, grad=True)
    y = x.full_tensor(grad_placements=[SUM]) if isinstance(x, DTensor) else x
    y.sum().backward()
    return list(x.grad.shape)


@check(
    "DTensor.redistribute, refused",
    judged="DTensor says by name that it turns no partial value into another kind",
)
def gradient_of_a_partial_minimum_as_a_sum(d: Given) -> Any:
    x = d(count(2, 2), MIN, grad=True)
    y = x.redistribute(placements=[Shard(1)]) if isinstance(x, DTensor) else x
    y.backward(d(torch.ones(2, 2), SUM))
    return x.grad


@check(
    "DTensor.from_local(shape=x.shape, stride=x.stride(), grad_placements=[Partial('sum'), Replicate()], run_check=True), then its gradient in [Shard(0), Shard(0)] on (2, 2): R",
    (2, 2),
    judged="DTensor says by name that it does not support this yet",
)
def gradient_of_from_local_as_a_sum(d: Given) -> Any:
    x = count(4).requires_grad_()
    y = x if d.mesh is None else DTensor.from_local(x, d.mesh, [R, R], grad_placements=[SUM, R])
    y.backward(d(torch.ones(4), S0, S0))
    return list(x.grad.shape)


@check(
    "experimental.local_map, refused",
    (2, 2),
    judged="DTensor says by name that it turns no partial value into another kind",
)
def gradient_of_local_map_as_a_sum(d: Given) -> Any:
    x = d(count(2, 2), MAX, R, grad=True)
    if d.mesh is None:
        x.mul(2).sum().backward()
        return x.grad
    local = local_map(
        lambda a: a * 2, out_placements=[R, R], in_placements=([R, R],), in_grad_placements=([SUM, R],),
        redistribute_inputs=True, device_mesh=d.mesh,
    )  # fmt: skip
    local(x).sum().backward()
    return x.grad


def _loss(d: Given, logits: Any, target: Any, **options: Any) -> Any:
    """The cross entropy under `loss_parallel`, and the gradient of the logits."""
    with contextlib.nullcontext() if d.mesh is None else parallel.loss_parallel():
        F.cross_entropy(logits, target, **options).sum().backward()
    return logits.grad


@check("parallel.loss_parallel, refused")
def loss_parallel_with_weights_and_an_ignored_target(d: Given) -> Any:
    return _loss(d, d(count(2, 4), S1, grad=True), d([1, -100]), weight=d(torch.ones(4)))


@check(
    "loss_parallel() of [Shard(1), Shard(0)]: F.cross_entropy(x, target, reduction='none'), weighted, a target ignored on (2, 2): R",
    (2, 2),
)
def loss_parallel_on_two_axes_with_an_ignored_target(d: Given) -> Any:
    return _loss(
        d, d(count(4, 4), S1, S0, grad=True), d([-100, 1, 2, 3], R, S0), weight=d(torch.ones(4)), reduction="none"
    )


@check("loss_parallel() of [Shard(1)]: F.cross_entropy(x, target, reduction='sum') on (2,): R")
def loss_parallel_with_fewer_classes_than_ranks(d: Given) -> Any:
    return _loss(d, d([[2.0]], S1, grad=True), d([0]), reduction="sum")


@check("parallel.loss_parallel, refused")
def cross_entropy_after_an_error_within_loss_parallel(d: Given) -> Any:
    if d.mesh is not None:
        with contextlib.suppress(KeyError), parallel.loss_parallel():
            raise KeyError("of the user")
    return F.cross_entropy(d(count(2, 4)), d([1, 2]))


def _module(d: Given, module: nn.Module, x: Any, split: Any) -> Any:
    """The gradients of a module's parameters, which `split` puts on the mesh, for the sum of what it makes of x."""
    for parameter in module.parameters():
        nn.init.constant_(parameter, 0.5)
    if d.mesh is not None:
        module = split(module)
    out = module(x)
    out.sum().backward()
    return [out, *(parameter.grad for parameter in module.parameters())]


def _trained(d: Given, module: nn.Module, x: Any, split: Any) -> Any:
    """The parameters after a step of SGD."""
    for parameter in module.parameters():
        nn.init.constant_(parameter, 0.5)
    module = module if d.mesh is None else split(module)
    module(x).pow(2).sum().backward()
    torch.optim.SGD(module.parameters(), lr=0.5).step()
    return list(module.parameters())


def _sharded(d: Given) -> Any:
    """Takes a module and shards each of its parameters along dim 0."""

    def split(_: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for name, parameter in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [S0])))

    return lambda module: distribute_module(module, d.mesh, split)


@check("tensor.distribute_module, refused")
def layer_norm_of_one_feature_and_a_step_of_sgd(d: Given) -> Any:
    return _trained(d, nn.LayerNorm(1), d(count(3, 1)), _sharded(d))


@check("distribute_module(nn.Embedding(5, 6), mesh, partition_fn=<Shard(0)>) on (4,): R", (4,))
def embedding_of_fewer_rows_than_shards(d: Given) -> Any:
    return _module(d, nn.Embedding(5, 6), d([0, 2]), _sharded(d))


@check("parallel.ColwiseParallel, refused", (4,))
def colwise_embedding_of_uneven_columns_and_a_step_of_sgd(d: Given) -> Any:
    style = parallel.ColwiseParallel(output_layouts=R)
    return _trained(
        d, nn.Embedding(7, 3), torch.tensor([0, 2]), lambda m: parallel.parallelize_module(m, d.mesh, style)
    )


@check(
    "RowwiseParallel(input_layouts=Shard(0), output_layouts=Shard(-1), use_local_output=False) of nn.Embedding(5, 6) on (4,): R",
    (4,),
)
def rowwise_embedding_of_fewer_rows_than_shards(d: Given) -> Any:
    module, x = nn.Embedding(5, 6), torch.tensor([0, 2, 1, 4])
    nn.init.constant_(module.weight, 0.5)
    if d.mesh is not None:
        style = parallel.RowwiseParallel(input_layouts=R, output_layouts=R)
        module = parallel.parallelize_module(module, d.mesh, style)
    module(x).sum().backward()
    return module.weight.grad


@check("aten._foreach_addcdiv_.Tensor on (2,): S(0), S(0), S(0), R")
def foreach_addcdiv_of_shards_by_a_tensor_of_numbers(d: Given) -> Any:
    x, y = [d(count(2), S0)], [d(count(2), S0)]
    torch._foreach_addcdiv_(x, y, y, d([2.0]))
    return x


@check("aten._foreach_addcmul_.Tensor on (2,): R, R, R, R, R, R, R")
def foreach_addcmul_of_replicas_by_a_tensor_of_numbers(d: Given) -> Any:
    x, y = [d(count(2)), d(count(2))], [d(count(2)), d(count(2))]
    torch._foreach_addcmul_(x, y, y, d([2.0, 3.0]))
    return x
