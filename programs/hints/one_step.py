"""Healthy programs of one step or one call, as README's first snippet traces them.

Each function makes its models and returns the step. What the step returns, its caller keeps.
"""

import copy
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as programs call it
from torch.utils.checkpoint import checkpoint

from pytracer import trace

Step = Callable[[], Any]
ONE_STEP: dict[str, Callable[[], Step]] = {}


def one_step(make: Callable[[], Step]) -> Callable[[], Step]:
    ONE_STEP[make.__name__] = make
    return make


def traced(name: str, *, stacks: bool = False) -> tuple[trace, Any]:
    """The trace of one such step, and what its caller keeps."""
    torch.manual_seed(0)
    step = ONE_STEP[name]()
    with trace(devices="cpu", stacks=stacks, table=False) as t:
        kept = step()
    return t, kept


def mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inner, outer in itertools.pairwise(widths):
        layers += [nn.Linear(inner, outer), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


# -------------------------------------------------------------------------- one training step


@one_step
def a_classifier() -> Step:
    model, criterion = mlp(64, 256, 10), nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters())
    x, y = torch.randn(32, 64), torch.randint(10, (32,))

    def step() -> None:
        loss = criterion(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


@one_step
def a_triplet_network() -> Step:
    net, criterion = mlp(256, 512, 64), nn.TripletMarginLoss()
    optimizer = torch.optim.Adam(net.parameters(), fused=True)
    batch = [torch.randn(128, 256) for _ in range(3)]

    def step() -> Tensor:
        anchor, positive, negative = batch
        loss: Tensor = criterion(net(anchor), net(positive), net(negative))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step


@one_step
def a_siamese_network_with_its_test() -> Step:
    net = nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 26 * 26, 64))
    head, criterion = nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 1)), nn.BCELoss()
    optimizer = torch.optim.Adadelta([*net.parameters(), *head.parameters()])

    def score(first: Tensor, second: Tensor) -> Tensor:
        both = torch.cat([net(first), net(second)], 1)
        return torch.sigmoid(head(both)).squeeze()

    def step() -> float:
        first, second, y = torch.randn(16, 1, 28, 28), torch.randn(16, 1, 28, 28), torch.ones(16)
        optimizer.zero_grad()
        criterion(score(first, second), y).backward()
        optimizer.step()
        total = 0.0
        with torch.no_grad():
            for _ in range(2):
                x = torch.randn(100, 1, 28, 28)
                total += criterion(score(x, x), torch.ones(100)).item()
        return total

    return step


@one_step
def simclr() -> Step:
    encoder, projector = mlp(256, 512, 512), mlp(512, 512, 128)
    optimizer = torch.optim.SGD([*encoder.parameters(), *projector.parameters()], 0.1)

    def step() -> None:
        x = torch.randn(64, 256)
        z1 = F.normalize(projector(encoder(x + torch.randn_like(x))), dim=1)
        z2 = F.normalize(projector(encoder(x + torch.randn_like(x))), dim=1)
        loss = F.cross_entropy(z1 @ z2.T / 0.1, torch.arange(64))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


@one_step
def byol() -> Step:
    encoder, projector, predictor = mlp(256, 512, 512), nn.Linear(512, 128), nn.Linear(128, 128)
    online = nn.ModuleList([encoder, projector, predictor])
    target = copy.deepcopy(online)
    criterion, optimizer = nn.MSELoss(), torch.optim.Adam(online.parameters(), fused=True)

    def step() -> None:
        views = torch.randn(128, 256), torch.randn(128, 256)
        guesses = [predictor(projector(encoder(view))) for view in views]
        with torch.no_grad():
            wanted = [target[1](target[0](view)) for view in views]
        loss = criterion(guesses[0], wanted[1]) + criterion(guesses[1], wanted[0])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for mine, its in zip(target.parameters(), online.parameters(), strict=True):
                mine.lerp_(its, 0.01)

    return step


@one_step
def dino_with_many_crops() -> Step:
    student, teacher = mlp(128, 512, 256), mlp(128, 512, 256)
    optimizer = torch.optim.AdamW(student.parameters())

    def step() -> None:
        large = [torch.randn(16, 128) for _ in range(2)]
        small = [torch.randn(16, 128) for _ in range(8)]
        with torch.no_grad():
            wanted = [F.softmax(teacher(crop) / 0.04, -1) for crop in large]
        guesses = [F.log_softmax(student(crop) / 0.1, -1) for crop in large + small]
        loss = torch.stack([-(w * g).sum(-1).mean() for w in wanted for g in guesses]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


@one_step
def seq2seq_with_teacher_forcing() -> Step:
    encoder, cell = nn.GRU(64, 64), nn.GRUCell(64, 64)
    out, embedding = nn.Linear(64, 500), nn.Embedding(500, 64)
    all_of_it = nn.ModuleList([encoder, cell, out, embedding])
    optimizer = torch.optim.SGD(all_of_it.parameters(), 0.1)

    def step() -> Tensor:
        source, target = torch.randint(500, (12, 8)), torch.randint(500, (12, 8))
        optimizer.zero_grad()
        hidden = encoder(embedding(source))[1][0]
        loss = torch.zeros(())
        for i in range(11):
            hidden = cell(embedding(target[i]), hidden)
            loss = loss + F.cross_entropy(out(hidden), target[i + 1])
        loss.backward()
        optimizer.step()
        return loss

    return step


@one_step
def a_decoder_with_attention_that_feeds_itself() -> Step:
    cell, attend = nn.LSTMCell(96, 64), nn.Linear(128, 1)
    out, embedding = nn.Linear(64, 200), nn.Embedding(200, 32)
    all_of_it = nn.ModuleList([cell, attend, out, embedding])
    optimizer = torch.optim.Adam(all_of_it.parameters())

    def step() -> float:
        memory, target = torch.randn(16, 20, 64), torch.randint(200, (10, 16))
        state = torch.zeros(16, 64), torch.zeros(16, 64)
        word, losses = torch.zeros(16, dtype=torch.long), []
        for i in range(10):
            both = torch.cat([memory, state[0].unsqueeze(1).expand(-1, 20, -1)], -1)
            context = (attend(both).softmax(1) * memory).sum(1)
            state = cell(torch.cat([embedding(word), context], -1), state)
            scores = out(state[0])
            losses.append(F.cross_entropy(scores, target[i]))
            word = scores.argmax(-1)
        loss = torch.stack(losses).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


@one_step
def a_generator_and_its_critic() -> Step:
    maker, critic = mlp(16, 128, 64), nn.Sequential(mlp(64, 128, 1), nn.Sigmoid())
    of_maker, of_critic = (torch.optim.Adam(m.parameters()) for m in (maker, critic))
    criterion = nn.BCELoss()

    def step() -> None:
        critic.zero_grad()
        criterion(critic(torch.randn(64, 64)), torch.ones(64, 1)).backward()
        fake = maker(torch.randn(64, 16))
        criterion(critic(fake.detach()), torch.zeros(64, 1)).backward()
        of_critic.step()
        maker.zero_grad()
        criterion(critic(fake), torch.ones(64, 1)).backward()
        of_maker.step()

    return step


@one_step
def a_gradient_penalty() -> Step:
    critic = mlp(64, 256, 1)
    optimizer = torch.optim.Adam(critic.parameters())

    def step() -> None:
        real, fake = torch.randn(32, 64), torch.randn(32, 64)
        between = (real + torch.rand(32, 1) * (fake - real)).requires_grad_()
        (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).square().mean()
        loss = critic(fake).mean() - critic(real).mean() + 10 * penalty
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


@one_step
def accumulation_over_eight_batches() -> Step:
    model, optimizer_of = mlp(64, 512, 10), torch.optim.AdamW
    optimizer = optimizer_of(model.parameters())

    def step() -> list[float]:
        losses = []
        for _ in range(8):
            loss = F.cross_entropy(model(torch.randn(32, 64)), torch.randint(10, (32,))) / 8
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        return losses

    return step


@one_step
def losses_of_five_tasks() -> Step:
    body = mlp(64, 256, 256)
    heads = nn.ModuleList([nn.Linear(256, 32) for _ in range(5)])
    optimizer = torch.optim.Adam([*body.parameters(), *heads.parameters()])

    def step() -> list[float]:
        x = body(torch.randn(64, 64))
        losses = [F.cross_entropy(head(x), torch.randint(32, (64,))) for head in heads]
        torch.stack(losses).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return [loss.item() for loss in losses]

    return step


@one_step
def a_detector_with_three_heads() -> Step:
    parts = nn.ModuleDict(
        {
            "backbone": nn.Sequential(nn.Conv2d(3, 32, 3, 2, 1), nn.ReLU()),
            "neck": nn.Conv2d(32, 32, 1),
            "classes": nn.Conv2d(32, 80, 1),
            "boxes": nn.Conv2d(32, 4, 1),
            "objects": nn.Conv2d(32, 1, 1),
        }
    )
    optimizer = torch.optim.SGD(parts.parameters(), 0.1)

    def step() -> None:
        features = parts["neck"](parts["backbone"](torch.randn(2, 3, 128, 128)))
        results = [parts[name](features) for name in ("classes", "boxes", "objects")]
        loss = torch.stack([result.square().mean() for result in results]).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


@one_step
def a_step_of_distillation() -> Step:
    student, teacher = mlp(64, 256, 100), mlp(64, 1024, 100)
    optimizer = torch.optim.AdamW(student.parameters())

    def step() -> None:
        x = torch.randn(64, 64)
        with torch.no_grad():
            wanted = F.softmax(teacher(x) / 2, -1)
        F.kl_div(F.log_softmax(student(x) / 2, -1), wanted, reduction="batchmean").backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@one_step
def a_step_of_ppo_with_four_epochs() -> Step:
    policy, value = mlp(16, 64, 4), mlp(16, 64, 1)
    optimizer = torch.optim.Adam([*policy.parameters(), *value.parameters()])

    def step() -> None:
        states, actions, old = [], [], []
        with torch.no_grad():
            for _ in range(16):
                state = torch.randn(8, 16)
                chosen = torch.distributions.Categorical(logits=policy(state))
                action = chosen.sample()
                states.append(state)
                actions.append(action)
                old.append(chosen.log_prob(action))
        seen, did, before = torch.cat(states), torch.cat(actions), torch.cat(old)
        for _ in range(4):
            new = torch.distributions.Categorical(logits=policy(seen)).log_prob(did)
            loss = -(new - before).exp().mean() + value(seen).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return step


@one_step
def a_step_of_dqn() -> Step:
    policy, target = mlp(16, 128, 4), mlp(16, 128, 4)
    optimizer = torch.optim.AdamW(policy.parameters())

    def step() -> None:
        state, action = torch.randn(128, 16), torch.randint(4, (128, 1))
        with torch.no_grad():
            best = target(torch.randn(128, 16)).max(1).values
        loss = F.smooth_l1_loss(policy(state).gather(1, action).squeeze(), 0.99 * best)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(policy.parameters(), 100)
        optimizer.step()

    return step


@one_step
def reinforce_over_an_episode() -> Step:
    policy = mlp(16, 64, 4)
    optimizer = torch.optim.Adam(policy.parameters())

    def step() -> None:
        chances = []
        for _ in range(20):
            chosen = torch.distributions.Categorical(logits=policy(torch.randn(1, 16)))
            chances.append(chosen.log_prob(chosen.sample()))
        loss = -(torch.cat(chances) * torch.randn(20)).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


@one_step
def inner_steps_of_maml() -> Step:
    model = mlp(16, 64, 1)
    optimizer = torch.optim.Adam(model.parameters())

    def step() -> None:
        outer = torch.zeros(())
        for _task in range(4):
            weights = dict(model.named_parameters())
            for _ in range(3):
                guess = torch.func.functional_call(model, weights, (torch.randn(16, 16),))
                grads = torch.autograd.grad(
                    guess.square().mean(), list(weights.values()), create_graph=True
                )
                weights = {
                    name: weight - 0.1 * grad
                    for (name, weight), grad in zip(weights.items(), grads, strict=True)
                }
            guess = torch.func.functional_call(model, weights, (torch.randn(16, 16),))
            outer = outer + guess.square().mean()
        optimizer.zero_grad()
        outer.backward()
        optimizer.step()

    return step


@one_step
def layers_checkpointed_in_a_loop() -> Step:
    layers = nn.ModuleList([mlp(128, 512, 128) for _ in range(6)])
    optimizer = torch.optim.AdamW(layers.parameters())

    def step() -> None:
        x = torch.randn(64, 128, requires_grad=True)
        for layer in layers:
            x = checkpoint(layer, x, use_reentrant=False)
        x.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@one_step
def a_step_of_diffusion() -> Step:
    unet = nn.Sequential(nn.Conv2d(4, 32, 3, 1, 1), nn.SiLU(), nn.Conv2d(32, 3, 3, 1, 1))
    optimizer = torch.optim.AdamW(unet.parameters())

    def step() -> None:
        x, noise = torch.randn(8, 3, 32, 32), torch.randn(8, 3, 32, 32)
        t = torch.rand(8, 1, 1, 1)
        noisy = (1 - t) * x + t * noise
        guess = unet(torch.cat([noisy, t.expand(-1, 1, 32, 32)], 1))
        F.mse_loss(guess, noise).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@one_step
def a_variational_autoencoder() -> Step:
    encoder, decoder = mlp(128, 256, 64), mlp(32, 256, 128)
    optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()])

    def step() -> None:
        x = torch.randn(64, 128)
        mean, log_variance = encoder(x).chunk(2, -1)
        z = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        spread = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum()
        loss = F.mse_loss(decoder(z), x, reduction="sum") + spread
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


@one_step
def training_by_hand() -> Step:
    model = mlp(64, 256, 1)

    def step() -> None:
        for _ in range(4):
            model(torch.randn(32, 64)).square().mean().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None

    return step


@one_step
def a_physics_informed_network() -> Step:
    model = mlp(2, 64, 64, 1)
    optimizer = torch.optim.Adam(model.parameters())

    def step() -> None:
        points = torch.rand(256, 2, requires_grad=True)
        u = model(points)
        (first,) = torch.autograd.grad(u.sum(), points, create_graph=True)
        (second,) = torch.autograd.grad(first[:, 0].sum(), points, create_graph=True)
        loss = (first[:, 1] - second[:, 0]).square().mean() + model(
            torch.rand(64, 2)
        ).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


@one_step
def a_step_of_lbfgs() -> Step:
    model = mlp(32, 64, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=8)
    x = torch.randn(64, 32)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(x).square().mean()
        loss.backward()
        return loss

    return lambda: optimizer.step(closure)


@one_step
def truncated_backward_through_time() -> Step:
    cell, head = nn.LSTMCell(32, 64), nn.Linear(64, 32)
    optimizer = torch.optim.Adam([*cell.parameters(), *head.parameters()])

    def step() -> tuple[Tensor, Tensor]:
        state = torch.zeros(16, 64), torch.zeros(16, 64)
        loss = torch.zeros(())
        for x in torch.randn(12, 16, 32):
            state = cell(x, state)
            loss = loss + (head(state[0]) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return state[0].detach(), state[1].detach()

    return step


@one_step
def a_cached_gradient_of_large_batches() -> Step:
    model = mlp(64, 512, 32)
    optimizer = torch.optim.Adam(model.parameters())

    def step() -> None:
        chunks = torch.randn(128, 64).chunk(8)
        with torch.no_grad():
            found = [model(chunk) for chunk in chunks]
        leaves = [each.detach().requires_grad_() for each in found]
        z = F.normalize(torch.cat(leaves), dim=-1)
        F.cross_entropy(z @ z.T / 0.1, torch.arange(128)).backward()
        for chunk, leaf in zip(chunks, leaves, strict=True):
            torch.autograd.backward(model(chunk), leaf.grad)
        optimizer.step()
        optimizer.zero_grad()

    return step


# -------------------------------------------------------------------------- one call, no training


@one_step
def a_forward_whose_backward_follows_later() -> Step:
    net, criterion = mlp(256, 512, 64), nn.TripletMarginLoss()
    return lambda: criterion(*(net(torch.randn(64, 256)) for _ in range(3)))


@one_step
def many_crops_whose_backward_follows_later() -> Step:
    net = mlp(128, 512, 64)

    def step() -> Tensor:
        return torch.stack([net(torch.randn(16, 128)) for _ in range(10)]).var(0).sum()

    return step


@one_step
def losses_of_micro_batches_whose_backward_follows_later() -> Step:
    net = mlp(128, 512, 64)

    def step() -> list[Tensor]:
        losses = []
        for _ in range(8):
            losses.append(net(torch.randn(16, 128)).square().mean())
        return losses

    return step


@one_step
def a_pipeline_of_five_modules() -> Step:
    backbone = nn.Sequential(nn.Conv2d(3, 32, 3, 2, 1), nn.ReLU())
    neck = nn.Conv2d(32, 32, 1)
    heads = {name: nn.Conv2d(32, size, 1) for name, size in (("class", 80), ("box", 4), ("o", 1))}

    def step() -> dict[str, Tensor]:
        with torch.no_grad():
            features = neck(backbone(torch.randn(2, 3, 128, 128)))
            return {name: head(features) for name, head in heads.items()}

    return step


@one_step
def embeddings_of_a_corpus() -> Step:
    model = mlp(128, 512, 256).eval()

    def step() -> list[Tensor]:
        found = []
        with torch.no_grad():
            for _ in range(12):
                found.append(model(torch.randn(64, 128)))
        return found

    return step


@one_step
def embeddings_of_a_corpus_in_one_tensor() -> Step:
    model = mlp(128, 512, 256).eval()

    def step() -> Tensor:
        with torch.inference_mode():
            return torch.cat([model(torch.randn(64, 128)) for _ in range(12)])

    return step


@one_step
def an_accuracy() -> Step:
    model = mlp(64, 512, 10).eval()

    def step() -> float:
        right = 0
        with torch.no_grad():
            for _ in range(10):
                x, y = torch.randn(64, 64), torch.randint(10, (64,))
                right += int((model(x).argmax(-1) == y).sum())
        return right / 640

    return step


@one_step
def predictions_and_labels_for_a_metric() -> Step:
    model = mlp(64, 512, 10).eval()

    def step() -> tuple[Tensor, Tensor]:
        guesses, labels = [], []
        with torch.no_grad():
            for _ in range(10):
                guesses.append(model(torch.randn(256, 64)).softmax(-1))
                labels.append(torch.randint(10, (256,)))
        return torch.cat(guesses), torch.cat(labels)

    return step


@one_step
def greedy_decoding() -> Step:
    embedding, body, head = nn.Embedding(100, 64), nn.GRUCell(64, 64), nn.Linear(64, 100)

    def step() -> Tensor:
        word, state, words = torch.zeros(8, dtype=torch.long), torch.zeros(8, 64), []
        with torch.no_grad():
            for _ in range(20):
                state = body(embedding(word), state)
                word = head(state).argmax(-1)
                words.append(word)
        return torch.stack(words)

    return step


@one_step
def decoding_that_returns_its_cache() -> Step:
    attention = nn.MultiheadAttention(64, 4, batch_first=True).eval()

    def step() -> list[Tensor]:
        keys = [torch.randn(2, 4, 64)]
        with torch.inference_mode():
            for _ in range(12):
                past = torch.cat(keys, 1)
                keys.append(attention(past[:, -1:], past, past)[0])
        return keys

    return step


@one_step
def dropout_at_test_time() -> Step:
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Dropout(), nn.Linear(512, 128)).train()
    x = torch.randn(128, 64)

    def step() -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            samples = torch.stack([model(x) for _ in range(16)])
        return samples.mean(0), samples.var(0)

    return step


@one_step
def sampling_that_keeps_the_path() -> Step:
    model = mlp(64, 256, 64)

    def step() -> list[Tensor]:
        x = torch.randn(64, 64)
        path = [x]
        with torch.no_grad():
            for _ in range(10):
                x = x - 0.1 * model(x)
                path.append(x)
        return path

    return step


@one_step
def an_image_in_overlapping_windows() -> Step:
    model = nn.Conv2d(3, 8, 3, padding=1)

    def step() -> Tensor:
        image = torch.randn(1, 3, 96, 96)
        total, count = torch.zeros(1, 8, 96, 96), torch.zeros(1, 1, 96, 96)
        with torch.no_grad():
            for top in range(0, 65, 16):
                window = image[..., top : top + 32, :]
                total[..., top : top + 32, :] += model(window)
                count[..., top : top + 32, :] += 1
        return total / count

    return step


@one_step
def an_ensemble() -> Step:
    models = [mlp(64, 256, 10) for _ in range(5)]
    x = torch.randn(256, 64)

    def step() -> list[Tensor]:
        with torch.no_grad():
            return [model(x).softmax(-1) for model in models]

    return step


@one_step
def features_of_every_layer() -> Step:
    model = mlp(64, 256, 256, 256, 64)

    def step() -> list[Tensor]:
        found: list[Tensor] = []
        with torch.no_grad():
            x = torch.randn(64, 64)
            for layer in model:
                x = layer(x)
                found.append(x)
        return found

    return step


@one_step
def importance_by_gradients_of_the_input() -> Step:
    model = mlp(64, 256, 10)

    def step() -> list[Tensor]:
        maps = []
        for _ in range(5):
            x = torch.randn(16, 64, requires_grad=True)
            (slope,) = torch.autograd.grad(model(x).max(-1).values.sum(), x)
            maps.append(slope.abs())
        return maps

    return step


@one_step
def an_image_that_is_optimized() -> Step:
    model = mlp(256, 128, 10).requires_grad_(False)

    def step() -> Tensor:
        image = torch.randn(4, 256, requires_grad=True)
        for _ in range(6):
            (slope,) = torch.autograd.grad(model(image)[:, 0].sum(), image)
            image = (image + 0.1 * slope).detach().requires_grad_()
        return image

    return step
