"""megatron-core's tensor-parallel layers on the CPU: embedding, column and row parallel linear, vocabulary's loss."""

import torch
import torch.distributed as dist
from keep import keep, parameters
from megatron.core import ModelParallelConfig, parallel_state, tensor_parallel
from torch import nn


class Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        made = {"config": config, "init_method": nn.init.xavier_normal_}
        self.embedding = tensor_parallel.VocabParallelEmbedding(32, 16, **made)
        self.up = tensor_parallel.ColumnParallelLinear(16, 32, bias=True, gather_output=False, **made)
        self.down = tensor_parallel.RowParallelLinear(
            32, 16, bias=True, input_is_parallel=True, skip_bias_add=False, **made
        )
        self.out = tensor_parallel.ColumnParallelLinear(16, 32, bias=False, gather_output=False, **made)

    def forward(self, ids, labels):
        x = self.embedding(ids)
        x = x + self.down(nn.functional.gelu(self.up(x)[0]))[0]
        return tensor_parallel.vocab_parallel_cross_entropy(self.out(x)[0].contiguous(), labels).mean()


def main():
    dist.init_process_group("gloo")
    size = dist.get_world_size()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    torch.manual_seed(1)
    config = ModelParallelConfig(tensor_model_parallel_size=2, use_cpu_initialization=True, params_dtype=torch.float32)
    model = Model(config)
    rng = torch.Generator().manual_seed(parallel_state.get_data_parallel_rank())
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.5), []
    for _ in range(3):
        ids = torch.randint(0, 32, (4, 6), generator=rng)
        loss = model(ids, ids.flip(1))
        loss.backward()
        for param in model.parameters():
            dist.all_reduce(param.grad, group=parallel_state.get_data_parallel_group())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    keep(losses=losses, params=parameters(model), tp=parallel_state.get_tensor_model_parallel_rank(),
         dp=parallel_state.get_data_parallel_rank(), size=size)  # fmt: skip
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
