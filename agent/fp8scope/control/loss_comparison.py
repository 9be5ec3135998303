"""Compares the losses of two arms that trained on the same batches.

Extracts the losses from what the training steps returned, averages them over the ranks, and gives a verdict.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fp8scope.config import ConfigurationError
from fp8scope.scalars import host_number

MARGIN = 0.0025
"""The default of the largest relative difference that counts as equal; a project or script can change it."""


@dataclass(frozen=True)
class WindowVerdict:
    """The result of comparing the losses of two arms on the same batches.

    `delta` is (mean FP8 - mean BF16) / |mean BF16|. `noise` is the standard error of the mean paired
    difference, on the same relative scale; it describes the spread within this window only.
    """

    delta: float
    noise: float
    within: bool


def compare(fp8: Sequence[float], bf16: Sequence[float], tolerance: float) -> WindowVerdict:
    """Compare the arms. They are within tolerance if |delta| <= tolerance; non-finite losses never are."""
    count = len(fp8)
    scale = abs(math.fsum(bf16)) / count if all(map(math.isfinite, bf16)) else math.nan
    differences = [(a - b) / scale if scale else math.nan for a, b in zip(fp8, bf16, strict=True)]
    if not all(map(math.isfinite, differences)):
        return WindowVerdict(math.nan, math.nan, False)
    delta = math.fsum(differences) / count
    spread = math.fsum((difference - delta) ** 2 for difference in differences) / max(count - 1, 1)
    return WindowVerdict(delta, math.sqrt(spread / count), abs(delta) <= tolerance)


def check_tolerance(tolerance: Any) -> float | None:
    """Return `tolerance`. Raises ConfigurationError unless it is None or a finite number above 0."""
    if tolerance is None:
        return None
    if isinstance(tolerance, bool) or not isinstance(tolerance, int | float) or not 0 < tolerance < math.inf:
        raise ConfigurationError(f"tolerance must be a number above 0, got {tolerance!r}.")
    return float(tolerance)


def loss_of(result: Any) -> Tensor | float:
    """Extract the loss from what a training step returned.

    That is a number, a tensor of one element, or a container with the loss as `loss` or as its first item.
    Raises TypeError if there is no loss.
    """
    if isinstance(result, dict):
        result = result.get("loss")
    elif isinstance(result, tuple | list) and result:
        result = result[0]
    elif not isinstance(result, Tensor | int | float) and hasattr(result, "loss"):
        result = result.loss
    if isinstance(result, Tensor):
        # Clone it: a compiled step may reuse the memory of its loss.
        return result.detach().clone()
    if isinstance(result, bool) or not isinstance(result, int | float):
        raise TypeError("train_step must return the loss")
    return float(result)


def host_numbers(losses: Iterable[Tensor | float | None]) -> list[float]:
    """Convert losses to plain numbers; waits for the device that holds them."""
    return [host_number(loss.cpu() if isinstance(loss, Tensor) else loss) for loss in losses]


def averaged_over_ranks(
    fp8: list[float], bf16: list[float], device: torch.device
) -> tuple[list[float], list[float]]:
    """Average the losses over all ranks, so that all ranks reach the same verdict."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized() or distributed.get_world_size() < 2:
        return fp8, bf16
    both = torch.tensor([fp8, bf16], dtype=torch.float64, device=device)
    distributed.all_reduce(both)
    means = (both / distributed.get_world_size()).tolist()
    return means[0], means[1]
