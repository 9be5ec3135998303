"""What every number on the pages means: one place, shown as help beside each of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Term:
    """A word, what it is, and how to read it."""

    title: str
    definition: str
    reading: str = ""


_BEYOND = "|x·s| above M by more than float32's own rounding"
_SCALED = "x is the tensor before quantisation, s its scale, M the format's largest finite value."

GLOSSARY: Final[Mapping[str, Term]] = {
    "loss": Term(
        "Loss",
        "The training loss as the script logged it, step by step. The strong line is a centred average of "
        "it, which does not lag behind.",
        "A cross at the top marks steps whose loss was NaN or infinite; a triangle, values above the "
        "chart's range.",
    ),
    "verdict": Term(
        "Verdict",
        "The loss in the final tenth of the common range, held against the baseline group. With two or "
        "more runs in each arm: a test of equivalence (two one-sided t-tests over seeds) against the "
        "project's margin. With one FP8 run: within or over the tolerance, without a p-value.",
        "Inconclusive means: these seeds cannot tell. More seeds would.",
    ),
    "delta": Term(
        "Delta",
        "Relative difference of the loss: (FP8 − BF16) / |BF16|, aligned on tokens where both runs carry "
        "them, else on steps. Above zero, FP8 is worse.",
        "The shaded band is noise within this pair of runs only. It says nothing about another seed.",
    ),
    "tolerance": Term(
        "Tolerance",
        "The larger of the project's margin and 3 s √(1 + 1/K), with s the standard deviation of K ≥ 3 "
        "baseline seeds: what another BF16 seed could have done by chance.",
    ),
    "command": Term(
        "Command",
        "What a person or a rule asks of the training process. It travels with the answer to its next "
        "message, is done between two steps, and what became of it is shown. The training script decides "
        "what it takes.",
        "Delivered means: on its way into the process. After 15 minutes without an answer it expires.",
    ),
    "rank": Term(
        "Rank",
        "One process of a run that trains on several devices. Counts of the ranks are added and amaxes are "
        "the largest of them; here each is seen by itself.",
        "Behind is counted from the rank that has stored the most steps. A rank that is not heard of for a "
        "minute was killed or is cut off; when the run has ended, so was one that never said so.",
    ),
    "attempt": Term(
        "Attempt",
        "A run that is resumed, or that goes back to an earlier step, begins another attempt. From its first "
        "step on it replaces what earlier ones had stored; that is kept, and left out of the charts.",
    ),
    "fallback": Term(
        "Fall back",
        "The named layers compute in BF16 from the next step on, and in FP8 again when asked to. A name may "
        "hold * for any characters, as in blocks.*.mlp.down. Every change is marked in the loss.",
    ),
    "reference_window": Term(
        "Reference window",
        "Some steps that the run trained in FP8 and, from the same state, on the same batches and with the "
        "same random numbers, in BF16 as well. The run itself goes on as if nothing had been.",
        "It shows what FP8 costs from here on. What it has cost before is in both curves.",
    ),
    "window_delta": Term(
        "FP8 − BF16",
        "Relative difference of the mean loss over the window. ± is the standard error of the paired "
        "difference: how even it is within this window, and nothing about another one.",
        "Over: beyond the project's margin, or not finite.",
    ),
    "bisection": Term(
        "Bisection",
        "The gradient of one batch with a single matrix product in FP8 and all others in BF16, against all "
        "in BF16: relative error |g − r| / |r| and cosine of the whole gradient, for each product in turn.",
    ),
    "product": Term(
        "Product",
        "A linear layer multiplies three times: fprop, input by weight; dgrad, the output's gradient by "
        "weight; wgrad, the output's gradient by input.",
    ),
    "margin": Term(
        "Margin",
        "The relative difference of the loss below which FP8 and BF16 count as equivalent. Set per project.",
    ),
    "overflow_rate": Term(
        "Overflow rate",
        "Elements that were clipped to the format's range (saturated) or were NaN or infinite, over all "
        "elements of the tensor in that step.",
        "A little in activations can be harmless. The same tensor step after step is not.",
    ),
    "saturation_rate": Term(
        "Saturation rate", f"Finite elements with {_BEYOND}, over all elements. {_SCALED}"
    ),
    "saturated": Term(
        "Saturated", f"Number of finite elements with {_BEYOND}: what clipping changed. {_SCALED}"
    ),
    "underflow_rate": Term(
        "Underflow rate",
        "Elements that were not zero and became zero in FP8, over all elements.",
        "Gradients lose their small values first: a high rate there means a scale that is too small.",
    ),
    "underflow": Term("Underflow", "Number of elements that were not zero and became zero in FP8."),
    "subnormal_rate": Term(
        "Subnormal rate",
        "Elements stored below the format's smallest normal number, with fewer bits, over all elements.",
    ),
    "subnormal": Term("Subnormal", "Number of elements stored below the format's smallest normal number."),
    "nonfinite_rate": Term(
        "Non-finite rate", "NaN or infinite elements before quantisation, over all elements."
    ),
    "nonfinite": Term(
        "Non-finite", "Number of NaN or infinite elements before quantisation; they never enter amax."
    ),
    "amax": Term("amax", "Largest absolute value among the tensor's finite elements in that step."),
    "scale": Term(
        "Scale",
        "The multiplier s used in this step. With delayed scaling it comes from earlier steps' amax, so a "
        "sudden rise of amax saturates until it follows.",
    ),
    "noise_to_signal": Term(
        "Noise to signal",
        "Σ(x − q/s)² / Σx²: the power that rounding and clipping added, relative to the tensor's own. Taken "
        "in sampled steps. The SQNR in dB is −10 log₁₀ of it.",
        "About 0.0008 (31 dB) is what E4M3 does to bell-shaped values, 0.003 (25 dB) what E5M2 does. More "
        "means that elements saturate or flush.",
    ),
    "sq_error": Term(
        "Squared error", "Σ(x − q/s)² over the elements where both are finite. Taken in sampled steps."
    ),
    "sq_signal": Term("Squared signal", "Σx² over the same elements as the squared error."),
    "blocks": Term("Blocks", "How many blocks the tensor has, each with a scale of its own."),
    "saturated_blocks": Term("Saturated blocks", "Blocks with at least one element that was clipped."),
    "saturated_block_rate": Term(
        "Saturated block rate", "Blocks with at least one element that was clipped, over all blocks."
    ),
    "scale_min": Term("Smallest block scale", "The smallest multiplier among the tensor's blocks."),
    "scale_median": Term("Median block scale", "The median multiplier among the tensor's blocks."),
    "scale_max": Term("Largest block scale", "The largest multiplier among the tensor's blocks."),
    "scale_frozen": Term(
        "Frozen scale",
        "1 where a delayed scale cannot follow its tensor: its whole history of amax is zero, or an infinity "
        "is in it. The old scale is kept meanwhile.",
        "For a step or two after a dead layer this is harmless. A scale that stays frozen is a fault.",
    ),
    "scale_stale": Term(
        "Restarted scale",
        "1 where a checkpoint brought no scaling state for the tensor, or one that did not fit it, so that "
        "the scale was started afresh.",
    ),
    "history_amax": Term(
        "Largest amax in the history", "What a delayed scale follows: the largest amax that it remembers."
    ),
    "update_ratio": Term(
        "Update to weight",
        "‖update‖ / ‖weight‖ of one optimizer step, over all elements of the weight or 32,768 evenly spaced "
        "ones. Taken in sampled steps.",
        "Around 0.001 is common. Updates smaller than the weight's precision (0.004 in BF16) are lost in it.",
    ),
    "exponents": Term(
        "Exponents",
        "How many of the tensor's elements have floor(log₂ |x|) = e, in the last sampled step. The lines are "
        "the limits of its format at that step's scale (the median one, where each block has its own).",
        "What lies right of the largest value saturates, left of the smallest subnormal becomes zero.",
    ),
    "numel": Term("Elements", "Elements that were quantised in that step: what the counts are counts of."),
    "representable": Term(
        "Largest representable",
        "M / s: the largest value that this step's scale can hold. Where amax is above it, elements "
        "saturate.",
    ),
    "throughput": Term(
        "Throughput", "Tokens per second, as the training script measured them; else seconds a step."
    ),
    "learning_rate": Term(
        "Learning rate",
        "Of the optimizer's first parameter group, as it was used in that step. learning_rate/groupN are "
        "those of the groups after it.",
    ),
    "grad_norm": Term(
        "Gradient norm",
        "Global L2 norm of the gradients: the one that the script logged, else that of the gradients as the "
        "optimizer used them, without a loss scale and after clipping.",
        "Infinite or NaN before the loss is: gradients overflow first.",
    ),
    "grad_norm_applied": Term(
        "Gradient norm, applied",
        "Global L2 norm of the gradients as the optimizer used them. Below the gradient norm that the script "
        "logged, it was clipped.",
    ),
    "grad_norm_local": Term(
        "Gradient norm of the shards",
        "L2 norm of the gradients that this rank holds, where they are sharded. The square root of the sum "
        "of all ranks' squares is the global one.",
    ),
    "time_data": Term(
        "Waiting for data",
        "Time from the end of the work before (the optimizer, or a micro-batch's backward pass) to the "
        "beginning of the next forward pass in training. On a GPU it is the device's time, so that a wait "
        "that is hidden behind its work does not count.",
        "More than a few per cent: more workers, prefetching, or faster storage would help.",
    ),
    "time_forward": Term("Forward", "Time in the watched model's forward passes in training."),
    "time_backward": Term(
        "Backward", "Time in backward passes, the reduction of gradients that they wait for included."
    ),
    "time_optimizer": Term("Optimizer", "Time in the optimizer's step."),
    "time_other": Term(
        "Other",
        "The rest of the time since the step before ended: the loss function, clipping, logging, "
        "evaluations, checkpoints.",
    ),
    "model_flops_per_second": Term(
        "Model FLOP/s",
        "Floating-point operations of the model (products of the forward pass, counted once, times three for "
        "training; recomputation does not count) over the whole time of the step. Of one rank.",
    ),
    "mfu": Term(
        "MFU",
        "Model FLOP/s over what the device does at most in dense BF16, for FP8 runs as well, so that both "
        "share one scale.",
    ),
    "memory_allocated": Term("Memory allocated", "Bytes of the GPU's memory in use by tensors."),
    "memory_reserved": Term(
        "Memory reserved", "Bytes of the GPU's memory held by PyTorch's allocator, in use or not."
    ),
    "memory_peak": Term("Memory peak", "The most bytes of the GPU's memory that tensors have used so far."),
    "memory_rss": Term("Main memory", "Bytes of main memory that the training process occupies."),
    "gpu_utilization": Term(
        "GPU utilisation",
        "Share of the time in which the GPU ran any kernel, as its driver tells. High does not mean fast: "
        "that is what MFU says.",
    ),
    "tokens_per_second": Term("Tokens per second", "Tokens of the step over the time inside of it."),
    "points": Term(
        "Points stored",
        "Single values (a scalar or one tensor's statistic at one step) committed to the database. "
        "Dropped are rows that the agent could neither send nor keep on disk; it counts them.",
    ),
    "score": Term(
        "Score",
        "The mean over an evaluation's items. The whisker is a confidence interval over items (Wilson for "
        "proportions); the blue band is where a further BF16 seed would fall (Student-t over seeds), or "
        "the interval of the one BF16 run.",
    ),
    "detectable": Term(
        "Smallest detectable",
        "The smallest true difference that this many items and seeds would have shown with 80 % "
        "probability. Differences below it may exist unseen.",
    ),
    "alert": Term(
        "Alert",
        "One event for one condition: opened at the step where a rule was sure, closed when the condition "
        "is gone. Onset is the first step of it.",
    ),
    "alpha": Term(
        "Alpha",
        "Probability of a false alarm over a whole run, and one minus the level of the intervals.",
    ),
    "token": Term(
        "API token",
        "What a training process proves its project with. Shown once; only a hash is kept. Revoking it "
        "stops the next request.",
    ),
    "webhook": Term(
        "Webhook",
        "Each alert is sent as JSON by POST to this address, signed with HMAC-SHA256 of the secret, and "
        "repeated until the other side answers 2xx.",
    ),
}

# Statistics in the order in which a person looks for trouble.
STATISTICS: Final = (
    "overflow_rate",
    "saturation_rate",
    "underflow_rate",
    "subnormal_rate",
    "nonfinite_rate",
    "amax",
    "scale",
    "saturated",
    "underflow",
    "subnormal",
    "nonfinite",
    "numel",
    "noise_to_signal",
    "saturated_block_rate",
    "update_ratio",
    "history_amax",
    "scale_frozen",
    "scale_stale",
    "scale_min",
    "scale_median",
    "scale_max",
    "blocks",
    "saturated_blocks",
    "sq_error",
    "sq_signal",
)


def title(name: str) -> str:
    """A statistic's or scalar's name for people; the name itself where the glossary has none."""
    return GLOSSARY[name].title if name in GLOSSARY else name.replace("_", " ")
