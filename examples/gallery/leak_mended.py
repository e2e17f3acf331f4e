"""A training whose log keeps a tensor of every step."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
means = []

for _ in range(20):
    batch = torch.randn(256, 256)
    output = model(batch)
    nn.functional.mse_loss(output, batch).backward()
    optimizer.step()
    optimizer.zero_grad()
    means.append(output.mean().item())

print(f"mean output {sum(means) / len(means):.4f}")
