"""FP8 numerics for PyTorch that collect statistics in the same pass as the cast."""

from fp8scope_kernels import custom_ops as _custom_ops  # noqa: F401  (registers the operators)
from fp8scope_kernels import linear_operators as _linear_operators  # noqa: F401  (registers the operators)
from fp8scope_kernels import tensor_parallel_operators as _sharded  # noqa: F401  (registers the operators)
from fp8scope_kernels.backends import get_backend, set_backend
from fp8scope_kernels.block_quantization import BlockTensor, quantize_blocks
from fp8scope_kernels.convert import (
    Conversion,
    ConversionReport,
    candidate_layers,
    convert,
    fp8_layers,
    plan_conversion,
)
from fp8scope_kernels.distributed import keep_scaling_out_of_ddp, sync_amaxes, sync_amaxes_after
from fp8scope_kernels.experts.grouped_linear import Fp8GroupedLinear
from fp8scope_kernels.experts.high_precision_experts import (
    observe_plain_experts,
    unobserve_plain_experts,
)
from fp8scope_kernels.experts.modules import experts_in_high_precision
from fp8scope_kernels.experts.observers import EXPERT_TENSORS, observe_experts
from fp8scope_kernels.experts.products import ExpertProducts, fp8_experts
from fp8scope_kernels.experts.states import ExpertStates
from fp8scope_kernels.experts.statistics import ExpertSlots
from fp8scope_kernels.formats import (
    DATA_FORMATS,
    E2M1,
    E2M3,
    E3M2,
    E4M3,
    E4M3FNUZ,
    E5M2,
    E5M2FNUZ,
    E8M0,
    ENCODINGS,
    FORMATS,
    Encoding,
    Format,
    in_encoding,
)
from fp8scope_kernels.fp6 import Fp6Linear, Fp6Weight, quantize_fp6
from fp8scope_kernels.fsdp.all_gather import gather_weights_in_fp8
from fp8scope_kernels.gradient_reduction import Fp8GradientReducer
from fp8scope_kernels.high_precision import HighPrecisionObserver
from fp8scope_kernels.kept_weight import keep_weights
from fp8scope_kernels.linear import Fp8Linear
from fp8scope_kernels.linear_product import PRODUCTS, Product
from fp8scope_kernels.observers import observable_layers, observe, observe_layer, unobserve
from fp8scope_kernels.optimizer import Fp8AdamW
from fp8scope_kernels.plain_state import plain_state_dict
from fp8scope_kernels.quantization import (
    Fp8Tensor,
    amax_to_scale,
    measure,
    quantize,
    quantize_values,
    tensor_to_amax,
    to_fp8_saturated,
)
from fp8scope_kernels.random_stream import RandomStream, seed_rounding
from fp8scope_kernels.recipes import (
    MXFP4,
    MXFP8,
    NVFP4,
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    Recipe,
    RowwiseScaling,
    recipe_from_dict,
)
from fp8scope_kernels.reference import (
    Extent,
    Stochastic,
    amax_to_block_scale,
    amax_to_mx_scale,
    round_stochastically,
    round_to_format,
)
from fp8scope_kernels.revert import revert
from fp8scope_kernels.sampling import accumulate_sample, exponent_histogram
from fp8scope_kernels.scaling_state import ScalingState, scaling_status
from fp8scope_kernels.serving_checkpoint import load_dequantized, save_fp8_checkpoint
from fp8scope_kernels.smooth_swiglu import SmoothSwiGLU
from fp8scope_kernels.statistics import (
    BLOCK_STATISTICS,
    EXPONENT_BINS,
    MAX_EXPONENT,
    MIN_EXPONENT,
    SAMPLE_SIZE,
    STATISTICS,
    Pace,
    Slot,
    StatisticsBuffer,
    TensorInfo,
    exponent_bin,
)
from fp8scope_kernels.weight_only import (
    Int4Weight,
    Int8Weight,
    Nvfp4Weight,
    quantize_int4,
    quantize_int8,
    quantize_nvfp4,
)

__all__ = [
    "BLOCK_STATISTICS",
    "DATA_FORMATS",
    "E2M1",
    "E2M3",
    "E3M2",
    "E4M3",
    "E4M3FNUZ",
    "E5M2",
    "E5M2FNUZ",
    "E8M0",
    "ENCODINGS",
    "EXPERT_TENSORS",
    "EXPONENT_BINS",
    "FORMATS",
    "MAX_EXPONENT",
    "MIN_EXPONENT",
    "PRODUCTS",
    "MXFP4",
    "MXFP8",
    "NVFP4",
    "SAMPLE_SIZE",
    "STATISTICS",
    "BlockScaling",
    "BlockTensor",
    "Conversion",
    "ConversionReport",
    "CurrentScaling",
    "DelayedScaling",
    "Encoding",
    "ExpertProducts",
    "ExpertSlots",
    "ExpertStates",
    "Extent",
    "Format",
    "Fp6Linear",
    "Fp6Weight",
    "Fp8AdamW",
    "Fp8GradientReducer",
    "Fp8GroupedLinear",
    "Fp8Linear",
    "Fp8Tensor",
    "HighPrecisionObserver",
    "Int4Weight",
    "Int8Weight",
    "Nvfp4Weight",
    "Pace",
    "Product",
    "RandomStream",
    "Recipe",
    "RowwiseScaling",
    "ScalingState",
    "Slot",
    "SmoothSwiGLU",
    "StatisticsBuffer",
    "Stochastic",
    "TensorInfo",
    "accumulate_sample",
    "amax_to_block_scale",
    "amax_to_mx_scale",
    "amax_to_scale",
    "candidate_layers",
    "convert",
    "exponent_bin",
    "exponent_histogram",
    "experts_in_high_precision",
    "fp8_experts",
    "fp8_layers",
    "gather_weights_in_fp8",
    "get_backend",
    "in_encoding",
    "keep_weights",
    "keep_scaling_out_of_ddp",
    "load_dequantized",
    "measure",
    "observable_layers",
    "observe",
    "observe_experts",
    "observe_layer",
    "observe_plain_experts",
    "plain_state_dict",
    "plan_conversion",
    "quantize",
    "quantize_blocks",
    "quantize_fp6",
    "quantize_int4",
    "quantize_int8",
    "quantize_nvfp4",
    "quantize_values",
    "recipe_from_dict",
    "revert",
    "round_stochastically",
    "round_to_format",
    "scaling_status",
    "save_fp8_checkpoint",
    "seed_rounding",
    "set_backend",
    "sync_amaxes",
    "sync_amaxes_after",
    "tensor_to_amax",
    "to_fp8_saturated",
    "unobserve",
    "unobserve_plain_experts",
]
