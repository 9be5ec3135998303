"""Two models that are trained together; the generator's first trained pass comes after the first step."""

import torch
from torch import nn


class Generator(nn.Sequential):
    """Noise [rows, 16] to features [rows, 32]."""


class Discriminator(nn.Sequential):
    """Features [rows, 32] to a score [rows, 1]."""


torch.manual_seed(0)
generator = Generator(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 32))
discriminator = Discriminator(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16), nn.Linear(16, 1))
for_generator = torch.optim.Adam(generator.parameters())
for_discriminator = torch.optim.Adam(discriminator.parameters())
for _ in range(4):
    with torch.no_grad():
        fake = generator(torch.randn(8, 16))
    for_discriminator.zero_grad()
    (discriminator(fake).mean() - discriminator(torch.randn(8, 32)).mean()).backward()
    for_discriminator.step()
    for_generator.zero_grad()
    (-discriminator(generator(torch.randn(8, 16))).mean()).backward()
    for_generator.step()
