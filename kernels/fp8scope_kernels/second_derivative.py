"""Second derivatives of FP8 products: refused, because rounding leaves nothing to differentiate.

The gradients of an FP8 layer are products of quantised tensors. Differentiating them as they are would leave
out what the layer's input and weight contribute, and a gradient penalty would be wrong without a word.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

Gradients = tuple[Tensor | None, ...]

MESSAGE = (
    "An FP8 layer cannot be differentiated twice, and create_graph=True asks for that: its gradients are "
    "products of rounded tensors. For a gradient penalty or a Hessian, set layer.precision = 'bf16' on the "
    "layers that it goes through, or leave them out with convert(..., exclude=...)."
)


def once_differentiable(backward: Callable[..., Gradients]) -> Callable[..., Gradients]:
    """A `backward` of an autograd function that raises RuntimeError where its own graph is asked for.

    At once, and not when the second derivative is taken, as torch's decorator of this name does: what is not
    on the way to the tensors then differentiated is passed over there, and counts as zero.
    """

    @wraps(backward)
    def once(ctx: Any, *grads: Tensor) -> Gradients:
        # In a backward pass the gradient mode is its create_graph.
        if torch.is_grad_enabled():
            raise RuntimeError(MESSAGE)
        return backward(ctx, *grads)

    return once
