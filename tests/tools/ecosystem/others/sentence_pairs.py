"""sentence-transformers: pairs with a gathered in-batch loss, in its trainer."""

import tempfile

import torch
from datasets import Dataset
from keep import keep, parameters
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
    losses,
    models,
)
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

WORDS = ["[PAD]", "[UNK]", *(f"w{i}" for i in range(30))]


def bert(folder):
    made = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(folder)
    BertModel(BertConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=32,
    )).save_pretrained(folder)  # fmt: skip


def main():
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        bert(folder)
        word = models.Transformer(folder, max_seq_length=16)
        model = SentenceTransformer(modules=[word, models.Pooling(word.get_word_embedding_dimension())], device="cpu")
        texts = [f"w{i % 30} w{i * 3 % 30}" for i in range(24)]
        data = Dataset.from_dict({"anchor": texts, "positive": [f"{text} w1" for text in texts]})
        args = SentenceTransformerTrainingArguments(
            f"{folder}/out", max_steps=4, per_device_train_batch_size=3, use_cpu=True, logging_steps=1, report_to=[],
            save_strategy="no", disable_tqdm=True, learning_rate=1e-2, bf16=False, fp16=False,
        )  # fmt: skip
        loss = losses.MultipleNegativesRankingLoss(model, gather_across_devices=True)
        trainer = SentenceTransformerTrainer(model=model, args=args, train_dataset=data, loss=loss)
        trainer.train()
        made = model.encode(["w3 w4", "w5"], convert_to_tensor=True, show_progress_bar=False)
    found = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    keep(losses=found, params=parameters(model), made=made)


if __name__ == "__main__":
    main()
