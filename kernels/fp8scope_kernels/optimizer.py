"""AdamW with its state in 8 and 16 bits: the optimizer of FP8-LM, at the levels of MS-AMP.

After Peng et al., "FP8-LM: Training FP8 Large Language Models" (2023). Every stored tensor has its own scale.
Bytes per parameter, in addition to the model's weights:

| level | first moment | second moment | master weight       | bytes       | gradients (`gradients`)   |
|-------|--------------|---------------|---------------------|-------------|---------------------------|
| O1    | float32      | float32       | float32 (see below) | 8 or 12     | reduced in FP8            |
| O2    | E4M3         | FP16          | FP16                | 5           | reduced in FP8            |
| O3    | E4M3         | FP16          | FP16                | 5 / ranks   | reduced in FP8            |

O1 is plain AdamW here; it keeps master weights only for parameters that are not float32. At O3 one rank holds
the state of each tensor, and sends the other ranks the new weight in the FP16 that it stores.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from fp8scope_kernels.distributed import Group
from fp8scope_kernels.formats import E4M3, Format
from fp8scope_kernels.plain_tensors import can_branch_on
from fp8scope_kernels.quantization import amax_to_scale, measure, quantize
from fp8scope_kernels.reference import Extent, infinite_to_nan_
from fp8scope_kernels.statistics import Slot, StatisticsBuffer

Level = Literal["O1", "O2", "O3"]
LEVELS: tuple[Level, ...] = ("O1", "O2", "O3")

FP16 = Format(name="FP16", exponent_bits=5, mantissa_bits=10, bias=15, specials="ieee", dtype=torch.float16)

FORMAT_OF: dict[str, Format] = {"exp_avg": E4M3, "exp_avg_sq": FP16, "master": FP16}
"""The format of each tensor of the state at O2 and O3."""

MAX_BETAS = (1 - E4M3.epsilon / 2, 1 - FP16.epsilon / 2)
"""A moment decays by 1 - beta per step. A change of less than half a unit in the last place would be lost."""


class Fp8AdamW(Optimizer):
    """AdamW (Loshchilov and Hutter 2019) with decoupled weight decay, as `torch.optim.AdamW`.

    Arithmetic is in float32; `level` chooses how the state is stored between steps. Parameters may have any
    floating dtype. They are set from the master weights, which overwrites any other change to a weight after
    the first step. A second moment that FP16 would flush to zero is stored as the smallest FP16 number,
    because dividing by zero would make its parameter jump.

    FP16 has 11 significant bits: an update below 2^-12 of its weight is lost, where float32 would add it up.

    At O3 all ranks of `group` step together, with the same gradients. `state_dict` is this rank's part, valid
    for the same rank of a group of the same size.

    Raises ValueError for settings out of their range, TypeError for sharded or non-floating parameters.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        level: Level = "O2",
        group: Group | None = None,
    ) -> None:
        if level not in LEVELS:
            raise ValueError(f"level must be one of {', '.join(LEVELS)}, got {level!r}.")
        self.level, self.group = level, group
        self._owner: dict[Tensor, int] = {}
        self._slots: dict[Tensor, dict[str, Slot]] = {}
        grouped = level == "O3" and dist.is_available() and dist.is_initialized()
        self._rank, self._ranks = (dist.get_rank(group), dist.get_world_size(group)) if grouped else (0, 1)
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As for any optimizer, but at O3 only before the first step, which distributes the parameters.

        Raises RuntimeError after it.
        """
        if self._owner:
            raise RuntimeError("At O3 parameters cannot be added after the first step; make a new optimizer.")
        super().add_param_group(param_group)
        _check(self.param_groups[-1], self.level)

    def observe(self, buffer: StatisticsBuffer, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> int:
        """Bind the stored tensors to rows of `buffer`, written at every step; returns the number of rows.

        Names are `<parameter>.<exp_avg|exp_avg_sq|master>`. At O1 nothing is quantised or bound; at O3 a rank
        counts the tensors that it owns. Raises ValueError if a parameter has no name.
        """
        names: dict[Tensor, str] = {parameter: name for name, parameter in named_parameters}
        unnamed = sum(parameter not in names for parameter in self._parameters())
        if unnamed:
            raise ValueError(f"{unnamed} parameters have no name; pass model.named_parameters().")
        self._slots = {}
        for parameter in self._parameters() if self.level != "O1" else ():
            self._slots[parameter] = {
                key: buffer.register(
                    f"{names[parameter]}.{key}", format=format, shape=tuple(parameter.shape), role=key
                )
                for key, format in FORMAT_OF.items()
            }
        return sum(len(slots) for slots in self._slots.values())

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update all parameters that have a gradient. Raises ValueError for a sparse one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # The state is used after the step, also if the step runs in inference mode.
        with torch.inference_mode(False), torch.no_grad():
            self._assign()
            for group in self.param_groups:
                for parameter in group["params"]:
                    if self._owner.get(parameter, self._rank) == self._rank:
                        self._update(parameter, group)
            if self._ranks > 1:
                for rank in range(self._ranks):
                    self._send_weights(rank)
        return loss

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """As for any optimizer; tensors keep the dtypes of the saved state."""
        super().load_state_dict(dict(state_dict))
        # torch has cast the state to the dtype of the parameters.
        for index, parameter in enumerate(self._parameters()):
            for key, value in state_dict["state"].get(index, {}).items():
                if isinstance(value, Tensor):
                    self.state[parameter][key] = value.to(parameter.device, copy=True)

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            self._start(parameter, state)
        if parameter.grad is None:
            return
        if parameter.grad.layout != torch.strided:
            raise ValueError("A gradient is sparse; use a dense one (nn.Embedding(sparse=False)).")
        state["step"] += 1
        beta1, beta2 = group["betas"]
        grad = parameter.grad.float()
        exp_avg = _load(state, "exp_avg").lerp_(grad, 1 - beta1)
        exp_avg_sq = _load(state, "exp_avg_sq").mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        weight = _load(state, "master") if "master" in state else parameter
        root = exp_avg_sq.sqrt().div_(math.sqrt(1 - beta2 ** state["step"])).add_(group["eps"])
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.addcdiv_(exp_avg, root, value=-group["lr"] / (1 - beta1 ** state["step"]))
        self._store(parameter, "exp_avg", exp_avg)
        self._store(parameter, "exp_avg_sq", exp_avg_sq)
        if "master" in state:
            self._store(parameter, "master", weight)
            parameter.copy_(_load(state, "master"))

    def _start(self, parameter: Tensor, state: dict[str, Any]) -> None:
        state["step"] = 0
        zeros = torch.zeros_like(parameter, dtype=torch.float32, memory_format=torch.contiguous_format)
        for key in ("exp_avg", "exp_avg_sq"):
            self._store(parameter, key, zeros.clone(), count=False)
        if self.level != "O1" or parameter.dtype != torch.float32:
            self._store(parameter, "master", parameter.detach().to(torch.float32, copy=True), count=False)

    def _store(self, parameter: Tensor, key: str, value: Tensor, *, count: bool = True) -> None:
        """Store `value` (float32): unchanged at O1, else quantised with its own scale, and counted."""
        state = self.state[parameter]
        if self.level == "O1":
            state[key] = value
            return
        slots = self._slots.get(parameter) if count else None
        format, extent = FORMAT_OF[key], measure(value)
        scale = amax_to_scale(extent.amax, format)
        row = slots[key].row if slots else None
        if format is FP16:
            data = _to_fp16(value, scale, extent, row)
        else:
            data = quantize(value, scale, format, row, extent=extent).data
        if key == "exp_avg_sq":
            data.masked_fill_((data == 0) & (value > 0), format.smallest_subnormal)
        state[key], state[f"{key}_scale"] = data, scale

    def _assign(self) -> None:
        """At O3, assign tensors to ranks: the largest first, each to the rank with the fewest elements."""
        if self._owner or self._ranks == 1:
            return
        load = [0] * self._ranks
        for parameter in sorted(self._parameters(), key=Tensor.numel, reverse=True):
            rank = load.index(min(load))
            self._owner[parameter] = rank
            load[rank] += parameter.numel()

    def _send_weights(self, rank: int) -> None:
        """Send the weights that `rank` owns to all other ranks, in one broadcast of bytes."""
        owned = [parameter for parameter in self._parameters() if self._owner[parameter] == rank]
        if not owned:
            return
        sizes = [parameter.numel() for parameter in owned]
        mine = rank == self._rank
        if mine:
            states = [self.state[parameter] for parameter in owned]
            scales = torch.stack([state["master_scale"] for state in states])
            codes = torch.cat([state["master"].reshape(-1) for state in states])
            flat = torch.cat((scales.view(torch.uint8), codes.view(torch.uint8)))
        else:
            flat = torch.empty(4 * len(owned) + 2 * sum(sizes), dtype=torch.uint8, device=owned[0].device)
        dist.broadcast(flat, group=self.group, group_src=rank)
        if mine:
            return
        scales = flat[: 4 * len(owned)].view(torch.float32)
        codes = flat[4 * len(owned) :].view(torch.float16)
        for parameter, scale, part in zip(owned, scales, torch.split(codes, sizes), strict=True):
            parameter.copy_((part.float() * scale.reciprocal()).view_as(parameter))

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]


def _to_fp16(value: Tensor, scale: Tensor, extent: Extent, row: Tensor | None) -> Tensor:
    """`quantize` for FP16, which the kernels do not support, in plain torch."""
    scaled = value * scale
    clamped = scaled.clamp(-FP16.max, FP16.max)
    if not (can_branch_on(value) and bool(extent.nonfinite == 0)):
        # As in FP8: a non-finite element stays visible, and makes the weight NaN.
        infinite_to_nan_(clamped, value)
    data = clamped.half()
    if row is not None:
        magnitude, vanished = data.abs(), data == 0
        row[0] += value.numel()
        row[1] = torch.maximum(row[1], extent.amax)
        row[2] = scale
        row[3] += ((scaled.abs() > FP16.limit) & torch.isfinite(value)).sum()
        row[4] += (vanished & (value != 0)).sum()
        row[5] += (~vanished & (magnitude < FP16.smallest_normal)).sum()
        row[6] += extent.nonfinite
    return data


def _load(state: dict[str, Any], key: str) -> Tensor:
    """A tensor stored by `_store` as float32: the tensor itself at O1, else a new one."""
    value: Tensor = state[key]
    scale: Tensor | None = state.get(f"{key}_scale")
    return value if scale is None else value.float().mul_(scale.reciprocal())


def _check(group: dict[str, Any], level: Level) -> None:
    (beta1, beta2) = betas = group["betas"]
    if group["lr"] < 0 or group["eps"] < 0 or group["weight_decay"] < 0:
        raise ValueError("lr, eps and weight_decay must not be negative.")
    if not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas must be from 0 to less than 1, got {betas}.")
    if level != "O1" and (beta1 > MAX_BETAS[0] or beta2 > MAX_BETAS[1]):
        raise ValueError(
            f"At {level} betas can be at most {MAX_BETAS[0]:g} and {MAX_BETAS[1]:.6f}, got {betas}: "
            "with these, a stored moment would be too coarse to decay. Use level='O1', or smaller betas."
        )
    for parameter in group["params"]:
        if hasattr(parameter, "placements"):
            raise TypeError("A parameter is already sharded; FSDP shards the state of any optimizer itself.")
        if not parameter.is_floating_point():
            raise TypeError(f"Only floating-point parameters can be optimised, got {parameter.dtype}.")
