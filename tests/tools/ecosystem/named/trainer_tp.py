"""A tiny Llama that transformers loads with tp_plan="auto": loss, a step of SGD, and greedy generation."""

import os
import tempfile

import torch
import torch.distributed as dist
from keep import keep, parameters
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM


def main():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=4,
    )  # fmt: skip
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as folder:
        folders = [folder]
        dist.broadcast_object_list(folders)
        if dist.get_rank() == 0:
            LlamaForCausalLM(config).save_pretrained(folder)
        dist.barrier()
        model = AutoModelForCausalLM.from_pretrained(folders[0], tp_plan="auto", dtype=torch.float32)
        dist.barrier()
    ids = torch.randint(0, 64, (3, 10), generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    model.eval()
    made = model.generate(ids[:, :4], max_new_tokens=5, do_sample=False)
    keep(losses=losses, made=made, params=parameters(model), size=os.environ["WORLD_SIZE"])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
