"""Small models whose compiled trace is held against their eager one, by module and line.

Run as a program it prints the shares as JSON: `python compiled_models.py MODEL WAY`.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from pytracer import trace

WAYS: dict[str, dict[str, Any]] = {
    "inductor": {},
    "dynamic": {"dynamic": True},
    "aot_eager": {"backend": "aot_eager"},
}


class Attention(nn.Module):
    """Without a fused kernel: its scores are a large activation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Any) -> Any:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, 4, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, 2)
        )
        scores = (q @ k.transpose(-1, -2)).softmax(-1)
        y = scores @ v
        y = y.transpose(1, 2).reshape(batch, length, width)
        return self.out(y)


class Block(nn.Module):
    """A layer of a transformer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention, self.norm = Attention(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Any) -> Any:
        x = x + self.attention(x)
        return x + self.mlp(self.norm(x))


class Gpt(nn.Module):
    """Token embeddings, two layers and a loss; with a graph break after the first layer if asked."""

    def __init__(self, breaks: bool = False) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(300, 64), nn.Linear(64, 300, bias=False)
        self.layers, self.breaks = nn.ModuleList(Block(64) for _ in range(2)), breaks

    def forward(self, tokens: Any) -> Any:
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x)
            if self.breaks:
                torch._dynamo.graph_break()
        logits = self.head(x)
        return functional.cross_entropy(logits.view(-1, 300), tokens.reshape(-1))


class Mlp(nn.Module):
    """Two hidden layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(64, 256), nn.Linear(256, 256), nn.Linear(256, 10)

    def forward(self, x: Any) -> Any:
        x = self.a(x).relu()
        x = torch.tanh(self.b(x)) * x
        return self.c(x).square().mean()


class Convolutions(nn.Module):
    """Convolutions and batch norms."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.norm, self.head = nn.BatchNorm2d(16), nn.Linear(16, 10)

    def forward(self, x: Any) -> Any:
        x = self.first(x).relu()
        y = self.second(x)
        y = self.norm(y).relu()
        return self.head((x + y).mean((2, 3))).square().mean()


class Lora(nn.Module):
    """A frozen layer and its adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(64, 64).requires_grad_(False)
        self.down, self.up = nn.Linear(64, 4, bias=False), nn.Linear(4, 64, bias=False)

    def forward(self, x: Any) -> Any:
        return self.base(x) + self.up(self.down(x)) * 2


class Adapted(nn.Module):
    """A stack of frozen layers with adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Lora() for _ in range(3))

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = functional.gelu(layer(x))
        return x.square().mean()


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any]]] = {
    "gpt": (Gpt, lambda size: torch.randint(0, 300, (size, 64))),
    "breaks": (lambda: Gpt(breaks=True), lambda size: torch.randint(0, 300, (size, 64))),
    "mlp": (Mlp, lambda size: torch.randn(64 * size, 64)),
    "convolutions": (Convolutions, lambda size: torch.randn(2 * size, 3, 16, 16)),
    "lora": (Adapted, lambda size: torch.randn(64 * size, 64)),
}


def traced(model_name: str, compiled: Callable[[nn.Module], Any], **options: Any) -> Any:
    """The trace of two steps, after two others of different batches."""
    torch.manual_seed(0)
    make, batch = MODELS[model_name]
    model = make()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer, run = torch.optim.AdamW(trained), compiled(model)

    def step(size: int) -> None:
        run(batch(size)).backward()
        optimizer.step()
        optimizer.zero_grad()

    step(6)
    step(4)
    with trace(model, optimizer, table=False, **{"stacks": True, **options}) as recorded:
        step(4)
        step(4)
    return recorded


_MADE = ("activations", "temporaries", "functional")


def shares(compiled: Any, eager: Any) -> dict[str, float]:
    """Of the bytes that a model made and that are alive at the compiled peak, the shares named.

    "same" are those of a module and a line that made blocks in the eager program, too.
    """
    table = eager.allocations()
    each = zip(
        *(table[f"forward_{key}"].astype(object).fillna(table[key]) for key in ("module", "line")),
        strict=True,
    )
    known = set(each)
    at = compiled.by(["category", "module", "line"], at="peak").reset_index()
    at = at[at["category"].isin(_MADE)]
    named = at[at["module"].notna() & at["line"].notna()]
    same = [pair in known for pair in zip(named["module"], named["line"], strict=True)]
    total = at["bytes"].sum()
    return {
        "lines": float(at[at["line"].notna()]["bytes"].sum() / total),
        "named": float(named["bytes"].sum() / total),
        "same": float(named[same]["bytes"].sum() / total),
    }


if __name__ == "__main__":
    name, way = sys.argv[1:]
    plain = traced(name, lambda model: model)
    found = traced(name, lambda model: torch.compile(model, **WAYS[way]))
    sys.stdout.write(json.dumps(shares(found, plain)) + "\n")
