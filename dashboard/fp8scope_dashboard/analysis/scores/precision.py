"""Warnings about the precision in which a model was evaluated."""

from __future__ import annotations

from collections.abc import Collection

NAMES = {
    "bf16": "BF16",
    "fp8": "FP8",
    "fp16": "FP16",
    "fp32": "FP32",
    # Those of the evaluation matrix.
    "fp8-current": "FP8 current",
    "fp8-rowwise": "FP8 rowwise",
    "fp8-block": "FP8 block",
    "mxfp8": "MXFP8",
    "fp8-delayed": "FP8 delayed",
    "fp6": "FP6",
    "int8": "INT8",
    "int4": "INT4",
    "nvfp4": "NVFP4",
}


def warnings_of(trained: str, evaluated: str | None, baseline: Collection[str | None]) -> list[str]:
    """Sentences about an evaluation's precision; none if it is unknown or as expected.

    Args:
        trained: the run's precision.
        evaluated: precision of the evaluation's forward pass; None if unknown.
        baseline: those of the baseline's evaluations.
    """
    if evaluated is None:
        return []
    name = NAMES.get(evaluated, evaluated)
    sentences = []
    if trained == "fp8" and evaluated == "bf16":
        sentences.append(
            "Trained in FP8, evaluated in BF16: the score is that of the master weights, without the "
            "rounding of an FP8 forward pass. Evaluate in FP8 as well if the model will be served in FP8."
        )
    if trained in ("fp8", "bf16") and evaluated == "fp16":
        sentences.append(
            f"Trained in {NAMES[trained]} with BF16, evaluated in FP16: values above 65,504 overflow there, "
            "so a lower score may come from the evaluation. Evaluate in BF16."
        )
    others = sorted({NAMES.get(score, score) for score in baseline if score is not None} - {name})
    if others:
        sentences.append(
            f"Evaluated in {name}, the baseline in {' and '.join(others)}: the difference contains that of "
            "the evaluations. Evaluate both in the same precision."
        )
    return sentences
