"""A perceptron on random rows."""

import torch
from torch import nn

WIDTH = 512
ROWS = 4096


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(256, WIDTH)
        self.down = nn.Linear(WIDTH, 256)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


model = nn.Sequential(Block(), Block(), nn.Linear(256, 1)).to("cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
# the loop
for _ in range(4):
    x = torch.randn(ROWS, 256, device="cuda")
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
