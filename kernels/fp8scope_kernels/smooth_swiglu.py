"""Smooth-SwiGLU: a SwiGLU whose product fits FP8 with one scale per tensor.

From "Scaling FP8 training to trillion-token LLMs" (Fishman et al., arXiv 2409.12517). Late in long trainings
a few channels of h = up(x) * silu(gate(x)) grow until they decide the scale of the whole tensor, and the
others are flushed. Each channel i is therefore multiplied by a scale of its own before it is quantised, and
column i of the down projection by its reciprocal:

    down(h) = W h = (W / s) (s * h),   s_i = 2^-floor(log2 amax_i), amax_i = max abs(h_i) over the tokens

where amax_i is of the finite elements, and s_i is 1 if it is 0. Scales are powers of two, so that neither
multiplication rounds (but for subnormals) and the layer computes the same function in high precision. They
are computed with every call, and no gradient flows through them.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from fp8scope_kernels.reference import EXPONENT_BITS

MAX_SCALE_EXPONENT = 60
"""Scales are 2^-60 to 2^60: their products with weights stay far inside of BF16's range."""


class SmoothSwiGLU(nn.Module):
    """`down(up(x) * silu(gate(x)))` with smoothed channels.

    `gate`, `up`: from the model's width to the hidden one; `down`: back. They are `nn.Linear` modules or
    `Fp8Linear`, also after `convert`, which finds them by the names `gate`, `up` and `down` in this module.
    Statistics of `down` are those of the smoothed tensors, `s * h` and `W / s`. Raises ValueError if the
    sizes do not fit.
    """

    def __init__(self, gate: nn.Linear, up: nn.Linear, down: nn.Linear) -> None:
        super().__init__()
        if not gate.out_features == up.out_features == down.in_features:
            raise ValueError(
                f"gate and up have {gate.out_features} and {up.out_features} outputs, and down takes "
                f"{down.in_features}."
            )
        self.gate = gate
        self.up = up
        self.down = down

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x) * functional.silu(self.gate(x))
        scale = channel_scales(h)
        smoothed = {"weight": self.down.weight * scale.reciprocal().to(self.down.weight.dtype)}
        output: Tensor = torch.func.functional_call(self.down, smoothed, (h * scale.to(h.dtype),))
        return output


def channel_scales(h: Tensor) -> Tensor:
    """s of each channel of h [..., channels]: float32 [channels]."""
    finite = h.detach().float().nan_to_num(0.0, 0.0, 0.0).abs()
    amax = finite.reshape(-1, h.shape[-1])
    amax = amax.amax(0) if len(amax) else amax.new_zeros(h.shape[-1])
    bound = 2.0**MAX_SCALE_EXPONENT
    # A float32 without its mantissa bits is the power of two at or below it.
    power = (amax.clamp(1 / bound, bound).view(torch.int32) & EXPONENT_BITS).view(torch.float32)
    return torch.where(amax > 0, power.reciprocal(), 1.0)
