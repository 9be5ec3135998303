"""The scalars under which the values of a tag are stored."""

import hashlib
from collections.abc import Mapping
from typing import Final

from fp8scope.capture.names import recorded_name
from fp8scope.step import MAX_SCALARS

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
"""Names that trainers give to the scalars with a fixed meaning, in small letters, as the server has them."""
_MEANING: Final = {tag: name for name, tags in STANDARD.items() for tag in tags}
OTHER_AXES: Final = (" vs samples", "_vs_samples")
"""Megatron writes each value twice: over iterations, and over the samples that were consumed."""


def is_loss(tag: str) -> bool:
    """Return whether a tag is the loss of the training."""
    return _MEANING.get(tag.lower()) == "loss"


class ScalarNames:
    """The scalars of the tags of one run: the tag itself, and the scalar whose meaning it has.

    Of several tags with one meaning the first one has it, or the one that has the very name.

    Attributes:
        left_out: the tags that are not stored, because a run has no room for more scalars.
    """

    def __init__(self) -> None:
        self.left_out: set[str] = set()
        self._own: dict[str, str] = {}
        self._taken: dict[str, str] = {}
        """Tags by their scalars."""
        self._meant: dict[str, str] = {}
        """Tags by the scalar whose meaning they have."""

    def names_of(self, tag: str) -> tuple[str, ...]:
        """Return the scalars of a tag; none if it is left out."""
        own = self._own.get(tag)
        if own is None:
            if tag.endswith(OTHER_AXES):
                return ()
            if len(self._own) >= MAX_SCALARS - len(STANDARD):
                if len(self.left_out) < MAX_SCALARS:
                    self.left_out.add(tag)
                return ()
            own = self._new_name(tag)
        meaning = _MEANING.get(tag.lower())
        return (
            (own, meaning) if meaning is not None and self._meant.get(meaning) == tag != meaning else (own,)
        )

    def _new_name(self, tag: str) -> str:
        own = recorded_name(tag, follows=False)
        if own in self._taken or (own in STANDARD and own != tag):
            own = f"{own[:119]}-{hashlib.sha256(tag.encode()).hexdigest()[:8]}"
        self._own[tag], self._taken[own] = own, tag
        meaning = _MEANING.get(tag.lower())
        if meaning is not None and (meaning == tag or meaning not in self._meant):
            self._meant[meaning] = tag
        return own
