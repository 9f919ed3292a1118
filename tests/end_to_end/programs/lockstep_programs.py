"""Programs of ordinary DTensor code for rank threads and for lockstep alike: what is not among the other families."""

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode, visualize_sharding
from torch.distributed.tensor.experimental import local_map, register_sharding
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from tests.device import MESH
from tests.end_to_end.programs.tensor_parallel_programs import gradients, whole
from tests.end_to_end.programs.transformer import Feedforward, noise, seeded


def row() -> DeviceMesh:
    return init_device_mesh(MESH, (dist.get_world_size(),))


def grid() -> DeviceMesh:
    return init_device_mesh(MESH, (2, 2), mesh_dim_names=("dp", "tp"))


def data_and_tensor_parallel() -> dict[str, Any]:
    """Each row of ranks has its own batch; gradients are averaged by hand over the columns."""
    mesh = grid()
    model = parallelize_module(seeded(Feedforward), mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    mine = noise(2, 4, 8)[mesh.get_local_rank("dp")]
    losses = []
    for _ in range(2):
        loss = model(mine).square().mean()
        loss.backward()
        for part in model.parameters():
            dist.all_reduce(part.grad.to_local(), op=dist.ReduceOp.AVG, group=mesh.get_group("dp"))
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses += [loss.detach(), whole(norm)]
    return {"losses": losses, **{name: whole(part) for name, part in model.named_parameters()}}


def inputs_and_outputs() -> dict[str, Any]:
    """Modules whose inputs and outputs are laid out by torch's styles."""
    mesh = row()
    both = PrepareModuleInputOutput(
        input_layouts=(Shard(0),), desired_input_layouts=(Replicate(),), output_layouts=(Replicate(),),
        desired_output_layouts=(Shard(0),), use_local_input=True,
    )  # fmt: skip
    model = nn.Sequential(*(seeded(lambda: nn.Linear(8, 8)) for _ in range(3)))
    inputs = PrepareModuleInput(input_layouts=(Shard(0),), desired_input_layouts=(Replicate(),), use_local_output=True)
    outputs = PrepareModuleOutput(output_layouts=(Replicate(),), desired_output_layouts=(Shard(0),))
    parallelize_module(model, mesh, {"0": inputs, "1": outputs, "2": both})
    return {"out": model(noise(5, 8).double())}


def distributed_module() -> dict[str, Any]:
    def cut(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for key, part in list(module.named_parameters(recurse=False)):
            module.register_parameter(key, nn.Parameter(distribute_tensor(part, mesh, [Shard(0)])))

    def gather(module: nn.Module, out: Any, mesh: DeviceMesh) -> Any:
        return out.redistribute(placements=[Replicate()])

    model = distribute_module(seeded(lambda: nn.Linear(8, 6)), row(), cut, output_fn=gather)
    x = distribute_tensor(noise(5, 8), row(), [Replicate()])
    out = model(x)
    out.square().mean().backward()
    return {"out": out, **gradients(model)}


def local_maps() -> list[Any]:
    mesh = row()

    def product(a: Tensor, b: Tensor) -> Tensor:
        return a @ b + dist.get_rank() * 0

    wrapped = local_map(
        product, out_placements=[Partial()], in_placements=([Shard(1)], [Shard(0)]), redistribute_inputs=True,
        device_mesh=mesh,
    )  # fmt: skip
    a = distribute_tensor(noise(4, 8), mesh, [Replicate()]).requires_grad_()
    out = wrapped(a, distribute_tensor(noise(8, 3), mesh, [Shard(0)]))
    out.full_tensor().sum().backward()
    return [out, out.full_tensor(), a.grad]


@torch.library.custom_op("lockstep_programs::cubed", mutates_args=())
def cubed(x: Tensor) -> Tensor:
    return x**3


@cubed.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def custom_op() -> list[Any]:
    @register_sharding(torch.ops.lockstep_programs.cubed.default)
    def rules(x: Any) -> Any:
        return [([Replicate()], [Replicate()]), *(([Shard(dim)], [Shard(dim)]) for dim in range(x.ndim))]

    x = distribute_tensor(noise(5, 3), row(), [Shard(0)])
    return [torch.ops.lockstep_programs.cubed(x), cubed(x).full_tensor()]


def counted() -> dict[str, int]:
    mesh = grid()
    with CommDebugMode() as counts:
        x = distribute_tensor(noise(5, 4), mesh, [Shard(0), Shard(1)])
        (x @ distribute_tensor(noise(4, 3), mesh, [Replicate(), Shard(0)])).full_tensor()
        x.redistribute(placements=[Shard(1), Shard(0)])
    return {str(op): count for op, count in counts.get_comm_counts().items()}


def checkpointed() -> dict[str, Any]:
    model = parallelize_module(seeded(Feedforward), row(), {"up": ColwiseParallel(), "down": RowwiseParallel()})
    x = noise(3, 8).requires_grad_()
    for reentrant in (False, True):
        checkpoint(model, x, use_reentrant=reentrant).square().sum().backward()
    return {"gradient of x": whole(x.grad), **gradients(model)}


def copied_and_saved() -> dict[str, Any]:
    """A deep copy, a state dict that is loaded again, and one that went through a file."""
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    first = parallelize_module(seeded(Feedforward), row(), plan)
    second, third = copy.deepcopy(first), parallelize_module(Feedforward().double(), row(), plan)
    third.load_state_dict(first.state_dict())
    with torch.no_grad():
        for part in first.parameters():
            part.mul_(2)
    found = {}
    for number, model in enumerate((first, second, third)):
        found |= {f"{number} {name}": part.to_local() for name, part in model.named_parameters()}
    return found


def printed() -> list[str]:
    x = distribute_tensor(noise(4, 2), row(), [Shard(0)])
    return [str(x.placements), str(x.device_mesh), str(x._spec)]


def shown_shards() -> None:
    visualize_sharding(distribute_tensor(noise(4, 2), row(), [Shard(0)]))


def losses() -> list[Any]:
    mesh = row()
    x = distribute_tensor(noise(6, 5), mesh, [Shard(0)]).requires_grad_()
    target = distribute_tensor(torch.arange(6) % 5, mesh, [Shard(0)])
    loss = functional.cross_entropy(x, target, reduction="sum")
    loss.backward()
    normed = functional.layer_norm(x.detach(), (5,)) + functional.gelu(x.detach())
    return [loss.full_tensor().detach(), x.grad, normed, torch.logsumexp(x.detach(), 1)]


def attention() -> list[Any]:
    mesh = row()
    q, k, v = (distribute_tensor(noise(2, 4, 3, 8), mesh, [Shard(1)]).requires_grad_() for _ in range(3))
    with sdpa_kernel(SDPBackend.MATH):
        out = functional.scaled_dot_product_attention(q, k, v)
    out.sum().backward()
    return [out.detach(), q.grad, v.grad]


def foreach_optimizers() -> list[Any]:
    found = []
    for make in (torch.optim.SGD, torch.optim.AdamW):
        for foreach in (False, True):
            parts = [nn.Parameter(distribute_tensor(noise(rows, 3), row(), [Shard(0)])) for rows in (4, 5, 8)]
            optimizer = make(parts, lr=0.1, foreach=foreach)
            for _ in range(2):
                sum((part * part).sum() for part in parts).backward()
                found.append(whole(nn.utils.clip_grad_norm_(parts, 0.3, foreach=foreach)))
                optimizer.step()
                optimizer.zero_grad()
            found += [part.to_local().detach() for part in parts]
    return found
