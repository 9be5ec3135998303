"""Record an ordinary training loop by adding the two lines marked below.

fp8scope login http://localhost:8265
python examples/attach_two_lines.py
"""

import argparse

import torch
from torch.nn import functional

import fp8scope  # line 1
from fp8scope.demo.data import load
from fp8scope.demo.model import ByteGpt, Shape

BATCH = 16


def main() -> None:
    """Train a byte-level GPT in FP8, with gradient accumulation and a learning rate schedule."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()

    torch.manual_seed(1)
    shape = Shape()
    model = ByteGpt(shape)
    corpus = load(shape.context, windows=64)
    fp8scope.convert(model, fp8scope.DelayedScaling())  # leave it out for a BF16 run
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)

    run = fp8scope.attach(model, optimizer, name="two lines", total_steps=options.steps)  # line 2

    for number in range(1, options.steps + 1):
        for half in torch.chunk(corpus.batch(number, BATCH), 2):
            with torch.autocast("cpu", torch.bfloat16):
                logits = model(half[:, :-1])
            loss = functional.cross_entropy(logits.float().flatten(0, 1), half[:, 1:].flatten())
            (loss / 2).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if number % 10 == 0:
            # Optional: log values that the agent cannot see. They belong to the step that just ended.
            with torch.no_grad():
                logits = model(corpus.windows[:, :-1]).float()
            heldout = functional.cross_entropy(logits.flatten(0, 1), corpus.windows[:, 1:].flatten())
            run.log({"eval/loss": heldout})
            print(f"step {number}: loss {loss.item():.3f}  {run.url}")


if __name__ == "__main__":
    main()
