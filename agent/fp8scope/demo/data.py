"""The demo's text: Python's language reference, which comes with every CPython, as bytes.

`pydoc_data.topics` holds the text that `help("lambda")` prints: English prose and grammar in about eighty
topics. Paragraphs that repeat in several topics are removed first, so that held-out text is not in the
training text. The end of every topic is held out.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pydoc_data import topics

import torch
from torch import Tensor

HELD_OUT = 0.1
"""The share of every topic that is held out, at its end."""


@dataclass(frozen=True)
class Corpus:
    """Training text and held-out windows, as bytes.

    `train` is uint8 [bytes]. `windows` is int64 [items, context + 1]: the first `context` bytes of a window
    predict its last `context`. `items` names each window and `clusters` its topic; windows of one topic are
    not independent.
    """

    train: Tensor
    windows: Tensor
    items: tuple[str, ...]
    clusters: tuple[str, ...]

    @property
    def context(self) -> int:
        return self.windows.shape[1] - 1

    def batch(self, step: int, size: int) -> Tensor:
        """Return the training batch of a step: int64 [size, context + 1], the same in every run."""
        generator = torch.Generator().manual_seed(step)
        starts = torch.randint(len(self.train) - self.context, (size, 1), generator=generator)
        return self.train[starts + torch.arange(self.context + 1)].long()


def load(context: int, windows: int) -> Corpus:
    """Load the corpus with `windows` held-out windows of `context` + 1 bytes, spread evenly over the topics.

    Raises ValueError if there are fewer windows.
    """
    train = bytearray()
    held_out: list[tuple[str, str, bytes]] = []
    for topic, text in sorted(_without_repetitions(topics.topics).items()):
        kept = len(text) - int(len(text) * HELD_OUT)
        train += text[:kept]
        for start in range(kept, len(text) - context, context + 1):
            held_out.append((f"{topic}@{start}", topic, text[start : start + context + 1]))
    if not 1 <= windows <= len(held_out):
        raise ValueError(f"windows must be from 1 to {len(held_out)}, the number available, got {windows}.")
    chosen = [held_out[i * len(held_out) // windows] for i in range(windows)]
    scored = bytearray(b"".join(window for _, _, window in chosen))
    return Corpus(
        train=torch.frombuffer(train, dtype=torch.uint8),
        windows=torch.frombuffer(scored, dtype=torch.uint8).view(windows, context + 1).long(),
        items=tuple(item for item, _, _ in chosen),
        clusters=tuple(topic for _, topic, _ in chosen),
    )


def _without_repetitions(texts: Mapping[str, str]) -> dict[str, bytes]:
    """Return each topic's text without paragraphs that occur in a longer topic or earlier in the same one."""
    seen: set[str] = set()
    unique = {}
    for topic in sorted(texts, key=lambda name: (-len(texts[name]), name)):
        kept = []
        for paragraph in texts[topic].split("\n\n"):
            # Compare words only, not line breaks and indentation.
            words = " ".join(paragraph.split())
            if words not in seen:
                seen.add(words)
                kept.append(paragraph)
        unique[topic] = "\n\n".join(kept).encode()
    return unique
