"""The program of `pytracer demo`: trains a small transformer for a few steps under a trace."""

import torch
from torch import nn

from pytracer.recording.api import trace

VOCABULARY, WIDTH, HEADS, LAYERS, LENGTH, BATCH = 1000, 256, 4, 4, 128, 16


class Block(nn.Module):
    """Attention and a feed-forward network, each around a residual."""

    def __init__(self) -> None:
        """The usual widths."""
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Batch x length x width, in and out."""
        parts = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = parts.unbind(0)
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        mixed: torch.Tensor = self.mlp(self.norm2(x))
        return x + mixed


class Transformer(nn.Module):
    """Predicts the next token."""

    def __init__(self) -> None:
        """A few million parameters."""
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits for every position."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(places)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(x)
        return logits


def run(steps: int, device: str | None = None) -> trace:
    """Trains a few steps, traced with lines, and returns the trace."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    model = Transformer().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    with trace(model, optimizer, stacks=True, table=False) as traced:
        for _ in range(steps):
            tokens = torch.randint(VOCABULARY, (BATCH, LENGTH), device=device)
            logits = model(tokens)
            loss = nn.functional.cross_entropy(
                logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
            )
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return traced
