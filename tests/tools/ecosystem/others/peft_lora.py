"""peft: LoRA on a tiny GPT-2 in a transformers Trainer with DDP; the adapter is saved and loaded."""

import tempfile

import torch
import torch.distributed as dist
from keep import keep, parameters
from peft import LoraConfig, PeftModel, get_peft_model
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Rows(Dataset):
    rows = torch.randint(0, 50, (30, 9), generator=torch.Generator().manual_seed(4))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def base():
    torch.manual_seed(2)
    return GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=24, n_layer=2, n_head=2, n_positions=16))


def main():
    model = get_peft_model(base(), LoraConfig(r=4, target_modules=["c_attn"], lora_dropout=0.1, task_type="CAUSAL_LM"))
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, max_steps=6, per_device_train_batch_size=2, use_cpu=True, logging_steps=1, report_to=[],
            save_strategy="no", disable_tqdm=True, learning_rate=1e-2, ddp_find_unused_parameters=False,
        )  # fmt: skip
        trainer = Trainer(model, args, train_dataset=Rows())
        trainer.train()
        model.save_pretrained(f"{folder}/adapter")
        again = PeftModel.from_pretrained(base(), f"{folder}/adapter")
        out = again.eval()(input_ids=Rows.rows[:2]).logits
        dist.barrier()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    keep(losses=losses, params=parameters(model), out=out, rank=trainer.args.process_index)


if __name__ == "__main__":
    main()
