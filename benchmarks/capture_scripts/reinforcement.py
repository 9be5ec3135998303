"""REINFORCE in the style of cleanrl: episodes end between updates, logged by the environment's steps."""

import random

import torch
from torch import nn
from torch.utils.tensorboard import SummaryWriter

random.seed(9)
torch.manual_seed(9)
writer = SummaryWriter("runs/walk")
writer.add_text("hyperparameters", "|param|value|\n|-|-|\n|lr|0.01|")
policy = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 2))
optimizer = torch.optim.Adam(policy.parameters(), lr=0.01)
global_step = 0


def episode(warm: bool) -> tuple[list[torch.Tensor], float]:
    """A walk on a line from 0, which ends at +5, at -5 or after 30 moves."""
    global global_step
    place, moves = 0, []
    for _ in range(30):
        global_step += 1
        if warm:
            place += random.choice((-1, 1))
        else:
            chances = torch.distributions.Categorical(logits=policy(torch.tensor([place / 5.0])))
            action = chances.sample()
            moves.append(chances.log_prob(action))
            place += 1 if action else -1
        if abs(place) == 5:
            break
    reward = 1.0 if place == 5 else -1.0
    writer.add_scalar("charts/episodic_return", reward, global_step)
    return moves, reward


for _ in range(10):
    episode(warm=True)
for _ in range(20):
    losses = []
    for _ in range(4):
        moves, reward = episode(warm=False)
        losses.append(-torch.stack(moves).sum() * reward)
    loss = torch.stack(losses).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    writer.add_scalar("losses/policy_loss", loss.item(), global_step)
    writer.add_scalar("charts/learning_rate", optimizer.param_groups[0]["lr"], global_step)
writer.close()
