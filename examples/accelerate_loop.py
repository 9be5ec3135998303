"""A loop with Hugging Face Accelerate: `attach` finds the steps, `accelerator.log` adds values to them.

fp8scope login http://localhost:8265
accelerate launch --cpu examples/accelerate_loop.py
"""

import argparse

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fp8scope
from fp8scope.integrations.accelerate import Fp8scopeTracker


def main() -> None:
    """Train with gradient accumulation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()

    torch.manual_seed(0)
    tracker = Fp8scopeTracker()
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2, log_with=tracker
    )
    model: nn.Module = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))
    fp8scope.convert(model, fp8scope.DelayedScaling())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = DataLoader(TensorDataset(torch.randn(options.steps * 16, 32)), batch_size=8)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)

    tracker.run = fp8scope.attach(model, optimizer, name="accelerate", total_steps=options.steps)
    accelerator.init_trackers("an accelerate project", config={"batch": 16})
    for (x,) in data:
        with accelerator.accumulate(model):
            loss = (model(x) - x.roll(1, dims=1)).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            if accelerator.sync_gradients:
                accelerator.log({"largest_error": loss.detach().sqrt()})
    accelerator.end_training()
    print(f"{tracker.run.finish().rows_sent} steps have arrived: {tracker.run.url}")


if __name__ == "__main__":
    main()
