"""Names that trainers and exporters give to the scalars with a fixed meaning.

The agent has the same table for files of other tools (`event_files/names.py`); a test compares them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

LOSS: Final = "loss"
"""The scalar that verdicts and alerts judge."""
STANDARD: Final[Mapping[str, tuple[str, ...]]] = {
    "loss": (
        *("loss", "train/loss", "train.loss", "train_loss", "train_loss_step", "train/loss_step"),
        *("loss/train", "training_loss", "training/loss", "training.loss", "lm loss", "lm_loss", "lm-loss"),
        *("train/lm_loss", "train/lm loss", "lm-loss-training/lm loss", "reduced_train_loss"),
        *("loss_metrics/global_avg_loss", "megatron.training.loss", "dl.loss"),
    ),
    "learning_rate": (
        *("learning_rate", "learning-rate", "lr", "train/learning_rate", "train/lr", "train.learning_rate"),
        *("training.learning_rate", "dl.learning_rate", "rl.learning_rate"),
        "megatron.training.learning_rate",
    ),
    "grad_norm": (
        *("grad_norm", "grad-norm", "train/grad_norm", "train.grad_norm", "training.grad_norm"),
        *("dl.grad_norm", "rl.grad_norm", "megatron.training.grad_norm"),
    ),
    "tokens_per_second": (
        *("tokens_per_second", "megatron.training.tokens_per_sec", "rl.throughput.tokens_per_sec"),
        "dl.throughput_tokens_per_sec",
    ),
}
"""The names of each scalar, in small letters."""
_MEANING: Final = {name: scalar for scalar, names in STANDARD.items() for name in names}


def meaning_of(name: str) -> str:
    """The scalar whose meaning a name has, or an empty text."""
    return _MEANING.get(name.lower(), "")
