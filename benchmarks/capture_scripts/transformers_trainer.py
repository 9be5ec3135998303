"""Hugging Face's Trainer, which reports to TensorBoard and to W&B."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

torch.manual_seed(7)
config = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
)


class Counting(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(16) + index) % 64
        return {"input_ids": tokens, "labels": tokens}


trainer = Trainer(
    model=LlamaForCausalLM(config),
    args=TrainingArguments(
        "out",
        max_steps=20,
        per_device_train_batch_size=4,
        logging_steps=5,
        eval_strategy="steps",
        eval_steps=10,
        save_strategy="no",
        report_to=["tensorboard", "wandb"],
        use_cpu=True,
        disable_tqdm=True,
    ),
    train_dataset=Counting(),
    eval_dataset=Counting(),
)
trainer.train()
