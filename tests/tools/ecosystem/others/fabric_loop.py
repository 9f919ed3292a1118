"""lightning's Fabric: a loop of one's own with DDP, gathers, a barrier on rank 0 first, and a checkpoint."""

import os
import tempfile

import torch
from keep import keep, parameters
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    fabric = Fabric(accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy="ddp")
    fabric.launch()
    fabric.seed_everything(11 + fabric.global_rank)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = fabric.setup(model, optimizer)
    data = TensorDataset(torch.randn(40, 8, generator=torch.Generator().manual_seed(0)))
    loader = fabric.setup_dataloaders(DataLoader(data, 4, shuffle=True))
    losses = []
    for step, (x,) in enumerate(loader):
        with fabric.no_backward_sync(model, enabled=step % 2 == 0):
            loss = model(x).square().mean()
            fabric.backward(loss)
        if step % 2:
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(fabric.all_gather(loss.detach()))
    with fabric.rank_zero_first():
        first = fabric.is_global_zero
    with tempfile.TemporaryDirectory() as folder:
        place = fabric.broadcast(f"{folder}/state.ckpt")
        fabric.save(place, {"model": model, "step": 3})
        state = {"model": model, "step": 0}
        fabric.load(place, state)
        fabric.barrier()
    keep(losses=losses, params=parameters(model), step=state["step"], first=first,
         total=fabric.all_reduce(torch.tensor(float(fabric.global_rank)), reduce_op="sum"))  # fmt: skip


if __name__ == "__main__":
    main()
