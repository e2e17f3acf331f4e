"""Healthy programs, by methods of training: each keeps only what its method needs."""

import copy
import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import SWALR, AveragedModel

from programs.hints.healthy import WIDTH, Work, healthy
from programs.hints.kept import HEALTHY
from pytracer import trace

__all__ = ["HEALTHY"]
ROWS, WORDS = 128, 200


def mlp(*widths: int) -> nn.Sequential:
    """Linear layers with ReLU between them."""
    layers: list[nn.Module] = []
    for one, two in itertools.pairwise(widths):
        layers += [nn.Linear(one, two), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def a_classifier() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    """A model of ten classes, and what trains it."""
    torch.manual_seed(0)
    model = mlp(WIDTH, 256, 10)
    return model, torch.optim.SGD(model.parameters(), 0.1)


def run(step: Callable[[], object], *targets: Any, steps: int = 6) -> trace:
    """So many steps under a trace."""
    with trace(*targets, stacks=True, devices="cpu", table=False) as t:
        for _ in range(steps):
            step()
    return t


def learn(loss: Tensor, optimizer: torch.optim.Optimizer) -> None:
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


class Words(nn.Module):
    """A small language model."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 128, dropout=0.0, batch_first=True)
        self.body, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        out: Tensor = self.head(self.body(self.embedding(tokens), mask=mask))
        return out

    def chances(self, tokens: Tensor) -> Tensor:
        """The log-probability of each sequence."""
        logits = self(tokens[:, :-1]).log_softmax(-1)
        return logits.gather(-1, tokens[:, 1:, None]).squeeze(-1).sum(-1)


@healthy
def dqn_with_prioritized_replay(_: Path) -> trace:
    torch.manual_seed(0)
    policy, target = mlp(16, 128, 4), mlp(16, 128, 4)
    optimizer, tree = torch.optim.Adam(policy.parameters()), torch.zeros(2048)
    memory = torch.zeros(2048, 33)
    steps = itertools.count()

    def step() -> None:
        at = next(steps) * 64
        with torch.no_grad():
            memory[at : at + 64] = torch.randn(64, 33)
            tree[at : at + 64] = tree.max().clamp(min=1)
        rows = torch.multinomial(tree, 64)
        state, after, reward = memory[rows].split((16, 16, 1), 1)
        with torch.no_grad():
            wanted = reward[:, 0] + 0.9 * target(after).max(-1).values
        error = policy(state)[:, 0] - wanted
        learn(error.square().mean(), optimizer)
        tree[rows] = error.detach().abs()

    return run(step, policy, target, optimizer, steps=12)


@healthy
def actor_and_critic_with_soft_updates(_: Path) -> trace:
    torch.manual_seed(0)
    actor, critic = mlp(16, 64, 4), mlp(20, 64, 1)
    late = copy.deepcopy(critic).requires_grad_(requires_grad=False)
    first, second = (torch.optim.Adam(each.parameters()) for each in (actor, critic))

    def step() -> None:
        state = torch.randn(ROWS, 16)
        with torch.no_grad():
            wanted = late(torch.cat([state, actor(state)], 1))
        given = torch.cat([state, torch.randn(ROWS, 4)], 1)
        learn(nn.functional.mse_loss(critic(given), wanted), second)
        learn(-critic(torch.cat([state, actor(state)], 1)).mean(), first)
        with torch.no_grad():
            for slow, fast in zip(late.parameters(), critic.parameters(), strict=True):
                slow.lerp_(fast, 0.01)

    return run(step, actor, critic, late, first, second)


@healthy
def ppo_with_rollouts(_: Path) -> trace:
    torch.manual_seed(0)
    policy = mlp(16, 64, 5)
    optimizer = torch.optim.Adam(policy.parameters())
    with trace(policy, optimizer, stacks=True, devices="cpu", table=False) as t:
        for _rollout in range(4):
            rollout = []
            with torch.no_grad():
                for _ in range(16):
                    state = torch.randn(8, 16)
                    out = policy(state)
                    rollout.append((state, out[:, :4].log_softmax(-1), out[:, 4]))
            states, chances, values = (torch.cat(each) for each in zip(*rollout, strict=True))
            for _epoch in range(3):
                for rows in torch.randperm(len(states)).split(32):
                    out = policy(states[rows])
                    ratio = (out[:, :4].log_softmax(-1) - chances[rows]).exp()
                    learn(
                        -ratio.mean() + nn.functional.mse_loss(out[:, 4], values[rows] + 1),
                        optimizer,
                    )
    return t


@healthy
def beam_search_after_each_epoch(_: Path) -> trace:
    torch.manual_seed(0)
    model = Words()
    optimizer = torch.optim.AdamW(model.parameters())

    def search() -> list[int]:
        beams = [(0.0, torch.zeros(1, 1, dtype=torch.long))]
        for _ in range(6):
            found = []
            for score, tokens in beams:
                best = model(tokens)[0, -1].log_softmax(-1).topk(3)
                for value, word in zip(best.values, best.indices, strict=True):
                    found.append((score + value.item(), torch.cat([tokens, word.view(1, 1)], 1)))
            beams = sorted(found, key=lambda beam: -beam[0])[:3]
        return [int(word) for word in beams[0][1][0]]

    with trace(model, optimizer, stacks=True, devices="cpu", table=False) as t:
        for _epoch in range(3):
            for _ in range(3):
                tokens = torch.randint(WORDS, (8, 17))
                learn(-model.chances(tokens).mean(), optimizer)
            with torch.no_grad():
                assert len(search()) == 7
    return t


@healthy
def dpo_with_a_reference(_: Path) -> trace:
    torch.manual_seed(0)
    model = Words()
    reference = copy.deepcopy(model).eval().requires_grad_(requires_grad=False)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        good, bad = torch.randint(WORDS, (4, 17)), torch.randint(WORDS, (4, 17))
        both = torch.cat([good, bad])
        with torch.no_grad():
            base = reference.chances(both)
        better, worse = (model.chances(both) - base).chunk(2)
        learn(-nn.functional.logsigmoid(0.1 * (better - worse)).mean(), optimizer)

    return run(step, model, reference, optimizer)


@healthy
def grpo_with_groups_of_samples(_: Path) -> trace:
    torch.manual_seed(0)
    model = Words()
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        tokens = torch.randint(WORDS, (8, 1))
        with torch.no_grad():
            for _ in range(8):
                tokens = torch.cat([tokens, model(tokens)[:, -1].softmax(-1).multinomial(1)], 1)
            old = model.chances(tokens)
            reward = (tokens % 2).float().mean(-1)
            advantage = (reward - reward.mean()) / (reward.std() + 1e-4)
        for _ in range(2):
            ratio = (model.chances(tokens) - old).exp()
            clipped = ratio.clamp(0.8, 1.2)
            learn(-torch.min(ratio * advantage, clipped * advantage).mean(), optimizer)

    return run(step, model, optimizer)


@healthy
def moco_with_a_queue(_: Path) -> trace:
    torch.manual_seed(0)
    query = mlp(WIDTH, 256, 32)
    key = copy.deepcopy(query).requires_grad_(requires_grad=False)
    optimizer, queue = torch.optim.SGD(query.parameters(), 0.1), torch.randn(32, 1024)
    steps = itertools.count()

    def step() -> None:
        at = next(steps) * 64 % 1024
        x = torch.randn(64, WIDTH)
        q = nn.functional.normalize(query(x), dim=1)
        with torch.no_grad():
            for slow, fast in zip(key.parameters(), query.parameters(), strict=True):
                slow.lerp_(fast, 0.01)
            k = nn.functional.normalize(key(x + 0.1), dim=1)
        same, others = (q * k).sum(1, keepdim=True) / 0.1, q @ queue.clone() / 0.1
        loss = (torch.cat([same, others], 1).logsumexp(1) - same[:, 0]).mean()
        del same, others
        learn(loss, optimizer)
        queue[:, at : at + 64] = k.T

    return run(step, query, key, optimizer)


@healthy
def a_teacher_that_is_an_average(_: Path) -> trace:
    torch.manual_seed(0)
    student = mlp(WIDTH, 256, 10)
    teacher = AveragedModel(student, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.AdamW(student.parameters())

    def step() -> None:
        x = torch.randn(ROWS, WIDTH)
        with torch.no_grad():
            wanted = teacher(x).softmax(-1)
        learn(nn.functional.cross_entropy(student(x + 0.1), wanted), optimizer)
        teacher.update_parameters(student)

    return run(step, student, teacher, optimizer)


@healthy
def weights_that_are_averaged_at_the_end(_: Path) -> trace:
    work = Work()
    average = AveragedModel(work.model)
    slow = SWALR(work.optimizer, 0.01)
    with work.traced(average) as t:
        for step in range(9):
            work.learn(torch.randn(32, WIDTH))
            if step >= 4:
                average.update_parameters(work.model)
                slow.step()
    return t


@healthy
def reptile_over_tasks(_: Path) -> trace:
    work = Work()
    with work.traced() as t:
        for _task in range(5):
            fast = copy.deepcopy(work.model)
            inner = torch.optim.SGD(fast.parameters(), 0.01)
            for _ in range(3):
                x = torch.randn(32, WIDTH)
                learn((fast(x) - x).square().mean(), inner)
            with torch.no_grad():
                for slow, new in zip(work.model.parameters(), fast.parameters(), strict=True):
                    slow.lerp_(new, 0.1)
    return t


@healthy
def a_streaming_network_with_carried_state(_: Path) -> trace:
    torch.manual_seed(0)
    body, head = nn.LSTM(WIDTH, 64, 2, batch_first=True), nn.Linear(64, WIDTH)
    optimizer = torch.optim.Adam([*body.parameters(), *head.parameters()])
    state: Any = None
    with trace(body, head, optimizer, stacks=True, devices="cpu", table=False) as t:
        for x in torch.randn(8, 16, 12, WIDTH):
            out, state = body(x, state)
            state = tuple(each.detach() for each in state)
            learn((head(out) - x).square().mean(), optimizer)
    return t


@healthy
def a_loader_that_fetches_ahead(_: Path) -> trace:
    def ahead(count: int, batches: Iterator[Tensor]) -> Iterator[Tensor]:
        ready = deque(itertools.islice(batches, count))
        while ready:
            yield ready.popleft()
            ready.extend(itertools.islice(batches, 1))

    work = Work()
    with work.traced() as t:
        for x in ahead(3, (torch.randn(ROWS, WIDTH) for _ in range(9))):
            work.learn(x)
    return t


@healthy
def norms_of_activations_in_a_log(_: Path) -> trace:
    work, log = Work(), list[dict[str, float]]()
    now = dict[str, float]()
    for name, layer in work.model.named_modules():
        layer.register_forward_hook(
            lambda _m, _x, out, name=name: now.__setitem__(name, out.norm().item())
        )
    with work.traced() as t:
        for _step in range(8):
            work.learn(torch.randn(ROWS, WIDTH))
            log.append(dict(now))
    assert len(log) == 8
    return t


class LowRank(nn.Module):
    """A frozen layer and two thin ones, which are merged now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(requires_grad=False)
        self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.up(self.down(x))
        return out

    @torch.no_grad()
    def merge(self) -> None:
        self.base.weight += self.up.weight @ self.down.weight
        nn.init.zeros_(self.up.weight)


@healthy
def thin_layers_that_are_merged(_: Path) -> trace:
    torch.manual_seed(0)
    model = nn.Sequential(LowRank(), nn.ReLU(), LowRank())
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    with trace(model, optimizer, stacks=True, devices="cpu", table=False) as t:
        for step in range(9):
            x = torch.randn(ROWS, WIDTH)
            learn((model(x) - x).square().mean(), optimizer)
            if step % 3 == 2:
                model[0].merge()
                model[2].merge()
                optimizer.state.clear()
    return t


@healthy
def progressive_layers(_: Path) -> trace:
    """A network that gets a layer now and then, and a new optimizer with it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    with trace(model, stacks=True, devices="cpu", table=False) as t:
        for _stage in range(4):
            model.append(nn.Linear(WIDTH, WIDTH))
            optimizer = torch.optim.Adam(model.parameters())
            for _ in range(4):
                x = torch.randn(ROWS, WIDTH)
                learn((model(x) - x).square().mean(), optimizer)
    return t


@healthy
def domains_with_a_reversed_gradient(_: Path) -> trace:
    torch.manual_seed(0)
    body, label, domain = mlp(WIDTH, 128, 64), nn.Linear(64, 10), nn.Linear(64, 2)
    parts = nn.ModuleList([body, label, domain])
    optimizer = torch.optim.SGD(parts.parameters(), 0.01)

    def step() -> None:
        hidden = body(torch.randn(ROWS, WIDTH))
        turned = 2 * hidden.detach() - hidden
        loss = nn.functional.cross_entropy(label(hidden[:64]), torch.randint(10, (64,)))
        learn(
            loss + nn.functional.cross_entropy(domain(turned), torch.randint(2, (ROWS,))), optimizer
        )

    return run(step, parts, optimizer)


@healthy
def labels_that_the_model_makes(_: Path) -> trace:
    model, optimizer = a_classifier()

    def step() -> None:
        x = torch.randn(ROWS, WIDTH)
        with torch.no_grad():
            sure, label = model(x).softmax(-1).max(-1)
        loss = nn.functional.cross_entropy(
            model(x + 0.1 * torch.randn_like(x)), label, reduction="none"
        )
        learn((loss * (sure > 0.1)).mean(), optimizer)

    return run(step, model, optimizer)


@healthy
def adversarial_examples(_: Path) -> trace:
    model, optimizer = a_classifier()

    def step() -> None:
        x, y = torch.randn(ROWS, WIDTH), torch.randint(10, (ROWS,))
        noise = torch.zeros_like(x)
        for _ in range(3):
            noise.requires_grad_()
            (slope,) = torch.autograd.grad(nn.functional.cross_entropy(model(x + noise), y), noise)
            noise = (noise.detach() + 0.01 * slope.sign()).clamp(-0.1, 0.1)
        learn(nn.functional.cross_entropy(model(x + noise), y), optimizer)

    return run(step, model, optimizer)


@healthy
def two_steps_toward_flat_minima(_: Path) -> trace:
    """Sharpness-aware: a second forward and backward at a point nearby."""
    model, optimizer = a_classifier()

    def step() -> None:
        x, y = torch.randn(ROWS, WIDTH), torch.randint(10, (ROWS,))
        nn.functional.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            moves = [0.05 * p.grad for p in model.parameters() if p.grad is not None]
            for p, move in zip(model.parameters(), moves, strict=True):
                p.add_(move)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            for p, move in zip(model.parameters(), moves, strict=True):
                p.sub_(move)
        optimizer.step()
        optimizer.zero_grad()

    return run(step, model, optimizer)


@healthy
def gradients_of_tasks_that_are_projected(_: Path) -> trace:
    model, optimizer = a_classifier()
    weights = list(model.parameters())

    def step() -> None:
        out = model(torch.randn(ROWS, WIDTH))
        losses = out[:, :5].square().mean(), out[:, 5:].exp().mean()
        one, two = (torch.autograd.grad(loss, weights, retain_graph=True) for loss in losses)
        for weight, first, second in zip(weights, one, two, strict=True):
            weight.grad = first + second - (first * second).sum().clamp(max=0) * second
        optimizer.step()
        optimizer.zero_grad()

    return run(step, model, optimizer)


@healthy
def a_pool_of_images_for_the_critic(_: Path) -> trace:
    """As CycleGAN keeps fifty images of the generator."""
    torch.manual_seed(0)
    random.seed(0)
    maker, critic, pool = mlp(16, 128, WIDTH), mlp(WIDTH, 128, 1), list[Tensor]()
    first, second = (torch.optim.Adam(each.parameters()) for each in (maker, critic))

    def step() -> None:
        fake = maker(torch.randn(8, 16))
        learn(nn.functional.softplus(-critic(fake)).mean(), first)
        for image in fake.detach().split(1):
            pool.append(image.clone())
            if len(pool) > 20:
                pool.pop(random.randrange(len(pool)))
        old = torch.cat(random.sample(pool, 8))
        learn(
            (nn.functional.softplus(critic(old)) + nn.functional.softplus(-critic(old + 1))).mean(),
            second,
        )

    return run(step, maker, critic, first, second, steps=12)


@healthy
def gradients_kept_as_zeros_by_choice(_: Path) -> trace:
    """A captured graph needs gradients at the same addresses; the peak is in the optimizer."""
    torch.manual_seed(0)
    model = mlp(WIDTH, 1024, 10)
    optimizer = torch.optim.Adam(model.parameters())

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        model(torch.randn(4, WIDTH)).square().mean().backward()
        optimizer.step()

    return run(step, model, optimizer)


@healthy
def an_optimizer_with_a_history(_: Path) -> trace:
    """LBFGS keeps its last directions, in flat vectors over all parameters."""
    torch.manual_seed(0)
    model = mlp(WIDTH, 128, WIDTH)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    x = torch.randn(16, WIDTH)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (model(x) - x).square().mean()
        loss.backward()
        return loss

    return run(lambda: optimizer.step(closure), model, optimizer, steps=8)
