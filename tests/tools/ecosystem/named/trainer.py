"""A transformers Trainer on a tiny Llama: training, evaluation with metrics, and a checkpoint that is loaded again."""

import tempfile

import torch
from keep import keep, parameters
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


class Rows(Dataset):
    def __init__(self, size, seed):
        self.rows = torch.randint(0, 64, (size, 12), generator=torch.Generator().manual_seed(seed))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def metrics(result):
    return {"hits": float((result.predictions[:, :-1].argmax(-1) == result.label_ids[:, 1:]).mean())}


def main():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, attention_dropout=0.1,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, num_train_epochs=2, per_device_train_batch_size=2, per_device_eval_batch_size=3, use_cpu=True,
            eval_strategy="epoch", save_strategy="no", logging_steps=2, report_to=[], disable_tqdm=True,
            learning_rate=1e-2, gradient_accumulation_steps=2,
        )  # fmt: skip
        trainer = Trainer(model, args, train_dataset=Rows(37, 1), eval_dataset=Rows(19, 2), compute_metrics=metrics)
        done = trainer.train()
        found = trainer.evaluate()
        logs = [
            {name: value for name, value in line.items() if "runtime" not in name and "per_second" not in name}
            for line in trainer.state.log_history
        ]
    keep(
        loss=done.training_loss,
        eval_loss=found["eval_loss"],
        hits=found["eval_hits"],
        logs=logs,
        params=parameters(model),
    )


if __name__ == "__main__":
    main()
