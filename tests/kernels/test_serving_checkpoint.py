"""Checkpoints in FP8 have the layers' own operands, in the form of compressed-tensors."""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from fp8scope_kernels import (
    MXFP8,
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    Fp8Linear,
    Recipe,
    RowwiseScaling,
    convert,
    load_dequantized,
    save_fp8_checkpoint,
)

RECIPES: dict[str, tuple[Recipe, str, str, bool, tuple[int, ...]]] = {
    "delayed": (DelayedScaling(), "tensor", "tensor", False, (1,)),
    "current": (CurrentScaling(), "tensor", "tensor", True, (1,)),
    "powers": (CurrentScaling(power_of_two=True, margin=1), "tensor", "tensor", True, (1,)),
    "rows": (RowwiseScaling(), "channel", "token", True, (160, 1)),
    "blocks": (BlockScaling(), "block", "group", True, (2, 2)),
    "inexact blocks": (BlockScaling(power_of_two=False), "block", "group", True, (2, 2)),
}


def make_model(recipe: Recipe) -> nn.Sequential:
    """An FP8 layer whose blocks are cut by the edges, a norm, and a head that stays in float32."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(208, 160), nn.LayerNorm(160), nn.Linear(160, 8))
    convert(model, recipe, exclude="2")
    model(torch.randn(16, 208)).sum().backward()
    return model


def operand(layer: Fp8Linear) -> Tensor:
    """The weight as the layer multiplies it."""
    values, inverse = layer.quantize("weight", layer.weight, update=False, transpose=False)[0]
    return values.float() * inverse


@pytest.mark.parametrize(("recipe", "weights", "inputs", "dynamic", "shape"), RECIPES.values(), ids=RECIPES)
def test_it_works(
    tmp_path: Path, recipe: Recipe, weights: str, inputs: str, dynamic: bool, shape: tuple[int, ...]
) -> None:
    model = make_model(recipe)
    saved = save_fp8_checkpoint(model, tmp_path / "new", config={"model_type": "mlp"})
    stored = load_file(tmp_path / "new" / "model.safetensors")
    assert stored["0.weight"].dtype == torch.float8_e4m3fn and stored["0.weight_scale"].shape == shape
    assert json.loads((tmp_path / "new" / "config.json").read_text()) == saved
    quantization = saved["quantization_config"]
    assert (saved["model_type"], quantization["ignore"]) == ("mlp", ["2"])
    group = quantization["config_groups"]["group_0"]
    assert (group["weights"]["strategy"], group["input_activations"]["strategy"]) == (weights, inputs)
    assert group["input_activations"]["dynamic"] is dynamic is ("0.input_scale" not in stored)
    state, layer = load_dequantized(tmp_path / "new"), model[0]
    assert isinstance(layer, Fp8Linear)
    # The factor of a scale that is no power of two is rounded once more.
    rounding = 2**-22 if recipe == BlockScaling(power_of_two=False) else 0
    torch.testing.assert_close(state["0.weight"], operand(layer), rtol=rounding, atol=0)
    plain = nn.Sequential(nn.Linear(208, 160), nn.LayerNorm(160), nn.Linear(160, 8))
    plain.load_state_dict(state)
    assert torch.equal(plain.get_parameter("2.weight"), model.get_parameter("2.weight"))


def test_a_delayed_layer_has_the_scales_of_its_last_call(tmp_path: Path) -> None:
    model = make_model(DelayedScaling())
    layer = model[0]
    assert isinstance(layer, Fp8Linear)
    save_fp8_checkpoint(model, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    for role in ("input", "weight"):
        assert stored[f"0.{role}_scale"] == layer.state_of(role).scale.reciprocal()


def test_tied_weights_are_stored_for_each_layer(tmp_path: Path) -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(64, 32), "head": nn.Linear(32, 64, bias=False)})
    model["head"].weight = model["embed"].weight
    convert(model, CurrentScaling(), include="head", exclude=())
    save_fp8_checkpoint(model, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert stored["embed.weight"].dtype == torch.float32
    assert stored["head.weight"].dtype == torch.float8_e4m3fn


def test_refuses_what_no_server_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="MXFP8 has no form"):
        save_fp8_checkpoint(make_model(MXFP8()), tmp_path)
    with pytest.raises(ValueError, match="weights in E4M3; 0 has E5M2"):
        save_fp8_checkpoint(make_model(CurrentScaling(fp8_format="E5M2")), tmp_path)
    with pytest.raises(ValueError, match="no FP8 layers"):
        save_fp8_checkpoint(nn.Linear(2, 2), tmp_path)
    with pytest.raises(ValueError, match="never called"):
        save_fp8_checkpoint(nn.Sequential(Fp8Linear(8, 8, recipe=DelayedScaling())), tmp_path)
    model = make_model(CurrentScaling())
    layer = model[0]
    assert isinstance(layer, Fp8Linear)
    layer.precision = "bf16"
    with pytest.raises(ValueError, match="0.precision is 'bf16'"):
        save_fp8_checkpoint(model, tmp_path)
    mixed = nn.Sequential(Fp8Linear(8, 8, recipe=CurrentScaling()), Fp8Linear(8, 8, recipe=RowwiseScaling()))
    with pytest.raises(ValueError, match="these have 2"):
        save_fp8_checkpoint(mixed, tmp_path)
    assert not list(tmp_path.iterdir())
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(ImportError, match="pip install safetensors"):
        save_fp8_checkpoint(make_model(CurrentScaling()), tmp_path)
