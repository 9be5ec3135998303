"""Terms about one training step: loss, gradients, times and memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from fp8scope_dashboard.pages.glossary.term import Term

STEP_TERMS: Final[Mapping[str, Term]] = {
    "loss": Term(
        "Loss",
        "The training loss that the script logs at each step. The strong line is a centred moving average, "
        "which has no lag.",
        "A cross at the top marks a NaN or infinite loss; a triangle marks values above the chart's range.",
    ),
    "throughput": Term(
        "Throughput", "Tokens per second as measured by the training script, else seconds per step."
    ),
    "learning_rate": Term(
        "Learning rate",
        "The learning rate that the optimizer's first parameter group used in this step. "
        "learning_rate/groupN are those of the other groups.",
    ),
    "grad_norm": Term(
        "Gradient norm",
        "Global L2 norm of the gradients as logged by the script, else of the gradients that the optimizer "
        "used (unscaled, after clipping).",
        "It becomes infinite or NaN before the loss does, because gradients overflow first.",
    ),
    "grad_norm_applied": Term(
        "Gradient norm, applied",
        "Global L2 norm of the gradients that the optimizer used. A value below the logged gradient norm "
        "means that the gradients were clipped.",
    ),
    "grad_norm_local": Term(
        "Gradient norm of the shards",
        "L2 norm of this rank's part of sharded gradients. The global norm is the square root of the sum of "
        "the squares of all ranks.",
    ),
    "time_data": Term(
        "Waiting for data",
        "Time from the end of the optimizer step (or of a micro-batch's backward pass) to the start of the "
        "next forward pass. On a GPU this is device time, so a wait that overlaps with GPU work does not "
        "count.",
        "If it is more than a few per cent, use more workers, prefetching or faster storage.",
    ),
    "time_forward": Term("Forward", "Time in the training forward passes of the watched model."),
    "time_backward": Term(
        "Backward", "Time in backward passes, including gradient reductions that they wait for."
    ),
    "time_optimizer": Term("Optimizer", "Time in the optimizer step."),
    "time_other": Term(
        "Other",
        "The remaining time of the step: loss function, clipping, logging, evaluations, checkpoints.",
    ),
    "anatomy/data_seconds": Term(
        "Waiting for data",
        "Seconds of the step inside of a DataLoader: waiting for its workers, or loading. Without a "
        "DataLoader, the time from the end of the work before to the next forward pass.",
    ),
    "anatomy/copy_seconds": Term("Host to device", "Seconds in copies of tensors from host to device."),
    "anatomy/forward_seconds": Term(
        "Forward", "Seconds in the model's forward passes, without what interrupts them."
    ),
    "anatomy/loss_seconds": Term(
        "Loss function", "Seconds from the end of a forward pass to the beginning of its backward pass."
    ),
    "anatomy/backward_seconds": Term("Backward", "Seconds in backward passes, without what interrupts them."),
    "anatomy/communication_seconds": Term(
        "Communication",
        "Seconds in collectives that the training waits for. What a backward pass hides does not count.",
        "It is also the wait for slower ranks: the rank with the least communication is the one that others "
        "wait for.",
    ),
    "anatomy/optimizer_seconds": Term("Optimizer", "Seconds in the optimizer's step."),
    "anatomy/checkpoint_seconds": Term(
        "Checkpoint", "Seconds in which checkpoints are saved or loaded on the training thread."
    ),
    "anatomy/rest_seconds": Term(
        "Unaccounted",
        "Seconds that are no other part: clipping, evaluations, logging, the learning rate's schedule.",
    ),
    "launch_bound_seconds": Term(
        "Launch-bound",
        "Time of the passes and the optimizer in which the device had caught up with the host, which "
        "launches its work. The device may be idle for up to this time.",
        "Many small kernels make it large: torch.compile or CUDA graphs launch fewer.",
    ),
    "wait_bound": Term(
        "Wait-bound",
        "Data, copies from the host, communication and checkpoints take more than 15 % of the last steps' "
        "time, by the whole of a 95 % interval.",
    ),
    "rank_skew": Term(
        "Skew", "How much longer a part takes on the rank where it takes longest than on the median rank."
    ),
    "straggler_score": Term(
        "Straggler score",
        "The time in which the median rank works in a step, over that of this rank, at most 1. A rank below "
        "0.7 is a straggler.",
    ),
    "model_flops_per_second": Term(
        "Model FLOP/s",
        "Floating-point operations of the model per second on one rank: the matrix products of the forward "
        "pass times three, without recomputation, divided by the step time.",
    ),
    "mfu": Term(
        "MFU",
        "Model FLOPs utilisation: model FLOP/s divided by the device's peak in dense BF16. FP8 runs use the "
        "same peak, so that both are comparable.",
    ),
    "fp8_units": Term(
        "On FP8 units",
        "Products of FP8 layers that ran on FP8 units of the device in their last call: forward, gradient of "
        "the input and gradient of the weight count one each. The others multiply the same numbers as BF16, "
        "because the device has no units for the recipe's scales, a size does not fit, or torch's product "
        "failed. The agent says so at the end of the run.",
    ),
    "hardware_flops_per_second": Term(
        "Hardware FLOP/s",
        "Model FLOP/s with the operations that activation checkpointing repeats in the backward pass.",
    ),
    "hfu": Term(
        "HFU",
        "Hardware FLOPs utilisation: hardware FLOP/s divided by the device's peak in dense BF16. It exceeds "
        "MFU by the recomputed activations.",
    ),
    "plain_tensors_every": Term(
        "Steps between readings of plain tensors",
        "Tensors of layers that are not FP8 are read only every few steps, to keep the overhead below its "
        "limit (the argument overhead of attach, 2 % by default). Losses and the counters of FP8 layers are "
        "recorded at every step.",
    ),
    "measured_every": Term(
        "Steps between measured ones",
        "Where steps are shorter than 5 ms, only the loss, the tokens and what the script logs are recorded "
        "at every step. Times, learning rate, gradient norm and tensors come with every nth step, so that "
        "watching stays within its limit. Models with FP8 layers are also counted at every step.",
    ),
    "memory_allocated": Term("Memory allocated", "GPU memory in use by tensors, in bytes."),
    "memory_reserved": Term(
        "Memory reserved", "GPU memory held by PyTorch's allocator, in use or not, in bytes."
    ),
    "memory_peak": Term("Memory peak", "The most GPU memory that tensors have used so far, in bytes."),
    "memory_rss": Term("Main memory", "Resident memory of the training process, in bytes."),
    "memory_anonymous": Term(
        "Main memory without files",
        "Resident memory of the training process in bytes, without the pages of files that are mapped.",
    ),
    "gpu_utilization": Term(
        "GPU utilisation",
        "Share of the time in which the GPU ran any kernel, as reported by the driver. A high value does not "
        "mean efficient use; see MFU.",
    ),
    "gpu_memory_used": Term("GPU memory in use", "Bytes in use on the GPU, by all processes."),
    "gpu_power_watts": Term("GPU power", "Power draw of the GPU in watts, as reported by the driver."),
    "gpu_temperature": Term("GPU temperature", "Degrees Celsius, as reported by the driver."),
    "gpu_sm_clock_mhz": Term(
        "GPU clock",
        "Clock of the GPU's multiprocessors in MHz. Below its usual value, the GPU is hot or at its power "
        "limit.",
    ),
    "gpu_memory_clock_mhz": Term("GPU memory clock", "Clock of the GPU's memory in MHz."),
    "gpu_ecc_corrected": Term(
        "Corrected memory errors", "ECC errors that the GPU has corrected since its driver was loaded."
    ),
    "gpu_ecc_uncorrected": Term(
        "Uncorrected memory errors",
        "ECC errors that the GPU could not correct since its driver was loaded. Values that it computed may "
        "be wrong.",
    ),
    "gpu_xid": Term(
        "Xid error",
        "Number of the last error that the GPU's driver reported during the run, as listed in NVIDIA's Xid "
        "documentation.",
    ),
    "tokens_per_second": Term("Tokens per second", "Tokens of the step divided by the time within the step."),
    "step_times": Term(
        "Time by layer",
        "The time of the operators of one traced step on the first rank: of the accelerator's kernels, or on "
        "a CPU of the host. Layers whose paths differ by numbers only are one row. An operator of the "
        "backward pass belongs to the layer whose forward operator made it.",
        "A traced step is slower than others: compare the rows, not their sum with other steps. What "
        "torch.compile has compiled belongs to no layer.",
    ),
    "step_times_casts": Term(
        "Casts and scales",
        "Of FP8 layers all but their matrix products: casts, scales, transposes, counters, and the layer's "
        "own time on the host.",
    ),
    "step_times_held": Term(
        "Kept for the backward pass",
        "Bytes that FP8 layers save in the forward pass: casts of their operands, transposed. A layer in "
        "high precision saves its input. Layers whose activations are recomputed or offloaded do not count.",
    ),
    "advice": Term(
        "Advice",
        "When the run ends, the agent checks the last steps of the first rank against twelve practices of "
        "fast training.",
        "Several findings do not add up: each takes the other parts of a step as they are.",
    ),
    "advice_evidence": Term(
        "Evidence", "The measurements that a finding rests on; without them there is none."
    ),
    "advice_gain": Term(
        "Expected gain",
        "The share of a step's time that the change is expected to save, as a range, with its formula.",
    ),
    "advice_change": Term("Change to make", "What to change in the training script."),
    "advice_gained": Term(
        "What it gained",
        "1 - (mean time of a step after the change / before it), between this run and the nearest run of the "
        "same group, origin or script that has, or no longer has, the finding. Per token, if both runs log "
        "tokens.",
        "Whatever else differs between the two runs counts, too.",
    ),
}
