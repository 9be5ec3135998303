"""Train a small byte-level GPT on the CPU and record it with fp8scope, step by step.

    fp8scope up                                                       # in another terminal
    fp8scope login http://localhost:8265
    for seed in 1 2 3; do python examples/train_byte_gpt.py --seed $seed; done
    python examples/train_byte_gpt.py --precision fp8

Without a server the run is kept in .fp8scope/spool; send it later with `fp8scope sync`.
"""

import argparse

import torch
from torch.nn import functional

import fp8scope
from fp8scope.demo.data import load
from fp8scope.demo.model import ByteGpt, Shape

BATCH = 16


def main() -> None:
    """Train, evaluate and finish the run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--precision", choices=("bf16", "fp8"), default="bf16")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()

    torch.manual_seed(options.seed)
    shape = Shape()
    model = ByteGpt(shape)
    corpus = load(shape.context, windows=256)
    if options.precision == "fp8":
        # Converts the blocks' linear layers in place. The output head is not converted; the report says why.
        print(fp8scope.convert(model, fp8scope.DelayedScaling()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    # Runs of a group differ only in their seed. A run with a baseline is compared with that group.
    run = fp8scope.init(
        name=f"byte gpt {options.precision} seed {options.seed}",
        precision=options.precision,
        group=options.precision,
        baseline="" if options.precision == "bf16" else "bf16",
        seed=options.seed,
        total_steps=options.steps,
        config={"shape": shape, "batch": BATCH},
    )
    if options.precision == "fp8":
        run.watch(model)  # record amax, scale and counts of every FP8 tensor from the next step on
    run.on_alert(lambda alert: print(f"{alert.severity}: {alert.message}"))

    for number in range(1, options.steps + 1):
        with run.step(tokens=BATCH * shape.context) as step:
            text = corpus.batch(number, BATCH)
            loss = loss_of(model, text).mean()
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            step.log(loss=loss)  # may be a tensor: it is read later, by another thread
        if number % 50 == 0:
            print(f"step {number}: loss {loss.item():.3f}  {run.url}")

    # Log one score per item, so that the dashboard can compute intervals and compare runs item by item.
    model.eval()
    with torch.no_grad():
        nll = loss_of(model, corpus.windows).mean(1)
    run.log_eval(
        "held-out text",
        "nll",
        nll,
        kind="mean",
        higher_is_better=False,
        item_ids=corpus.items,
        clusters=corpus.clusters,
    )
    report = run.finish()
    print(f"{report.points_sent} points have arrived." if report.complete else f"Kept in {report.directory}.")


def loss_of(model: torch.nn.Module, text: torch.Tensor) -> torch.Tensor:
    """Return the NLL of each next byte in nats, float32 [batch, time], for text [batch, time + 1]."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(text[:, :-1])
    return functional.cross_entropy(logits.float().transpose(1, 2), text[:, 1:], reduction="none")


if __name__ == "__main__":
    main()
