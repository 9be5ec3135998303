"""What each rank runs in tests of several ranks: DDP or FSDP2 around a small FP8 model, on gloo."""

import os
import signal
import sys
import warnings

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fp8scope
from fp8scope_kernels.distributed import sync_amaxes_after


def main(wrap: str, steps: int, victim: int, when: int, agree: bool) -> None:
    """Train `steps` steps; rank `victim` is killed after step `when`, once the first attempt only."""
    rank, restarts = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    early = os.environ.get("TEST_INIT") == "early"
    run = fp8scope.init(name=f"{wrap} run", total_steps=steps) if early else None
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    run = run or fp8scope.init(name=f"{wrap} run", total_steps=steps)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    fp8scope.convert(model, fp8scope.DelayedScaling(history_length=4, reduce_amax=agree))
    run.watch(model)
    if wrap == "ddp":
        wrapped: torch.nn.Module = DistributedDataParallel(model)
    else:
        for layer in (model[0], model[2]):
            fully_shard(layer)
        fully_shard(model)
        wrapped = model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if agree:
        sync_amaxes_after(optimizer, model)
    first = 1 if restarts == 0 else when - 1
    for number in range(first, steps + 1):
        with run.step(number=number, tokens=8) as step:
            # Every rank's data is its own, and so are its amaxes.
            x = torch.randn(8, 32) * (1 + rank)
            loss = wrapped(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step.log(loss=loss)
        if rank == victim and number == when and restarts == 0:
            os.kill(os.getpid(), signal.SIGKILL)
    run.finish()
    dist.destroy_process_group()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5] == "agree")
