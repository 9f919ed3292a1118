"""trl's SFTTrainer on a tiny Llama, with a tokenizer that is made here."""

import tempfile

import torch
from datasets import Dataset
from keep import keep, parameters
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

WORDS = ["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(29))]


def main():
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    rows = [" ".join(WORDS[3 + (i * j) % 29] for j in range(1, 5 + i % 6)) for i in range(26)]
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        pad_token_id=0, eos_token_id=1, bos_token_id=1,
    ))  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        args = SFTConfig(
            folder, max_steps=5, per_device_train_batch_size=2, use_cpu=True, logging_steps=1, report_to=[], bf16=False,
            save_strategy="no", disable_tqdm=True, learning_rate=1e-2, max_length=16, packing=False,
            eval_strategy="steps", eval_steps=3,
        )  # fmt: skip
        data = Dataset.from_dict({"text": rows})
        trainer = SFTTrainer(model, args, train_dataset=data, eval_dataset=data, processing_class=tokenizer)
        trainer.train()
    kept = ("loss", "eval_loss", "grad_norm", "mean_token_accuracy", "eval_mean_token_accuracy", "num_tokens")
    logs = [{name: line[name] for name in kept if name in line} for line in trainer.state.log_history]
    keep(logs=logs, params=parameters(model))


if __name__ == "__main__":
    main()
