"""The anatomy of a step: the parts that its time consists of, each as a scalar `anatomy/<part>_seconds`.

| part            | is                                                                                       |
|-----------------|------------------------------------------------------------------------------------------|
| `data`          | inside of `DataLoader`; without one, the time from the end of the work to a forward pass |
| `copy`          | copies of tensors from the host to an accelerator                                        |
| `forward`       | the model's forward passes                                                               |
| `loss`          | from the end of a forward pass to the beginning of the model's backward pass             |
| `backward`      | backward passes                                                                          |
| `communication` | collectives that the training waits for, such as the end of a reduction of gradients     |
| `optimizer`     | the optimizer's step                                                                     |
| `checkpoint`    | saving and loading: `torch.save`, `torch.load`, `torch.distributed.checkpoint`           |
| `rest`          | everything else: clipping, evaluations, logging, schedulers                              |

The parts do not overlap, and add up to the time since the step before ended. A copy, a collective or a
checkpoint inside of another part is taken out of that. `copy`, `communication` and `checkpoint` are recorded
from the first step on in which they take time.
"""

from collections.abc import Sequence
from typing import Final

PARTS: Final = (
    "data", "copy", "forward", "loss", "backward", "communication", "optimizer", "checkpoint", "rest",
)  # fmt: skip
(
    DATA_PART, COPY, FORWARD_PART, LOSS_PART, BACKWARD_PART, COMMUNICATION, OPTIMIZER_PART, CHECKPOINT, REST,
) = range(len(PARTS))  # fmt: skip
OCCASIONAL: Final = frozenset((COPY, COMMUNICATION, CHECKPOINT))
"""Parts that not every training has."""


def scalar_of(part: str) -> str:
    """Return the name of the scalar with the seconds of a part."""
    return f"anatomy/{part}_seconds"


class PartTimes:
    """Adds up the seconds of a step's parts, from intervals and from what interrupts them.

    Times come in the order in which they end: first the `interruption`s of an interval, then its own `part`.
    """

    __slots__ = ("_interrupted", "_saw_loader", "seconds")

    def __init__(self) -> None:
        self.seconds = [0.0] * len(PARTS)
        self._interrupted = 0.0
        self._saw_loader = False

    def interruption(self, part: int, seconds: float) -> None:
        """Add the seconds of a part inside of the interval that has not ended."""
        self.seconds[part] += seconds
        self._interrupted += seconds
        self._saw_loader |= part == DATA_PART

    def interval(self, part: int, seconds: float) -> None:
        """Add an interval that has ended; `seconds` includes its interruptions."""
        if part == DATA_PART and self._saw_loader:
            # The loader says what the wait was; the script did the rest.
            part = REST
        self.seconds[part] += max(0.0, seconds - self._interrupted)
        self._interrupted, self._saw_loader = 0.0, False


def scalars_of(seconds: Sequence[float], occurred: set[int]) -> dict[str, float]:
    """Return the scalars of a step; `occurred` has the occasional parts so far, and is added to."""
    occurred.update(part for part in OCCASIONAL if seconds[part] > 0)
    return {
        scalar_of(name): seconds[part]
        for part, name in enumerate(PARTS)
        if part not in OCCASIONAL or part in occurred
    }
