"""A small Unet that learns to take noise away."""

import torch
from torch import nn
from torch.nn import functional

CHANNELS = 32


class Stage(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1)

    def forward(self, x):
        return functional.silu(self.second(functional.silu(self.first(x))))


class Unet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.ModuleList([Stage(3, CHANNELS), Stage(CHANNELS, CHANNELS)])
        self.middle = Stage(CHANNELS, CHANNELS)
        self.up = nn.ModuleList([Stage(2 * CHANNELS, CHANNELS), Stage(2 * CHANNELS, CHANNELS)])
        self.last = nn.Conv2d(CHANNELS, 3, 1)

    def forward(self, x):
        skips = []
        for stage in self.down:
            x = stage(x)
            skips.append(x)
            x = functional.avg_pool2d(x, 2)
        x = self.middle(x)
        for stage in self.up:
            x = functional.interpolate(x, scale_factor=2)
            x = stage(torch.cat([x, skips.pop()], dim=1))
        return self.last(x)


model = Unet().to("cuda")
optimizer = torch.optim.AdamW(model.parameters())
# the loop
for _ in range(4):
    x = torch.randn(16, 3, 64, 64, device="cuda")
    noise = torch.randn_like(x)
    loss = functional.mse_loss(model(x + noise), noise)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
