"""A Transformers script as people write it: a tiny Llama with random weights, and nothing of fp8scope."""

import argparse
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


class Counting(Dataset[dict[str, torch.Tensor]]):
    """Sequences that count up by one."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = (index + torch.arange(32)) % 256
        return {"input_ids": ids, "labels": ids}


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=4)
parser.add_argument("--own-optimizer", action="store_true")
options = parser.parse_args()

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
)
model = LlamaForCausalLM(config)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5) if options.own_optimizer else None
with tempfile.TemporaryDirectory() as folder:
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            folder,
            max_steps=options.steps,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            learning_rate=3e-3,
            logging_steps=1,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            save_strategy="no",
            eval_strategy="steps",
            eval_steps=max(1, options.steps // 2),
        ),
        train_dataset=Counting(),
        eval_dataset=Counting(),
        optimizers=(optimizer, None),
    )
    trainer.train()
