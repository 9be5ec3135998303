"""Checkpoints in FP8 for inference servers: safetensors with scales, as vLLM and Transformers read them.

The files follow compressed-tensors (`quant_method: compressed-tensors`, `format: float-quantized`): beside
`<layer>.weight` in float8_e4m3fn stands `<layer>.weight_scale`, the float32 factor that gives the weight
back, and for static activations `<layer>.input_scale`. `config.json` says which layers these are.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fp8scope_kernels.block_quantization import quantize_blocks
from fp8scope_kernels.convert import fp8_layers
from fp8scope_kernels.experts.grouped_linear import Fp8GroupedLinear
from fp8scope_kernels.experts.modules import Fp8Experts
from fp8scope_kernels.formats import E4M3
from fp8scope_kernels.linear import Fp8Linear
from fp8scope_kernels.plain_state import plain_state_dict
from fp8scope_kernels.quantization import amax_to_scale, quantize, tensor_to_amax
from fp8scope_kernels.recipes import BlockScaling, CurrentScaling, DelayedScaling, Recipe, RowwiseScaling

WEIGHTS_FILE, CONFIG_FILE = "model.safetensors", "config.json"


def save_fp8_checkpoint(
    model: nn.Module, folder: str | Path, *, config: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Write `model.safetensors` and `config.json` of a model with FP8 layers; returns the configuration.

    Weights of FP8 layers are stored as the layers multiply them: E4M3 values, and their scales. Of
    `DelayedScaling`, the scale of the last call; the input then has a static scale, likewise. Others take the
    scales of the weights as they are, and activations are quantised when the server runs: per tensor
    (`CurrentScaling`), per token (`RowwiseScaling`) or in groups of 128 (`BlockScaling`). All other tensors,
    those of experts too, keep their dtype. `config`: the model's own configuration, to which
    `quantization_config` is added.

    Raises ValueError where layers have different recipes, or one that servers do not read (MXFP8, four bits,
    E5M2 or FNUZ weights, `precision = 'bf16'`), and for a model without FP8 layers; ImportError without the
    package safetensors.
    """
    save_file = _safetensors().save_file
    layers = dict(fp8_layers(model))
    quantization = _quantization_config(model, layers)
    tensors = {name: value.detach() for name, value in plain_state_dict(model).items()}
    with torch.no_grad():
        for path, layer in layers.items():
            prefix = f"{path}." if path else ""
            tensors |= {prefix + name: value for name, value in _tensors_of(layer).items()}
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    # safetensors refuses tensors that share memory, such as tied weights.
    own = {name: value.cpu().contiguous().clone() for name, value in tensors.items()}
    save_file(own, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    result = {**(config or {}), "quantization_config": quantization}
    (folder / CONFIG_FILE).write_text(json.dumps(result, indent=2) + "\n")
    return result


def load_dequantized(folder: str | Path, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """The `state_dict` of a checkpoint in FP8, with the weights that its values and scales stand for.

    Reads what `save_fp8_checkpoint` and others have written with scales of tensors, rows or blocks of 128.
    """
    stored = _safetensors().load_file(Path(folder) / WEIGHTS_FILE)
    state = {}
    for name, value in stored.items():
        if name.endswith((".weight_scale", ".input_scale")) or name in ("weight_scale", "input_scale"):
            continue
        scale = stored.get(f"{name}_scale")
        state[name] = value if scale is None else (value.float() * _spread(scale, value)).to(dtype)
    return state


def _quantization_config(model: nn.Module, layers: Mapping[str, Fp8Linear]) -> dict[str, Any]:
    if not layers:
        raise ValueError("The model has no FP8 layers: convert it first.")
    recipes = {layer.recipe for layer in layers.values()}
    if len(recipes) > 1:
        raise ValueError(f"All FP8 layers of a checkpoint have one recipe; these have {len(recipes)}.")
    (recipe,) = recipes
    for path, layer in layers.items():
        if layer.precision == "bf16":
            raise ValueError(
                f"{path}.precision is 'bf16': set it to 'fp8', or leave the layer out by revert."
            )
        if layer.state_of("weight").format != E4M3:
            raise ValueError(
                f"Servers read weights in E4M3; {path} has {layer.state_of('weight').format.name}."
            )
    weights, inputs = _strategies(recipe)
    common = {"num_bits": 8, "type": "float", "symmetric": True}
    left = [
        path
        for path, module in model.named_modules()
        if (isinstance(module, nn.Linear) and not isinstance(module, Fp8Linear))
        or isinstance(module, Fp8Experts | Fp8GroupedLinear)
    ]
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "ignore": left,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**common, "dynamic": False, **weights},
                "input_activations": {**common, **inputs},
                "output_activations": None,
            }
        },
    }


def _strategies(recipe: Recipe) -> tuple[dict[str, Any], dict[str, Any]]:
    """The scales of weights and of activations, in the words of compressed-tensors."""
    if isinstance(recipe, DelayedScaling):
        return {"strategy": "tensor"}, {"strategy": "tensor", "dynamic": False}
    if isinstance(recipe, CurrentScaling):
        return {"strategy": "tensor"}, {"strategy": "tensor", "dynamic": True}
    if isinstance(recipe, RowwiseScaling):
        return {"strategy": "channel"}, {"strategy": "token", "dynamic": True}
    if isinstance(recipe, BlockScaling):
        return (
            {"strategy": "block", "block_structure": [128, 128]},
            {"strategy": "group", "group_size": 128, "dynamic": True},
        )
    raise ValueError(
        f"{recipe.kind} has no form that servers read as FP8: choose DelayedScaling, CurrentScaling, "
        "RowwiseScaling or BlockScaling, or save plain_state_dict(model)."
    )


def _tensors_of(layer: Fp8Linear) -> dict[str, Tensor]:
    """A layer's weight in E4M3 and its scales, as factors: [1], [out, 1], or one for each block."""
    recipe, weight = layer.recipe, layer.weight.detach()
    grid = recipe.block_of("weight")
    if grid is not None:
        blocks = quantize_blocks(weight, E4M3, grid, recipe, dtype=torch.float8_e4m3fn)
        scale = blocks.scale.reciprocal()
        return {"weight": blocks.values, "weight_scale": scale.reshape(scale.shape[0], scale.shape[2])}
    assert isinstance(recipe, DelayedScaling | CurrentScaling)
    tensors = {}
    if isinstance(recipe, DelayedScaling) and layer.state_of("weight").scale > 0:
        scale = layer.state_of("weight").scale
    else:
        power = isinstance(recipe, CurrentScaling) and recipe.power_of_two
        scale = amax_to_scale(tensor_to_amax(weight), E4M3, margin=recipe.margin, power_of_two=power)
    quantized = quantize(weight, scale, E4M3)
    tensors = {"weight": quantized.data, "weight_scale": quantized.inverse_scale.reshape(1)}
    if isinstance(recipe, DelayedScaling):
        used = layer.state_of("input").scale
        if not used > 0:
            raise ValueError("A layer with delayed scaling was never called: its input has no scale yet.")
        tensors["input_scale"] = used.reciprocal().reshape(1)
    return tensors


def _spread(scale: Tensor, weight: Tensor) -> Tensor:
    """The factor of each element of a matrix, from those of blocks of 128x128, of rows, or of all."""
    if scale.dim() < 2 or scale.shape == (weight.shape[0], 1):
        return scale
    rows, columns = weight.shape
    return scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError(
            "Checkpoints for inference servers need safetensors: pip install safetensors"
        ) from error
    return safetensors.torch
