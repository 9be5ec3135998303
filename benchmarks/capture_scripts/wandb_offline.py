"""A loop in nanoGPT's style: evaluates every so many steps, and logs losses by W&B."""

import argparse

import torch
import wandb
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--eval-interval", type=int, default=5)
parser.add_argument("--learning-rate", type=float, default=1e-2)
args = parser.parse_args()

torch.manual_seed(1)
run = wandb.init(project="owt", name="gpt", config=vars(args))
wandb.define_metric("val/*", step_metric="iter")
model = nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 32))
optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, 32, (4, 17))
    return tokens[:, :-1], tokens[:, 1:]


@torch.no_grad()
def evaluate() -> torch.Tensor:
    model.eval()
    x, y = batch()
    loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
    model.train()
    return loss


best = float("inf")
for iteration in range(args.steps + 1):
    if iteration % args.eval_interval == 0:
        val = evaluate()
        best = min(best, float(val))
        wandb.log(
            {
                "iter": iteration,
                "val": {"loss": val, "perplexity": val.exp().item()},
                "lr": args.learning_rate,
            }
        )
        run.summary["best"] = best
    if iteration == args.steps:
        break
    x, y = batch()
    loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    wandb.log({"loss": loss.item()}, commit=False)
    wandb.log({"kind": "train", "histogram": wandb.Histogram([1.0, 2.0])})
wandb.config.update({"finished": True})
wandb.finish()
