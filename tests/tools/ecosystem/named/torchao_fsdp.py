"""torchao's optimizers with FSDP2 on the CPU; the argument is the optimizer."""

import sys

import torch
import torch.distributed as dist
import torchao.optim as optimizers
from keep import keep, parameters
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    optimizer = getattr(optimizers, sys.argv[1])(model.parameters(), lr=1e-2)
    rng, losses = torch.Generator().manual_seed(dist.get_rank()), []
    for _ in range(4):
        x = torch.randn(8, 64, generator=rng)
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    keep(losses=losses, params=parameters(model))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
