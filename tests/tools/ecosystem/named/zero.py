"""deepspeed's engine on the CPU; the argument is the stage of ZeRO."""

import sys

import deepspeed
import torch
from keep import keep
from torch import nn


def main():
    stage = int(sys.argv[1])
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False,
    }  # fmt: skip
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    rng = torch.Generator().manual_seed(engine.global_rank)
    losses = []
    for _ in range(6):
        x = torch.randn(4, 8, generator=rng)
        loss = (engine(x) - x[:, :4]).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    params = {}
    for name, param in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([param], enabled=stage == 3):
            params[name] = param.detach().clone()
    keep(losses=losses, params=params, norm=float(engine.get_global_grad_norm() or 0))


if __name__ == "__main__":
    main()
