"""A training whose peak is in the optimizer's step."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024))
optimizer = torch.optim.AdamW(model.parameters(), fused=True)

for _ in range(3):
    batch = torch.randn(32, 1024)
    (model(batch) - batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
