"""The fault of the demo's last run: gradient scales that are stale after a resume.

Under delayed scaling a tensor's scale follows its largest magnitude of the last steps. The scale is state,
like the optimizer's moments, and a faulty resume may restore it only in part: the scale is loaded from the
checkpoint, but never updated again. It stays correct until the magnitudes change.

Here they change at the resume, because the loss scaler starts again at its initial value. BF16 is not
affected: the optimizer divides the loss scale out. Working delayed scaling recovers within a few steps. With
a stale scale the gradients are clipped to E5M2's largest value from then on. Little more than their signs
remains: tokens with small gradients pull as hard as others, and the weights drift away.
"""

from dataclasses import replace

from torch import nn

from fp8scope_kernels import DelayedScaling, fp8_layers

LOSS_SCALE = 1024.0
"""The loss scaler's initial value. A power of two, so that dividing by it is exact."""

NEVER = 2**31
"""An update interval of scales, in calls, that no run of the demo reaches."""


def freeze_gradient_scales(model: nn.Module) -> int:
    """Stop updating the scale of every `grad_output`, as a faulty resume does.

    Returns the number of tensors. Raises ValueError if a layer's scaling is not delayed.
    """
    count = 0
    for path, layer in fp8_layers(model):
        state = layer.state_of("grad_output")
        if not isinstance(state.recipe, DelayedScaling):
            raise ValueError(f"{path} has no delayed scaling: its scales cannot go stale.")
        state.recipe = replace(state.recipe, interval=NEVER)
        count += 1
    return count
