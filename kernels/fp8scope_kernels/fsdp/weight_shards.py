"""The shards of FP8 layers' weights, quantised with the scales of whole weights before they are gathered."""

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from fp8scope_kernels.fsdp.gathered_weight import Gathered, GatheredWeight
from fp8scope_kernels.matmul import Operand
from fp8scope_kernels.operands import takes_fp8_operands
from fp8scope_kernels.plain_tensors import check_memory
from fp8scope_kernels.quantization import measure_now, quantize
from fp8scope_kernels.reference import Extent
from fp8scope_kernels.sampling import accumulate_sample
from fp8scope_kernels.scaling_state import ScalingState
from fp8scope_kernels.statistics import STATISTICS
from fp8scope_kernels.torch_internals import current_graph_task_id, forget_gathered

Fp8Layer = Any
"""An `Fp8Linear`; its module imports this one."""
FsdpParameter = Any
"""FSDP2's own object for a parameter that it has sharded."""

AMAX, SCALE = STATISTICS.index("amax"), STATISTICS.index("scale")
COUNTS = tuple(index for index in range(len(STATISTICS)) if index not in (AMAX, SCALE))

HOOKS = ("fsdp_pre_all_gather", "fsdp_post_all_gather")
"""The methods of a local tensor that FSDP2 calls."""


class _Attached:
    """A method that a tensor has as an attribute. In a copy or a file of the tensor it is None."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method
        # FSDP2 looks at the number of its parameters.
        self.__signature__ = inspect.signature(method)

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._method(*args, **options)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


@dataclass(kw_only=True)
class QuantizedShard:
    """This rank's part of a weight in FP8, and what the whole weight counts.

    `bytes`: uint8, the padded shape that FSDP2 gathers. `amax`, `scale`: float32 without dimensions, of the
    whole weight. `row`: its statistics, float64 [len(STATISTICS)]; None where no call of the forward pass
    counts. `version`: of the shard that was quantised.
    """

    bytes: Tensor
    amax: Tensor
    scale: Tensor
    row: Tensor | None
    version: tuple[Any, ...]
    is_counted: bool = False


class WeightShard:
    """A layer's weight on this rank. FSDP2 calls two methods of it, around each all-gather.

    Quantising belongs to forward passes, see `quantize_shards`. A gather in a backward pass sends the bytes
    of the forward pass.
    """

    def __init__(self, layer: Fp8Layer, parameter: FsdpParameter, fsdp_module: Any) -> None:
        self.layer, self.parameter, self.fsdp_module = layer, parameter, fsdp_module
        self.quantized: QuantizedShard | None = None
        self.is_prepared = False
        """Whether a forward pass, in which this was quantised, is under way."""
        self._gathered: Gathered | None = None
        self._in_fp8: bool | None = None

    # --- what FSDP2 calls ---

    def attach(self) -> None:
        """Have FSDP2 call this object. It does so for methods of the local tensor, which may be replaced."""
        local = self._local_tensor()
        if getattr(local, HOOKS[0], None) is None:
            for name in HOOKS:
                setattr(local, name, _Attached(getattr(self, name)))
            self.parameter._init_extensions()

    def detach(self) -> None:
        """Have FSDP2 gather the weight as it is."""
        self.forget()
        local = self._local_tensor()
        for name in HOOKS:
            vars(local).pop(name, None)

    def forget(self) -> None:
        """Have FSDP2 make the unsharded parameter again, as one of another kind."""
        if self.is_unsharded:
            self.fsdp_module.reshard()
        forget_gathered(self.parameter)

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        """This rank's part, which travels. The metadata is the format and the inverse scale, or None."""
        is_forward = current_graph_task_id() == -1
        in_fp8 = self.wants_fp8 if is_forward or self._in_fp8 is None else self._in_fp8
        if in_fp8 != self._in_fp8:
            # The buffers that FSDP2 fills again have the size of the other dtype.
            self.parameter.all_gather_outputs = []
            self._in_fp8 = in_fp8
        if not in_fp8:
            padded = self.parameter._sharded_param_data.view(self.parameter.padded_sharded_param_size)
            return (padded.to(self.dtype),), None
        if self.quantized is None or (is_forward and not self.is_prepared):
            # FSDP2 was asked to gather outside of a forward pass.
            quantize_shards([self])
        quantized = self.quantized
        assert quantized is not None
        return (quantized.bytes,), (self.format, quantized.scale.reciprocal())

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Give the parameter the memory that was filled. FSDP2 makes the parameter by the first call."""
        shape = self.parameter._orig_size
        # The last ranks may have padding.
        flat = all_gather_outputs[0].reshape(-1)[: shape.numel()]
        data, inverse = flat.view(shape), None
        if metadata is not None:
            format, inverse = metadata
            data = data.view(format)
        if self._gathered is None or out is None:
            self._gathered = Gathered(data, inverse)
            return GatheredWeight(self._gathered, param_dtype), ()
        self._gathered.data, self._gathered.inverse_scale = data, inverse
        return None

    # --- what layers call ---

    @property
    def state(self) -> ScalingState:
        state: ScalingState = self.layer.state_of("weight")
        return state

    @property
    def format(self) -> torch.dtype:
        """The dtype of the bytes: E4M3 or E5M2."""
        dtype = self.state.format.dtype
        assert dtype is not None
        return dtype

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the layer would have got the weight."""
        dtype: torch.dtype = self.parameter.param_dtype or self.parameter.sharded_param.dtype
        return dtype

    @property
    def wants_fp8(self) -> bool:
        """Return whether the layer's products read the weight in FP8 only."""
        layer = self.layer
        chosen = layer.products
        return layer.precision == "fp8" and (chosen is None or {"fprop", "dgrad"} <= chosen)

    @property
    def sends_fp8(self) -> bool:
        """Return whether the weight has last travelled in FP8."""
        return self._in_fp8 is True

    @property
    def is_unsharded(self) -> bool:
        unsharded: bool = self.parameter.sharded_state.name == "UNSHARDED"
        return unsharded

    def local(self) -> Tensor:
        """This rank's part of the weight, without padding, in `dtype`."""
        local: Tensor = self._local_tensor().detach().to(self.dtype)
        return local

    def operands(self, weight: GatheredWeight, *, update: bool, transpose: bool) -> tuple[Operand, Operand]:
        """The operand of the weight, and its transpose. With `update`, the call is counted."""
        gathered = weight.gathered
        check_memory(gathered.data)
        assert gathered.inverse_scale is not None
        if update:
            self._count()
        data, inverse = gathered.data, gathered.inverse_scale
        if not takes_fp8_operands(self.layer.recipe, data):
            # The memory that FSDP2 frees, and fills again for the backward pass, is what autograd keeps.
            return Operand(data.bfloat16(), inverse), Operand(data, inverse).t()
        turned = data.t().contiguous() if transpose else data.t()
        return Operand(data, inverse), Operand(turned, inverse)

    def _count(self) -> None:
        """Advance the scaling state, and add the weight's statistics to the layer's row."""
        quantized, keeper = self.quantized, self.layer.kept_weight
        if quantized is None or (keeper is not None and quantized.is_counted):
            return
        quantized.is_counted = True
        self.state.next_scale(quantized.amax, update=True)
        slot = self.layer.slots.get("weight")
        if slot is None or quantized.row is None:
            return
        row, own = slot.row, quantized.row
        row[list(COUNTS)] += own[list(COUNTS)]
        torch.maximum(row[AMAX], own[AMAX], out=row[AMAX])
        row[SCALE] = quantized.scale
        local = self.local()
        if slot.sample_row is not None and local.numel():
            values = quantized.bytes[: len(local)].view(self.format)
            accumulate_sample(slot.sample_row, local, values, quantized.scale.reciprocal())

    # --- quantising ---

    def is_stale(self) -> bool:
        """Return whether the forward pass that begins needs the shard quantised again.

        All ranks decide alike: by calls and versions, not by numbers.
        """
        quantized, keeper = self.quantized, self.layer.kept_weight
        if quantized is None or (self.layer.training and quantized.row is None):
            return True
        if keeper is None:
            # What stays unsharded, as between micro-batches, is not gathered again.
            return not self.is_unsharded
        return keeper.shard is not quantized or quantized.version != self.version()

    def version(self) -> tuple[Any, ...]:
        """Signs of a changed weight. Only that of the DTensor tells of in-place operations."""
        sharded = self.parameter.sharded_param
        return id(sharded), sharded._version, sharded._local_tensor._version

    def _local_tensor(self) -> Any:
        return self.parameter.sharded_param._local_tensor


@torch.no_grad()
def quantize_shards(shards: Iterable[WeightShard]) -> None:
    """Quantise shards with the scales of whole weights: two all-reduces for all shards on the same ranks.

    Scaling state does not change before a layer is called.
    """
    by_ranks: dict[Any, list[WeightShard]] = {}
    for shard in shards:
        by_ranks.setdefault(shard.parameter.shard_mesh.get_group(), []).append(shard)
    for group, members in by_ranks.items():
        _quantize_together(members, group)


def _quantize_together(shards: Sequence[WeightShard], group: Any) -> None:
    parts = [shard.local() for shard in shards]
    extents = [measure_now(part) for part in parts]
    amaxes = torch.stack([extent.amax for extent in extents])
    dist.all_reduce(amaxes, dist.ReduceOp.MAX, group=group)
    rows = torch.zeros(len(shards), len(STATISTICS), dtype=torch.float64, device=amaxes.device)
    is_training = any(shard.layer.training for shard in shards)
    for index, (shard, part, extent) in enumerate(zip(shards, parts, extents, strict=True)):
        amax, training = amaxes[index].clone(), shard.layer.training
        scale = shard.state.scale_before(amax, update=training)
        row = rows[index] if training else None
        shard.quantized = QuantizedShard(
            bytes=_to_bytes(shard, part, scale, extent, row),
            amax=amax,
            scale=scale,
            row=row,
            version=shard.version(),
        )
        if (keeper := shard.layer.kept_weight) is not None:
            keeper.shard = shard.quantized
    if is_training:
        counts = rows[:, COUNTS].contiguous()
        dist.all_reduce(counts, group=group)
        rows[:, COUNTS] = counts
        rows[:, AMAX] = amaxes.double()


def _to_bytes(shard: WeightShard, part: Tensor, scale: Tensor, extent: Extent, row: Tensor | None) -> Tensor:
    """The part in FP8, with zeros behind it where other ranks have more rows: uint8."""
    recipe, format = shard.layer.recipe, shard.state.format
    padded = shard.parameter.padded_sharded_param_size
    if not part.numel():
        return torch.zeros(padded, dtype=torch.uint8, device=part.device)
    data = quantize(
        part, scale, format, row, saturate=recipe.saturate, extent=extent, nonfinite=recipe.nonfinite
    ).data.view(torch.uint8)
    if data.shape == padded:
        return data
    filled = data.new_zeros(padded)
    filled[: len(data)] = data
    return filled
