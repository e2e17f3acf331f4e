"""A small language model with many words, on a machine that is too small for its logits."""

import resource

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

WORDS, WIDTH, LENGTH = 16384, 64, 2048
MIB = 2**20


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(WORDS, WIDTH)
        self.hidden = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.hidden(self.tokens(tokens))
        pieces = zip(hidden.split(512), tokens.split(512), strict=True)
        losses = [checkpoint(self.loss, *piece, use_reentrant=False) for piece in pieces]
        return torch.stack(losses).sum() / len(tokens)

    def loss(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(hidden), tokens, reduction="sum")


def machine_with(more: int) -> None:
    """Allows this process no more memory of its own than it has and that many bytes."""
    with open("/proc/self/statm") as statm:
        has = int(statm.read().split()[5]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, (has + more, resource.RLIM_INFINITY))


torch.manual_seed(0)
torch.set_num_threads(1)
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
machine_with(340 * MIB)
for _ in range(3):
    model(torch.randint(WORDS, (LENGTH,))).backward()
    optimizer.step()
    optimizer.zero_grad()
