"""FP8 layers whose weight is a DTensor: each rank multiplies its shards, with the scales of whole tensors.

`torch.distributed.tensor.parallel` shards a layer's weight by columns (`ColwiseParallel`, dimension 0), by
rows (`RowwiseParallel`, dimension 1) or not at all. A rank then has parts of the layer's three matrices:

| weight     | input          | grad_output    | output         | summed over ranks                        |
|------------|----------------|----------------|----------------|------------------------------------------|
| Shard(0)   | Replicate      | Shard(-1)      | Shard(-1)      | gradient of the input, by its consumer   |
| Shard(1)   | Shard(-1)      | Replicate      | Partial        | output, by its consumer                  |
| Replicate  | Shard(tokens)  | Shard(tokens)  | Shard(tokens)  | gradients of weight and bias             |
| Replicate  | Replicate      | Replicate      | Replicate      | nothing                                  |

A scale is that of the whole tensor: amaxes of shards are reduced over the ranks. Each rank counts its shard,
and the first rank alone counts what is replicated, so that the ranks' counters add up to those of one rank.
"""

from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from fp8scope_kernels.kept_weight import KeptWeight
from fp8scope_kernels.linear_product import PartSettings, Product, linear_product
from fp8scope_kernels.matmul import Operand, to_block_operand
from fp8scope_kernels.operands import quantize_matrix
from fp8scope_kernels.plain_tensors import is_abstract, is_dtensor
from fp8scope_kernels.random_stream import stream_of
from fp8scope_kernels.recipes import NVFP4, ROLES, Recipe, Role, RowwiseScaling
from fp8scope_kernels.sampling import accumulate_sample
from fp8scope_kernels.scaling_state import ScalingState
from fp8scope_kernels.statistics import STATISTICS, Slot
from fp8scope_kernels.torch_internals import is_traced, process_group

Group = Any
"""A `torch.distributed.ProcessGroup`."""
DTensor = Any
"""A `torch.distributed.tensor.DTensor`. The package does not import it, because that takes long."""
Fp8Layer = Any
"""An `Fp8Linear`; its module imports this one."""

COUNTERS = tuple(STATISTICS.index(name) for name in ("numel", "saturated", "underflow", "subnormal"))

BY_TOKENS, REPLICATED = "0-0", "---"
"""`cut` of `PartSettings` where tokens are cut, and where nothing is."""

MIXED = (
    "One of an FP8 layer's input and weight is a DTensor, and the other is not. Tensor parallelism makes "
    "DTensors of both if the plan of parallelize_module has this layer. Convert a model before fully_shard."
)

WHOLE_TENSOR = (
    "NVFP4 has a scale of the whole tensor, and tensor parallelism leaves each rank a part: choose MXFP4, or "
    "leave the layer out: convert(..., exclude=...)."
)


@dataclass(frozen=True, kw_only=True)
class ShardLayout:
    """The placements of the tensors of one call on the ranks.

    `cut`: the dimensions of the matrices that are cut over the ranks, see `PartSettings`.
    """

    input: Any
    output: Any
    grad_input: Any
    bias: Any
    cut: str


def sharded_linear(layer: Fp8Layer, input: Tensor, out_dtype: torch.dtype) -> Tensor:
    """`layer(input)` where input and weight are DTensors on a mesh of one dimension; returns a DTensor.

    An input that has another layout than the weight needs is redistributed. All ranks of the mesh must call
    this in the same order.

    Raises TypeError for other meshes and placements, and ValueError if shards cut blocks that share a scale.
    """
    # Code that makes DTensors has loaded this already; importing it takes long.
    from torch.distributed.tensor import DTensor as Distributed

    weight: DTensor = layer.weight
    if not (is_dtensor(input) and is_dtensor(weight)):
        raise TypeError(MIXED)
    x: DTensor = input
    mesh = weight.device_mesh
    if mesh.ndim != 1 or x.device_mesh != mesh:
        raise TypeError(
            "Input and weight of an FP8 layer must be DTensors on the same mesh of one dimension, got "
            f"{x.device_mesh} and {mesh}."
        )
    layout = _layout(weight.placements[0], x.placements[0], x.dim())
    if x.placements != (layout.input,):
        x = x.redistribute(placements=(layout.input,))
    group, rank = mesh.get_group(), mesh.get_local_rank()
    settings = PartSettings(
        layout.cut, group.group_name, rank, mesh.size(), *_extents(tuple(x.shape), layout.input)
    )
    local = x.to_local(grad_placements=(layout.grad_input,))
    matrix = weight.to_local(grad_placements=weight.placements)
    bias = _local_bias(layer.bias, layout)
    if layout.cut == BY_TOKENS:
        matrix = _SummedGradient.apply(matrix, group)  # type: ignore[no-untyped-call]
        bias = None if bias is None else _SummedGradient.apply(bias, group)  # type: ignore[no-untyped-call]
    elif layout.output.is_partial() and bias is not None:
        bias = _OnFirstRank.apply(bias, rank == 0)  # type: ignore[no-untyped-call]
    # In a graph an operator makes the part, where it runs.
    part = None if is_traced() else LayerPart(layer, settings)
    rows = local.reshape(-1, local.shape[-1])
    flat = linear_product(rows, matrix, bias, layer, out_dtype, quantizer=part, part=settings)
    output = flat.view(*local.shape[:-1], matrix.shape[0])
    shape = torch.Size((*x.shape[:-1], layer.out_features))
    stride = tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))
    return Distributed.from_local(output, mesh, (layout.output,), run_check=False, shape=shape, stride=stride)


def _layout(weight: Any, input: Any, dims: int) -> ShardLayout:
    """The layout of a call. A negative or other placement of the input becomes the one that is needed."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    last = Shard(dims - 1)
    if weight.is_shard(0):
        return ShardLayout(input=Replicate(), output=last, grad_input=Partial(), bias=Shard(0), cut="-01")
    if weight.is_shard(1):
        return ShardLayout(input=last, output=Partial(), grad_input=last, bias=Replicate(), cut="11-")
    if not weight.is_replicate():
        raise TypeError(f"An FP8 layer takes weights that are sharded or replicated, got {weight}.")
    by_tokens = input.is_shard() and input.dim < dims - 1
    tokens = input if by_tokens else Replicate()
    cut = BY_TOKENS if by_tokens else REPLICATED
    return ShardLayout(input=tokens, output=tokens, grad_input=tokens, bias=Replicate(), cut=cut)


def _extents(shape: tuple[int, ...], input: Any) -> tuple[int, int, int]:
    """`before`, `along` and `after` of `PartSettings`, where tokens are cut; else 1."""
    if not input.is_shard() or input.dim >= len(shape) - 1:
        return 1, 1, 1
    return prod(shape[: input.dim]), shape[input.dim], prod(shape[input.dim + 1 : -1])


def _local_bias(bias: DTensor | None, layout: ShardLayout) -> Tensor | None:
    if bias is None:
        return None
    if not is_dtensor(bias):
        raise TypeError(MIXED.replace("input", "bias"))
    if bias.placements != (layout.bias,):
        bias = bias.redistribute(placements=(layout.bias,))
    local: Tensor = bias.to_local(grad_placements=(layout.bias,))
    return local


class LayerPart:
    """The parts of a layer that the product needs, for one call with shards.

    It quantises with the scales of whole tensors. Raises ValueError if shards cut blocks that share a scale.
    """

    def __init__(self, layer: Fp8Layer, settings: PartSettings) -> None:
        self.layer, self.settings = layer, settings
        self.group, self.size, self.is_first = (
            process_group(settings.group), settings.size, settings.rank == 0
        )  # fmt: skip
        self.dims: dict[Role, int | None] = {
            role: None if dim == "-" else int(dim) for role, dim in zip(ROLES, settings.cut, strict=True)
        }
        self.kept_weight: KeptWeight | None = layer.kept_weight
        self._check_blocks()

    @property
    def training(self) -> bool:
        training: bool = self.layer.training
        return training

    @property
    def on_units(self) -> dict[Product, bool]:
        on_units: dict[Product, bool] = self.layer.on_units
        return on_units

    def state_of(self, role: Role) -> ScalingState:
        state: ScalingState = self.layer.state_of(role)
        return state

    def quantize(self, role: Role, x: Tensor, *, update: bool, transpose: bool) -> tuple[Operand, Operand]:
        """`Fp8Linear.quantize` for this rank's part of one of the three matrices."""
        weight = self.kept_weight
        if role == "weight" and weight is not None:
            return weight.operands(x, partial(self._quantize, role, x), update=update, transpose=transpose)
        return self._quantize(role, x, update=update, transpose=transpose)

    def _quantize(self, role: Role, x: Tensor, *, update: bool, transpose: bool) -> tuple[Operand, Operand]:
        layer, recipe, dim = self.layer, self.layer.recipe, self.dims[role]
        # The result of a collective that may be under way.
        wait = getattr(x, "trigger_wait", None)
        x = wait() if callable(wait) else x
        grid = recipe.block_of(role)
        if isinstance(recipe, RowwiseScaling) and dim is not None:
            return self._quantize_rows(role, x, recipe, dim, update=update, transpose=transpose)
        # Blocks are whole on each rank.
        group = None if dim is None or grid is not None else self.group
        count = dim is not None or self.is_first
        slot = layer.slots.get(role) if update and count else None
        state = self.state_of(role)
        at_random = role == "grad_output" and recipe.stochastic_gradients
        with state.over(group):
            return quantize_matrix(
                recipe, role, state, x, slot,
                update=update, transpose=transpose, stream=stream_of(layer) if at_random else None,
            )  # fmt: skip

    def _quantize_rows(
        self, role: Role, x: Tensor, recipe: Recipe, dim: int, *, update: bool, transpose: bool
    ) -> tuple[Operand, Operand]:
        """`quantize` with a scale per row, where the ranks have parts of the rows, or of the columns."""
        state = self.state_of(role)
        state.materialize(x.device)
        slot = self.layer.slots.get(role) if update else None
        operand = self._by_rows(x, recipe, role, slot, cut=dim == 1)
        sample = None if slot is None else slot.sample_row
        if sample is not None:
            accumulate_sample(sample, x, operand.values, operand.inverse_scale)
        if not transpose:
            return operand, operand
        return operand, self._by_rows(x.t(), recipe, role, None, cut=dim == 0)

    def _by_rows(self, x: Tensor, recipe: Recipe, role: Role, slot: Slot | None, *, cut: bool) -> Operand:
        """The operand of a matrix with a scale per row. Rows that are cut get the scale of the whole row.

        The amax of the whole row stands in one more column, so that every backend chooses the scale from it.
        """
        format, grid = self.state_of(role).format, (1, 0)
        row = None if slot is None else slot.row
        block_row = None if slot is None else slot.block_row
        if not cut or is_abstract(x):
            return to_block_operand(x, format, grid, recipe, row, block_row)
        amax = _row_amax(x)
        dist.all_reduce(amax, dist.ReduceOp.MAX, group=self.group)
        column = amax.to(x.dtype).unsqueeze(1)
        # All ranks have all rows: the first one counts them.
        block_row = block_row if self.is_first else None
        operand = to_block_operand(torch.cat((x, column), 1), format, grid, recipe, row, block_row)
        if row is not None:
            own = torch.zeros_like(row)
            to_block_operand(column, format, grid, recipe, own, None)
            for counter in COUNTERS:
                row[counter] -= own[counter]
        return Operand(operand.values[:, :-1].contiguous(), operand.inverse_scale)

    def _check_blocks(self) -> None:
        """Refuse shards whose scales would be those of parts, unlike on one rank: of blocks, or of NVFP4.

        The answer depends on whole shapes alone, so that all ranks raise.
        """
        recipe = self.layer.recipe
        if isinstance(recipe, NVFP4):
            raise ValueError(WHOLE_TENSOR)
        for role, dim in self.dims.items():
            grid = recipe.block_of(role)
            if dim is None or grid is None or isinstance(recipe, RowwiseScaling):
                continue
            # In training the transpose is quantised too.
            self._check_cut(role, dim, max(grid) if self.training else grid[dim])

    def _check_cut(self, role: Role, dim: int, block: int) -> None:
        layer = self.layer
        if role == "weight":
            whole = layer.out_features if dim == 0 else layer.in_features
            shard, is_whole = -(-whole // self.size), True
        elif dim == 1:
            whole = layer.in_features if role == "input" else layer.out_features
            shard, is_whole = -(-whole // self.size), True
        else:
            _, _, _, _, before, along, after = self.settings
            whole = along * after
            shard = -(-along // self.size) * after
            # Sequences follow each other on one rank, and blocks may go from one to the next.
            is_whole = before <= 1 or whole % block == 0
        if shard >= whole or (shard % block == 0 and is_whole):
            return
        raise ValueError(
            f"{layer.recipe.kind} has blocks of {block} with one scale, and tensor parallelism cuts them: "
            f"each rank has {shard} of {whole} in dimension {dim} of the {role}. Choose sizes or a number of "
            "ranks with whole blocks, or RowwiseScaling, or leave the layer out: convert(..., exclude=...)."
        )


def _row_amax(x: Tensor) -> Tensor:
    """The largest finite abs(x) of each row: float32 [rows], 0 where there is none."""
    if not x.shape[1]:
        return torch.zeros(len(x), dtype=torch.float32, device=x.device)
    magnitude = x.detach().abs()
    return torch.where(magnitude.isfinite(), magnitude, 0.0).amax(1).float()


class _SummedGradient(torch.autograd.Function):
    """A replicated parameter. Each rank has the gradient of its own tokens; the gradient is their sum."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _OnFirstRank(torch.autograd.Function):
    """The bias on the first rank and zeros on the others, where outputs are summed. All have its gradient."""

    @staticmethod
    def forward(ctx: Any, bias: Tensor, is_first: bool) -> Tensor:
        return bias.view_as(bias) if is_first else torch.zeros_like(bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None
