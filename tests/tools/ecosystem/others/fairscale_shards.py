"""fairscale on the CPU: OSS with ShardedDataParallel, and its own FullyShardedDataParallel's predecessor of ZeRO 1."""

import torch
import torch.distributed as dist
from fairscale.nn.data_parallel import ShardedDataParallel
from fairscale.optim import AdaScale
from fairscale.optim.oss import OSS
from keep import keep, parameters
from torch import nn


def sharded(rng):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8))
    optimizer = OSS(model.parameters(), optim=torch.optim.Adam, lr=1e-2)
    wrapped, losses = ShardedDataParallel(model, optimizer), []
    for _ in range(4):
        x = torch.randn(4, 8, generator=rng)
        loss = (wrapped(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses, parameters(model)


def scaled(rng):
    torch.manual_seed(1)
    model = nn.parallel.DistributedDataParallel(nn.Linear(8, 8))
    optimizer = AdaScale(torch.optim.SGD(model.parameters(), lr=0.1))
    gains = []
    for _ in range(4):
        x = torch.randn(4, 8, generator=rng)
        (model(x) - x).square().mean().backward()
        gains.append(optimizer.gain())
        optimizer.step()
        optimizer.zero_grad()
    return gains, parameters(model)


def main():
    dist.init_process_group("gloo")
    rng = torch.Generator().manual_seed(dist.get_rank())
    losses, params = sharded(rng)
    gains, others = scaled(rng)
    keep(losses=losses, params=params, gains=gains, others=others)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
