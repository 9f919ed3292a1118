"""accelerate with FSDP2: accumulated gradients, an uneven last batch, clipped norms, a state that is saved and loaded."""

import tempfile

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import broadcast_object_list, set_seed
from keep import keep, parameters
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="size_based_wrap",
        min_num_params=100,
        reshard_after_forward=True,
        cpu_ram_efficient_loading=False,
        state_dict_type="SHARDED_STATE_DICT",
    )
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3, fsdp_plugin=plugin)
    set_seed(7)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))
    data = TensorDataset(torch.randn(45, 8), torch.randint(0, 4, (45,)))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    loader = accelerator.prepare(DataLoader(data, batch_size=4, shuffle=True))
    losses, norms, seen = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        folders = broadcast_object_list([folder])
        for epoch in range(2):
            for x, y in loader:
                with accelerator.accumulate(model):
                    loss = nn.functional.cross_entropy(model(x), y)
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        norms.append(accelerator.clip_grad_norm_(model.parameters(), 1.0))
                    optimizer.step()
                    optimizer.zero_grad()
                losses.append(accelerator.gather(loss.detach()[None]))
                seen.append(accelerator.gather_for_metrics(y))
            if epoch == 0:
                accelerator.save_state(folders[0])
                accelerator.wait_for_everyone()
        after = parameters(model)
        accelerator.load_state(folders[0])
        keep(
            losses=losses,
            norms=norms,
            seen=seen,
            params=after,
            loaded=parameters(model),
            whole=accelerator.get_state_dict(model),
        )
        accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
