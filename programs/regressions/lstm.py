"""Words in order, with a state from batch to batch."""

import torch
from torch import nn
from torch.nn import functional

LAYERS = 2


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(2000, 256)
        self.cells = nn.LSTM(256, 256, LAYERS, batch_first=True)
        self.next = nn.Linear(256, 2000)

    def forward(self, ids, state):
        found, state = self.cells(self.words(ids), state)
        return self.next(found), state


model = Words().to("cuda")
optimizer = torch.optim.Adam(model.parameters())
# the loop
state = tuple(torch.zeros(LAYERS, 32, 256, device="cuda") for _ in range(2))
for _ in range(4):
    ids = torch.randint(2000, (32, 65), device="cuda")
    optimizer.zero_grad(set_to_none=True)
    state = tuple(each.detach() for each in state)
    given, state = model(ids[:, :-1], state)
    loss = functional.cross_entropy(given.flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    optimizer.step()
