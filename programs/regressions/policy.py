"""A policy and a value that learn from episodes."""

import torch
from torch import nn

STEPS = 16


def advance(states, moves):
    return states * 0.9 + moves


policy = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64)).to("cuda")
value = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 1)).to("cuda")
parameters = [*policy.parameters(), *value.parameters()]
optimizer = torch.optim.Adam(parameters)
losses = []
# the loop
for _ in range(4):
    states, every, values = torch.zeros(1024, 64, device="cuda"), [], []
    with torch.no_grad():
        for _ in range(STEPS):
            values.append(value(states))
            states = advance(states, policy(states))
            every.append(states)
    seen = torch.cat(every)
    loss = (value(seen) - torch.cat(values)).square().mean() - policy(seen).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
