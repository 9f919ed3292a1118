"""An accelerate loop: two optimizers' steps an update, gathered metrics, and a last uneven batch."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from keep import keep, parameters
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    set_seed(3)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3))
    data = TensorDataset(torch.randn(70, 8), torch.randint(0, 3, (70,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=200)
    model, optimizer, loader, schedule = accelerator.prepare(
        model, optimizer, DataLoader(data, batch_size=4, shuffle=True), schedule
    )
    losses, hits = [], []
    for _ in range(2):
        for x, y in loader:
            with accelerator.accumulate(model):
                out = model(x)
                loss = nn.functional.cross_entropy(out, y)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach()[None]))
            hits.append(accelerator.gather_for_metrics(out.argmax(1) == y).float())
    keep(losses=losses, hits=hits, seen=sum(map(len, hits)), params=parameters(accelerator.unwrap_model(model)),
         rank=accelerator.process_index, main=accelerator.is_main_process)  # fmt: skip
    accelerator.end_training()


if __name__ == "__main__":
    main()
