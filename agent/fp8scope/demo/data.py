"""The demo's text as bytes: what is trained on, in which order, and what is held out.

The end of every topic of `text.topics` is held out.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fp8scope.demo import text

HELD_OUT = 0.1
"""The share of every topic that is held out, at its end."""

STEPS_OF_SEED = 2**32
"""The batches of different seeds differ in all steps below this number."""


@dataclass(frozen=True)
class Corpus:
    """Training text and held-out windows, as bytes.

    `train` is uint8 [bytes]. `windows` is int64 [items, context + 1]: the first `context` bytes of a window
    predict its last `context`. `items` names each window and `clusters` its topic; windows of one topic are
    not independent. `seed` determines the text and the batches.
    """

    train: Tensor
    windows: Tensor
    items: tuple[str, ...]
    clusters: tuple[str, ...]
    seed: int = 0

    @property
    def context(self) -> int:
        return self.windows.shape[1] - 1

    def batch(self, step: int, size: int) -> Tensor:
        """Return the training batch of a step: int64 [size, context + 1], the same in every run."""
        chance = text.Chance(self.seed * STEPS_OF_SEED + step)
        limit = len(self.train) - self.context
        starts = torch.tensor([[chance.below(limit)] for _ in range(size)])
        return self.train[starts + torch.arange(self.context + 1)].long()


def load(context: int, windows: int, seed: int = 0) -> Corpus:
    """Load the corpus with `windows` held-out windows of `context` + 1 bytes, spread evenly over the topics.

    Raises ValueError if there are fewer windows.
    """
    train = bytearray()
    held_out: list[tuple[str, str, bytes]] = []
    for topic, content in sorted(text.topics(seed).items()):
        encoded = content.encode("ascii")
        end = len(encoded) - int(len(encoded) * HELD_OUT)
        train += encoded[:end]
        for start in range(end, len(encoded) - context, context + 1):
            held_out.append((f"{topic}@{start}", topic, encoded[start : start + context + 1]))
    if not 1 <= windows <= len(held_out):
        raise ValueError(f"windows must be from 1 to {len(held_out)}, the number available, got {windows}.")
    chosen = [held_out[i * len(held_out) // windows] for i in range(windows)]
    scored = bytearray(b"".join(window for _, _, window in chosen))
    return Corpus(
        train=torch.frombuffer(train, dtype=torch.uint8),
        windows=torch.frombuffer(scored, dtype=torch.uint8).view(windows, context + 1).long(),
        items=tuple(item for item, _, _ in chosen),
        clusters=tuple(topic for _, topic, _ in chosen),
        seed=seed,
    )
