"""Measures what gradients averaged in FP8 save in communication, and what they lose against float32.

    python benchmarks/gradient_reduction.py [--steps 40] [--ranks 2 4]

Processes train a byte-level GPT with `Fp8AdamW`, each on its own batches, and average their gradients with
`Fp8GradientReducer` over gloo. In every step the same gradients are also averaged by all-reduces in float32
and in BF16. Each rank counts the bytes that its TCP connections have sent, as Linux counts them. Needs Linux.

Prints one JSON line; by number of ranks:

    bytes               sent by a rank in a step, measured: FP8, BF16, float32
    predicted           the same by `bytes_sent` and `bytes_of_all_reduce`, which the agent records
    of_bf16, of_float32 measured bytes in FP8 over those of the others
    error, error_bf16   relative error (L2, over all gradients) of the average against float32: the median
                        step, and the worst
    cosine              the smallest cosine between the average in FP8 and that in float32
    mu                  smallest, median and largest pre-scale after the last step
    saturated           the largest share of a tensor's values at the maximum in any step
    state               bytes of the optimizer's state per parameter
"""

import argparse
import json
import os
import socket
import statistics
import struct
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.multiprocessing.spawn import spawn
from torch.nn import functional

from fp8scope.demo.data import load
from fp8scope.demo.model import ByteGpt, Shape
from fp8scope_kernels import Fp8AdamW, Fp8GradientReducer

SHAPE = Shape(layers=2, width=128, heads=4, context=64)
BATCH = 8
BYTES_SENT = 200
"""The offset of `tcpi_bytes_sent` in Linux's `struct tcp_info`."""


def sent() -> int:
    """Return the bytes that this process's TCP connections have sent."""
    total = 0
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(descriptor))) as connection:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, BYTES_SENT + 8)
        except OSError:
            # Closed meanwhile, or no TCP.
            continue
        if len(info) == BYTES_SENT + 8:
            total += struct.unpack_from("Q", info, BYTES_SENT)[0]
    return total


class Counted:
    """Counts the bytes that are sent inside of a `with` block, without those of a barrier."""

    def __init__(self) -> None:
        self.bytes: list[int] = []

    def __enter__(self) -> None:
        before = sent()
        dist.barrier()
        self._barrier, self._began = sent() - before, sent()

    def __exit__(self, *problem: object) -> None:
        # All ranks have received everything behind a barrier.
        dist.barrier()
        self.bytes.append(sent() - self._began - self._barrier)


def averaged(flat: Tensor, dtype: torch.dtype, counted: Counted) -> Tensor:
    """The mean over the ranks by an all-reduce in `dtype`."""
    values = flat.to(dtype, copy=True)
    with counted:
        dist.all_reduce(values)
    return values.float() / dist.get_world_size()


def flat_gradients(model: torch.nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def job(rank: int, size: int, steps: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=size)
    torch.manual_seed(0)
    model = ByteGpt(SHAPE)
    optimizer = Fp8AdamW(model.parameters(), lr=1e-3, level="O2")
    reducer = Fp8GradientReducer(model.named_parameters())
    text = load(SHAPE.context, 1).train
    draw = torch.Generator().manual_seed(rank)
    fp8, bf16, float32 = Counted(), Counted(), Counted()
    errors, errors_bf16, cosines, saturated = [], [], [], []
    for _ in range(steps):
        starts = torch.randint(0, len(text) - SHAPE.context - 1, (BATCH,), generator=draw)
        batch = torch.stack([text[at : at + SHAPE.context + 1] for at in starts.tolist()]).long()
        optimizer.zero_grad()
        functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()).backward()  # type: ignore[no-untyped-call]
        own = flat_gradients(model).clone()
        exact, coarse = averaged(own, torch.float32, float32), averaged(own, torch.bfloat16, bf16)
        with fp8:
            reducer.reduce()
        mean = flat_gradients(model)
        errors.append(float((mean - exact).norm() / exact.norm()))
        errors_bf16.append(float((coarse - exact).norm() / exact.norm()))
        cosines.append(float(functional.cosine_similarity(mean, exact, dim=0)))
        assert reducer.saturated_shares is not None
        saturated.append(float(reducer.saturated_shares.max()))
        optimizer.step()
    if rank == 0:
        result = summary(reducer, optimizer, fp8.bytes, bf16.bytes, float32.bytes)
        result |= {
            "error": [round(statistics.median(errors), 5), round(max(errors), 5)],
            "error_bf16": [round(statistics.median(errors_bf16), 5), round(max(errors_bf16), 5)],
            "cosine": round(min(cosines), 6),
            "saturated": round(max(saturated), 7),
        }
        Path(folder, "result.json").write_text(json.dumps(result))
    dist.destroy_process_group()


def summary(
    reducer: Fp8GradientReducer, optimizer: Fp8AdamW, fp8: list[int], bf16: list[int], float32: list[int]
) -> dict[str, Any]:
    """What this rank has sent, and its scaling factors and state at the end."""
    measured = {"fp8": statistics.median(fp8), "bf16": statistics.median(bf16)}
    measured["float32"] = statistics.median(float32)
    predicted = {"fp8": reducer.bytes_sent, "bf16": reducer.bytes_of_all_reduce(2)}
    predicted["float32"] = reducer.bytes_of_all_reduce(4)
    factors = sorted(reducer.pre_scale.values())
    stored = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
    elements = sum(parameter.numel() for parameter in reducer.parameters)
    return {
        "bytes": measured,
        "predicted": predicted,
        "of_bf16": round(measured["fp8"] / measured["bf16"], 4),
        "of_float32": round(measured["fp8"] / measured["float32"], 4),
        "mu": [round(factors[0], 4), round(statistics.median(factors), 4), round(factors[-1], 4)],
        "state": round(sum(tensor.nbytes for tensor in stored) / elements, 3),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    arguments = parser.parse_args()
    results = {}
    for size in arguments.ranks:
        with tempfile.TemporaryDirectory() as folder:
            spawn(job, (size, arguments.steps, folder), nprocs=size)  # type: ignore[no-untyped-call]
            results[str(size)] = json.loads(Path(folder, "result.json").read_text())
    print(json.dumps({"benchmark": "gradient_reduction", "steps": arguments.steps, "ranks": results}))


if __name__ == "__main__":
    main()
