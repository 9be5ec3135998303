"""What is measured in every step of a training: loss, gradients, times, memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from fp8scope_dashboard.pages.glossary.term import Term

STEP_TERMS: Final[Mapping[str, Term]] = {
    "loss": Term(
        "Loss",
        "The training loss as the script logged it, step by step. The strong line is a centred average of "
        "it, which does not lag behind.",
        "A cross at the top marks steps whose loss was NaN or infinite; a triangle, values above the "
        "chart's range.",
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
    "plain_tensors_every": Term(
        "Steps from one reading of plain tensors to the next",
        "Tensors of layers that are not FP8 are read every so many steps, so that watching takes at most its "
        "share of the training's time (attach's overhead, 2 % by default). Losses and FP8 layers' counters "
        "come with every step.",
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
}
