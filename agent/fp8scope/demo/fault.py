"""The fault that the demo's last run has: gradient scales that have gone stale after a resume.

Under delayed scaling a tensor's scale follows the largest magnitude of its last steps. It is state, as the
optimizer's moments are, and a resume can restore it by half: the scale comes back from the checkpoint, but
what updates it is not connected again. Such a scale is right until the magnitudes change. Here they change
at the resume, because the loss scaler starts over at its initial value. In BF16 nobody would notice: the
optimizer takes the loss scale out again. With a scale that follows, FP8 is well again a few steps later.
With one that does not, the gradients are clipped to E5M2's largest value from then on. What clipping leaves
of a gradient is little more than its sign: tokens that should count for little pull as hard as any other,
and the weights are led away.
"""

from dataclasses import replace

from torch import nn

from fp8scope_kernels import DelayedScaling, fp8_layers

LOSS_SCALE = 1024.0
"""What the loss scaler starts over with: a power of two, so that taking it out again is exact."""

NEVER = 2**31
"""Calls between two updates of a scale; no run here is that long."""


def freeze_gradient_scales(model: nn.Module) -> int:
    """Keep the scale of every `grad_output` at what it is now, as a resume does that does not connect the
    update again. Returns the number of tensors; raises ValueError where scaling is not delayed."""
    count = 0
    for path, layer in fp8_layers(model):
        state = layer.state_of("grad_output")
        if not isinstance(state.recipe, DelayedScaling):
            raise ValueError(f"{path} has no delayed scaling: its scales cannot go stale.")
        state.recipe = replace(state.recipe, interval=NEVER)
        count += 1
    return count
