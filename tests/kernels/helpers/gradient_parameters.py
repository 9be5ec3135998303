"""Parameters whose gradients are averaged over ranks."""

import torch
from torch import nn

SHAPES = [(7, 5), (64, 32), (), (0, 4), (3,), (1001,)]


def parameters(shapes: list[tuple[int, ...]] = SHAPES) -> list[tuple[str, nn.Parameter]]:
    """Zeros of these shapes, named p0, p1, ..."""
    return [(f"p{i}", nn.Parameter(torch.zeros(shape))) for i, shape in enumerate(shapes)]
