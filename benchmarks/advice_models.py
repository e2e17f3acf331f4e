"""Models in the shape of well-known programs, small on a CPU, for `benchmarks/advice.py`.

Each takes a batch by name, and returns what such programs return: results and the loss.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

Results = tuple[Tensor, Tensor]


class GptLayer(nn.Module):
    """A layer of minGPT: its attention is written by hand."""

    def __init__(self, width: int, heads: int, act: nn.Module) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.act, self.down = nn.Linear(width, 4 * width), act, nn.Linear(4 * width, width)

    def attended(self, x: Tensor) -> Tensor:
        """Causal self-attention."""
        rows, length, width = x.shape
        parts = self.c_attn(x).split(width, dim=2)
        q, k, v = (part.view(rows, length, self.heads, -1).transpose(1, 2) for part in parts)
        weights = (q @ k.transpose(-2, -1)) / math.sqrt(k.size(-1))
        mask = torch.ones(length, length, device=x.device).tril()
        weights = weights.masked_fill(mask == 0, float("-inf")).softmax(-1)
        y = (weights @ v).transpose(1, 2).contiguous().view(rows, length, width)
        found: Tensor = self.c_proj(y)
        return found

    def forward(self, x: Tensor) -> Tensor:
        """As wide as it came."""
        x = x + self.attended(self.ln_1(x))
        y: Tensor = x + self.down(self.act(self.up(self.ln_2(x))))
        return y


class Gpt(nn.Module):
    """minGPT: logits and loss come from one call."""

    def __init__(self, words: int, width: int, layers: int, act: type[nn.Module] | None) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(words, width), nn.Embedding(1024, width)
        acts = [act() if act is not None else nn.GELU(approximate="tanh") for _ in range(layers)]
        self.h = nn.ModuleList(GptLayer(width, 8, each) for each in acts)
        self.ln_f, self.lm_head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, idx: Tensor, targets: Tensor) -> Results:
        """Logits and loss."""
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1], device=idx.device))
        for layer in self.h:
            x = layer(x)
        logits = self.lm_head(self.ln_f(x))
        return logits, functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class WordModel(nn.Module):
    """pytorch/examples' word_language_model: an LSTM, and a log-softmax over all words."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.encoder = nn.Embedding(words, width)
        self.rnn = nn.LSTM(width, width, 2)
        self.decoder = nn.Linear(width, words)

    def forward(self, data: Tensor, targets: Tensor) -> Results:
        """Log-probabilities and loss."""
        output, _ = self.rnn(self.encoder(data))
        scores = functional.log_softmax(self.decoder(output).flatten(0, 1), dim=1)
        return scores, functional.nll_loss(scores, targets.flatten())


class Conv(nn.Sequential):
    """A convolution, a norm and an activation."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(nn.Conv2d(one, two, 3, padding=1), nn.GroupNorm(8, two), nn.SiLU())


class Unet(nn.Module):
    """The denoising network of a diffusion model, and a training step's loss."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = Conv(3, width)
        self.down = nn.ModuleList([Conv(width, 2 * width), Conv(2 * width, 4 * width)])
        self.middle = Conv(4 * width, 4 * width)
        self.up = nn.ModuleList([Conv(8 * width, 2 * width), Conv(4 * width, width)])
        self.last = nn.Conv2d(2 * width, 3, 1)

    def forward(self, images: Tensor, noise: Tensor, level: Tensor) -> Results:
        """The noise that it sees, and the loss."""
        x = images * level.sqrt() + noise * (1 - level).sqrt()
        kept = [self.first(x)]
        for down in self.down:
            kept.append(down(functional.avg_pool2d(kept[-1], 2)))
        x = self.middle(kept[-1])
        for up in self.up:
            x = up(torch.cat([x, kept.pop()], 1))
            x = functional.interpolate(x, scale_factor=2)
        seen = self.last(torch.cat([x, kept.pop()], 1))
        return seen, functional.mse_loss(seen, noise)


class Vae(nn.Module):
    """pytorch/examples' vae, with larger images."""

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.fc1, self.fc21, self.fc22 = (
            nn.Linear(size, width),
            nn.Linear(width, 64),
            nn.Linear(width, 64),
        )
        self.fc3, self.fc4 = nn.Linear(64, width), nn.Linear(width, size)

    def forward(self, x: Tensor) -> Results:
        """The image again, and the loss."""
        hidden = self.fc1(x).relu()
        mean, log_variance = self.fc21(hidden), self.fc22(hidden)
        z = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        again = self.fc4(self.fc3(z).relu()).sigmoid()
        apart = -0.5 * (1 + log_variance - mean.pow(2) - log_variance.exp()).sum()
        return again, functional.binary_cross_entropy(again, x, reduction="sum") + apart
