"""The models that papers measure, in plain torch with random weights: BERT, ResNet-50, Llama.

GPT-2 is in `models.py`. Each model takes ids or images and targets, and returns the loss.
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional


@dataclass(frozen=True)
class Sizes:
    """The shape of a transformer."""

    vocabulary: int
    width: int
    inner: int
    layers: int
    heads: int
    length: int
    key_heads: int = 0  # 0: as many as heads


BERT_LARGE = Sizes(30522, 1024, 4096, 24, 16, 512)
LLAMA = Sizes(32000, 2048, 5632, 16, 32, 2048, 8)  # about 0.8 billion parameters


class Bert(nn.Module):
    """An encoder with dropout and the norm after each half, and a language head over all tokens."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.width)
        self.positions = nn.Embedding(sizes.length, sizes.width)
        self.norm = nn.LayerNorm(sizes.width)
        self.dropout = nn.Dropout(0.1)
        self.layers = nn.ModuleList(BertLayer(sizes) for _ in range(sizes.layers))
        self.transform = nn.Linear(sizes.width, sizes.width)
        self.transform_norm = nn.LayerNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocabulary)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        where = torch.arange(ids.shape[1], device=ids.device)
        x = self.dropout(self.norm(self.tokens(ids) + self.positions(where)))
        for layer in self.layers:
            x = layer(x)
        x = self.transform_norm(functional.gelu(self.transform(x)))
        return functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


class BertLayer(nn.Module):
    """Attention, then two linear layers. The softmax is written out, as the paper measured it."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.heads = sizes.heads
        self.qkv = nn.Linear(sizes.width, 3 * sizes.width)
        self.out = nn.Linear(sizes.width, sizes.width)
        self.norm_1 = nn.LayerNorm(sizes.width)
        self.up = nn.Linear(sizes.width, sizes.inner)
        self.act = nn.GELU()
        self.down = nn.Linear(sizes.inner, sizes.width)
        self.norm_2 = nn.LayerNorm(sizes.width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        query, key, value = (
            part.view(batch, length, self.heads, -1).transpose(1, 2)
            for part in self.qkv(x).split(width, dim=2)
        )
        scores = query @ key.transpose(-2, -1) * (width // self.heads) ** -0.5
        mixed = self.dropout(scores.softmax(-1)) @ value
        attended = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        x = self.norm_1(x + self.dropout(attended))
        out: torch.Tensor = self.norm_2(x + self.dropout(self.down(self.act(self.up(x)))))
        return out


class Llama(nn.Module):
    """A decoder with RMS norms, rotary positions, grouped keys and a gated inner layer."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.width)
        self.layers = nn.ModuleList(LlamaLayer(sizes) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)
        half = sizes.width // sizes.heads // 2
        angles = torch.outer(
            torch.arange(sizes.length).float(), 10000 ** (-torch.arange(half).float() / half)
        )
        self.register_buffer("cosines", angles.cos().repeat(1, 2))
        self.register_buffer("sines", angles.sin().repeat(1, 2))

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        length = ids.shape[1]
        x = self.tokens(ids)
        for layer in self.layers:
            x = layer(x, self.cosines[:length], self.sines[:length])
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class LlamaLayer(nn.Module):
    """Attention and the gated inner layer, each on the normalised residual stream."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.size = sizes.width // sizes.heads
        self.grouped = bool(sizes.key_heads)
        keys = (sizes.key_heads or sizes.heads) * self.size
        self.norm_1 = nn.RMSNorm(sizes.width)
        self.query = nn.Linear(sizes.width, sizes.width, bias=False)
        self.key = nn.Linear(sizes.width, keys, bias=False)
        self.value = nn.Linear(sizes.width, keys, bias=False)
        self.out = nn.Linear(sizes.width, sizes.width, bias=False)
        self.norm_2 = nn.RMSNorm(sizes.width)
        self.gate = nn.Linear(sizes.width, sizes.inner, bias=False)
        self.up = nn.Linear(sizes.width, sizes.inner, bias=False)
        self.down = nn.Linear(sizes.inner, sizes.width, bias=False)

    def forward(self, x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        normed = self.norm_1(x)
        query, key, value = (
            made.view(batch, length, -1, self.size).transpose(1, 2)
            for made in (self.query(normed), self.key(normed), self.value(normed))
        )
        query, key = (rotated(each, cosines, sines).type_as(value) for each in (query, key))
        y = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=self.grouped
        )
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        normed = self.norm_2(x)
        out: torch.Tensor = x + self.down(functional.silu(self.gate(normed)) * self.up(normed))
        return out


def rotated(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Applies rotary positions."""
    first, second = x.chunk(2, dim=-1)
    return x * cosines + torch.cat((-second, first), dim=-1) * sines


class ResNet50(nn.Module):
    """Four stages of bottlenecks."""

    def __init__(self, classes: int = 1000, stages: tuple[int, ...] = (3, 4, 6, 3)) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        )
        blocks: list[nn.Module] = []
        inner, outer = 64, 64
        for stage, depth in enumerate(stages):
            for place in range(depth):
                stride = 2 if stage and not place else 1
                blocks.append(Bottleneck(outer, inner, stride))
                outer = 4 * inner
            inner *= 2
        self.blocks = nn.Sequential(*blocks)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(outer, classes)

    def forward(self, images: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.pool(self.blocks(self.stem(images))).flatten(1)
        return functional.cross_entropy(self.head(x), targets)


class Bottleneck(nn.Module):
    """Convolutions of 1x1, 3x3 and 1x1, and a shortcut around them."""

    def __init__(self, outer: int, inner: int, stride: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(outer, inner, 1, bias=False),
            nn.BatchNorm2d(inner),
            nn.ReLU(inplace=True),
            nn.Conv2d(inner, inner, 3, stride, 1, bias=False),
            nn.BatchNorm2d(inner),
            nn.ReLU(inplace=True),
            nn.Conv2d(inner, 4 * inner, 1, bias=False),
            nn.BatchNorm2d(4 * inner),
        )
        same = stride == 1 and outer == 4 * inner
        self.around: nn.Module = (
            nn.Identity()
            if same
            else nn.Sequential(
                nn.Conv2d(outer, 4 * inner, 1, stride, bias=False), nn.BatchNorm2d(4 * inner)
            )
        )
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.act(self.layers(x) + self.around(x))
        return out
