"""pytorch-metric-learning's distributed losses and miners, and an optimizer of schedulefree with FSDP2."""

import torch
import torch.distributed as dist
from keep import keep, parameters
from pytorch_metric_learning import losses, miners
from pytorch_metric_learning.utils import distributed
from schedulefree import AdamWScheduleFree
from torch import nn
from torch.distributed.fsdp import fully_shard


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(8, 4))
    loss_fn = distributed.DistributedLossWrapper(losses.ContrastiveLoss())
    miner = distributed.DistributedMinerWrapper(miners.MultiSimilarityMiner())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rng, found = torch.Generator().manual_seed(dist.get_rank()), []
    for _ in range(3):
        x, y = torch.randn(6, 8, generator=rng), torch.randint(0, 3, (6,), generator=rng)
        embedded = model(x)
        loss = loss_fn(embedded, y, miner(embedded, y))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    sharded = fully_shard(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)))
    free = AdamWScheduleFree(sharded.parameters(), lr=1e-2, warmup_steps=2)
    free.train()
    others = []
    for _ in range(3):
        x = torch.randn(4, 8, generator=rng)
        loss = (sharded(x) - x).square().mean()
        loss.backward()
        free.step()
        free.zero_grad()
        others.append(loss.detach())
    free.eval()
    keep(losses=found, params=parameters(model), others=others, sharded=parameters(sharded))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
