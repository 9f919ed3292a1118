"""deepspeed's PipelineModule over all ranks on the CPU, and its MoE layer with expert parallelism."""

import deepspeed
import deepspeed.comm as dist
import torch
from deepspeed.moe.layer import MoE
from deepspeed.pipe import LayerSpec, PipelineModule
from keep import keep
from torch import nn


def main():
    deepspeed.init_distributed("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(8, 8)
            self.moe = MoE(
                8,
                nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)),
                num_experts=size,
                ep_size=2,
                k=1,
                capacity_factor=2.0,
                min_capacity=2,
                use_residual=False,
            )

        def forward(self, x):
            y, aux, counts = self.moe(self.inner(x))
            return y, aux, counts

    net = Net()
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 1,
        "zero_allow_untested_optimizer": True,
    }
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer as split

    groups = split({"params": list(net.parameters()), "name": "all"})
    engine, *_ = deepspeed.initialize(model=net, optimizer=torch.optim.SGD(groups, lr=0.1), config=config)
    rng, losses, counts = torch.Generator().manual_seed(rank), [], []
    for _ in range(3):
        x = torch.randn(4, 8, generator=rng)
        y, aux, count = engine(x)
        loss = (y - x).square().mean() + 0.01 * aux
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
        counts.append(count)
    moe = {k: v.detach().clone() for k, v in net.named_parameters()}
    layers = [
        LayerSpec(nn.Linear, 8, 16),
        LayerSpec(nn.Tanh),
        LayerSpec(nn.Linear, 16, 8),
        LayerSpec(nn.Tanh),
        LayerSpec(nn.Linear, 8, 8),
        LayerSpec(nn.Tanh),
    ]
    pipe = PipelineModule(layers, num_stages=2, loss_fn=nn.MSELoss(), seed_layers=True, partition_method="uniform")
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(model=pipe, optimizer=torch.optim.SGD(pipe.parameters(), lr=0.1), config=config)

    def batches():
        draws = torch.Generator().manual_seed(3)
        while True:
            x = torch.randn(2, 8, generator=draws)
            yield x, x * 0.5

    data = batches()
    piped = [engine.train_batch(data) for _ in range(3)]
    keep(losses=losses, counts=counts, moe=moe, piped=piped, params={k: v.detach() for k, v in pipe.named_parameters()})


if __name__ == "__main__":
    main()
