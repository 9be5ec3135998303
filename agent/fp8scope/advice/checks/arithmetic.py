"""Products: their precision, their dimensions, attention and convolutions."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from fp8scope.advice.finding import AdviceFinding, Gain, percent
from fp8scope.advice.record import RankRecord, RunRecord

REDUCED: Final = ("bf16", "fp16", "fp8")
MULTIPLES: Final = {"fp8": 16, "bf16": 8, "fp16": 8}
"""Dimensions that tensor cores take without padding. Source: NVIDIA's guide to matrix multiplication (16
bytes for 16-bit types), and cuBLASLt's requirement of multiples of 16 for FP8."""
MIN_FULL: Final = 0.2
"""Share of operations in FP32 beside reduced ones; a head or a router in FP32 is a choice."""
MIN_MISFIT: Final = 0.05
MIN_MATRIX: Final = 1 << 20
"""Bytes of the matrices of attention in one forward pass; smaller ones stay in a cache."""
MIN_ATTENTION: Final = 0.02
FASTER_REDUCED: Final = (2.0, 8.0)
"""Speed of 16-bit products over FP32. Source: NVIDIA's A100 data sheet, 2 with TF32 and 16 without it."""
FASTER_FUSED: Final = (1.5, 4.0)
"""Speed of fused attention. Source: Dao 2023 (FlashAttention-2), figures 4 to 6, against plain PyTorch: 3 to
10 times on its own; the range here is lower, for short sequences."""
FASTER_LAST: Final = (1.08, 1.35)
"""Speed of channels_last in 16 bits. Source: PyTorch's tutorial on that memory format; networks on a V100."""
MIN_CONVOLUTIONS: Final = 0.3
MAX_IMAGE: Final = 4
"""Channels that an input has by itself: nobody can round them up."""
FALLBACK: Final = 0.5
"""Share of the time that kernels for unaligned sizes may lose."""
OBSTACLES: Final[Mapping[str, str]] = {
    "dropout_p": "dropout_p above 0 on this device: drop out the output instead",
    "trained_mask": "a mask that needs a gradient: detach it, or add the bias with flex_attention",
    "attn_mask": "this attn_mask: use is_causal=True, a mask of four dimensions, or flex_attention",
    "dimensions": "inputs without four dimensions: give [batch, heads, sequence, features]",
    "layout": "inputs whose features are not adjacent in memory: call contiguous() after transposing",
    "value_features": "values with another number of features than the keys: pad them",
    "dtype": "this dtype on this device: use BF16 or FP16",
    "sdpa_kernel": "a call under torch.nn.attention.sdpa_kernel that allows MATH alone: allow others",
}
"""The obstacles that `observe.timing.unfused_attention` names, each with the change."""


DROPPED_OUT: Final = (
    " Leave its dropout_p at 0, and drop out the output instead: no fused kernel of a CPU has dropout."
)


def _products(rank: RankRecord) -> Sequence[Mapping[str, Any]]:
    return rank.facts.get("products") or ()


def _compute(rank: RankRecord) -> float:
    return rank.share("forward", "backward")


def _saved(rank: RankRecord, share: float, speed: float) -> float:
    """Return the share of the step that is saved if a share of the operations becomes `speed` times as fast.

    The other operations already are as fast.
    """
    return _compute(rank) * share * (speed - 1) / (1 + share * (speed - 1))


def mixed_precision(run: RunRecord) -> AdviceFinding | None:
    """Products in FP32 beside products in reduced precision, or on a device that has faster ones."""
    rank = run.first
    full = sum(row["share"] for row in _products(rank) if row["precision"] == "fp32")
    reduced = sum(row["share"] for row in _products(rank) if row["precision"] in REDUCED)
    on_device = rank.facts.get("device") not in ("", "cpu", "meta", None)
    is_partial = reduced >= MIN_MISFIT and full >= MIN_FULL
    # Many CPUs have no faster products than those in FP32.
    if not rank.is_measured or not (is_partial or (on_device and full > 1 - MIN_MISFIT)):
        return None
    largest = next(row for row in _products(rank) if row["precision"] == "fp32")
    where = f"the largest in {largest['layer']}" if largest["layer"] else "the largest"
    low, high = (_saved(rank, full, speed) for speed in FASTER_REDUCED)
    return AdviceFinding(
        practice="mixed_precision",
        title="Mixed precision is only partly on" if is_partial else "Mixed precision is off",
        evidence=f"{percent(full)} of the operations of matrix products are in FP32 ({where}, "
        f"{largest['in']} x {largest['out']}), and {percent(reduced)} in reduced precision.",
        gain=Gain(
            low=low,
            high=high,
            formula="c f (s - 1) / (1 + f (s - 1)): c the share of forward and backward in the step, f that "
            "of FP32 in the operations, s = 2 to 8 the speed of 16-bit products over FP32",
        ),
        change="Put the whole forward pass and the loss under torch.autocast(device_type, torch.bfloat16), "
        "and look for .float() and modules outside of it.",
    )


def misfit_dimensions(run: RunRecord) -> AdviceFinding | None:
    """Weights whose dimensions are not multiples of what tensor cores take."""
    rank = run.first
    misfits = [row for row in _products(rank) if _padding(row) > 0]
    share = sum(row["share"] for row in misfits)
    if not rank.is_measured or share < MIN_MISFIT:
        return None
    wasted = sum(row["share"] * _padding(row) for row in misfits)
    worst = max(misfits, key=lambda row: row["share"])
    multiple = MULTIPLES[worst["precision"]]
    sizes = f"{_up(worst['in'], multiple)} x {_up(worst['out'], multiple)}"
    return AdviceFinding(
        practice="dimensions",
        title="Dimensions do not fit tensor cores",
        evidence=f"{percent(share)} of the operations are products whose dimensions are not multiples of "
        f"{multiple}; the largest is {worst['layer'] or 'a weight'} with {worst['in']} x {worst['out']} in "
        f"{worst['precision'].upper()}.",
        gain=Gain(
            low=_compute(rank) * wasted,
            high=_compute(rank) * max(wasted, share * FALLBACK),
            formula="c w to c max(w, m/2): c the share of forward and backward in the step, m the misfits' "
            "share of operations, w the part of it that padding to the next multiple would add",
        ),
        change=f"Round the dimensions up, here to {sizes}. A vocabulary can be padded with tokens that never "
        "occur.",
    )


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _padding(row: Mapping[str, Any]) -> float:
    """Return the share of the padded product that is padding; 0 if the dimensions fit."""
    multiple = MULTIPLES.get(row["precision"], 1)
    if row["in"] <= MAX_IMAGE:
        return 0.0
    padded = _up(row["in"], multiple) * _up(row["out"], multiple)
    return float(1 - row["in"] * row["out"] / padded)


def shapes(run: RunRecord) -> AdviceFinding | None:
    """Attention or convolutions in a form that has faster kernels."""
    return attention(run) or convolutions(run)


def convolutions(run: RunRecord) -> AdviceFinding | None:
    """Convolutions in 16 bits on an accelerator, of tensors whose channels come first."""
    rank = run.first
    facts: Mapping[str, Any] = rank.facts.get("convolutions") or {}
    whole = max((rank.facts.get("attention") or {}).get("of", 0), 1)
    share = facts.get("channels_first", 0) / whole
    on_device = rank.facts.get("device") not in ("", "cpu", "meta", None)
    if not on_device or not rank.is_measured or share < MIN_CONVOLUTIONS or rank.facts.get("compiled"):
        return None
    low, high = (_saved(rank, share, speed) for speed in FASTER_LAST)
    benchmark = (
        ""
        if facts.get("benchmark")
        else (" If the sizes of images do not vary, also set torch.backends.cudnn.benchmark = True.")
    )
    return AdviceFinding(
        practice="attention",
        title="Convolutions are not in channels_last",
        evidence=f"{percent(share)} of the operations are convolutions in 16 bits of tensors whose channels "
        "come first, which tensor cores take in the other order; cudnn.benchmark is "
        f"{'off' if benchmark else 'on'}.",
        gain=Gain(
            low=low,
            high=high,
            formula="c v (s - 1) / (1 + v (s - 1)): c the share of forward and backward in the step, v that "
            "of these convolutions in the operations, s = 1.08 to 1.35 the speed in channels_last",
        ),
        change="model.to(memory_format=torch.channels_last), and the same for each batch of images."
        + benchmark,
    )


def attention(run: RunRecord) -> AdviceFinding | None:
    """Attention whose matrix is written to memory."""
    rank = run.first
    facts: Mapping[str, Any] = rank.facts.get("attention") or {}
    share = facts.get("flops", 0) / max(facts.get("of", 0), 1)
    size = facts.get("bytes", 0)
    if not rank.is_measured or share < MIN_ATTENTION or size < MIN_MATRIX:
        return None
    low, high = (_saved(rank, share, speed) for speed in FASTER_FUSED)
    beside = f", and {facts['fused']} are fused" if facts["fused"] else ""
    return AdviceFinding(
        practice="attention",
        title="Attention is not fused",
        evidence=f"{facts['written_out']} calls of a forward pass write the matrix of attention to memory, "
        f"{size / 2**20:.1f} MiB together{beside}; they are {percent(share)} of the operations.",
        gain=Gain(
            low=low,
            high=high,
            formula="c a (s - 1) / (1 + a (s - 1)): c the share of forward and backward in the step, a that "
            "of attention in the operations, s = 1.5 to 4 the speed of fused attention",
        ),
        change=_fusing(facts.get("unfused") or {})
        + (DROPPED_OUT if facts.get("dropped_out") and rank.facts.get("device") == "cpu" else ""),
    )


def _fusing(unfused: Mapping[str, int]) -> str:
    """The change that lets attention be fused. `unfused`: calls by the argument that rules it out."""
    changes = [OBSTACLES[name] for name in unfused if name in OBSTACLES]
    if not changes:
        return "Call torch.nn.functional.scaled_dot_product_attention (is_causal=True instead of a mask)."
    return f"scaled_dot_product_attention is called, but no fused kernel takes {'; or '.join(changes)}."
