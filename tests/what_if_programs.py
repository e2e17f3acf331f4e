"""Training steps whose memory follows the batch in many ways, for predictions of another batch.

Each is a function of its random choices that returns a function of the batch: the loss of one step.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from pytracer import trace

WIDTH = 24
Loss = Callable[[int], Tensor]


@dataclass
class Made:
    """A model and its loss for a batch."""

    model: nn.Module
    loss: Loss


def _mlp(depth: int = 2) -> nn.Module:
    layers = [layer for _ in range(depth) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    return nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH))


class Called(nn.Module):
    """A model whose forward is a function of its inputs and a body."""

    def __init__(self, forward: Callable[..., Tensor], body: nn.Module | None = None) -> None:
        super().__init__()
        self.body = _mlp() if body is None else body
        self._forward = forward

    def forward(self, *given: Tensor) -> Tensor:
        return self._forward(self.body, *given)


def plain(random: Random) -> Made:
    model = _mlp(random.randint(1, 4))
    return Made(model, lambda batch: model(torch.randn(batch, WIDTH)).square().mean())


def chunked_loss(random: Random) -> Made:
    """The head and the loss see so many rows at once."""
    rows, kept, rerun = random.randint(2, 40), random.random() < 0.5, random.random() < 0.5
    head = nn.Linear(WIDTH, 400)

    def of(part: Tensor) -> Tensor:
        return functional.cross_entropy(head(part), torch.zeros(len(part), dtype=torch.long))

    def forward(body: nn.Module, x: Tensor) -> Tensor:
        losses = [
            checkpoint(of, part, use_reentrant=False) if rerun else of(part)
            for part in body(x).split(rows)
        ]
        return torch.stack(losses).sum() if kept else sum(losses, torch.zeros(()))

    model = Called(forward)
    model.head = head
    return Made(model, lambda batch: model(torch.randn(batch, WIDTH)))


def loop_over_chunks(random: Random) -> Made:
    """Chunks are made one after the other; their results are kept or summed."""
    rows, kept = random.randint(2, 20), random.random() < 0.5

    def forward(body: nn.Module, x: Tensor) -> Tensor:
        parts = [body(part) for part in x.split(rows)]
        return torch.cat(parts) if kept else torch.stack([part.sum() for part in parts])

    model = Called(forward)
    return Made(model, lambda batch: model(torch.randn(batch, WIDTH)).square().mean())


def without_gradient_in_chunks(random: Random) -> Made:
    """A frozen part runs in chunks that nothing keeps."""
    rows = random.randint(2, 20)
    frozen = nn.Linear(WIDTH, 800).requires_grad_(False)

    def forward(body: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            seen = torch.cat([frozen(part).mean(1, keepdim=True) for part in x.split(rows)])
        return body(x + seen)

    model = Called(forward)
    model.frozen = frozen
    return Made(model, lambda batch: model(torch.randn(batch, WIDTH)).square().mean())


def small_steps_inside(random: Random) -> Made:
    """A batch above a bound is trained in parts, each with its own backward."""
    rows = random.randint(2, 30)
    model = _mlp()

    def loss(batch: int) -> Tensor:
        parts = torch.randn(batch, WIDTH).split(rows)
        for part in parts[:-1]:
            model(part).square().mean().backward()
        return model(parts[-1]).square().mean()

    return Made(model, loss)


def padded(random: Random) -> Made:
    """Rows are padded to a multiple."""
    multiple = random.choice([2, 3, 4, 8, 16, 32])

    def forward(body: nn.Module, x: Tensor) -> Tensor:
        return body(functional.pad(x, (0, 0, 0, -len(x) % multiple)))

    model = Called(forward)
    return Made(model, lambda batch: model(torch.randn(batch, WIDTH)).square().mean())


def capped(random: Random) -> Made:
    """No more rows than a bound go on."""
    most = random.randint(2, 40)
    model = Called(lambda body, x: body(x[:most]))
    return Made(model, lambda batch: model(torch.randn(batch, WIDTH)).square().mean())


def capacity(random: Random) -> Made:
    """Each expert takes its share of the rows, rounded up."""
    experts, factor = random.randint(2, 5), random.choice([1.0, 1.25, 1.5])
    all_of_them = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(experts))

    def forward(body: nn.Module, x: Tensor) -> Tensor:
        share = min(math.ceil(factor * len(x) / experts), len(x))
        scores = body(x)[:, :experts]
        taken = [x[scores[:, i].topk(share).indices] for i in range(experts)]
        return torch.stack([all_of_them[i](part).sum() for i, part in enumerate(taken)])

    model = Called(forward)
    model.experts = all_of_them
    return Made(model, lambda batch: model(torch.randn(batch, WIDTH)).sum())


def table(random: Random) -> Made:
    """A table of constant size is made in each step."""
    rows = random.choice([10, 100, 400])

    def forward(body: nn.Module, x: Tensor) -> Tensor:
        made = torch.arange(rows * WIDTH, dtype=torch.float32).reshape(rows, WIDTH).sin()
        return body(x) + made[: len(x)].mean(0)

    model = Called(forward)
    return Made(model, lambda batch: model(torch.randn(batch, WIDTH)).square().mean())


def pairs(random: Random) -> Made:
    """A contrastive loss: every row against every other."""
    model = Called(lambda body, x: body(x) @ body(x).T)
    return Made(
        model,
        lambda batch: functional.cross_entropy(
            model(torch.randn(batch, WIDTH)), torch.arange(batch)
        ),
    )


def pairs_in_a_loop(random: Random) -> Made:
    """The same row by row, so both the number of blocks and their sizes grow."""

    def forward(body: nn.Module, x: Tensor) -> Tensor:
        y = body(x)
        return torch.stack([(y - row).square().sum() for row in y])

    model = Called(forward)
    return Made(model, lambda batch: model(torch.randn(batch, WIDTH)).mean())


def row_by_row(random: Random) -> Made:
    model = Called(lambda body, x: torch.stack([body(row) for row in x]))
    return Made(model, lambda batch: model(torch.randn(batch, WIDTH)).square().mean())


def attention(random: Random) -> Made:
    length = random.choice([4, 8, 16])
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 48, batch_first=True, dropout=0.1)
    return Made(layer, lambda batch: layer(torch.randn(batch, length, WIDTH)).square().mean())


def convolution(random: Random) -> Made:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(128, 5),
    )
    size = random.choice([8, 12])
    return Made(model, lambda batch: model(torch.randn(batch, 3, size, size)).square().mean())


def recurrent(random: Random) -> Made:
    layer = random.choice([nn.LSTM, nn.GRU])(WIDTH, WIDTH, 2, batch_first=True)
    return Made(layer, lambda batch: layer(torch.randn(batch, 6, WIDTH))[0].square().mean())


def graph(random: Random) -> Made:
    """The batch is one of nodes; edges follow it, or not."""
    per_node, extra = random.randint(1, 4), random.choice([0, 0, 7])
    lines = Random(random.random())

    def forward(body: nn.Module, x: Tensor, edges: Tensor) -> Tensor:
        messages = body(x)[edges[0]]
        return torch.zeros_like(x).index_add(0, edges[1], messages)

    def loss(batch: int) -> Tensor:
        count = batch * per_node + (lines.randint(1, extra * batch) if extra else 0)
        edges = torch.randint(batch, (2, count))
        return model(torch.randn(batch, WIDTH), edges).square().mean()

    model = Called(forward)
    return Made(model, loss)


def remainder(random: Random) -> Made:
    """A set of rows is gone through in batches, whose last one is smaller."""
    rows = random.randint(60, 200)
    model, left = _mlp(), [rows]

    def loss(batch: int) -> Tensor:
        now = min(batch, left[0]) or batch
        left[0] = (left[0] - now) or rows
        return model(torch.randn(now, WIDTH)).square().mean()

    return Made(model, loss)


def ragged(random: Random) -> Made:
    """Each batch is as long as its longest row."""
    lengths = Random(random.random())
    model = _mlp()
    return Made(
        model,
        lambda batch: (
            model(torch.randn(batch, max(lengths.randint(2, 30) for _ in range(batch)), WIDTH))
            .square()
            .mean()
        ),
    )


def chosen_rows(random: Random) -> Made:
    """How many rows go on depends on their values."""
    model = Called(lambda body, x: body(x[x[:, 0] > 0.2]))
    return Made(model, lambda batch: model(torch.randn(batch, WIDTH)).square().sum())


PROGRAMS: tuple[Callable[[Random], Made], ...] = (
    plain,
    chunked_loss,
    loop_over_chunks,
    without_gradient_in_chunks,
    small_steps_inside,
    padded,
    capped,
    capacity,
    table,
    pairs,
    pairs_in_a_loop,
    row_by_row,
    attention,
    convolution,
    recurrent,
    graph,
    remainder,
    ragged,
    chosen_rows,
)


def recorded(program: Callable[[Random], Made], seed: int, batch: int) -> trace:
    """Two steps of the program with this batch; what is random depends on the seed alone."""
    torch.manual_seed(seed)
    made = program(Random(seed))
    optimizer = torch.optim.Adam(made.model.parameters(), foreach=False)
    with trace(made.model, optimizer, devices="cpu", table=False) as t:
        for _ in range(2):
            made.loss(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    return t
