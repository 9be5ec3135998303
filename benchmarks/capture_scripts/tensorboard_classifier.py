"""A classifier in the style of pytorch/examples: losses by iteration, accuracies by epoch, in TensorBoard."""

import torch
from torch import nn
from torch.utils.tensorboard import SummaryWriter

torch.manual_seed(2)
writer = SummaryWriter("runs/classifier")
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
iteration = 0
for epoch in range(4):
    correct = 0
    for _ in range(10):
        x = torch.randn(16, 8)
        y = x[:, :4].argmax(1)
        logits = model(x)
        loss = nn.functional.cross_entropy(logits, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        correct += int((logits.argmax(1) == y).sum())
        writer.add_scalar("Loss/train", loss, iteration)
        writer.add_scalar("loss", loss.item(), iteration)
        iteration += 1
    with torch.no_grad():
        x = torch.randn(64, 8)
        accuracy = (model(x).argmax(1) == x[:, :4].argmax(1)).float().mean()
    writer.add_scalars("accuracy", {"train": correct / 160, "test": accuracy}, epoch)
    writer.add_scalar("Accuracy/test", accuracy, epoch)
    writer.add_histogram("first/weight", model[0].weight, epoch)
writer.add_hparams({"lr": 0.1, "width": 16}, {"hparam/accuracy": float(accuracy)})
writer.close()
