"""A residual network on random images."""

import torch
from torch import nn

SIZE = 64


class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels)
        self.activate = nn.ReLU(inplace=True)

    def forward(self, x):
        return self.activate(self.norm(self.first(x))) + x


model = nn.Sequential(
    nn.Conv2d(3, 32, 3, padding=1),
    Block(32),
    Block(32),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(32, 10),
).to("cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
count = nn.CrossEntropyLoss()
losses = []
# the loop
for _ in range(4):
    images = torch.randn(16, 3, SIZE, SIZE, device="cuda")
    labels = torch.randint(10, (16,), device="cuda")
    loss = count(model(images), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
