"""AdamW with its state in 8 and 16 bits: the optimizer of FP8-LM, at the levels of MS-AMP.

After Peng et al., "FP8-LM: Training FP8 Large Language Models" (2023). Bytes per parameter, in addition to
the model's weights:

| level | first moment | second moment | master weight       | bytes        | gradients (`gradients`)   |
|-------|--------------|---------------|---------------------|--------------|---------------------------|
| O1    | float32      | float32       | float32 (see below) | 8 or 12      | reduced in FP8            |
| O2    | E4M3         | FP16          | FP16                | 5.02         | reduced in FP8            |
| O3    | E4M3         | FP16          | FP16                | 5.02 / ranks | reduced in FP8            |

Scales: one for each 256 elements of the first moment (4 / 256 bytes), one for each other tensor. O1 is plain
AdamW here; it keeps master weights only for parameters that are not float32. At O3 one rank holds the state
of each tensor, and sends the other ranks the new weight in the FP16 that it stores.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from fp8scope_kernels.distributed import Group
from fp8scope_kernels.optimizer_storage import FORMAT_OF, FP16, BucketLayout, JoinedState, layout_of
from fp8scope_kernels.statistics import Slot, StatisticsBuffer

Level = Literal["O1", "O2", "O3"]
LEVELS: tuple[Level, ...] = ("O1", "O2", "O3")

MAX_BETA2 = 1 - FP16.epsilon / 2
"""The second moment decays by 1 - beta2 per step, and is rounded to nearest.

A change of less than half a unit in its last place would be lost. The first moment is rounded at random.
"""

BUCKET_ELEMENTS = 2**20
"""A bucket is full with so many. It bounds the memory of a step, which holds a bucket several times."""


@dataclass(kw_only=True)
class Bucket:
    """Parameters that are updated together, with their numbers in the optimizer."""

    group: dict[str, Any]
    step: int
    parameters: list[Tensor] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    elements: int = 0

    def add(self, number: int, parameter: Tensor) -> None:
        self.parameters.append(parameter)
        self.numbers.append(number)
        self.elements += parameter.numel()

    @property
    def gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.parameters if parameter.grad is not None]


class Fp8AdamW(Optimizer):
    """AdamW (Loshchilov and Hutter 2019) with decoupled weight decay, as `torch.optim.AdamW`.

    Arithmetic is in float32; `level` chooses how the state is stored between steps. Parameters may have any
    floating dtype. They are set from the master weights, which overwrites any other change to a weight after
    the first step. A second moment that FP16 would flush to zero is stored as the smallest FP16 number,
    because dividing by zero would make its parameter jump.

    The first moment is rounded at random, so that it decays at the right rate with any beta1. The numbers
    drawn are a function of the parameter's place, the element and the step: they take nothing from torch's
    generators, and are equal on all ranks and in a resumed training.

    `foreach`: update many small parameters with the same few operators. Both ways give the same bits; False
    takes less memory. `lr` may be a tensor, which is read at every step.

    FP16 has 11 significant bits: an update below 2^-12 of its weight is lost, where float32 would add it up.

    At O3 all ranks of `group` step together, with the same gradients. `state_dict` is this rank's part, valid
    for the same rank of a group of the same size.

    Raises ValueError for settings out of their range, TypeError for sharded or non-floating parameters.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        level: Level = "O2",
        group: Group | None = None,
        foreach: bool = True,
    ) -> None:
        if level not in LEVELS:
            raise ValueError(f"level must be one of {', '.join(LEVELS)}, got {level!r}.")
        self.level, self.group, self.foreach = level, group, foreach
        self._owner: dict[Tensor, int] = {}
        self._slots: dict[Tensor, dict[str, Slot]] = {}
        self._joined: dict[int, tuple[list[int], dict[str, JoinedState]]] = {}
        """By the number of each parameter, its bucket of the last step and the state of that."""
        grouped = level == "O3" and dist.is_available() and dist.is_initialized()
        self._rank, self._ranks = (dist.get_rank(group), dist.get_world_size(group)) if grouped else (0, 1)
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def __getstate__(self) -> dict[str, Any]:
        """The attributes of a copy, which binds no rows of a buffer."""
        own = ("level", "group", "foreach", "_owner", "_rank", "_ranks")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in own}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({"_slots": {}, "_joined": {}, **state})

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
            # Before anything is counted or changed.
            if any(p.grad is not None and p.grad.layout != torch.strided for p in self._parameters()):
                raise ValueError("A gradient is sparse; use a dense one (nn.Embedding(sparse=False)).")
            for bucket in self._buckets():
                self._update(bucket)
            if self._ranks > 1:
                for rank in range(self._ranks):
                    self._send_weights(rank)
        return loss

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """As for any optimizer; tensors keep the dtypes of the saved state.

        States of other levels, of torch's AdamW, and of versions with one scale for a whole first moment are
        loaded too.
        """
        super().load_state_dict(dict(state_dict))
        # torch has cast the state to the dtype of the parameters.
        for index, parameter in enumerate(self._parameters()):
            saved = state_dict["state"].get(index, {})
            for key, value in saved.items():
                if isinstance(value, Tensor):
                    self.state[parameter][key] = value.to(parameter.device, copy=True)
            if saved:
                with torch.inference_mode(False), torch.no_grad():
                    self._convert(index, parameter, self.state[parameter])

    def _buckets(self) -> Iterator[Bucket]:
        """The parameters with a gradient that this rank owns, whose arithmetic and dtypes are the same.

        Their steps are counted, and their state is made if there is none.
        """
        buckets: dict[tuple[Any, ...], Bucket] = {}
        pairs = ((group, parameter) for group in self.param_groups for parameter in group["params"])
        for number, (group, parameter) in enumerate(pairs):
            if self._owner.get(parameter, self._rank) != self._rank:
                continue
            state = self.state[parameter]
            if not state:
                self._start(number, parameter, state)
            gradient = parameter.grad
            if gradient is None:
                continue
            state["step"] += 1
            dtypes = (parameter.dtype, gradient.dtype, "master" in state)
            key = (id(group), state["step"], parameter.device, *dtypes)
            bucket = buckets.get(key)
            full = bucket is not None and bucket.elements + parameter.numel() > BUCKET_ELEMENTS
            if bucket is not None and (full or not self.foreach):
                yield buckets.pop(key)
                bucket = None
            if bucket is None:
                bucket = buckets[key] = Bucket(group=group, step=state["step"])
            bucket.add(number, parameter)
        yield from buckets.values()

    def _update(self, bucket: Bucket) -> None:
        if self.level == "O1":
            self._update_in_place(bucket)
            return
        layout, stored = _layout(bucket.parameters), self._joined_of(bucket)
        beta1, beta2 = bucket.group["betas"]
        gradient = layout.join(bucket.gradients).float()
        values = {key: stored[key].load() for key in FORMAT_OF}
        exp_avg, exp_avg_sq, weight = (values[key] for key in ("exp_avg", "exp_avg_sq", "master"))
        exp_avg.lerp_(gradient, 1 - beta1)
        exp_avg_sq.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        settings = _Settings.of(bucket)
        root = exp_avg_sq.sqrt().div_(settings.correction).add_(settings.eps)
        if layout.padding is not None:
            # With eps = 0, what fills up the rows would be NaN.
            root.masked_fill_(layout.padding, 1.0)
        weight.mul_(settings.remaining).addcdiv_(exp_avg, root, value=-settings.step_size)
        slots = [self._slots.get(parameter, {}) for parameter in bucket.parameters] if self._slots else []
        for key, value in values.items():
            stored[key].store(value, bucket.numbers, bucket.step, [of_keys.get(key) for of_keys in slots])
        weights = layout.split(stored["master"].load(), bucket.parameters)
        torch._foreach_copy_(bucket.parameters, weights)

    def _joined_of(self, bucket: Bucket) -> dict[str, JoinedState]:
        """The state of a bucket, joined: that of its last step, if nothing was exchanged since."""
        states = [self.state[parameter] for parameter in bucket.parameters]
        numbers, stored = self._joined.get(bucket.numbers[0], ([], {}))
        if numbers == bucket.numbers and all(
            state[key] is codes and state[f"{key}_scale"] is scale
            for key, joined in stored.items()
            for state, (codes, scale) in zip(states, joined.parts, strict=True)
        ):
            return stored
        layout, stored = _layout(bucket.parameters), {}
        for key in FORMAT_OF:
            stored[key] = JoinedState.of(
                layout, key, [(state[key], state[f"{key}_scale"]) for state in states]
            )
            _keep(states, stored[key])
        # The memory of their former buckets is freed when none of its parameters is left there.
        self._joined.update(dict.fromkeys(bucket.numbers, (bucket.numbers, stored)))
        return stored

    def _update_in_place(self, bucket: Bucket) -> None:
        """The update at O1, whose state is float32."""
        states = [self.state[parameter] for parameter in bucket.parameters]
        exp_avg, exp_avg_sq = ([state[key] for state in states] for key in ("exp_avg", "exp_avg_sq"))
        has_master = "master" in states[0]
        weights = [state["master"] for state in states] if has_master else bucket.parameters
        gradients = [gradient.float() for gradient in bucket.gradients]
        beta1, beta2 = bucket.group["betas"]
        settings = _Settings.of(bucket)
        torch._foreach_lerp_(exp_avg, gradients, 1 - beta1)
        torch._foreach_mul_(exp_avg_sq, beta2)
        torch._foreach_addcmul_(exp_avg_sq, gradients, gradients, 1 - beta2)
        roots = torch._foreach_sqrt(exp_avg_sq)
        torch._foreach_div_(roots, settings.correction)
        torch._foreach_add_(roots, settings.eps)
        torch._foreach_mul_(weights, settings.remaining)
        torch._foreach_addcdiv_(weights, exp_avg, roots, -settings.step_size)
        if has_master:
            torch._foreach_copy_(bucket.parameters, weights)

    def _start(self, number: int, parameter: Tensor, state: dict[str, Any]) -> None:
        state["step"] = 0
        for key in ("exp_avg", "exp_avg_sq"):
            state[key] = torch.zeros_like(
                parameter, dtype=torch.float32, memory_format=torch.contiguous_format
            )
        self._convert(number, parameter, state)

    def _convert(self, number: int, parameter: Tensor, state: dict[str, Any]) -> None:
        """Bring a state, new or of another level or of torch's AdamW, into the formats of this level."""
        layout, stored_low = _layout([parameter]), "exp_avg_scale" in state
        state["step"] = int(state["step"])
        if stored_low and not state["exp_avg_scale"].dim():
            # Earlier versions had one scale for a whole first moment.
            state["exp_avg_scale"] = state["exp_avg_scale"].repeat(*layout.rows)
        if self.level == "O1":
            for key in FORMAT_OF if stored_low else ("exp_avg", "exp_avg_sq"):
                if stored_low:
                    stored = JoinedState.of(layout, key, [(state[key], state.pop(f"{key}_scale"))])
                    (state[key],) = layout.split(stored.load(), [parameter])
                state[key] = state[key].float()
            if parameter.dtype != torch.float32:
                state.setdefault("master", parameter.detach().float())
        elif not stored_low:
            for key, format in FORMAT_OF.items():
                values = layout.join([state.get(key, parameter.detach())]).float()
                scale = values.new_ones(*layout.rows if key == "exp_avg" else (1,))
                codes = torch.empty_like(values, dtype=format.dtype)
                stored = JoinedState.split(layout, key, codes, scale, [parameter])
                stored.store(values, [number], state["step"])
                _keep([state], stored)

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


@dataclass(frozen=True, kw_only=True)
class _Settings:
    """The numbers of an update. `correction`: of the root; `remaining`: what decay leaves of a weight."""

    correction: float
    eps: float
    remaining: float
    step_size: float

    @classmethod
    def of(cls, bucket: Bucket) -> "_Settings":
        group, (beta1, beta2) = bucket.group, bucket.group["betas"]
        lr = float(group["lr"])
        return cls(
            correction=math.sqrt(1 - beta2**bucket.step),
            eps=group["eps"],
            remaining=1 - lr * group["weight_decay"],
            step_size=lr / (1 - beta1**bucket.step),
        )


def _layout(parameters: list[Tensor]) -> BucketLayout:
    return layout_of(tuple(parameter.numel() for parameter in parameters), parameters[0].device)


def _keep(states: list[dict[str, Any]], stored: JoinedState) -> None:
    """Make the parts of a bucket the state of its parameters."""
    key = stored.key
    for state, (codes, scale) in zip(states, stored.parts, strict=True):
        state[key], state[f"{key}_scale"] = codes, scale


def _check(group: dict[str, Any], level: Level) -> None:
    betas = group["betas"]
    if group["lr"] < 0 or group["eps"] < 0 or group["weight_decay"] < 0:
        raise ValueError("lr, eps and weight_decay must not be negative.")
    if not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas must be from 0 to less than 1, got {betas}.")
    if level != "O1" and betas[1] > MAX_BETA2:
        raise ValueError(
            f"At {level} the second of the betas can be at most {MAX_BETA2:.6f}, got {betas}: with it, the "
            "stored second moment would be too coarse to decay. Use level='O1', or a smaller one."
        )
    for parameter in group["params"]:
        if hasattr(parameter, "placements"):
            raise TypeError("A parameter is already sharded; FSDP shards the state of any optimizer itself.")
        if not parameter.is_floating_point():
            raise TypeError(f"Only floating-point parameters can be optimised, got {parameter.dtype}.")
