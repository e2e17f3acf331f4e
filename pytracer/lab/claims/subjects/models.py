"""Small models with random weights, for claims that do not need the documents' own models."""

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


def feed_forward(width: int, depth: int, *, normalised: bool = False) -> nn.Sequential:
    """Linear layers with ReLU between them. `normalised` adds batch normalisation."""
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width)]
        layers += [nn.BatchNorm1d(width)] if normalised else []
        layers += [nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 1))


class Block(nn.Module):
    """Attention and a feed-forward network as in BERT. `checkpointed` checkpoints both."""

    def __init__(self, width: int, heads: int) -> None:
        """The feed-forward network is four times as wide, as usual."""
        super().__init__()
        self.heads, self.checkpointed = heads, False
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def attend(self, x: Tensor) -> Tensor:
        """Attention that writes its scores out, as libraries did then."""
        parts = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = parts.unbind(0)
        scores = query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5
        attended = functional.dropout(scores.softmax(-1), 0.1, self.training) @ value
        joined: Tensor = attended.transpose(1, 2).flatten(2)
        return joined

    def forward(self, x: Tensor) -> Tensor:
        """Batch x length x width, in and out."""
        x = self.norm1(x + self.out(self._maybe(self.attend, x)))
        result: Tensor = self.norm2(x + self.down(self._maybe(functional.gelu, self.up(x))))
        return result

    def _maybe(self, function: object, x: Tensor) -> Tensor:
        assert callable(function)
        if self.checkpointed:
            kept: Tensor = checkpoint(function, x, use_reentrant=False)
            return kept
        result: Tensor = function(x)
        return result


class Encoder(nn.Module):
    """A classifier: tokens in, two classes out."""

    def __init__(self, vocabulary: int, width: int, layers: int, length: int) -> None:
        """Heads are 64 wide; a narrower model has one head."""
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, max(1, width // 64)) for _ in range(layers))
        self.head = nn.Linear(width, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        """The classes of each sequence."""
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        classes: Tensor = self.head(x[:, 0])
        return classes


class UNet(nn.Module):
    """A U-Net of three resolutions, with its skip connections."""

    def __init__(self, channels: int) -> None:
        """Channels double with each resolution."""
        super().__init__()

        def double(before: int, after: int) -> nn.Sequential:
            layers: list[nn.Module] = []
            for size in (before, after):
                layers += [nn.Conv2d(size, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
            return nn.Sequential(*layers)

        c = channels
        self.down1, self.down2, self.bottom = double(3, c), double(c, 2 * c), double(2 * c, 4 * c)
        self.up2, self.up1 = double(6 * c, 2 * c), double(3 * c, c)
        self.head = nn.Conv2d(c, 1, 1)

    def forward(self, image: Tensor) -> Tensor:
        """A map as large as the image."""
        first = self.down1(image)
        second = self.down2(functional.max_pool2d(first, 2))
        x = self.bottom(functional.max_pool2d(second, 2))
        x = self.up2(torch.cat([functional.interpolate(x, scale_factor=2), second], 1))
        x = self.up1(torch.cat([functional.interpolate(x, scale_factor=2), first], 1))
        result: Tensor = self.head(x)
        return result


class Mixture(nn.Module):
    """Experts of which each token uses one. With one expert it is a dense network."""

    def __init__(self, width: int, experts: int) -> None:
        """Each expert is as large as the dense network."""
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(experts)
        )
        self.load: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        """Tokens x width."""
        chance, chosen = self.router(x).softmax(-1).max(-1)
        places = [(chosen == number).nonzero().squeeze(1) for number in range(len(self.experts))]
        self.load = [len(place) for place in places]
        done = [expert(x[place]) for expert, place in zip(self.experts, places, strict=True)]
        back = torch.empty_like(chosen)
        back[torch.cat(places)] = torch.arange(len(chosen), device=x.device)
        result: Tensor = torch.cat(done)[back] * chance.unsqueeze(1)
        return result


class Decoder(nn.Module):
    """Generates with a cache of keys and values, as transformers' `generate` does."""

    def __init__(self, vocabulary: int, width: int, layers: int) -> None:
        """Heads are 32 wide."""
        super().__init__()
        self.heads = width // 32
        self.tokens, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(layers))
        self.out = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(
        self, tokens: Tensor, cache: list[tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """The logits of the next token, and the cache with this token."""
        x, longer = self.tokens(tokens), []
        for number, (qkv, out) in enumerate(zip(self.qkv, self.out, strict=True)):
            parts = qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
            query, key, value = parts.unbind(0)
            if cache:
                key = torch.cat([cache[number][0], key], 2)
                value = torch.cat([cache[number][1], value], 2)
            # These are copies. A view would keep the queries alive too.
            longer.append((key.contiguous(), value.contiguous()))
            attended = functional.scaled_dot_product_attention(query, *longer[-1])
            x = x + out(attended.transpose(1, 2).flatten(2))
        return self.head(x[:, -1]), longer
