"""The architectures people train, in plain torch with random weights, as small or as large as asked.

A builder takes a size ("tiny" for tests on the CPU, "real" for a GPU) and returns a `Recipe`: the
model, how to make a batch for it, and its loss.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it

Cache: TypeAlias = "list[tuple[Tensor, Tensor]] | None"


@dataclass(frozen=True)
class Batch:
    """What a training step is given."""

    inputs: tuple[Tensor, ...]
    target: Tensor

    def tensors(self) -> tuple[Tensor, ...]:
        return (*self.inputs, self.target)


@dataclass(frozen=True)
class Recipe:
    """A model and what belongs to it."""

    model: nn.Module
    batch: Callable[[str], Batch]  # on a device
    loss: Callable[[Any, Tensor], Tensor]
    layers: Callable[[nn.Module], list[nn.Module]]  # what people checkpoint
    facts: dict[str, int] = field(default_factory=dict)


MODELS: dict[str, Callable[[str], Recipe]] = {}


def architecture(build: Callable[[str], Recipe]) -> Callable[[str], Recipe]:
    MODELS[build.__name__] = build
    return build


def words(rows: int, length: int, vocabulary: int, device: str) -> Tensor:
    return torch.randint(vocabulary, (rows, length), device=device)


def each_word(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


# -------------------------------------------------------------------------- perceptron


@architecture
def mlp(size: str) -> Recipe:
    width, rows, depth = {"tiny": (64, 16, 2), "real": (4096, 4096, 8)}[size]
    layers = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(depth)]
    model = nn.Sequential(*layers, nn.Linear(width, 10))

    def batch(device: str) -> Batch:
        x = torch.randn(rows, width, device=device)
        return Batch((x,), torch.randint(10, (rows,), device=device))

    return Recipe(model, batch, F.cross_entropy, lambda m: list(m.children())[:depth])


# -------------------------------------------------------------------------- images


class Bottleneck(nn.Module):
    """ResNet's: down, 3x3, up, beside a shortcut."""

    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inside, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, 4 * width, 1, bias=False),
            nn.BatchNorm2d(4 * width),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inside != 4 * width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inside, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)
            )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x), inplace=True)


@architecture
def resnet(size: str) -> Recipe:
    """ResNet-50, 25.6 M parameters; small: two blocks."""
    width, depths, rows, side, classes = {
        "tiny": (4, (1, 1), 2, 32, 10),
        "real": (64, (3, 4, 6, 3), 64, 224, 1000),
    }[size]
    stem = nn.Sequential(
        nn.Conv2d(3, width, 7, 2, 3, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
    )
    blocks, inside = [], width
    for stage, depth in enumerate(depths):
        for number in range(depth):
            stride = 2 if stage and number == 0 else 1
            blocks.append(Bottleneck(inside, width * 2**stage, stride))
            inside = 4 * width * 2**stage
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, classes))
    model = nn.Sequential(stem, *blocks, head)

    def batch(device: str) -> Batch:
        x = torch.randn(rows, 3, side, side, device=device)
        return Batch((x,), torch.randint(classes, (rows,), device=device))

    return Recipe(model, batch, F.cross_entropy, lambda m: list(m.children())[1:-1])


class UNet(nn.Module):
    """Down and up again; each level's output is kept for the way back."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(depth)]
        self.down = nn.ModuleList(
            self._level(a, b) for a, b in zip([3, *widths[:-1]], widths, strict=True)
        )
        self.up = nn.ModuleList(
            nn.ConvTranspose2d(b, a, 2, 2)
            for a, b in zip(widths[-2::-1], widths[:0:-1], strict=True)
        )
        self.merge = nn.ModuleList(self._level(2 * a, a) for a in widths[-2::-1])
        self.out = nn.Conv2d(width, 3, 1)

    @staticmethod
    def _level(inside: int, outside: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(inside, outside, 3, 1, 1),
            nn.GroupNorm(2, outside),
            nn.SiLU(),
            nn.Conv2d(outside, outside, 3, 1, 1),
            nn.SiLU(),
        )

    def forward(self, x: Tensor) -> Tensor:
        kept: list[Tensor] = []
        for level in self.down:
            x = level(F.max_pool2d(x, 2) if kept else x)
            kept.append(x)
        kept.pop()
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat([up(x), kept.pop()], dim=1))
        y: Tensor = self.out(x)
        return y


@architecture
def unet(size: str) -> Recipe:
    width, depth, rows, side = {"tiny": (4, 3, 2, 16), "real": (64, 4, 8, 128)}[size]

    def batch(device: str) -> Batch:
        x = torch.randn(rows, 3, side, side, device=device)
        return Batch((x,), torch.randn(rows, 3, side, side, device=device))

    return Recipe(UNet(width, depth), batch, F.mse_loss, lambda m: list(m.down))  # type: ignore[arg-type]


# -------------------------------------------------------------------------- recurrent


class Lstm(nn.Module):
    def __init__(self, vocabulary: int, width: int, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        y: Tensor = self.head(self.lstm(self.tokens(ids))[0])
        return y


@architecture
def lstm(size: str) -> Recipe:
    vocabulary, width, layers, rows, length = {
        "tiny": (50, 16, 2, 4, 12),
        "real": (10_000, 1024, 2, 64, 128),
    }[size]

    def batch(device: str) -> Batch:
        ids = words(rows, length, vocabulary, device)
        return Batch((ids,), words(rows, length, vocabulary, device))

    return Recipe(Lstm(vocabulary, width, layers), batch, each_word, lambda m: [])


# -------------------------------------------------------------------------- transformers


@dataclass(frozen=True)
class Shape:
    """What tells one transformer from another."""

    vocabulary: int = 128
    width: int = 32
    layers: int = 2
    heads: int = 4
    kv_heads: int = 4
    inner: int = 64
    context: int = 64
    causal: bool = False
    rotary: bool = False
    gated: bool = False  # and RMS norms without biases, as Llama has them
    tied: bool = False
    experts: int = 0
    chosen: int = 2  # experts per token


class RmsNorm(nn.Module):
    """In steps, as most Llama implementations write it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)
        return self.weight * y.to(x.dtype)


def turned(x: Tensor, first: int) -> Tensor:
    """Rotary positions."""
    half = x.shape[-1] // 2
    frequency = 10_000 ** -(torch.arange(half, device=x.device) / half)
    angle = torch.arange(first, first + x.shape[2], device=x.device)[:, None] * frequency
    a, b = x[..., :half], x[..., half:]
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Attention(nn.Module):
    def __init__(self, shape: Shape, *, causal: bool | None = None) -> None:
        super().__init__()
        self.shape = shape
        self.causal = shape.causal if causal is None else causal
        side, bias = shape.width // shape.heads, not shape.gated
        self.query = nn.Linear(shape.width, shape.width, bias=bias)
        self.key = nn.Linear(shape.width, shape.kv_heads * side, bias=bias)
        self.value = nn.Linear(shape.width, shape.kv_heads * side, bias=bias)
        self.out = nn.Linear(shape.width, shape.width, bias=bias)

    def forward(
        self,
        x: Tensor,
        other: Tensor | None = None,
        past: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        source = x if other is None else other
        query = self._heads(self.query(x), self.shape.heads)
        key = self._heads(self.key(source), self.shape.kv_heads)
        value = self._heads(self.value(source), self.shape.kv_heads)
        first = past[0].shape[2] if past is not None else 0
        if self.shape.rotary:
            query, key = turned(query, first), turned(key, first)
        if past is not None:
            key, value = torch.cat([past[0], key], 2), torch.cat([past[1], value], 2)
        now = (key, value)
        repeat = self.shape.heads // self.shape.kv_heads
        if repeat > 1:
            key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
        causal = self.causal and past is None and other is None
        y = F.scaled_dot_product_attention(query, key, value, is_causal=causal)
        return self.out(y.transpose(1, 2).flatten(2)), now

    @staticmethod
    def _heads(x: Tensor, heads: int) -> Tensor:
        return x.unflatten(2, (heads, -1)).transpose(1, 2)


class FeedForward(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        bias = not shape.gated
        self.gate = nn.Linear(shape.width, shape.inner, bias=False) if shape.gated else None
        self.up = nn.Linear(shape.width, shape.inner, bias=bias)
        self.down = nn.Linear(shape.inner, shape.width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.up(x)) if self.gate is None else F.silu(self.gate(x)) * self.up(x)
        y: Tensor = self.down(h)
        return y


class Experts(nn.Module):
    """A router sends each token to the best few of many feed-forward layers."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.chosen = shape.chosen
        self.router = nn.Linear(shape.width, shape.experts, bias=False)
        self.experts = nn.ModuleList(FeedForward(shape) for _ in range(shape.experts))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        share, which = self.router(tokens).softmax(-1).topk(self.chosen, dim=-1)
        y = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            rows, place = torch.where(which == number)
            out = expert(tokens[rows]) * share[rows, place, None]
            y = y.index_add(0, rows, out.to(y.dtype))
        return y.view_as(x)


class Layer(nn.Module):
    def __init__(self, shape: Shape, *, crosses: bool = False) -> None:
        super().__init__()
        norm = RmsNorm if shape.gated else nn.LayerNorm
        self.norm_1, self.attention = norm(shape.width), Attention(shape)
        self.norm_2 = norm(shape.width)
        self.mlp = Experts(shape) if shape.experts else FeedForward(shape)
        self.norm_3 = norm(shape.width) if crosses else None
        self.cross = Attention(shape, causal=False) if crosses else None

    def forward(
        self, x: Tensor, other: Tensor | None = None, past: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        y, now = self.attention(self.norm_1(x), past=past)
        x = x + y
        if self.cross is not None and self.norm_3 is not None:
            x = x + self.cross(self.norm_3(x), other)[0]
        return x + self.mlp(self.norm_2(x)), now


class Transformer(nn.Module):
    """Encoder or decoder; with past_key_values it also returns what the next call needs."""

    def __init__(self, shape: Shape, *, crosses: bool = False) -> None:
        super().__init__()
        self.shape = shape
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = None if shape.rotary else nn.Embedding(shape.context, shape.width)
        self.layers = nn.ModuleList(Layer(shape, crosses=crosses) for _ in range(shape.layers))
        self.norm = (RmsNorm if shape.gated else nn.LayerNorm)(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        if shape.tied:
            self.head.weight = self.tokens.weight

    def forward(
        self,
        ids: Tensor,
        other: Tensor | None = None,
        past_key_values: Cache = None,
        use_cache: bool = False,
    ) -> Any:
        x, caches = self.features(ids, other, past_key_values)
        logits = self.head(x)
        return (logits, caches) if use_cache else logits

    def features(
        self, ids: Tensor, other: Tensor | None = None, past_key_values: Cache = None
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        x = self.tokens(ids)
        if self.positions is not None:
            first = past_key_values[0][0].shape[2] if past_key_values else 0
            x = x + self.positions(torch.arange(first, first + ids.shape[1], device=ids.device))
        caches = []
        for number, layer in enumerate(self.layers):
            past = past_key_values[number] if past_key_values else None
            x, now = layer(x, other, past)
            caches.append(now)
        return self.norm(x), caches


def language_model(shape: Shape, rows: int, length: int) -> Recipe:
    def batch(device: str) -> Batch:
        ids = words(rows, length, shape.vocabulary, device)
        return Batch((ids,), words(rows, length, shape.vocabulary, device))

    return Recipe(Transformer(shape), batch, each_word, lambda m: list(m.layers))  # type: ignore[arg-type]


@architecture
def bert(size: str) -> Recipe:
    """BERT-large: 24 layers of width 1024."""
    if size == "tiny":
        return language_model(Shape(), 4, 16)
    large = Shape(30522, 1024, 24, 16, 16, 4096, 512)
    return language_model(large, 16, 512)


@architecture
def gpt2(size: str) -> Recipe:
    """GPT-2, 124 M parameters: causal, head tied to the embedding."""
    if size == "tiny":
        return language_model(Shape(causal=True, tied=True), 4, 16)
    small = Shape(50257, 768, 12, 12, 12, 3072, 1024, causal=True, tied=True)
    return language_model(small, 8, 1024)


def llama_shape(size: str, *, tied: bool) -> Shape:
    """Grouped attention, rotary positions, gated feed-forward; large: 1.1 B parameters."""
    more = {"causal": True, "rotary": True, "gated": True, "tied": tied}
    if size == "tiny":
        return Shape(kv_heads=2, **more)  # type: ignore[arg-type]
    return Shape(32000, 2048, 22, 32, 4, 5632, 2048, **more)  # type: ignore[arg-type]


@architecture
def llama(size: str) -> Recipe:
    return language_model(llama_shape(size, tied=False), 4, {"tiny": 16, "real": 1024}[size])


@architecture
def llama_tied(size: str) -> Recipe:
    return language_model(llama_shape(size, tied=True), 4, {"tiny": 16, "real": 1024}[size])


@architecture
def experts(size: str) -> Recipe:
    """A mixture of experts, two of which see each token."""
    if size == "tiny":
        return language_model(Shape(causal=True, experts=4), 4, 16)
    large = Shape(32000, 1024, 8, 16, 16, 2048, 1024, causal=True, experts=8)
    return language_model(large, 8, 1024)


class EncoderDecoder(nn.Module):
    """T5's shape: one embedding for both sides and the head."""

    def __init__(self, shape: Shape, decoder: Shape) -> None:
        super().__init__()
        self.encoder = Transformer(shape)
        self.decoder = Transformer(decoder, crosses=True)
        self.decoder.tokens.weight = self.encoder.tokens.weight
        self.decoder.head.weight = self.encoder.tokens.weight
        del self.encoder.head

    def forward(self, ids: Tensor, wanted: Tensor) -> Tensor:
        encoded, _ = self.encoder.features(ids)
        y: Tensor = self.decoder(wanted, encoded)
        return y


@architecture
def t5(size: str) -> Recipe:
    small = Shape(gated=False)
    large = Shape(32128, 768, 12, 12, 12, 3072, 512)
    shape, rows, length = {"tiny": (small, 4, 12), "real": (large, 8, 512)}[size]
    decoder = Shape(**{**vars(shape), "causal": True})

    def batch(device: str) -> Batch:
        given = words(rows, length, shape.vocabulary, device)
        wanted = words(rows, length, shape.vocabulary, device)
        return Batch((given, wanted), words(rows, length, shape.vocabulary, device))

    model = EncoderDecoder(shape, decoder)
    return Recipe(
        model,
        batch,
        each_word,
        lambda m: [*m.encoder.layers, *m.decoder.layers],  # type: ignore
    )


class Vit(nn.Module):
    def __init__(self, shape: Shape, side: int, patch: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, shape.width, patch, patch)
        self.first = nn.Parameter(torch.zeros(1, 1, shape.width))
        self.positions = nn.Parameter(torch.randn(1, (side // patch) ** 2 + 1, shape.width))
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patches(image).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(x), -1, -1).to(x.dtype), x], 1) + self.positions
        for layer in self.layers:
            x, _ = layer(x)
        y: Tensor = self.head(self.norm(x[:, 0]))
        return y


@architecture
def vit(size: str) -> Recipe:
    """ViT-B/16."""
    small, large = Shape(vocabulary=10), Shape(1000, 768, 12, 12, 12, 3072)
    shape, side, patch, rows = {"tiny": (small, 16, 4, 4), "real": (large, 224, 16, 32)}[size]

    def batch(device: str) -> Batch:
        x = torch.randn(rows, 3, side, side, device=device)
        return Batch((x,), torch.randint(shape.vocabulary, (rows,), device=device))

    return Recipe(Vit(shape, side, patch), batch, F.cross_entropy, lambda m: list(m.layers))  # type: ignore[arg-type]


# -------------------------------------------------------------------------- recommender


class Recommender(nn.Module):
    """DLRM's shape: bags of ids and dense features, and their products."""

    def __init__(self, tables: int, entries: int, width: int) -> None:
        super().__init__()
        self.bags = nn.ModuleList(
            nn.EmbeddingBag(entries, width, mode="sum") for _ in range(tables)
        )
        self.dense = nn.Sequential(nn.Linear(13, width), nn.ReLU())
        self.top = nn.Sequential(
            nn.Linear((tables + 1) ** 2 + width, width), nn.ReLU(), nn.Linear(width, 1)
        )

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        x = self.dense(dense)
        rows = torch.stack([x, *(bag(ids[i]) for i, bag in enumerate(self.bags))], 1)
        products = (rows @ rows.transpose(1, 2)).flatten(1)
        y: Tensor = self.top(torch.cat([x, products], 1))
        return y.squeeze(1)


@architecture
def recommender(size: str) -> Recipe:
    tables, entries, width, rows, bag = {
        "tiny": (3, 40, 8, 16, 3),
        "real": (16, 200_000, 64, 8192, 8),
    }[size]

    def batch(device: str) -> Batch:
        dense = torch.randn(rows, 13, device=device)
        ids = torch.randint(entries, (tables, rows, bag), device=device)
        return Batch((dense, ids), torch.rand(rows, device=device))

    model = Recommender(tables, entries, width)
    return Recipe(model, batch, F.binary_cross_entropy_with_logits, lambda m: [m.top])  # type: ignore[list-item]
