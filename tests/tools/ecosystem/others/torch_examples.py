"""What torch itself offers: DDP with a hook, join, ZeRO's optimizer, FSDP 1, a checkpoint that is resharded."""

import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from keep import keep, parameters
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8))


def steps(model, optimizer, rng, count=3):
    losses = []
    for _ in range(count):
        x = torch.randn(4, 8, generator=rng)
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def main():
    dist.init_process_group("gloo")
    rank, kept = dist.get_rank(), {}
    rng = torch.Generator().manual_seed(rank)
    model = nn.parallel.DistributedDataParallel(net())
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    kept["power"] = steps(model, torch.optim.SGD(model.parameters(), lr=0.1), rng, 5), parameters(model)
    model = nn.parallel.DistributedDataParallel(net())
    with Join([model]):
        kept["join"] = steps(model, torch.optim.SGD(model.parameters(), lr=0.1), rng, 2 + rank), parameters(model)
    model = nn.parallel.DistributedDataParallel(net())
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
    kept["zero"] = steps(model, zero, rng), parameters(model)
    zero.consolidate_state_dict(0)
    model = FullyShardedDataParallel(net(), device_id=torch.device("cpu"))
    kept["fsdp"] = steps(model, torch.optim.Adam(model.parameters(), lr=1e-2), rng)
    with FullyShardedDataParallel.summon_full_params(model):
        kept["fsdp params"] = parameters(model)
    model = fully_shard(net())
    kept["fsdp 2"] = steps(model, torch.optim.Adam(model.parameters(), lr=1e-2), rng)
    with tempfile.TemporaryDirectory() as folder:
        folders = [folder]
        dist.broadcast_object_list(folders)
        dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=folders[0])
        other = net()
        whole = {"model": get_model_state_dict(other)}
        dcp.load(whole, checkpoint_id=folders[0])
        set_model_state_dict(other, whole["model"])
        dist.barrier()
    keep(**kept, loaded=parameters(other))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
