"""torch's pipelining: 1F1B over all ranks, and an interleaved schedule of two stages a rank."""

import torch
import torch.distributed as dist
from keep import keep, parameters
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B


def layer(index):
    torch.manual_seed(index)
    return nn.Sequential(nn.Linear(16, 16), nn.Tanh())


def main():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
    kept = {}
    for name, kind, per_rank in (("1f1b", Schedule1F1B, 1), ("interleaved", ScheduleInterleaved1F1B, 2)):
        places = [rank + size * turn for turn in range(per_rank)]
        parts = [layer(place) for place in places]
        stages = [
            PipelineStage(part, place, size * per_rank, torch.device("cpu"))
            for part, place in zip(parts, places, strict=True)
        ]
        losses = []
        schedule = kind(stages if per_rank > 1 else stages[0], n_microbatches=4, loss_fn=nn.functional.mse_loss)
        given = (x,) if rank == 0 else ()
        last = rank == size - 1
        out = schedule.step(*given, target=x, losses=losses) if last else schedule.step(*given)
        kept[name] = {
            "losses": losses, "out": out if last else None,
            "grads": [[param.grad for param in part.parameters()] for part in parts],
            "params": [parameters(part) for part in parts],
        }  # fmt: skip
    keep(**kept)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
