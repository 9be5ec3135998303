"""A trainer class with callbacks and a nested configuration object, and nothing of fp8scope."""

import sys
from ast import literal_eval
from collections.abc import Callable
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, RandomSampler


class Node:
    """A configuration: values, and further nodes."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)

    def update_from(self, arguments: list[str]) -> None:
        """`--trainer.learning_rate=0.1` sets that value."""
        for argument in arguments:
            path, _, text = argument.removeprefix("--").partition("=")
            *parents, name = path.split(".")
            node = self
            for parent in parents:
                node = getattr(node, parent)
            assert hasattr(node, name), path
            setattr(node, name, literal_eval(text))


class Characters(Dataset[tuple[Tensor, Tensor]]):
    """Pieces of a text."""

    def __init__(self, config: Node, text: str) -> None:
        self.config, self.data = config, torch.tensor(list(text.encode()))

    def __len__(self) -> int:
        return len(self.data) - self.config.block_size  # type: ignore[attr-defined, no-any-return]

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        piece = self.data[index : index + self.config.block_size + 1]  # type: ignore[attr-defined]
        return piece[:-1], piece[1:]


class Mini(nn.Module):
    """Bytes, a recurrent layer, the next bytes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed, self.body = nn.Embedding(256, width), nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, 256)

    def forward(self, x: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        logits = self.head(self.body(self.embed(x))[0])
        loss = None
        if targets is not None:
            loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss


class Trainer:
    """Calls back after every batch."""

    def __init__(self, config: Node, model: Mini, dataset: Characters) -> None:
        self.config, self.model, self.dataset = config, model, dataset
        self.callbacks: list[Callable[[Trainer], None]] = []

    def run(self) -> None:
        """Train for `max_iters` batches."""
        model, config = self.model, self.config
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate)  # type: ignore[attr-defined]
        sampler = RandomSampler(self.dataset, replacement=True, num_samples=10**6)
        loader = DataLoader(self.dataset, batch_size=config.batch_size, sampler=sampler)  # type: ignore[attr-defined]
        model.train()
        self.iter_num = 0
        for x, y in loader:
            _, self.loss = model(x, y)
            assert self.loss is not None
            model.zero_grad(set_to_none=True)
            self.loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            self.optimizer.step()
            for callback in self.callbacks:
                callback(self)
            self.iter_num += 1
            if self.iter_num >= config.max_iters:  # type: ignore[attr-defined]
                break


if __name__ == "__main__":
    config = Node(
        system=Node(seed=3407, work_dir="./out/mini"),
        data=Node(block_size=16),
        model=Node(width=32),
        trainer=Node(batch_size=4, learning_rate=5e-3, max_iters=6),
    )
    config.update_from(sys.argv[1:])
    torch.manual_seed(config.system.seed)  # type: ignore[attr-defined]
    text = "\n".join(topics.values())
    model = Mini(config.model.width)  # type: ignore[attr-defined]
    trainer = Trainer(config.trainer, model, Characters(config.data, text))  # type: ignore[attr-defined]
    trainer.callbacks.append(lambda t: print(f"iter {t.iter_num}: loss {t.loss.item():.9g}"))
    trainer.run()
