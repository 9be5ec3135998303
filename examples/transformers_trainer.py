"""Hugging Face's Trainer on a tiny Llama with random weights, recorded by a callback.

fp8scope login http://localhost:8265
python examples/transformers_trainer.py --fp8
"""

import argparse
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from fp8scope import DelayedScaling
from fp8scope.integrations.transformers import Fp8scopeCallback

VOCABULARY, LENGTH = 256, 32


class Counting(Dataset[dict[str, torch.Tensor]]):
    """Sequences that count up by one from a random start."""

    def __init__(self, items: int, seed: int) -> None:
        self.starts = torch.randint(0, VOCABULARY, (items,), generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = (self.starts[index] + torch.arange(LENGTH)) % VOCABULARY
        return {"input_ids": ids, "labels": ids}


def tiny_llama() -> LlamaForCausalLM:
    """Two layers of width 64; nothing is downloaded."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=LENGTH,
        )
    )


def main() -> None:
    """Train and evaluate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--fp8", action="store_true")
    options = parser.parse_args()

    torch.manual_seed(0)
    callback = Fp8scopeCallback(
        name="tiny llama" + (" fp8" if options.fp8 else ""),
        convert=DelayedScaling() if options.fp8 else None,  # the model's linear layers, before the first step
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=tiny_llama(),
            args=TrainingArguments(
                folder,
                max_steps=options.steps,
                per_device_train_batch_size=4,
                gradient_accumulation_steps=2,
                learning_rate=3e-3,
                logging_steps=10,
                eval_strategy="steps",
                eval_steps=max(1, options.steps // 2),
                report_to=[],
                use_cpu=not torch.cuda.is_available(),
                disable_tqdm=True,
            ),
            train_dataset=Counting(512, seed=0),
            eval_dataset=Counting(32, seed=1),
            callbacks=[callback],
        )
        trainer.train()
    if callback.run is not None:
        report = callback.run.finish()
        print(f"{report.rows_sent} steps have arrived: {callback.run.url}" if report.complete else report)


if __name__ == "__main__":
    main()
