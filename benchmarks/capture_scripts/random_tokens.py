"""Random tokens, as a data module of litgpt."""

from dataclasses import dataclass
from typing import Any

import torch
from litgpt.data import DataModule
from torch.utils.data import DataLoader


@dataclass
class RandomTokens(DataModule):
    def connect(self, tokenizer: Any = None, batch_size: int = 1, max_seq_length: int | None = None) -> None:
        self.batch_size = batch_size
        self.length = (max_seq_length or 16) + 1

    def train_dataloader(self) -> DataLoader:
        generator = torch.Generator().manual_seed(0)
        tokens: Any = torch.randint(0, 64, (256, self.length), generator=generator)
        return DataLoader(tokens, self.batch_size)

    val_dataloader = train_dataloader
