"""Compares weights of six bits (FP6) with weights of eight (FP8, INT8).

    python benchmarks/fp6.py [--seeds N] [--steps N]

Trains a small byte-level GPT in float32, then quantises only the weights of its linear layers (including the
head), with one float32 scale per row. Prints one JSON line per seed and format, then one per format over all
seeds:

    bits_per_weight     including scales and padding
    sqnr_db             10 log10 of signal over error of the weights, all layers together
    loss, loss_delta    loss on held-out text in nats per byte, and its increase by quantisation; the standard
                        error is over paired windows, clustered by topic
    forward_ms          median time of the loss of 16 windows; FP8 and INT8 are dequantised beforehand, FP6
                        at every call, which shows the cost of unpacking in plain torch
"""

import argparse
import copy
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from fp8scope.demo.data import Corpus, load
from fp8scope.demo.model import ByteGpt, Shape
from fp8scope_kernels import E4M3, RowwiseScaling, quantize_blocks
from fp8scope_kernels.fp6 import Fp6Linear

BATCH = 16
SCALE_BITS = 32

Quantizer = Callable[[nn.Linear], tuple[nn.Module, Tensor, float]]
"""Returns the replacement layer, the weight that it multiplies by, and the size of the weight in bits."""


def fp6(linear: nn.Linear) -> tuple[nn.Module, Tensor, float]:
    layer = Fp6Linear.from_linear(linear)
    return layer, layer.weight.dequantize(), 8.0 * layer.weight.nbytes


def with_weight(linear: nn.Linear, weight: Tensor) -> tuple[nn.Module, Tensor, float]:
    twin = copy.deepcopy(linear)
    twin.weight.data = weight
    return twin, weight, 8.0 * weight.numel() + SCALE_BITS * weight.shape[0]


def fp8(linear: nn.Linear) -> tuple[nn.Module, Tensor, float]:
    weight = linear.weight.detach()
    return with_weight(linear, quantize_blocks(weight, E4M3, (1, 0), RowwiseScaling()).dequantize())


def int8(linear: nn.Linear) -> tuple[nn.Module, Tensor, float]:
    weight = linear.weight.detach()
    step = weight.abs().amax(1, keepdim=True) / 127
    return with_weight(linear, (weight / step).round().clamp(-127, 127) * step)


QUANTIZERS: dict[str, Quantizer] = {"FP6 E3M2": fp6, "FP8 E4M3": fp8, "INT8": int8}


def window_losses(model: nn.Module, text: Tensor) -> Tensor:
    """Return the negative log-likelihood of each window in nats per byte: [windows]."""
    logits = model(text[:, :-1]).transpose(1, 2)
    return functional.cross_entropy(logits, text[:, 1:], reduction="none").mean(1)


def train(seed: int, steps: int, corpus: Corpus, shape: Shape) -> ByteGpt:
    torch.manual_seed(seed)
    model = ByteGpt(shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for step in range(steps):
        loss = window_losses(model, corpus.batch(steps * seed + step, BATCH)).mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
    return model.eval()


def quantized(model: ByteGpt, quantizer: Quantizer) -> tuple[ByteGpt, float, float]:
    """Return a copy of the model with quantised linear layers, its bits per weight, and its SQNR in dB."""
    twin = copy.deepcopy(model)
    bits = signal = error = 0.0
    weights = 0
    for name, linear in list(twin.named_modules()):
        if isinstance(linear, nn.Linear):
            layer, weight, size = quantizer(linear)
            original = linear.weight.detach().double()
            signal += original.square().sum().item()
            error += (original - weight).square().sum().item()
            bits, weights = bits + size, weights + weight.numel()
            twin.set_submodule(name, layer)
    return twin, bits / weights, 10 * torch.log10(torch.tensor(signal / error)).item()


def standard_error(differences: Tensor, clusters: tuple[str, ...]) -> float:
    """Return the standard error of the mean, with the windows of one topic as one cluster."""
    sums: dict[str, float] = defaultdict(float)
    for cluster, centred in zip(clusters, (differences - differences.mean()).tolist(), strict=True):
        sums[cluster] += centred
    count = len(sums)
    total = sum(value**2 for value in sums.values()) * count / (count - 1)
    return float(total**0.5 / len(differences))


def forward_ms(model: nn.Module, text: Tensor) -> float:
    times = []
    for _ in range(13):
        start = time.perf_counter()
        window_losses(model, text)
        times.append(1e3 * (time.perf_counter() - start))
    return round(statistics.median(times[3:]), 2)


@torch.no_grad()
def measure(model: ByteGpt, name: str, seed: int, corpus: Corpus) -> dict[str, float | str | int]:
    twin, bits, sqnr = quantized(model, QUANTIZERS[name])
    losses = window_losses(twin, corpus.windows)
    differences = losses - window_losses(model, corpus.windows)
    return {
        "format": name,
        "seed": seed,
        "bits_per_weight": round(bits, 3),
        "sqnr_db": round(sqnr, 2),
        "loss": round(losses.mean().item(), 5),
        "loss_delta": round(differences.mean().item(), 6),
        "standard_error": round(standard_error(differences, corpus.clusters), 6),
        "forward_ms": forward_ms(twin, corpus.windows[:BATCH]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=600)
    arguments = parser.parse_args()
    shape = Shape()
    corpus = load(shape.context, windows=256)
    cases: dict[str, list[dict[str, float | str | int]]] = {name: [] for name in QUANTIZERS}
    for seed in range(1, arguments.seeds + 1):
        model = train(seed, arguments.steps, corpus, shape)
        for name, runs in cases.items():
            runs.append(measure(model, name, seed, corpus))
            print(json.dumps(runs[-1]), flush=True)
    for name, runs in cases.items():
        means = {
            key: round(statistics.mean(float(run[key]) for run in runs), 5)
            for key in ("bits_per_weight", "sqnr_db", "loss", "loss_delta", "forward_ms")
        }
        relative = means["loss_delta"] / (means["loss"] - means["loss_delta"])
        print(json.dumps({"format": name, "seeds": len(runs), **means, "relative": round(relative, 5)}))


if __name__ == "__main__":
    main()
